"""From a model, a device and a wish to a plan: what fits, how fast each width can be, what to choose."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lampejo.plan.calibrate import Cpu
from lampejo.plan.hardware import RESERVED, Device
from lampejo.plan.precision import Precision
from lampejo.plan.roofline import Model, Seconds, Work, committed, draft_work, seconds, verify_work
from lampejo.plan.sizes import DrafterSizes, Parts, context_bytes, count, drafter_sizes
from lampejo.plan.sources import Drafter, Target
from lampejo.weights.describe import state_bytes

MOST_WIDTH = 15
DEVICE_COUNTS = (1, 2, 4, 8)
GPU_DRAFTER_BITS, CPU_DRAFTER_BITS = 16.0, 8.5
CPU_RESERVED = 0.2  # of this machine's memory: the system, PyTorch, other programs


@dataclass(frozen=True)
class Wish:
    """What is asked for. ``acceptance``: guesses of the tokens committed per step of the drafter's full block;
    ``goal``: tokens per second of one request."""

    context: int
    concurrency: int = 1
    acceptance: tuple[float, ...] = (1.0,)
    routing: str = "independent"
    goal: float | None = None


@dataclass(frozen=True)
class Step:
    """One width. ``tokens``: committed per step, for each guess of the acceptance length."""

    width: int
    work: Work
    verify: Seconds
    draft: Seconds
    tokens: tuple[float, ...]

    @property
    def total(self) -> Seconds:
        return self.verify + self.draft

    @property
    def limits(self) -> list[float]:
        """Tokens per second of one request that no engine can exceed, for each guess."""
        return [tokens / self.total.limit for tokens in self.tokens]

    @property
    def expected(self) -> list[float]:
        """Those that a good engine should reach."""
        return [tokens / self.total.expected for tokens in self.tokens]


@dataclass(frozen=True)
class Way:
    """A precision on a number of devices: the bytes that each device holds by purpose, and the steps."""

    precision: Precision
    num_devices: int
    memory: dict[str, float]
    available: float
    steps: tuple[Step, ...]

    @property
    def needed(self) -> float:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.needed <= self.available

    def best(self, guess: int) -> Step:
        """The width that should be fastest for one guess of the acceptance length."""
        return max(self.steps, key=lambda step: step.expected[guess])


@dataclass(frozen=True)
class Plan:
    """``chosen`` is None where nothing fits; ``guess`` is the place of the acceptance length that it was chosen for."""

    target: Target
    drafter: Drafter | None
    wish: Wish
    hardware: Device | Cpu
    parameters: Parts
    sizes: DrafterSizes | None
    ways: tuple[Way, ...]
    chosen: Way | None = None
    guess: int = 0

    @property
    def context_that_fits(self) -> int:
        """Tokens of context that each request can have in the chosen way."""
        if self.chosen is None:
            return 0
        growing = self.chosen.memory["keys and values"] + self.chosen.memory["drafter's context"]
        room = self.chosen.available - self.chosen.needed + growing
        return int(room / growing * self.wish.context)


def make_plan(
    target: Target,
    drafter: Drafter | None,
    hardware: Device | Cpu,
    precisions: Sequence[Precision],
    wish: Wish,
    counts: Sequence[int] = DEVICE_COUNTS,
) -> Plan:
    """``precisions``: the most exact first; ``counts``: numbers of devices to look at, in order.

    Chosen are the fewest devices that should reach the goal for any of the acceptance lengths, for the lowest of them
    and in the most exact precision that does; else, on as few devices as hold the model, what is fastest for the
    middle one.
    """
    wish = replace(wish, acceptance=tuple(sorted(wish.acceptance)) if drafter else (1.0,))
    sizes = None if drafter is None else drafter_sizes(drafter.config)
    plan = Plan(target, drafter, wish, hardware, count(target.config), sizes, ())
    plan = replace(plan, ways=tuple(_way(plan, precision, n) for n in counts for precision in precisions))
    for n in counts:
        for guess in range(len(wish.acceptance)):
            reaching = [way for way in plan.ways if way.num_devices == n and reaches(plan, way, guess)]
            if reaching:
                return replace(plan, chosen=reaching[0], guess=guess)
    middle = (len(wish.acceptance) - 1) // 2
    fitting = [way for way in plan.ways if way.fits]
    fewest = [way for way in fitting if way.num_devices == fitting[0].num_devices]
    chosen = max(fewest, key=lambda way: way.best(middle).expected[middle], default=None)
    return replace(plan, chosen=chosen, guess=middle)


def reaches(plan: Plan, way: Way, guess: int) -> bool:
    """Whether a good engine should reach the goal."""
    return way.fits and plan.wish.goal is not None and way.best(guess).expected[guess] >= plan.wish.goal


def with_routing(plan: Plan, way: Way, routing: str) -> Way:
    """The same way under another assumption about which experts neighbouring tokens share."""
    return _way(replace(plan, wish=replace(plan.wish, routing=routing)), way.precision, way.num_devices)


def _way(plan: Plan, precision: Precision, num_devices: int) -> Way:
    config, wish, hardware, sizes = plan.target.config, plan.wish, plan.hardware, plan.sizes
    model = Model(config, plan.parameters, precision.bytes(plan.parameters), precision.kind)
    tokens = wish.concurrency * wish.context
    # Keys and values are split by heads: more devices than heads keep copies.
    split = max(1 / num_devices, 1 / config.num_kv_heads)
    drafter_split = max(1 / num_devices, 1 / plan.drafter.config.num_kv_heads) if plan.drafter else 0.0
    memory = {
        "weights": model.bytes.total / num_devices,
        "drafter": sizes.total * _drafter_bits(hardware) / 8 / num_devices if sizes else 0.0,
        "keys and values": tokens * context_bytes(config) * split,
        "drafter's context": tokens * sizes.context_bytes * drafter_split if sizes else 0.0,
        "recurrent states": wish.concurrency * state_bytes(config) / num_devices,
    }
    widest = MOST_WIDTH
    if plan.drafter is not None:
        widest = min(widest, plan.drafter.config.max_drafts)
    return Way(
        precision=precision,
        num_devices=num_devices,
        memory=memory,
        available=hardware.memory * (1 - (RESERVED if isinstance(hardware, Device) else CPU_RESERVED)),
        steps=tuple(_step(plan, model, num_devices, width) for width in range(widest + 1)),
    )


def _drafter_bits(hardware: Device | Cpu) -> float:
    return GPU_DRAFTER_BITS if isinstance(hardware, Device) else CPU_DRAFTER_BITS


def _step(plan: Plan, model: Model, num_devices: int, width: int) -> Step:
    wish, hardware, kv_heads = plan.wish, plan.hardware, model.config.num_kv_heads
    work = verify_work(model, wish.concurrency, width, wish.context, wish.routing)
    if isinstance(hardware, Device):
        verify = seconds(work, hardware, num_devices, model.kind, kv_heads)
    else:
        verify = hardware.seconds(work, width + 1)
    draft, tokens = Seconds(0.0, 0.0), (1.0,) * len(wish.acceptance)
    if plan.drafter is not None and plan.sizes is not None and width:
        config = plan.drafter.config
        drafting = draft_work(
            plan.sizes,
            config.num_layers,
            config.block_size,
            model,
            wish.concurrency,
            wish.context,
            _drafter_bits(hardware),
        )
        if isinstance(hardware, Device):
            draft = seconds(drafting, hardware, num_devices, "bf16", config.num_kv_heads)
        else:
            draft = hardware.draft_seconds(drafting, config.block_size)
        tokens = tuple(committed(length, config.max_drafts, width) for length in wish.acceptance)
    return Step(width, work, verify, draft, tokens)

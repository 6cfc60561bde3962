"""A plan for people and as JSON. Every speed is computed, and says so."""

import textwrap
from collections.abc import Sequence
from typing import Any

from lampejo.plan.hardware import BANDWIDTH_SHARE, LAYER_S, RESERVED, SHARED_LAYER_S, Device
from lampejo.plan.planner import Plan, Step, Way, reaches, with_routing
from lampejo.plan.sizes import context_bytes, num_active
from lampejo.terminal import columns, number, table
from lampejo.weights.describe import state_bytes

LINE = 110  # characters of a line of running text


def answer(plan: Plan) -> str:
    """One paragraph: what fits, how fast it can be, what to choose."""
    if plan.chosen is None:
        least = plan.ways[-1]
        return (
            f"{plan.target.name} does not fit: {_told(plan, least)} would need {_gb(least.needed)} of "
            f"{_gb(least.available)} GB each, for {_requests(plan)}. Choose a smaller precision, more devices, a "
            "shorter context, or fewer requests."
        )
    computed = "per request, computed and not measured; in brackets the limit of the hardware, before them what a good "
    return " ".join([*_fits(plan), *_goal(plan), *_choice(plan), f"Speeds are {computed}engine should reach."])


def _fits(plan: Plan) -> list[str]:
    """What one device, or as many as were asked for, can hold."""
    least = plan.ways[0].num_devices
    told = [
        f"{way.precision.name} {'fits' if way.fits else 'does not fit'} ({_gb(way.needed)} of {_gb(way.available)} GB)"
        for way in plan.ways
        if way.num_devices == least
    ]
    where = plan.hardware.name if least == 1 else f"{least} x {plan.hardware.name}"
    return [f"{plan.target.name} on {where}, {_requests(plan)}: {', '.join(told)}."]


def _goal(plan: Plan) -> list[str]:
    """Whether as few devices as were asked for reach the goal."""
    goal, least = plan.wish.goal, plan.ways[0].num_devices
    if goal is None:
        return []
    asked = f"{goal:,.0f} tok/s on {'one device' if least == 1 else f'{least} devices'}:"
    ways = [way for way in plan.ways if way.num_devices == least and way.fits]
    if not ways:
        return [f"{asked} no, nothing fits."]
    if plan.chosen in ways and reaches(plan, plan.chosen, plan.guess):
        return [f"{asked} yes, in {plan.chosen.precision.name}."]
    last = len(plan.wish.acceptance) - 1
    most = max(ways, key=lambda way: way.best(last).expected[last])
    within = max(limit for way in ways for step in way.steps for limit in step.limits) >= goal
    says = "within the limit of the hardware, but more than a good engine should reach" if within else "no"
    return [f"{asked} {says}; the most is {_speed(plan, most, last)} in {most.precision.name}."]


def _choice(plan: Plan) -> list[str]:
    assert plan.chosen is not None
    way, guess = plan.chosen, plan.guess
    step, plain = way.best(guess), way.steps[0]
    how = f"width {step.width}" if step.width else "plain decoding"
    parts = [f"Recommended: {_told(plan, way)}, {how}: {_speed(plan, way, guess)}."]
    parts += [_harder(plan, lower) for lower in reversed(range(guess))]
    if plan.target.config.experts is not None and step.width and plan.wish.routing == "independent":
        other = with_routing(plan, way, "correlated")
        parts.append(f"If neighbouring tokens share experts as was measured elsewhere: {_speed(plan, other, guess)}.")
    if step.width:
        parts.append(f"Plain decoding: {_rates(plain, guess)}.")
    if plan.wish.concurrency > 1:
        parts.append(f"All requests together: {_rate(step.expected[guess] * plan.wish.concurrency)} tok/s.")
    if plan.drafter is None:
        parts.append("No DFlash drafter takes part; the table tells from which acceptance length one would pay.")
    return parts


def _harder(plan: Plan, guess: int) -> str:
    """A lower acceptance length than the one that was chosen for: what it gives, and what would reach the goal."""
    assert plan.chosen is not None
    told = _speed(plan, plan.chosen, guess)
    if not plan.chosen.best(guess).width:
        told = f"At an acceptance length of {plan.wish.acceptance[guess]:g} drafts do not pay"
    if plan.wish.goal is None or not reaches(plan, plan.chosen, plan.guess):
        return f"{told}."
    way = next((way for way in plan.ways if reaches(plan, way, guess)), None)
    takes = "nothing below reaches it" if way is None else f"it takes {_told(plan, way)}"
    return f"{told}; for {plan.wish.goal:,.0f} {takes}."


def _speed(plan: Plan, way: Way, guess: int) -> str:
    """The best of a way for one guess, in words."""
    step = way.best(guess)
    length = f" at an acceptance length of {plan.wish.acceptance[guess]:g}" if plan.drafter and step.width else ""
    return f"{_rates(step, guess)}{length}"


def _rates(step: Step, guess: int) -> str:
    return f"{_rate(step.expected[guess])} tok/s ({_rate(step.limits[guess])})"


def _rate(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 100 else number(speed)


def _told(plan: Plan, way: Way) -> str:
    name = plan.hardware.name
    return f"{name if way.num_devices == 1 else f'{way.num_devices} x {name}'} in {way.precision.name}"


def _requests(plan: Plan) -> str:
    wish = plan.wish
    many = "one request" if wish.concurrency == 1 else f"{wish.concurrency} requests at once"
    return f"{many} of {wish.context:,} tokens"


def _gb(value: float) -> str:
    return f"{value / 1e9:,.0f}" if value >= 1e10 else f"{value / 1e9:.2g}"


def terminal(plan: Plan) -> str:
    """The answer, what it rests on, and the tables."""
    parts = [textwrap.fill(answer(plan), LINE), table(_facts(plan)), _ways(plan)]
    if plan.chosen is not None:
        parts.append(_steps(plan, plan.chosen))
    parts.append("\n".join(textwrap.fill(f"- {line}", LINE, subsequent_indent="  ") for line in assumptions(plan)))
    return "\n\n".join(parts)


def _facts(plan: Plan) -> list[tuple[str, str]]:
    parameters, config = plan.parameters, plan.target.config
    counts = [("embedding", parameters.embedding), ("head", parameters.head), ("MLPs", parameters.mlp)]
    counts += [("attention and others" if config.delta_net is None else "attention and DeltaNet", parameters.mixers)]
    counts += [("experts", parameters.experts)]
    told = ", ".join(f"{name} {number(value / 1e9)}" for name, value in counts if value)
    per_request = state_bytes(config)
    kept = f"{context_bytes(config):,} bytes per token of context"
    kept += f", and {per_request / 1e6:,.0f} MB of recurrent state" if per_request else ""
    rows = [
        ("sizes", plan.target.source),
        (
            "parameters",
            f"{number(parameters.total / 1e9, 4)} billion, {number(num_active(config, parameters) / 1e9)} active per "
            f"token ({told})",
        ),
        ("a request keeps", kept),
    ]
    if plan.drafter is not None and plan.sizes is not None:
        sizes = plan.sizes
        told = f"{plan.drafter.name}: {number(sizes.total / 1e9)} billion parameters, blocks of "
        told += f"{plan.drafter.config.block_size}, {sizes.context_bytes:,} bytes per token of context"
        rows.append(("drafter", f"{told}; {plan.drafter.source}"))
    if plan.chosen is not None:
        way = plan.chosen
        told = ", ".join(f"{name} {_gb(size)}" for name, size in way.memory.items() if size)
        rows.append(
            ("memory, GB", f"{told}; {_gb(way.needed)} of {_gb(way.available)} that can be used of each device")
        )
        rows.append(
            (
                "context that fits",
                f"{plan.context_that_fits:,} tokens per request; the model knows {config.max_context:,}",
            )
        )
    return rows


def _ways(plan: Plan) -> str:
    heads = ["precision", "devices", "GB each", "width", *_guess_heads(plan)]
    rows = []
    for way in plan.ways:
        row = [way.precision.name, str(way.num_devices), _gb(way.needed)]
        if not way.fits:
            rows.append([*row, "-", *["does not fit"] * len(plan.wish.acceptance)])
            continue
        best = [way.best(guess) for guess in range(len(plan.wish.acceptance))]
        speeds = [_pair(step.expected[guess], step.limits[guess]) for guess, step in enumerate(best)]
        rows.append([*row, "/".join(dict.fromkeys(str(step.width) for step in best)), *speeds])
    return columns(heads, rows)


def _steps(plan: Plan, way: Way) -> str:
    with_experts = plan.target.config.experts is not None
    heads = [f"{way.precision.name}, width", "GB read", *(["experts"] if with_experts else [])]
    heads += ["verify ms", "draft ms", "pays from", *_guess_heads(plan)]
    rows = []
    for step in way.steps:
        row = [str(step.width), number(step.work.bytes / 1e9)]
        row += [f"{step.work.expert_share:.0%}"] if with_experts else []
        draft = _pair(step.draft.expected * 1e3, step.draft.limit * 1e3) if step.draft.limit else "-"
        row += [_pair(step.verify.expected * 1e3, step.verify.limit * 1e3), draft]
        row += [f"{step.total.expected / way.steps[0].total.expected:.2f}"]
        row += [_pair(*pair) for pair in zip(step.expected, step.limits, strict=True)] if _has_speed(plan, step) else []
        rows.append(row)
    return columns(heads, rows)


def _has_speed(plan: Plan, step: Step) -> bool:
    return plan.drafter is not None or not step.width


def _guess_heads(plan: Plan) -> list[str]:
    if plan.drafter is None:
        return ["plain tok/s (limit)"]
    return [f"tok/s at {length:g} (limit)" for length in plan.wish.acceptance]


def _pair(expected: float, limit: float) -> str:
    return f"{_rate(expected)} ({_rate(limit)})"


def assumptions(plan: Plan) -> list[str]:
    """What the figures rest on, in the order of their weight."""
    told = []
    if isinstance(plan.hardware, Device):
        told.append(
            f"limit: bytes over {plan.hardware.bandwidth / 1e12:g} TB/s or operations over the data sheet's dense "
            f"rate, whichever is longer. Expected of a good engine: {BANDWIDTH_SHARE:.0%} of the bandwidth, and "
            f"{LAYER_S * 1e6:.0f} µs more per layer ({SHARED_LAYER_S * 1e6:.0f} on several devices), which fits "
            "published speeds of other engines within a quarter (docs/plan.md). lampejo itself was not measured on "
            "such a device."
        )
        told.append(f"memory: {RESERVED:.0%} of a device is left for activations, graphs and the driver.")
    else:
        told.append(
            f"{plan.hardware.name}: measured just now on layers with random weights, beside whatever else ran; limit: "
            f"the best that was seen, {number(plan.hardware.bandwidth / 1e9)} GB/s and "
            f"{number(plan.hardware.operations / 1e9)} billion operations per second."
        )
    if plan.drafter is not None:
        told.append(
            "acceptance lengths (tokens committed per step of the full block, the target's own included) are guesses: "
            "every draft counts as equally likely to be right, given those before it."
        )
    if plan.target.config.experts is not None:
        told.append(
            "experts: the tokens of a step choose theirs independently, the most that have to be read"
            if plan.wish.routing == "independent"
            else "experts: each further token of a text needs 0.7 times as many new ones as an independent one"
        )
    if plan.chosen is not None:
        told.append(
            f"precision {plan.chosen.precision.name}: {plan.chosen.precision.told}. Drafts never change what the model "
            "says in a precision; the precision may."
        )
    inferred = [("target", plan.target.inferred)]
    inferred += [("drafter", plan.drafter.inferred)] if plan.drafter else []
    told += [f"inferred, not published, of the {of}: {', '.join(what)}" for of, what in inferred if what]
    return told


def as_object(plan: Plan) -> dict[str, Any]:
    """Everything as JSON can hold it; bytes, seconds, tokens per second of one request."""
    config, chosen = plan.target.config, plan.chosen
    found: dict[str, Any] = {
        "answer": answer(plan),
        "model": {
            "name": plan.target.name,
            "architecture": config.architecture,
            "source": plan.target.source,
            "inferred": list(plan.target.inferred),
            "parameters": {**vars(plan.parameters), "total": plan.parameters.total},
            "active_parameters": num_active(config, plan.parameters),
            "kv_bytes_per_token": context_bytes(config),
            "state_bytes_per_request": state_bytes(config),
            "max_context": config.max_context,
        },
        "drafter": None,
        "hardware": _hardware(plan),
        "wish": vars(plan.wish),
        "ways": [_way_object(way) for way in plan.ways],
        "recommended": None,
        "assumptions": assumptions(plan),
    }
    if plan.drafter is not None and plan.sizes is not None:
        found["drafter"] = {
            "name": plan.drafter.name,
            "source": plan.drafter.source,
            "inferred": list(plan.drafter.inferred),
            "block_size": plan.drafter.config.block_size,
            "parameters": plan.sizes.total,
            "context_bytes_per_token": plan.sizes.context_bytes,
        }
    if chosen is not None:
        step = chosen.best(plan.guess)
        found["recommended"] = {
            "precision": chosen.precision.name,
            "devices": chosen.num_devices,
            "width": step.width,
            "acceptance_length": plan.wish.acceptance[plan.guess],
            "tok_per_s": {"expected": step.expected[plan.guess], "limit": step.limits[plan.guess]},
            "context_that_fits": plan.context_that_fits,
        }
    return found


def _hardware(plan: Plan) -> dict[str, Any]:
    hardware = plan.hardware
    told = {"name": hardware.name, "memory_bytes": hardware.memory, "bytes_per_s": hardware.bandwidth}
    if isinstance(hardware, Device):
        return {**told, "measured": False, "operations_per_s": {k: hardware.compute(k) for k in ("bf16", "fp8", "fp4")}}
    return {**told, "measured": True, "operations_per_s": {"int8": hardware.operations}}


def _way_object(way: Way) -> dict[str, Any]:
    return {
        "precision": way.precision.name,
        "devices": way.num_devices,
        "fits": way.fits,
        "memory_bytes": way.memory,
        "available_bytes": way.available,
        "steps": [_step_object(step) for step in way.steps],
    }


def _step_object(step: Step) -> dict[str, Any]:
    def pair(seconds: Any) -> dict[str, float]:
        return {"expected": seconds.expected, "limit": seconds.limit}

    speeds: Sequence[dict[str, float]] = [
        {"committed": tokens, "expected": expected, "limit": limit}
        for tokens, expected, limit in zip(step.tokens, step.expected, step.limits, strict=True)
    ]
    return {
        "width": step.width,
        "bytes": step.work.bytes,
        "flops": step.work.flops,
        "expert_share": step.work.expert_share,
        "verify_s": pair(step.verify),
        "draft_s": pair(step.draft),
        "tok_per_s": speeds,
    }

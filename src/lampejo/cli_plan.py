"""``lampejo plan``: flags into a plan, its tables, its JSON."""

import argparse
import json
from dataclasses import dataclass

from lampejo.errors import UserError
from lampejo.models.config import ModelConfig
from lampejo.plan.calibrate import Cpu, calibrate
from lampejo.plan.hardware import DEVICES, Device
from lampejo.plan.planner import DEVICE_COUNTS, Plan, Wish, make_plan
from lampejo.plan.precision import CPU_PRECISIONS, GPU_PRECISIONS, Precision
from lampejo.plan.report import as_object, terminal
from lampejo.plan.sources import Drafter, Target, find_drafter_for, find_target
from lampejo.sampling import check_number
from lampejo.terminal import status

# Acceptance lengths of chat, mathematical problems and code, as the published speeds of the drafter of
# Qwen3.5-122B-A10B imply them (docs/plan.md); and of what small drafters with blocks below 8 reach.
GUESSES, GUESSES_OF_SMALL_BLOCKS = (5.0, 7.0, 9.0), (1.4, 2.0, 3.0)
DEFAULT_CONTEXT = 4096
GPU_GOAL = 1000.0


@dataclass(frozen=True)
class PlanOptions:
    """What to plan for; ``gpu`` None is this machine's CPU. What is None is chosen by model and device."""

    model: str
    gpu: str | None
    precision: str | None = None
    concurrency: int = 1
    context: int | None = None
    drafter: str = "auto"
    acceptance: tuple[float, ...] | None = None
    devices: int | None = None
    goal: float | None = None
    routing: str = "independent"
    threads: int | None = None
    as_json: bool = False

    def __post_init__(self) -> None:
        if self.gpu is not None and self.gpu not in DEVICES:
            raise UserError(f"--gpu {self.gpu} is not known.", f"Known: {', '.join(DEVICES)}.")
        known = GPU_PRECISIONS if self.gpu else CPU_PRECISIONS
        if self.precision is not None and self.precision not in known:
            where = f"--gpu {self.gpu}" if self.gpu else "--cpu"
            raise UserError(f"--precision {self.precision} is not for {where}.", f"Choose {', '.join(known)}.")
        check_number("--concurrency", self.concurrency, 1, 4096, whole=True)
        if self.context is not None:
            check_number("--context", self.context, 2, 2**31, whole=True)
        if self.devices is not None:
            check_number("--devices", self.devices, 1, 64, whole=True)
            if self.gpu is None and self.devices > 1:
                raise UserError("--devices is for --gpu.", "Leave it out.")
        if self.goal is not None:
            check_number("--goal", self.goal, 0.1, 1e9)
        if self.threads is not None:
            check_number("--threads", self.threads, 1, 4096, whole=True)


def plan_options(args: argparse.Namespace) -> PlanOptions:
    """Checked flags; whatever can be refused without the model is refused here."""
    return PlanOptions(
        model=args.model,
        gpu=args.gpu.lower().replace("-", "").replace(" ", "") if args.gpu else None,
        precision=args.precision,
        concurrency=args.concurrency,
        context=args.context,
        drafter=args.drafter,
        acceptance=_lengths(args.acceptance_length),
        devices=args.devices,
        goal=args.goal,
        routing=args.routing,
        threads=args.threads,
        as_json=args.json,
    )


def _lengths(text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        lengths = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--acceptance-length is {text!r}.", "Give numbers with commas, like 4,6.5.") from None
    for length in lengths:
        check_number("--acceptance-length entry", length, 1, 1024)
    return lengths


def plan(options: PlanOptions) -> int:
    """Prints the plan. Exit code 1 if nothing fits."""
    target = find_target(options.model)
    drafter = find_drafter_for(target, options.drafter)
    wish = _wish(options, target.config, drafter)
    found = _made(options, target, drafter, wish)
    print(json.dumps(as_object(found), ensure_ascii=False) if options.as_json else terminal(found))
    return 0 if found.chosen else 1


def _made(options: PlanOptions, target: Target, drafter: Drafter | None, wish: Wish) -> Plan:
    if options.gpu is not None:
        precisions = [p for p in GPU_PRECISIONS.values() if options.precision in (None, p.name)]
        counts = DEVICE_COUNTS if options.devices is None else (options.devices,)
        return make_plan(target, drafter, DEVICES[options.gpu], precisions, wish, counts)
    precision = _cpu_precision(options, target)
    with status("measuring this machine"):
        cpu: Cpu | Device = calibrate(target.config, precision.bits.mlp or precision.bits.experts, options.threads)
    return make_plan(target, drafter, cpu, [precision], wish, (1,))


def _cpu_precision(options: PlanOptions, target: Target) -> Precision:
    if options.precision is not None:
        return CPU_PRECISIONS[options.precision]
    return target.stored or CPU_PRECISIONS["q8"]


def _wish(options: PlanOptions, config: ModelConfig, drafter: Drafter | None) -> Wish:
    context = min(DEFAULT_CONTEXT, config.max_context) if options.context is None else options.context
    if context > config.max_context:
        raise UserError(f"A context of {context} tokens does not fit this model.", f"Choose 2 to {config.max_context}.")
    block = drafter.config.block_size if drafter else 0
    if options.acceptance is not None and drafter is None:
        raise UserError("--acceptance-length is for a DFlash drafter, and none takes part.", "Name one with --drafter.")
    lengths = options.acceptance or (GUESSES_OF_SMALL_BLOCKS if block < 8 else GUESSES)
    for length in lengths:
        if drafter is not None and length > drafter.config.max_drafts + 1:
            raise UserError(
                f"An acceptance length of {length:g} is more than a block of {block} can give.",
                f"Give 1 to {drafter.config.max_drafts + 1}.",
            )
    goal = options.goal
    if goal is None and options.gpu is not None and options.concurrency == 1:
        goal = GPU_GOAL
    return Wish(context, options.concurrency, lengths, options.routing, goal)

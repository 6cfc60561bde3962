"""``lampejo bench``: flags into a run of the benchmark, its tables, its report, its exit code."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lampejo.bench.arms import ARMS, make_speculators, parse_rates
from lampejo.bench.measure import SUITES, Bench, Results, Suite
from lampejo.bench.page import make_page
from lampejo.bench.peers import Peer, check_peer, make_peer
from lampejo.bench.report import as_object, terminal
from lampejo.bench.startup import Bystanders, machine, peak_rss_mb, start_to_first_token
from lampejo.bench.workloads import CATEGORIES, long_prompt
from lampejo.cli_flags import given_model_flags
from lampejo.cli_options import ModelOptions, model_options
from lampejo.errors import UserError
from lampejo.loader import Loaded
from lampejo.sampling import check_number
from lampejo.terminal import status
from lampejo.weights.store import locate

SECTIONS = ("process", "categories", "concurrency", "lengths", "verify", "peers")
BUSY = 0.2  # cores; more than that of other work is told
MEMORY_PROMPT, MEMORY_ANSWER = 1500, 64  # tokens of the answer whose process is weighed


@dataclass(frozen=True)
class BenchOptions:
    """What to measure. ``model_flags`` are the flags that make another process load the same."""

    model: ModelOptions
    model_flags: tuple[str, ...]
    suite: Suite
    arms: tuple[str, ...]
    categories: tuple[str, ...]
    sections: tuple[str, ...] = SECTIONS
    peers: tuple[str, ...] = ()
    rates: tuple[float, ...] | None = None
    report: Path | None = None
    as_json: bool = False

    def __post_init__(self) -> None:
        if self.report is not None and not self.report.absolute().parent.is_dir():
            raise UserError(f"There is no folder {self.report.parent} for the report.", "Make it first.")


def bench_options(args: argparse.Namespace) -> BenchOptions:
    """Checked flags; whatever can be refused without the model is refused here."""
    suite = SUITES[args.suite]
    if args.max_tokens is not None:
        check_number("--max-tokens", args.max_tokens, 2, 2**31, whole=True)
        suite = replace(suite, max_tokens=args.max_tokens)
    if args.runs is not None:
        check_number("--runs", args.runs, 1, 1000, whole=True)
        suite = replace(suite, runs=args.runs, rounds=args.runs)
    for spec in args.peer or ():
        check_peer(spec)
    rates = None if args.synthetic_acceptance is None else tuple(parse_rates(args.synthetic_acceptance))
    if args.width == 0 and (rates is not None or args.arms not in (None, "plain")):
        raise UserError("--width 0 leaves no drafts to measure.", "Leave it out, or give --arms plain.")
    return BenchOptions(
        model=model_options(args),
        model_flags=given_model_flags(args),
        suite=suite,
        arms=_names("--arms", args.arms, ARMS),
        categories=_names("--categories", args.categories, tuple(CATEGORIES)),
        sections=_names("--sections", args.sections, SECTIONS),
        peers=tuple(args.peer or ()),
        rates=rates,
        report=None if args.report is None else Path(args.report),
        as_json=args.json,
    )


def _names(flag: str, text: str | None, known: Sequence[str]) -> tuple[str, ...]:
    if text is None:
        return tuple(known)
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in known:
            raise UserError(f"{flag} has {name!r}.", f"Known: {', '.join(known)}.")
    return names


def bench(options: BenchOptions) -> int:
    """Measures, prints, writes the report. Exit code 1 if anything failed."""
    file = locate(options.model.model)
    threads = options.model.threads or torch.get_num_threads()
    peers = [make_peer(spec, file, threads) for spec in options.peers]
    around, bystanders = machine(), Bystanders()
    results = Results()
    if "process" in options.sections:
        _start(options, results)  # first: a fresh process is not to wait for memory that we hold
    loaded, config = options.model.load_parts()
    around["threads"] = threads
    arms = _possible(options.arms, loaded, results)
    speculators = make_speculators(loaded, arms, options.model.engine.width, options.rates)
    results.arms = list(speculators)
    bench = Bench(loaded, config, speculators, results)
    try:
        _sections(bench, options, peers)
    finally:
        bench.close()
    if results.num_ties:
        results.notes.append(
            f"{results.num_ties} answers differ from plain decoding, first at a near-tie: on a GPU the last bits of a "
            "token depend on what is computed beside it"
        )
    around["other_cores_busy"] = others = bystanders.cores()
    if others is not None and others > BUSY:
        results.notes.append(
            f"other work took {others:.1f} cores while this was measured: trust no figure of it, least of all those of "
            "peers, whose threads wait for each other by spinning"
        )
    found = as_object(results, around, _model(loaded, options))
    for failure in results.failures:
        print(f"failed: {failure}", file=sys.stderr)
    print(terminal(found, results.notes), file=sys.stderr if options.as_json else sys.stdout)
    if options.report is not None:
        options.report.write_text(make_page(found, results.notes, results.failures), encoding="utf-8")
    if options.as_json:
        print(json.dumps(found, ensure_ascii=False))
    return 1 if results.failures else 0


def _sections(bench: Bench, options: BenchOptions, peers: Sequence[Peer]) -> None:
    suite = options.suite
    sections: dict[str, Callable[[], None]] = {
        "categories": lambda: bench.categories(options.categories, suite),
        "concurrency": lambda: bench.concurrency(suite, peers),
        "lengths": lambda: bench.lengths(suite),
        "verify": lambda: bench.verify_cost(suite),
        "peers": lambda: bench.peers(suite, peers),
    }
    bench.warm_up()
    for name, run in sections.items():
        if name in options.sections:
            run()


def _start(options: BenchOptions, results: Results) -> None:
    """The figures of fresh processes. The first start fills the disk cache and is not counted."""
    num_tokens = min(MEMORY_PROMPT, (options.model.engine.max_context or MEMORY_PROMPT * 2) // 2)
    prompt = long_prompt(num_tokens, lambda messages: len(messages[0]["content"]) // 4)
    assert prompt is not None
    try:
        with status("weighing a process"):  # also reads the model's file into the disk cache
            results.peak_rss_mb = peak_rss_mb(options.model_flags, prompt[0]["content"], MEMORY_ANSWER)
        for _ in range(options.suite.starts):
            with status("starting a process"):
                results.start_s.append(start_to_first_token(options.model_flags))
    except Exception as error:
        results.failures.append(f"a fresh process: {error}")


def _possible(arms: Sequence[str], loaded: Loaded, results: Results) -> list[str]:
    """The arms asked for, without that of a drafter which is not there."""
    if loaded.runner.drafter is None and "dflash" in arms:
        if tuple(arms) != ARMS:
            raise UserError(
                f"No DFlash drafter is loaded for {loaded.info['model']}.", "Name one, or leave out the arm."
            )
        results.notes.append("no DFlash drafter is loaded: its arm is left out, and auto has n-gram drafts alone")
        return [arm for arm in arms if arm != "dflash"]
    return list(arms)


def _model(loaded: Loaded, options: BenchOptions) -> dict[str, Any]:
    """The mode that the figures hold for."""
    template = loaded.chat_template
    suite = options.suite
    return {
        "ops": "reference",
        "thinking": "the template has no such mode",
        **loaded.info,
        "load_s": loaded.load_s,
        "chat_template": "the model's own" if template else "none, prompts are plain text",
        "answers": f"greedy, and at temperature 0.7 with a seed; up to {suite.max_tokens} tokens, each to its own end",
        "runs": suite.runs,
        "cache": os.environ.get("LAMPEJO_CACHE", "default"),
    }

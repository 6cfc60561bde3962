"""The flags that name a model and shape an answer, and their help. No torch here: ``--help`` answers at once."""

import argparse
from collections.abc import Mapping

from lampejo.weights.aliases import DEFAULT

DEFAULT_MAX_TOKENS = 512
TYPICAL_THRESHOLD = 0.09

# What a use sets, as flags and their values; a flag that is given goes first. docs/policies.md has the reasons.
PRESETS: dict[str, dict[str, str | int]] = {
    "chat": {"thinking": "off"},
    "code": {"thinking": "on"},
    "agent": {"draft_window": 2048},
    "batch": {"thinking": "off", "block": 4, "max_rows": 32},
}


def add_model_flags(parser: argparse.ArgumentParser, with_model: bool = True) -> None:
    """``with_model`` False: the command names the model without a flag."""
    group = parser.add_argument_group("model")
    if with_model:
        what = f"alias, org/name, folder or .gguf file (default: {DEFAULT})"
        group.add_argument("--model", default=DEFAULT, help=what)
    group.add_argument(
        "--drafter",
        default="auto",
        help="auto (n-gram where the text repeats, and the DFlash drafter that belongs to the model: in the package, "
        "beside it, or known and fetched by name; token by token the one that pays), none, ngram, dflash, or the "
        "folder, .gguf file or repository of a DFlash drafter (default: auto)",
    )
    group.add_argument(
        "--target-layer-ids", metavar="I,J,...", help="the drafter's taps, 0-based, for a drafter that does not tell"
    )
    group.add_argument("--context", type=int, metavar="N", help="tokens of prompt and answer (default: the model's)")
    group.add_argument(
        "--thinking", choices=("on", "off"), help="whether answers begin with reasoning (default: the chat template's)"
    )
    group.add_argument(
        "--ops",
        choices=("auto", "cpu", "reference"),
        default="auto",
        help="on a CPU: cpu (the kernels in C++), reference (PyTorch in fp32), auto (the kernels where they run) "
        "(default: auto)",
    )
    group.add_argument(
        "--quantize",
        choices=("q8", "q4", "none"),
        help="how the kernels hold weights that the files store as floats; none keeps fp32 (default: q8)",
    )
    group.add_argument(
        "--device", default="auto", help="auto (a GPU if there is one), cpu, cuda, or cuda:N of several (default: auto)"
    )
    group.add_argument(
        "--dtype",
        choices=("auto", "bf16", "fp16", "fp32"),
        default="auto",
        help="of weights, keys and values on a GPU; fp32 on a CPU is --quantize none (default: bf16 on a GPU)",
    )
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: PyTorch's choice)")
    group = parser.add_argument_group("speed", f"What --preset sets, unless its flags are given:\n{preset_lines()}")
    group.add_argument("--preset", choices=tuple(PRESETS), help="settings for a use; all of them are lossless")
    group.add_argument("--width", type=int, metavar="N", help="drafts per step; 0 is plain (default: measured)")
    group.add_argument(
        "--block", type=int, metavar="N", help="tokens that a DFlash drafter drafts at once, at most (default: its own)"
    )
    group.add_argument(
        "--draft-window", type=int, metavar="N", help="tokens it looks back on, at most (default: its own choice)"
    )
    group.add_argument("--max-rows", type=int, metavar="N", help="requests decoded at once (default: 16)")
    group.add_argument(
        "--policy",
        choices=("lossless", "typical"),
        default="lossless",
        help="which drafts are accepted: those that the target chooses itself (lossless), or, above temperature 0, "
        "also those that it finds typical: faster, but NOT LOSSLESS (default: lossless)",
    )
    group.add_argument(
        "--typical-threshold",
        type=float,
        metavar="P",
        help=f"of --policy typical, above 0 and up to 1; lower accepts more (default: {TYPICAL_THRESHOLD})",
    )


def preset_lines() -> str:
    """What each preset sets, in flags, one on each line."""

    def words(flags: Mapping[str, str | int]) -> str:
        return " ".join(f"--{flag.replace('_', '-')} {value}" for flag, value in flags.items())

    return "\n".join(f"  {name:<6} {words(flags)}" for name, flags in PRESETS.items())


def given_model_flags(args: argparse.Namespace) -> tuple[str, ...]:
    """Of a command that has them all: those that make another process load the same model the same way."""
    parser = argparse.ArgumentParser(add_help=False)
    add_model_flags(parser)
    given = [(action.option_strings[0], getattr(args, action.dest)) for action in parser._actions]
    return tuple(part for flag, value in given if value is not None for part in (flag, str(value)))


def add_answer_flags(parser: argparse.ArgumentParser, with_logprobs: bool = True) -> None:
    """One flag per field of ``SamplingParams`` and ``StopParams``, under the same name."""
    group = parser.add_argument_group("sampling", "What is not given comes from the model's generation_config.json.")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    group.add_argument("--top-k", type=int, metavar="K", help="only the K likeliest tokens; 0 is off")
    group.add_argument("--top-p", type=float, metavar="P", help="only the likeliest tokens that make up P; 1 is off")
    group.add_argument("--min-p", type=float, metavar="P", help="only tokens of P times the likeliest's probability")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer, if lossless")
    group.add_argument("--repetition-penalty", type=float, metavar="X", help="above 1 avoids tokens seen; 1 is off")
    group.add_argument("--presence-penalty", type=float, metavar="X", help="-2 to 2, as OpenAI defines it")
    group.add_argument("--frequency-penalty", type=float, metavar="X", help="-2 to 2, as OpenAI defines it")
    group.add_argument(
        "--logit-bias", action="append", metavar="ID=X", help="add X (-100 to 100) to a token's logit; repeatable"
    )
    if with_logprobs:
        group.add_argument(
            "--logprobs", type=int, metavar="N", help="log probabilities and N alternatives; needs --json"
        )
        group.add_argument("--json-schema", metavar="FILE", help="the answer is JSON by the schema in this file")
    group = parser.add_argument_group("end of the answer")
    group.add_argument(
        "--max-tokens",
        type=int,
        default=DEFAULT_MAX_TOKENS,
        metavar="N",
        help=f"longest answer (default: {DEFAULT_MAX_TOKENS})",
    )
    group.add_argument("--min-tokens", type=int, metavar="N", help="no end before N tokens")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; repeatable")
    group.add_argument("--stop-token-id", action="append", type=int, metavar="ID", help="end at this token; repeatable")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on past the model's end tokens")


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to measure")
    group.add_argument("--suite", choices=("quick", "full"), default="quick", help="how much (default: quick)")
    group.add_argument(
        "--arms", metavar="A,B,...", help="plain, dflash, ngram, auto (default: all); plain always takes part"
    )
    group.add_argument(
        "--categories",
        metavar="A,B,...",
        help="chat, code, maths, prose, editing, tools, portuguese, languages (default: all)",
    )
    group.add_argument(
        "--sections",
        metavar="A,B,...",
        help="process (start and memory), categories, concurrency, lengths, verify, peers (default: all)",
    )
    group.add_argument("--max-tokens", type=int, metavar="N", help="longest answer by category (default: the suite's)")
    group.add_argument("--runs", type=int, metavar="N", help="rounds of everything (default: the suite's)")
    group.add_argument(
        "--synthetic-acceptance",
        metavar="RATES",
        help="one more arm, whose drafts are right at these rates by slot: 0.8,0.7,0.6, or one rate for all slots",
    )
    group.add_argument(
        "--peer",
        action="append",
        metavar="PEER",
        help="measure beside llama.cpp, transformers, or an OpenAI-compatible server (http://...); repeatable",
    )
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object; the tables go to standard error")
    group.add_argument("--report", metavar="FILE.html", help="write a page with plots")


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where")
    where = group.add_mutually_exclusive_group()
    where.add_argument(
        "--gpu", metavar="NAME", help="a100, h100, h200, b200, l40s, rtx4090, rtx5090 or rtxpro6000, by its data sheet"
    )
    where.add_argument("--cpu", action="store_true", help="this machine, measured in some seconds (the default)")
    group.add_argument("--devices", type=int, metavar="N", help="how many share the model (default: 1, 2, 4 and 8)")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: PyTorch's choice)")
    group = parser.add_argument_group("what")
    group.add_argument(
        "--precision",
        metavar="NAME",
        help="bf16, fp8 or fp4 on a GPU, q8 or q4 on a CPU (default: all of a GPU's; the file's own on a CPU, or q8)",
    )
    group.add_argument("--context", type=int, metavar="N", help="tokens of each request (default: 4096)")
    group.add_argument("--concurrency", type=int, default=1, metavar="N", help="requests at once (default: 1)")
    group.add_argument(
        "--drafter", default="auto", help="auto (the one known for the model), none, or a folder or repository"
    )
    group.add_argument(
        "--acceptance-length",
        metavar="X[,Y,...]",
        help="tokens committed per step of the drafter's full block (default: 5,7,9; blocks below 8 1.4,2,3)",
    )
    group.add_argument(
        "--routing",
        choices=("independent", "correlated"),
        default="independent",
        help="whether neighbouring tokens choose experts on their own or share some (default: independent)",
    )
    group.add_argument(
        "--goal", type=float, metavar="TOK_PER_S", help="speed of one request to reach (default: 1000 for one on a GPU)"
    )
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object")


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1, this machine)")
    group.add_argument("--port", type=int, default=8000, metavar="N", help="0 takes a free one (default: 8000)")
    group.add_argument(
        "--name", action="append", metavar="NAME", help="what clients may call the model beside its name; repeatable"
    )
    group.add_argument(
        "--max-queue",
        type=int,
        default=128,
        metavar="N",
        help="requests that may wait, each prompt and answer of a call being one; a call without room for all of"
        " its own gets 429 unless nothing else runs (default: 128)",
    )
    group.add_argument("--timeout", type=float, default=3600, metavar="S", help="of a request (default: 3600)")
    group.add_argument(
        "--grace", type=float, default=30, metavar="S", help="for running requests at the end (default: 30)"
    )
    group.add_argument("--allow-plain", action="store_true", help="serve without a drafter that cannot be loaded")
    group.add_argument("--access-log", action="store_true", help="print one JSON object per call, without its text")
    group.add_argument("--metrics-compat", choices=("vllm",), help="/metrics also under vLLM's names")
    group = parser.add_argument_group("keys and networks")
    group.add_argument(
        "--api-key", action="append", metavar="KEY", help="what callers must send; repeatable; others can see it in ps"
    )
    group.add_argument("--api-key-file", metavar="FILE", help="keys, one on each line; or set LAMPEJO_API_KEY")
    group.add_argument("--cors", action="append", metavar="ORIGIN", help="whose web pages may call; repeatable")
    group.add_argument("--insecure", action="store_true", help="no key needed, whoever calls from wherever")

"""``lampejo generate``: one prompt, one answer; or the same answer twice, plain and with drafts."""

import json
import secrets
import shutil
import sys
from dataclasses import dataclass
from typing import Any

from lampejo.api import LLM, Completion, Prompt
from lampejo.cli_options import ModelOptions
from lampejo.errors import UserError
from lampejo.loader import without_drafts
from lampejo.terminal import (
    ORIGINS,
    OriginPainter,
    acceptance,
    drafting_mode,
    memory_words,
    printable,
    side_by_side,
    statistics_line,
    status,
    wants_color,
)
from lampejo.text import TextStream


@dataclass(frozen=True)
class GenerateOptions:
    """``params`` are keyword arguments of ``LLM.generate``."""

    text: str
    model: ModelOptions
    params: dict[str, Any]
    system: str | None = None
    raw: bool = False
    as_json: bool = False
    show_drafts: bool = False
    compare: bool = False
    color: str = "auto"

    def __post_init__(self) -> None:
        if not (self.text if self.raw else self.text.strip()):
            raise UserError("The prompt is empty.", "Give at least one word.")
        if self.raw and self.system is not None:
            raise UserError("--raw continues plain text, which has no --system message.", "Leave one of them out.")
        if self.show_drafts and (self.as_json or self.compare):
            raise UserError(
                "--show-drafts colours a streamed text.", "Leave out --json and --compare, or --show-drafts."
            )
        if "logprobs" in self.params and (self.compare or not self.as_json):
            raise UserError("--logprobs is part of the object that --json prints.", "Add --json, without --compare.")
        if self.compare and (self.model.drafter == "none" or self.model.engine.width == 0):
            raise UserError("--compare has nothing to compare without drafts.", "Choose another --drafter or --width.")

    def prompt(self, llm: LLM) -> Prompt:
        """Messages for the model's chat template; the bare text for ``--raw`` and for models without a template."""
        if self.raw or (not llm.chat_template and self.system is None):
            return self.text
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": self.text}]


def generate(options: GenerateOptions) -> int:
    """Streams the answer, or prints one JSON object. Returns the exit code."""
    with options.model.load() as llm:
        prompt = options.prompt(llm)
        if options.as_json:
            with status("generating"):
                completion = llm.generate(prompt, **options.params)
            print(json.dumps(as_object(completion, llm), ensure_ascii=False))
            return 0
        completion = _stream(options, llm, prompt)
        print(statistics_line(completion, llm.info), file=sys.stderr)
        if options.show_drafts:
            counts = [f"{name} {completion.origins.count(origin)}" for origin, (name, *_) in ORIGINS.items()]
            print(f"tokens by origin: {', '.join(counts)}", file=sys.stderr)
    return 0


def _stream(options: GenerateOptions, llm: LLM, prompt: Prompt) -> Completion:
    painter = OriginPainter(wants_color(options.color, sys.stdout))
    # A step's text mixes origins, so the painted text is decoded here once more, token by token, by the same rules.
    stops = options.params.get("stop", ())
    continued = llm.encode(prompt) if isinstance(prompt, str) else ()
    painted = TextStream(llm.tokenizer, stops, continued, options.params.get("min_tokens", 0))
    clean = printable if sys.stdout.isatty() else str
    if options.show_drafts:
        print(painter.legend())
    last = None
    for chunk in llm.stream(prompt, **options.params):
        if options.show_drafts:
            for token_id, origin in zip(chunk.ids, chunk.origins, strict=True):
                painted.push(token_id)
                print(painter.next(clean(painted.take()), origin), end="")
            if chunk.finish_reason:
                print(painter.next(clean(painted.finish()), chunk.origins[-1]) + painter.end(), end="")
        else:
            print(clean(chunk.text), end="")
        sys.stdout.flush()
        last = chunk.completion
    assert last is not None
    print()
    return last


def as_object(completion: Completion, llm: LLM) -> dict[str, Any]:
    """What ``--json`` prints."""
    answer: dict[str, Any] = {
        "model": llm.info["model"],
        "drafter": llm.info["drafter"],
        "text": completion.text,
        "ids": completion.ids,
        "finish_reason": completion.finish_reason,
        "usage": completion.usage,
        "timings": {"load_s": llm.load_s, **completion.timings},
        "metrics": {"speculative_decoding": completion.speculation},
        "mode": llm.info,
    }
    if completion.logprobs:
        answer["logprobs"] = [
            {**_logprob(llm, entry.token_id, entry.logprob), "top": [_logprob(llm, *pair) for pair in entry.top]}
            for entry in completion.logprobs
        ]
    return answer


def _logprob(llm: LLM, token_id: int, logprob: float) -> dict[str, Any]:
    return {"id": token_id, "token": llm.tokenizer.token_text(token_id).text, "logprob": logprob}


def compare(options: GenerateOptions) -> int:
    """The answer plain and with drafts, by two engines over one loaded target. Exit code 1 if they differ."""
    loaded, config = options.model.load_parts()
    params = {"seed": secrets.randbits(32), **options.params}  # one seed for both, whatever the temperature
    with LLM(without_drafts(loaded), config) as llm:  # PyTorch's first operations are slow and would be counted
        llm.generate("one two three", max_tokens=8, ignore_eos=True, temperature=0.0)
    # One after the other, never at once: both engines' pages are the same memory.
    with LLM(without_drafts(loaded), config) as llm, status("plain"):
        plain = llm.generate(options.prompt(llm), **params)
        plain_object = as_object(plain, llm)
    with LLM(loaded, config) as llm, status("with drafts"):
        drafted = llm.generate(options.prompt(llm), **params)
        drafted_object = as_object(drafted, llm)
    identical = (plain.ids, plain.text, plain.finish_reason) == (drafted.ids, drafted.text, drafted.finish_reason)
    speedup = _ratio(drafted.timings["tok_per_s"], plain.timings["tok_per_s"])
    if options.as_json:
        result = {"identical": identical, "speedup": speedup, "plain": plain_object, "drafted": drafted_object}
        print(json.dumps(result, ensure_ascii=False))
    else:
        print(_comparison(plain, drafted, loaded.info, speedup))
        may_part = ""
        if not drafted.speculation["lossless"]:
            may_part = f" (--policy {drafted.speculation['policy']} is not lossless)"
        elif loaded.info.get("ops") == "device":
            may_part = " (at near-ties a GPU may choose either token)"
        print(f"identical: {'yes' if identical else f'no{may_part}'}")
    return 0 if identical else 1


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None


def _comparison(plain: Completion, drafted: Completion, info: dict[str, Any], speedup: float | None) -> str:
    width = min(shutil.get_terminal_size().columns, 160)
    rule = side_by_side("-" * max(20, (width - 3) // 2), "-" * max(20, (width - 3) // 2), width).replace(" | ", "-+-")

    def numbers(completion: Completion) -> str:
        timings = completion.timings
        speed = f"{len(completion.ids)} tokens, {timings['tok_per_s']:.1f} tok/s"
        return f"{speed}\nfirst token after {timings['first_token_s']:.2f} s"

    faster = "" if speedup is None else f"\n{speedup:.2f} times plain"
    return "\n".join(
        [
            f"{info['model']}, {info['quantization']}",
            f"{info['dtype']} on {info['ops']}; weights {info['weights']}; {memory_words(info)}",
            rule,
            side_by_side("plain", drafting_mode(info), width),
            rule,
            side_by_side(plain.text, drafted.text, width),
            rule,
            side_by_side(numbers(plain), numbers(drafted) + faster, width),
            rule,
            f"drafts: {acceptance(drafted.speculation)}",
        ]
    )

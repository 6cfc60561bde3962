"""Flags into dataclasses: which model, which answers. Whatever can be refused without the model is refused here."""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lampejo.api import LLM
from lampejo.cli_flags import PRESETS, TYPICAL_THRESHOLD
from lampejo.config import Drafting, EngineConfig
from lampejo.errors import UserError, why
from lampejo.grammar import Grammar
from lampejo.loader import Loaded, has_thinking, load_model, with_thinking
from lampejo.request import StopParams
from lampejo.sampling import SamplingParams, check_number
from lampejo.terminal import fallback_line, start_lines, status
from lampejo.weights.aliases import DEFAULT


@dataclass(frozen=True)
class ModelOptions:
    """Which model with which drafter, and how its engine runs. ``None`` leaves the choice to the engine.

    thinking: whether answers begin with reasoning; where only a preset asks for it, models that cannot be told so are
    left as they are.
    """

    model: str = DEFAULT
    drafter: str = "auto"
    target_layer_ids: tuple[int, ...] | None = None
    threads: int | None = None
    thinking: bool | None = None
    is_thinking_asked: bool = False
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        engine = self.engine
        if engine.width is not None:
            check_number("--width", engine.width, 0, 1024, whole=True)
        if engine.max_context is not None:
            check_number("--context", engine.max_context, 2, 2**31, whole=True)
        check_number("--max-rows", engine.max_rows, 1, 4096, whole=True)
        if self.threads is not None:
            check_number("--threads", self.threads, 1, 4096, whole=True)
        if self.drafter == "none" and engine.width:
            raise UserError("--width asks for drafts, --drafter none for none.", "Leave one of them out.")
        if engine.drafting.typical is not None and (self.drafter == "none" or engine.width == 0):
            raise UserError("--policy typical is about drafts, and there are none.", "Leave it out.")
        if self.target_layer_ids is not None and self.drafter in ("none", "ngram"):
            raise UserError(
                f"--target-layer-ids says nothing to --drafter {self.drafter}.",
                "Leave it out, or name a DFlash drafter.",
            )

    def without_dflash(self) -> "ModelOptions":
        """The same model with drafts by n-gram alone."""
        return replace(self, drafter="ngram", target_layer_ids=None)

    def load(self) -> LLM:
        return LLM(*self.load_parts())

    def load_parts(self) -> tuple[Loaded, EngineConfig]:
        """For those who make more than one engine of them."""
        with status(f"loading {self.model}"):
            loaded, config = load_model(self.model, self.drafter, self.engine, self.threads, self.target_layer_ids)
        if self.thinking is not None and (self.is_thinking_asked or has_thinking(loaded.chat_template)):
            loaded = with_thinking(loaded, self.thinking)
        _tell(loaded.info)
        return loaded, config


def _tell(info: Mapping[str, Any]) -> None:
    for line in [*filter(None, [fallback_line(info)]), *start_lines(info)]:
        print(line, file=sys.stderr)


def model_options(args: argparse.Namespace) -> ModelOptions:
    """The flags, over what the preset sets."""
    preset = PRESETS.get(args.preset, {})

    def of(flag: str) -> Any:
        given = getattr(args, flag)
        return preset.get(flag) if given is None else given

    threshold = args.typical_threshold
    if args.policy == "typical":
        threshold = TYPICAL_THRESHOLD if threshold is None else threshold
    elif threshold is not None:
        raise UserError("--typical-threshold is of --policy typical.", "Give both, or none of them.")
    thinking = of("thinking")
    engine = EngineConfig(
        max_context=args.context,
        max_rows=EngineConfig.max_rows if of("max_rows") is None else of("max_rows"),
        width=of("width"),
        ops=args.ops,
        quantize=args.quantize,
        device=args.device,
        dtype=args.dtype,
        drafting=Drafting(of("block"), of("draft_window"), threshold),
    )
    return ModelOptions(
        model=args.model,
        drafter=args.drafter,
        target_layer_ids=_whole_numbers(args.target_layer_ids),
        threads=args.threads,
        thinking=None if thinking is None else thinking == "on",
        is_thinking_asked=args.thinking is not None,
        engine=engine,
    )


def _whole_numbers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--target-layer-ids is {text!r}.", "Give whole numbers with commas, like 1,9,17.") from None
    for number in numbers:
        check_number("--target-layer-ids entry", number, 0, 4096, whole=True)
    return numbers


def answer_params(args: argparse.Namespace) -> dict[str, Any]:
    """The given flags as keyword arguments of ``LLM.generate``; bad values are refused now, before any loading."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    if "logit_bias" in given:
        given["logit_bias"] = dict(_logit_bias(text) for text in given["logit_bias"])
    if "stop_token_id" in given:
        given["stop_token_ids"] = tuple(given["stop_token_id"])
    if "stop" in given:
        given["stop"] = tuple(given["stop"])
    sampling = {f.name: given[f.name] for f in fields(SamplingParams) if f.name in given}
    stops = {f.name: given[f.name] for f in fields(StopParams) if f.name in given}
    SamplingParams(**sampling)
    StopParams(**stops)
    form = {"grammar": _json_schema(given["json_schema"])} if "json_schema" in given else {}
    return sampling | stops | form


def _json_schema(file: str) -> Grammar:
    try:
        schema = json.loads(Path(file).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"--json-schema {file} cannot be read: {why(error)}.", "Give a file with a JSON schema."
        ) from None
    return Grammar.json_schema(schema, about="--json-schema")


def _logit_bias(text: str) -> tuple[int, float]:
    token_id, _, value = text.partition("=")
    try:
        return int(token_id), float(value)
    except ValueError:
        raise UserError(f"--logit-bias is {text!r}.", "Give a token id and a number, like 198=-5.") from None

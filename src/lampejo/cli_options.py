"""Flags into dataclasses: which model, which answers. Whatever can be refused without the model is refused here."""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from lampejo.api import LLM, load
from lampejo.config import EngineConfig
from lampejo.errors import UserError
from lampejo.loader import Loaded, load_model
from lampejo.request import StopParams
from lampejo.sampling import SamplingParams, check_number
from lampejo.terminal import fallback_line, start_lines, status
from lampejo.weights.aliases import DEFAULT


@dataclass(frozen=True)
class ModelOptions:
    """Which model with which drafter, and how its engine runs. ``None`` leaves the choice to the engine."""

    model: str = DEFAULT
    drafter: str = "auto"
    target_layer_ids: tuple[int, ...] | None = None
    width: int | None = None
    context: int | None = None
    threads: int | None = None
    ops: str = "auto"
    quantize: str | None = None
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.width is not None:
            check_number("--width", self.width, 0, 1024, whole=True)
        if self.context is not None:
            check_number("--context", self.context, 2, 2**31, whole=True)
        if self.threads is not None:
            check_number("--threads", self.threads, 1, 4096, whole=True)
        if self.drafter == "none" and self.width:
            raise UserError("--width asks for drafts, --drafter none for none.", "Leave one of them out.")
        if self.target_layer_ids is not None and self.drafter in ("none", "ngram"):
            raise UserError(
                f"--target-layer-ids says nothing to --drafter {self.drafter}.",
                "Leave it out, or name a DFlash drafter.",
            )
        _ = self.engine_config  # it refuses settings that do not go together

    @property
    def engine_config(self) -> EngineConfig:
        return EngineConfig(
            max_context=self.context,
            width=self.width,
            ops=self.ops,
            quantize=self.quantize,
            device=self.device,
            dtype=self.dtype,
        )

    def without_dflash(self) -> "ModelOptions":
        """The same model with drafts by n-gram alone."""
        return replace(self, drafter="ngram", target_layer_ids=None)

    def load(self) -> LLM:
        with status(f"loading {self.model}"):
            llm = load(
                self.model,
                self.drafter,
                config=self.engine_config,
                threads=self.threads,
                target_layer_ids=self.target_layer_ids,
            )
        _tell(llm.info)
        return llm

    def load_parts(self) -> tuple[Loaded, EngineConfig]:
        """For those who make more than one engine of them."""
        with status(f"loading {self.model}"):
            parts = load_model(self.model, self.drafter, self.engine_config, self.threads, self.target_layer_ids)
        _tell(parts[0].info)
        return parts


def _tell(info: Mapping[str, Any]) -> None:
    for line in [*filter(None, [fallback_line(info)]), *start_lines(info)]:
        print(line, file=sys.stderr)


def model_options(args: argparse.Namespace) -> ModelOptions:
    return ModelOptions(
        model=args.model,
        drafter=args.drafter,
        target_layer_ids=_whole_numbers(args.target_layer_ids),
        width=args.width,
        context=args.context,
        threads=args.threads,
        ops=args.ops,
        quantize=args.quantize,
        device=args.device,
        dtype=args.dtype,
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
    return sampling | stops


def _logit_bias(text: str) -> tuple[int, float]:
    token_id, _, value = text.partition("=")
    try:
        return int(token_id), float(value)
    except ValueError:
        raise UserError(f"--logit-bias is {text!r}.", "Give a token id and a number, like 198=-5.") from None

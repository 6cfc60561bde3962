"""A drafter at start: the one that ``--drafter`` asks for, what it is and takes, and a trial whether it fits."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lampejo.chat import render_chat
from lampejo.config import Drafting, EngineConfig
from lampejo.engine import Engine
from lampejo.errors import DamagedModel, UserError
from lampejo.models.config import DrafterConfig
from lampejo.ops.cpu.fused import PackedEmbedding, PackedLinear
from lampejo.request import Request, StopParams
from lampejo.runner import Runner
from lampejo.sampling import SamplingParams
from lampejo.speculate import DFlashDrafter, Speculator
from lampejo.tokenizer import Tokenizer
from lampejo.weights.checkpoint import Checkpoint
from lampejo.weights.drafters import Choice, choose_drafter, doubts, look_alikes, open_drafter
from lampejo.weights.speculators import speculator_named
from lampejo.width import WidthController

TRIAL_PROMPT = "How do I make a cup of tea?"  # as people ask; lists and tables are not what drafters learn first
TRIAL_TOKENS, TRIAL_SECONDS, TRIAL_STEPS, TRIAL_WIDTH = 48, 3.0, 8, 7
LEAST_ACCEPTANCE = 1.15  # tokens per step: one that fits reaches 1.4 after minutes of training, 3 when it is good


@dataclass(frozen=True)
class DrafterChoice:
    """What ``--drafter`` came to. ``name`` and ``reason`` (why this one) are for people; ``opened`` is a DFlash
    drafter, None where none drafts; ``is_packaged``: it came with the package, made for its target."""

    name: str
    opened: tuple[DrafterConfig, dict[str, torch.Tensor]] | None = None
    reason: str | None = None
    is_packaged: bool = False
    warnings: list[str] = field(default_factory=list)

    @property
    def config(self) -> DrafterConfig | None:
        return self.opened[0] if self.opened else None

    def narrowed(self, drafting: Drafting) -> "DrafterChoice":
        """With a shorter block and a nearer horizon, where they are asked for."""
        if self.opened is None:
            return self
        config, tensors = self.opened
        block = min(config.block_size, drafting.block or config.block_size)
        windows = tuple(_nearer(window, drafting.window) for window in config.windows)
        return replace(self, opened=(replace(config, block_size=block, windows=windows), tensors))

    def let_go(self) -> None:
        """Drops the tensors as they were read, so that they are not held beside what was built of them."""
        if self.opened:
            self.opened[1].clear()


def refuse_drafter_as_model(model: str) -> None:
    """``UserError`` with the target's name for a published drafter, which generates nothing by itself."""
    known = speculator_named(model)
    if known is not None:
        raise UserError(
            f"{model} is a drafter, for {known.targets[0]}.",
            f"Give --model {known.targets[0]}; auto finds the drafter.",
        )


def open_for(drafter: str, checkpoint: Checkpoint, target_layer_ids: tuple[int, ...] | None) -> DrafterChoice:
    """The drafter that ``--drafter`` asks for, read; ``UserError`` if it cannot be had or does not fit."""
    if drafter in ("none", "ngram"):
        return DrafterChoice(drafter)
    if drafter not in ("auto", "dflash"):
        name = Path(drafter).name if Path(drafter).exists() else drafter
        doubt = doubts(drafter, checkpoint)
        return _opened(Choice(drafter, name, "given"), checkpoint, target_layer_ids, [] if doubt is None else [doubt])
    choice = choose_drafter(checkpoint)
    if choice is not None:
        return _opened(choice, checkpoint, target_layer_ids, [])
    if drafter == "dflash":
        raise UserError(
            f"No DFlash drafter is known for {checkpoint.name}{look_alikes(checkpoint)}.",
            "Give the folder or hub repository of one, or use --drafter ngram, auto or none.",
        )
    hint = look_alikes(checkpoint)
    warnings = [f"no DFlash drafter is known for {checkpoint.name}{hint}"] if hint else []
    return DrafterChoice("ngram (no DFlash drafter is known for this model)", warnings=warnings)


def _opened(
    choice: Choice, checkpoint: Checkpoint, target_layer_ids: tuple[int, ...] | None, warnings: list[str]
) -> DrafterChoice:
    opened = open_drafter(choice.place, checkpoint.config, checkpoint.name, target_layer_ids, checkpoint.eos_ids)
    known = speculator_named(choice.name)
    trained_on = f", trained on {known.trained_on}" if known is not None and known.trained_on else ""
    return DrafterChoice(choice.name, opened, choice.reason + trained_on, choice.is_packaged, warnings)


def _nearer(*windows: int | None) -> int | None:
    return min((window for window in windows if window is not None), default=None)


def drafter_info(choice: DrafterChoice, runner: Runner) -> dict[str, Any] | None:
    """What ``LLM.info`` tells about a DFlash drafter; None without one. ``memory``: of its weights in bytes, and of its
    context in bytes for each token; ``window``: beyond which none of its layers looks, None if one sees everything."""
    config = choice.config
    if config is None or runner.drafter is None:
        return None
    windows = [window for window in config.windows if window is not None]
    return {
        "reason": choice.reason,
        "is_packaged": choice.is_packaged,
        "num_layers": config.num_layers,
        "block_size": config.block_size,
        "max_drafts": config.max_drafts,
        "target_layer_ids": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
        "window": max(windows) if len(windows) == config.num_layers else None,
        "memory": {
            "weights": _held_bytes(runner),
            "context_per_token": runner.context_cache.bytes_per_token,
        },
        "trial_acceptance_length": None,
    }


def _held_bytes(runner: Runner) -> int:
    """What the drafter's weights take, with the rows that it keeps of the target's head."""
    assert runner.drafter is not None
    layers: Any = runner.drafter.layers  # fused ones are no modules, but keep what they stand for
    parts: list[nn.Module] = [runner.drafter, *(layer.layer for layer in layers if not isinstance(layer, nn.Module))]
    if runner.draft_head is not runner.target.lm_head:
        parts.append(runner.draft_head)
    modules = {id(module): module for part in parts for module in part.modules()}.values()
    packed = [m.matrix.data.nbytes for m in modules if isinstance(m, PackedLinear | PackedEmbedding)]
    floats = {t.data_ptr(): t.nbytes for part in parts for t in (*part.parameters(), *part.buffers())}
    return sum(packed) + sum(floats.values())


def trial(
    runner: Runner, config: EngineConfig, tokenizer: Tokenizer, chat_template: str | None, eos_ids: Sequence[int]
) -> float | None:
    """Tokens committed per step on a built-in prompt with a few drafts each; None if there was nothing to measure.

    It ends after ``TRIAL_TOKENS``, or after ``TRIAL_SECONDS`` and ``TRIAL_STEPS``, and leaves nothing behind.
    """
    assert runner.drafter is not None and config.max_context is not None
    prompt_ids = _trial_prompt(tokenizer, chat_template)
    if not prompt_ids or len(prompt_ids) + TRIAL_TOKENS > config.max_context:
        return None
    width = min(runner.drafter.config.max_drafts, TRIAL_WIDTH)
    engine = Engine(runner, Speculator([DFlashDrafter(runner)], WidthController(width, width)), config, eos_ids)
    request = Request(0, prompt_ids, SamplingParams(), StopParams(max_tokens=TRIAL_TOKENS, ignore_eos=True))
    engine.add(request)
    end = time.perf_counter() + TRIAL_SECONDS
    try:
        while engine.has_work and (time.perf_counter() < end or request.stats.num_spec_steps < TRIAL_STEPS):
            engine.step()
    except DamagedModel:
        return None  # the first answer will tell
    engine.abort(request)
    length: float | None = request.stats.as_dict()["mean_acceptance_length"]
    return length


def _trial_prompt(tokenizer: Tokenizer, chat_template: str | None) -> list[int]:
    """As the model is used: a question in its chat template, if it has one."""
    if chat_template is None:
        return tokenizer.encode(TRIAL_PROMPT)
    try:
        text = render_chat(chat_template, [{"role": "user", "content": TRIAL_PROMPT}], tokenizer)
    except UserError:  # a template that wants more than a message
        return tokenizer.encode(TRIAL_PROMPT)
    return tokenizer.encode(text, add_special_tokens=False)


def mismatch(name: str, acceptance_length: float | None) -> str | None:
    """The warning for a drafter whose drafts the target does not take."""
    if acceptance_length is None or acceptance_length >= LEAST_ACCEPTANCE:
        return None
    return (
        f"{name} commits {acceptance_length:.2f} tokens per step on a built-in prompt, where one is plain decoding: it "
        "was probably made for another model"
    )

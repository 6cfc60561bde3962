"""What a model is made of, counted on its modules without values: parameters by part, and what a request keeps.

Parts are told apart by how they are read in a step: the embedding only by rows, routed experts only where a token goes,
everything else once per step.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from lampejo.models.config import DrafterConfig, ModelConfig
from lampejo.models.dflash import DFlash
from lampejo.models.targets import make_target
from lampejo.weights.describe import kv_bytes_per_token

CONTEXT_BYTES = 2  # keys and values: bf16 on a GPU, f16 on the CPU kernels


@dataclass(frozen=True)
class Parts:
    """A number for each part of a target: parameters, or bytes, or bits per parameter.

    ``mixers``: attention, Gated DeltaNet, routers and norms; ``mlp``: MLPs and shared experts; ``experts``: routed
    experts; ``head`` is 0 where it is the embedding's matrix.
    """

    embedding: float
    head: float
    mixers: float
    mlp: float
    experts: float

    @property
    def total(self) -> float:
        return sum(getattr(self, part.name) for part in fields(self))


def part_of(name: str) -> str:
    """The part that a parameter belongs to, by its name in a checkpoint."""
    for mark, part in ((".embed_tokens.", "embedding"), ("lm_head.", "head"), (".mlp.experts.", "experts")):
        if mark in f".{name}":
            return part
    return "mlp" if ".mlp." in name and ".mlp.gate.weight" not in name else "mixers"


def count(config: ModelConfig, measure: Callable[[str, int], float] = lambda name, size: size) -> Parts:
    """Sums ``measure(name, number of values)`` over the parameters of a target, by part."""
    with torch.device("meta"):
        target = make_target(config)
    sums = dict.fromkeys((part.name for part in fields(Parts)), 0.0)
    for name, parameter in target.named_parameters():
        if not (config.tie_word_embeddings and name.startswith("lm_head.")):
            sums[part_of(name)] += measure(name, parameter.numel())
    return Parts(**sums)


def active_share(config: ModelConfig) -> float:
    """Of the routed experts, the share that one token goes through; 0 for a model without experts."""
    return 0.0 if config.experts is None else config.experts.num_active / config.experts.num_experts


def num_active(config: ModelConfig, parameters: Parts) -> float:
    """Parameters that one token goes through, as publishers count them: the embedding included."""
    return parameters.total - parameters.experts * (1 - active_share(config))


def context_bytes(config: ModelConfig | DrafterConfig) -> int:
    """Keys and values of one token of context, in all layers that have them."""
    return kv_bytes_per_token(config, CONTEXT_BYTES)


@dataclass(frozen=True)
class DrafterSizes:
    """A drafter's own parameters, and what it keeps and reads of a request's context."""

    layers: int  # all that a pass reads, with the projection of the taps
    embedding: int  # of its own, else 0; read by rows
    head: int  # of its own, else 0
    head_rows: int  # ids that its logits are over
    context_bytes: int  # per token of context
    windows: tuple[int | None, ...]  # of each layer

    @property
    def total(self) -> int:
        return self.layers + self.embedding + self.head

    def context_read(self, context: int) -> float:
        """Bytes that a pass reads of a context of so many tokens."""
        seen = sum(context if window is None else min(context, window) for window in self.windows)
        return self.context_bytes * seen / len(self.windows)


def drafter_sizes(config: DrafterConfig) -> DrafterSizes:
    with torch.device("meta"):
        drafter = DFlash(config)
    sums = {"embed_tokens": 0, "lm_head": 0, "": 0}
    for name, parameter in drafter.named_parameters():
        first = name.partition(".")[0]
        sums[first if first in sums else ""] += parameter.numel()
    return DrafterSizes(
        layers=sums[""],
        embedding=sums["embed_tokens"],
        head=sums["lm_head"],
        head_rows=config.draft_vocab_size or config.vocab_size,
        context_bytes=context_bytes(config),
        windows=config.windows,
    )

"""Puts the CPU kernels under a model: its modules are replaced by packed ones, its layers by fused ones."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from lampejo.errors import UserError
from lampejo.models.dflash import DFlash
from lampejo.models.experts import Experts
from lampejo.models.layers import Linear, RMSNorm, Target
from lampejo.ops.cpu import delta
from lampejo.ops.cpu.arena import Arena
from lampejo.ops.cpu.fused import (
    MAX_HEAD_DIM,
    MAX_PAGE_SIZE,
    FusedLayer,
    FusedNorm,
    PackedEmbedding,
    PackedExperts,
    PackedLinear,
    PackedMatrix,
)
from lampejo.ops.stored import Stored

ReadMatrix = Callable[[str], Stored]
_FLOATS = tuple(
    f"{name}.weight"
    for name in (
        "mlp.gate",
        "mlp.shared_expert_gate",
        "linear_attn.in_proj_a",
        "linear_attn.in_proj_b",
        "linear_attn.conv1d",
    )
)


def fits_kernels(head_dim: int, page_size: int) -> bool:
    """Whether the kernels can serve these sizes; the reference operations serve all."""
    return head_dim % 8 == 0 and head_dim <= MAX_HEAD_DIM and page_size % 8 == 0 and page_size <= MAX_PAGE_SIZE


def stays_float(name: str, shape: Sequence[int]) -> bool:
    """Of a target's parameter: vectors, and small matrices whose rounding would tell. A router in 8 bits chooses
    other experts; the gates of a recurrence act on all tokens after."""
    return len(shape) == 1 or name.endswith(_FLOATS)


def pack_target(target: Target, read: ReadMatrix, float_kind: int) -> None:
    """``target`` holds what ``stays_float``; ``read`` gives matrices by their checkpoint names, an expert's by its own.

    ``float_kind`` tells how matrices that are stored as floats are packed.
    """
    _pack_modules(target, read, float_kind)
    config = target.config
    target.recurrence = delta.plan_runs, delta.delta_net_runs
    _replace_layers(target.model, [FusedLayer(x, config.num_heads, config.num_kv_heads) for x in target.model.layers])


def pack_drafter(drafter: DFlash, tensors: dict[str, torch.Tensor], float_kind: int, page_size: int) -> None:
    """``drafter`` holds its norms and its draft vocabulary; its matrices come from ``tensors``."""
    config = drafter.config
    if not fits_kernels(config.head_dim, page_size) or config.block_size > page_size:
        raise UserError(
            f"The CPU kernels cannot serve this drafter (heads of {config.head_dim}, blocks of {config.block_size}, "
            f"pages of {page_size}).",
            "Use the reference operations (--ops reference), or another drafter.",
        )
    _pack_modules(drafter, lambda name: Stored.of(tensors[name]), float_kind)
    blocks = [(config.block_size, causal, window) for causal, window in zip(config.causal, config.windows, strict=True)]
    _replace_layers(
        drafter,
        [FusedLayer(x, config.num_heads, config.num_kv_heads, b) for x, b in zip(drafter.layers, blocks, strict=True)],
    )


def _replace_layers(module: nn.Module, layers: list[FusedLayer]) -> None:
    del module.layers  # a list of modules gives its place to a plain list
    module.layers = layers  # type: ignore[assignment]


def _pack_modules(module: nn.Module, read: ReadMatrix, float_kind: int) -> None:
    """Replaces every linear layer, embedding and norm. A matrix that two modules share is packed once."""
    packed: dict[int, PackedMatrix] = {}
    arena = Arena()

    def matrix(weight: torch.Tensor, name: str, bias: torch.Tensor | None = None) -> PackedMatrix:
        if id(weight) not in packed:
            packed[id(weight)] = PackedMatrix(read(name), float_kind, bias, arena)
        return packed[id(weight)]

    def walk(parent: nn.Module, prefix: str) -> None:
        for name, child in list(parent.named_children()):
            path = f"{prefix}{name}"
            if isinstance(child, Linear):
                if stays_float(f"{path}.weight", child.weight.shape):
                    continue
                setattr(parent, name, PackedLinear(matrix(child.weight, f"{path}.weight", child.bias)))
            elif isinstance(child, nn.Embedding):
                setattr(parent, name, PackedEmbedding(matrix(child.weight, f"{path}.weight")))
            elif isinstance(child, Experts):
                names = [f"{path}.{e}." for e in range(len(child.gate_up_proj))]
                parts = [[read(f"{name}{part}_proj.weight") for name in names] for part in ("gate", "up", "down")]
                setattr(parent, name, PackedExperts(*(PackedMatrix(part, float_kind, arena=arena) for part in parts)))
            elif isinstance(child, RMSNorm):
                setattr(parent, name, FusedNorm(child))
            else:
                walk(child, f"{path}.")

    walk(module, "")

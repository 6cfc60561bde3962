"""What tests of the CPU kernels are held to: the reference operations on what the kernels compute with, that is, packed
matrices, activations in 8 bits, and cached keys and values in f16."""

from typing import Any

import torch
from torch import nn

from lampejo import ops
from lampejo.batch import make_batch
from lampejo.models.experts import Experts, SparseMLP
from lampejo.models.layers import Linear, Target
from lampejo.ops.cpu.fused import PackedMatrix
from lampejo.ops.cpu.library import Q8
from lampejo.ops.stored import Stored
from lampejo.packing import stays_float
from lampejo.runner import Runner
from lampejo.scheduler import ScheduledRow
from lampejo.states import RowState
from tiny import make_request


def activations_as_kernels_see_them(x: torch.Tensor) -> torch.Tensor:
    """Eight bits per group of 32, and back. x [T, K]."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
    scale = padded.abs().amax(-1, keepdim=True) / 127
    codes = torch.where(scale > 0, (padded / scale).round(), 0)
    return (codes * scale).flatten(1)[:, : x.shape[1]]


def as_packed(weight: torch.Tensor, kind: int = Q8) -> torch.Tensor:
    """A matrix [..., N, K] as it is after packing."""
    if weight.ndim == 3:
        return torch.stack([as_packed(part, kind) for part in weight])
    return PackedMatrix(Stored.of(weight), kind).rows(torch.arange(len(weight)))


class _SeenLinear(nn.Module):
    """A linear layer of packed weights, and of activations as the kernels see them."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.linear(activations_as_kernels_see_them(x), self.weight, self.bias)


class _SeenSparseMLP(nn.Module):
    def __init__(self, mlp: SparseMLP, kind: int) -> None:
        super().__init__()
        self.mlp = mlp
        self.gate_up, self.down = (as_packed(p, kind) for p in (mlp.experts.gate_up_proj, mlp.experts.down_proj))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mlp, seen, out = self.mlp, activations_as_kernels_see_them(x), torch.zeros_like(x)
        ids, weights = ops.route(mlp.gate(x), mlp.config.num_active, mlp.config.normalised)
        for expert in range(mlp.config.num_experts):
            tokens, slots = torch.where(ids == expert)
            gate, up = (seen[tokens] @ self.gate_up[expert].T).chunk(2, dim=-1)
            inner = activations_as_kernels_see_them(ops.swiglu(gate, up))
            out[tokens] += weights[tokens, slots, None] * (inner @ self.down[expert].T)
        if mlp.shared_expert is None:
            return out
        return out + torch.sigmoid(mlp.shared_expert_gate(x)) * mlp.shared_expert(x)


def see_as_kernels(module: nn.Module, kind: int = Q8, prefix: str = "") -> Any:
    """The module with its matrices and their inputs rounded as the kernels round them, in place."""
    for name, child in list(module.named_children()):
        path = f"{prefix}{name}"
        if isinstance(child, Linear):
            if not stays_float(f"{path}.weight", child.weight.shape):
                setattr(module, name, _SeenLinear(as_packed(child.weight, kind), child.bias))
        elif isinstance(child, nn.Embedding):
            child.weight.data = as_packed(child.weight, kind)
        elif not isinstance(child, Experts):
            see_as_kernels(child, kind, f"{path}.")
            if isinstance(child, SparseMLP):
                setattr(module, name, _SeenSparseMLP(child, kind))
    return module


def through_pages(target: Target, ids: list[int], size: int) -> torch.Tensor:
    """Logits [T, V] of a text in chunks of so many tokens: in each, the first and the rest as drafts, to have all. Keys
    and values are in f16."""
    runner = Runner(target, None, 8, 16, torch.float16)
    request = make_request(ids[:1])
    request.pages, request.state = [4, 1, 0, 3], RowState(slot=0)
    logits = []
    for start in range(0, len(ids), size):
        chunk = ids[start : start + size]
        request.ids, request.num_computed = ids[: start + 1], start
        batch = make_batch([ScheduledRow(request, 1, len(chunk))], [chunk[1:]], 16, (), runner.device)
        out = runner.verify(batch)
        runner.commit(out, [len(chunk)], [()])
        logits.append(out.logits)
    return torch.cat(logits)


def assert_equal_up_to_codes(ours: torch.Tensor, expected: torch.Tensor) -> None:
    """Logits [T, V] of the kernels and of ``see_as_kernels``. Where an activation lies between two codes a last bit
    decides, and all later tokens are off by a little; until then the logits are the same."""
    errors = (ours - expected).abs().mean(-1) / expected.std()
    assert errors.max() < 0.05 and errors[:2].max() < 1e-5, errors

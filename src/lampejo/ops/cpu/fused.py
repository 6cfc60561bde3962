"""Modules that stand in for those of ``models`` on a CPU: packed weights, and halves of a layer in one call each.

A model is built from ``models`` as always; at load its modules are replaced by these, which take the same arguments.
Their parameters are packed matrices (``csrc/lampejo_kernels.h``); the maths is that of the module they replace, up to
the rounding of weights and activations to 8 bits and of cached keys and values to f16.

Shape legend: T tokens, K inputs, N outputs, H hidden.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lampejo.errors import UserError
from lampejo.ops.cpu.arena import Arena
from lampejo.ops.cpu.delta import FusedDeltaNet
from lampejo.ops.cpu.library import (
    LIBRARY,
    Q4,
    Q4K,
    Q8,
    CAttentionHalf,
    CBatch,
    CContextHalf,
    CExpertsHalf,
    CMatrix,
    CMlpHalf,
    CSegment,
)
from lampejo.ops.stored import Stored

_KIND_OF_TYPE = {2: Q4, 3: Q4, 12: Q4K, 6: Q8, 7: Q8, 8: Q8, 13: Q8, 14: Q8}  # GGUF type -> how it is packed
MAX_HEAD_DIM, MAX_PAGE_SIZE = 256, 64  # limits of the kernels, csrc/kernels.h


class PackedMatrix:
    """[N, K] in the kernels' layout; or several of this shape, one after another in memory."""

    def __init__(
        self,
        stored: Stored | Sequence[Stored],
        float_kind: int = Q8,
        bias: torch.Tensor | None = None,
        arena: Arena | None = None,
    ) -> None:
        """``float_kind``: how matrices that the file holds as floats are packed; ``arena``: shared with others of a
        model."""
        assert LIBRARY is not None
        parts = [stored] if isinstance(stored, Stored) else stored
        self.shape = num_out, num_in = parts[0].shape
        kinds = {_KIND_OF_TYPE.get(part.type, float_kind) for part in parts}
        kind = kinds.pop() if len(kinds) == 1 else Q8  # which takes all
        size = LIBRARY.lampejo_packed_bytes(kind, num_out, num_in)
        self.data = (arena or Arena()).zeros(len(parts) * size)
        self.bias = None if bias is None else bias.float().contiguous()
        for i, part in enumerate(parts):
            _pack(part, kind, self.data.data_ptr() + i * size)
        bias_pointer = None if self.bias is None else self.bias.data_ptr()
        self.c = CMatrix(self.data.data_ptr(), kind, num_out, num_in, bias_pointer)
        self.pointer = ctypes.addressof(self.c)

    def rows(self, ids: torch.Tensor, which: int = 0) -> torch.Tensor:
        """ids [T], int64 -> [T, K], fp32; of one of several."""
        assert LIBRARY is not None
        ids = ids + which * (-(-self.shape[0] // 8) * 8)  # panels of 8 rows, the last padded
        out = torch.empty(len(ids), self.shape[1])
        LIBRARY.lampejo_unpack_rows(self.pointer, ids.data_ptr(), len(ids), out.data_ptr())
        return out


def _pack(stored: Stored, kind: int, address: int) -> None:
    """A few rows at a time, into zeroed memory."""
    assert LIBRARY is not None
    num_out, num_in = stored.shape
    order = torch.arange(num_out, dtype=torch.int32) if stored.row_order is None else stored.row_order
    done = 0
    for rows in stored.chunks():
        places = order[done : done + len(rows)]
        failed = LIBRARY.lampejo_pack(kind, address, len(rows), num_in, stored.type, rows.data_ptr(), places.data_ptr())
        if failed == -2:
            raise UserError("A weight matrix holds NaN or infinity.", "The file is damaged; fetch it again.")
        if failed:
            raise UserError(f"GGUF type {stored.type} cannot be packed.", "Use the reference operations.")
        done += len(rows)
    assert done == num_out, (done, num_out)


class PackedExperts(nn.Module):
    """Stands for ``experts.Experts``: the matrices of all experts, kind by kind."""

    def __init__(self, gate: PackedMatrix, up: PackedMatrix, down: PackedMatrix) -> None:
        super().__init__()
        self.gate, self.up, self.down = gate, up, down


class PackedLinear(nn.Module):
    """Stands for ``layers.Linear``."""

    def __init__(self, matrix: PackedMatrix) -> None:
        super().__init__()
        self.matrix = matrix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert LIBRARY is not None
        x = x.contiguous()
        out = torch.empty(len(x), self.matrix.shape[0])
        if len(x):
            LIBRARY.lampejo_matmul(self.matrix.pointer, x.data_ptr(), len(x), out.data_ptr())
        return out

    def select(self, rows: torch.Tensor) -> "PackedLinear":
        return PackedLinear(PackedMatrix(Stored.of(self.matrix.rows(rows))))


class PackedEmbedding(nn.Module):
    """Stands for ``nn.Embedding``."""

    def __init__(self, matrix: PackedMatrix) -> None:
        super().__init__()
        self.matrix = matrix

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.matrix.rows(ids)


class FusedNorm(nn.Module):
    """Stands for ``layers.RMSNorm``."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = 1 + norm.weight if norm.offset else norm.weight
        self.eps = norm.eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert LIBRARY is not None
        x = x.contiguous()
        out = torch.empty_like(x)
        size = x.shape[-1]
        LIBRARY.lampejo_rms_norm(
            self.weight.data_ptr(), self.eps, size, x.data_ptr(), x.numel() // size, out.data_ptr()
        )
        return out


class _Step:
    """A view of ``cache`` as the kernels read it, with everything that must outlive the calls."""

    def __init__(self, view: Any, rotation: tuple[torch.Tensor, torch.Tensor], num_tokens: int) -> None:
        assert view.cache.page_size <= MAX_PAGE_SIZE, view.cache.page_size
        self.num_tokens = num_tokens
        segments: list[CSegment] = []
        pages: list[int] = []
        for s in view.segments:
            segments.append(CSegment(s.start, s.length, s.position, len(pages)))
            pages += s.pages
        self.segments = (CSegment * len(segments))(*segments)
        self.pages = (ctypes.c_int32 * len(pages))(*pages)
        self.rotation = tuple(x.contiguous() for x in rotation)
        self.slots = view.slots
        self.c = CBatch(
            num_tokens,
            len(segments),
            view.cache.page_size,
            2 * rotation[0].shape[1],
            self.segments,
            self.pages,
            None if view.slots is None else view.slots.data_ptr(),
            self.rotation[0].data_ptr(),
            self.rotation[1].data_ptr(),
        )
        self.pointer = ctypes.addressof(self.c)
        k, v = view.cache.k, view.cache.v
        self.k, self.k_stride = k.data_ptr(), k.stride(0) * k.element_size()
        self.v, self.v_stride = v.data_ptr(), v.stride(0) * v.element_size()


def _step(view: Any, rotation: tuple[torch.Tensor, torch.Tensor], num_tokens: int) -> _Step:
    view.native = _Step(view, rotation, num_tokens)
    return view.native


def _attention_half(
    layer: Any, num_heads: int, num_kv_heads: int, block: tuple[int, bool, int | None]
) -> CAttentionHalf:
    norm, attention = layer.input_layernorm, layer.self_attn
    length, causal, window = block
    q_norm, k_norm = attention.q_norm, attention.k_norm
    return CAttentionHalf(
        norm=norm.weight.data_ptr(),
        eps=norm.eps,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=attention.head_dim,
        q=attention.q_proj.matrix.c,
        k=attention.k_proj.matrix.c,
        v=attention.v_proj.matrix.c,
        out=attention.o_proj.matrix.c,
        q_norm=None if q_norm is None else q_norm.weight.data_ptr(),
        k_norm=None if k_norm is None else k_norm.weight.data_ptr(),
        qk_eps=0.0 if k_norm is None else k_norm.eps,
        block=length,
        causal=int(causal),
        window=window or 0,
        gated=int(attention.gated),
    )


def _context_half(attention: CAttentionHalf) -> CContextHalf:
    return CContextHalf(
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        k=attention.k,
        v=attention.v,
        k_norm=attention.k_norm,
        qk_eps=attention.qk_eps,
    )


def _mlp_half(layer: Any) -> CMlpHalf:
    norm, mlp = layer.post_attention_layernorm, layer.mlp
    return CMlpHalf(
        norm=norm.weight.data_ptr(),
        eps=norm.eps,
        gate=mlp.gate_proj.matrix.c,
        up=mlp.up_proj.matrix.c,
        down=mlp.down_proj.matrix.c,
    )


def _experts_half(layer: Any) -> CExpertsHalf:
    norm, mlp = layer.post_attention_layernorm, layer.mlp
    half = CExpertsHalf(
        norm=norm.weight.data_ptr(),
        eps=norm.eps,
        num_experts=mlp.config.num_experts,
        num_active=mlp.config.num_active,
        normalised=int(mlp.config.normalised),
        router=mlp.gate.weight.data_ptr(),
        gate=mlp.experts.gate.c,
        up=mlp.experts.up.c,
        down=mlp.experts.down.c,
    )
    if mlp.shared_expert is not None:
        half.shared_router = mlp.shared_expert_gate.weight.data_ptr()
        half.shared_gate = mlp.shared_expert.gate_proj.matrix.c
        half.shared_up = mlp.shared_expert.up_proj.matrix.c
        half.shared_down = mlp.shared_expert.down_proj.matrix.c
    return half


class FusedLayer:
    """Stands for a pre-norm transformer layer: attention half and MLP half, one call each; a Gated DeltaNet has three.
    Changes x in place.

    Not a module: a call of one costs as much as a small kernel.
    """

    def __init__(
        self, layer: Any, num_heads: int, num_kv_heads: int, block: tuple[int, bool, int | None] | None = None
    ):
        """``layer`` has packed projections already. ``block``: a drafter's block length, causality and window."""
        assert LIBRARY is not None
        self.layer = layer  # keeps the matrices
        self._delta: FusedDeltaNet | None = None
        if layer.self_attn is None:
            self._delta = FusedDeltaNet(layer.input_layernorm, layer.linear_attn)
        else:
            self._attention = _attention_half(layer, num_heads, num_kv_heads, block or (0, False, None))
            self._attention_pointer = ctypes.addressof(self._attention)
            self._context = _context_half(self._attention)
        has_experts = hasattr(layer.mlp, "experts")
        self._mlp = _experts_half(layer) if has_experts else _mlp_half(layer)
        self._mlp_pointer = ctypes.addressof(self._mlp)
        self._attention_half = LIBRARY.lampejo_attention_half
        self._mlp_half = LIBRARY.lampejo_experts_half if has_experts else LIBRARY.lampejo_mlp_half

    def __call__(
        self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], index: int, view: Any
    ) -> torch.Tensor:
        step: _Step = view.native or _step(view, rotation, x.shape[0])
        at = x.data_ptr()
        if self._delta is not None:
            self._delta(x, index, view)
        else:
            k, v = step.k + index * step.k_stride, step.v + index * step.v_stride
            self._attention_half(self._attention_pointer, step.pointer, at, k, v)
        self._mlp_half(self._mlp_pointer, at, step.num_tokens)
        return x

    def store_context(
        self, ctx: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], index: int, view: Any
    ) -> None:
        """Keys and values of a drafter's context, straight into its pages."""
        assert LIBRARY is not None
        step = view.native or _step(view, rotation, ctx.shape[0])
        k, v = step.k + index * step.k_stride, step.v + index * step.v_stride
        LIBRARY.lampejo_context_half(ctypes.addressof(self._context), step.pointer, ctx.data_ptr(), k, v)

"""Gated DeltaNet on the kernels: its projections, and the recurrence through states that lie in slots.

Shape legend: T tokens, H hidden, C channels, Hv value heads of Dv, as in ``ops.recurrence``.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from lampejo.ops.cpu.library import LIBRARY, CDeltaHalf, CDeltaInputs, CDeltaRun, CDeltaSizes, CDeltaStore
from lampejo.ops.recurrence import DeltaSizes, Run


class RunPlan:
    """Runs as the kernels read them: made once per step, used by all layers."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.num_tokens = 0
        entries: list[CDeltaRun] = []
        stores: list[CDeltaStore] = []
        for run in runs:
            source = -1 if run.source is None else run.source
            entries.append(CDeltaRun(run.start, run.length, self.num_tokens, source, len(stores), len(run.stores)))
            stores += [CDeltaStore(end, slot) for end, slot in run.stores]
            self.num_tokens += run.length
        self.runs = (CDeltaRun * len(entries))(*entries)
        self.stores = (CDeltaStore * len(stores))(*stores)


def plan_runs(device: torch.device, runs: Sequence[Run]) -> RunPlan:
    return RunPlan(runs)


def delta_net_runs(
    mixed: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    conv_weight: torch.Tensor,
    sizes: DeltaSizes,
    windows: torch.Tensor,
    states: torch.Tensor,
    plan: RunPlan,
) -> torch.Tensor:
    """As ``ops.delta_net_runs``; all in fp32."""
    assert LIBRARY is not None
    assert mixed.stride(1) == log_decay.stride(1) == beta.stride(1) == 1 and log_decay.stride(0) == beta.stride(0)
    assert windows.is_contiguous() and states.is_contiguous()
    taps = conv_weight.t().contiguous()  # no copy if it lies token by token already
    out = torch.empty(plan.num_tokens, sizes.num_value_heads, sizes.value_head_dim)
    inputs = CDeltaInputs(
        sizes=_sizes(sizes, conv_weight.shape[1]),
        num_runs=len(plan.runs),
        runs=plan.runs,
        stores=plan.stores,
        mixed=mixed.data_ptr(),
        log_decay=log_decay.data_ptr(),
        beta=beta.data_ptr(),
        mixed_stride=mixed.stride(0),
        gate_stride=beta.stride(0),
        conv_weight=taps.data_ptr(),
        windows=windows.data_ptr(),
        states=states.data_ptr(),
    )
    LIBRARY.lampejo_delta_runs(ctypes.addressof(inputs), out.data_ptr())
    return out


def _sizes(sizes: DeltaSizes, conv_size: int) -> CDeltaSizes:
    return CDeltaSizes(
        num_key_heads=sizes.num_key_heads,
        num_value_heads=sizes.num_value_heads,
        key_dim=sizes.key_head_dim,
        value_dim=sizes.value_head_dim,
        conv_size=conv_size,
        tiled=int(sizes.tiled),
    )


class FusedDeltaNet:
    """Stands for ``qwen3_5.DeltaNet`` with the norm before it and the addition after it. Changes x in place."""

    def __init__(self, norm: Any, part: Any) -> None:
        """``part`` has packed projections already."""
        self.num_channels, self.num_heads = part.sizes.num_channels, part.sizes.num_value_heads
        self.width = self.num_channels + part.out_proj.matrix.shape[1]
        self.conv_weight = part.conv1d.weight[:, 0].t().contiguous().t()  # [C, K], in memory token by token
        self._rate = part.A_log.float().exp()
        self._half = CDeltaHalf(
            norm=norm.weight.data_ptr(),
            eps=norm.eps,
            out_eps=part.norm.eps,
            sizes=_sizes(part.sizes, self.conv_weight.shape[1]),
            qkv=part.in_proj_qkv.matrix.c,
            z=part.in_proj_z.matrix.c,
            out=part.out_proj.matrix.c,
            b=part.in_proj_b.weight.data_ptr(),
            a=part.in_proj_a.weight.data_ptr(),
            rate=self._rate.data_ptr(),
            step_bias=part.dt_bias.data_ptr(),
            out_norm=part.norm.weight.data_ptr(),
        )
        self._pointer = ctypes.addressof(self._half)

    def __call__(self, x: torch.Tensor, layer: int, view: Any) -> None:
        """x [T, H]; ``layer`` counts among the recurrent ones."""
        assert LIBRARY is not None
        projected, gates = torch.empty(len(x), self.width), torch.empty(len(x), 2 * self.num_heads)
        at = x.data_ptr()
        LIBRARY.lampejo_delta_inputs(self._pointer, at, len(x), projected.data_ptr(), gates.data_ptr())
        mixed, z = projected[:, : self.num_channels], projected[:, self.num_channels :]
        beta, log_decay = gates.chunk(2, dim=1)
        out = view.recur(layer, mixed, log_decay, beta, self.conv_weight)  # [T, Hv, Dv]
        LIBRARY.lampejo_delta_output(self._pointer, out.data_ptr(), z.data_ptr(), self.width, at, len(x))

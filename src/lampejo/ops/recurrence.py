"""The definition of correct for Gated DeltaNet (arXiv 2412.06464), as ``reference`` is for the other operations: plain
torch, on any device, differentiable.

Shape legend: T tokens, Hk key heads of Dk, Hv value heads of Dv, C = 2 * Hk * Dk + Hv * Dv channels, K tokens that the
short convolution sees.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

DELTA_CHUNK = 64  # tokens that the chunked form takes at once


class DeltaSizes(Protocol):
    """What ``delta_net`` needs to know of its heads; ``models.config.DeltaNetConfig`` has it."""

    @property
    def num_key_heads(self) -> int: ...
    @property
    def num_value_heads(self) -> int: ...
    @property
    def key_head_dim(self) -> int: ...
    @property
    def value_head_dim(self) -> int: ...
    @property
    def tiled(self) -> bool: ...


def delta_net(
    mixed: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    conv_weight: torch.Tensor,
    sizes: DeltaSizes,
    window: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Short convolution and gated delta rule of some tokens of one row, one token after another (arXiv 2412.06464,
    section 3.1, equation 10), in fp32.

    mixed [T, C]: q | k | v as projected; log_decay [T, Hv], at most 0; beta [T, Hv]; conv_weight [C, K], the present
    token last. window [C, K-1] holds the projections of the tokens before, state [Hv, Dk, Dv] what was learnt from
    them; a row starts with zeros in both. Returns out [T, Hv, Dv], and window and state after the last token, as new
    tensors. Bit-identical however a text is split into calls. All but ``conv_weight`` may have one more dimension in
    front, of several rows.
    """
    q, k, v, window = _convolved(mixed, conv_weight, sizes, window)
    decay, beta = log_decay.float().exp()[..., None, None], beta.float()[..., None]  # [T, Hv, 1, 1], [T, Hv, 1]
    q, k = q[..., None], k[..., None]  # [T, Hv, Dk, 1]
    state, outs = state.float(), [v[..., :0, :, :]]
    steps = (x.unbind(dim) for x, dim in ((q, -4), (k, -4), (v, -3), (decay, -4), (beta, -3)))
    for q_t, k_t, v_t, decay_t, beta_t in zip(*steps, strict=True):
        state = state * decay_t
        known = (state * k_t).sum(-2)  # [Hv, Dv]: what the state says about this key
        state = state + k_t * (beta_t * (v_t - known)).unsqueeze(-2)
        outs.append((state * q_t).sum(-2).unsqueeze(-3))
    return torch.cat(outs, dim=-3), window, state


def delta_net_chunked(
    mixed: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    conv_weight: torch.Tensor,
    sizes: DeltaSizes,
    window: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``delta_net`` as matrix products over chunks of tokens (arXiv 2412.06464, section 3.3), for devices that are slow
    at one token after another. Equal to it up to rounding, so not row-invariant.

    Within a chunk token i adds ``k_i u_i`` to the state, ``u_i = beta_i (v_i - what the state before i says of k_i)``.
    That state is the chunk's first one and the additions before i, all decayed: a triangular system for u.
    """
    num_tokens = mixed.shape[-2]
    chunk = max(1, min(num_tokens, DELTA_CHUNK))
    q, k, v, window = _convolved(mixed, conv_weight, sizes, window)
    # [T, Hv, ...] -> [Hv, chunks, n, ...]; padding has beta 0 and no decay, so it changes nothing
    q, k, v, beta, log_decay = (
        F.pad(x.float().transpose(-3, -2), (0, 0, 0, -num_tokens % chunk)).unflatten(-2, (-1, chunk))
        for x in (q, k, v, beta[..., None], log_decay[..., None])
    )
    since_start = log_decay.cumsum(-2)  # [Hv, chunks, n, 1], of the decay; between j and i it is the difference
    between = since_start - since_start.transpose(-2, -1)
    between = between.masked_fill(between.new_ones(chunk, chunk).triu(1).bool(), -math.inf).exp()  # 0 for j > i
    system = (beta * k) @ k.transpose(-2, -1) * between  # its diagonal is taken as 1
    right = torch.cat([beta * v, beta * since_start.exp() * k], dim=-1)
    of_values, of_state = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], dim=-1
    )  # u = of_values - of_state @ state
    seen = q @ k.transpose(-2, -1) * between  # [Hv, chunks, n, n]
    q = q * since_start.exp()
    total = since_start[..., -1:, :]
    k = (k * (total - since_start).exp()).transpose(-2, -1)

    state, outs = state.float(), [v[..., 0:0, 0, :]]
    steps = (x.unbind(-3) for x in (q, k, seen, of_values, of_state, total.exp()))
    for q_c, k_c, seen_c, of_values_c, of_state_c, decay_c in zip(*steps, strict=True):
        u = of_values_c - of_state_c @ state
        outs.append(q_c @ state + seen_c @ u)
        state = state * decay_c + k_c @ u
    return torch.cat(outs, dim=-2).transpose(-3, -2)[..., :num_tokens, :, :], window, state


def _convolved(
    mixed: torch.Tensor, conv_weight: torch.Tensor, sizes: DeltaSizes, window: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys [T, Hv, Dk] of unit length, queries scaled, values [T, Hv, Dv], and the next window."""
    num_tokens, kernel = mixed.shape[-2], conv_weight.shape[1]
    seen = torch.cat([window.transpose(-2, -1).float(), mixed.float()], dim=-2)  # [K - 1 + T, C]
    taps = [seen[..., i : i + num_tokens, :] * conv_weight[:, i].float() for i in range(kernel)]
    total = taps[0]
    for tap in taps[1:]:
        total = total + tap
    total = total / (1 + torch.exp(-total))
    key_size = sizes.num_key_heads * sizes.key_head_dim
    q, k, v = total.split([key_size, key_size, sizes.num_value_heads * sizes.value_head_dim], dim=-1)
    group = sizes.num_value_heads // sizes.num_key_heads
    q, k = (_unit(x.unflatten(-1, (sizes.num_key_heads, sizes.key_head_dim))) for x in (q, k))
    q, k = (x.tile(group, 1) if sizes.tiled else x.repeat_interleave(group, dim=-2) for x in (q, k))
    v = v.unflatten(-1, (sizes.num_value_heads, sizes.value_head_dim))
    next_window = seen[..., num_tokens:, :].transpose(-2, -1).to(window.dtype).contiguous()
    return q * sizes.key_head_dim**-0.5, k, v, next_window


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


@dataclass(frozen=True)
class Run:
    """Tokens of one row that go through its recurrent state, one after another.

    ``start`` is the first index in the batch, ``length`` the number of tokens, at least 1; ``source`` the slot of the
    state before them, None for a row that begins; ``stores``, in ascending order: after so many of the tokens, at least
    one, the state goes to that slot. Without stores the states stay as they are.
    """

    start: int
    length: int
    source: int | None
    stores: Sequence[tuple[int, int]]


def plan_runs(device: torch.device, runs: Sequence[Run]) -> Sequence[Run]:
    """What ``delta_net_runs`` wants to know, made once for all layers: here, no more than the runs are."""
    return runs


def delta_net_runs(
    mixed: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    conv_weight: torch.Tensor,
    sizes: DeltaSizes,
    windows: torch.Tensor,
    states: torch.Tensor,
    runs: Sequence[Run],
) -> torch.Tensor:
    """``delta_net`` of several rows whose states lie in slots, and are stored there.

    windows [slots, C, K-1], states [slots, Hv, Dk, Dv]; the others as there. Returns the outputs of all runs' tokens
    [sum of lengths, Hv, Dv], run by run.
    """
    outs = []
    for run in runs:
        if run.source is None:
            window, state = torch.zeros_like(windows[0]), torch.zeros_like(states[0])
        else:
            window, state = windows[run.source], states[run.source]
        done = 0
        for end, slot in [*run.stores, (run.length, None)]:
            if done < end:
                part = slice(run.start + done, run.start + end)
                inputs = mixed[part], log_decay[part], beta[part], conv_weight
                out, window, state = delta_net(*inputs, sizes, window, state)
                outs.append(out)
                done = end
            if slot is not None:
                windows[slot], states[slot] = window, state
    return torch.cat(outs)

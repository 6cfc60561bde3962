"""The definition of correct: every operation in plain torch, on any device, differentiable.

Shape legend: T tokens of a step (flat over rows), R rows, B block length, H hidden, N outputs, K inputs, Q query heads,
G key/value heads, D head size, P pages, S page size, E experts, I inner size of an expert. Of a Gated DeltaNet: Hk key
heads of Dk, Hv value heads of Dv, C = 2 * Hk * Dk + Hv * Dv channels, K tokens that the short convolution sees.

**Row invariance** (design principle 3): on a CPU in fp32 a token's result is bit-identical whether it is computed alone
or beside others. BLAS libraries choose their kernel, and so their order of summation, by the number of rows when there
are few; so no matrix product here has fewer than ``ROW_TILE`` rows, and attention walks the keys in chunks of fixed
size at fixed positions, where a chunk that a row may not see changes nothing, not even a last bit. ``tests/ops`` checks
it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

ROW_TILE = 8
KEY_CHUNK = 128  # keys per attention chunk; a multiple of every page size in use
QUERY_TILE = 128  # tokens whose scores are held at once
DELTA_CHUNK = 64  # tokens that the chunked delta rule takes at once
HIDDEN_SCORE = -1e30  # finite, so that a difference of two hidden scores is no NaN; its exponential is an exact 0


@dataclass(frozen=True)
class Segment:
    """The tokens of one row in a flat batch.

    ``start`` is the first index in the batch, ``length`` the number of tokens, ``position`` the absolute position of
    the first of them, ``pages`` the row's page table; keys are visible up to and including a token's own position.
    """

    start: int
    length: int
    position: int
    pages: Sequence[int]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias``. x [T, K], weight [N, K] -> [T, N]."""
    num_rows = x.shape[0]
    if num_rows == 0 or num_rows % ROW_TILE == 0 or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    return F.linear(F.pad(x, (0, 0, 0, -num_rows % ROW_TILE)), weight, bias)[:num_rows]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: bool = False) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, in fp32, times ``weight`` (arXiv 1910.07467); with ``offset``
    times ``1 + weight``, in fp32 as well."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * (1 + weight.float())).to(x.dtype) if offset else weight * y.to(x.dtype)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Not ``torch.sigmoid``: the ends of its loops go through other code than the middle, and so round otherwise."""
    return 1 / (1 + torch.exp(-x))


def softplus(x: torch.Tensor) -> torch.Tensor:
    """``log(1 + exp(x))``, without overflow; not ``F.softplus`` for the reason at ``sigmoid``."""
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, the gated half of the MLP (arXiv 2002.05202); not ``F.silu`` for the reason at
    ``sigmoid``."""
    return gate / (1 + torch.exp(-gate)) * up


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates halves of each head (arXiv 2104.09864), or of its first dimensions, if cos and sin cover no more.

    x [T, heads, D], cos and sin [T, R/2] with R <= D -> [T, heads, D].
    """
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([first * c - second * s, second * c + first * s, rest], dim=-1).to(x.dtype)


def write_pages(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
) -> None:
    """Stores one key and one value per token. k_cache [P, G, D, S], v_cache [P, G, S, D]; k, v [T, G, D]; slots [T] are
    page * S + offset."""
    page_size = k_cache.shape[-1]
    pages, offsets = slots // page_size, slots % page_size
    k_cache[pages, :, :, offsets] = k.to(k_cache.dtype)
    v_cache[pages, :, offsets] = v.to(v_cache.dtype)


def paged_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, segments: Sequence[Segment]
) -> torch.Tensor:
    """Causal attention of each segment over its own pages, its own tokens included (already written).

    q [T, Q, D], k_cache [P, G, D, S], v_cache [P, G, S, D] -> [T, Q, D]. What a page holds past a segment's last token
    never matters, not even NaN.
    """
    out = torch.empty_like(q)
    for segment in segments:
        keys, values = _chunks(k_cache, v_cache, segment.pages, segment.position + segment.length)
        for first in range(0, segment.length, QUERY_TILE):  # bounds the memory that the scores take
            length = min(QUERY_TILE, segment.length - first)
            start = segment.start + first
            out[start : start + length] = _attend(q[start : start + length], keys, values, segment.position + first)
    return out


def _chunks(
    k_cache: torch.Tensor, v_cache: torch.Tensor, pages: Sequence[int], num_keys: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A row's first ``num_keys`` positions in chunks of fixed size: keys [chunks, G, D, KEY_CHUNK], values
    [chunks, G, KEY_CHUNK, D]. Values past the end are zero, keys there are whatever the page holds."""
    num_kv, head_dim, page_size = k_cache.shape[1:]
    num_chunks = -(-num_keys // KEY_CHUNK)
    needed = list(pages[: -(-num_keys // page_size)])
    needed += [needed[0]] * (num_chunks * (KEY_CHUNK // page_size) - len(needed))  # any page: hidden below
    index = torch.tensor(needed, device=k_cache.device)
    keys = k_cache[index].view(num_chunks, -1, num_kv, head_dim, page_size).permute(0, 2, 3, 1, 4).float()
    values = v_cache[index].view(num_chunks, -1, num_kv, page_size, head_dim).transpose(1, 2).float()
    values = values.reshape(num_chunks, num_kv, KEY_CHUNK, head_dim)
    values[-1, :, num_keys - (num_chunks - 1) * KEY_CHUNK :] = 0  # 0 * NaN is NaN
    return keys.reshape(num_chunks, num_kv, head_dim, KEY_CHUNK), values


def _attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: int) -> torch.Tensor:
    """q [n, Q, D] at ``position`` and on, keys and values of ``_chunks`` -> [n, Q, D].

    Row-invariant: the maximum is exact whatever the order, each chunk is a matrix product of fixed shape, and the
    chunks are added up one after another (``cumsum``), where those that are hidden add exact zeros.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_chunks, num_kv = keys.shape[:2]
    group = num_heads // num_kv
    padded = num_tokens + (-num_tokens % ROW_TILE)
    # [n, Q, D] -> [G, padded * group, D]: the rows of one matrix product are all queries of one key/value head
    rows = F.pad(q.float() * head_dim**-0.5, (0, 0, 0, 0, 0, padded - num_tokens))
    rows = rows.view(padded, num_kv, group, head_dim).transpose(0, 1).reshape(num_kv, padded * group, head_dim)
    rows = rows.expand(num_chunks, -1, -1, -1)
    query_position = position + torch.arange(padded, device=q.device).repeat_interleave(group)
    key_position = torch.arange(num_chunks * KEY_CHUNK, device=q.device).view(num_chunks, 1, 1, KEY_CHUNK)

    scores = torch.matmul(rows, keys)  # [chunks, G, padded * group, KEY_CHUNK]
    scores = scores.masked_fill(key_position > query_position[:, None], HIDDEN_SCORE)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True).amax(0))
    total = weights.sum(-1, keepdim=True).cumsum(0)[-1]
    out = torch.matmul(weights, values).cumsum(0)[-1] / total  # [G, padded * group, D]
    out = out.view(num_kv, padded, group, head_dim).transpose(0, 1)
    return out.reshape(padded, num_heads, head_dim)[:num_tokens].to(q.dtype)


def block_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    context_k: Sequence[torch.Tensor],
    context_v: Sequence[torch.Tensor],
    causal: bool = False,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of a drafter's blocks over [context ; block] (arXiv 2602.06036, section 3).

    q [R, B, Q, D]; k, v [R, B, G, D]; context_k, context_v: R tensors [C_r, G, D], the positions up to each block's
    anchor (those that its window can reach suffice). Block rows see all of the context and the whole block in both
    directions; ``causal`` hides later block rows, ``window`` hides what is ``window`` or more positions away. Drafts
    never decide the output, so this one need not be row-invariant.
    """
    num_rows, block = q.shape[:2]
    outs = []
    for r in range(num_rows):
        num_context = context_k[r].shape[0]
        keys = torch.cat([context_k[r].to(k.dtype), k[r]]).transpose(0, 1)  # [G, C + B, D]
        values = torch.cat([context_v[r].to(v.dtype), v[r]]).transpose(0, 1)
        query_index = num_context + torch.arange(block, device=q.device)[:, None]
        key_index = torch.arange(num_context + block, device=q.device)[None]
        visible = torch.ones(block, num_context + block, dtype=torch.bool, device=q.device)
        if causal:
            visible &= key_index <= query_index
        if window is not None:
            visible &= (query_index - key_index).abs() < window
        outs.append(
            F.scaled_dot_product_attention(
                q[r].transpose(0, 1), keys, values, attn_mask=visible, enable_gqa=True
            ).transpose(0, 1)
        )
    return torch.stack(outs)


def route(router_logits: torch.Tensor, num_active: int, normalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token: the ``num_active`` most probable of a softmax over all (arXiv 1701.06538).

    router_logits [T, E] -> ids [T, num_active], best first, and weights [T, num_active], fp32; ``normalised`` weights
    add up to 1.
    """
    scores = router_logits.float()
    scores = torch.exp(scores - scores.amax(-1, keepdim=True))
    weights, ids = (scores / scores.sum(-1, keepdim=True)).topk(num_active, dim=-1)
    return ids, weights / weights.sum(-1, keepdim=True) if normalised else weights


def experts(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    num_active: int,
    normalised: bool,
) -> torch.Tensor:
    """Mixture of experts: each token goes through the MLPs that ``route`` gives it, their outputs are weighted and
    added up in ascending order of the experts' ids.

    x [T, H], router_logits [T, E], gate_up [E, 2 I, H] (gate rows first), down [E, H, I] -> [T, H].
    """
    ids, weights = route(router_logits, num_active, normalised)
    out = torch.zeros_like(x)
    for expert in ids.unique().tolist():  # ascending
        tokens, slots = torch.where(ids == expert)
        gate, up = linear(x[tokens], gate_up[expert]).chunk(2, dim=-1)
        y = linear(swiglu(gate, up), down[expert])
        out[tokens] += weights[tokens, slots, None].to(x.dtype) * y
    return out


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

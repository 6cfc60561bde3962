"""The definition of correct: every operation in plain torch, on any device, differentiable.

Shape legend: T tokens of a step (flat over rows), R rows, B block length, H hidden, N outputs, K inputs, Q query heads,
G key/value heads, D head size, P pages, S page size, E experts, I inner size of an expert.

**Row invariance** (design principle 3): on a CPU in fp32 a token's result is bit-identical whether it is computed alone
or beside others. BLAS libraries choose their kernel, and so their order of summation, by the number of rows when there
are few; so no matrix product here has fewer than ``ROW_TILE`` rows, and attention walks the keys in chunks of fixed
size at fixed positions, where a chunk that a row may not see changes nothing, not even a last bit. ``tests/ops`` checks
it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

ROW_TILE = 8
KEY_CHUNK = 128  # keys per attention chunk; a multiple of every page size in use
QUERY_TILE = 128  # tokens whose scores are held at once
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
    if num_rows % ROW_TILE == 0:
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


def read_pages(
    k_cache: torch.Tensor, v_cache: torch.Tensor, pages: Sequence[int], start: int, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions start .. end-1 of a row as k, v [end - start, G, D]."""
    page_size = k_cache.shape[-1]
    first = start // page_size
    index = torch.tensor(pages[first : -(-end // page_size)], dtype=torch.long, device=k_cache.device)
    span = slice(start - first * page_size, end - first * page_size)
    k = k_cache[index].permute(0, 3, 1, 2).flatten(0, 1)
    v = v_cache[index].transpose(1, 2).flatten(0, 1)
    return k[span], v[span]


def plan_attention(device: torch.device, segments: Sequence[Segment], page_size: int) -> Sequence[Segment]:
    """What attention wants to know of a step's segments, made once for all layers: here, no more than they are."""
    return segments


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


def paged_block_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    segments: Sequence[Segment],
    causal: bool = False,
    window: int | None = None,
) -> torch.Tensor:
    """``block_attention`` over contexts that lie in pages: each segment is a block, at the position of its anchor.

    q [R * B, Q, D]; k, v [R * B, G, D]; k_cache [P, G, D, S], v_cache [P, G, S, D] -> [R * B, Q, D]. What a page holds
    from the anchor on never matters, not even NaN.
    """
    starts = [0 if window is None else max(0, s.position - window + 1) for s in segments]
    context = [
        read_pages(k_cache, v_cache, s.pages, start, s.position) for s, start in zip(segments, starts, strict=True)
    ]
    q, k, v = (x.view(len(segments), -1, *x.shape[1:]) for x in (q, k, v))
    keys, values = [c[0] for c in context], [c[1] for c in context]
    return block_attention(q, k, v, keys, values, causal, window).flatten(0, 1)


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

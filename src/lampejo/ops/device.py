"""The operations for devices other than the CPU: few large calls, nothing that the host would have to wait for.

Equal to ``reference`` up to rounding, in fp32, bf16 and fp16; not row-invariant. Built on PyTorch's own kernels
(scaled_dot_product_attention, grouped products), so that nothing here depends on the kind of device.

Shape legend: as in ``reference``; R segments that go through a call together, n queries of each, L keys of each, Q/G
query heads to a key/value head.
"""

from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .recurrence import DeltaSizes, Run, delta_net, delta_net_chunked
from .reference import Segment, route

FEW_QUERIES = 16  # segments of fewer tokens than this are padded to each other: their keys cost more than their queries
FEW_KEYS = 2048  # likewise for fewer keys than this
FEW_STEPS = 4  # tokens of a recurrence that are taken one by one; the chunked form is about 30 kernels for any number
MASK_ELEMENTS = 1 << 24  # of queries by keys, most in one call: bounds what a mask takes


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(x, weight, bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: bool = False) -> torch.Tensor:
    """One kernel, or two with ``offset``, which rounds once more."""
    if not offset:
        return F.rms_norm(x, weight.shape, weight, eps)
    y = F.rms_norm(x, weight.shape, None, eps)
    return torch.addcmul(y, y, weight)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


class Plan:
    """What attention needs to know of a step's segments, on the device: made once, used by all layers."""

    def __init__(self, segments: Sequence[Segment], page_size: int, device: torch.device) -> None:
        self.segments = segments
        self.page_size = page_size
        self.device = device
        self._contexts: dict[int | None, Context] = {}

    @cached_property
    def parts(self) -> list["Part"]:
        """The segments, those of similar size together; long ones in tiles."""
        alike: dict[tuple[int, int], list[Segment]] = {}
        for segment in self.segments:
            for tile in _tiles(segment):
                num_keys = tile.position + tile.length
                size = (
                    max(tile.length - 1, FEW_QUERIES - 1).bit_length(),
                    max(num_keys - 1, FEW_KEYS - 1).bit_length(),
                )
                alike.setdefault(size, []).append(tile)
        return [Part(tiles, self.page_size, self.device) for tiles in alike.values()]

    @cached_property
    def order(self) -> torch.Tensor | None:
        """Where each token [T] lies in the outputs of all parts, one after another; None: they are in order."""
        places = [0] * sum(segment.length for segment in self.segments)
        base = 0
        for part in self.parts:
            for tile in part.tiles:
                places[tile.start : tile.start + tile.length] = range(base, base + tile.length)
                base += part.num_queries
        return None if places == list(range(base)) else torch.tensor(places).to(self.device)

    def context(self, window: int | None) -> "Context":
        """Of a drafter's blocks: what a window lets them see before their anchors."""
        if window not in self._contexts:
            self._contexts[window] = Context(self.segments, window, self.page_size, self.device)
        return self._contexts[window]


def plan_attention(device: torch.device, segments: Sequence[Segment], page_size: int) -> Plan:
    return Plan(segments, page_size, device)


def _tiles(segment: Segment) -> list[Segment]:
    """A segment in parts whose masks are not too large."""
    num_keys = segment.position + segment.length
    step = max(MASK_ELEMENTS // num_keys, FEW_QUERIES)
    return [
        Segment(segment.start + i, min(step, segment.length - i), segment.position + i, segment.pages)
        for i in range(0, segment.length, step)
    ]


class Part:
    """Tiles that attend in one call, padded to the longest. Padding repeats a tile's last query and its last key: it
    is finite, and hidden or thrown away."""

    def __init__(self, tiles: Sequence[Segment], page_size: int, device: torch.device) -> None:
        self.tiles = tiles
        self.num_queries = max(tile.length for tile in tiles)
        num_keys = [tile.position + tile.length for tile in tiles]
        numbers = [(t.start, t.length - 1, t.position) for t in tiles]
        (start, last, position), table = _on_device(numbers, [t.pages for t in tiles], max(num_keys), page_size, device)
        within = torch.minimum(torch.arange(self.num_queries, device=device), last)  # [R, n]
        self.queries = start + within
        keys = torch.arange(max(num_keys), device=device)
        self.slots = _slots(torch.minimum(keys, position + last), table, page_size)
        self._visible = None  # if all queries see all keys
        if self.num_queries > 1 or min(num_keys) < max(num_keys):
            self._visible = keys <= (position + within)[:, :, None]  # [R, n, L]
        self._masks: dict[int, torch.Tensor] = {}

    def mask(self, group: int) -> torch.Tensor | None:
        """For ``_fold``ed queries [R, 1, n * group, L]."""
        if self._visible is not None and group not in self._masks:
            self._masks[group] = _repeated(self._visible, group)
        return self._masks.get(group)


class Context:
    """The context of a drafter's blocks, padded to the longest, and what the blocks see of it and of themselves."""

    def __init__(self, segments: Sequence[Segment], window: int | None, page_size: int, device: torch.device) -> None:
        self.window = window
        self.block = segments[0].length
        firsts = [0 if window is None else max(0, s.position - window + 1) for s in segments]
        counts = [s.position - first for s, first in zip(segments, firsts, strict=True)]
        self.num_keys = max(counts)
        numbers = [(first, count, s.position) for s, first, count in zip(segments, firsts, counts, strict=True)]
        ends = max(s.position for s in segments)
        (first, count, anchor), table = _on_device(numbers, [s.pages for s in segments], ends, page_size, device)
        keys = torch.arange(self.num_keys, device=device)
        self.slots = _slots(first + torch.minimum(keys, (count - 1).clamp(min=0)), table, page_size)
        self.filled = keys < count  # [R, C]
        self.has_empty = 0 in counts  # there is no key to repeat, and what the page holds may be a NaN
        within = torch.arange(self.block, device=device)
        self._visible = self.filled[:, None].expand(-1, self.block, -1)  # [R, B, C]
        if window is not None:
            distance = (anchor + within)[:, :, None] - (first + keys)[:, None]
            self._visible = self._visible & (distance < window)
        self._distance = within[:, None] - within  # [B, B]
        self._masks: dict[tuple[bool, int], torch.Tensor] = {}

    def mask(self, causal: bool, group: int) -> torch.Tensor:
        """Over [context ; block], for ``_fold``ed queries [R, 1, B * group, C + B]."""
        if (causal, group) not in self._masks:
            own = torch.ones_like(self._distance, dtype=torch.bool)
            if causal:
                own = self._distance >= 0
            if self.window is not None:
                own = own & (self._distance.abs() < self.window)
            own = own.expand(len(self._visible), -1, -1)
            self._masks[causal, group] = _repeated(torch.cat([self._visible, own], dim=-1), group)
        return self._masks[causal, group]


def paged_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: Plan) -> torch.Tensor:
    num_kv = k_cache.shape[1]
    outs = []
    for part in plan.parts:
        queries = _fold(q[part.queries], num_kv)
        keys, values = _read(k_cache, v_cache, part.slots, q.dtype)
        mask = part.mask(q.shape[1] // num_kv)
        outs.append(_unfold(F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask), part.num_queries))
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out if plan.order is None else out[plan.order]


def paged_block_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: Plan,
    causal: bool = False,
    window: int | None = None,
) -> torch.Tensor:
    context, num_kv = plan.context(window), k.shape[1]
    block, group = context.block, q.shape[1] // num_kv
    keys, values = (x.view(-1, block, *x.shape[1:]).transpose(1, 2) for x in (k, v))  # [R, G, B, D]
    if context.num_keys:
        before = list(_read(k_cache, v_cache, context.slots, q.dtype))
        if context.has_empty:
            before = [x.masked_fill(~context.filled[:, None, :, None], 0) for x in before]
        keys, values = (torch.cat(pair, dim=2) for pair in zip(before, (keys, values), strict=True))
    queries = _fold(q.view(-1, block, *q.shape[1:]), num_kv)
    mask = context.mask(causal, group)
    return _unfold(F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask), block)


def _on_device(
    numbers: Sequence[tuple[int, ...]],
    pages: Sequence[Sequence[int]],
    num_keys: int,
    page_size: int,
    device: torch.device,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Some numbers of each of R segments, as columns [R, 1], and their page tables [R, pages]; in one transfer."""
    num_pages = -(-num_keys // page_size)
    tables = [list(p[:num_pages]) for p in pages]
    rows = [[*n, *table, *[0] * (num_pages - len(table))] for n, table in zip(numbers, tables, strict=True)]
    moved = torch.tensor(rows).to(device)
    count = len(numbers[0])
    return list(moved[:, :count].split(1, dim=1)), moved[:, count:]


def _slots(positions: torch.Tensor, table: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages and offsets within them, each [R, 1, L], of the positions [R, L] of R rows."""
    pages = table.gather(1, positions // page_size) if table.shape[1] else positions
    return pages[:, None], (positions % page_size)[:, None]


def _read(
    k_cache: torch.Tensor, v_cache: torch.Tensor, slots: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [R, G, L, D] that lie in pages."""
    pages, offsets = slots
    heads = torch.arange(k_cache.shape[1], device=k_cache.device)[:, None]
    return k_cache[pages, heads, :, offsets].to(dtype), v_cache[pages, heads, offsets].to(dtype)


def _fold(q: torch.Tensor, num_kv: int) -> torch.Tensor:
    """q [R, n, Q, D] -> [R, G, n * Q/G, D]: the query heads of a key/value head as queries of one head."""
    return q.unflatten(2, (num_kv, -1)).transpose(1, 2).flatten(2, 3)


def _unfold(out: torch.Tensor, num_queries: int) -> torch.Tensor:
    """[R, G, n * Q/G, D] -> [R * n, Q, D]."""
    return out.unflatten(2, (num_queries, -1)).transpose(1, 2).flatten(2, 3).flatten(0, 1)


def _repeated(visible: torch.Tensor, group: int) -> torch.Tensor:
    """[R, n, L] -> [R, 1, n * group, L]."""
    return visible.repeat_interleave(group, dim=1)[:, None]


def experts(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    num_active: int,
    normalised: bool,
) -> torch.Tensor:
    """Tokens sorted by expert, two grouped products; the outputs are added up in fp32, best expert first."""
    ids, weights = route(router_logits, num_active, normalised)
    by_expert, order = ids.flatten().sort(stable=True)  # [T * A]
    # int32 [E]: where the tokens of each expert end
    ends = torch.searchsorted(by_expert, torch.arange(len(gate_up), device=x.device), right=True, out_int32=True)
    gate, up = _grouped(x[order // num_active], gate_up, ends).chunk(2, dim=-1)
    y = _grouped(swiglu(gate, up), down, ends)
    by_token = torch.empty_like(y).index_copy(0, order, y).unflatten(0, (-1, num_active))  # [T, A, H]
    return (by_token.float() * weights[..., None]).sum(1).to(x.dtype)


def _grouped(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows up to ``ends[0]`` by the first matrix, and so on. x [n, K], weight [E, N, K] -> [n, N]."""
    aligned = all(size * x.element_size() % 16 == 0 for size in weight.shape[1:])
    if aligned and _has_grouped_products(x.device, x.dtype):
        return _grouped_mm(x, weight.transpose(1, 2), offs=ends)
    out, start = x.new_empty(len(x), weight.shape[1]), 0
    for expert, end in enumerate(ends.tolist()):  # the host waits here, once per product
        if end > start:
            out[start:end] = F.linear(x[start:end], weight[expert])
        start = end
    return out


_grouped_mm: Any = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


@cache
def _has_grouped_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this PyTorch has them for this device and type, by a small one. Found out once."""
    x = torch.arange(8 * 16, device=device).view(8, 16).remainder(3).to(dtype)
    weight = torch.arange(3 * 32 * 16, device=device).view(3, 32, 16).remainder(2).to(dtype)
    try:
        ends = torch.tensor([3, 3, 8], dtype=torch.int32, device=device)
        out = _grouped_mm(x, weight.transpose(1, 2), offs=ends)
    except (RuntimeError, TypeError):  # the latter: there is no such function
        return False
    return torch.equal(out, torch.cat([F.linear(x[:3], weight[0]), F.linear(x[3:], weight[2])]))


class RunPlan:
    """Runs through recurrent states, on the device: made once per step, used by all layers.

    A run is cut where its state is stored. The first pieces of all runs make up the first round, and so on; those of
    similar length go together.
    """

    def __init__(self, runs: Sequence[Run], device: torch.device) -> None:
        alike: dict[tuple[int, int], list[_Piece]] = {}
        for run in runs:
            done, source = 0, run.source
            for turn, (end, slots) in enumerate(_cuts(run)):
                length = end - done
                size = 0 if length == 1 else 1 + ((length - 1) // FEW_QUERIES).bit_length()
                alike.setdefault((turn, size), []).append(_Piece(run.start + done, length, source, slots))
                done, source = end, slots[0] if slots else None
        self.groups = [PieceGroup(alike[key], device) for key in sorted(alike)]
        places: dict[int, int] = {}  # token -> where its output lies
        base = 0
        for group in self.groups:
            for piece in group.pieces:
                places |= {piece.start + i: base + i for i in range(piece.length)}
                base += group.num_tokens
        order = [places[token] for run in runs for token in range(run.start, run.start + run.length)]
        self.order = None if order == list(range(base)) else torch.tensor(order).to(device)


def plan_runs(device: torch.device, runs: Sequence[Run]) -> RunPlan:
    return RunPlan(runs, device)


class _Piece(NamedTuple):
    start: int
    length: int
    source: int | None
    slots: list[int]  # where its last state goes


def _cuts(run: Run) -> list[tuple[int, list[int]]]:
    """Where the state is stored, by the number of tokens before; the end of the run is one of them."""
    cuts: dict[int, list[int]] = {}
    for end, slot in run.stores:
        cuts.setdefault(end, []).append(slot)
    cuts.setdefault(run.length, [])
    return sorted(cuts.items())


class PieceGroup:
    """R pieces of runs, padded to the longest, n tokens. Padding does not change a state (beta 0, no decay)."""

    def __init__(self, pieces: Sequence[_Piece], device: torch.device) -> None:
        self.pieces = pieces
        lengths = [piece.length for piece in pieces]
        self.num_tokens = max(lengths)
        numbers = torch.tensor([(p.start, p.length, p.source or 0, p.source is None) for p in pieces]).to(device)
        start, length, self.sources, is_new = numbers.unbind(1)
        within = torch.arange(self.num_tokens, device=device)
        self.tokens = start[:, None] + torch.minimum(within, length[:, None] - 1)  # [R, n]
        self.length = length if min(lengths) < self.num_tokens else None
        self.padding = (within >= length[:, None])[..., None]  # [R, n, 1]
        self.is_new = is_new.bool()[:, None, None] if any(piece.source is None for piece in pieces) else None
        stores = [(row, slot) for row, piece in enumerate(pieces) for slot in piece.slots]
        self.stores = torch.tensor(stores).to(device).unbind(1) if stores else None

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        conv_weight: torch.Tensor,
        sizes: DeltaSizes,
        windows: torch.Tensor,
        states: torch.Tensor,
    ) -> torch.Tensor:
        """``inputs``: mixed, log_decay and beta. Returns out [R * n, Hv, Dv]."""
        mixed, log_decay, beta = (x[self.tokens] for x in inputs)
        window, state = windows[self.sources], states[self.sources]
        if self.is_new is not None:  # whatever the slots held before
            window, state = window.masked_fill(self.is_new, 0), state.masked_fill(self.is_new[..., None], 0)
        if self.length is not None:
            log_decay, beta = log_decay.masked_fill(self.padding, 0), beta.masked_fill(self.padding, 0)
        form = delta_net if self.num_tokens <= FEW_STEPS else delta_net_chunked
        out, next_window, state = form(mixed, log_decay, beta, conv_weight, sizes, window, state)
        if self.stores is not None:
            if self.length is not None:  # the last projections, padding not counted
                seen = torch.cat([window, mixed.transpose(1, 2).to(window.dtype)], dim=2)  # [R, C, K - 1 + n]
                columns = self.length[:, None] + torch.arange(window.shape[2], device=window.device)
                next_window = seen.gather(2, columns[:, None].expand(window.shape))
            rows, slots = self.stores
            windows[slots], states[slots] = next_window[rows], state[rows]
        return out.flatten(0, 1)


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
    outs = [group.run((mixed, log_decay, beta), conv_weight, sizes, windows, states) for group in plan.groups]
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out if plan.order is None else out[plan.order]

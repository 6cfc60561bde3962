"""Keys and values in fixed-size pages, states of recurrent layers in slots, and what a step sees of them.

Ownership of a request's positions, as intervals (n = num_computed):

    [0, n)          committed: never written again; full pages of it may be shared through the prefix cache
    [n, n + step)   tentative: written by the step that verifies them; those of accepted tokens become committed
                    when ``num_computed`` moves, those of rejected ones are overwritten by the next step
    the rest        free space of the last page: may hold anything, is never read

So a commit is a length that moves, and nothing is ever trimmed. The drafter's context has a pool of its own with the
same page ids: one page table serves both, and a prefix hit restores the drafter's context too.

The state of a recurrent layer has no length that could move. A row keeps it at its last commit: a step with drafts
computes from it and journals the layers' small inputs; the commit folds those of accepted tokens in.

Shape legend: T tokens of a step, B block length, Q query heads, G key/value heads, D head size, P pages, S page size.
Of a Gated DeltaNet: C channels, K tokens that the convolution sees, Hv value heads, Dk and Dv their sizes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from lampejo import ops
from lampejo.batch import Batch
from lampejo.models.config import DeltaNetConfig
from lampejo.scheduler import ScheduledRow
from lampejo.states import Save


class PagedCache:
    """Keys [layers, P, G, D, S] and values [layers, P, G, S, D] of all layers.

    Keys are transposed within a page, so that a kernel scores neighbouring keys side by side.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        pages = (num_layers, num_pages, num_kv_heads)
        self.k = torch.empty((*pages, head_dim, page_size), dtype=dtype, device=device)
        self.v = torch.empty((*pages, page_size, head_dim), dtype=dtype, device=device)

    def read(self, layer: int, pages: Sequence[int], start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions start .. end-1 of a row as k, v [end - start, G, D]."""
        first = start // self.page_size
        index = torch.tensor(pages[first : -(-end // self.page_size)], dtype=torch.long, device=self.k.device)
        span = slice(start - first * self.page_size, end - first * self.page_size)
        k = self.k[layer][index].permute(0, 3, 1, 2).flatten(0, 1)
        v = self.v[layer][index].transpose(1, 2).flatten(0, 1)
        return k[span], v[span]

    @property
    def bytes_per_token(self) -> int:
        """Keys and values, all layers."""
        num_layers, _, num_kv_heads, head_dim, _ = self.k.shape
        return 2 * num_layers * num_kv_heads * head_dim * self.k.element_size()


LONG_RUN = 64  # tokens that are worth taking at once, on a device that is better at it


class Inputs(NamedTuple):
    """What a Gated DeltaNet layer reads of some tokens of a row, as ``ops.delta_net`` names it."""

    mixed: torch.Tensor  # [T, C]
    log_decay: torch.Tensor  # [T, Hv]
    beta: torch.Tensor  # [T, Hv]

    def part(self, start: int, end: int) -> "Inputs":
        return Inputs(self.mixed[start:end], self.log_decay[start:end], self.beta[start:end])

    def clone(self) -> "Inputs":
        return Inputs(self.mixed.clone(), self.log_decay.clone(), self.beta.clone())


class StateCache:
    """States of Gated DeltaNet layers in fp32: windows [layers, slots, C, K-1], states [layers, slots, Hv, Dk, Dv]."""

    def __init__(self, sizes: DeltaNetConfig, num_slots: int, device: torch.device) -> None:
        self.sizes = sizes
        self.num_slots = num_slots
        slots, state = (len(sizes.layers), num_slots), (sizes.num_value_heads, sizes.key_head_dim, sizes.value_head_dim)
        self.windows = torch.empty((*slots, sizes.num_channels, sizes.conv_size - 1), device=device)
        self.states = torch.empty((*slots, *state), device=device)
        # A CPU always goes token by token, so that results do not depend on how a text is cut.
        self._long_run = ops.delta_net if device.type == "cpu" else ops.delta_net_chunked

    @property
    def bytes_per_slot(self) -> int:
        """All layers."""
        return (self.windows[:, 0].numel() + self.states[:, 0].numel()) * self.states.element_size()

    def copy(self, source: int, target: int) -> None:
        self.windows[:, target] = self.windows[:, source]
        self.states[:, target] = self.states[:, source]

    def read(self, layer: int, slot: int, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Window and state of a row that has come to ``position``; zeros at 0, whatever its slot held before."""
        window, state = self.windows[layer, slot], self.states[layer, slot]
        return (window, state) if position else (torch.zeros_like(window), torch.zeros_like(state))

    def fold(
        self, layer: int, slot: int, position: int, inputs: Inputs, conv_weight: torch.Tensor, saves: Sequence[Save]
    ) -> torch.Tensor:
        """Moves a row's state over T tokens from ``position`` on, and saves it on the way. conv_weight [C, K] -> out
        [T, Hv, Dv]."""
        window, state = self.read(layer, slot, position)
        outs, start = [], 0
        for end, target in [*((save.position - position, save.slot) for save in saves), (len(inputs.mixed), slot)]:
            if start < end:
                run = self._long_run if end - start >= LONG_RUN else ops.delta_net
                out, window, state = run(*inputs.part(start, end), conv_weight, self.sizes, window, state)
                outs.append(out)
            self.windows[layer, target] = window
            self.states[layer, target] = state
            start = end
        return torch.cat(outs)


class CausalView:
    """The target's attention in a step: stores the tokens' keys and values, and lets each see its row up to itself."""

    def __init__(self, cache: PagedCache, segments: Sequence[ops.Segment], slots: torch.Tensor) -> None:
        self.cache = cache
        self.segments = segments
        self.slots = slots
        self.native: Any = None  # what the fused layers of ops.cpu make of this view, once per step

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.store(layer, k, v)
        return ops.paged_attention(q, self.cache.k[layer], self.cache.v[layer], self.segments)

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """k, v [T, G, D] go to the step's slots."""
        ops.write_pages(self.cache.k[layer], self.cache.v[layer], k, v, self.slots)

    def recur(
        self, layer: int, mixed: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, conv_weight: torch.Tensor
    ) -> torch.Tensor:
        raise AssertionError("recurrent layers need a HybridView")


class HybridView(CausalView):
    """Of a target that has recurrent layers beside attention. Rows without drafts are committed whole, so their states
    move at once; for the others, ``commit`` moves them as far as their drafts were accepted."""

    def __init__(self, cache: PagedCache, states: StateCache, batch: Batch) -> None:
        super().__init__(cache, batch.segments, batch.slots)
        self.states = states
        self.rows = batch.rows
        self.journal: list[tuple[torch.Tensor, dict[int, Inputs]]] = []  # per layer: conv_weight, inputs by row
        for row in batch.rows:
            if row.load is not None:
                states.copy(row.load, _slot(row))

    def recur(
        self, layer: int, mixed: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, conv_weight: torch.Tensor
    ) -> torch.Tensor:
        """The recurrence of a step's rows in the ``layer``-th Gated DeltaNet; layers come in order.

        mixed [T, C], log_decay and beta [T, Hv], conv_weight [C, K] -> [T, Hv, Dv].
        """
        assert layer == len(self.journal)
        step, outs, journaled = Inputs(mixed, log_decay, beta), [], {}
        for i, (row, segment) in enumerate(zip(self.rows, self.segments, strict=True)):
            slot, inputs = _slot(row), step.part(segment.start, segment.start + segment.length)
            if row.width:
                start = self.states.read(layer, slot, segment.position)
                outs.append(ops.delta_net(*inputs, conv_weight, self.states.sizes, *start)[0])
                journaled[i] = inputs.clone()  # a view would keep the whole step
            else:
                outs.append(self.states.fold(layer, slot, segment.position, inputs, conv_weight, row.saves))
        self.journal.append((conv_weight, journaled))
        return torch.cat(outs)

    def commit(self, num_committed: Sequence[int], saves: Sequence[Sequence[Save]]) -> None:
        """The first ``num_committed[i]`` tokens of row i count. They go through the operation of single steps, so that
        the state is that of single steps to the last bit."""
        for layer, (conv_weight, journaled) in enumerate(self.journal):
            for i, inputs in journaled.items():
                slot, position = _slot(self.rows[i]), self.segments[i].position
                self.states.fold(layer, slot, position, inputs.part(0, num_committed[i]), conv_weight, saves[i])


def _slot(row: ScheduledRow) -> int:
    assert row.request.state is not None
    return row.request.state.slot


class BlockView:
    """The drafter's attention in a pass: each segment is a block at its anchor's position; it sees the context before
    the anchor and itself. Nothing is stored."""

    def __init__(
        self, cache: PagedCache, segments: Sequence[ops.Segment], causal: Sequence[bool], windows: Sequence[int | None]
    ) -> None:
        self.cache = cache
        self.segments = segments
        self.slots = None
        self.causal = causal
        self.windows = windows
        self.native: Any = None

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        window = self.windows[layer]
        context = [
            self.cache.read(layer, s.pages, 0 if window is None else max(0, s.position - window + 1), s.position)
            for s in self.segments
        ]
        q, k, v = (x.view(len(self.segments), -1, *x.shape[1:]) for x in (q, k, v))
        keys, values = [c[0] for c in context], [c[1] for c in context]
        return ops.block_attention(q, k, v, keys, values, self.causal[layer], window).flatten(0, 1)

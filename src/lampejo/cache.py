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

from collections.abc import Callable, Sequence
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
        return ops.read_pages(self.k[layer], self.v[layer], pages, start, end)

    @property
    def bytes_per_token(self) -> int:
        """Keys and values, all layers."""
        num_layers, _, num_kv_heads, head_dim, _ = self.k.shape
        return 2 * num_layers * num_kv_heads * head_dim * self.k.element_size()


class Inputs(NamedTuple):
    """What a Gated DeltaNet layer reads of some tokens of a row, as ``ops.delta_net`` names it."""

    mixed: torch.Tensor  # [T, C]
    log_decay: torch.Tensor  # [T, Hv]
    beta: torch.Tensor  # [T, Hv]

    def of(self, segments: Sequence[ops.Segment]) -> "Inputs":
        """A copy for the tokens of some segments, one after another."""
        if not segments:
            return Inputs(*(x[:0] for x in self))
        return Inputs(*(torch.cat([x[s.start : s.start + s.length] for s in segments]) for x in self))


class StateCache:
    """States of Gated DeltaNet layers in fp32: windows [layers, slots, C, K-1], states [layers, slots, Hv, Dk, Dv]."""

    def __init__(
        self,
        sizes: DeltaNetConfig,
        num_slots: int,
        device: torch.device,
        recurrence: tuple[Callable[..., Any], Callable[..., torch.Tensor]],
    ) -> None:
        """``recurrence``: of the target (``models.layers.Target``)."""
        self.sizes = sizes
        self._plan_runs, self._run = recurrence
        self.num_slots = num_slots
        slots, state = (len(sizes.layers), num_slots), (sizes.num_value_heads, sizes.key_head_dim, sizes.value_head_dim)
        self.windows = torch.empty((*slots, sizes.num_channels, sizes.conv_size - 1), device=device)
        self.states = torch.empty((*slots, *state), device=device)

    @property
    def bytes_per_slot(self) -> int:
        """All layers."""
        return (self.windows[:, 0].numel() + self.states[:, 0].numel()) * self.states.element_size()

    def copy(self, source: int, target: int) -> None:
        self.windows[:, target] = self.windows[:, source]
        self.states[:, target] = self.states[:, source]

    def plan(self, runs: Sequence[ops.Run]) -> Any:
        """What ``run`` wants to know of runs, made once for all layers."""
        return self._plan_runs(self.states.device, runs)

    def run(self, layer: int, inputs: Inputs, conv_weight: torch.Tensor, plan: Any) -> torch.Tensor:
        """Moves states of a layer along the runs of ``plan`` -> the outputs of their tokens, run by run [T, Hv, Dv]."""
        return self._run(*inputs, conv_weight, self.sizes, self.windows[layer], self.states[layer], plan)


class CausalView:
    """The target's attention in a step: stores the tokens' keys and values, and lets each see its row up to itself."""

    def __init__(self, cache: PagedCache, segments: Sequence[ops.Segment], slots: torch.Tensor) -> None:
        self.cache = cache
        self.segments = segments
        self.slots = slots
        self.plan = ops.plan_attention(cache.k.device, segments, cache.page_size)
        self.native: Any = None  # what the fused layers of ops.cpu make of this view, once per step

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.store(layer, k, v)
        return ops.paged_attention(q, self.cache.k[layer], self.cache.v[layer], self.plan)

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
        self.journal: list[tuple[torch.Tensor, Inputs]] = []  # per layer: conv_weight, inputs of rows with drafts
        self.drafted = [segment for row, segment in zip(batch.rows, batch.segments, strict=True) if row.width]
        for row in batch.rows:
            if row.load is not None:
                states.copy(row.load, _slot(row))
        runs = [
            _run(row, segment, segment.start, segment.length, None if row.width else row.saves)
            for row, segment in zip(batch.rows, batch.segments, strict=True)
        ]
        self.runs = states.plan(runs)

    def recur(
        self, layer: int, mixed: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, conv_weight: torch.Tensor
    ) -> torch.Tensor:
        """The recurrence of a step's rows in the ``layer``-th Gated DeltaNet; layers come in order.

        mixed [T, C], log_decay and beta [T, Hv], conv_weight [C, K] -> [T, Hv, Dv].
        """
        assert layer == len(self.journal)
        inputs = Inputs(mixed, log_decay, beta)
        self.journal.append((conv_weight, inputs.of(self.drafted)))
        return self.states.run(layer, inputs, conv_weight, self.runs)

    def commit(self, num_committed: Sequence[int], saves: Sequence[Sequence[Save]]) -> None:
        """The first ``num_committed[i]`` tokens of row i count. They go through the operation of single steps, so that
        on a CPU the state is that of single steps to the last bit."""
        if not self.drafted:
            return
        runs, start = [], 0
        for row, segment, count, row_saves in zip(self.rows, self.segments, num_committed, saves, strict=True):
            if row.width:
                runs.append(_run(row, segment, start, count, row_saves))
                start += segment.length
        plan = self.states.plan(runs)
        for layer, (conv_weight, inputs) in enumerate(self.journal):
            self.states.run(layer, inputs, conv_weight, plan)


def _run(row: ScheduledRow, segment: ops.Segment, start: int, length: int, saves: Sequence[Save] | None) -> ops.Run:
    """The first ``length`` tokens of a row's segment, which lie at ``start``; ``saves`` None: its state stays."""
    slot, position = _slot(row), segment.position
    stores = [] if saves is None else [*((save.position - position, save.slot) for save in saves), (length, slot)]
    return ops.Run(start, length, slot if position else None, stores)


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
        self.plan = ops.plan_attention(cache.k.device, segments, cache.page_size)
        self.causal = causal
        self.windows = windows
        self.native: Any = None

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        caches = self.cache.k[layer], self.cache.v[layer]
        return ops.paged_block_attention(q, k, v, *caches, self.plan, self.causal[layer], self.windows[layer])

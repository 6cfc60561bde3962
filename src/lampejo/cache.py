"""Keys and values in fixed-size pages, and what attention sees of them in a step.

Ownership of a request's positions, as intervals (n = num_computed):

    [0, n)          committed: never written again; full pages of it may be shared through the prefix cache
    [n, n + step)   tentative: written by the step that verifies them; those of accepted tokens become committed
                    when ``num_computed`` moves, those of rejected ones are overwritten by the next step
    the rest        free space of the last page: may hold anything, is never read

So a commit is a length that moves, and nothing is ever trimmed. The drafter's context has a pool of its own with the
same page ids: one page table serves both, and a prefix hit restores the drafter's context too.

Shape legend: T tokens of a step, B block length, Q query heads, G key/value heads, D head size, P pages, S page size.
"""

from collections.abc import Sequence
from typing import Any

import torch

from lampejo import ops


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

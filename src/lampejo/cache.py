"""Keys and values in fixed-size pages.

Ownership of a request's positions, as intervals (n = num_computed):

    [0, n)          committed: never written again; full pages of it may be shared through the prefix cache
    [n, n + step)   tentative: written by the step that verifies them; those of accepted tokens become committed
                    when ``num_computed`` moves, those of rejected ones are overwritten by the next step
    the rest        free space of the last page: may hold anything, is never read

So a commit is a length that moves, and nothing is ever trimmed. The drafter's context has a pool of its own with the
same page ids: one page table serves both, and a prefix hit restores the drafter's context too.
"""

from collections.abc import Sequence

import torch

from lampejo import ops


class PagedCache:
    """Keys and values of all layers: two tensors [layers, pages, page_size, kv_heads, head_dim]."""

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
        shape = (num_layers, num_pages, page_size, num_kv_heads, head_dim)
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """k, v [T, G, D] go to slots [T]."""
        ops.write_pages(self.k[layer], k, slots)
        ops.write_pages(self.v[layer], v, slots)

    def read(self, layer: int, pages: Sequence[int], start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions start .. end-1 of a row as k, v [end - start, G, D]."""
        page_size = self.k.shape[2]
        first = start // page_size
        index = torch.tensor(pages[first : -(-end // page_size)], dtype=torch.long, device=self.k.device)
        span = slice(start - first * page_size, end - first * page_size)
        return self.k[layer][index].flatten(0, 1)[span], self.v[layer][index].flatten(0, 1)[span]

    @property
    def bytes_per_token(self) -> int:
        """Both tensors, all layers."""
        num_layers, _, _, num_kv_heads, head_dim = self.k.shape
        return 2 * num_layers * num_kv_heads * head_dim * self.k.element_size()

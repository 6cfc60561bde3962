"""Memory for packed weights, in pages of 2 MB where the system has them.

A decode step reads every weight once. With pages of 4 KB the processor translates 25,000 addresses per 100 MB on the
way, and what reads ahead stops at each page's end. Matrices of small models are smaller than a large page, so they
share mappings.
"""

import mmap

import torch

CHUNK = 32 << 20  # bytes of a mapping that matrices share; untouched pages of it take no memory
_LARGE_PAGE, _LINE = 2 << 20, 64


class Arena:
    """Hands out memory that lives as long as a tensor uses its mapping."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def zeros(self, num_bytes: int) -> torch.Tensor:
        """Bytes [num_bytes], at the beginning of a cache line."""
        step = -(-num_bytes // _LINE) * _LINE
        if step > len(self._free):
            self._free = _map(max(step, CHUNK))
        taken, self._free = self._free[:num_bytes], self._free[step:]
        return taken


def _map(num_bytes: int) -> torch.Tensor:
    memory = mmap.mmap(-1, num_bytes + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % _LARGE_PAGE :]

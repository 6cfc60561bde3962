"""A weight matrix as a file has it, between the readers of ``weights`` and the packing of a backend."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

# GGUF's numbers for types without blocks
_TYPE_OF_DTYPE = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}


@dataclass(frozen=True)
class Stored:
    """A matrix as a file has it: GGUF type number, and where each row belongs (None: in order).

    ``chunks`` reads it, so that never more than a part of it is held: uint8 [n, bytes of a row], in the file's order.
    """

    type: int
    shape: tuple[int, int]
    chunks: Callable[[], Iterable[torch.Tensor]]
    row_order: torch.Tensor | None = None  # int32: row i of the file is row row_order[i] of the matrix

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Stored":
        """Of a matrix of floats that is held anyway."""
        rows, columns = tensor.shape
        return cls(_TYPE_OF_DTYPE[tensor.dtype], (rows, columns), lambda: [tensor.contiguous().view(torch.uint8)])

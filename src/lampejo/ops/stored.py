"""A weight matrix as a file has it, between the readers of ``weights`` and the packing of a backend."""

from dataclasses import dataclass

import torch

# GGUF's numbers for types without blocks
_TYPE_OF_DTYPE = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}


@dataclass(frozen=True)
class Stored:
    """A matrix as a file has it: GGUF type number, bytes row by row, and where each row belongs (None: in order)."""

    type: int
    shape: tuple[int, int]
    data: torch.Tensor  # uint8
    row_order: torch.Tensor | None = None  # int32: row i of the file is row row_order[i] of the matrix

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Stored":
        rows, columns = tensor.shape
        return cls(_TYPE_OF_DTYPE[tensor.dtype], (rows, columns), tensor.contiguous().view(torch.uint8))

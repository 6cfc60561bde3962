"""Tokens chosen by the kernels, from scores at hand or from the product of a head that nobody writes down.

The definition is ``sampling.choose``; the kernels give the same tokens to the bit.
"""

import ctypes
from collections.abc import Sequence

import torch

from lampejo.ops.cpu.fused import PackedLinear
from lampejo.ops.cpu.library import LIBRARY, CChoice, CChosen

Chosen = list[tuple[int, float]]  # the index of each row's choice, and its score as it came in


def choose(scores: torch.Tensor, choices: Sequence[CChoice], ids: torch.Tensor | None = None) -> Chosen:
    """scores [T, N], fp32; ``choices``: one for each row; ids [N], int32: what the scores are of,
    None: 0 .. N - 1."""
    assert LIBRARY is not None
    scores = scores.contiguous()
    num_rows, num_scores = scores.shape
    out = (CChosen * num_rows)()
    if num_rows:
        LIBRARY.lampejo_choose(scores.data_ptr(), num_scores, _address(ids), _array(choices), num_rows, out)
    return [(chosen.index, chosen.score) for chosen in out]


def choose_from_head(
    head: PackedLinear, x: torch.Tensor, choices: Sequence[CChoice], ids: torch.Tensor | None = None
) -> Chosen:
    """The same for the rows of ``head(x)``, x [T, K]."""
    assert LIBRARY is not None
    x = x.contiguous()
    out = (CChosen * len(x))()
    if len(x):
        LIBRARY.lampejo_head_choose(head.matrix.pointer, x.data_ptr(), _address(ids), _array(choices), len(x), out)
    return [(chosen.index, chosen.score) for chosen in out]


def _address(ids: torch.Tensor | None) -> int | None:
    assert ids is None or (ids.dtype == torch.int32 and ids.is_contiguous())
    return None if ids is None else ids.data_ptr()


def _array(choices: Sequence[CChoice]) -> ctypes.Array[CChoice] | None:
    if all(choice.temperature == 0 for choice in choices):
        return None
    return (CChoice * len(choices))(*choices)

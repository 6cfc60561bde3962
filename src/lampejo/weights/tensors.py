"""Reads the tensors of a checkpoint by our names, a few rows at a time: nothing is held twice."""

import math
from collections.abc import Iterator

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from lampejo.models.config import ModelConfig
from lampejo.ops.stored import Stored
from lampejo.weights.files import Entry, damaged
from lampejo.weights.fp8 import TYPE as FP8
from lampejo.weights.fp8 import Fp8
from lampejo.weights.gguf import GgufFile, dequantised
from lampejo.weights.layout import Layout, Place
from lampejo.weights.safetensors import SafetensorsFolder

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK = 1 << 22  # elements read at a time


class Tensors:
    """What ``layout`` finds in ``source``."""

    def __init__(
        self, source: GgufFile | SafetensorsFolder, layout: Layout, config: ModelConfig, fp8: Fp8 | None = None
    ) -> None:
        self._source, self._layout, self._config, self._fp8 = source, layout, config, fp8
        self._is_gguf = isinstance(source, GgufFile)

    def info(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape (rows first) and type (``BF16``, ``Q4_1``, ...; several are joined by a plus sign)."""
        place = self._layout.find(name)
        return place.shape, "+".join(dict.fromkeys(self._entry(run.tensor).type for run in place.runs))

    def read(self, name: str, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Tensor:
        """A fresh contiguous tensor, dequantised, with heads in rotate-half order whatever the file's order is. On a
        ``device`` it arrives a few rows at a time too."""
        place = self._layout.find(name)
        shape = math.prod(place.shape[:-1]), place.shape[-1] if place.shape else 1
        result = torch.empty(shape, dtype=dtype, device=device)
        order = self._row_order(name, len(result))
        done = 0
        for kind, rows in self._chunks(place):
            to = slice(done, done + len(rows))
            values = _values(kind, rows).to(dtype).to(result.device)
            result[to if order is None else order[to].long().to(result.device)] = values
            done += len(rows)
        if self._is_gguf and name.endswith(".linear_attn.A_log"):  # llama.cpp keeps -exp(A_log)
            if not (result <= 0).all():
                raise damaged(self._source.path, f"the decays of {name!r} are not negative")
            result = (-result).log()
        return result.view(place.shape)

    def stored(self, name: str) -> Stored:
        """A matrix as the file has it, for packing."""
        place = self._layout.find(name)
        num_rows, num_columns = place.shape
        (kind,) = {self._entry(run.tensor).type for run in place.runs}  # of a single matrix there is but one
        number = int(GGMLQuantizationType["F32" if kind == FP8 else kind])
        order = self._row_order(name, num_rows)
        return Stored(number, (num_rows, num_columns), lambda: (rows for _, rows in self._chunks(place)), order)

    def equal(self, first: str, second: str) -> bool:
        """Whether two tensors of one shape hold the same values, rounded to bfloat16."""
        pairs = zip(*(self._chunks(self._layout.find(name)) for name in (first, second)), strict=True)
        return all(torch.equal(*(_values(kind, rows).bfloat16() for kind, rows in pair)) for pair in pairs)

    def _entry(self, tensor: str) -> Entry:
        return self._source.tensors[tensor]

    def _chunks(self, place: Place) -> Iterator[tuple[str, Tensor]]:
        """Type and rows [n, bytes of a row], uint8, one after another."""
        num_columns = place.shape[-1] if place.shape else 1
        step = max(_CHUNK // max(num_columns, 1), 1)
        for run in place.runs:
            kind = self._entry(run.tensor).type
            for start in range(run.start, run.stop, step):
                stop = min(start + step, run.stop)
                if kind == FP8:
                    assert self._fp8 is not None
                    yield "F32", self._fp8.read_rows(run.tensor, start, stop).view(torch.uint8)
                else:
                    yield kind, self._source.read_rows(run.tensor, start, stop)

    def _row_order(self, name: str, num_rows: int) -> Tensor | None:
        """Where each row of the file belongs, int32; None: in order."""
        module = name.rpartition(".")[0]
        if not self._is_gguf or self._config.architecture != "llama" or not module.endswith((".q_proj", ".k_proj")):
            return None
        num_heads = self._config.num_heads if module.endswith(".q_proj") else self._config.num_kv_heads
        order = torch.empty(num_rows, dtype=torch.int32)
        order[rotate_half_order(torch.arange(num_rows), num_heads)] = torch.arange(num_rows, dtype=torch.int32)
        return order


def rotate_half_order(tensor: Tensor, num_heads: int) -> Tensor:
    """Undo the row order of llama GGUF files, which interleaves the two halves of each head.

    ``[heads * head_dim, ...]``: row ``2 i + j`` of a head becomes row ``j * head_dim / 2 + i``.
    """
    rows = tensor.shape[0]
    pairs = tensor.view(num_heads, rows // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _values(kind: str, rows: Tensor) -> Tensor:
    """uint8 [n, bytes of a row] -> floats [n, columns]."""
    return rows.view(_FLOATS[kind]) if kind in _FLOATS else dequantised(kind, rows)

"""Checkpoints in 8-bit floats, with a scale for each block of a matrix (arXiv 2412.19437, section 3.3)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lampejo.errors import UserError
from lampejo.models.config import Keys, shorten
from lampejo.weights.safetensors import SafetensorsFolder

TYPE = "F8_E4M3"
_SCALE_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_REMEDY = "Choose a release in bfloat16, or in fp8 with a scale per block."


class Fp8:
    """The fp8 matrices of a folder. ``scales`` gives the name of each one's scales."""

    def __init__(self, folder: SafetensorsFolder, config: Mapping[str, Any]) -> None:
        """``UserError`` for other methods, and for weights and scales that do not fit each other."""
        self._folder, where, entries = folder, folder.path, folder.tensors
        self.scales: dict[str, str] = {}
        self._block = block = _block_size(config)
        if block is None:
            return
        for scale in [name for name in entries if name.endswith("_scale_inv")]:
            name = scale.removesuffix("_scale_inv")
            if name not in entries or entries[name].type != TYPE:
                raise UserError(f"{where}: {scale!r} is the scale of no fp8 tensor.", _REMEDY)
            *outer, rows, columns = entries[name].shape if len(entries[name].shape) > 1 else (0, 0)
            wanted = (*outer, -(-rows // block[0]), -(-columns // block[1]))
            if entries[scale].shape != wanted or entries[scale].type not in _SCALE_TYPES:
                raise UserError(
                    f"{where}: tensor {scale!r} has shape {list(entries[scale].shape)} and type {entries[scale].type}, "
                    f"but must be floats of shape {list(wanted)}.",
                    "The file is damaged, or config.json does not belong to it.",
                )
            self.scales[name] = scale
        for name, entry in entries.items():
            if entry.type == TYPE and name not in self.scales:
                raise UserError(f"{where}: the fp8 tensor {name!r} has no {name + '_scale_inv'!r}.", _REMEDY)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of an fp8 tensor, fp32 [stop - start, K]."""
        assert self._block is not None
        num_rows, num_columns = self._folder.tensors[name].shape[-2:]
        rows = torch.arange(start, stop)
        at = rows // num_rows * -(-num_rows // self._block[0]) + rows % num_rows // self._block[0]  # rows of the scales
        kind = _SCALE_TYPES[self._folder.tensors[self.scales[name]].type]
        scales = self._folder.read_rows(self.scales[name], int(at[0]), int(at[-1]) + 1).view(kind).float()
        scales = scales.repeat_interleave(self._block[1], dim=1)[:, :num_columns]
        values = self._folder.read_rows(name, start, stop).view(torch.float8_e4m3fn).float()
        return values.mul_(scales[at - at[0]])


def _block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns that share a scale; None for a checkpoint that is not quantised."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    if not isinstance(quantization, Mapping):
        raise Keys(config, "config.json").bad("quantization_config", quantization, "an object")
    method, size = quantization.get("quant_method"), quantization.get("weight_block_size")
    if method != "fp8" or quantization.get("fmt", "e4m3") != "e4m3":
        name = f"{method} {quantization['fmt']}" if method == "fp8" else method
        raise UserError(f"config.json: the quantisation method {shorten(name)} is not supported.", _REMEDY)
    if not isinstance(size, list) or len(size) != 2 or any(type(n) is not int or not 1 <= n < 1 << 20 for n in size):
        raise UserError(f"config.json: the fp8 weight_block_size {shorten(size)} is not supported.", _REMEDY)
    return size[0], size[1]

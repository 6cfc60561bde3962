"""Reads safetensors, one file or shards with an index. Trusts nothing: every number is checked before it is used."""

import math
from pathlib import Path

import torch
from torch import Tensor

from lampejo.errors import UserError
from lampejo.weights.files import Entry, TensorFile, damaged, parse_json, read_bytes, read_json

_MAX_HEADER = 16 << 20  # the largest real ones have about 1 MiB
_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16,
         "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64}  # fmt: skip
READABLE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32, "I64": torch.int64}


class SafetensorsFile(TensorFile):
    """One open file."""

    def _walk(self) -> None:
        size = self.path.stat().st_size
        if size < 10:
            raise damaged(self.path, f"{size} bytes are too few for a safetensors file")
        length = int.from_bytes(self._file.read(8), "little")
        if not 2 <= length <= min(size - 8, _MAX_HEADER):
            raise damaged(self.path, f"its header claims {length} bytes, the file has {size}")
        header = parse_json(read_bytes(self._file, self.path, 8, length).numpy().tobytes(), self.path, "its header")
        header.pop("__metadata__", None)
        entries = {name: self._entry(name, value, 8 + length) for name, value in header.items()}
        end = 8 + length  # the format allows neither holes nor overlaps
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
            if entry.offset != end:
                raise damaged(self.path, f"tensor {name!r} does not begin where the one before it ends")
            end += entry.num_bytes
        if end != size:
            raise damaged(self.path, f"its tensors need {end} bytes, the file has {size}")
        self.tensors = entries

    def _entry(self, name: str, value: object, start: int) -> Entry:
        keys = value if isinstance(value, dict) else {}
        dtype, shape, offsets = keys.get("dtype"), _sizes(keys.get("shape")), _sizes(keys.get("data_offsets"))
        if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
            raise damaged(self.path, f"the header's entry for tensor {name[:80]!r} is malformed")
        if dtype not in _BITS:
            raise UserError(f"{self.path}: tensor {name!r} has the unknown type {dtype[:20]!r}.", "Supported: "
                            f"{', '.join(READABLE)}.")  # fmt: skip
        num_bytes = math.prod(shape) * _BITS[dtype] // 8
        if offsets[1] - offsets[0] != num_bytes:
            raise damaged(self.path, f"tensor {name!r} of {num_bytes} bytes has the range {list(offsets)}")
        return Entry(dtype, shape, start + offsets[0], num_bytes)

    def read(self, name: str) -> Tensor:
        """A fresh tensor in the file's own type; ``UserError`` for types that we do not read."""
        entry = self.tensors[name]
        if entry.type not in READABLE:
            raise UserError(
                f"{self.path}: tensor {name!r} has type {entry.type}, which is not supported.",
                f"Supported: {', '.join(READABLE)}.",
            )
        return self.read_rows(name, 0, entry.num_rows).flatten().view(READABLE[entry.type]).view(entry.shape)


def _sizes(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list) or len(value) > 8 or any(type(n) is not int or not 0 <= n < 1 << 48 for n in value):
        return None
    return tuple(value)


class SafetensorsFolder:
    """All safetensors of a model folder as one: ``model.safetensors``, or shards named by an index."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.tensors: dict[str, Entry] = {}
        self._files: list[SafetensorsFile] = []
        self._where: dict[str, SafetensorsFile] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        index_path = self.path / "model.safetensors.index.json"
        index: dict[str, str] = {}
        if index_path.is_file():
            weight_map = read_json(index_path).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise damaged(index_path, "it has no 'weight_map'")
            for name in weight_map.values():
                if not isinstance(name, str) or not name.endswith(".safetensors") or Path(name).name != name:
                    raise damaged(index_path, f"{str(name)[:80]!r} is not the name of a safetensors file beside it")
            index = weight_map
            paths = [self.path / name for name in sorted(set(index.values()))]
        elif (self.path / "model.safetensors").is_file():
            paths = [self.path / "model.safetensors"]
        else:
            paths = sorted(self.path.glob("*.safetensors"))
            if len(paths) != 1:
                raise _no_weights(self.path, [path.name for path in paths])
        for path in paths:
            if not path.is_file():
                raise UserError(f"{path} is missing, but {index_path.name} names it.", "Fetch the model again.")
            file = SafetensorsFile(path)
            self._files.append(file)
            for name in file.tensors:
                if name in self._where:
                    raise damaged(path, f"tensor {name!r} lies in {self._where[name].path.name} too")
                self._where[name] = file
            self.tensors |= file.tensors
        for name, file_name in index.items():
            if name not in self._where or self._where[name].path.name != file_name:
                raise damaged(index_path, f"tensor {name!r} is not in {file_name}, as it says")

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor as they stand in the file, uint8."""
        return self._where[name].read_rows(name, start, stop)

    def read(self, name: str) -> Tensor:
        """A fresh tensor in the file's own type."""
        return self._where[name].read(name)

    def close(self) -> None:
        for file in self._files:
            file.close()


def _no_weights(folder: Path, found: list[str]) -> UserError:
    if found:
        return UserError(f"{folder} has several safetensors files but no index: {', '.join(found)[:200]}.",
                         "Add model.safetensors.index.json.")  # fmt: skip
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        return UserError(f"{folder} holds pickled weights only; lampejo never loads pickles.",
                         "Convert them to safetensors (save_pretrained of transformers does).")  # fmt: skip
    return UserError(f"{folder} holds no safetensors file.", "Give a model folder, or the path of a .gguf file.")

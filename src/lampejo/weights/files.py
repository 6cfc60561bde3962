"""What both readers share: errors for damaged files, bounded JSON, and reads that never map a file into memory.

Plain reads instead of ``mmap``: a tensor never keeps a file open, and a file that shrinks under us is an error message
instead of a SIGBUS.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lampejo.errors import UserError, why

_MAX_JSON = 64 << 20


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies in its file. ``type`` is the name that the formats use: BF16, F8_E4M3, Q4_K, ..."""

    type: str
    shape: tuple[int, ...]  # rows first, as in torch (GGUF stores the reverse)
    offset: int  # from the start of the file
    num_bytes: int

    @property
    def num_rows(self) -> int:
        """A tensor counts as a matrix of its last dimension."""
        return math.prod(self.shape[:-1])


def damaged(path: Path, what: str) -> UserError:
    """The error for a file that cannot be what it claims to be."""
    return UserError(
        f"{path}: {what}.",
        "The file is truncated or damaged: delete it and fetch it again (lampejo pull), or give a good copy.",
    )


def open_file(path: Path) -> BinaryIO:
    """Open for unbuffered reading; ``UserError`` if that fails."""
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {why(error)}.", "Check the path and its permissions.") from None


def read_bytes(file: BinaryIO, path: Path, offset: int, num_bytes: int) -> Tensor:
    """``num_bytes`` bytes from ``offset`` as a fresh uint8 tensor; checked by the caller against the file's size."""
    data = torch.empty(num_bytes, dtype=torch.uint8)
    view = memoryview(data.numpy())  # type: ignore[arg-type]  # an ndarray is a buffer
    file.seek(offset)
    done = 0
    while done < num_bytes:
        count = file.readinto(view[done : done + (1 << 30)])  # type: ignore[attr-defined]  # RawIOBase has it
        if not count:
            raise damaged(path, "it became shorter while it was read")
        done += count
    return data


class TensorFile:
    """An open file with a checked table of contents, ``tensors``."""

    tensors: dict[str, Entry]

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_file(path)
        try:
            self._walk()
        except BaseException:
            self._file.close()
            raise

    def _walk(self) -> None:
        """Fills ``tensors``."""
        raise NotImplementedError

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor as they stand in the file, [stop - start, bytes of a row], uint8."""
        entry = self.tensors[name]
        row_bytes = entry.num_bytes // max(entry.num_rows, 1)
        offset, num_bytes = entry.offset + start * row_bytes, (stop - start) * row_bytes
        return read_bytes(self._file, self.path, offset, num_bytes).view(stop - start, row_bytes)

    def close(self) -> None:
        self._file.close()


def parse_json(text: bytes, path: Path, what: str = "it") -> dict[str, Any]:
    """A JSON object without duplicate keys; ``UserError`` for anything else."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise ValueError("a key occurs twice")
        return dict(pairs)

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"{what} is not valid JSON ({str(error)[:80]})") from None
    if not isinstance(value, dict):
        raise damaged(path, f"{what} is not a JSON object")
    return value


def read_json(path: Path, required: bool = True) -> dict[str, Any]:
    """The JSON object in ``path``; ``{}`` if it is absent and not ``required``."""
    if not path.is_file():
        if required:
            raise UserError(f"{path} does not exist.", "A model folder needs it; fetch the model again.")
        return {}
    if path.stat().st_size > _MAX_JSON:
        raise damaged(path, f"it is larger than {_MAX_JSON >> 20} MiB")
    with open_file(path) as file:
        return parse_json(file.read(), path)

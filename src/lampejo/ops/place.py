"""Places that a model can go to: kinds of device, what they compute in, how much room they have."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lampejo.errors import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Place:
    """Where a model lies, and the type of its weights as far as they are not packed."""

    device: torch.device
    dtype: torch.dtype


ON_CPU = Place(torch.device("cpu"), torch.float32)


def choose_place(device: str, dtype: str) -> Place:
    """``device``: "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N"; ``dtype``: a key of ``DTYPES``, or "auto":
    fp32 on a CPU, on a GPU bf16 if it computes in that. ``UserError`` for what is not there."""
    if dtype not in ("auto", *DTYPES):
        raise UserError(f"dtype is {dtype!r}; it must be one of auto, {', '.join(DTYPES)}.")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = str(device).partition(":")
    if kind not in ("cpu", "cuda") or (number and (kind == "cpu" or not number.isdecimal())):
        raise UserError(f"device is {device!r}.", "Choose auto, cpu, cuda, or cuda:N for one of several GPUs.")
    if kind == "cpu":
        if dtype not in ("auto", "fp32"):
            raise UserError(
                f"dtype is {dtype}, but a CPU computes in fp32 or on quantised weights.",
                "Leave it out; --quantize q8 or q4 takes less memory than 16 bits.",
            )
        return ON_CPU
    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        raise UserError(
            f"device is {device}, but {'no GPU can be used here' if built else 'this PyTorch was built without CUDA'}.",
            f"{'Check the driver with nvidia-smi' if built else 'Install a PyTorch for CUDA'}, or choose --device cpu.",
        )
    if int(number or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device is {device}, but there are {torch.cuda.device_count()} GPUs.", "They are counted from cuda:0."
        )
    if dtype == "auto":
        dtype = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return Place(torch.device("cuda", int(number or 0)), DTYPES[dtype])


def device_name(device: torch.device) -> str | None:
    """What its maker calls a GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def free_memory(device: torch.device) -> int | None:
    """Bytes that can be had on a GPU; None on a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


@contextmanager
def enough_memory(device: torch.device) -> Iterator[None]:
    """Tells a user what the allocator tells us. Estimates come first; others may take memory in the meantime."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise UserError(
            f"{device} ran out of memory while the model was loaded.",
            "End what else runs there, give a smaller --context, or choose --device cpu.",
        ) from None

"""One public function per device operation. Everything above this package calls these names and no others.

``reference`` and ``recurrence`` are the definition of correct. Which version of an operation runs is settled by the
kind of device that holds the tensors, before anything is loaded: the definition on a CPU (beside it, ``ops.cpu`` takes
whole layers), and on all others that of ``device``, which does the same in few large calls.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

import lampejo.ops.device as device
import lampejo.ops.recurrence as recurrence
import lampejo.ops.reference as reference

from .recurrence import DeltaSizes, Run, delta_net, delta_net_chunked
from .reference import Segment, block_attention, read_pages, rope, route, softplus, write_pages

__all__ = [
    "DEFINITION_ON",
    "DeltaSizes",
    "Run",
    "Segment",
    "block_attention",
    "delta_net",
    "delta_net_chunked",
    "delta_net_runs",
    "experts",
    "linear",
    "paged_attention",
    "paged_block_attention",
    "plan_attention",
    "plan_runs",
    "read_pages",
    "rms_norm",
    "rope",
    "route",
    "sigmoid",
    "softplus",
    "swiglu",
    "write_pages",
]

DEFINITION_ON = ("cpu",)  # kinds of device; tests take this one away
F = TypeVar("F", bound=Callable[..., Any])


def _by_device(definition: F, elsewhere: Callable[..., Any]) -> F:
    """The public function: of its first argument, a tensor or a device, the kind settles the version."""

    @wraps(definition)
    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        kind = (first if isinstance(first, torch.device) else first.device).type
        return (definition if kind in DEFINITION_ON else elsewhere)(first, *args, **kwargs)

    return cast(F, call)


linear = _by_device(reference.linear, device.linear)
rms_norm = _by_device(reference.rms_norm, device.rms_norm)
sigmoid = _by_device(reference.sigmoid, device.sigmoid)
swiglu = _by_device(reference.swiglu, device.swiglu)
plan_attention = _by_device(reference.plan_attention, device.plan_attention)
paged_attention = _by_device(reference.paged_attention, device.paged_attention)
paged_block_attention = _by_device(reference.paged_block_attention, device.paged_block_attention)
experts = _by_device(reference.experts, device.experts)
plan_runs = _by_device(recurrence.plan_runs, device.plan_runs)
delta_net_runs = _by_device(recurrence.delta_net_runs, device.delta_net_runs)

"""What tests of the CPU kernels share."""

import torch

from lampejo.batch import make_batch
from lampejo.models.layers import Target
from lampejo.runner import Runner
from lampejo.scheduler import ScheduledRow
from lampejo.states import RowState
from tiny import is_packed, make_request


def activations_as_kernels_see_them(x: torch.Tensor) -> torch.Tensor:
    """Eight bits per group of 32, and back. x [T, K]."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
    scale = padded.abs().amax(-1, keepdim=True) / 127
    codes = torch.where(scale > 0, (padded / scale).round(), 0)
    return (codes * scale).flatten(1)[:, : x.shape[1]]


def through_pages(target: Target, ids: list[int], size: int) -> torch.Tensor:
    """Logits [T, V] of a text in chunks of so many tokens: in each, the first and the rest as drafts, to have all."""
    runner = Runner(target, None, 8, 16, torch.float16 if is_packed(target) else None)
    request = make_request(ids[:1])
    request.pages, request.state = [4, 1, 0, 3], RowState(slot=0)
    logits = []
    for start in range(0, len(ids), size):
        chunk = ids[start : start + size]
        request.ids, request.num_computed = ids[: start + 1], start
        batch = make_batch([ScheduledRow(request, 1, len(chunk))], [chunk[1:]], 16, (), runner.device)
        out = runner.verify(batch)
        runner.commit(out, [len(chunk)], [()])
        logits.append(out.logits)
    return torch.cat(logits)

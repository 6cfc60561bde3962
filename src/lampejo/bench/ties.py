"""Where an answer parts from another, and how near a tie it was there.

On a CPU answers never part. On a GPU the last bits of a logit depend on what is computed beside it (design principle
3), so answers may part where the best tokens are as good as equal, and nowhere else.
"""

from collections.abc import Sequence

import torch

from lampejo.batch import make_batch
from lampejo.request import Request
from lampejo.runner import Runner
from lampejo.sampling import SamplingParams, gumbel_noise
from lampejo.scheduler import ScheduledRow
from lampejo.states import RowState

# Gaps that count as ties, relative to the largest logit, by the type that is computed in: a few of its roundings, as
# much as tiny models of every architecture move when their tokens are computed in other company.
TIES = {torch.float32: 2.0**-15, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-8}


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """The index of the first token that differs or is missing; None if there is none."""
    for i, (a, b) in enumerate(zip(expected, got, strict=False)):
        if a != b:
            return i
    return None if len(expected) == len(got) else min(len(expected), len(got))


def gap(logits: torch.Tensor, params: SamplingParams, seed: int, position: int, token_ids: Sequence[int]) -> float:
    """How far the worst of some tokens lies behind the best of all, relative to the largest logit.

    logits [V] choose the token at ``position``, by arg-max or at a temperature alone.
    """
    scores = logits.float()
    size = scores.abs().max()
    if params.temperature > 0:
        ids = torch.arange(len(scores), device=scores.device)
        scores = scores + params.temperature * gumbel_noise(seed, [position], ids)[0]
    return ((scores.max() - scores[list(token_ids)].min()) / size).item()


def logits_after(runner: Runner, ids: Sequence[int]) -> torch.Tensor:
    """What the target says of the next token of a text, in one pass [V]. No engine may be at work: its pages are
    overwritten."""
    request = Request(0, list(ids))
    request.pages = list(range(-(-len(ids) // runner.page_size)))
    request.state = RowState(slot=0)
    batch = make_batch([ScheduledRow(request, len(ids), 0)], [[]], runner.page_size, (), runner.device)
    return runner.verify(batch).logits[-1]

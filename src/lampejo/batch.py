"""A plan and its drafts as flat tensors. Built anew for each step; what lives longer is in ``request``."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lampejo.accept import VerifyRow
from lampejo.ops import Segment
from lampejo.request import hidden_ids
from lampejo.scheduler import ScheduledRow


@dataclass(frozen=True)
class Batch:
    """The tokens of a step, one segment per row, one after another. T tokens, L of them with logits."""

    rows: Sequence[ScheduledRow]
    drafts: Sequence[Sequence[int]]
    segments: list[Segment]
    ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    slots: torch.Tensor  # [T], page * page_size + offset
    logit_index: torch.Tensor  # [L], tokens after which a token is chosen
    verify_rows: list[VerifyRow]  # the rows that have logits, in order
    verified: list[ScheduledRow]  # the same as they were scheduled


def make_batch(
    rows: Sequence[ScheduledRow],
    drafts: Sequence[Sequence[int]],
    page_size: int,
    eos_ids: Sequence[int],
    device: torch.device,
) -> Batch:
    """``drafts[i]`` has at most ``rows[i].width`` ids."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_index: list[int] = []
    segments, verify_rows, verified = [], [], []
    for row, draft in zip(rows, drafts, strict=True):
        request, first = row.request, row.request.num_computed
        tokens = request.ids[first : first + row.num_known] + list(draft)
        segments.append(Segment(len(ids), len(tokens), first, request.pages))
        span = range(first, first + len(tokens))
        if row.wants_logits:
            masks = request.guide.masks(draft) if request.guide else []
            end = len(ids) + len(tokens)
            logit_index += range(end - len(draft) - 1, end)
            verified.append(row)
            verify_rows.append(
                VerifyRow(
                    drafts=draft,
                    position=first + row.num_known,
                    params=request.sampling,
                    seed=request.seed,
                    history=request.history,
                    hidden_ids=hidden_ids(request, masks or [None] * (len(draft) + 1), eos_ids),
                    typical=request.typical,
                    masks=masks,
                )
            )
        ids += tokens
        positions += span
        slots += [request.pages[p // page_size] * page_size + p % page_size for p in span]

    lists = (ids, positions, slots, logit_index)
    flat = torch.tensor([x for values in lists for x in values], dtype=torch.long, device=device)  # one transfer
    tensors = dict(zip(("ids", "positions", "slots", "logit_index"), flat.split([len(x) for x in lists]), strict=True))
    return Batch(rows, drafts, segments, **tensors, verify_rows=verify_rows, verified=verified)

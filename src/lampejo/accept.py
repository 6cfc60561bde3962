"""Acceptance: the target's own choices, and how many drafts equal them. No cache, no model.

A draft is accepted while it equals the token that the target chooses at that position; the first that differs is
replaced by the target's choice, and after a wholly accepted block the target adds one of its own. So every committed
token is the target's choice, and the output cannot depend on the drafts.

That is the policy "lossless". A row that asks for typical acceptance also keeps drafts which the target merely finds
plausible; its answer depends on the drafts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lampejo.errors import DamagedModel
from lampejo.sampling import History, SamplingParams, choose, is_typical, process_logits


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probabilities (natural, of the target's unprocessed logits) of a token and its likeliest alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class VerifyRow:
    """What acceptance needs to know of one row. ``position`` is that of the first token to be chosen."""

    drafts: Sequence[int]
    position: int
    params: SamplingParams
    seed: int
    history: History
    hidden_ids: Sequence[Sequence[int]]  # per position: ids that must not be chosen there (EOS below min_tokens)
    typical: float | None = None  # threshold of typical acceptance; None: lossless
    masks: Sequence[torch.Tensor | None] = ()  # per position, or none at all: which ids [V] its guide allows there


@dataclass(frozen=True)
class Verdict:
    """``ids``: the accepted drafts and the bonus token, the target's own; ``logprobs``: one each, or none; ``inexact``:
    which of the drafts are not the target's own choice, in order; none where acceptance is lossless."""

    ids: list[int]
    num_accepted: int
    logprobs: list[TokenLogprobs]
    inexact: Sequence[int] = ()


def accept(logits: torch.Tensor, rows: Sequence[VerifyRow]) -> list[Verdict]:
    """logits [sum(len(drafts) + 1 for each row), V], rows one after another -> a verdict per row.

    ``DamagedModel`` where a committed token's logit is not finite: a NaN counts as the greatest, so it is chosen.
    """
    if all(_is_plain_greedy(row) for row in rows):
        greedy = logits.argmax(-1).tolist()  # one operation for the whole batch
    else:
        greedy = None
    verdicts, start = [], 0
    chosen: list[int] = []  # where the committed tokens' logits lie in the flat tensor
    for row in rows:
        n = len(row.drafts) + 1
        inexact: list[int] = []
        if greedy is None:
            own, inexact = _own_choices(logits[start : start + n], row)
        else:
            own = greedy[start : start + n]
        num_accepted = 0
        while num_accepted < len(row.drafts) and row.drafts[num_accepted] == own[num_accepted]:
            num_accepted += 1
        ids = own[: num_accepted + 1]
        chosen += [(start + j) * logits.shape[-1] + token_id for j, token_id in enumerate(ids)]
        logprobs = []
        if row.params.logprobs is not None:
            logprobs = token_logprobs(logits[start : start + len(ids)], ids, row.params.logprobs)
        verdicts.append(Verdict(ids, num_accepted, logprobs, inexact))
        start += n
    assert start == len(logits), (start, len(logits))
    if chosen and not all(map(math.isfinite, logits.take(torch.tensor(chosen, device=logits.device)).tolist())):
        raise DamagedModel("The model's logits are not numbers: damaged weights. Fetch or convert the model again.")
    return verdicts


def _own_choices(logits: torch.Tensor, row: VerifyRow) -> tuple[list[int], list[int]]:
    """The target's choices for one row's positions, at least up to the first that differs from the draft; and where a
    draft that it merely finds typical stands in their place.

    A CPU takes them one by one: it computes only those that count, and small tensors stay in its caches. Another device
    takes them all at once.
    """
    n = len(row.drafts) + 1
    scores = process_logits(logits, row.params, row.history, row.drafts, row.hidden_ids, row.masks)
    tile = 1 if logits.device.type == "cpu" else n
    own: list[int] = []
    inexact: list[int] = []
    while len(own) < n and own == list(row.drafts[: len(own)]):
        part = range(len(own), min(len(own) + tile, n))
        positions = range(row.position + part.start, row.position + part.stop)
        own += choose(scores[part.start : part.stop], row.params, row.seed, positions).tolist()
        if row.typical is not None:
            inexact += _take_typical(own, scores, row, part)
    return own, inexact


def _take_typical(own: list[int], scores: torch.Tensor, row: VerifyRow, part: range) -> list[int]:
    """Puts typical drafts into ``own``, up to the first position of ``part`` whose draft is refused; returns where."""
    assert row.typical is not None
    taken = []
    for j in part[: len(row.drafts) - part.start]:
        if own[j] != row.drafts[j]:
            if not is_typical(scores[j], row.params, row.drafts[j], row.typical):
                break
            own[j] = row.drafts[j]
            taken.append(j)
    return taken


def _is_plain_greedy(row: VerifyRow) -> bool:
    params = row.params
    changes = params.has_penalties or params.logit_bias or any(row.hidden_ids) or row.masks
    return params.temperature == 0 and not changes


def token_logprobs(logits: torch.Tensor, ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """logits [N, V], the chosen ids [N] -> one entry each, with the ``num_top`` likeliest tokens."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    top = logprobs.topk(num_top, dim=-1) if num_top else None
    entries = []
    for i, token_id in enumerate(ids):
        best = () if top is None else tuple(zip(top.indices[i].tolist(), top.values[i].tolist(), strict=True))
        entries.append(TokenLogprobs(token_id, logprobs[i, token_id].item(), best))
    return entries

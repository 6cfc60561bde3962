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
from lampejo.sampling import History, SamplingParams, is_typical, process_logits
from lampejo.scores import Asked, Scores


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

    @property
    def is_typical(self) -> bool:
        return self.typical is not None and self.params.temperature > 0  # nothing but the greatest is typical at 0

    @property
    def wants_logits(self) -> bool:
        """Whether the logits themselves are changed, told, or asked for more than a choice."""
        params = self.params
        changed = params.has_penalties or bool(params.logit_bias) or any(self.hidden_ids) or bool(self.masks)
        return changed or params.logprobs is not None or self.is_typical


@dataclass(frozen=True)
class Verdict:
    """``ids``: the accepted drafts and the bonus token, the target's own; ``logprobs``: one each, or none; ``inexact``:
    which of the drafts are not the target's own choice, in order; none where acceptance is lossless."""

    ids: list[int]
    num_accepted: int
    logprobs: list[TokenLogprobs]
    inexact: Sequence[int] = ()


def accept(scores: Scores, rows: Sequence[VerifyRow]) -> list[Verdict]:
    """``scores`` of sum(len(drafts) + 1 for each row) tokens, rows one after another -> a verdict per row.

    ``DamagedModel`` where a committed token's logit is not finite: a NaN counts as the greatest, so it is chosen.
    """
    spans, start = [], 0
    for row in rows:
        spans.append(range(start, start + len(row.drafts) + 1))
        start += len(row.drafts) + 1
    assert start == len(scores), (start, len(scores))
    asked = [
        Asked(index, row.params, row.seed, row.position + j)
        for row, span in zip(rows, spans, strict=True)
        if not row.wants_logits
        for j, index in enumerate(span)
    ]
    at_once = scores.choose_at_once(asked)
    logits_of = iter(scores.logits_of([span for span in spans if span.start not in at_once]))
    verdicts: list[Verdict] = []
    for row, span in zip(rows, spans, strict=True):
        inexact: list[int] = []
        if span.start in at_once:
            own = [at_once[index] for index in span]
        else:
            logits = next(logits_of)
            own, inexact = _own_choices(scores, logits, row)
        num_accepted = 0
        while num_accepted < len(row.drafts) and row.drafts[num_accepted] == own[num_accepted]:
            num_accepted += 1
        ids = own[: num_accepted + 1]
        logprobs = []
        if row.params.logprobs is not None:
            logprobs = token_logprobs(logits[: len(ids)], ids, row.params.logprobs)
        verdicts.append(Verdict(ids, num_accepted, logprobs, inexact))
    committed = [i for span, verdict in zip(spans, verdicts, strict=True) for i in span[: len(verdict.ids)]]
    if committed and not all(map(math.isfinite, scores.values(committed, [i for v in verdicts for i in v.ids]))):
        raise DamagedModel("The model's logits are not numbers: damaged weights. Fetch or convert the model again.")
    return verdicts


def _own_choices(scores: Scores, logits: torch.Tensor, row: VerifyRow) -> tuple[list[int], list[int]]:
    """The target's choices for one row's positions, logits [n, V], at least up to the first that differs from the
    draft; and where a draft that it merely finds typical stands in their place.

    A CPU takes them one by one: it computes only those that count, and small tensors stay in its caches. Another device
    takes them all at once.
    """
    n = len(row.drafts) + 1
    processed = process_logits(logits, row.params, row.history, row.drafts, row.hidden_ids, row.masks)
    tile = 1 if logits.device.type == "cpu" else n
    own: list[int] = []
    inexact: list[int] = []
    while len(own) < n and own == list(row.drafts[: len(own)]):
        part = range(len(own), min(len(own) + tile, n))
        positions = range(row.position + part.start, row.position + part.stop)
        own += scores.choose(processed[part.start : part.stop], row.params, row.seed, positions)
        if row.is_typical:
            inexact += _take_typical(own, processed, row, part)
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


def token_logprobs(logits: torch.Tensor, ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """logits [N, V], the chosen ids [N] -> one entry each, with the ``num_top`` likeliest tokens."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    top = logprobs.topk(num_top, dim=-1) if num_top else None
    entries = []
    for i, token_id in enumerate(ids):
        best = () if top is None else tuple(zip(top.indices[i].tolist(), top.values[i].tolist(), strict=True))
        entries.append(TokenLogprobs(token_id, logprobs[i, token_id].item(), best))
    return entries

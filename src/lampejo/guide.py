"""Which tokens an answer may have next: its grammar and its thinking budget, followed token by token.

A guide is part of the target's own choice: what it allows at a position depends on the tokens before it alone, so the
output depends on the drafts as little as without it. Drafts are cut where it would refuse them, which saves verifying
them and changes nothing else.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from llguidance import LLMatcher

from lampejo.answer import Start, ThoughtCounter


@dataclass(frozen=True)
class Vocabulary:
    """What a guide knows of a model's tokens. size: of the logits; end_thinking: ids that a thinking budget forces."""

    size: int
    piece: Callable[[int], bytes | str]  # ``Tokenizer.piece``
    eos_ids: Sequence[int]
    end_thinking: Sequence[int]


class Stuck(Exception):
    """Nothing can follow by the grammar, or it has become too complex."""


@dataclass
class _Place:
    """Where in an answer a guide is, but for the matcher's part of it."""

    thoughts: ThoughtCounter
    tail: bytes = b""  # the last three bytes of reasoning
    forced: Sequence[int] = ()  # ids that have to come next

    def copy(self) -> "_Place":
        return replace(self, thoughts=copy.deepcopy(self.thoughts))


class Guide:
    """Follows one answer. start: see ``answer.start_of``; matcher: a fresh one of the grammar; budget: tokens of
    reasoning after which its end is forced, as soon as the last character is complete.

    ``error``: why no answer can come of it any more; the request ends there.
    """

    def __init__(
        self, vocabulary: Vocabulary, start: Start, matcher: LLMatcher | None = None, budget: int | None = None
    ) -> None:
        self.error: str | None = None
        self._settings = (vocabulary, start, matcher, budget)
        self._vocabulary = vocabulary
        self._budget = budget
        self._matcher = matcher.deep_copy() if matcher else None
        self._place = _Place(ThoughtCounter(start))
        self._force_end(self._place)
        self._ids: list[int] = []  # committed
        self._planned: tuple[list[int], list[torch.Tensor | None]] | None = None

    def fresh(self) -> "Guide":
        """Another one, at the beginning of another answer."""
        return Guide(*self._settings)

    def cut(self, drafts: Sequence[int]) -> list[int]:
        """The drafts before the first that is refused here or that would end the answer: the target says those itself,
        without a draft."""
        self._planned = self._plan(drafts)
        return self._planned[0]

    def masks(self, drafts: Sequence[int]) -> list[torch.Tensor | None]:
        """Per verify position of ``drafts``, as ``cut`` left them: which ids [V] may stand there, None for all; nothing
        if that is so everywhere. Sets ``error`` when there is no such id."""
        planned, self._planned = self._planned, None
        if planned is None or planned[0] != list(drafts):
            planned = self._plan(drafts)
            assert planned[0] == list(drafts), "the drafts were not cut"
        return planned[1] if any(mask is not None for mask in planned[1]) else []

    def push(self, token_id: int) -> bool:
        """Commits a token. True when the grammar is at its end."""
        self._planned = None
        self._step(self._place, token_id)
        if self._matcher is None:
            return False
        self._ids.append(token_id)
        if not self._matcher.consume_token(token_id):
            self.error = _reason(self._matcher)
        return self._matcher.is_stopped()

    def _plan(self, drafts: Sequence[int]) -> tuple[list[int], list[torch.Tensor | None]]:
        place = self._place.copy()
        kept: list[int] = []
        try:
            masks = [self._mask(place)]
        except Stuck as stuck:
            self.error = str(stuck)
            return [], [None]
        num_consumed = 0
        for token_id in drafts:
            mask = masks[-1]
            if token_id in self._vocabulary.eos_ids or (mask is not None and not mask[token_id]):
                break
            if self._matcher is not None:
                if not self._matcher.consume_token(token_id):
                    break
                num_consumed += 1
                if self._matcher.is_stopped():
                    break
            self._step(place, token_id)
            try:
                masks.append(self._mask(place))
            except Stuck:
                break  # if the target goes here too, it is stuck when it is here
            kept.append(token_id)
        self._go_back(num_consumed)
        return kept, masks

    def _go_back(self, num_consumed: int) -> None:
        """Takes drafts out of the matcher again."""
        if self._matcher is None:
            return
        if not self._matcher.is_error() and (num_consumed == 0 or self._matcher.rollback(num_consumed)):
            return
        fresh = self._settings[2]
        assert fresh is not None
        self._matcher = fresh.deep_copy()  # one that has failed stays so
        if not self._matcher.consume_tokens(self._ids):
            self.error = _reason(self._matcher)

    def _mask(self, place: _Place) -> torch.Tensor | None:
        if place.forced:
            mask = torch.zeros(self._vocabulary.size, dtype=torch.bool)
            mask[place.forced[0]] = True
            return mask
        if self._matcher is None:
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise Stuck(_reason(self._matcher))
        mask = torch.from_numpy(np.unpackbits(bits, count=self._vocabulary.size, bitorder="little")).bool()
        if not mask.any():
            raise Stuck("no token of this model can follow")
        return mask

    def _step(self, place: _Place, token_id: int) -> None:
        piece = self._vocabulary.piece(token_id)
        place.thoughts.push(piece)
        place.tail = (place.tail + (piece if isinstance(piece, bytes) else piece.encode()))[-3:]
        if place.forced:
            place.forced = place.forced[1:]
        else:
            self._force_end(place)

    def _force_end(self, place: _Place) -> None:
        if self._budget is None or not place.thoughts.is_open:
            return
        num_over = place.thoughts.num_tokens - self._budget
        if num_over >= 3 or (num_over >= 0 and not _is_in_character(place.tail)):
            place.forced = self._vocabulary.end_thinking


def _is_in_character(tail: bytes) -> bool:
    """Whether a character of UTF-8 has begun and is not complete; ``tail``: the last three bytes, as they matter."""
    for num_bytes, byte in enumerate(reversed(tail), start=1):
        if byte < 0x80:
            return False
        if byte >= 0xC0:
            return num_bytes < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return False


def _reason(matcher: LLMatcher) -> str:
    return matcher.get_error().strip().partition("\n")[0][:300] or str(matcher.stop_reason())

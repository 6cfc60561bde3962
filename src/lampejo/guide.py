"""Which tokens an answer may have next: its grammar and its thinking budget, followed token by token.

A guide is part of the target's own choice: what it allows at a position depends on the tokens before it alone, so the
output depends on the drafts as little as without it. Drafts are cut where it would refuse them, which saves verifying
them and changes nothing else.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

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


class Matcher(Protocol):
    """What is used of llguidance's; None of its methods raises, they put it into an error that stays."""

    def compute_bitmask(self) -> bytes: ...
    def consume_token(self, token_id: int, /) -> bool: ...
    def is_error(self) -> bool: ...
    def get_error(self) -> str: ...
    def is_stopped(self) -> bool: ...
    def stop_reason(self) -> str: ...


@dataclass(frozen=True)
class Compiled:
    """A grammar, compiled. make: a matcher that shares nothing with any other; shared: the one whose copies all share
    what their lexer has met, and also that it has met too much."""

    make: Callable[[], Matcher]
    shared: LLMatcher | None  # None: no drafts are tried


class Guide:
    """Follows one answer. start: see ``answer.start_of``; budget: tokens of reasoning after which its end is forced, as
    soon as the last character is complete.

    ``error``: why no answer can come of it any more; the request ends there. Whether it does must not depend on other
    answers or on drafts, but a matcher fails when its lexer has met too much, or meets too much at once. So the answer
    has a matcher of its own, which gives a mask and takes a token in turn, whatever was drafted; drafts are tried on a
    shared one. When that fails, there are no drafts for this answer any more.
    """

    def __init__(
        self, vocabulary: Vocabulary, start: Start, compiled: Compiled | None = None, budget: int | None = None
    ) -> None:
        self.error: str | None = None
        self._settings = (vocabulary, start, compiled, budget)
        self._vocabulary = vocabulary
        self._budget = budget
        self._matcher = compiled.make() if compiled else None
        # As far as the other; None when it has failed.
        self._ahead = compiled.shared.deep_copy() if compiled and compiled.shared else None
        self._place = _Place(ThoughtCounter(start))
        self._force_end(self._place)
        self._masked: torch.Tensor | None = None  # what this place allows, by the matcher
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
        """Commits a token. True when the grammar is at its end. Sets ``error`` if it cannot come."""
        self._planned = None
        try:
            self._mask_here()
        except Stuck as stuck:
            self.error = str(stuck)
            return True
        self._masked = None
        self._step(self._place, token_id)
        if self._matcher is None:
            return False
        if self._ahead is not None and not self._ahead.consume_token(token_id):
            self._ahead = None
        if not self._matcher.consume_token(token_id):
            self.error = _reason(self._matcher)
        return self._matcher.is_stopped()

    def _plan(self, drafts: Sequence[int]) -> tuple[list[int], list[torch.Tensor | None]]:
        if self.error is not None:
            return [], [None]
        place = self._place.copy()
        kept: list[int] = []
        try:
            masks = [self._mask_here()]
        except Stuck as stuck:
            self.error = str(stuck)
            return [], [None]
        num_consumed = 0
        for token_id in drafts:
            mask = masks[-1]
            if token_id in self._vocabulary.eos_ids or (mask is not None and not mask[token_id]):
                break
            if self._matcher is not None:
                if self._ahead is None or not self._ahead.consume_token(token_id):
                    break
                num_consumed += 1
                if self._ahead.is_stopped():
                    break
            self._step(place, token_id)
            try:
                masks.append(self._mask(place, self._ahead))
            except Stuck:
                break  # if the target goes here too, it is told when it is here
            kept.append(token_id)
        if self._ahead is not None and (
            self._ahead.is_error() or (num_consumed and not self._ahead.rollback(num_consumed))
        ):
            self._ahead = None  # one that has failed stays so
        return kept, masks

    def _mask_here(self) -> torch.Tensor | None:
        if self._place.forced or self._matcher is None:
            return self._mask(self._place, None)
        if self._masked is None:
            self._masked = self._mask(self._place, self._matcher)
        return self._masked

    def _mask(self, place: _Place, matcher: Matcher | None) -> torch.Tensor | None:
        if place.forced:
            mask = torch.zeros(self._vocabulary.size, dtype=torch.bool)
            mask[place.forced[0]] = True
            return mask
        if matcher is None:
            return None
        return next_mask(matcher, self._vocabulary.size)

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


def next_mask(matcher: Matcher, size: int) -> torch.Tensor:
    """Which ids [size] may come next. ``Stuck`` if none."""
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    if matcher.is_error():
        raise Stuck(_reason(matcher))
    mask = torch.from_numpy(np.unpackbits(bits, count=size, bitorder="little")).bool()
    if not mask.any():
        raise Stuck("no token of this model can follow")
    return mask


def _reason(matcher: Matcher) -> str:
    return matcher.get_error().strip().partition("\n")[0][:300] or str(matcher.stop_reason())

"""Who drafts in each arm. All arms share one loaded target and its caches: one engine at a time, made for one answer,
so that no answer finds another's prefix cache. An arm's speculator lives as long as the run: it learns as in a server.
"""

import random
import zlib
from collections.abc import Mapping, Sequence

import torch

from lampejo.batch import Batch
from lampejo.errors import UserError
from lampejo.loader import Loaded
from lampejo.request import Request
from lampejo.speculate import NGRAM_MAX_WIDTH, DFlashDrafter, Drafter, NgramDrafter, Speculator
from lampejo.width import RowOffer, RowResult, WidthController

ARMS = ("plain", "dflash", "ngram", "auto")
SYNTHETIC = "synthetic"


class RecordingController(WidthController):
    """A width controller that also counts, per slot, how often it was reached and how often accepted."""

    def __init__(self, max_width: int, fixed: int | None = None) -> None:
        super().__init__(max_width, fixed)
        self.num_reached = [0] * max_width
        self.num_accepted = [0] * max_width

    def observe_step(
        self,
        num_tokens: int,
        verify_seconds: float | None,
        draft_seconds: Mapping[str, float],
        results: Sequence[RowResult],
    ) -> None:
        super().observe_step(num_tokens, verify_seconds, draft_seconds, results)
        for result in results:
            for slot in range(min(result.num_accepted + 1, result.num_drafted)):
                self.num_reached[slot] += 1
                self.num_accepted[slot] += slot < result.num_accepted

    def forget_counts(self) -> None:
        """Begins to count anew, after the warm-up."""
        self.num_reached = [0] * self.max_width
        self.num_accepted = [0] * self.max_width

    def acceptance_per_slot(self) -> list[float]:
        """Of the drafts at a slot whose predecessors were all accepted, the part that was accepted too."""
        return [a / n for a, n in zip(self.num_accepted, self.num_reached, strict=True) if n]


class SyntheticDrafter:
    """Knows the answer that plain decoding gave, and spoils it: slot k is right at ``rates[k]``, given those before it.

    Its arm shows what the engine makes of a drafter of such acceptance, which costs what ``as_costly_as`` costs: that
    one drafts too, and its drafts are thrown away. None: nothing. Deterministic: the same request at the same position
    always gets the same draft.
    """

    name = SYNTHETIC

    def __init__(self, rates: Sequence[float], vocab_size: int, as_costly_as: Drafter | None = None) -> None:
        self.rates = list(rates)
        self.as_costly_as = as_costly_as
        self.vocab_size = vocab_size
        self.answers: dict[tuple[int, ...], list[int]] = {}  # by prompt ids

    def offer(self, request: Request) -> RowOffer | None:
        answer = self.answers.get(tuple(request.prompt_ids), [])
        most = len(self.rates)
        if self.as_costly_as is not None:
            costly = self.as_costly_as.offer(request)
            most = costly.available if costly else 0
        available = min(len(self.rates), most, len(answer) - request.num_output)
        return RowOffer(request.id, self.name, available) if available > 0 else None

    def draft(self, requests: Sequence[Request], widths: Sequence[int]) -> list[list[int]]:
        if self.as_costly_as is not None:
            self.as_costly_as.draft(requests, widths)
        return [self._draft(request, width) for request, width in zip(requests, widths, strict=True)]

    def _draft(self, request: Request, width: int) -> list[int]:
        done = request.num_output
        right = self.answers[tuple(request.prompt_ids)][done : done + width]
        dice = random.Random(zlib.crc32(repr((request.prompt_ids[-8:], done)).encode()))
        return [
            token if dice.random() < rate else (token + 1) % self.vocab_size
            for token, rate in zip(right, self.rates, strict=False)
        ]

    def observe(self, batch: Batch, taps: torch.Tensor, num_committed: Sequence[int]) -> None:
        """Needs no context itself."""
        if self.as_costly_as is not None:
            self.as_costly_as.observe(batch, taps, num_committed)

    def forget(self, request: Request) -> None:
        """The answers stay: the next round asks the same."""
        if self.as_costly_as is not None:
            self.as_costly_as.forget(request)


def parse_rates(text: str) -> list[float]:
    """ "0.8" for all slots, or "0.9,0.8,0.7" for the first three."""
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 <= rate <= 1 for rate in rates) or len(rates) > NGRAM_MAX_WIDTH:
        raise UserError(
            f"--synthetic-acceptance is {text!r}.",
            f"Give 1 to {NGRAM_MAX_WIDTH} numbers from 0 to 1 with commas, like 0.8,0.7,0.6; one is for all slots.",
        )
    return rates * NGRAM_MAX_WIDTH if len(rates) == 1 else rates


def make_speculators(
    loaded: Loaded, arms: Sequence[str], width: int | None, rates: Sequence[float] | None
) -> dict[str, Speculator]:
    """The arms asked for, plain always among them and first: all others are compared with it."""
    runner = loaded.runner

    def dflash() -> list[Drafter]:
        return [DFlashDrafter(runner)] if runner.drafter else []

    drafters: dict[str, list[Drafter]] = {"plain": []}
    for arm in arms:
        if arm == "dflash":
            drafters[arm] = dflash()
        elif arm == "ngram":
            drafters[arm] = [NgramDrafter()]
        elif arm == "auto":  # as ``loader`` makes it
            drafters[arm] = [NgramDrafter(), *dflash()]
    if rates is not None:
        drafters[SYNTHETIC] = [SyntheticDrafter(rates, runner.target.config.vocab_size, next(iter(dflash()), None))]
    return {
        arm: Speculator(mine, RecordingController(loaded.speculator.controller.max_width, width))
        for arm, mine in drafters.items()
    }

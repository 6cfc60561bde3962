"""A request's life: its tokens, its limits, and the one function that advances or ends it.

Lengths of a request: ``num_prompt`` tokens of the prompt, ``len(ids)`` committed tokens (prompt and answer),
``num_computed`` of them with keys and values in pages, ``num_cached`` of the prompt taken from the prefix cache.
While a request decodes, num_computed == len(ids) - 1: the last committed token is the anchor of the next block.
"""

import re
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Protocol

import torch

from lampejo.accept import TokenLogprobs, Verdict
from lampejo.errors import UserError, shown
from lampejo.guide import Guide
from lampejo.sampling import History, SamplingParams, check_number
from lampejo.states import RowState

# Each stop string is looked for in every token of every answer, by the thread that all requests share. OpenAI takes 4;
# chats of many speakers send some dozens.
MAX_STOPS = 256
MAX_STOP_CHARS = 1000
MAX_STOP_IDS = 1024
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class StopParams:
    """When an answer ends. max_tokens None means: at the context limit. min_tokens masks EOS and stop ids below it; a
    grammar that is at its end ends the answer all the same. Up to 256 stop strings of 1,000 characters
    each, and 1,024 ids."""

    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            check_number("max_tokens", self.max_tokens, 1, 2**31, whole=True)
        check_number("min_tokens", self.min_tokens, 0, 2**31, whole=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            message = f"min_tokens is {self.min_tokens}, which is larger than max_tokens ({self.max_tokens})."
            raise UserError(message, field="min_tokens")
        if not isinstance(self.stop, tuple) or any(not isinstance(s, str) or not s for s in self.stop):
            raise UserError("stop must be one or more strings, none of them empty.", field="stop")
        if len(self.stop) > MAX_STOPS:
            message = f"stop has {len(self.stop):,} strings; there can be {MAX_STOPS}."
            raise UserError(message, "Leave some out.", field="stop")
        for text in self.stop:
            if len(text) > MAX_STOP_CHARS:
                message = f"stop has a string of {len(text):,} characters; each can have {MAX_STOP_CHARS:,}."
                raise UserError(message, "Give the end of it alone.", field="stop")
            if _SURROGATE.search(text):
                message = f"stop has {shown(text)}, which is not UTF-8 text."
                raise UserError(message, "No answer can ever match it.", field="stop")
        if not isinstance(self.stop_token_ids, tuple):
            raise UserError("stop_token_ids must be a list of token ids.", field="stop_token_ids")
        if not isinstance(self.ignore_eos, bool):
            message = f"ignore_eos must be true or false, not {shown(self.ignore_eos)}."
            raise UserError(message, field="ignore_eos")
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            message = f"stop_token_ids has {len(self.stop_token_ids):,} ids; there can be {MAX_STOP_IDS:,}."
            raise UserError(message, "Leave some out, or give stop strings.", field="stop_token_ids")
        for token_id in self.stop_token_ids:
            check_number("stop_token_ids", token_id, 0, 2**31, whole=True, what=" entry")
        object.__setattr__(self, "stop_token_ids", tuple(dict.fromkeys(self.stop_token_ids)))


class TextSink(Protocol):
    """The incremental text of an answer (``text.TextStream``); it knows the stop strings, and from where they count."""

    @property
    def stop_match(self) -> str | None: ...  # the stop string that ended the text
    def push(self, token_id: int) -> bool: ...  # True when a stop string is completed
    def take(self) -> str: ...
    def finish(self) -> str: ...


@dataclass
class DraftStats:
    """Statistics of speculation, of one request or of many. Only steps that verified drafts count.

    ``policy``: by which drafts were accepted, "lossless" or, if any of the requests asked for it, "typical".
    """

    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_committed_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)  # entry j: steps with j drafts accepted
    num_inexact_tokens: int = 0  # accepted drafts that were not the target's own choice
    policy: str = "lossless"

    @property
    def lossless(self) -> bool:
        return self.policy == "lossless"

    def observe(self, num_drafted: int, num_accepted: int, num_committed: int, num_inexact: int = 0) -> None:
        self.num_spec_steps += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_draft_tokens += num_accepted
        self.num_committed_tokens += num_committed
        self.num_inexact_tokens += num_inexact
        self.acceptance_histogram += [0] * (num_accepted + 1 - len(self.acceptance_histogram))
        self.acceptance_histogram[num_accepted] += 1

    def add(self, other: "DraftStats") -> None:
        """Counts another request's in."""
        self.num_spec_steps += other.num_spec_steps
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_draft_tokens += other.num_accepted_draft_tokens
        self.num_committed_tokens += other.num_committed_tokens
        self.num_inexact_tokens += other.num_inexact_tokens
        self.policy = other.policy if self.lossless else self.policy
        pairs = zip_longest(self.acceptance_histogram, other.acceptance_histogram, fillvalue=0)
        self.acceptance_histogram = [a + b for a, b in pairs]

    def as_dict(self) -> dict:
        """The ``metrics.speculative_decoding`` object of a response."""
        steps, drafted = self.num_spec_steps, self.num_draft_tokens
        return {
            "mean_acceptance_length": self.num_committed_tokens / steps if steps else None,
            "draft_acceptance_rate": self.num_accepted_draft_tokens / drafted if drafted else None,
            "acceptance_histogram": list(self.acceptance_histogram),
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": self.num_accepted_draft_tokens,
            "num_draft_tokens": drafted,
            "policy": self.policy,
            "lossless": self.lossless,
            "num_inexact_tokens": self.num_inexact_tokens,
        }


@dataclass(eq=False)
class Request:
    """What a user asked, and how far it is. Made by the frontend, advanced by ``advance`` alone."""

    id: int
    prompt_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stops: StopParams = field(default_factory=StopParams)
    text: TextSink | None = None
    drafts: bool = True  # False: decoded plainly, whatever drafters there are
    prompt_logprobs: int | None = None  # how many alternatives to tell beside each token of the prompt; None: nothing
    typical: float | None = None  # threshold of typical acceptance; None: lossless
    guide: Guide | None = None  # its grammar and thinking budget

    ids: list[int] = field(init=False)
    arrival: int = field(default=0, init=False)  # how many came before it
    pages: list[int] = field(default_factory=list, init=False)
    state: RowState | None = field(default=None, init=False)  # while it has a row, if the target has recurrent layers
    num_computed: int = field(default=0, init=False)
    num_cached: int | None = field(default=None, init=False)  # None until it is first scheduled
    logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)
    of_prompt: list[TokenLogprobs] = field(default_factory=list, init=False)  # of its second token on, if asked for
    origins: list[str] = field(default_factory=list, init=False)  # per answer token: "target" or the drafter's name
    stats: DraftStats = field(init=False)
    finish_reason: str | None = field(default=None, init=False)
    submitted_at: float = field(default_factory=time.perf_counter, init=False)

    def __post_init__(self) -> None:
        self.ids = list(self.prompt_ids)
        self.seed = seed_or_drawn(self.sampling.seed)
        self.stats = DraftStats(policy="lossless" if self.typical is None else "typical")
        self.history = History(frozenset(self.prompt_ids) if self.sampling.has_penalties else frozenset(), Counter())

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_output(self) -> int:
        return len(self.ids) - len(self.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.ids[len(self.prompt_ids) :]

    @property
    def num_uncomputed(self) -> int:
        """Committed tokens whose keys and values are not in pages yet; 1 while decoding."""
        return len(self.ids) - self.num_computed


def seed_or_drawn(seed: int | None) -> int:
    return secrets.randbits(63) if seed is None else seed


@dataclass(frozen=True)
class TokenDelta:
    """What one step added to a request: token ids with their origins and log probabilities, text that may be shown."""

    request: Request
    ids: list[int]
    origins: list[str]  # per id: "target" or the name of the drafter that proposed it
    logprobs: list[TokenLogprobs]  # one per id, or none if not asked for
    text: str
    finish_reason: str | None
    num_inexact: int = 0  # of the ids: accepted drafts that were not the target's own choice
    committed_at: float = field(default_factory=time.perf_counter)  # however late it is read


def end_ids(request: Request, eos_ids: Sequence[int]) -> tuple[int, ...]:
    """Ids that end this request's answer."""
    return request.stops.stop_token_ids + (() if request.stops.ignore_eos else tuple(eos_ids))


def hidden_ids(request: Request, masks: Sequence[torch.Tensor | None], eos_ids: Sequence[int]) -> list[tuple[int, ...]]:
    """Per verify position: the ids that min_tokens hides there. ``masks``: of the request's guide, one per position;
    where it allows nothing else, nothing is hidden."""
    missing = request.stops.min_tokens - request.num_output
    if missing <= 0:
        return [()] * len(masks)
    ends = request.stops.stop_token_ids + tuple(eos_ids)
    return [ends if j < missing and not _is_end_only(mask, ends) else () for j, mask in enumerate(masks)]


def _is_end_only(mask: torch.Tensor | None, ends: Sequence[int]) -> bool:
    return mask is not None and int(mask.sum()) == int(mask[sorted(set(ends))].sum())


def advance(
    request: Request, verdict: Verdict, drafter_name: str, num_drafted: int, eos_ids: Sequence[int], max_context: int
) -> TokenDelta:
    """Commits a verified block, cut at the first end: EOS or stop id, stop string, grammar, max_tokens, context limit.

    Everything of the request is cut there: ids, text, log probabilities, penalty counts, grammar, statistics and,
    through ``num_computed``, what later steps see of the caches. EOS exactly at the cap is "stop". "error": the guide
    allowed nothing here, so that nothing is committed.
    """
    guide = request.guide
    if guide is not None and guide.error is not None:
        return _ended_by_guide(request)
    ends = end_ids(request, eos_ids)
    limit = max_context - request.num_prompt
    if request.stops.max_tokens is not None:
        limit = min(limit, request.stops.max_tokens)
    committed = []
    for j, token_id in enumerate(verdict.ids):
        grammar_ends = guide is not None and guide.push(token_id)
        if guide is not None and guide.error is not None:
            break  # the next step tells it, as it does where there are no drafts
        committed.append(token_id)
        request.ids.append(token_id)
        request.origins.append(drafter_name if j < verdict.num_accepted else "target")
        if request.sampling.has_penalties:
            request.history.output[token_id] += 1
        if verdict.logprobs:
            request.logprobs.append(verdict.logprobs[j])
        if token_id in ends or (request.text is not None and request.text.push(token_id)) or grammar_ends:
            request.finish_reason = "stop"
        elif request.num_output >= limit:
            request.finish_reason = "length"
        if request.finish_reason:
            break
    if not committed:
        return _ended_by_guide(request)
    request.num_computed = len(request.ids) - 1
    num_inexact = sum(j < len(committed) for j in verdict.inexact)
    if num_drafted:
        request.stats.observe(num_drafted, min(verdict.num_accepted, len(committed)), len(committed), num_inexact)
    text = ""
    if request.text is not None:
        text = request.text.take() + (request.text.finish() if request.finish_reason else "")
    origins, logprobs = request.origins[-len(committed) :], request.logprobs[-len(committed) :]
    return TokenDelta(request, committed, origins, logprobs, text, request.finish_reason, num_inexact)


def _ended_by_guide(request: Request) -> TokenDelta:
    request.finish_reason = "error"
    request.num_computed = len(request.ids)
    return TokenDelta(request, [], [], [], "", "error")

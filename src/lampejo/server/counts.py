"""What the server counts while it works: plain numbers of the event loop's thread, read when somebody asks
(``metrics``). A step of a request costs a few additions."""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass

from lampejo.request import TokenDelta

# Upper ends of the buckets of all histograms, in seconds: six in each power of ten, from 1 ms to 1,000 s.
BOUNDS = (*(float(f"{m}e{power}") for power in range(-3, 3) for m in (1, 1.5, 2, 3, 5, 7)), 1000.0)
ENDINGS = ("stop", "length", "abort", "error")


class Histogram:
    """How often a duration fell between two of ``BOUNDS``; the last count is of those beyond."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds


@dataclass
class Watch:
    """One request's times, in seconds of ``time.perf_counter``, and its tokens so far."""

    arrived_at: float  # before its prompt was rendered and encoded
    is_told: bool = True  # else its one token is nobody's, and only what its prompt has is wanted
    first_at: float = 0.0
    last_at: float = 0.0
    num_tokens: int = 0

    @property
    def num_told(self) -> int:
        return self.num_tokens if self.is_told else 0


class Counts:
    """Over all requests since the start."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.endings = Counter(dict.fromkeys(ENDINGS, 0))
        self.statuses: Counter[int] = Counter()  # of HTTP responses
        self.first_token = Histogram()  # from arrival
        self.between_steps = Histogram()  # of one request, each of which adds one token or more
        self.per_token = Histogram()  # the mean of a finished request, without its first token
        self.whole = Histogram()  # a finished request, from arrival to its last token

    def step(self, watch: Watch, delta: TokenDelta) -> None:
        """A step has added tokens to a request, and maybe ended it."""
        now = delta.committed_at
        if not watch.num_tokens:
            watch.first_at = now
            self.num_prompt_tokens += delta.request.num_prompt
            self.first_token.observe(now - watch.arrived_at)
        else:
            self.between_steps.observe(now - watch.last_at)
        watch.last_at = now
        watch.num_tokens += len(delta.ids)
        if watch.is_told:
            self.num_generated_tokens += len(delta.ids)
        if delta.finish_reason:
            self.endings[delta.finish_reason] += 1
            self.whole.observe(now - watch.arrived_at)
            if watch.num_tokens > 1:
                self.per_token.observe((now - watch.first_at) / (watch.num_tokens - 1))

    def broken_off(self, reason: str) -> None:
        """A request ended without its last token: "abort" (its reader went, or its time was over), or "error"."""
        self.endings[reason] += 1

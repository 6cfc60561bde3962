"""Medians, spreads and ratios. Ratios are formed per prompt, of neighbours in time, and only then summarised."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One answer that is worth timing: not empty and not failed. is_same: it has the ids that plain decoding gave, from
    which a lossy policy may part, or a GPU at a near-tie; num_inexact: tokens that were not the target's own choice.

    ``tok_per_s`` is of decoding alone, None for an answer of one token. The three numbers of steps count those that
    verified drafts, and what they committed, drafted and accepted.
    """

    category: str
    prompt: int
    sampled: bool
    run: int
    arm: str
    num_tokens: int
    tok_per_s: float | None
    ttft_s: float
    num_spec_steps: int
    num_spec_tokens: float
    num_inexact: int = 0
    is_same: bool = True


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def spread(values: Sequence[float]) -> float | None:
    """Half the distance between the quartiles, relative to the median: "give or take" so much. None below 3 values."""
    if len(values) < 3:
        return None
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / middle if middle else None


def ratios(samples: Sequence[Sample], arm: str, base: str = "plain") -> list[float]:
    """Per prompt: ``arm``'s speed over that of ``base`` in the same round, the median over the rounds."""
    speeds = {(s.category, s.prompt, s.sampled, s.run, s.arm): s.tok_per_s for s in samples}
    found: dict[tuple[str, int, bool], list[float]] = {}
    for (category, prompt, sampled, run, name), speed in speeds.items():
        other = speeds.get((category, prompt, sampled, run, base))
        if name == arm and speed and other:
            found.setdefault((category, prompt, sampled), []).append(speed / other)
    return [statistics.median(values) for values in found.values()]


def summary(samples: Sequence[Sample], arm: str) -> dict[str, Any]:
    """Medians of one arm's samples; ``speedup`` is the median of its ratios to plain."""
    mine = [s for s in samples if s.arm == arm]
    speeds = [s.tok_per_s for s in mine if s.tok_per_s]
    steps = sum(s.num_spec_steps for s in mine)
    to_plain = ratios(samples, arm)
    num_tokens = sum(s.num_tokens for s in mine)
    return {
        "tok_per_s": median(speeds),
        "ttft_s": median([s.ttft_s for s in mine]),
        "mean_acceptance_length": 1.0
        if arm == "plain"
        else sum(s.num_spec_tokens for s in mine) / steps
        if steps
        else None,
        "speedup": median(to_plain),
        "speedup_spread": spread(to_plain),
        "tok_per_s_spread": spread(speeds),
        "num_answers": len(mine),
        "num_tokens": num_tokens,
        "inexact_share": sum(s.num_inexact for s in mine) / num_tokens if num_tokens else None,
        "same_share": sum(s.is_same for s in mine) / len(mine) if mine else None,
    }


def with_sampled(samples: Sequence[Sample], arm: str) -> dict[str, Any]:
    """``summary`` of the greedy answers, with that of the sampled ones under ``sampled``."""
    result = summary([s for s in samples if not s.sampled], arm)
    sampled = [s for s in samples if s.sampled]
    if any(s.arm == arm for s in sampled):
        result["sampled"] = summary(sampled, arm)
    return result


def rounded(value: Any, digits: int = 4) -> Any:
    """Numbers of a JSON object with ``digits`` significant digits; whole numbers stay as they are."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, Mapping):
        return {str(key): rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item, digits) for item in value]
    return value

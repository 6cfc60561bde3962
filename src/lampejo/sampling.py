"""How the token at a position is chosen from the target's logits.

The token at absolute position p is a pure function of the logits at p, the request's parameters, its seed, the tokens
before p, and p itself (design principle 2). Temperature 0 is argmax. Above 0 it is Gumbel-max with noise that depends
on nothing but (seed, p, token id), so it does not matter in which step, at which slot, or beside whom a token is
chosen.
A drafter that uses the same noise is coupled to the target (Daliri, Musco, Suresh, arXiv 2408.07978).

Order of the logit processors: penalties, logit bias, min_tokens mask, temperature, top_k, top_p, min_p, noise.
Shape legend: N verify positions of one row, V vocabulary.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from lampejo.errors import UserError

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
_COLDEST = 1e-6  # scores divided by less would overflow; what is drawn at this temperature is the maximum already


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. The defaults are greedy and change nothing.

    temperature >= 0 (0 = greedy); top_k >= 0 (0 = off); 0 < top_p <= 1; 0 <= min_p <= 1; repetition_penalty > 0 (prompt
    and answer, 1 = off, arXiv 1909.05858); presence and frequency penalty in -2 .. 2 (answer only, as OpenAI defines
    them); logit_bias maps token ids to -100 .. 100; seed: None draws one; logprobs: None, or how many alternatives
    beside the chosen token's own log probability (0 .. 20).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, 0, 100)
        check_number("top_k", self.top_k, 0, 2**31, whole=True)
        check_number("top_p", self.top_p, 0, 1, above=True)
        check_number("min_p", self.min_p, 0, 1)
        check_number("repetition_penalty", self.repetition_penalty, 0, 100, above=True)
        check_number("presence_penalty", self.presence_penalty, -2, 2)
        check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        if not isinstance(self.logit_bias, Mapping):
            raise UserError(f"logit_bias must map token ids to numbers, not be {self.logit_bias!r}.")
        for token_id, bias in self.logit_bias.items():
            check_number("logit_bias token id", token_id, 0, 2**31, whole=True)
            check_number(f"logit_bias of token {token_id}", bias, -100, 100)
        if self.seed is not None:
            check_number("seed", self.seed, -(2**63), 2**64, whole=True)
        if self.logprobs is not None:
            check_number("logprobs", self.logprobs, 0, 20, whole=True)

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def check_number(name: str, value: float, low: float, high: float, whole: bool = False, above: bool = False) -> None:
    """Refuses what is not a finite number from low to high (from just above low, with ``above``)."""
    kinds = (int,) if whole else (int, float)
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    if not is_number or (isinstance(value, float) and not math.isfinite(value)):
        raise UserError(f"{name} must be a {'whole ' if whole else ''}number, not {value!r}.")
    if value > high or value < low or (above and value == low):
        start = f"above {low}" if above else f"at least {low}"
        shown = value if abs(value) < 10**20 else "out of range"
        raise UserError(f"{name} is {shown}; it must be {start} and at most {high}.")


@dataclass
class History:
    """The tokens that penalties count: which stand in the prompt, and how often each stands in the answer so far."""

    prompt: frozenset[int] = frozenset()
    output: Counter[int] = field(default_factory=Counter)


def gumbel_noise(seed: int, positions: Sequence[int], token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise [N, V], fp32, a pure function of (seed, position, token id).

    Counter-based (Salmon et al., SC'11): two rounds of a 32-bit mixing function (MurmurHash3's finaliser) over the id
    with two keys made from seed and position; its upper 23 bits give a uniform in (0, 1) that fp32 holds exactly.
    """
    keys = [_mix64((seed & _MASK64) ^ _mix64(position + 1)) for position in positions]
    device = token_ids.device
    low = torch.tensor([key & _MASK32 for key in keys], device=device)[:, None]
    high = torch.tensor([key >> 32 for key in keys], device=device)[:, None]
    bits = _mix32(_mix32((token_ids.long()[None] * 0x9E3779B1 + low) & _MASK32) ^ high)
    uniform = ((bits >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def _mix32(x: torch.Tensor) -> torch.Tensor:
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK32
    return x ^ (x >> 16)


def _mix64(x: int) -> int:
    """SplitMix64's finaliser."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def process_logits(
    logits: torch.Tensor,
    params: SamplingParams,
    history: History,
    drafts: Sequence[int],
    hidden_ids: Sequence[Sequence[int]],
) -> torch.Tensor:
    """Applies penalties, bias and masks to one row's verify positions.

    logits [N, V] with N = len(drafts) + 1 -> [N, V], a copy if anything changes. Position j counts ``drafts[:j]`` as
    already answered: wherever j's token matters, those drafts were accepted. ``hidden_ids[j]`` must not be chosen at j.
    """
    if not (params.has_penalties or params.logit_bias or any(hidden_ids)):
        return logits
    logits = logits.clone()
    if params.has_penalties:
        output = history.output.copy()
        for j in range(len(logits)):
            if j > 0:
                output[drafts[j - 1]] += 1
            _penalise(logits[j], params, history.prompt, output)
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[:, ids] += torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device)
    for j, ids_at_j in enumerate(hidden_ids):
        if ids_at_j:
            logits[j, list(ids_at_j)] = -math.inf
    return logits


def _penalise(logits: torch.Tensor, params: SamplingParams, prompt: frozenset[int], output: Counter[int]) -> None:
    """In place on one position's logits [V]."""
    if params.repetition_penalty != 1:
        ids = torch.tensor(sorted(prompt | output.keys()), dtype=torch.long, device=logits.device)
        seen = logits[ids]
        logits[ids] = torch.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
    if output and (params.presence_penalty or params.frequency_penalty):
        ids = torch.tensor(list(output), device=logits.device)
        counts = torch.tensor(list(output.values()), dtype=logits.dtype, device=logits.device)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * counts


def choose(logits: torch.Tensor, params: SamplingParams, seed: int, positions: Sequence[int]) -> torch.Tensor:
    """The target's own tokens. logits [N, V] after ``process_logits``, at absolute ``positions`` -> ids [N]."""
    if params.temperature == 0:
        return logits.argmax(-1)
    scores = keep_likely(logits / max(params.temperature, _COLDEST), params)
    return (scores + gumbel_noise(seed, positions, torch.arange(logits.shape[-1], device=logits.device))).argmax(-1)


def keep_likely(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """top_k, top_p (arXiv 1904.09751) and min_p (arXiv 2407.01082) in turn: what falls out becomes -inf. [N, V]."""
    if 0 < params.top_k < scores.shape[-1]:
        least = scores.topk(params.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < least, -math.inf)
    if params.top_p < 1:
        ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
        probs = ordered.softmax(-1)
        outside = probs.cumsum(-1) - probs >= params.top_p  # the first token always stays
        scores = scores.masked_fill(outside.scatter(-1, ids, outside), -math.inf)
    if params.min_p > 0:
        probs = scores.softmax(-1)
        scores = scores.masked_fill(probs < params.min_p * probs.amax(-1, keepdim=True), -math.inf)
    return scores

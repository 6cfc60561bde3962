"""How the token at a position is chosen from the target's logits.

The token at absolute position p is a pure function of the logits at p, the request's parameters, its seed, the tokens
before p, and p itself (design principle 2). Temperature 0 is argmax. Above 0 it is Gumbel-max with noise that depends
on nothing but (seed, p, token id), so it does not matter in which step, at which slot, or beside whom a token is
chosen.
A drafter that uses the same noise is coupled to the target (Daliri, Musco, Suresh, arXiv 2408.07978).

Order of the logit processors: penalties, logit bias, masks (min_tokens, grammar), temperature, top_k, top_p, min_p,
noise.
Shape legend: N verify positions of one row, V vocabulary.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

import torch

from lampejo.errors import UserError, shown

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
COLDEST = 1e-6  # scores divided by less would overflow; what is drawn at this temperature is the maximum already


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
            message = f"logit_bias must map token ids to numbers, not be {shown(self.logit_bias)}."
            raise UserError(message, field="logit_bias")
        if not _is_bias(self.logit_bias):
            for token_id, bias in self.logit_bias.items():
                check_number("logit_bias", token_id, 0, 2**31, whole=True, what=" token id")
                check_number("logit_bias", bias, -100, 100, what=f" of token {token_id}")
        if self.seed is not None:
            check_number("seed", self.seed, -(2**63), 2**64 - 1, whole=True)
        if self.logprobs is not None:
            check_number("logprobs", self.logprobs, 0, 20, whole=True)

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @cached_property
    def bias(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``logit_bias`` as ids and numbers [K]. Made once for all steps of all answers that share it: it may be as
        large as the vocabulary."""
        return torch.tensor(list(self.logit_bias)), torch.tensor(list(self.logit_bias.values()), dtype=torch.float32)


def _is_bias(bias: Mapping[int, float]) -> bool:
    """Whether all is as it should be, looked at without a line of Python for each entry."""
    if not bias:
        return True
    ids, numbers = bias.keys(), bias.values()
    if not (set(map(type, ids)) == {int} and set(map(type, numbers)) <= {int, float}):
        return False
    is_small = min(numbers) >= -100 and max(numbers) <= 100  # of a NaN they tell nothing
    return min(ids) >= 0 and max(ids) <= 2**31 and is_small and all(map(math.isfinite, numbers))


def check_number(
    field: str, value: float, low: float, high: float, whole: bool = False, above: bool = False, what: str = ""
) -> None:
    """Refuses what is not a finite number from low to high (from just above low, with ``above``). what: which part of
    the field it is."""
    name = field + what
    kinds = (int,) if whole else (int, float)
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    if not is_number or (isinstance(value, float) and not math.isfinite(value)):
        raise UserError(f"{name} must be a {'whole ' if whole else ''}number, not {shown(value)}.", field=field)
    if value > high or value < low or (above and value == low):
        start = f"above {low}" if above else f"at least {low}"
        told = value if abs(value) < 10**20 else "out of range"
        raise UserError(f"{name} is {told}; it must be {start} and at most {high}.", field=field)


@dataclass
class History:
    """The tokens that penalties count: which stand in the prompt, and how often each stands in the answer so far."""

    prompt: frozenset[int] = frozenset()
    output: Counter[int] = field(default_factory=Counter)

    @cached_property
    def prompt_index(self) -> torch.Tensor:
        """The prompt's ids [K], made once for all steps."""
        return torch.tensor(sorted(self.prompt), dtype=torch.long)


def gumbel_noise(seed: int, positions: Sequence[int], token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise [N, V], fp32, a pure function of (seed, position, token id).

    Counter-based (Salmon et al., SC'11): two rounds of a 32-bit mixing function (MurmurHash3's finaliser) over the id
    with two keys made from seed and position; its upper 23 bits give a uniform in (0, 1) that fp32 holds exactly.
    The arithmetic is modulo 2**32 on int32, and in place: this runs over the whole vocabulary for every token.
    """
    keys = [_mix64((seed & _MASK64) ^ _mix64(position + 1)) for position in positions]
    device = token_ids.device
    low = torch.tensor([_signed(key & _MASK32) for key in keys], dtype=torch.int32, device=device)[:, None]
    high = torch.tensor([_signed(key >> 32) for key in keys], dtype=torch.int32, device=device)[:, None]
    bits = token_ids.int()[None] * _signed(0x9E3779B1) + low
    scratch = torch.empty_like(bits)
    _mix32_(bits, scratch)
    bits.bitwise_xor_(high)
    _mix32_(bits, scratch)
    uniform = bits.bitwise_right_shift_(9).bitwise_and_(0x7FFFFF).float().add_(0.5).mul_(2.0**-23)
    return _log(_log(uniform).neg_()).neg_()


def _log(x: torch.Tensor) -> torch.Tensor:
    """The natural logarithm of normal fp32 numbers, x > 0, with a relative error of 2e-7.

    On a CPU in operations whose roundings IEEE 754 settles, so that kernels can give the same bits:
    log m = 2 atanh((m - 1) / (m + 1)) as a series, for m in [sqrt(1/2), sqrt(2)). Elsewhere bits of noise matter less
    than those of logits, and one operation is quicker than twenty.
    """
    if x.device.type != "cpu":
        return x.log()
    bits = x.view(torch.int32)
    exponent = (bits - 0x3F3504F3).bitwise_right_shift_(23)  # of x / sqrt(1/2)
    m = (bits - (exponent << 23)).view(torch.float32)
    s = (m - 1).div_(m.add_(1))
    z = s * s
    series = z * (2 / 9)
    for coefficient in (2 / 7, 2 / 5, 2 / 3):
        series.add_(coefficient).mul_(z)
    return series.add_(2).mul_(s).add_(exponent.float().mul_(math.log(2)))


def _signed(x: int) -> int:
    """The int32 with the same bits as an unsigned 32-bit number."""
    return x - (1 << 32) if x >> 31 else x


def _mix32_(x: torch.Tensor, scratch: torch.Tensor) -> None:
    """MurmurHash3's finaliser on int32, in place. The masks make its shifts logical."""
    for shift, mask, factor in ((16, 0xFFFF, 0x85EBCA6B), (13, 0x7FFFF, 0xC2B2AE35), (16, 0xFFFF, 1)):
        torch.bitwise_right_shift(x, shift, out=scratch)
        x.bitwise_xor_(scratch.bitwise_and_(mask))
        if factor != 1:
            x.mul_(_signed(factor))


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
    masks: Sequence[torch.Tensor | None] = (),
) -> torch.Tensor:
    """Applies penalties, bias and masks to one row's verify positions.

    logits [N, V] with N = len(drafts) + 1 -> [N, V], a copy if anything changes. Position j counts ``drafts[:j]`` as
    already answered: wherever j's token matters, those drafts were accepted. ``hidden_ids[j]`` must not be chosen at j,
    and nothing else than ``masks[j]`` [V] allows there, if there is one.
    """
    if not (params.has_penalties or params.logit_bias or any(hidden_ids) or masks):
        return logits
    logits = logits.clone()
    if params.has_penalties:
        _penalise(logits, params, history, drafts)
    if params.logit_bias:
        ids, numbers = (part.to(logits.device) for part in params.bias)
        logits.index_add_(1, ids, numbers.to(logits.dtype).expand(len(logits), -1))
    for hidden, group in groupby(range(len(hidden_ids)), hidden_ids.__getitem__):
        if hidden:
            rows = list(group)
            logits[rows[0] : rows[-1] + 1].index_fill_(1, torch.tensor(hidden, device=logits.device), -math.inf)
    for j, mask in enumerate(masks):
        if mask is not None:
            logits[j].masked_fill_(~mask.to(logits.device), -math.inf)
    return logits


def _penalise(logits: torch.Tensor, params: SamplingParams, history: History, drafts: Sequence[int]) -> None:
    """In place on logits [N, V]; all positions at once: first the repetition of what stands in the prompt, then the K
    ids that stand anywhere in the answer before the last position."""
    device = logits.device
    if params.repetition_penalty != 1:
        index = history.prompt_index.to(device)
        logits.index_copy_(1, index, _repeated(logits.index_select(1, index), params))
    ids = list(dict.fromkeys([*history.output, *drafts]))
    column = {token_id: k for k, token_id in enumerate(ids)}
    index = torch.tensor(ids, dtype=torch.long, device=device)
    in_prompt = torch.tensor([i in history.prompt for i in ids], dtype=torch.bool, device=device)
    counts = torch.tensor([history.output[i] for i in ids], dtype=logits.dtype, device=device).repeat(len(logits), 1)
    for j, token_id in enumerate(drafts):
        counts[j + 1 :, column[token_id]] += 1
    scores = logits.index_select(1, index)  # [N, K]
    if params.repetition_penalty != 1:
        scores = torch.where(~in_prompt & (counts > 0), _repeated(scores, params), scores)
    if params.presence_penalty or params.frequency_penalty:
        less = params.presence_penalty + params.frequency_penalty * counts
        scores = torch.where(counts > 0, scores - less, scores)
    logits.index_copy_(1, index, scores)


def _repeated(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Of ids that are there already."""
    return torch.where(scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty)


def choose(logits: torch.Tensor, params: SamplingParams, seed: int, positions: Sequence[int]) -> torch.Tensor:
    """The target's own tokens. logits [N, V] after ``process_logits``, at absolute ``positions`` -> ids [N]."""
    if params.temperature == 0:
        return logits.argmax(-1)
    scores = keep_likely(logits / max(params.temperature, COLDEST), params)
    return (scores + gumbel_noise(seed, positions, torch.arange(logits.shape[-1], device=logits.device))).argmax(-1)


def is_typical(logits: torch.Tensor, params: SamplingParams, token_id: int, threshold: float) -> bool:
    """Whether a token is plausible enough to stand for the target's own choice at one position.

    Typical acceptance (Medusa, arXiv 2401.10774, section 3.3.1): its probability is above min(threshold,
    sqrt(threshold) * exp(-entropy)), so where the target is undecided less will do. The distribution, and its entropy
    in nats, are those that ``choose`` draws from: at temperature 0 nothing but the greatest is typical. logits [V],
    after ``process_logits``.
    """
    if params.temperature == 0:
        return False
    probs = keep_likely(logits[None].float() / max(params.temperature, COLDEST), params).softmax(-1)[0]
    entropy = torch.special.entr(probs).sum()
    bound = (threshold**0.5 * torch.exp(-entropy)).clamp(max=threshold)
    return bool(probs[token_id] > bound)


def keep_likely(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """top_k, then top_p (arXiv 1904.09751), then min_p (arXiv 2407.01082): what falls out becomes -inf. scores [N, V].

    Tokens of equal score at the border of top_k or top_p stay together. Nothing falls out of a row with NaN or
    infinity.
    """
    if not (0 < params.top_k < scores.shape[-1] or params.top_p < 1 or params.min_p > 0):
        return scores
    best = scores.amax(-1, keepdim=True)
    least = torch.full_like(best, -math.inf)
    if 0 < params.top_k < scores.shape[-1]:
        least = scores.topk(params.top_k, dim=-1).values[:, -1:]
    if params.top_p < 1:
        weights = _weights(scores - best).masked_fill_(scores < least, 0)
        least = torch.maximum(least, _least_of_top_p(scores, weights, params.top_p))
    if params.min_p > 0:
        least = torch.maximum(least, best + math.log(params.min_p))
    return scores.masked_fill((scores < least) & best.isfinite(), -math.inf)


def _weights(x: torch.Tensor) -> torch.Tensor:
    """e^x * 2^30 to the nearest whole number, int64, for x <= 0. Sums of whole numbers do not depend on their order,
    and as in ``_log`` IEEE 754 settles every step, so kernels keep the same tokens to the last one."""
    x = x.nan_to_num(nan=0.0).clamp_(min=-23)
    n = (x * math.log2(math.e)).round_()
    rest = x.sub_(n * 0.693359375).sub_(n * -2.12194440e-4)  # log(2) in two parts
    series = rest * (1 / 5040)
    for coefficient in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0):
        series.add_(coefficient).mul_(rest)
    bits = series.add_(1).view(torch.int32).add_(n.add_(30).int().bitwise_left_shift_(23))  # times 2^(n + 30)
    return bits.view(torch.float32).round_().long()


def _least_of_top_p(scores: torch.Tensor, weights: torch.Tensor, top_p: float) -> torch.Tensor:
    """The least score among the likeliest tokens whose weights together reach ``top_p`` of all [N, 1].

    Looks at a few likely tokens first and at more only if need be: sorting a whole vocabulary takes milliseconds.
    """
    wanted = weights.sum(-1, keepdim=True).double() * top_p
    num_looked = min(1024, scores.shape[-1])
    while True:
        best, ids = scores.topk(num_looked, dim=-1)
        before = weights.gather(-1, ids).cumsum(-1)[:, :-1]  # of the second token and on: what those before it have
        num_kept = 1 + (before < wanted).sum(-1, keepdim=True)
        if num_looked == scores.shape[-1] or bool((num_kept < num_looked).all()):
            return best.gather(-1, num_kept - 1)
        num_looked = min(8 * num_looked, scores.shape[-1])

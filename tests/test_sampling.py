"""How a token is chosen: parameters, logit processors and the keyed noise, each against a definition by brute force."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lampejo.errors import UserError
from lampejo.sampling import History, SamplingParams, choose, gumbel_noise, keep_likely, process_logits

NONE = History()
VOCAB = 49152  # of the default model


def uniforms(seed: int, positions: range, num_ids: int) -> torch.Tensor:
    """The noise back as numbers in (0, 1)."""
    return torch.exp(-torch.exp(-gumbel_noise(seed, positions, torch.arange(num_ids)).double()))


# Parameters

NAMES = ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
NO_NUMBERS = [math.nan, math.inf, -math.inf, True, False, "0.5", [1], {}, 1j, 10**400, -(10**400), 10**5000]


@pytest.mark.parametrize("name", [*NAMES, "seed", "logprobs"])
@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: f"{value!r:.9}" if value != 10**5000 else "huge")
def test_what_is_no_number_is_refused_by_name(name, value):
    """O5, P1: NaN, infinite, boolean, text, and whole numbers too large for a float or even to be printed."""
    with pytest.raises(UserError, match=name) as caught:
        SamplingParams(**{name: value})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_no_number(name):
    """None means "not given" only where that has a meaning of its own: seed and logprobs."""
    with pytest.raises(UserError, match=name):
        SamplingParams(**{name: None})


OUTSIDE = [("temperature", -1e-9), ("temperature", 101), ("top_k", -1), ("top_k", 2.0), ("top_k", 2**31 + 1),
           ("top_p", 0), ("top_p", -0.1), ("top_p", 1.01), ("min_p", -0.1), ("min_p", 1.01), ("repetition_penalty", 0),
           ("repetition_penalty", -1), ("presence_penalty", 2.1), ("presence_penalty", -2.1),
           ("frequency_penalty", 2.1), ("frequency_penalty", -2.1), ("logprobs", -1), ("logprobs", 21),
           ("logprobs", 1.0), ("seed", 1.5), ("seed", 2**64), ("seed", -(2**63) - 1)]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), OUTSIDE)
def test_values_just_outside_the_range_are_refused_by_name(name, value):
    """P1: negative numbers, too large ones, and fractions where whole numbers are meant."""
    with pytest.raises(UserError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "params",
    [{"temperature": 0}, {"temperature": 100}, {"top_k": 0}, {"top_p": 1e-30}, {"top_p": 1}, {"min_p": 0}, {"min_p": 1},
     {"repetition_penalty": 1e-3}, {"presence_penalty": -2}, {"frequency_penalty": 2.0}, {"seed": 0},
     {"seed": -(2**63)}, {"seed": 2**64 - 1}, {"logprobs": 0}, {"logprobs": 20}, {"logit_bias": {0: -100, 96: 100}}],
)  # fmt: skip
def test_values_on_the_edge_of_the_range_are_taken_and_can_be_sampled_with(params):
    params = SamplingParams(**{"temperature": 1.0, **params})
    logits = process_logits(torch.randn(2, 97), params, NONE, [5], [(), ()])
    assert choose(logits, params, params.seed or 0, range(2)).shape == (2,)


@pytest.mark.parametrize("bias", [{-1: 1.0}, {"5": 1.0}, {5: "1"}, {5: math.nan}, {5: 100.5}, {5: 10**400}, {True: 1.0},
                                  {1.0: 1.0}, [(5, 1.0)], "5", 5, None])  # fmt: skip
def test_a_logit_bias_that_is_no_map_of_ids_to_numbers_is_refused_by_name(bias):
    with pytest.raises(UserError, match="logit_bias"):
        SamplingParams(logit_bias=bias)


# Noise


def test_noise_does_not_depend_on_what_it_is_computed_beside():
    """Principle 3: the same bits for a position alone, in a block, or for some ids only (a draft vocabulary)."""
    ids = torch.arange(VOCAB)
    block = gumbel_noise(7, range(100, 116), ids)
    for j in (0, 5, 15):
        assert torch.equal(gumbel_noise(7, [100 + j], ids)[0], block[j])
    some = torch.tensor([3, 40_000, 17, 3])
    assert torch.equal(gumbel_noise(7, [105], some)[0], block[5][some])
    assert torch.equal(gumbel_noise(7, range(100, 116), ids), block)


def test_noise_is_what_its_definition_says():
    """The arithmetic modulo 2**32, written out with Python's own numbers; a seed must mean the same for ever."""

    def mix32(x: int) -> int:
        x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
        x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
        return x ^ x >> 16

    def mix64(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    ids = [0, 1, 2, 96, 49151, 151935, 2**31 - 1]
    for seed, position in ((0, 0), (7, 100), (-3, 5), (2**64 - 1, 131072)):
        key = mix64(seed % 2**64 ^ mix64(position + 1))
        bits = [mix32(mix32((i * 0x9E3779B1 + key) % 2**32) ^ key >> 32) for i in ids]
        expected = [-math.log(-math.log(((b >> 9) + 0.5) * 2**-23)) for b in bits]
        noise = gumbel_noise(seed, [position], torch.tensor(ids))[0].tolist()
        assert noise == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_noise_differs_by_seed_by_position_and_by_id():
    """Also where two keys look alike: seed and position exchanged, negative seeds, seeds equal in their low half."""
    keys = [(0, 0), (0, 1), (1, 0), (1, 1), (-1, 0), (2**32, 0), (2**32 + 1, 0), (2**63, 0), (0, 2**20), (2**20, 0)]
    rows = [gumbel_noise(seed, [position], torch.arange(512))[0] for seed, position in keys]
    for i in range(len(rows)):
        for k in range(i):
            assert (rows[i] == rows[k]).sum() <= 2, (keys[i], keys[k])
    assert len(rows[0].unique()) > 510


def test_noise_is_finite_and_spread_evenly():
    """Chi-square over 64 cells of the uniforms beneath, their extremes, and the mean and variance of a Gumbel."""
    u = uniforms(3, range(8), VOCAB).flatten()
    n = len(u)
    cells = torch.histc(u.float(), 64, 0, 1).double()
    chi_square = ((cells - n / 64) ** 2 / (n / 64)).sum().item()
    assert 30 < chi_square < 104  # 63 degrees of freedom: 1 in 1000 on either side
    assert u.min() < 1e-4 and u.max() > 1 - 1e-4
    noise = gumbel_noise(3, range(8), torch.arange(VOCAB))
    assert noise.isfinite().all()
    assert abs(noise.mean().item() - 0.57722) < 0.01
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.03


def test_noise_of_neighbours_is_independent():
    """Correlation between adjacent ids, positions and seeds; 400,000 pairs have a standard error of 0.0016."""
    rows = torch.stack([uniforms(seed, range(4), VOCAB) for seed in range(3)])  # [seeds, positions, ids]

    def correlation(x: torch.Tensor, y: torch.Tensor) -> float:
        return torch.corrcoef(torch.stack([x.flatten(), y.flatten()]))[0, 1].item()

    assert abs(correlation(rows[..., 1:], rows[..., :-1])) < 0.006
    assert abs(correlation(rows[..., 2:], rows[..., :-2])) < 0.006
    assert abs(correlation(rows[:, 1:], rows[:, :-1])) < 0.007
    assert abs(correlation(rows[1:], rows[:-1])) < 0.007
    bits = (rows * 2**23).long()
    for bit in range(23):
        assert abs((bits >> bit & 1).double().mean().item() - 0.5) < 0.003, f"bit {bit}"


@pytest.mark.parametrize(
    "params",
    [{"temperature": 1.0}, {"temperature": 0.5}, {"temperature": 1.7}, {"temperature": 1.0, "top_k": 4},
     {"temperature": 1.0, "top_p": 0.8}, {"temperature": 1.2, "min_p": 0.1}],
    ids=str,
)  # fmt: skip
def test_sampled_frequencies_are_the_softmax_probabilities(params):
    """The noise makes exact samples (Gumbel-max): chi-square over 20,000 positions of one seed."""
    params, n = SamplingParams(**params), 20_000
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5])
    drawn = choose(logits.expand(n, -1), params, 5, range(n))
    expected = n * keep_likely(logits[None] / params.temperature, params).softmax(-1)[0]
    counts = torch.bincount(drawn, minlength=8)
    kept = expected > 0
    assert counts[~kept].sum() == 0
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum().item()
    assert chi_square < {7: 24.3, 3: 16.3, 4: 18.5, 2: 13.8, 5: 20.5}[int(kept.sum()) - 1]  # 1 in 1000


def test_the_choice_at_a_position_does_not_depend_on_its_block():
    """Principle 2: one position alone or as any slot of a block, at the real vocabulary's size."""
    logits = torch.randn(16, VOCAB)
    for params in (SamplingParams(temperature=0.8), SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.02)):
        together = choose(logits, params, 9, range(50, 66)).tolist()
        alone = [choose(logits[j : j + 1], params, 9, [50 + j]).item() for j in range(16)]
        assert together == alone


def test_a_vanishing_temperature_is_greedy():
    """O5: dividing by it must not overflow to a row of infinities, of which the first would win."""
    logits = torch.tensor([[1.0, -4.0, 6.0, 5.0], [-9.0, -8.0, -7.0, -8.5]])
    for temperature in (1e-3, 1e-10, 1e-40, 1e-300, 5e-324):
        for extra in ({}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.5}):
            params = SamplingParams(temperature=temperature, **extra)
            assert choose(logits, params, 1, range(2)).tolist() == [2, 2]


def test_an_id_that_is_hidden_is_never_drawn():
    params = SamplingParams(temperature=100.0)
    logits = process_logits(torch.zeros(500, 8), params, NONE, [0] * 499, [(1, 2, 3)] * 500)
    assert not {1, 2, 3} & set(choose(logits, params, 0, range(500)).tolist())


# What top_k, top_p and min_p keep


def kept_by_definition(scores: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """One after another, on what the one before left; ties at a border stay together."""
    kept = set(range(len(scores)))
    if 0 < top_k < len(scores):
        border = sorted(scores, reverse=True)[top_k - 1]
        kept = {i for i in kept if scores[i] >= border}

    def probs() -> dict[int, float]:
        total = math.fsum(math.exp(scores[i]) for i in kept)
        return {i: math.exp(scores[i]) / total for i in kept}

    if top_p < 1:
        mass, border = 0.0, 0.0
        for i, p in sorted(probs().items(), key=lambda item: -scores[item[0]]):
            if mass >= top_p:
                break
            mass, border = mass + p, scores[i]
        kept = {i for i in kept if scores[i] >= border}
    if min_p > 0:
        p = probs()
        kept = {i for i in kept if p[i] >= min_p * max(p.values())}
    return kept


@settings(max_examples=300, deadline=None)
@given(
    scores=st.lists(st.integers(-6, 6), min_size=1, max_size=12),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([1.0, 0.95, 0.7, 0.43, 0.11, 1e-9]),
    min_p=st.sampled_from([0.0, 0.003, 0.06, 0.31, 0.99]),
)
def test_top_k_top_p_and_min_p_keep_what_their_definitions_keep(scores, top_k, top_p, min_p):
    """Against brute force, with ties; two rows at once, so that a row's neighbour cannot show."""
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    both = torch.tensor([scores, scores[::-1]], dtype=torch.float32)
    result = keep_likely(both, params)
    for row, values in zip(result, (scores, scores[::-1]), strict=True):
        kept = {i for i, score in enumerate(row.tolist()) if score > -math.inf}
        assert kept == kept_by_definition([float(s) for s in values], top_k, top_p, min_p)
        assert all(row[i] == values[i] for i in kept)


def test_of_equal_scores_greedy_takes_the_first_and_a_border_divides_none():
    """Whatever the device's sort does with ties, the kept set is a function of the scores."""
    assert choose(torch.tensor([[1.0, 3.0, 3.0, 0.0]]), SamplingParams(), 0, [0]).tolist() == [1]
    scores = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    for params in ({"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.36}):
        kept = keep_likely(scores, SamplingParams(temperature=1.0, **params))
        assert kept.isfinite().tolist() == [[True, True, True, True, False]]


def test_top_p_reaches_as_far_as_it_must():
    """Of a flat distribution over the whole vocabulary nearly all stay, beside a row of which one token does."""
    flat, steep = 0.001 * torch.randn(VOCAB), torch.zeros(VOCAB)
    steep[777] = 50.0
    kept = keep_likely(torch.stack([flat, steep]), SamplingParams(temperature=1.0, top_p=0.9)).isfinite().sum(-1)
    assert abs(kept[0].item() - 0.9 * VOCAB) < 0.01 * VOCAB
    assert kept[1] == 1
    order = flat.sort(descending=True).values
    for num_expected in (1, 500, 1023, 1024, 1025, 9000):
        top_p = order.softmax(-1)[:num_expected].sum().item() - 0.5 / VOCAB
        kept = keep_likely(flat[None], SamplingParams(temperature=1.0, top_p=top_p))[0].isfinite()
        assert abs(int(kept.sum()) - num_expected) <= 1
        assert flat[kept].min() >= order[num_expected]


# Penalties, bias, masks


def test_a_bias_of_the_whole_vocabulary_is_checked_to_the_last_entry():
    """P1: it is looked at as a whole first, and may be as large as the vocabulary."""
    whole: dict[Any, Any] = dict.fromkeys(range(VOCAB), 0.5)
    assert len(SamplingParams(logit_bias=whole).logit_bias) == VOCAB
    for wrong in ({VOCAB: math.nan}, {VOCAB: "1"}, {VOCAB: 101}, {VOCAB: True}, {-1: 1}, {"5": 1}):
        with pytest.raises(UserError, match="logit_bias"):
            SamplingParams(logit_bias=whole | wrong)


def test_what_processors_need_of_a_request_is_made_once_not_in_each_step():
    """Fault: a bias of the whole vocabulary, and the ids of a long prompt, became tensors again for every token."""
    params = SamplingParams(logit_bias={5: 1.0, 3: -100}, repetition_penalty=1.5)
    history = History(frozenset([2, 4]))
    made = [(*params.bias, history.prompt_index)]
    for _ in range(2):
        process_logits(torch.zeros(2, 8), params, history, [1], [(), ()])
        made.append((*params.bias, history.prompt_index))
    assert all(now is first for later in made[1:] for now, first in zip(later, made[0], strict=True))


def penalised_by_definition(
    scores: list[float], params: SamplingParams, prompt: frozenset[int], output: list[int]
) -> list[float]:
    counts = Counter(output)
    result = list(scores)
    for i in range(len(result)):
        if i in prompt or i in counts:
            repetition = params.repetition_penalty
            result[i] = result[i] / repetition if result[i] > 0 else result[i] * repetition
        if i in counts:
            result[i] -= params.presence_penalty + params.frequency_penalty * counts[i]
        result[i] += params.logit_bias.get(i, 0.0)
    return result


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_penalties_and_bias_count_the_drafts_before_a_position(data):
    """L6: position j sees the answer so far and drafts[:j], nothing later; the history itself stays as it is."""
    draw = data.draw
    ids = st.integers(0, 9)
    drafts = draw(st.lists(ids, max_size=6))
    output = draw(st.lists(ids, max_size=8))
    params = SamplingParams(
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.5])),
        presence_penalty=draw(st.sampled_from([0.0, 0.7, -1.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.25, -0.5])),
        logit_bias=draw(st.dictionaries(ids, st.sampled_from([-100.0, 1.5, 9.0]), max_size=3)),
    )
    prompt = draw(st.frozensets(ids, max_size=5))
    history = History(prompt, Counter(output))
    hidden: list[Any] = [draw(st.lists(ids, max_size=2)) for _ in range(len(drafts) + 1)]
    logits = torch.randn(len(drafts) + 1, 10, generator=torch.Generator().manual_seed(len(drafts)))
    before = logits.clone()
    result = process_logits(logits, params, history, drafts, hidden)
    assert torch.equal(logits, before)
    assert history == History(prompt, Counter(output))
    for j in range(len(drafts) + 1):
        expected = penalised_by_definition(before[j].tolist(), params, prompt, output + drafts[:j])
        for i in hidden[j]:
            expected[i] = -math.inf
        torch.testing.assert_close(result[j], torch.tensor(expected))
        alone = process_logits(
            before[j : j + 1], params, History(prompt, Counter(output + drafts[:j])), [], [hidden[j]]
        )
        assert torch.equal(alone[0], result[j]), "a position's scores depend on its block"


def test_without_anything_to_do_the_logits_are_passed_on_uncopied():
    logits = torch.randn(2, 10)
    assert process_logits(logits, SamplingParams(temperature=1.0, top_k=3), NONE, [1], [(), ()]) is logits

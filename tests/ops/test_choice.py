"""Tokens chosen by the CPU kernels: the same as by the definition in ``sampling``, to the bit."""

import ctypes
import math
import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lampejo.accept import VerifyRow, accept
from lampejo.errors import DamagedModel
from lampejo.ops.cpu import instruction_set, set_threads
from lampejo.ops.cpu.choice import choose, choose_from_head
from lampejo.ops.cpu.fused import PackedLinear, PackedMatrix
from lampejo.ops.cpu.library import LIBRARY, Q4, Q8, CChoice
from lampejo.ops.stored import Stored
from lampejo.sampling import History, SamplingParams, gumbel_noise
from lampejo.sampling import choose as defined_choice
from lampejo.scores import Draw, FusedScores, KernelScores, Scores, _kernel_choice, make_scores

if instruction_set() is None:
    pytest.skip("the CPU kernels were not built, or do not know this processor", allow_module_level=True)

CHOSEN = LIBRARY.lampejo_isa()
PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1e-9, "top_p": 0.5},
]


@pytest.fixture(params=["avx512vnni", "avx2", "neondot", "neon"])
def isa(request):
    """Every instruction set that this machine can run."""
    if not LIBRARY.lampejo_force_isa(request.param.encode()):
        pytest.skip(f"this machine does not run {request.param}")
    yield request.param
    LIBRARY.lampejo_force_isa(CHOSEN)


@pytest.fixture(autouse=True)
def two_threads():
    set_threads(2)
    yield
    set_threads(1)


def choices_of(params: SamplingParams, seed: int, positions: Any) -> list[CChoice]:
    return [_kernel_choice(params, seed, position) for position in positions]


def make_head(num_ids: int, size: int, kind: int = Q8, seed: int = 0) -> PackedLinear:
    weight = torch.randn(num_ids, size, generator=torch.Generator().manual_seed(seed))
    return PackedLinear(PackedMatrix(Stored.of(weight), kind))


def test_noise_has_the_bits_of_the_definition(isa):
    """Principle 2: a draft and the target's choice, a row with penalties and one without, must see the same noise."""
    num_ids = 1 << 19
    choice, out = CChoice(seed=7, position=1234), torch.empty(num_ids)
    LIBRARY.lampejo_noise(ctypes.addressof(choice), None, num_ids, out.data_ptr())
    assert torch.equal(out, gumbel_noise(7, [1234], torch.arange(num_ids))[0])
    some, out = torch.tensor([5, 0, 2**31 - 1, 40_000, 5, 6, 7, 8, 9, 10, 11], dtype=torch.int32), torch.empty(11)
    LIBRARY.lampejo_noise(ctypes.addressof(choice), some.data_ptr(), 11, out.data_ptr())
    assert torch.equal(out, gumbel_noise(7, [1234], some)[0])


SIZES = [1, 2, 7, 8, 9, 63, 64, 65, 129, 1000, 9001]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_choices_are_those_of_the_definition(data):
    """Odd sizes, ties, masks, extreme values and temperatures, every filter alone and together; no rows at all."""
    draw = data.draw
    size, num_rows = draw(st.sampled_from(SIZES)), draw(st.integers(0, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    scores = torch.randn(num_rows, size, generator=generator) * draw(st.sampled_from([0.0, 0.01, 1.0, 10.0, 1e6, 1e30]))
    if draw(st.booleans()):
        scores = scores.round()
    if draw(st.booleans()):
        scores[:, torch.rand(size, generator=generator) < 0.5] = -math.inf
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.5, 100.0, 1e-3, 1e-9])),
        top_k=draw(st.sampled_from([0, 1, 3, 50, 999, size])),
        top_p=draw(st.sampled_from([1.0, 0.9999, 0.9, 0.5, 0.01, 1e-12])),
        min_p=draw(st.sampled_from([0.0, 1e-5, 0.05, 0.5, 1.0])),
    )
    seed, first = draw(st.integers(-(2**63), 2**64 - 1)), draw(st.integers(0, 2**40))
    positions = range(first, first + num_rows)
    chosen = choose(scores, choices_of(params, seed, positions))
    assert [i for i, _ in chosen] == defined_choice(scores, params, seed, positions).tolist()
    assert [value for _, value in chosen] == [scores[t, i].item() for t, (i, _) in enumerate(chosen)]


def test_of_equal_scores_the_first_is_taken_wherever_it_stands():
    """Across the tiles that threads share, and within one."""
    scores = torch.zeros(3, 20_000)
    scores[0, [700, 701, 19_999]] = 1.0
    scores[1, [15_000, 19_000]] = 2.0
    assert choose(scores, [CChoice()] * 3) == [(700, 1.0), (15_000, 2.0), (0, 0.0)]


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_no_number_is_chosen(isa, params, bad):
    """Fault: weights gone wrong that go on talking. The first NaN is chosen, so that whoever asks can refuse it."""
    for size in (5, 300, 20_000):
        for at in (0, size // 2, size - 1):
            scores = torch.randn(1, size)
            scores[0, at] = bad
            ((index, value),) = choose(scores, choices_of(SamplingParams(**params), 3, [9]))
            assert index == at and not math.isfinite(value)
            scores[0, size // 2 :] = math.nan
            ((index, value),) = choose(scores, choices_of(SamplingParams(**params), 3, [9]))
            assert index == (at if at < size // 2 and math.isnan(bad) else size // 2)


@pytest.mark.parametrize("kind", [Q4, Q8])
def test_a_heads_choices_are_those_from_its_product_whatever_stands_beside(isa, kind):
    """Principle 3: alone, in a block, beside rows with other parameters, on any number of threads."""
    rng = random.Random(0)
    for num_ids in (1, 9, 333, 9001):
        head = make_head(num_ids, 70, kind)
        x = 2 * torch.randn(21, 70)
        params = [SamplingParams(**rng.choice(PARAMS)) for _ in range(21)]
        choices = [_kernel_choice(p, 5, 100 + t) for t, p in enumerate(params)]
        logits = head(x)
        expected = [defined_choice(logits[t : t + 1], p, 5, [100 + t]).item() for t, p in enumerate(params)]
        for threads in (1, 2, 3):
            set_threads(threads)
            whole = choose_from_head(head, x, choices)
            assert [i for i, _ in whole] == expected
            assert [value for _, value in whole] == [logits[t, i].item() for t, i in enumerate(expected)]
            for start, n in ((0, 1), (3, 5), (20, 1), (7, 14)):
                part = slice(start, start + n)
                assert choose_from_head(head, x[part], choices[part]) == whole[part]
        assert choose_from_head(head, x[:0], []) == []


def test_drafts_are_drawn_with_the_noise_of_the_ids_that_they_stand_for():
    """The coupling: a head over some ids draws as the target would, were its other logits impossible."""
    ids = torch.tensor([3, 17, 40, 96, 5000])
    head, x = make_head(5, 32), torch.randn(6, 32)
    draws = [Draw(t, 11, 50 + j) for j, t in enumerate([0.0, 0.5, 1.0, 2.0, 1.0, 0.0])]
    scores = make_scores(head, x)
    drawn = scores.draw(draws, ids).tolist()
    assert isinstance(scores, FusedScores)
    for others in (Scores(head(x)), KernelScores(head(x))):
        assert others.draw(draws, ids).tolist() == drawn
    logits = torch.full((6, 5001), -math.inf)
    logits[:, ids] = head(x)
    for j, draw in enumerate(draws):
        own = defined_choice(logits[j : j + 1], SamplingParams(temperature=draw.temperature), 11, [50 + j]).item()
        assert ids[drawn[j]] == own


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_acceptance_is_the_same_without_logits_as_with_them(data):
    """Rows that need logits beside rows that need none, ragged, with drafts right and wrong."""
    draw = data.draw
    num_ids = draw(st.sampled_from([11, 300]))
    head = make_head(num_ids, 40)
    extras: list[dict[str, Any]] = [{}, {}, {"logit_bias": {3: 5.0}}, {"frequency_penalty": 1.0}, {"logprobs": 2}]
    rows, hidden = [], []
    for r in range(draw(st.integers(0, 4))):
        params = SamplingParams(**draw(st.sampled_from(PARAMS)), **draw(st.sampled_from(extras)))
        x = 2 * torch.randn(draw(st.integers(1, 5)), 40)
        own = defined_choice(head(x), params, r, range(10, 10 + len(x))).tolist()
        drafts = [i if draw(st.booleans()) else (i + 1) % num_ids for i in own[:-1]]
        masks: list[tuple[int, ...]] = [draw(st.sampled_from([(), (), (own[j],)])) for j in range(len(x))]
        typical = draw(st.sampled_from([None, None, 0.1]))
        rows.append(VerifyRow(drafts, 10, params, r, History(output=Counter([1, 1])), masks, typical))
        hidden.append(x)
    x = torch.cat(hidden) if hidden else torch.empty(0, 40)
    assert accept(FusedScores(head, x), rows) == accept(Scores(head(x)), rows)


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_hidden_states_that_are_no_numbers_are_refused(params):
    """As for logits at hand, where they count; after a refused draft they do not."""
    head, x = make_head(300, 40), torch.randn(3, 40)
    x[1] = math.nan
    sampling = SamplingParams(**params)
    first = defined_choice(head(x[:1]), sampling, 3, [5]).item()

    def verdict(draft: int) -> list[int]:
        row = VerifyRow([draft, 0], 5, sampling, 3, History(), [()] * 3)
        return accept(FusedScores(head, x), [row])[0].ids

    with pytest.raises(DamagedModel, match="not numbers"):
        verdict(first)
    assert verdict((first + 1) % 300) == [first]

"""Output with drafts equals output without: the first test of everything that touches decoding.

All engines here run tiny targets on the CPU, in fp32 on the reference operations and in 8 bits on the kernels, with
recurrent layers and with experts.
"Equal" is equality of ids, and no near-tie is excused.
"""

import math
import random

import pytest
import torch

from lampejo.request import StopParams
from tiny import (
    EOS,
    TINY_DRAFTER,
    ScriptedDrafter,
    is_packed,
    make_drafter,
    make_engine,
    make_request,
    prompt_of,
    run,
)

LONG = StopParams(max_tokens=48, ignore_eos=True)
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 7}


def plain(target, prompt, stops=LONG, **sampling):
    return run(make_engine(target), [make_request(prompt, stops, **sampling)])[0]


def truth_of(answer):
    """A script that knows the right continuation of one request."""

    def script(request, width):
        return answer[request.num_output : request.num_output + width]

    return script


def wrong(token_id):
    return (token_id + 1) % 97


ADVERSARIES = {
    "random": lambda answer, rng: lambda r, w: [rng.randrange(97) for _ in range(w)],
    "always wrong": lambda answer, rng: lambda r, w: [wrong(t) for t in truth_of(answer)(r, w)],
    "always right": lambda answer, rng: truth_of(answer),
    "end tokens": lambda answer, rng: lambda r, w: [EOS] * w,
    "mask tokens": lambda answer, rng: lambda r, w: [TINY_DRAFTER.mask_token_id] * w,
    "ragged": lambda answer, rng: lambda r, w: truth_of(answer)(r, rng.randint(0, w)),
}


def wrong_at(answer, slot):
    def script(request, width):
        draft = truth_of(answer)(request, width)
        return [wrong(t) if j == slot else t for j, t in enumerate(draft)]

    return script


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ADVERSARIES)
def test_adversarial_drafts_never_change_the_output(target, name, sampling):
    """L2, L3: whatever is drafted, the answer is that of plain decoding."""
    prompt = prompt_of(19)
    answer = plain(target, prompt, **sampling)
    drafter = ScriptedDrafter(ADVERSARIES[name](answer, random.Random(0)))
    request = make_request(prompt, LONG, **sampling)
    assert run(make_engine(target, [drafter], width=7), [request]) == [answer]
    assert request.stats.num_spec_steps > 0


@pytest.mark.parametrize("slot", range(8))
def test_a_wrong_draft_at_any_slot_costs_only_the_rest_of_its_block(target, slot):
    """L2: wrong at exactly slot j; the accepted prefix is exactly j long."""
    prompt = prompt_of(23)
    answer = plain(target, prompt)
    request = make_request(prompt, LONG)
    assert run(make_engine(target, [ScriptedDrafter(wrong_at(answer, slot))], width=8), [request]) == [answer]
    histogram = request.stats.acceptance_histogram
    assert histogram[slot] >= len(answer) // (slot + 1) - 2
    assert sum(histogram[slot + 1 :]) <= 1  # the last block may be shorter than the wrong slot


# Choosing is the same code after every target, so the two that take longest, on the reference operations, need not show
# it with noise each time.
@pytest.mark.parametrize(
    ("target", "sampling"),
    [
        pytest.param(name, sampling, id=f"{name}-{kind}", marks=marks)
        for kind, sampling in (("greedy", {}), ("sampled", {"temperature": 1.0, "seed": 11}))
        for name, marks in (
            ("reference", pytest.mark.slow),
            ("kernels", ()),
            ("hybrid", pytest.mark.slow),
            ("kernels_hybrid", ()),
        )
    ],
    indirect=["target"],
)
def test_512_tokens_after_4000_equal_plain_decoding(target, sampling):
    """L1: a short check misses faults that need length; and speculation must really have happened."""
    prompt = prompt_of(4000)
    stops = StopParams(max_tokens=512, ignore_eos=True)
    expected = plain(target, prompt, stops, **sampling)
    assert len(expected) == 512
    rng = random.Random(1)
    half_right = ScriptedDrafter(lambda r, w: [t if rng.random() < 0.7 else wrong(t) for t in truth_of(expected)(r, w)])
    request = make_request(prompt, stops, **sampling)
    assert run(make_engine(target, [half_right], width=5), [request], check=False) == [expected]
    assert request.stats.num_spec_steps > 50
    assert 0 < request.stats.num_accepted_draft_tokens < request.stats.num_draft_tokens


def test_the_dflash_drafter_leaves_the_output_as_it_is(target):
    """L1, L3: through the real drafter, its context pages and its own noise."""
    prompts = [prompt_of(n, seed=n) for n in (1, 5, 40, 333)]
    for sampling in ({}, SAMPLED):
        expected = [plain(target, prompt, **sampling) for prompt in prompts]
        engine = make_engine(target, drafter=make_drafter(packed=is_packed(target)), dflash=True, width=5)
        requests = [make_request(prompt, LONG, **sampling) for prompt in prompts]
        assert run(engine, requests) == expected
        assert all(request.stats.num_spec_steps > 0 for request in requests)


def test_unequal_rows_with_chunked_prefill_in_the_same_step_do_not_influence_each_other(target):
    """L3: alone or beside seven others that start, prefill in chunks and end at other times."""
    prompts = [prompt_of(n, seed=n) for n in (3, 31, 32, 33, 100, 257, 400, 64)]
    stops = [StopParams(max_tokens=m, ignore_eos=True) for m in (40, 33, 9, 25, 64, 12, 7, 50)]
    params = [{} if i % 2 else {"temperature": 0.9, "seed": i} for i in range(8)]
    expected = [plain(target, p, s, **k) for p, s, k in zip(prompts, stops, params, strict=True)]
    rng = random.Random(2)
    by_prompt = {tuple(p): truth_of(e) for p, e in zip(prompts, expected, strict=True)}

    def script(request, width):
        draft = by_prompt[tuple(request.prompt_ids)](request, rng.randint(0, width))
        return [t if rng.random() < 0.8 else wrong(t) for t in draft]

    engine = make_engine(target, [ScriptedDrafter(script)], width=6, token_budget=48, page_size=16)
    requests = [make_request(p, s, **k) for p, s, k in zip(prompts, stops, params, strict=True)]
    waiting = list(requests)
    while waiting or engine.has_work:  # one more request each step
        if waiting:
            engine.add(waiting.pop(0))
        engine.step()
        engine.pool.check_integrity()
    assert [request.output_ids for request in requests] == expected


@pytest.mark.parametrize("num_prompt", range(13, 20))
@pytest.mark.parametrize("width", [1, 4, 9])
def test_blocks_may_start_and_end_anywhere_in_a_page(target, num_prompt, width):
    """L2: every alignment of prompt, block and page boundary."""
    prompt = prompt_of(num_prompt)
    stops = StopParams(max_tokens=24, ignore_eos=True)
    answer = plain(target, prompt, stops)
    rng = random.Random(num_prompt)
    drafter = ScriptedDrafter(lambda r, w: [t if rng.random() < 0.7 else wrong(t) for t in truth_of(answer)(r, w)])
    engine = make_engine(target, [drafter], width=width, page_size=8)
    assert run(engine, [make_request(prompt, stops)]) == [answer]


@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 31, 64])
def test_prefill_in_chunks_of_any_size_gives_the_same_answer(target, chunk):
    """Prefill is verification of known tokens: how they are cut must not show."""
    prompt = prompt_of(70)
    expected = plain(target, prompt)
    engine = make_engine(target, token_budget=chunk, max_rows=1)
    assert run(engine, [make_request(prompt, LONG)]) == [expected]


def poison(engine):
    """Fills every cache slot that no committed token of a running request owns with NaN, and every state of no row."""
    size = engine.page_size
    free = torch.ones(engine.pool.num_pages, size, dtype=torch.bool)
    for request in engine.scheduler.running:
        for position in range(request.num_computed):
            free[request.pages[position // size], position % size] = False
    for cache in (engine.runner.cache, engine.runner.context_cache):
        cache.k.masked_fill_(free[None, :, None, None, :], math.nan)
        cache.v.masked_fill_(free[None, :, None, :, None], math.nan)
    if (states := engine.runner.states) is not None:
        owned = [request.state.slot for request in engine.scheduler.running if request.num_computed]
        unowned = [slot for slot in range(states.num_slots) if slot not in owned]
        states.windows[:, unowned] = math.nan
        states.states[:, unowned] = math.nan


def test_rejected_positions_full_of_nan_do_no_harm(target):
    """L5: between steps, all that is not committed becomes NaN, in the target's cache and in the drafter's."""
    prompts = [prompt_of(n, seed=n) for n in (5, 37)]
    expected = [plain(target, prompt) for prompt in prompts]
    engine = make_engine(
        target, drafter=make_drafter(packed=is_packed(target)), dflash=True, width=5, num_pages=200, page_size=32
    )
    requests = [make_request(prompt, LONG) for prompt in prompts]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        poison(engine)
        engine.step()
    assert [request.output_ids for request in requests] == expected


PROCESSORS = {
    "repetition": {"repetition_penalty": 1.4},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9},
    "bias": {"logit_bias": {5: 9.0, 38: -100.0}},
    "min_p": {"min_p": 0.1, "temperature": 1.0, "seed": 1},
    "top_k": {"top_k": 5, "temperature": 1.0, "seed": 2},
    "top_p": {"top_p": 0.7, "temperature": 1.0, "seed": 3},
    "all": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {7: 2.0},
            "min_p": 0.02, "top_k": 40, "top_p": 0.95, "temperature": 0.7, "seed": 4},
}  # fmt: skip


@pytest.mark.parametrize("name", PROCESSORS)
def test_every_logit_processor_counts_the_accepted_drafts_before_a_slot(target, name):
    """L6: penalties and the rest are equal with and without drafts."""
    prompt = prompt_of(12)
    sampling = PROCESSORS[name]
    expected = plain(target, prompt, **sampling)
    rng = random.Random(3)
    drafter = ScriptedDrafter(lambda r, w: [t if rng.random() < 0.8 else wrong(t) for t in truth_of(expected)(r, w)])
    request = make_request(prompt, LONG, **sampling)
    assert run(make_engine(target, [drafter], width=6), [request]) == [expected]
    assert max(i for i, n in enumerate(request.stats.acceptance_histogram) if n) >= 3
    assert expected != plain(target, prompt), "the processor changed nothing: this test could not fail"


def test_logprobs_are_those_of_plain_decoding(target):
    """L6: the log probability of a token does not depend on the slot in which it was verified."""
    prompt = prompt_of(12)
    bare = make_request(prompt, LONG, logprobs=3)
    run(make_engine(target), [bare])
    drafted = make_request(prompt, LONG, logprobs=3)
    run(make_engine(target, [ScriptedDrafter(truth_of(bare.output_ids))], width=5), [drafted])
    assert drafted.logprobs == bare.logprobs
    assert len(bare.logprobs) == len(bare.output_ids)
    assert all(entry.top[0][1] >= entry.logprob for entry in bare.logprobs)

"""Pages, prefix reuse, preemption, aborts and memory over many requests (cases M1 - M5, M7, and M6 in process).

Targets are the tiny random model, whose answers depend on every key and value in its pages, or the scripted one, which
reads its text back from them.
"""

import gc
import random
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from lampejo.api import LLM
from lampejo.engine import Engine
from lampejo.request import DraftStats, Request, StopParams
from lampejo.runner import Runner
from lampejo.speculate import DFlashDrafter, NgramDrafter
from scripted import lively_pair, make_llm, random_target, scripted_engine, scripted_llm
from tiny import TINY, TINY_HYBRID, ScriptedDrafter, make_engine, make_request, prompt_of, run

SHORT = StopParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=[TINY, TINY_HYBRID], ids=["llama", "hybrid"])
def pair(request: pytest.FixtureRequest) -> Any:
    """Without recurrent layers on the kernels; with them on the reference operations, which so have to hold as well."""
    return lively_pair(request.param, quick=request.param is TINY)


def check_idle(engine: Engine) -> None:
    """No active row, all pages free, no state held, nothing kept of any request."""
    assert not engine.has_work
    assert engine.pool.num_free == engine.pool.num_pages
    engine.pool.check_integrity()
    assert engine.pool.states is None or engine.pool.states.num_held == 0
    speculator = engine.speculator
    assert not speculator._chosen and not speculator.controller._tracks
    assert not any(d._indices for d in speculator.drafters if isinstance(d, NgramDrafter))


def recording(engine: Engine) -> list[list[int]]:
    """All drafts that the engine's DFlash drafter makes from now on."""
    log: list[list[int]] = []
    draft = engine.runner.draft

    def logged(requests: Sequence[Request], widths: Sequence[int]) -> list[list[int]]:
        drafts = draft(requests, widths)
        log.extend(drafts)
        return drafts

    engine.runner.draft = logged  # type: ignore[method-assign]
    return log


def noisy(answers: dict[tuple[int, ...], list[int]], rng: random.Random) -> ScriptedDrafter:
    """Mostly right drafts for known prompts."""

    def script(request: Request, width: int) -> list[int]:
        known = answers[tuple(request.prompt_ids)][request.num_output :][: rng.randint(0, width)]
        return [t if rng.random() < 0.8 else (t + 1) % 97 for t in known]

    return ScriptedDrafter(script)


@pytest.mark.parametrize("num_prompt", [1072, 2000, 2144, 3000])
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "dflash"])
def test_the_second_time_a_prompt_comes_from_the_cache_for_target_and_drafter(pair, num_prompt, drafts):
    """M1: 90 % cached at least; the same answer; and the very same drafts, so that acceptance cannot suffer."""
    target, drafter = pair
    engine = make_engine(target, drafter=drafter, dflash=drafts, width=5 if drafts else 0, max_context=3100)
    log, prompt = recording(engine), prompt_of(num_prompt)
    first, second = make_request(prompt, SHORT), make_request(prompt, SHORT)
    answer = run(engine, [first], check=False)
    first_drafts = list(log)
    log.clear()
    assert run(engine, [second], check=False) == answer
    assert first.num_cached == 0
    assert second.num_cached >= 0.9 * num_prompt
    assert log == first_drafts
    assert second.stats == first.stats
    if drafts:
        assert len({tuple(d) for d in log}) > 3, "the drafts do not depend on the context: this test could not fail"
    check_idle(engine)


@pytest.mark.parametrize("num_prompt", [31, 32, 33, 63, 64, 65, 96])
def test_a_prefix_hit_at_any_page_boundary_leaves_at_least_one_token_to_compute(pair, num_prompt):
    """M1: a prompt that fills its pages exactly is not covered wholly; the answer is the cold one."""
    engine = make_engine(pair[0], page_size=32, max_context=200)
    prompt = prompt_of(num_prompt)
    answer = run(engine, [make_request(prompt, SHORT)])
    again = make_request(prompt, SHORT)
    assert run(engine, [again]) == answer
    assert again.num_cached == (num_prompt - 1) // 32 * 32


@pytest.mark.parametrize("evict", ["nothing", "the end", "everything"])
def test_the_second_turn_of_a_conversation_equals_the_cold_answer(pair, evict):
    """M2: on the cached first turn, whole, in part, or evicted by others."""
    target, drafter = pair
    config = {"dflash": True, "width": 5, "page_size": 16, "max_context": 320, "num_pages": 20}
    engine = make_engine(target, drafter=drafter, **config)
    first = make_request(prompt_of(120), SHORT)
    run(engine, [first])
    if evict != "nothing":
        others = {"the end": [prompt_of(180, seed=5)], "everything": [prompt_of(290, seed=6), prompt_of(290, seed=7)]}
        for prompt in others[evict]:
            run(engine, [make_request(prompt, SHORT)])
    turn_2 = first.ids + prompt_of(37, seed=9)
    warm = make_request(turn_2, SHORT)
    log = recording(engine)
    answer = run(engine, [warm])
    num_full = (len(first.ids) - 1) // 16 * 16
    assert warm.num_cached == {"nothing": num_full, "everything": 0}.get(evict, warm.num_cached)
    assert evict != "the end" or 0 < (warm.num_cached or 0) < num_full

    cold_engine = make_engine(target, drafter=drafter, **config)
    cold_log = recording(cold_engine)
    cold = make_request(turn_2, SHORT)
    assert run(cold_engine, [cold]) == answer
    assert log == cold_log
    assert cold.num_cached == 0


def test_shared_pages_are_never_written_again(pair):
    """M3: the pages that two requests share, the target's and the drafter's, bit for bit, while both go on; and the
    recurrent state that they start from."""
    target, drafter = pair
    engine = make_engine(target, drafter=drafter, dflash=True, width=5, page_size=16, max_context=400)
    prefix = prompt_of(100)
    run(engine, [make_request(prefix, SHORT)])
    both = [make_request(prefix + prompt_of(n, seed=n), StopParams(max_tokens=60, ignore_eos=True)) for n in (5, 20)]
    for request in both:
        engine.add(request)
    engine.step()
    shared = both[0].pages[:6]
    assert shared == both[1].pages[:6]
    assert both[0].num_cached == both[1].num_cached == 96
    assert not set(both[0].pages[6:]) & set(both[1].pages[6:])
    tensors = [x for c in (engine.runner.cache, engine.runner.context_cache) for x in (c.k, c.v)]
    before = [x[:, shared].clone() for x in tensors]
    states, snapshot = engine.runner.states, None
    if states is not None:
        snapshot = engine.pool.states.find(engine.pool.name_at(shared, 96))
        saved = [x[:, snapshot].clone() for x in (states.windows, states.states)]
    while engine.has_work:
        engine.step()
    for old, tensor in zip(before, tensors, strict=True):
        assert torch.equal(old, tensor[:, shared])
    if states is not None:
        assert torch.equal(saved[0], states.windows[:, snapshot]) and torch.equal(saved[1], states.states[:, snapshot])


@pytest.mark.parametrize("width", [0, 5])
def test_one_request_of_the_full_length_always_completes(pair, width):
    """M4: in exactly as many pages as it needs, also when others' prefixes fill them, and when others wait."""
    target, drafter = pair
    config = {"dflash": True, "width": width, "page_size": 16, "max_context": 160, "num_pages": 10}
    engine = make_engine(target, drafter=drafter, **config)
    run(engine, [make_request(prompt_of(150, seed=3), SHORT)])
    for num_prompt in (1, 80, 159):
        request = make_request(prompt_of(num_prompt), StopParams(max_tokens=None, ignore_eos=True))
        beside = make_request(prompt_of(30, seed=4), SHORT)
        run(engine, [request, beside])
        assert (len(request.ids), request.finish_reason) == (160, "length")
        assert beside.num_output == 24
        check_idle(engine)


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({}, id="greedy"),
        pytest.param({"temperature": 0.9, "seed": 3}, id="sampled", marks=pytest.mark.slow),
    ],
)
def test_more_requests_than_fit_wait_and_none_fails(pair, sampling):
    """M4: pages run out in the middle; the youngest are preempted, return, and answer as if nothing had been."""
    target, drafter = pair
    prompts = [prompt_of(20 + 7 * i, seed=i) for i in range(8)]
    stops = StopParams(max_tokens=50, ignore_eos=True)
    expected = [run(make_engine(target), [make_request(p, stops, **sampling)], check=False)[0] for p in prompts]
    engine = make_engine(
        target, drafter=drafter, dflash=True, width=5, page_size=16, max_context=160, num_pages=14, max_rows=6
    )
    requests = [make_request(p, stops, **sampling, presence_penalty=0.0, logprobs=0) for p in prompts]
    assert run(engine, requests) == expected
    assert engine.scheduler.num_preemptions > 3
    for request in requests:
        assert len(request.logprobs) == len(request.origins) == 50
        assert request.stats.num_accepted_draft_tokens == request.origins.count("dflash")
    check_idle(engine)


def test_a_preempted_request_counts_its_penalties_and_its_text_only_once():
    """M4: what was committed before is not committed again when its pages are computed anew."""
    target = random_target()
    params = {"frequency_penalty": 0.7, "repetition_penalty": 1.2, "temperature": 0.8, "seed": 5}
    prompts = [prompt_of(25, seed=i) for i in range(5)]
    stops = StopParams(max_tokens=60, ignore_eos=True)
    expected = [run(scripted_engine(target), [make_request(p, stops, **params)])[0] for p in prompts]
    rng = random.Random(0)
    drafter = noisy({tuple(p): e for p, e in zip(prompts, expected, strict=True)}, rng)
    engine = scripted_engine(target, [drafter], width=6, page_size=8, max_context=120, num_pages=20)
    requests = [make_request(p, stops, **params) for p in prompts]
    assert run(engine, requests) == expected
    assert engine.scheduler.num_preemptions > 3
    for request in requests:
        assert sum(request.history.output.values()) == 60


def test_memory_does_not_grow_over_500_requests(pair):
    """M5: through the whole Python interface, with both drafters, the automatic width; Python's memory and torch's.
    Over 200 of them with recurrent layers, which are slow in PyTorch."""
    config = {"max_context": 128, "page_size": 16, "num_pages": 16}
    runner = Runner(*pair, config["num_pages"], config["page_size"], num_state_slots=20)
    rng, n = random.Random(0), 50 if runner.states is None else 20

    def work(llm: LLM, num_requests: int) -> tuple[int, int, int]:
        for _ in range(num_requests):
            prompt = "".join(chr(rng.randint(0x20, 0x7E)) for _ in range(rng.randint(1, 30)))
            llm.generate(prompt, max_tokens=rng.randint(1, 5), logprobs=1, temperature=0.5, stop="~")
        gc.collect()
        types = [type(o) for o in gc.get_objects()]
        return sys.getallocatedblocks(), types.count(torch.Tensor), types.count(Request)

    with make_llm(runner, [NgramDrafter(2), DFlashDrafter(runner)], **config) as llm:
        others = work(llm, 0)[2]  # what tests before this one left in tracebacks is not this one's matter
        work(llm, 2 * n)
        first = work(llm, 2 * n)
        last = [work(llm, 3 * n) for _ in range(2)][-1]
        check_idle(llm.engine)
        assert not llm.frontend._outboxes
    assert last[0] - first[0] < 300, "blocks of Python's memory; a request that is kept has more than 50 of them"
    assert last[1] - first[1] <= 0, "tensors are kept"
    assert last[2] - others <= 2, "finished requests are kept"


def test_requests_aborted_a_hundred_times_in_any_state_leave_nothing_behind(pair):
    """M6: waiting, in the middle of a prompt, of a block, preempted, finished; afterwards the next answer is right."""
    target, drafter = pair
    engine = make_engine(target, drafter=drafter, dflash=True, width=5, token_budget=24, max_rows=3, page_size=8,
                         max_context=96, num_pages=14)  # fmt: skip
    prompt, stops = prompt_of(40), StopParams(max_tokens=30, ignore_eos=True)
    expected = run(engine, [make_request(prompt, stops)])
    rng = random.Random(0)
    states = []
    for n in range(100):
        requests = [make_request(prompt_of(rng.randint(1, 60), seed=n + i), stops) for i in range(rng.randint(1, 4))]
        for request in requests:
            engine.add(request)
        for _ in range(rng.randint(0, 6)):
            if engine.has_work:
                engine.step()
        for request in requests:
            states.append((bool(request.pages), request.num_cached is None, request.num_output > 0))
            engine.abort(request)
        assert {request.finish_reason for request in requests} <= {"abort", "length"}
        check_idle(engine)
    assert len(set(states)) >= 4
    assert run(engine, [make_request(prompt, stops)]) == expected


KINDS: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 1}, {"temperature": 1.2, "seed": 2, "top_p": 0.9},
                               {"repetition_penalty": 1.3}]  # fmt: skip


KINDS_NAMES = {name for kind in KINDS for name in kind}
DEFAULTS = {name: getattr(make_request([1]).sampling, name) for name in KINDS_NAMES}


def soak(
    engine: Engine, references: dict[tuple[int, int], list[int]], prompts: list[list[int]], num_requests: int
) -> int:
    """Random arrivals and aborts; compares every finished answer with its reference. Returns how many finished."""
    rng = random.Random(1)
    current: list[tuple[Request, tuple[int, int]]] = []
    num_left, num_finished = num_requests, 0
    totals, num_prompt, num_cached = DraftStats(), 0, 0
    while num_left or current:
        while num_left and len(current) < 8:
            key = (rng.randrange(len(prompts)), rng.randrange(len(KINDS)))
            stops = StopParams(max_tokens=rng.randint(1, 30), ignore_eos=True)
            request = make_request(prompts[key[0]], stops, **KINDS[key[1]])
            engine.add(request)
            current.append((request, key))
            num_left -= 1
        engine.step()
        if rng.random() < 0.1:
            engine.abort(rng.choice(current)[0])
        for request, key in list(current):
            if request.finish_reason:
                current.remove((request, key))
                totals.add(request.stats)
                if request.num_cached is not None:
                    num_prompt, num_cached = num_prompt + request.num_prompt, num_cached + request.num_cached
                if request.finish_reason != "abort":
                    assert request.output_ids == references[key][: request.stops.max_tokens]
                    num_finished += 1
        if rng.random() < 0.05:
            engine.pool.check_integrity()
    check_idle(engine)
    assert engine.stats == totals, "the engine's statistics are not the sum of its requests'"
    assert (engine.scheduler.num_queried_tokens, engine.scheduler.num_hit_tokens) == (num_prompt, num_cached)
    return num_finished


def test_a_thousand_requests_of_random_lengths_with_random_aborts_all_answer_right():
    """M7: concurrency 8, few pages, shared prefixes, preemption, chunked prefill, drafts; a scripted target."""
    rng = random.Random(0)
    base = prompt_of(60)
    prompts = [base[: rng.randint(1, 60)] + prompt_of(rng.randint(0, 20), seed=i) for i in range(15)]
    stops, target = StopParams(max_tokens=30, ignore_eos=True), random_target()
    references = {
        (p, k): run(scripted_engine(target), [make_request(prompts[p], stops, **KINDS[k])], check=False)[0]
        for p in range(len(prompts))
        for k in range(len(KINDS))
    }

    def script(request: Request, width: int) -> list[int]:
        kind = KINDS.index({k: v for k, v in vars(request.sampling).items() if k in KINDS_NAMES and v != DEFAULTS[k]})
        known = references[prompts.index(request.prompt_ids), kind][request.num_output :][: rng.randint(0, width)]
        return [t if rng.random() < 0.8 else (t + 1) % 97 for t in known]

    config = {"token_budget": 40, "max_rows": 6, "page_size": 8, "max_context": 120, "num_pages": 18}
    engine = scripted_engine(target, [ScriptedDrafter(script)], width=6, **config)
    num_finished = soak(engine, references, prompts, 1000)
    assert 500 < num_finished < 1000
    assert engine.scheduler.num_preemptions > 20
    assert engine.scheduler.num_hit_tokens > 0.2 * engine.scheduler.num_queried_tokens


def test_a_soak_of_the_real_model_with_its_drafters_answers_right(pair):
    """M7: fewer requests, but real keys and values, n-gram and DFlash, and the automatic width."""
    target, drafter = pair
    prompts = [prompt_of(50)[: 10 + 5 * i] + prompt_of(i, seed=i) for i in range(6)]
    stops = StopParams(max_tokens=30, ignore_eos=True)
    references = {
        (p, k): run(make_engine(target), [make_request(prompts[p], stops, **KINDS[k])], check=False)[0]
        for p in range(len(prompts))
        for k in range(len(KINDS))
    }
    engine = make_engine(target, [NgramDrafter(2)], drafter, dflash=True, token_budget=40, max_rows=6, page_size=8,
                         max_context=120, num_pages=16)  # fmt: skip
    num_requests = 120 if engine.pool.states is None else 50
    assert soak(engine, references, prompts, num_requests) > num_requests // 3
    assert engine.scheduler.num_preemptions > 0


def test_the_frontend_under_load_gives_every_caller_its_own_answer():
    """M7: eight threads, a queue longer than the rows, streams that are closed early in between."""
    config = {"max_rows": 4, "page_size": 8, "num_pages": 20, "max_context": 100}
    prompts = [f"prompt {i} " * (i % 5 + 1) for i in range(20)]
    with scripted_llm(random_target(), **config) as llm:
        expected = {p: llm.generate(p, max_tokens=20, ignore_eos=True).ids for p in prompts}

        def caller(n: int) -> int:
            rng, num_right = random.Random(n), 0
            for _ in range(25):
                prompt = rng.choice(prompts)
                if rng.random() < 0.3:
                    stream = llm.stream(prompt, max_tokens=20, ignore_eos=True)
                    for _ in range(rng.randint(0, 5)):
                        next(stream)
                    stream.close()
                else:
                    num_right += llm.generate(prompt, max_tokens=20, ignore_eos=True).ids == expected[prompt]
                    num_right -= 1
            return num_right

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(caller, range(8))) == 0
        llm.generate("last", max_tokens=1)
        check_idle(llm.engine)

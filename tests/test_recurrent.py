"""The state of recurrent layers: rejected drafts leave no trace in it, and cached prefixes bring the right one.

What any target must do is tested in ``test_exactness`` and ``test_memory``, on a hybrid one too; here is what only a
state can get wrong.
"""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lampejo.config import EngineConfig
from lampejo.engine import Engine
from lampejo.models.layers import Target
from lampejo.ops.cpu import instruction_set
from lampejo.request import Request, StopParams
from lampejo.runner import VerifyOutput
from lampejo.speculate import NGRAM_MAX_WIDTH, Speculator
from lampejo.width import WidthController
from scripted import CONTEXT, ScriptedHybridRunner, decode_plainly, random_target, text_of_snapshot
from tiny import EOS, TINY_HYBRID, TINY_NEXT, ScriptedDrafter, make_engine, make_request, make_target, prompt_of, run

LONG = StopParams(max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module", params=["reference", "kernels"])
def hybrid(request: pytest.FixtureRequest) -> Target:
    if request.param == "reference":
        return make_target(TINY_HYBRID)
    if instruction_set() is None:
        pytest.skip("the CPU kernels were not built, or do not know this processor")
    return make_target(TINY_NEXT, packed=True)


def state_in(engine: Engine, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    states = engine.runner.states
    assert states is not None
    return states.windows[:, slot].clone(), states.states[:, slot].clone()


def state_of(target: Target, text: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The state after a text, in one pass of an engine that has seen nothing else."""
    engine = make_engine(target, page_size=64, num_snapshots=0, max_context=4096)
    request = make_request(text, StopParams(max_tokens=2, ignore_eos=True))
    engine.add(request)
    engine.step()
    assert request.num_computed == len(text) and request.state is not None
    return state_in(engine, request.state.slot)


def assert_equal(ours: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    """To the last bit, window and state."""
    assert torch.equal(ours[0], expected[0]) and torch.equal(ours[1], expected[1])


def check_snapshots(engine: Engine, target: Target) -> int:
    """Each snapshot is the state of its text, to the last bit. Returns how many there are."""
    states = engine.pool.states
    assert states is not None
    for name in states.names:
        slot = states.find(name)
        assert slot is not None
        assert_equal(state_in(engine, slot), state_of(target, text_of_snapshot(engine, name)))
    return len(states.names)


def drafting(answer: Sequence[int], num_right: int, width: int = 6) -> ScriptedDrafter:
    """The first ``num_right`` drafts of each block are right, the next is wrong."""

    def script(request: Request, width: int) -> list[int]:
        draft = list(answer[request.num_output :][:width])
        return [t if j < num_right else (t + 1) % 97 for j, t in enumerate(draft)]

    return ScriptedDrafter(script, width)


@pytest.mark.parametrize("num_right", range(7))
def test_the_state_after_accepting_j_of_k_is_that_of_single_steps(hybrid, num_right):
    """L4: for every j, the window of the convolution included, and in the next block as well; bit for bit."""
    prompt = prompt_of(29)
    plain, drafted = make_request(prompt, LONG), make_request(prompt, LONG)
    (answer,) = run(make_engine(hybrid), [make_request(prompt, LONG)])
    single = make_engine(hybrid)
    block = make_engine(hybrid, [drafting(answer, num_right)], width=6)
    single.add(plain)
    block.add(drafted)
    single.step()
    for _ in range(3):
        block.step()
        while plain.num_computed < drafted.num_computed:
            single.step()
        assert plain.num_computed == drafted.num_computed
        assert_equal(state_in(block, drafted.state.slot), state_in(single, plain.state.slot))
    assert drafted.stats.num_accepted_draft_tokens == 2 * num_right


def test_a_verify_step_does_not_touch_the_state_before_its_commit(hybrid):
    """Fault: the state moves over drafts, and a rejected one stays in it."""
    engine = make_engine(hybrid, [ScriptedDrafter(lambda r, w: [5] * w)], width=6)
    request = make_request(prompt_of(20), LONG)
    engine.add(request)
    engine.step()
    before, commit = state_in(engine, request.state.slot), engine.runner.commit

    def checking(*args: Any) -> None:
        assert_equal(state_in(engine, request.state.slot), before)
        commit(*args)
        assert not torch.equal(state_in(engine, request.state.slot)[1], before[1])

    engine.runner.commit = checking  # type: ignore[method-assign]
    engine.step()


def test_rejected_inputs_full_of_nan_leave_no_trace(hybrid):
    """L5: all that the journal has of rejected tokens becomes NaN before the commit."""
    prompt = prompt_of(33)
    (answer,) = run(make_engine(hybrid), [make_request(prompt, LONG)])
    engine = make_engine(hybrid, [drafting(answer, 3)], width=6, page_size=8)
    commit, num_poisoned = engine.runner.commit, 0

    @torch.inference_mode()
    def poisoned(out: VerifyOutput, num_committed: Sequence[int], saves: Any) -> None:
        nonlocal num_poisoned
        assert out.view is not None
        counts = [n for row, n in zip(out.view.rows, num_committed, strict=True) if row.width]
        for _, inputs in out.view.journal:
            start = 0
            for segment, count in zip(out.view.drafted, counts, strict=True):
                for x in inputs:
                    rejected = x[start + count : start + segment.length]
                    num_poisoned += rejected.fill_(math.nan).numel()
                start += segment.length
        commit(out, num_committed, saves)

    engine.runner.commit = poisoned  # type: ignore[method-assign]
    assert run(engine, [make_request(prompt, LONG)]) == [answer]
    assert num_poisoned > 1000 and check_snapshots(engine, hybrid)


@pytest.mark.parametrize("page_size", [8, 32])
@pytest.mark.parametrize("budget", [5, 24, 512])
def test_snapshots_are_the_states_of_their_texts(hybrid, page_size, budget):
    """M2: at ends of chunks, of the prompt, and in the middle of accepted blocks; bit for bit."""
    rng = random.Random(page_size + budget)
    prompts = [prompt_of(n, seed=n) for n in (40, 67)]
    answers = [run(make_engine(hybrid), [make_request(p, LONG)])[0] for p in prompts]
    known = {tuple(p): a for p, a in zip(prompts, answers, strict=True)}

    def script(request: Request, width: int) -> list[int]:
        draft = known[tuple(request.prompt_ids)][request.num_output :][:width]
        return [t if rng.random() < 0.8 else (t + 1) % 97 for t in draft]

    engine = make_engine(
        hybrid, [ScriptedDrafter(script)], width=7, page_size=page_size, token_budget=budget, max_rows=2
    )
    assert run(engine, [make_request(p, LONG) for p in prompts]) == answers
    assert check_snapshots(engine, hybrid) >= 4


def test_the_next_turn_starts_at_the_last_page_of_the_answer(hybrid):
    """M2: with drafts, so that the state there was folded within a block."""
    prompt = prompt_of(50)
    (answer,) = run(make_engine(hybrid), [make_request(prompt, LONG)])
    engine = make_engine(hybrid, [drafting(answer, 4)], width=6, page_size=8)
    first = make_request(prompt, LONG)
    run(engine, [first])
    turn_2 = [*first.ids, *prompt_of(9, seed=3)]
    second = make_request(turn_2, LONG)
    assert run(engine, [second]) == run(make_engine(hybrid), [make_request(turn_2, LONG)])
    assert second.num_cached == (len(first.ids) - 1) // 8 * 8


@pytest.mark.parametrize("num_others", range(5))
def test_the_next_turn_equals_the_cold_answer_when_states_were_evicted(hybrid, num_others):
    """M2: the pages are there, but states went to other requests; a shorter prefix is reused, or none."""
    config = {"page_size": 8, "max_rows": 1, "num_snapshots": 3, "token_budget": 24, "num_pages": 200}
    engine = make_engine(hybrid, max_context=400, **config)
    first = make_request(prompt_of(60), LONG)
    run(engine, [first])
    for i in range(num_others):
        run(engine, [make_request(prompt_of(40, seed=50 + i), StopParams(max_tokens=1))])
    turn_2 = [*first.ids, *prompt_of(9, seed=3)]
    second = make_request(turn_2, LONG)
    assert run(engine, [second]) == run(make_engine(hybrid), [make_request(turn_2, LONG)])
    assert check_snapshots(engine, hybrid) > 0
    if num_others == 0:
        assert second.num_cached == 96
    if num_others == 4:
        assert second.num_cached == 0 and len(engine.pool.find(turn_2)) == 13


def test_a_state_is_found_in_the_very_slot_that_its_row_gets(hybrid):
    """Fault: with one slot in all, the snapshot that a request starts from is overwritten by its own row."""
    engine = make_engine(hybrid, max_rows=1, num_snapshots=0, page_size=8)
    prompt = prompt_of(30)
    first, second = make_request(prompt, LONG), make_request([*prompt, 7], LONG)
    run(engine, [first])
    assert engine.pool.states.names == []
    expected = run(make_engine(hybrid), [make_request(second.prompt_ids, LONG)])
    engine = make_engine(hybrid, max_rows=2, num_snapshots=0, page_size=8)
    run(engine, [first := make_request(prompt, LONG)])
    assert len(engine.pool.states.names) == 1
    run(engine, [beside := make_request(prompt_of(20, seed=4), LONG)])
    assert run(engine, [second]) == expected
    assert beside.num_output == 40


def scripted_hybrid(drafter: ScriptedDrafter, **config: Any) -> tuple[Engine, ScriptedHybridRunner]:
    resolved = EngineConfig(**config).resolve(CONTEXT)
    assert resolved.num_pages is not None
    num_slots = resolved.max_rows + resolved.num_snapshots
    runner = ScriptedHybridRunner(random_target(), resolved.num_pages, resolved.page_size, num_slots)
    controller = WidthController(NGRAM_MAX_WIDTH)
    controller.widths = lambda rows: [(o[0], o[0].available) if o else (None, 0) for o in rows]  # type: ignore[method-assign]
    engine: Any = Engine(runner, Speculator([drafter], controller), resolved, (EOS,))  # type: ignore[arg-type]
    return engine, runner


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_whatever_happens_every_state_is_that_of_its_text(seed):
    """L4, M2, M4, M6: random arrivals with common beginnings, next turns, drafts right and wrong, few pages and slots,
    preemption, aborts; a scripted target whose states are texts. Every finished answer is that of plain decoding."""
    rng = random.Random(seed)
    max_rows, page_size, max_context = rng.randint(1, 4), rng.choice([4, 8]), 72
    stops = StopParams(max_tokens=rng.randint(1, 30), ignore_eos=True)
    answers: dict[tuple[int, ...], list[int]] = {}

    def answer_to(prompt: Sequence[int]) -> list[int]:
        key = tuple(prompt)
        if key not in answers:
            answers[key] = decode_plainly(random_target(), prompt, stops, max_context)[0]
        return answers[key]

    def script(request: Request, width: int) -> list[int]:
        known = answer_to(request.prompt_ids)[request.num_output :][: rng.randint(0, width)]
        return [t if rng.random() < 0.8 else (t + 1) % 97 for t in known]

    engine, runner = scripted_hybrid(
        ScriptedDrafter(script, rng.choice([0, 1, 4, 9])),
        max_context=max_context,
        page_size=page_size,
        num_pages=-(-max_context // page_size) + rng.randint(0, 10),
        max_rows=max_rows,
        num_snapshots=rng.randint(0, 5),
        token_budget=max_rows + rng.randint(0, 30),
    )
    texts = [prompt_of(40, seed=i) for i in range(2)]
    current: list[Request] = []
    num_left = 12
    while num_left or current:
        if num_left and rng.random() < 0.3:
            text = rng.choice(texts)
            prompt = text[: rng.randint(1, len(text))] + prompt_of(rng.randint(0, 6), num_left)
            request = make_request(prompt[: max_context - 5], stops)
            engine.add(request)
            current.append(request)
            num_left -= 1
        if engine.has_work:
            engine.step()
        engine.pool.check_integrity()
        states = engine.pool.states
        assert states is not None
        assert all(runner.states[states.find(name) or 0] == text_of_snapshot(engine, name) for name in states.names)
        for request in engine.scheduler.running:
            if request.num_computed:
                runner.check(request)
        assert states.num_held == len(engine.scheduler.running)
        if current and rng.random() < 0.02:
            engine.abort(rng.choice(current))
        for request in [r for r in current if r.finish_reason]:
            current.remove(request)
            if request.finish_reason != "abort":
                assert request.output_ids == answer_to(request.prompt_ids)
                texts.append(request.ids)
    assert engine.pool.num_free == engine.pool.num_pages and not engine.scheduler.running

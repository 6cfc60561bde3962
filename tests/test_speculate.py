"""Who drafts and how much; and that what is learned from it never shows in the output."""

import itertools
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lampejo.engine import Engine
from lampejo.request import StopParams
from lampejo.speculate import NGRAM_MAX_WIDTH, SHORTEST_MATCH, NgramDrafter, Speculator
from lampejo.width import LAST_SLOT, WidthController
from scripted import answering, decode_plainly, ids_of, knowing, lively_pair, random_target, scripted_engine
from tiny import ScriptedDrafter, make_drafter, make_engine, make_request, make_target, prompt_of, run

LONG = StopParams(max_tokens=60, ignore_eos=True)


class Named(ScriptedDrafter):
    """A scripted drafter that counts what it is asked and told."""

    def __init__(self, name: str, script: Any, num_available: int = 15) -> None:
        super().__init__(script, num_available)
        self.name = name
        self.asked: list[tuple[int, int]] = []  # (request id, width)
        self.num_observed = 0  # committed tokens it was told of
        self.forgotten: list[int] = []

    def draft(self, requests: Sequence[Any], widths: Sequence[int]) -> list[list[int]]:
        self.asked += [(request.id, width) for request, width in zip(requests, widths, strict=True)]
        return super().draft(requests, widths)

    def observe(self, batch: Any, taps: Any, num_committed: Sequence[int]) -> None:
        self.num_observed += sum(num_committed)

    def forget(self, request: Any) -> None:
        self.forgotten.append(request.id)


def auto_engine(target: Any, other: Any, min_match: int = SHORTEST_MATCH, **config: Any) -> Engine:
    """As "auto" builds it."""
    return scripted_engine(target, [NgramDrafter(min_match), other], **config)


# Who drafts


def test_auto_takes_the_better_of_two_drafters_at_each_match():
    """Point 6c: where the text repeats itself at length its own continuation is drafted, elsewhere what DFlash says, if
    that is right more often than what follows a short match."""
    answer = ids_of("abcdefgh ijkl abcdefghijkl mnop mnxy abcdefgh ijkl abcdefghijkl mnop mnxy ab")
    right, rng = knowing(answer), random.Random(1)
    other = Named("dflash", lambda r, w: right.script(r, w) if rng.random() < 0.6 else [5] * w)
    request = make_request(ids_of("say:"), LONG)
    run(auto_engine(answering(4, answer), other, width=2), [request])
    text = request.ids
    lengths = {"ngram": [], "dflash": [], "target": []}
    for j, origin in enumerate(request.origins):
        lengths[origin].append(repeats(text[: request.num_prompt + j]))
    assert max(lengths["dflash"]) <= max(lengths["ngram"]) and sum(n > 8 for n in lengths["ngram"]) > 5
    assert len(lengths["dflash"]) > 5


def repeats(text: Sequence[int]) -> int:
    """Length of the longest suffix that occurred before, by brute force."""
    for length in range(len(text) - 1, 0, -1):
        suffix = text[-length:]
        if any(text[i : i + length] == suffix for i in range(len(text) - length)):
            return length
    return 0


@pytest.mark.parametrize("min_match", [SHORTEST_MATCH, 5, 7])
def test_the_n_gram_drafter_offers_nothing_below_its_shortest_match(min_match):
    """And what it offers counts as so many tokens further as the match is longer."""
    drafter = NgramDrafter(min_match)
    rng = random.Random(min_match)
    request = make_request([2])
    num_offers = 0
    for _ in range(300):
        request.ids.append(rng.randint(2, 4) if rng.random() < 0.3 else request.ids[-2:][0])
        offer, match_len = drafter.offer(request), repeats(request.ids)
        num_offers += offer is not None
        assert (offer and offer.start) == (min(match_len - min_match, LAST_SLOT) if match_len >= min_match else None)
    assert 20 < num_offers < 300


def test_a_row_for_which_nobody_offers_anything_is_decoded_plainly():
    """No drafter, no draft, no statistics: and no step fails for it."""
    nobody = Named("dflash", lambda r, w: [5] * w, num_available=0)
    request = make_request(ids_of("say:"), LONG)
    engine = auto_engine(random_target(), nobody, min_match=50, width=4)
    assert run(engine, [request]) == [decode_plainly(random_target(), request.prompt_ids, LONG)[0]]
    assert not nobody.asked
    assert request.stats.num_spec_steps == 0
    assert set(request.origins) == {"target"}


def test_rows_of_one_step_may_have_different_drafters():
    """Each is asked for its own rows only; the origins follow."""
    repeating, fresh = ids_of("ababababababababababababab"), ids_of("the quick brown fox jumps")

    def target(text: Sequence[int]) -> int:
        answer = repeating if text[0] == ids_of("r")[0] else fresh
        return answer[len(text) - 4] if len(text) - 4 < len(answer) else 1

    other = Named("dflash", lambda r, w: fresh[r.num_output : r.num_output + w])
    first, second = make_request(ids_of("rep:")), make_request(ids_of("new:"))
    run(auto_engine(target, other, min_match=2, width=3), [first, second])
    assert (first.output_ids[:-1], second.output_ids[:-1]) == (repeating, fresh)
    assert first.origins.count("ngram") > 10
    assert second.origins.count("dflash") > 10
    assert "ngram" not in second.origins


def test_every_drafter_hears_of_every_committed_token_and_of_nothing_else():
    """Parked, passed over, prefilled or rejected: its context is what is committed, at once."""
    answer = ids_of("abcabcabcabcabcabcabcabcabc")
    other = Named("dflash", lambda r, w: [t + (r.num_output % 3 > 0) for t in answer[r.num_output :][:w]])
    engine = auto_engine(answering(20, answer), other, min_match=6, width=4, token_budget=9, max_rows=2)
    request = make_request(prompt_of(20), StopParams(max_tokens=26))
    engine.add(request)
    while engine.has_work:
        engine.step()
        assert other.num_observed == (request.num_computed or len(request.ids) - 1)
    assert {"ngram", "dflash"} <= set(request.origins)
    assert other.forgotten == [request.id]


# How much


@pytest.mark.parametrize("width", [1, 4, 15, 40])
def test_a_fixed_width_is_used_as_far_as_it_makes_sense(width):
    """Never over what the drafter offers, what max_tokens leaves, or the context."""
    for max_tokens, max_context in ((60, 200), (None, 50), (7, 200)):
        drafter = Named("dflash", lambda r, w: [5] * w, num_available=6)
        stops = StopParams(max_tokens=max_tokens, ignore_eos=True)
        request = make_request(ids_of("say:"), stops)
        run(scripted_engine(random_target(), [drafter], width=width, max_context=max_context), [request])
        most = min(max_context - 4, max_tokens or 999)
        assert request.num_output == most
        widths = [w for _, w in drafter.asked]
        assert max(widths) == min(width, 6, most - 2)
        assert widths[-1] == 1
        assert request.stats.num_draft_tokens == sum(widths)


def test_a_fixed_width_of_zero_puts_no_drafter_to_work():
    """Fault: --width 0 still fed the drafter's context and grew the n-gram index, which plain decoding does not pay."""
    ngram, other = NgramDrafter(SHORTEST_MATCH), Named("dflash", lambda r, w: [5] * w)
    engine = scripted_engine(random_target(), [ngram, other], width=0)
    request = make_request(ids_of("say:"), LONG)
    assert run(engine, [request]) == [decode_plainly(random_target(), request.prompt_ids, LONG)[0]]
    assert engine.speculator.drafters == []
    assert (other.asked, other.num_observed, other.forgotten) == ([], 0, [])
    assert not ngram._indices


def test_fewer_drafts_than_asked_for_are_no_fault():
    """Ragged, also none at all: what is verified is what came, and the statistics say so."""
    sizes = itertools.cycle([0, 3, 1, 2])
    drafter = Named("dflash", lambda r, w: [5] * min(w, next(sizes)))
    requests = [make_request(prompt_of(4, seed=i), LONG) for i in range(3)]
    answers = run(scripted_engine(random_target(), [drafter], width=3), requests)
    assert answers == [decode_plainly(random_target(), r.prompt_ids, LONG)[0] for r in requests]
    for request in requests:
        assert request.stats.num_draft_tokens <= 2 * len(request.output_ids)
        assert sum(request.stats.acceptance_histogram) == request.stats.num_spec_steps < 59


def test_a_prompt_chunk_of_one_token_beside_decoding_rows_is_no_fault():
    """A step whose rows all have one known token, one of them without logits, must not be taken for pure decoding."""
    drafter = Named("dflash", lambda r, w: [5] * w)
    engine = scripted_engine(random_target(), [drafter], token_budget=4, max_rows=4)
    requests = [make_request(prompt_of(n, seed=n), LONG) for n in (1, 1, 1, 9)]
    answers = run(engine, requests)
    assert answers == [decode_plainly(random_target(), r.prompt_ids, LONG)[0] for r in requests]


def quality_drafter(quality: float, rng: random.Random) -> Named:
    """Right with this chance at each slot: it asks the target itself."""
    target = random_target()

    def script(request: Any, width: int) -> list[int]:
        ids = list(request.ids)
        for _ in range(width):
            ids.append(int(target(ids).argmax()) if rng.random() < quality else 5)  # type: ignore[union-attr]
        return ids[len(request.ids) :]

    return Named("dflash", script)


class FakeClock:
    """Seconds that a step takes as a function of its tokens; time passes only in the device's calls."""

    def __init__(self, base: float, per_token: float) -> None:
        self.now, self.base, self.per_token = 0.0, base, per_token

    def perf_counter(self) -> float:
        return self.now

    def attach(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        verify = engine.runner.verify

        def slow_verify(batch: Any) -> Any:
            self.now += self.base + self.per_token * len(batch.ids)
            return verify(batch)

        engine.runner.verify = slow_verify  # type: ignore[method-assign]
        for module in ("engine", "speculate"):
            monkeypatch.setattr(f"lampejo.{module}.time", SimpleNamespace(perf_counter=self.perf_counter))


@pytest.mark.parametrize("clock", ["real", "cheap", "dear", "random"])
@pytest.mark.parametrize("quality", [0.0, 0.7, 1.0])
def test_the_automatic_width_never_changes_the_output(clock, quality, monkeypatch):
    """Principle 2: whatever the clock tells the controller."""
    target, rng = random_target(), random.Random(0)
    requests = [
        make_request(prompt_of(6, seed=i), StopParams(max_tokens=70 + 9 * i, ignore_eos=True)) for i in range(4)
    ]
    engine = scripted_engine(target, [quality_drafter(quality, rng)], max_rows=3)
    if clock != "real":
        fake = FakeClock(*{"cheap": (1.0, 0.001), "dear": (0.1, 1.0), "random": (1.0, 0.1)}[clock])
        if clock == "random":
            fake.perf_counter = lambda: fake.now + rng.random() * 5  # type: ignore[method-assign]
        fake.attach(engine, monkeypatch)
    answers = run(engine, requests)
    assert answers == [decode_plainly(target, r.prompt_ids, r.stops)[0] for r in requests]


@pytest.mark.parametrize(("base", "per_token", "quality", "drafts"),
                         [(1.0, 0.001, 1.0, True), (0.0, 1.0, 0.7, False), (1.0, 0.2, 0.0, False)])  # fmt: skip
def test_the_automatic_width_drafts_where_it_pays_and_parks_where_it_does_not(
    base, per_token, quality, drafts, monkeypatch
):
    """Point 7: free tokens and right drafts: nearly all come from drafts. Dear tokens or wrong drafts: few tries."""
    engine = scripted_engine(random_target(), [quality_drafter(quality, random.Random(0))])
    FakeClock(base, per_token).attach(engine, monkeypatch)
    request = make_request(prompt_of(6), StopParams(max_tokens=400, ignore_eos=True))
    engine.add(request)
    num_steps = 0
    while engine.has_work:
        engine.step()
        num_steps += 1
    if drafts:
        assert num_steps < 60
        assert request.stats.num_accepted_draft_tokens > 300
    else:
        assert num_steps >= 380
        assert request.stats.num_spec_steps < 60


# Learning


def test_what_is_kept_per_request_is_forgotten_with_it():
    """M5: finished, aborted while running, aborted while waiting."""
    engine = auto_engine(random_target(), quality_drafter(0.5, random.Random(0)), min_match=1, max_rows=2)
    requests = [make_request(prompt_of(6, seed=i), LONG) for i in range(5)]
    for request in requests:
        engine.add(request)
    for _ in range(8):
        engine.step()
    engine.abort(requests[0])
    engine.abort(requests[4])
    engine.abort(requests[4])
    while engine.has_work:
        engine.step()
    assert is_forgotten(engine)


def is_forgotten(engine: Engine) -> bool:
    speculator = engine.speculator
    ngram = [d for d in speculator.drafters if isinstance(d, NgramDrafter)]
    return not (speculator._chosen or speculator.controller._tracks or any(d._indices for d in ngram))


def test_a_speculator_without_drafters_wants_nothing():
    speculator = Speculator([], WidthController(NGRAM_MAX_WIDTH))
    assert speculator.widths([make_request([1]), make_request([2])]) == [0, 0]


# The DFlash drafter's context


def test_a_parked_row_goes_on_appending_context_so_that_it_drafts_as_well_afterwards():
    """Section 8: after a pause of any length the context is that of a row that never paused, and so are the drafts."""
    target, drafter = lively_pair()
    prompt = prompt_of(41)
    pauses = {"always drafting": [], "one pause": range(5, 12), "parked till the end": range(0, 60)}
    seen: dict[str, tuple[Any, Any]] = {}
    for name, pause in pauses.items():
        engine = make_engine(target, drafter=drafter, dflash=True, width=5, page_size=8, max_context=200)
        controller, step = engine.speculator.controller, itertools.count()
        widths = controller.widths
        controller.widths = lambda rows, w=widths, s=step, p=pause: [(None, 0)] * len(rows) if next(s) in p else w(rows)
        request = make_request(prompt, StopParams(max_tokens=100, ignore_eos=True))
        engine.add(request)
        while request.num_output < 40:
            engine.step()
        answer_at_40 = cut(engine, request, 40)
        seen[name] = (answer_at_40, request.stats.num_spec_steps)
    (drafts, context), num_steps = seen["always drafting"]
    assert num_steps > 5
    assert seen["parked till the end"][1] < num_steps
    for (others, other_context), _ in seen.values():
        assert others == drafts
        torch.testing.assert_close(other_context, context, rtol=0, atol=1e-5)


def cut(engine: Engine, request: Any, num_output: int) -> tuple[list[int], torch.Tensor]:
    """The drafts after exactly so many tokens of the answer, and the drafter's context there."""
    num_ids = request.num_prompt + num_output
    request.ids = request.ids[:num_ids]
    (drafts,) = engine.runner.draft([request], [5])
    layers = [engine.runner.context_cache.read(n, request.pages, 0, num_ids - 1) for n in range(2)]
    return drafts, torch.stack([x for layer in layers for x in layer])


def test_drafts_depend_on_the_whole_committed_context():
    """The oracle of the test above: with one page of context spoilt, the drafts are others."""
    target, drafter = lively_pair()
    engine = make_engine(target, drafter=drafter, dflash=True, width=5, page_size=8, max_context=200)
    request = make_request(prompt_of(41), StopParams(max_tokens=100, ignore_eos=True))
    engine.add(request)
    while request.num_output < 40:
        engine.step()
    drafts, _ = cut(engine, request, 40)
    engine.runner.context_cache.v[:, request.pages[2]] += 3.0
    assert cut(engine, request, 40)[0] != drafts


def test_the_statistics_of_a_request_are_those_of_its_steps(target):
    """V2: counted from outside, step by step, for a real drafter."""
    engine = make_engine(target, drafter=make_drafter(), dflash=True, width=5)
    request = make_request(prompt_of(30), LONG)
    engine.add(request)
    drafted, accepted, committed, steps = 0, 0, 0, 0
    while engine.has_work:
        before = request.stats.num_draft_tokens
        deltas = engine.step()
        num_drafted = request.stats.num_draft_tokens - before
        if num_drafted:
            drafted, steps = drafted + num_drafted, steps + 1
            committed += len(deltas[0].ids)
            accepted += deltas[0].origins.count("dflash")
    stats = request.stats
    assert (stats.num_draft_tokens, stats.num_spec_steps) == (drafted, steps)
    assert (stats.num_accepted_draft_tokens, stats.num_committed_tokens) == (accepted, committed)


def test_drafting_and_verifying_are_timed_apart(monkeypatch):
    """The controller weighs a drafter's pass against what it brings."""
    seen, now = [], [0.0]

    def spend(seconds):
        now[0] += seconds

    for module in ("speculate", "engine"):
        monkeypatch.setattr(f"lampejo.{module}.time", SimpleNamespace(perf_counter=lambda: now[0]))
    drafter = Named("dflash", lambda r, w: [spend(5.0) or 5] * w)  # type: ignore[func-returns-value]
    engine = scripted_engine(random_target(), [drafter], width=1)
    verify = engine.runner.verify
    engine.runner.verify = lambda batch: spend(2.0) or verify(batch)  # type: ignore[func-returns-value]
    engine.speculator.controller.observe_step = lambda n, s, d, r: seen.append((n, s, d, r))  # type: ignore
    run(engine, [make_request(ids_of("say:"), StopParams(max_tokens=6, ignore_eos=True))])
    with_drafts = [entry for entry in seen if entry[2]]
    assert with_drafts
    for num_tokens, seconds, draft_seconds, results in with_drafts:
        assert num_tokens == 2
        assert (seconds, draft_seconds) == (2.0, {"dflash": 5.0})
        assert [result.num_drafted for result in results] == [1]


def test_beside_a_prompt_acceptance_is_learnt_and_time_is_not():
    """V1: whose share of a step the prompt took nobody knows, but a rejected draft is one."""
    seen = []
    engine = scripted_engine(
        random_target(), [Named("dflash", lambda r, w: [5] * w)], width=2, max_rows=2, token_budget=8
    )
    engine.speculator.controller.observe_step = lambda n, s, d, r: seen.append((n, s, r))  # type: ignore
    run(engine, [make_request(ids_of(text), StopParams(max_tokens=30, ignore_eos=True)) for text in ("a", "b" * 40)])
    beside = [(n, results) for n, seconds, results in seen if seconds is None]
    assert len(beside) > 3 and all(n == 3 and [r.num_drafted for r in results] == [2] for n, results in beside[:3])
    assert any(seconds is not None for _, seconds, _ in seen)


def test_a_drafter_that_is_not_asked_enters_its_context_page_by_page():
    """V1: fault: a parked drafter that costs a pass of its own for every token."""
    engine = make_engine(make_target(), drafter=make_drafter(), dflash=True, page_size=8)
    engine.speculator.controller.widths = lambda rows: [(None, 0)] * len(rows)
    lengths = []
    enter = engine.runner.append_context
    engine.runner.append_context = lambda taps, *rest: (lengths.append(len(taps)), enter(taps, *rest))
    run(engine, [make_request(prompt_of(20), StopParams(max_tokens=41, ignore_eos=True))])
    assert lengths == [20, 4, 8, 8, 8, 8]

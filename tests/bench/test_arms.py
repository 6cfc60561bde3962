"""Who drafts in each arm."""

import pytest

from lampejo.bench.arms import SYNTHETIC, RecordingController, SyntheticDrafter, make_speculators, parse_rates
from lampejo.bench.measure import GREEDY, Bench, Results
from lampejo.bench.workloads import CATEGORIES
from lampejo.errors import UserError
from lampejo.loader import _speculator
from lampejo.speculate import NGRAM_MAX_WIDTH, NgramDrafter, Speculator
from lampejo.width import RowOffer, RowResult
from scripted import answering, ids_of, scripted_engine
from tiny import make_request, run
from tiny_bench import config_of, scripted_bench, tiny_loaded


def drafters_of(speculator: Speculator) -> list[tuple[str, int | None]]:
    return [(d.name, d.min_match if isinstance(d, NgramDrafter) else None) for d in speculator.drafters]


def test_the_automatic_arm_is_what_lampejo_does_by_itself():
    """Fault: the benchmark measures another policy than the one that users get."""
    loaded = tiny_loaded()
    made = make_speculators(loaded, ["auto"], None, None)
    assert drafters_of(made["auto"]) == drafters_of(_speculator("auto", loaded.runner, config_of()))
    loaded.runner.drafter = None
    made = make_speculators(loaded, ["auto", "ngram"], None, None)
    assert drafters_of(made["auto"]) == drafters_of(_speculator("auto", loaded.runner, config_of()))
    assert drafters_of(made["ngram"]) == drafters_of(_speculator("ngram", loaded.runner, config_of()))


def test_plain_always_takes_part_and_drafts_nothing():
    """Losslessness is checked against it."""
    made = make_speculators(tiny_loaded(), ["dflash"], None, [0.5])
    assert list(made) == ["plain", "dflash", SYNTHETIC]
    assert made["plain"].drafters == []


@pytest.mark.parametrize(("rates", "lowest", "highest"), [([1.0] * 7, 1, 1), ([0.0] * 7, 0, 0), ([0.6] * 7, 0.5, 0.7)])
def test_synthetic_drafts_are_right_at_the_given_rates(rates, lowest, highest):
    """The engine apart from the drafter; measured rates mean the same as given ones."""
    answer = ids_of("the quick brown fox jumps over the lazy dog and " * 8)
    drafter = SyntheticDrafter(rates, 97)
    request = make_request(ids_of("say:"), temperature=0.0)
    drafter.answers[tuple(request.prompt_ids)] = answer
    engine = scripted_engine(answering(4, answer), [drafter], width=len(rates))
    controller = RecordingController(NGRAM_MAX_WIDTH, len(rates))
    engine.speculator.controller = controller
    assert run(engine, [request])[0][: len(answer)] == answer
    measured = controller.acceptance_per_slot()
    assert lowest <= sum(controller.num_accepted) / sum(controller.num_reached) <= highest
    assert len(measured) <= len(rates)


def test_synthetic_drafts_cost_what_the_loaded_drafter_costs():
    """Its passes are made and its context follows, but what it drafts is thrown away."""
    loaded = tiny_loaded()
    made = make_speculators(loaded, ["dflash"], 15, [1.0] * 9)
    (drafter,), (alike,) = made[SYNTHETIC].drafters, made["dflash"].drafters
    assert type(drafter.as_costly_as) is type(alike) and drafter.as_costly_as is not alike
    bench = Bench(loaded, config_of(), made, Results(list(made)))
    calls = []
    for name in ("draft", "append_context"):
        call = getattr(loaded.runner, name)
        setattr(loaded.runner, name, lambda *args, n=name, c=call: (calls.append(n), c(*args))[1])
    found = bench.compare([CATEGORIES["chat"][0]], ["plain", SYNTHETIC], "chat", {**GREEDY, "max_tokens": 20})
    stats = found[SYNTHETIC].completions[0].speculation
    assert bench.results.failures == [] and stats["draft_acceptance_rate"] == 1
    assert calls.count("draft") == stats["num_spec_steps"] > 0 and "append_context" in calls
    assert stats["num_draft_tokens"] <= 5 * stats["num_spec_steps"]  # it has no more to give
    assert not drafter.as_costly_as._pending
    loaded.runner.drafter = None
    assert make_speculators(loaded, [], None, [1.0])[SYNTHETIC].drafters[0].as_costly_as is None


def test_what_the_synthetic_drafter_does_not_know_it_leaves_alone():
    """Fault: drafts past the end of the answer, or for an answer that plain decoding failed to give."""
    bench = scripted_bench(answering(4, ids_of("yes")), ("plain",), [1.0])
    drafter = bench.speculators[SYNTHETIC].drafters[0]
    assert drafter.offer(make_request(ids_of("say:"))) is None


def test_slots_are_counted_up_to_the_first_rejection():
    """A slot behind a rejected one tells nothing of its own."""
    controller = RecordingController(4)
    for num_drafted, num_accepted in ((3, 3), (3, 1), (1, 0)):
        controller.observe_step(4, 0.01, {}, [RowResult(RowOffer(0, "dflash", 4), num_drafted, num_accepted)])
    assert controller.num_reached == [3, 2, 1, 0] and controller.num_accepted == [2, 1, 1, 0]
    assert controller.acceptance_per_slot() == pytest.approx([2 / 3, 1 / 2, 1])
    controller.forget_counts()
    assert controller.acceptance_per_slot() == []


def test_rates_are_one_for_all_slots_or_one_each():
    assert parse_rates("0.8") == [0.8] * NGRAM_MAX_WIDTH
    assert parse_rates("0.9,0.5") == [0.9, 0.5]
    for text in ("", "x", "1.2", "-0.1", "nan", ",".join(["0.5"] * 16)):
        with pytest.raises(UserError, match="synthetic-acceptance"):
            parse_rates(text)

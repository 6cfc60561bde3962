"""The sections of a run, over scripted and tiny models. What they take is never asserted, only what they find."""

from dataclasses import replace

import pytest
import torch

from lampejo.bench import measure
from lampejo.bench.arms import SYNTHETIC, make_speculators
from lampejo.bench.measure import GREEDY, MOST_VERIFIED, Bench, Results
from lampejo.bench.peers import PeerError
from lampejo.bench.stats import with_sampled
from lampejo.bench.ties import TIES
from lampejo.bench.workloads import CATEGORIES
from lampejo.config import Drafting
from lampejo.speculate import Speculator
from lampejo.width import WidthController
from scripted import EOS, VOCAB, ids_of
from tiny import TINY_HYBRID, ScriptedDrafter
from tiny_bench import TINY_SUITE, config_of, scripted_bench, tiny_loaded

RHYME = ids_of("round and round and round it goes, ")


def rhyming(text):
    """Says the rhyme for ever, so that n-gram drafts are right."""
    return RHYME[len(text) % len(RHYME)]


def silent(text):
    return EOS


def test_every_arm_of_a_tiny_model_gives_what_plain_gives():
    """L1 to L3 while measuring: all arms, greedy and sampled, alone and beside others, on long prompts."""
    loaded, config = tiny_loaded(), config_of()
    speculators = make_speculators(loaded, ["dflash", "ngram", "auto"], 3, [0.7])
    bench = Bench(loaded, config, speculators, Results(list(speculators)))
    bench.warm_up()
    bench.categories(["chat", "prose"], TINY_SUITE)
    bench.concurrency(TINY_SUITE, [])
    bench.lengths(TINY_SUITE)
    bench.verify_cost(TINY_SUITE)
    bench.close()
    results = bench.results
    assert results.failures == [] and results.notes == []
    assert len(results.samples) == 2 * 3 * 5  # categories, rounds of each, arms
    assert {"dflash", "auto", SYNTHETIC} <= {s.arm for s in results.samples if s.num_spec_steps}
    assert sorted(results.verify) == list(range(1, MOST_VERIFIED + 1))
    assert all(len(seconds) == TINY_SUITE.verify_rounds for seconds in results.verify.values())
    assert all(speed for found in results.concurrency.values() for speeds in found.values() for speed in speeds)
    assert all(one for rounds in results.lengths[300].values() for one in rounds)


def test_a_target_with_recurrent_layers_is_measured_too():
    """Fault: a pass without the row's state, or one whose commit is not counted."""
    loaded, config = tiny_loaded(TINY_HYBRID), config_of()
    speculators = make_speculators(loaded, ["dflash"], 3, None)
    bench = Bench(loaded, config, speculators, Results(list(speculators)))
    commits, commit = [], loaded.runner.commit
    loaded.runner.commit = lambda out, counts, saves: (commits.append(counts), commit(out, counts, saves))
    bench.categories(["chat"], replace(TINY_SUITE, num_prompts=1, num_sampled=0))
    commits.clear()
    bench.verify_cost(TINY_SUITE)
    assert bench.results.failures == [] and sorted(bench.results.verify) == list(range(1, MOST_VERIFIED + 1))
    assert commits[-MOST_VERIFIED:] == [[n] for n in reversed(range(1, MOST_VERIFIED + 1))]


def test_a_drafting_arm_drafts():
    """L1: an arm that silently decodes plainly is no comparison."""
    bench = scripted_bench(rhyming, ("plain", "ngram"), [1.0] * 4)
    for speculator in bench.speculators.values():
        speculator.controller.fixed = 4
    bench.categories(["chat"], replace(TINY_SUITE, max_tokens=60))
    assert bench.results.failures == []
    steps = {arm: sum(s.num_spec_steps for s in bench.results.samples if s.arm == arm) for arm in bench.arms}
    assert steps["plain"] == 0 and steps["ngram"] > 0 and steps[SYNTHETIC] > 0
    assert bench.results.slots[SYNTHETIC] == [1.0] * 4


def test_an_answer_that_differs_from_plain_has_failed_and_is_not_timed(monkeypatch):
    """Losslessness: a fast wrong answer is no answer."""
    bench = scripted_bench(rhyming)
    honest = Bench.answer

    def spoilt(self, arm, prompts, where, params):
        answers = honest(self, arm, prompts, where, params)
        if arm == "ngram" and "2" in where:
            answers.completions[0].ids[-1] += 1
        return answers

    monkeypatch.setattr(Bench, "answer", spoilt)
    bench.categories(["chat"], replace(TINY_SUITE, num_sampled=0))
    assert [(s.arm, s.prompt) for s in bench.results.samples if s.arm == "ngram"] == [("ngram", 0)]
    assert bench.results.failures == ["chat 2, ngram: the answer differs from plain decoding"]


def test_empty_answers_are_failures_and_never_timed():
    """V3."""
    bench = scripted_bench(silent)
    bench.categories(["chat"], replace(TINY_SUITE, num_prompts=1, num_sampled=0))
    bench.concurrency(TINY_SUITE, [])
    assert bench.results.samples == []
    assert bench.results.failures[0] == "chat 1, plain: an empty answer"
    assert all(speeds == [None, None] for found in bench.results.concurrency.values() for speeds in found.values())


def test_an_engine_that_breaks_is_reported_and_the_rest_goes_on(monkeypatch):
    """V3: exceptions count, and a later section is measured all the same."""

    def broken(batch):
        raise RuntimeError("out of luck")

    bench = scripted_bench(rhyming)
    with monkeypatch.context() as patched:
        patched.setattr(bench.loaded.runner, "verify", broken)
        bench.categories(["chat"], replace(TINY_SUITE, num_prompts=1, num_sampled=0))
    assert len(bench.results.failures) == 2 and all("out of luck" in text for text in bench.results.failures)
    bench.verify_cost(TINY_SUITE)
    assert len(bench.results.verify) == MOST_VERIFIED


def test_a_prompt_that_does_not_fit_is_a_failure_and_a_length_that_does_not_a_note():
    """V3: a suite that was cut short says so."""
    bench = scripted_bench(rhyming)
    bench.config = config_of(400)
    bench.categories(["editing"], replace(TINY_SUITE, num_prompts=1, num_sampled=0))
    bench.lengths(replace(TINY_SUITE, lengths=(300, 5000)))
    assert len(bench.results.failures) == 2 and "context" in bench.results.failures[0]
    assert list(bench.results.lengths) == [300] and "no prompt of 5000 tokens" in bench.results.notes[0]


def test_each_category_gets_a_prompt_however_little_time_there_is():
    """Fault: the last categories of a slow machine are empty, or the time is overdrawn without a word."""
    bench = scripted_bench(rhyming)
    bench.categories(["chat", "code", "maths"], replace(TINY_SUITE, seconds=0.0))
    assert {(s.category, s.prompt, s.sampled) for s in bench.results.samples} == {
        (name, 0, False) for name in ("chat", "code", "maths")
    }
    assert "3 of 9 rounds" in bench.results.notes[0]


def test_arms_take_turns():
    """Fault: the arm that always comes first finds the machine cold, or the cache warm."""
    bench = scripted_bench(rhyming, ("plain", "ngram", "auto"), [1.0])
    orders = []
    for _ in range(3):
        found = bench.compare([CATEGORIES["chat"][0]], bench.arms, "chat", {**GREEDY, "max_tokens": 3})
        orders.append(list(found))
    assert [order[0] for order in orders] == ["plain", "ngram", "auto"]
    assert all(order[-1] == SYNTHETIC for order in orders)


def test_no_arm_finds_a_prefix_that_another_left():
    """Fault: the second arm's time to first token is that of the prefix cache."""
    bench = scripted_bench(rhyming)
    for _ in range(2):
        for answers in bench.compare([CATEGORIES["editing"][0]], bench.arms, "e", {**GREEDY, "max_tokens": 3}).values():
            assert answers.completions[0].num_cached_tokens == 0


class FakePeer:
    """Answers at a given speed, or fails."""

    name = "fake"

    def __init__(self, fails=False):
        self.fails = fails
        self.asked = []

    def _speed(self, *what):
        self.asked.append(what)
        if self.fails:
            raise PeerError("an empty answer")
        return 50.0

    def plain(self, num_tokens):
        return self._speed("plain", num_tokens)

    def prefill(self, num_tokens):
        return self._speed("prefill", num_tokens)

    def serving(self, num_rows):
        from contextlib import nullcontext

        return nullcontext(lambda prompts, max_tokens: self._speed(len(prompts), max_tokens))


def test_peers_take_turns_with_us():
    """In turn in the same run."""
    bench, peer = scripted_bench(rhyming), FakePeer()
    bench.concurrency(TINY_SUITE, [peer])
    bench.peers(TINY_SUITE, [peer])
    assert bench.results.concurrency[3]["fake"] == [50.0, 50.0]
    found = bench.results.peers["fake"]
    assert {name: len(speeds) for name, speeds in found.items()} == dict.fromkeys(
        ("our_plain", "plain", "our_drafts", "our_prefill", "prefill"), 4
    )
    assert all(found["our_plain"]) and all(found["our_prefill"])
    assert peer.asked[:4] == [(1, 5), (1, 5), (3, 5), (3, 5)]


def test_a_peer_that_fails_is_a_failure():
    """V3: for peers too."""
    bench = scripted_bench(rhyming)
    bench.peers(TINY_SUITE, [FakePeer(fails=True)])
    assert bench.results.peers["fake"]["plain"] == [None] * 4
    assert len(bench.results.failures) == 8 and "fake plain" in bench.results.failures[0]


@pytest.mark.parametrize("arms", [("plain",), ("plain", "ngram"), ("plain", "ngram", "auto")])
def test_fewer_arms_stand_in_where_not_all_are_measured(arms):
    bench = scripted_bench(rhyming, arms)
    assert bench.few_arms == ["plain", *arms[-1:]][: len(arms)]


def test_synthetic_drafts_stand_in_where_nobody_else_drafts_but_not_beside_peers():
    """Fault: figures of drafts that cost nothing beside those of another engine."""
    bench, peer = scripted_bench(rhyming, ("plain",), [1.0]), FakePeer()
    assert bench.few_arms == ["plain", SYNTHETIC]
    bench.peers(TINY_SUITE, [peer])
    assert bench.results.failures == [] and "our_drafts" not in bench.results.peers["fake"]
    assert scripted_bench(rhyming, ("plain", "ngram"), [1.0]).few_arms == ["plain", "ngram"]


@pytest.mark.parametrize(
    ("ops", "tolerances", "num_failures"), [("device", 0.9, 0), ("device", 1.1, 1), ("reference", 0.9, 1)]
)
def test_on_a_device_answers_may_part_from_plain_at_near_ties(ops, tolerances, num_failures, monkeypatch):
    """L7: elsewhere, and further from a tie, they have failed and are not timed."""
    loaded, config = tiny_loaded(), config_of()
    loaded.info["ops"] = ops
    bench = Bench(loaded, config, make_speculators(loaded, ["ngram"], 3, None), Results(["plain", "ngram"]))
    (prompt,) = CATEGORIES["chat"][:1]
    honest, texts = Bench.answer, []

    def spoilt(self, arm, prompts, where, params):
        answers = honest(self, arm, prompts, where, params)
        if arm == "ngram":
            answers.completions[0].ids[2] = (answers.completions[0].ids[2] + 1) % 97
        return answers

    def logits_after(runner, ids):
        texts.append(ids)
        logits = torch.full((97,), -1.0)
        logits[plain[2]], logits[(plain[2] + 1) % 97] = 1.0, 1 - tolerances * TIES[torch.float32]
        return logits

    plain = bench.answer("plain", [prompt], "chat", {**GREEDY, "max_tokens": 5}).completions[0].ids
    monkeypatch.setattr(Bench, "answer", spoilt)
    monkeypatch.setattr(measure, "logits_after", logits_after)
    found = bench.compare([prompt], ["plain", "ngram"], "chat", {**GREEDY, "max_tokens": 5})
    assert len(bench.results.failures) == num_failures == 2 - len(found)
    assert bench.results.num_ties == 1 - num_failures
    assert all(ids[-2:] == plain[:2] for ids in texts) and len(texts) == (ops == "device")


def undecided(text):
    """Cannot decide among eight letters, so that each of them is typical."""
    logits = torch.full((VOCAB,), -20.0)
    logits[ids_of("abcdefgh")] = 0.0
    return logits


@pytest.mark.parametrize("typical", [None, 0.05])
def test_a_lossy_policy_may_change_sampled_answers_and_its_share_is_told(typical):
    """What differs without such a policy has failed; greedy answers never differ."""
    bench = scripted_bench(undecided)
    drafter = ScriptedDrafter(lambda request, width: ids_of("abc")[:width])
    bench.speculators["ngram"] = Speculator([drafter], WidthController(3, 3))
    bench.config = replace(bench.config, drafting=Drafting(typical=typical))
    bench.categories(["chat"], replace(TINY_SUITE, num_prompts=1, max_tokens=40))
    bench.close()
    assert bench.results.failures == []
    greedy = with_sampled(bench.results.samples, "ngram")
    sampled = greedy["sampled"]
    assert (greedy["inexact_share"], greedy["same_share"]) == (0, 1)
    if typical is None:
        assert (sampled["inexact_share"], sampled["same_share"]) == (0, 1)
    else:
        assert sampled["inexact_share"] > 0.4 and sampled["same_share"] == 0
        assert sampled["mean_acceptance_length"] > 3.5

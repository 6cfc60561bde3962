"""Lossy acceptance: what it takes and what it refuses, where it ends, what it counts, how it is told."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from lampejo.accept import Verdict, VerifyRow
from lampejo.accept import accept as accept_scores
from lampejo.api import LLM
from lampejo.chat_session import ChatSession
from lampejo.config import Drafting
from lampejo.engine import Engine
from lampejo.errors import DamagedModel, UserError
from lampejo.request import DraftStats, Request, StopParams
from lampejo.sampling import History, SamplingParams, choose, is_typical, process_logits
from lampejo.scores import Scores
from lampejo.server.models_info import fingerprint
from lampejo.terminal import drafting_mode, start_lines, statistics_line
from lampejo.text import TextStream
from scripted import VOCAB, Target, ids_of, knowing, make_tokenizer, random_target, scripted_engine, scripted_llm
from server_app import ask, chat, client_of
from test_recurrent import scripted_hybrid
from tiny import ScriptedDrafter, run

V = 11


def accept(logits: torch.Tensor, rows: Sequence[VerifyRow]) -> list[Verdict]:
    return accept_scores(Scores(logits), rows)


HALVES = (0.5, 0.25, 0.125, 0.125)  # entropy 1.75 ln 2, so exp(-entropy) is 0.2973
QUARTERS = (0.25, 0.25, 0.25, 0.25)  # entropy ln 4
SURE = (0.95, 0.05)  # exp(-entropy) is 0.82


def logits_of(*rows: tuple[float, ...]) -> torch.Tensor:
    """Logits whose softmax are these probabilities, of the first tokens; all others are impossible."""
    return torch.tensor([[math.log(p) for p in row] + [-math.inf] * (V - len(row)) for row in rows])


def row_of(drafts: list[int], typical: float | None, seed: int = 0, hidden: Any = None, **params: Any) -> VerifyRow:
    sampling = SamplingParams(**{"temperature": 1.0, **params})
    hidden = hidden or [()] * (len(drafts) + 1)
    return VerifyRow(drafts, 5, sampling, seed, History(), hidden, typical)


def chosen(logits: torch.Tensor, row: VerifyRow) -> list[int]:
    """The target's own tokens at all positions."""
    return choose(logits, row.params, row.seed, range(row.position, row.position + len(logits))).tolist()


def seed_that_chooses(logits: torch.Tensor, first: int) -> int:
    """A seed with which the target's own choice at the first position is ``first``."""
    return next(s for s in range(1000) if chosen(logits, row_of([0] * (len(logits) - 1), None, s))[0] == first)


@pytest.mark.parametrize(
    ("probs", "threshold", "draft", "is_taken"),
    [
        (HALVES, 0.09, 2, True),  # bound 0.3 * 0.2973 = 0.0892
        (HALVES, 0.25, 1, True),  # bound 0.5 * 0.2973 = 0.1487
        (HALVES, 0.25, 2, False),
        (QUARTERS, 0.25, 1, True),  # bound 0.5 * 0.25
        (QUARTERS, 1.0, 1, False),  # bound 1 * 0.25, which it has to exceed
        (SURE, 0.09, 1, False),  # bound 0.09, below 0.3 * 0.82
        (SURE, 0.04, 1, True),
        (SURE, 0.04, 5, False),  # impossible
    ],
)
def test_a_draft_is_typical_above_the_lower_of_two_bounds(probs, threshold, draft, is_taken):
    """Medusa's rule by hand: min(threshold, sqrt(threshold) * exp(-entropy))."""
    logits = logits_of(probs, SURE)
    row = row_of([draft], threshold, seed_that_chooses(logits, 0))
    (verdict,) = accept(logits, [row])
    own = chosen(logits, row)
    if is_taken:
        assert (verdict.ids, verdict.num_accepted, verdict.inexact) == ([draft, own[1]], 1, [0])
    else:
        assert (verdict.ids, verdict.num_accepted, verdict.inexact) == ([0], 0, [])


def test_a_lossless_row_takes_the_same_drafts_as_ever():
    logits = logits_of(HALVES, SURE)
    row = row_of([1], None, seed_that_chooses(logits, 0))
    (verdict,) = accept(logits, [row])
    assert (verdict.ids, verdict.num_accepted, list(verdict.inexact)) == ([0], 0, [])


def test_acceptance_ends_at_the_first_draft_that_is_not_typical():
    """What the target might say after a refused draft was conditioned on the wrong token."""
    logits = logits_of(QUARTERS, HALVES, QUARTERS, SURE)
    row = row_of([1, 7, 1], 0.09, seed_that_chooses(logits, 0))
    (verdict,) = accept(logits, [row])
    assert verdict.ids == [1, chosen(logits, row)[1]]
    assert (verdict.num_accepted, verdict.inexact) == (1, [0])


def test_drafts_that_are_the_targets_choice_are_exact_however_unlikely():
    """A draft that losslessness accepts is never refused, nor counted as lossy."""
    logits = logits_of(SURE, HALVES, QUARTERS, QUARTERS)
    seed = seed_that_chooses(logits, 1)
    own = chosen(logits, row_of([0, 0, 0], None, seed))
    lossless, typical = (accept(logits, [row_of(own[:3], policy, seed)])[0] for policy in (None, 0.9))
    assert typical.ids == lossless.ids == own
    assert typical.num_accepted == 3 and not typical.inexact


def test_the_bonus_token_is_the_targets_own_after_lossy_drafts_too():
    """Its noise is that of its own position, as if the drafts had been the target's choice."""
    logits = logits_of(*[QUARTERS] * 4)
    for seed in range(20):
        row = row_of([1, 2, 3], 0.09, seed)
        (verdict,) = accept(logits, [row])
        own = chosen(logits, row)
        assert verdict.ids == [1, 2, 3, own[3]]
        assert verdict.inexact == [j for j in range(3) if own[j] != j + 1]


def test_without_drafts_every_policy_gives_the_targets_choice():
    """Width 0 is plain decoding."""
    logits = logits_of(QUARTERS)
    for seed in range(20):
        lossless, typical = (accept(logits, [row_of([], policy, seed)])[0] for policy in (None, 0.01))
        assert typical.ids == lossless.ids and not typical.inexact


def test_at_temperature_0_nothing_but_the_greatest_is_taken():
    """Its distribution has one token alone, in a batch of any kind."""
    logits = logits_of(HALVES, QUARTERS)
    greedy = row_of([1], 0.01, temperature=0.0)
    (alone,) = accept(logits, [greedy])
    beside, _ = accept(torch.cat([logits, logits]), [greedy, row_of([1], 0.01)])
    for verdict in (alone, beside):
        assert (verdict.ids, verdict.num_accepted, list(verdict.inexact)) == ([0], 0, [])


@pytest.mark.parametrize(
    "params",
    [{"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.6}, {"logit_bias": {1: -100.0}}, {"temperature": 0.05}],
    ids=str,
)
def test_what_sampling_would_never_draw_is_not_typical(params):
    """The distribution is that of sampling itself: processed, at its temperature, and cut."""
    logits = logits_of(HALVES, QUARTERS)
    (verdict,) = accept(logits, [row_of([1], 0.09, **params)])
    assert verdict.num_accepted == 0
    assert accept(logits, [row_of([1], 0.09)])[0].num_accepted == 1


def test_hidden_ids_are_never_taken():
    """B9: EOS below min_tokens, however likely."""
    logits = logits_of(HALVES, QUARTERS)
    (verdict,) = accept(logits, [row_of([0], 0.01, hidden=[(0,), ()])])
    assert verdict.num_accepted == 0 and verdict.ids[0] != 0


def test_penalties_count_lossy_drafts_as_answered():
    """Position 1 sees the lossy draft of position 0: with a strong penalty it is not taken again."""
    logits = logits_of(HALVES, HALVES, HALVES)
    row = row_of([1, 1], 0.09, seed_that_chooses(logits, 0), presence_penalty=2.0)
    assert accept(logits, [replace(row, params=SamplingParams(temperature=1.0))])[0].num_accepted == 2
    (verdict,) = accept(logits, [row])
    assert verdict.ids[0] == 1 and verdict.num_accepted == 1


def test_log_probabilities_are_those_of_the_committed_tokens():
    logits = logits_of(QUARTERS, SURE)
    row = row_of([1], 0.09, seed_that_chooses(logits, 0), logprobs=0)
    (verdict,) = accept(logits, [row])
    assert [entry.token_id for entry in verdict.logprobs] == verdict.ids
    assert verdict.logprobs[0].logprob == pytest.approx(math.log(0.25), abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_refused(bad):
    logits = torch.zeros(2, V)
    logits[0, 7] = bad
    with pytest.raises(DamagedModel, match="not numbers"):
        accept(logits, [row_of([1], 0.01)])


def test_rows_of_one_batch_have_their_own_policies():
    logits = logits_of(HALVES, QUARTERS)
    seed = seed_that_chooses(logits, 0)
    rows = [row_of([1], policy, seed) for policy in (0.09, None, 0.5)]  # 0.5: bound 0.21
    verdicts = accept(logits.repeat(3, 1), rows)
    assert [v.num_accepted for v in verdicts] == [1, 0, 1]
    assert [list(v.inexact) for v in verdicts] == [[0], [], [0]]


# In the engine

TYPICAL = 0.02
LOW = 0.003  # takes about every second token that the random target is asked for


def request_of(num_prompt: int, stops: StopParams, typical: float | None = TYPICAL, **sampling: Any) -> Request:
    params = SamplingParams(**{"temperature": 1.0, "seed": 3, **sampling})
    return Request(0, list(range(40, 40 + num_prompt)), params, stops, typical=typical)


def babble(text: Sequence[int]) -> torch.Tensor:
    """A target that is undecided among the letters a to h, whatever the text."""
    logits = torch.full((VOCAB,), -20.0)
    logits[list(ids_of("abcdefgh"))] = 0.0
    return logits


def drafting(text: str) -> ScriptedDrafter:
    return ScriptedDrafter(lambda request, width: ids_of(text)[:width])


def decode(target: Target, request: Request, drafters: Sequence[ScriptedDrafter] = (), **config: Any) -> Engine:
    """Decodes one request to its end."""
    engine = scripted_engine(target, drafters, **config)
    run(engine, [request])
    return engine


LONG = StopParams(max_tokens=60)


def test_a_lossy_policy_with_width_0_is_plain_decoding():
    """Typical acceptance is of drafts alone."""
    lossless, lossy = request_of(5, LONG, typical=None), request_of(5, LONG)
    decode(random_target(), lossless)
    decode(random_target(), lossy, [drafting("abc")], width=0)
    assert lossy.output_ids == lossless.output_ids
    assert lossy.stats.num_inexact_tokens == 0


def test_drafts_that_are_the_targets_choice_give_its_answer_under_a_lossy_policy():
    lossless, lossy = request_of(5, LONG, typical=None), request_of(5, LONG)
    decode(random_target(), lossless)
    decode(random_target(), lossy, [knowing(lossless.output_ids)], width=5)
    assert lossy.output_ids == lossless.output_ids
    assert lossy.stats.num_accepted_draft_tokens == 49 and lossy.stats.num_inexact_tokens == 0


def test_lossy_tokens_are_counted_and_the_others_are_the_targets():
    """Among eight letters each is typical; the target's own at a position is that of plain decoding."""
    plain, lossy = request_of(5, LONG, typical=None), request_of(5, LONG)
    decode(babble, plain)
    engine = decode(babble, lossy, [drafting("abc")], width=3)
    assert lossy.output_ids[:9] == [plain.ids[5], *ids_of("abc"), plain.ids[9], *ids_of("abc"), plain.ids[13]]
    differing = sum(a != b for a, b in zip(lossy.output_ids, plain.output_ids, strict=True))
    assert differing > 30
    for stats in (lossy.stats, engine.stats):
        told = stats.as_dict()
        assert (told["policy"], told["lossless"], told["num_inexact_tokens"]) == ("typical", False, differing)
    assert plain.stats.as_dict()["lossless"] and plain.stats.as_dict()["policy"] == "lossless"


@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_a_lossy_block_is_cut_like_any_other(max_tokens):
    """The commit-boundary rule: what lies behind the end is in no count, list or cache."""
    stops = StopParams(max_tokens=max_tokens)
    plain, lossy = request_of(5, stops, typical=None), request_of(5, stops, logprobs=0, frequency_penalty=0.1)
    decode(babble, plain)
    engine = decode(babble, lossy, [drafting("abcd")], width=4)
    assert len(lossy.output_ids) == len(lossy.origins) == len(lossy.logprobs) == max_tokens
    assert [entry.token_id for entry in lossy.logprobs] == lossy.output_ids
    assert lossy.history.output == Counter(lossy.output_ids)
    assert lossy.stats.num_inexact_tokens <= lossy.origins.count("scripted") == lossy.stats.num_accepted_draft_tokens
    assert engine.stats == lossy.stats


def test_a_stop_string_of_lossy_tokens_ends_the_answer():
    """B1: the tokens behind it are neither committed nor counted, though they were accepted."""
    stops = StopParams(stop=("bc",), max_tokens=60)
    request = request_of(5, stops)
    request.text = TextStream(make_tokenizer(), stops.stop)
    engine = decode(babble, request, [drafting("abcdef")], width=6)
    assert (request.output_ids[1:], request.finish_reason) == (ids_of("abc"), "stop")
    assert request.stats.acceptance_histogram == [0, 0, 0, 1]
    assert request.stats.num_inexact_tokens <= 3 and engine.stats == request.stats


@pytest.mark.parametrize("penalties", [{}, {"frequency_penalty": 0.5, "repetition_penalty": 1.2}], ids=str)
@pytest.mark.parametrize("is_hybrid", [False, True], ids=["attention", "recurrent"])
def test_every_token_of_a_lossy_answer_is_the_targets_choice_or_typical_after_the_text_before_it(penalties, is_hybrid):
    """Nothing of a refused rest of a block is left, in pages, states or penalty counts; over many blocks."""
    rng, target = random.Random(0), random_target()
    drafter = ScriptedDrafter(lambda request, width: [rng.randrange(2, VOCAB) for _ in range(width)], max_width=4)
    request = request_of(40, StopParams(max_tokens=150, ignore_eos=True), typical=LOW, **penalties)
    if is_hybrid:
        engine, _ = scripted_hybrid(drafter, width=4)
        run(engine, [request])
    else:
        engine = decode(target, request, [drafter], width=4)
    assert len(request.stats.acceptance_histogram) == 5 and all(request.stats.acceptance_histogram)
    num_inexact, history = 0, History(frozenset(request.prompt_ids))
    for p in range(request.num_prompt, len(request.ids)):
        token_id, logits = request.ids[p], torch.as_tensor(target(request.ids[:p]))[None]
        scores = process_logits(logits, request.sampling, history, [], [()])
        if token_id != choose(scores, request.sampling, request.seed, [p]).item():
            assert is_typical(scores[0], request.sampling, token_id, LOW)
            assert request.origins[p - request.num_prompt] == "scripted"
            num_inexact += 1
        history.output[token_id] += 1
    assert request.stats.num_inexact_tokens == num_inexact > 20
    assert engine.stats == request.stats


def test_the_text_of_a_lossy_answer_is_a_prompt_like_any_other():
    """Its pages enter the prefix cache: the next turn starts from them and reads what is there."""
    first = request_of(40, StopParams(max_tokens=80), 1e-4)
    rng = random.Random(0)
    engine = scripted_engine(
        random_target(), [ScriptedDrafter(lambda r, width: [rng.randrange(2, VOCAB) for _ in range(width)])], width=4
    )
    run(engine, [first])
    again = Request(1, list(first.ids), SamplingParams(), LONG)
    fresh = Request(2, list(first.ids), SamplingParams(), LONG)
    run(engine, [again])
    decode(random_target(), fresh)
    assert again.num_cached > 64
    assert again.output_ids == fresh.output_ids and again.stats.lossless


def test_lossless_requests_beside_lossy_ones_stay_as_they_are():
    """The policy is a request's own."""
    alone, beside = request_of(5, LONG, typical=None), request_of(5, LONG, typical=None)
    decode(random_target(), alone)
    beside.id = 1
    engine = scripted_engine(random_target(), [drafting("abc")], width=3)
    run(engine, [request_of(9, LONG, 1e-4), beside])
    assert beside.output_ids == alone.output_ids
    assert engine.stats.policy == "typical" and engine.stats.num_inexact_tokens > 0


def test_statistics_of_several_answers_are_lossless_if_all_of_them_are():
    total = DraftStats()
    total.add(DraftStats(num_spec_steps=1, policy="typical", num_inexact_tokens=2))
    total.add(DraftStats(num_spec_steps=1))
    assert (total.policy, total.num_inexact_tokens, total.as_dict()["lossless"]) == ("typical", 2, False)


# As it is told


def babbling_llm(typical: float | None = TYPICAL, **config: Any) -> LLM:
    return scripted_llm(babble, [drafting("abc")], drafting=Drafting(typical=typical), **{"width": 3, **config})


def test_a_lossy_answer_says_so_and_a_greedy_or_plain_one_is_lossless():
    """Design principle 6: each response tells its own policy, whatever that of the model is."""
    with babbling_llm() as llm:
        lossy = llm.generate("abc", temperature=1.0, max_tokens=40, seed=1).speculation
        assert (lossy["policy"], lossy["lossless"]) == ("typical", False)
        assert 0 < lossy["num_inexact_tokens"] <= lossy["num_accepted_draft_tokens"] == 29
        for params in ({"temperature": 0.0}, {"temperature": 1.0, "drafts": False}):
            exact = llm.generate("abc", max_tokens=40, seed=1, **params).speculation
            assert (exact["policy"], exact["lossless"], exact["num_inexact_tokens"]) == ("lossless", True, 0)
        again = llm.another(llm.make_request("abc", temperature=1.0), seed=1)
        assert again.typical == TYPICAL


def test_a_model_with_width_0_or_a_lossless_policy_answers_alike():
    answers = []
    for typical, width in ((TYPICAL, 0), (None, 3), (None, 0)):
        with babbling_llm(typical, width=width) as llm:
            completion = llm.generate("abc", temperature=1.0, max_tokens=40, seed=1)
            assert completion.speculation["lossless"]
            answers.append(completion.ids)
    assert answers[0] == answers[1] == answers[2]


LOSSY_INFO = {"drafter": "d", "drafters": ["dflash"], "width": "auto", "policy": "typical", "lossless": False}


def test_the_banner_and_the_statistics_line_say_that_a_policy_is_lossy():
    info = {**LOSSY_INFO, "typical_threshold": 0.09}
    assert "NOT LOSSLESS" in drafting_mode(info) and "typical acceptance from 0.09" in drafting_mode(info)
    assert start_lines(info)[0].startswith("lampejo: NOT LOSSLESS: --policy typical")
    with babbling_llm() as llm:
        completion = llm.generate("abc", temperature=1.0, max_tokens=40, seed=1)
    told = statistics_line(completion, info)
    num_inexact = completion.speculation["num_inexact_tokens"]
    assert f"29 of 29 drafts accepted, {num_inexact} of them not the target's own choice (not lossless)" in told
    lossless = {**info, "policy": "lossless", "lossless": True}
    assert "LOSSLESS" not in drafting_mode(lossless) and not start_lines(lossless)


def test_the_statistics_of_a_chat_add_lossy_answers_up(capsys):
    with babbling_llm() as llm:
        llm.info.update(model="tiny", typical_threshold=TYPICAL, **LOSSY_INFO)
        session = ChatSession(llm, {"temperature": 1.0, "max_tokens": 40}, None)
        session.answer("first")
        first = session.stats.num_inexact_tokens
        session.answer("second")
        assert 0 < first < session.stats.num_inexact_tokens
        assert "(not lossless)" in session.statistics() and "NOT LOSSLESS" in session.statistics()
    capsys.readouterr()


def test_a_server_tells_its_policy_and_each_response_its_own():
    """/health, /v1/models and ``metrics.speculative_decoding``."""

    async def look() -> tuple[Any, ...]:
        llm = babbling_llm()
        llm.info.update(model="tiny", typical_threshold=TYPICAL, **LOSSY_INFO)
        with llm:
            async with client_of(llm) as client:
                health = (await client.get("/health")).json()
                card = (await client.get("/v1/models")).json()["data"][0]["lampejo"]
                body = chat(max_tokens=40, temperature=1.0)
                lossy = await ask(client, body)
                greedy = await ask(client, {**body, "temperature": 0})
                return health, card, lossy.json(), greedy.json()

    health, card, lossy, greedy = asyncio.run(look())
    for told in (health, card):
        assert (told["policy"], told["lossless"]) == ("typical", False) and "NOT LOSSLESS" in told["mode"]
    told = lossy["metrics"]["speculative_decoding"]
    assert (told["policy"], told["lossless"]) == ("typical", False) and told["num_inexact_tokens"] > 0
    assert greedy["metrics"]["speculative_decoding"]["lossless"] is True


def test_the_fingerprint_of_a_lossy_server_is_another():
    """Equal fingerprints promise equal answers."""
    with babbling_llm() as llm:
        llm.info.update(LOSSY_INFO)
        lossy = fingerprint(llm)
        llm.info["policy"] = "lossless"
        assert fingerprint(llm) != lossy


@pytest.mark.parametrize("typical", [0, -1, 1.5, True, "0.1", math.nan])
def test_a_threshold_that_is_none_is_refused(typical):
    with pytest.raises(UserError, match="threshold"):
        Drafting(typical=typical)

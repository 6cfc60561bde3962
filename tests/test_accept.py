"""Acceptance as a pure function: logits and drafts in, the target's own choices out."""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lampejo.accept import Verdict, VerifyRow, token_logprobs
from lampejo.accept import accept as accept_scores
from lampejo.errors import DamagedModel
from lampejo.request import StopParams
from lampejo.sampling import History, SamplingParams, choose
from lampejo.scores import Scores
from tiny import ScriptedDrafter, make_engine, make_request, prompt_of, run

V = 11


def accept(logits: torch.Tensor, rows: Sequence[VerifyRow]) -> list[Verdict]:
    return accept_scores(Scores(logits), rows)


def row_of(drafts: list[int], position: int = 5, seed: int = 3, hidden: Any = None, **params: Any) -> VerifyRow:
    hidden = hidden or [()] * (len(drafts) + 1)
    return VerifyRow(drafts, position, SamplingParams(**params), seed, History(), hidden)


def saying(*ids: int) -> torch.Tensor:
    """Logits of a target whose likeliest tokens are ``ids``."""
    return 5.0 * torch.nn.functional.one_hot(torch.tensor(ids), V).float()


@pytest.mark.parametrize(
    ("drafts", "own", "ids", "num_accepted"),
    [
        ([], [4], [4], 0),
        ([4], [4, 7], [4, 7], 1),
        ([5], [4, 7], [4], 0),
        ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4], 3),
        ([1, 2, 3], [1, 2, 9, 4], [1, 2, 9], 2),
        ([1, 2, 3], [1, 9, 3, 4], [1, 9], 1),
        ([9, 2, 3], [1, 2, 3, 4], [1], 0),
    ],
)
def test_drafts_are_accepted_while_they_equal_the_targets_choices(drafts, own, ids, num_accepted):
    """What agrees again after a difference does not count: it was conditioned on the wrong token."""
    (verdict,) = accept(saying(*own), [row_of(drafts)])
    assert (verdict.ids, verdict.num_accepted, verdict.logprobs) == (ids, num_accepted, [])


def test_rows_of_a_batch_are_judged_one_by_one():
    """Ragged rows, one of them without drafts, one sampled: each has its own part of the logits."""
    rows = [row_of([1, 2]), row_of([]), row_of([3], temperature=1e-9), row_of([8, 8, 8])]
    own = [1, 2, 6, 4, 3, 5, 8, 0, 8, 1]
    verdicts = accept(saying(*own), rows)
    assert [(v.ids, v.num_accepted) for v in verdicts] == [([1, 2, 6], 2), ([4], 0), ([3, 5], 1), ([8, 0], 1)]


HOT = {"temperature": 0.8, "top_k": 3, "top_p": 0.9, "min_p": 0.1}
CHOICES = [{}, {"temperature": 1.0}, HOT, {"repetition_penalty": 1.3}, {"logit_bias": {3: 5.0}}]


@pytest.mark.parametrize("params", CHOICES, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("everywhere", [True, False])
def test_logits_that_are_no_numbers_are_refused(params, bad, everywhere):
    """Fault: a damaged file gave an empty answer, or any, and exit code 0."""
    logits = 20 * saying(4, 5, 6)
    logits[1 if everywhere else (1, 7)] = bad
    rows = [row_of([4], **params), row_of([], **params)]
    with pytest.raises(DamagedModel, match="not numbers"):
        accept(logits, rows)


def test_logits_after_a_draft_that_was_refused_do_not_matter():
    """Fault: drafts change what an answer is, here whether there is one."""
    logits = saying(4, 5)
    logits[1] = math.nan
    assert accept(logits, [row_of([9])])[0].ids == [4]


def test_no_rows_give_no_verdicts():
    """A step of prefill alone."""
    assert accept(torch.empty(0, V), []) == []


def test_logits_that_do_not_match_the_rows_are_a_fault_of_the_caller():
    with pytest.raises(AssertionError):
        accept(saying(1, 2, 3), [row_of([1])])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_output_never_depends_on_the_drafts(data):
    """Principle 2: chain any drafts through a target; the answer is that of one token at a time."""
    draw = data.draw
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.7, 1.5])),
        top_k=draw(st.sampled_from([0, 3])),
        top_p=draw(st.sampled_from([1.0, 0.8])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.8])),
    )
    rng = draw(st.randoms(use_true_random=False))
    table = torch.randn(V, V, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))

    def answer(max_width: int) -> list[int]:
        ids, history = [0], History(frozenset([0]))
        while len(ids) < 25:
            drafts = [rng.randrange(V) if rng.random() < 0.4 else -1 for _ in range(rng.randint(0, max_width))]
            for j, token in enumerate(drafts):  # -1: what a target without processors would say
                before = drafts[j - 1] if j else ids[-1]
                drafts[j] = int(table[before].argmax()) if token < 0 else token
            row = VerifyRow(drafts, len(ids), params, 5, history, [()] * (len(drafts) + 1))
            (verdict,) = accept(table[[ids[-1], *drafts]], [row])
            ids += verdict.ids
            history.output.update(verdict.ids)
        return ids[:25]

    assert answer(max_width=6) == answer(max_width=0)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}])
def test_hidden_ids_are_masked_at_their_own_position_only(params):
    """B9: EOS below min_tokens, and allowed from there on, within one block."""
    logits = saying(1, 1, 1) * 20 + saying(4, 4, 4)
    (verdict,) = accept(logits, [row_of([4, 4], hidden=[(1,), (1,), ()], **params)])
    assert (verdict.ids, verdict.num_accepted) == ([4, 4, 1], 2)


def test_log_probabilities_belong_to_the_committed_tokens_and_ignore_the_processors():
    """P2: one entry per token, of the unprocessed logits, the likeliest alternatives in order."""
    logits = torch.randn(3, V)
    params = {"logit_bias": {7: 100.0}, "temperature": 0.5, "logprobs": 4}
    (verdict,) = accept(logits, [row_of([7, 2], **params)])
    assert verdict.ids == [7, 7]
    expected = logits.log_softmax(-1)
    assert [entry.token_id for entry in verdict.logprobs] == [7, 7]
    for j, entry in enumerate(verdict.logprobs):
        assert entry.logprob == pytest.approx(expected[j, 7].item(), abs=1e-6)
        best = expected[j].topk(4)
        assert [i for i, _ in entry.top] == best.indices.tolist()
        assert [p for _, p in entry.top] == pytest.approx(best.values.tolist(), abs=1e-6)
    assert all(entry.top == () for entry in token_logprobs(logits, [1, 2, 3], 0))
    beside = accept(torch.cat([saying(4, 5), logits]), [row_of([4]), row_of([7, 2], **params)])
    assert (beside[0].logprobs, beside[1]) == ([], verdict)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 4}], ids=["greedy", "sampled"])
def test_log_probabilities_are_those_of_teacher_forcing(reference_target, sampling):
    """P2: within 1e-3 of the scores of one pass over the whole text, for plain and for drafted decoding."""
    prompt = prompt_of(30)
    stops = StopParams(max_tokens=40, ignore_eos=True)
    plain = make_request(prompt, stops, logprobs=5, **sampling)
    run(make_engine(reference_target), [plain])
    rng = random.Random(0)
    script = ScriptedDrafter(
        lambda r, w: [t if rng.random() < 0.8 else 3 for t in plain.output_ids[r.num_output : r.num_output + w]]
    )
    drafted = make_request(prompt, stops, logprobs=5, **sampling)
    run(make_engine(reference_target, [script], width=6), [drafted])

    ids = torch.tensor(plain.ids)
    hidden = teacher_forced(reference_target, ids)
    scores = reference_target.logits(hidden).float().log_softmax(-1)[len(prompt) - 1 : -1]
    for request in (plain, drafted):
        assert request.ids == plain.ids
        for j, entry in enumerate(request.logprobs):
            assert abs(entry.logprob - scores[j, request.output_ids[j]].item()) < 1e-3
            for token_id, logprob in entry.top:
                assert abs(logprob - scores[j, token_id].item()) < 1e-3
            assert [p for _, p in entry.top] == sorted((p for _, p in entry.top), reverse=True)


def teacher_forced(target: Any, ids: torch.Tensor) -> torch.Tensor:
    """Hidden states of the whole text in one pass, with torch's own attention: shares no cache with the engine."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    hidden, _ = target(ids, torch.arange(len(ids)), attend, ())
    return hidden


def test_greedy_in_one_operation_and_greedy_row_by_row_choose_alike():
    """The batch's short cut must not differ from the general way, ties included."""
    logits = torch.randint(0, 3, (40, V)).float()
    rows = [row_of([0] * 3) for _ in range(10)]
    quick = [v.ids for v in accept(logits, rows)]
    slow = [v.ids for v in accept(torch.cat([logits, saying(2)]), [*rows, row_of([], temperature=1.0)])][:-1]
    assert quick == slow
    assert choose(logits, SamplingParams(), 0, range(40)).tolist() == logits.argmax(-1).tolist()

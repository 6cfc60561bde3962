"""A request's life: its limits, what advancing it commits, and what its statistics count."""

from typing import Any

import pytest

from lampejo.accept import TokenLogprobs, Verdict
from lampejo.errors import UserError
from lampejo.request import DraftStats, Request, StopParams, advance, end_ids, hidden_ids
from lampejo.sampling import SamplingParams
from lampejo.text import TextStream
from scripted import ids_of, make_tokenizer, text_request

EOS = 1
CONTEXT = 100


def request_of(num_prompt: int = 5, stops: StopParams | None = None, **sampling: Any) -> Request:
    return Request(0, list(range(10, 10 + num_prompt)), SamplingParams(**sampling), stops or StopParams())


def verdict_of(ids: list[int], num_accepted: int | None = None, logprobs: bool = False) -> Verdict:
    entries = [TokenLogprobs(i, -0.5, ()) for i in ids] if logprobs else []
    return Verdict(ids, len(ids) - 1 if num_accepted is None else num_accepted, entries)


def commit(request: Request, ids: list[int], num_drafted: int | None = None, **verdict: Any) -> Any:
    num_drafted = len(ids) - 1 if num_drafted is None else num_drafted
    return advance(request, verdict_of(ids, **verdict), "dflash", num_drafted, [EOS], CONTEXT)


# Limits

HUGE = [-1, 2**31 + 1, 10**400, 1.0, True, "5", float("nan"), [5]]


@pytest.mark.parametrize("name", ["max_tokens", "min_tokens"])
@pytest.mark.parametrize("value", HUGE, ids=lambda value: f"{value!r:.9}")
def test_a_limit_that_is_no_whole_number_in_range_is_refused_by_name(name, value):
    """O5, P1: negative, huge, fraction, boolean, text."""
    with pytest.raises(UserError, match=name):
        StopParams(**{name: value})


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5, "min_tokens": 6}, r"min_tokens is 6, which is larger than max_tokens \(5\)"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("a", 5)}, "stop"),
        ({"stop": ("a", "b\udcff")}, r"stop has 'b\\udcff', which is not UTF-8"),
        ({"stop": "text"}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": None}, "stop"),
        ({"stop": ("a",) * 257}, "stop has 257 strings; there can be 256"),
        ({"stop": ("a", "b" * 1001)}, "stop has a string of 1,001 characters; each can have 1,000"),
        ({"stop_token_ids": (5,) * 1025}, "stop_token_ids has 1,025 ids; there can be 1,024"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"stop_token_ids": ("5",)}, "stop_token_ids"),
        ({"stop_token_ids": (True,)}, "stop_token_ids"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": "55"}, "stop_token_ids"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"ignore_eos": None}, "ignore_eos"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_way_to_stop_that_cannot_be_meant_is_refused_by_name(params, name):
    """P1: above all a bare string, of which each letter would be a stop string."""
    with pytest.raises(UserError, match=name):
        StopParams(**params)


def test_what_ends_an_answer_may_be_as_much_as_is_told():
    """P1: exactly the bounds; an id that is given twice counts once."""
    stops = StopParams(stop=("a" * 1000,) * 256, stop_token_ids=tuple(range(512)) * 2)
    assert len(stops.stop) == 256 and stops.stop_token_ids == tuple(range(512))


# Commit


def test_a_block_is_committed_up_to_its_first_end_and_nothing_of_the_rest_remains():
    """The commit-boundary rule: ids, origins, log probabilities, penalty counts, computed length, statistics."""
    request = request_of(logprobs=0, presence_penalty=0.5)
    commit(request, [20], num_drafted=0, logprobs=True)
    delta = commit(request, [21, 22, EOS, 23, 24], logprobs=True)
    assert (delta.ids, delta.finish_reason, request.finish_reason) == ([21, 22, EOS], "stop", "stop")
    assert request.output_ids == [20, 21, 22, EOS]
    assert delta.origins == ["dflash"] * 3
    assert request.origins == ["target", "dflash", "dflash", "dflash"]
    assert [entry.token_id for entry in request.logprobs] == request.output_ids
    assert request.history.output == {20: 1, 21: 1, 22: 1, EOS: 1}
    assert request.num_computed == len(request.ids) - 1
    assert request.stats.as_dict() == {
        "mean_acceptance_length": 3.0,
        "draft_acceptance_rate": 3 / 4,
        "acceptance_histogram": [0, 0, 0, 1],
        "num_spec_steps": 1,
        "num_accepted_draft_tokens": 3,
        "num_draft_tokens": 4,
        "policy": "lossless",
        "lossless": True,
        "num_inexact_tokens": 0,
    }


def test_the_bonus_token_is_the_targets_own():
    request = request_of()
    assert commit(request, [20, 21, 22], num_drafted=5).origins == ["dflash", "dflash", "target"]
    assert request.num_uncomputed == 1


@pytest.mark.parametrize(
    ("ids", "max_tokens", "expected", "reason"),
    [
        ([20, 21, 22], 3, [20, 21, 22], "length"),
        ([20, 21, 22], 2, [20, 21], "length"),
        ([20, 21, EOS], 3, [20, 21, EOS], "stop"),
        ([20, 21, EOS], 2, [20, 21], "length"),
        ([EOS, 21], 1, [EOS], "stop"),
        ([20, 21], 9, [20, 21], None),
    ],
)
def test_an_end_token_exactly_at_the_cap_is_stop_and_beyond_it_length(ids, max_tokens, expected, reason):
    """B2, B3."""
    request = request_of(stops=StopParams(max_tokens=max_tokens))
    assert commit(request, ids).ids == expected
    assert request.finish_reason == reason


@pytest.mark.parametrize("num_prompt", [97, 98, 99])
def test_the_context_limit_ends_an_answer(num_prompt):
    """B5: whatever max_tokens says."""
    for max_tokens in (None, 50):
        request = request_of(num_prompt, StopParams(max_tokens=max_tokens))
        assert len(commit(request, [20, 21, 22, 23]).ids) == CONTEXT - num_prompt
        assert request.finish_reason == "length"


def test_a_stop_string_ends_the_block_with_the_token_that_completes_it():
    """B1: the id is committed, its text is not."""
    stops = StopParams(stop=("STOP",))
    text = TextStream(make_tokenizer(), stops.stop)
    request = text_request(ids_of("say:"), text, stops)
    first = commit(request, ids_of("I sST"))
    second = commit(request, ids_of("OPxy"))
    assert (first.text, first.finish_reason) == ("I s", None)
    assert (second.text, second.ids, second.finish_reason) == ("", ids_of("OP"), "stop")
    assert request.stats.num_accepted_draft_tokens == 4 + 2


def test_which_ids_end_an_answer_and_which_are_hidden_below_min_tokens():
    """B6, B9: ignore_eos frees EOS but not the caller's own stop ids; hidden are all that could end it."""
    plain, own = request_of(stops=StopParams(stop_token_ids=(7,))), StopParams(stop_token_ids=(7,), ignore_eos=True)
    assert end_ids(plain, [EOS, 2]) == (7, EOS, 2)
    assert end_ids(request_of(stops=own), [EOS, 2]) == (7,)
    request = request_of(stops=StopParams(min_tokens=3))
    assert hidden_ids(request, [None] * 5, [EOS]) == [(EOS,), (EOS,), (EOS,), (), ()]
    commit(request, [20, 21])
    assert hidden_ids(request, [None] * 3, [EOS]) == [(EOS,), (), ()]
    commit(request, [22])
    assert hidden_ids(request, [None] * 3, [EOS]) == [(), (), ()]


def test_statistics_count_only_steps_with_drafts_and_only_committed_tokens():
    """V2: a request without drafts has no rates, not zeros or a division by zero."""
    request = request_of(stops=StopParams(max_tokens=6))
    assert request.stats.as_dict()["mean_acceptance_length"] is None
    assert request.stats.as_dict()["draft_acceptance_rate"] is None
    commit(request, [20], num_drafted=0)
    assert request.stats == DraftStats()
    commit(request, [21, 22], num_drafted=3)
    commit(request, [23], num_drafted=3)
    commit(request, [24, 25, 26, 27])  # the cap is after two of these
    stats = request.stats.as_dict()
    assert stats["acceptance_histogram"] == [1, 1, 1]
    assert stats["mean_acceptance_length"] == (2 + 1 + 2) / 3
    assert (stats["num_spec_steps"], stats["num_draft_tokens"], stats["num_accepted_draft_tokens"]) == (3, 9, 3)
    stats["acceptance_histogram"].append(9)
    assert request.stats.acceptance_histogram == [1, 1, 1], "a reader can change the statistics"


def test_without_a_seed_each_request_draws_its_own():
    """Two unseeded requests must not give the same random answer; a seed of 0 is a seed."""
    seeds = {request_of().seed for _ in range(20)}
    assert len(seeds) == 20
    assert request_of(seed=0).seed == 0


def test_penalty_history_is_kept_only_when_a_penalty_asks_for_it():
    """A long prompt costs nothing when no penalty looks at it."""
    assert request_of().history.prompt == frozenset()
    request = request_of(frequency_penalty=0.1)
    assert request.history.prompt == frozenset(request.prompt_ids)

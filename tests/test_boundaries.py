"""Where an answer ends inside a verified block (cases B1 - B9): everything is cut there, and at the same place."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lampejo.api import Completion
from lampejo.errors import UserError
from lampejo.request import StopParams
from lampejo.text import TextStream
from scripted import (
    answering,
    decode_plainly,
    ids_of,
    knowing,
    make_tokenizer,
    random_target,
    scripted_engine,
    scripted_llm,
    text_request,
)
from tiny import EOS, ScriptedDrafter, make_request, run

PROMPT = "say it:"
NUM_PROMPT = len(PROMPT)


def complete(
    answer: Sequence[int], width: int, tokenizer: Any = None, **params: Any
) -> tuple[Completion, list[int], str]:
    """What comes of a target that says ``answer``, drafted without a fault; sizes of its blocks; the streamed text."""
    config = {"width": width, "max_rows": 2}
    with scripted_llm(answering(NUM_PROMPT, answer), [knowing(answer)], tokenizer, **config) as llm:
        chunks = list(llm.stream(PROMPT, logprobs=2, **params))
    done = chunks[-1].completion
    assert done is not None
    assert len(done.ids) == len(done.logprobs) == len(done.origins) == done.usage["completion_tokens"]
    assert [i for chunk in chunks for i in chunk.ids] == done.ids
    assert [entry.token_id for entry in done.logprobs] == done.ids
    return done, [len(chunk.ids) for chunk in chunks], "".join(chunk.text for chunk in chunks)


@pytest.mark.parametrize("width", [0, 1, 3, 7, 15])
def test_a_stop_string_ends_the_text_before_it_at_any_offset_in_a_block(width):
    """B1: one token per character, so the stop string lies inside a block, at its end, or over two and more blocks."""
    places = {}
    for before in range(20):
        text = "abcdefghijklmnopqrst"[:before]
        done, sizes, streamed = complete(ids_of(text + "STOP and more words"), width, stop=["STOP"])
        assert (done.text, streamed, done.finish_reason) == (text, text, "stop")
        assert done.ids == ids_of(text + "STOP")
        places[(before + 3) % (width + 1), sizes[-1]] = True
        if width:
            assert done.speculation["num_spec_steps"] == len(sizes) - 1
            assert done.speculation["num_accepted_draft_tokens"] <= len(done.ids) - 1
    assert len(places) >= width + 1, "not every offset of a block was tried"


@pytest.mark.parametrize("width", [0, 1, 2, 5, 15])
@pytest.mark.parametrize("cut", range(1, 5))
def test_a_stop_string_may_begin_and_end_inside_tokens(width, cut):
    """B1: the token that completes it is the last one; what it says after the stop string is not text."""
    left, right = "ab" + "STOP!"[:cut], "STOP!"[cut:] + "cd"
    tokenizer = make_tokenizer(left, right)
    hash_id, dollar_id = ids_of("#$")
    for before in range(width + 2):
        answer = [*ids_of("x" * before), hash_id, dollar_id, *ids_of("more")]
        done, _, streamed = complete(answer, width, tokenizer, stop="STOP!")
        assert (done.text, streamed, done.finish_reason) == ("x" * before + "ab", "x" * before + "ab", "stop")
        assert done.ids == answer[: before + 2]


def test_a_text_that_only_begins_like_a_stop_string_is_shown_whole():
    """B1: what is held back in case a stop string follows comes out at the end, whatever ends the answer."""
    for width in (0, 4):
        by_eos, _, _ = complete([*ids_of("on STO"), EOS], width, stop=["STOP"])
        assert (by_eos.text, by_eos.finish_reason) == ("on STO", "stop")
        by_cap, _, _ = complete(ids_of("on STOP"), width, stop=["STOP"], max_tokens=6)
        assert (by_cap.text, by_cap.finish_reason) == ("on STO", "length")


@pytest.mark.parametrize(("max_tokens", "reason"), [(None, "stop"), (4, "stop"), (3, "stop"), (2, "length")])
def test_eos_inside_a_block_ends_the_answer_also_when_it_is_exactly_at_the_cap(max_tokens, reason):
    """B2: block = [a, EOS, b], with room and with the cap on b, on EOS, and before it."""
    answer = [*ids_of("xa"), EOS, *ids_of("b")]
    done, sizes, _ = complete(answer, 2, max_tokens=max_tokens)
    assert done.finish_reason == reason
    assert done.text == "xa"
    assert done.ids == answer[: 2 if reason == "length" else 3]
    assert sizes == [1, len(done.ids) - 1]


def test_a_stop_token_id_ends_the_answer_like_eos():
    """B2: the caller's own end ids, inside a block."""
    stop_id = ids_of("!")[0]
    done, sizes, _ = complete(ids_of("xa!b"), 3, stop_token_ids=[stop_id])
    assert (done.text, done.ids, done.finish_reason) == ("xa", ids_of("xa!"), "stop")
    assert sizes == [1, 2]


@pytest.mark.parametrize("width", [0, 1, 4, 9, 15])
@pytest.mark.parametrize("quality", [0.0, 0.6, 1.0])
def test_max_tokens_gives_exactly_as_many_tokens(width, quality):
    """B3: 1 .. 20 tokens with any width; rejected drafts never count."""
    target, prompt = random_target(), ids_of(PROMPT)
    stops = StopParams(max_tokens=20, ignore_eos=True)
    expected, _ = decode_plainly(target, prompt, stops)
    rng = random.Random(width)
    right = knowing(expected)
    drafter = ScriptedDrafter(lambda r, w: [t if rng.random() < quality else (t + 1) % 97 for t in right.script(r, w)])
    engine = scripted_engine(target, [drafter], width=width)
    for max_tokens in range(1, 21):
        request = make_request(prompt, StopParams(max_tokens=max_tokens, ignore_eos=True))
        assert run(engine, [request]) == [expected[:max_tokens]]
        assert request.finish_reason == "length"
        assert request.stats.num_accepted_draft_tokens <= max_tokens - 1
        assert request.stats.num_draft_tokens <= width * request.stats.num_spec_steps
        if quality == 0:
            assert request.stats.num_accepted_draft_tokens == 0
    assert engine.pool.num_free == engine.pool.num_pages


def test_no_draft_is_verified_that_could_not_be_committed():
    """B3: with n tokens left, at most n - 1 drafts are worth a place; the target adds one."""
    widths = []

    def script(request, width):
        widths.append((request.stops.max_tokens - request.num_output, width))
        return [EOS] * width

    run(scripted_engine(random_target(), [ScriptedDrafter(script)], width=9), [
        make_request(ids_of(PROMPT), StopParams(max_tokens=14, ignore_eos=True))])  # fmt: skip
    assert widths == [(left, min(9, left - 1)) for left in range(13, 1, -1)]


@pytest.mark.parametrize("slot", range(6))
def test_an_end_token_that_was_drafted_but_rejected_ends_nothing(slot):
    """B4: the drafter says EOS, the target does not."""
    answer = ids_of("a long answer goes on")
    drafter = ScriptedDrafter(
        lambda r, w: [EOS if j == slot else t for j, t in enumerate(answer[r.num_output : r.num_output + w])]
    )
    request = make_request(ids_of(PROMPT), StopParams(max_tokens=60))
    engine = scripted_engine(answering(NUM_PROMPT, answer), [drafter], width=6)
    assert run(engine, [request]) == [[*answer, EOS]]
    assert request.finish_reason == "stop"
    assert request.stats.num_accepted_draft_tokens < request.stats.num_draft_tokens


@pytest.mark.parametrize("width", [0, 3, 15])
@pytest.mark.parametrize("room", [1, 2, 3, 4, 17])
def test_a_prompt_just_below_the_context_limit_is_answered_up_to_it(width, room):
    """B5: no crash, no page missing, reason length; here with max_tokens far beyond the limit and without it."""
    for max_tokens in (None, 1000):
        drafter = ScriptedDrafter(lambda r, w: [ids_of("a")[0]] * w)
        target = answering(0, ids_of("a" * 200))
        with scripted_llm(target, [drafter], width=width, max_context=100, page_size=16, num_pages=7) as llm:
            done = llm.generate("p" * (100 - room), max_tokens=max_tokens)
        assert (len(done.ids), done.finish_reason) == (room, "length")
        assert done.usage["total_tokens"] == 100


@pytest.mark.parametrize(("num_prompt", "counted"), [(100, "100"), (101, "101"), (5000, "more than 100")])
def test_a_prompt_that_fills_the_context_is_refused_before_any_work(num_prompt, counted):
    """B5: at the limit there is no room for an answer either; a text far beyond it is refused without being counted."""
    with scripted_llm(answering(0, []), max_context=100) as llm:
        for call in (llm.generate, llm.stream):
            with pytest.raises(UserError, match=f"has {counted} tokens.* the context of 100"):
                call("p" * num_prompt)
            with pytest.raises(UserError, match=f"has {counted} tokens.* the context of 100"):
                call(["short", "p" * num_prompt] if call == llm.generate else "p" * num_prompt)
        assert llm.engine.runner.num_steps == 0
        assert llm.engine.scheduler.num_queried_tokens == 0
        assert not llm.engine.has_work


@pytest.mark.parametrize("width", [0, 1, 7, 15])
def test_ignore_eos_with_128_gives_exactly_128(width):
    """B6: a target that only ever says EOS, and drafts of EOS."""
    drafter = ScriptedDrafter(lambda r, w: [EOS] * w)
    with scripted_llm(lambda text: EOS, [drafter], width=width) as llm:
        done = llm.generate(PROMPT, ignore_eos=True, max_tokens=128)
    assert (done.ids, done.finish_reason, done.text) == ([EOS] * 128, "length", "")
    assert done.speculation["num_accepted_draft_tokens"] == 127 - -(-127 // (width + 1))  # one per step is the target's


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_ids_logprobs_origins_and_usage_have_one_length_and_are_those_of_plain_decoding(data):
    """B7: random answers, ends, caps, widths and drafts, against a decoder that knows no blocks."""
    draw = data.draw
    tokenizer = make_tokenizer("ab", "bc", "cab")
    letters = ids_of("abc#$%")
    answer = draw(st.lists(st.sampled_from([*letters, EOS]), max_size=40))
    stop = tuple(draw(st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)))
    min_tokens = draw(st.integers(0, 12))
    stops = StopParams(
        max_tokens=draw(st.integers(max(1, min_tokens), 50)),
        min_tokens=min_tokens,
        stop=stop,
        stop_token_ids=tuple(draw(st.lists(st.sampled_from(letters), max_size=1))),
        ignore_eos=draw(st.booleans()),
    )
    rng = draw(st.randoms(use_true_random=False))
    quality = draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    target = answering(NUM_PROMPT, answer)
    expected, reason = decode_plainly(target, ids_of(PROMPT), stops, tokenizer=tokenizer)

    def script(request, width):
        known = expected[request.num_output : request.num_output + rng.randint(0, width)]
        return [t if rng.random() < quality else rng.choice([*letters, EOS]) for t in known]

    text = TextStream(tokenizer, stop, (), min_tokens)
    request = text_request(ids_of(PROMPT), text, stops, logprobs=draw(st.integers(0, 3)))
    engine = scripted_engine(target, [ScriptedDrafter(script)], width=draw(st.integers(0, 15)), page_size=8)
    engine.add(request)
    deltas = []
    while engine.has_work:
        deltas += engine.step()
        engine.pool.check_integrity()
        assert len(request.logprobs) == len(request.origins) == request.num_output
    assert (request.output_ids, request.finish_reason) == (expected, reason)
    assert [i for delta in deltas for i in delta.ids] == expected
    assert [o for delta in deltas for o in delta.origins] == request.origins
    assert [entry.token_id for entry in request.logprobs] == expected
    assert sum(request.stats.acceptance_histogram) == request.stats.num_spec_steps
    assert request.stats.num_accepted_draft_tokens == request.origins.count("scripted")
    by_hand = TextStream(tokenizer, stop, (), min_tokens)
    for token_id in expected[:-1] if reason == "stop" and expected[-1] in (EOS, *stops.stop_token_ids) else expected:
        by_hand.push(token_id)
    by_hand.finish()
    assert "".join(delta.text for delta in deltas) == text.text == by_hand.text


@pytest.mark.parametrize("width", [0, 2, 6, 15])
def test_of_several_stop_strings_the_earliest_in_the_text_wins(width):
    """B8: whatever their order, also when one lies in another and when one block or one token completes both."""
    answer = ids_of("one two three four")
    for stop in (["three", "two"], ["two", "three"], ["four", "wo th", "two three"], ["two t", "o three", "four"]):
        done, _, _ = complete(answer, width, stop=stop)
        assert done.text == ("one t" if stop[1] == "wo th" else "one ")
        assert done.finish_reason == "stop"
    tokenizer = make_tokenizer("one two three")
    for stop in (["three", "two"], ["two", "three"]):
        done, _, _ = complete(ids_of("#more"), width, tokenizer, stop=stop)
        assert done.text == "one "


@pytest.mark.parametrize("width", [0, 1, 4, 15])
@pytest.mark.parametrize("drafts", ["right", "eos"])
@pytest.mark.parametrize("min_tokens", [0, 1, 2, 5, 9])
def test_min_tokens_masks_the_end_at_each_verify_position_below_it(width, drafts, min_tokens):
    """B9: EOS and a stop id are the likeliest tokens everywhere; the answer has min_tokens others before."""
    a, stop_id = ids_of("a!")
    scores = [0.0] * 97
    scores[EOS], scores[stop_id], scores[a] = 9.0, 8.0, 5.0
    expected = [a] * min_tokens + [EOS]
    drafter = knowing(expected) if drafts == "right" else ScriptedDrafter(lambda r, w: [EOS] * w)
    engine = scripted_engine(lambda text: scores, [drafter], width=width)
    stops = StopParams(max_tokens=30, min_tokens=min_tokens, stop_token_ids=(stop_id,))
    request = make_request(ids_of(PROMPT), stops)
    assert run(engine, [request]) == [expected]
    assert request.finish_reason == "stop"


@pytest.mark.parametrize("width", [0, 4, 15])
def test_min_tokens_keeps_stop_strings_from_ending_the_answer_too(width):
    """B9: a stop string completed below min_tokens is text like any other; the next one counts."""
    answer = ids_of("aXbXcXd")
    done, _, _ = complete(answer, width, stop="X", min_tokens=3)
    assert (done.text, done.finish_reason) == ("aXb", "stop")
    assert len(done.ids) == 4

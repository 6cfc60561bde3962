"""Incremental text equals the whole decode, for every cut; stop strings end it at the right character."""

import os
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenizer_samples as samples
from lampejo.errors import UserError
from lampejo.text import TextStream, _borders
from lampejo.tokenizer import Tokenizer, from_gguf

BYTE_LEVEL = from_gguf(samples.gguf_metadata("qwen2"))
LLAMA_2 = samples.sentencepiece_tokenizer("llama")
METASPACE = samples.sentencepiece_tokenizer("metaspace")
VOCABULARIES = {"byte_level": BYTE_LEVEL, "llama_2": LLAMA_2, "metaspace": METASPACE}

STOPS = ["\n", " ", "a", "e", "the", "END", "aba", "aab", "\n\n", "é", "🎉", "\ufffd", " a", "ação", "<think>", "."]


def stream(
    tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str], cuts: Sequence[bool]
) -> tuple[str, TextStream]:
    """Joined pieces, taken after those tokens whose cut is True (the rest of the cuts counts as True)."""
    text = TextStream(tokenizer, stop)
    pieces = []
    for i, token_id in enumerate(ids):
        stopped = text.push(token_id)
        if i >= len(cuts) or cuts[i]:
            pieces.append(text.take())
            assert "".join(pieces) == text.text[: len("".join(pieces))]
        if stopped:
            break
    pieces.append(text.finish())
    assert text.text == "".join(pieces)
    return text.text, text


def whole(tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str]) -> str:
    """The definition: decode the shortest prefix of the ids that completes a stop string, cut at the earliest one."""
    for end in range(len(ids) + 1):
        text = settled(tokenizer, ids, end)
        starts = [start for s in stop if (start := text.find(s)) >= 0]
        if starts:
            return text[: min(starts)]
    return tokenizer.decode(ids)


def settled(tokenizer: Tokenizer, ids: Sequence[int], end: int) -> str:
    """The text of ids[:end] that no later token can change."""
    if end == len(ids):
        return tokenizer.decode(ids)
    if tokenizer.rules.byte_fallback:  # an open run of bytes is judged as one when it ends
        while end and (isinstance(tokenizer.piece(ids[end - 1]), bytes) or ids[end - 1] in tokenizer.special_ids):
            end -= 1
    if not tokenizer.rules.byte_level:
        return tokenizer.decode(ids[:end])
    letter, *seconds = (_id_of_byte(byte) for byte in (0x78, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF))
    third = seconds[0]
    tails = [[letter], *([second, *[third] * n, letter] for second in seconds for n in range(3))]
    texts = [tokenizer.decode([*ids[:end], *tail]).removesuffix("x") for tail in tails]
    return os.path.commonprefix(texts)  # noqa: RUF071  (character by character is what is meant)


def _id_of_byte(byte: int) -> int:
    return next(i for i in range(BYTE_LEVEL.vocab_size) if BYTE_LEVEL.piece(i) == bytes([byte]))


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Arbitrary ids, which make broken UTF-8, mixed with ids of real text."""
    arbitrary = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12)
    real = st.sampled_from(samples.TEXTS).map(lambda text: tokenizer.encode(text)[:40])
    odd = st.text(max_size=8).map(tokenizer.encode)
    return st.lists(st.one_of(arbitrary, real, odd), max_size=4).map(lambda parts: [i for part in parts for i in part])


@pytest.mark.parametrize("name", VOCABULARIES)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_cut_of_the_ids_gives_the_text_of_the_whole(name: str, data: st.DataObject) -> None:
    """Cases T1, T2: byte-level and SentencePiece-like vocabularies, valid text and broken bytes."""
    tokenizer = VOCABULARIES[name]
    ids = data.draw(ids_of(tokenizer))
    cuts = data.draw(st.lists(st.booleans(), max_size=len(ids)))
    text, _ = stream(tokenizer, ids, (), cuts)
    assert text == tokenizer.decode(ids)


@pytest.mark.parametrize("name", VOCABULARIES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_cut_of_the_ids_ends_at_the_same_stop_string(name: str, data: st.DataObject) -> None:
    """Cases B1, B8, T2: the definition by whole decodes, for every vocabulary and every way to take the pieces."""
    tokenizer = VOCABULARIES[name]
    ids = data.draw(ids_of(tokenizer))[:60]
    stop = data.draw(st.lists(st.sampled_from(STOPS) | st.text("ab ", min_size=1, max_size=4), max_size=4))
    cuts = data.draw(st.lists(st.booleans(), max_size=len(ids)))
    text, _ = stream(tokenizer, ids, stop, cuts)
    assert text == whole(tokenizer, ids, stop)


@pytest.mark.parametrize("text", samples.TEXTS)
def test_real_text_streams_unchanged_token_by_token(text: str) -> None:
    """Case T1: emoji, CJK, quotes, code, 1 to hundreds of tokens; special tokens stay invisible."""
    for tokenizer in VOCABULARIES.values():
        ids = tokenizer.encode(text)
        assert stream(tokenizer, ids, (), ())[0] == tokenizer.decode(ids)


def test_a_half_character_is_never_shown() -> None:
    """Case T2: the four bytes of an emoji arrive one by one."""
    emoji = [BYTE_LEVEL.token_id(char) for char in "ðŁİī"]  # F0 9F 8E 89 in the byte alphabet
    text = TextStream(BYTE_LEVEL)
    shown = []
    for token_id in emoji:
        assert token_id is not None
        text.push(token_id)
        shown.append(text.take())
    assert shown == ["", "", "", "🎉"]


def test_an_unfinished_character_becomes_a_replacement_at_the_end() -> None:
    """Case T2: the answer is cut by max_tokens inside an emoji."""
    text = TextStream(BYTE_LEVEL)
    for char in "aðŁ":
        token_id = BYTE_LEVEL.token_id(char)
        assert token_id is not None
        text.push(token_id)
    assert (text.take(), text.finish(), text.text, text.finish()) == ("a", "\ufffd", "a\ufffd", "")
    bytes_of_euro = [3 + 0xE2, 3 + 0x82]
    assert stream(LLAMA_2, bytes_of_euro, (), ())[0] == LLAMA_2.decode(bytes_of_euro) == "\ufffd\ufffd"


@pytest.mark.parametrize("offset", range(8))
def test_a_stop_string_completed_at_any_token_ends_the_text_before_it(offset: int) -> None:
    """Case B1: split over tokens in every way, and the token that completes it holds more text."""
    body = "abcdefgh"[:offset]
    for tail in ("", "xyz", "\n"):
        ids = BYTE_LEVEL.encode(body + "</end>" + tail)
        text, state = stream(BYTE_LEVEL, ids, ["</end>"], ())
        assert (text, state.stop_match, state.stopped) == (body, "</end>", True)


def single(text: str) -> list[int]:
    """One token per ASCII character."""
    ids = [BYTE_LEVEL.token_id("Ġ" if char == " " else char) for char in text]
    assert None not in ids
    return [i for i in ids if i is not None]


@pytest.mark.parametrize("stop", [["cd", "bcde", "de"], ["de", "bcde", "cd"], ["bcde", "cd", "de"]])
def test_the_earliest_position_wins_whatever_the_order(stop: list[str]) -> None:
    """Case B8: several completed by one token: the earliest start; by different tokens: the first completed."""
    assert stream(BYTE_LEVEL, single("abcdef"), stop, ())[0] == "ab"  # "cd" is complete before "bcde"
    tokenizer = from_gguf(
        samples.gguf_metadata(
            "smollm", tokens=["a", "bcde", "f"], token_type=[1, 1, 1], merges=[], padding_token_id=None
        )
    )
    text, state = stream(tokenizer, [0, 1, 2], stop, ())
    assert (text, state.stop_match) == ("a", "bcde")


def test_stop_strings_are_prepared_once_for_all_answers_to_a_call() -> None:
    """Fault: n answers to each of many prompts took the work times their number, beside everybody's streams."""
    stop = [f"prepared once {i}" for i in range(200)] * 2
    before = _borders.cache_info().misses
    streams = [TextStream(BYTE_LEVEL, stop) for _ in range(3)]
    others = [text.fresh() for text in streams]
    assert _borders.cache_info().misses == before + 200
    assert all(len(text._stops) == 200 for text in streams + others)


def test_text_that_may_become_a_stop_string_is_held_back_and_released() -> None:
    """Case B1: "</e" is not shown until it is clear that no stop string follows."""
    text = TextStream(BYTE_LEVEL, ["</end>"])
    shown = []
    for token_id in single("a</ea</end>"):
        text.push(token_id)
        shown.append(text.take())
    assert shown == ["a", "", "", "", "</ea", "", "", "", "", "", ""]
    assert text.stopped


def test_nothing_is_held_back_once_a_stop_string_is_complete() -> None:
    """Case B1: "aba" ends as it begins; its last letter is no new beginning."""
    text = TextStream(BYTE_LEVEL, ["aba"])
    assert [text.push(i) for i in single("xyaba")][-1]
    assert text.take() == "xy"


def test_overlapping_beginnings_do_not_hide_a_stop_string() -> None:
    """Case B1: a search that starts anew after a mismatch misses "aab" in "aaab"."""
    assert stream(BYTE_LEVEL, single("xaaab"), ["aab"], ())[0] == "xa"
    assert stream(BYTE_LEVEL, single("ababac"), ["abac"], ())[0] == "ab"


def test_tokens_after_the_stop_change_nothing() -> None:
    """Case B1: the rest of a block is pushed after the stop was complete."""
    text = TextStream(BYTE_LEVEL, ["b"])
    assert [text.push(i) for i in single("abcb")] == [False, True, True, True]
    assert (text.take(), text.finish(), text.text, text.num_tokens) == ("a", "", "a", 2)


def test_a_stop_string_at_the_very_beginning_leaves_no_text() -> None:
    """Case B1: offset zero."""
    assert stream(BYTE_LEVEL, single("stop"), ["stop"], ())[0] == ""


def test_stop_strings_below_min_tokens_do_not_count() -> None:
    """Case B9: the first two completions come too early and stay in the text."""
    text = TextStream(BYTE_LEVEL, ["b"], min_tokens=5)
    assert [text.push(i) for i in single("abbab")] == [False, False, False, False, True]
    assert text.finish() == "abba"


def test_a_continuation_keeps_the_space_before_its_first_word() -> None:
    """Fault: "Once upon" + "a time" glued together for SentencePiece-like vocabularies."""
    for tokenizer in (LLAMA_2, METASPACE):
        prompt = answer = [tokenizer.token_id("▁the") or 0]
        for prompt_ids, expected in (((), "the"), ([1], "the"), (prompt, " the"), ([1, *prompt], " the")):
            text = TextStream(tokenizer, prompt_ids=prompt_ids)
            text.push(*answer)
            assert text.finish() == expected
        assert tokenizer.decode([*prompt, *answer]) == "the the"


def test_special_tokens_are_invisible_and_do_not_break_characters() -> None:
    """Case T2: a special token between the bytes of one character."""
    ids = [*(BYTE_LEVEL.token_id(char) or 0 for char in "ðŁ"), 1, *(BYTE_LEVEL.token_id(char) or 0 for char in "İī")]
    assert stream(BYTE_LEVEL, ids, (), ())[0] == BYTE_LEVEL.decode(ids) == "🎉"


@pytest.mark.parametrize("stop", [[""], ["a", ""], "text", [3]])
def test_empty_or_wrong_stop_strings_are_refused(stop: object) -> None:
    """Fault: an empty stop string ends every answer before it begins."""
    with pytest.raises(UserError):
        TextStream(BYTE_LEVEL, stop)  # type: ignore[arg-type]


def test_work_per_token_does_not_grow_with_the_text() -> None:
    """Fault: the whole answer decoded again for each token. Counted, not timed: pieces are looked up once per token."""

    class Counting(Tokenizer):
        calls = 0

        def piece(self, token_id: int) -> bytes | str:
            self.calls += 1
            return super().piece(token_id)

        def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            raise AssertionError("a stream never decodes from the start")

    counting = Counting(BYTE_LEVEL.backend, {})
    ids = BYTE_LEVEL.encode(" ".join(samples.TEXTS) * 20)
    text = TextStream(counting, ["never"])
    for token_id in ids:
        text.push(token_id)
    assert counting.calls == len(ids)
    assert text.finish() == BYTE_LEVEL.decode(ids)

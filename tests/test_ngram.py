"""The n-gram index: what it says about the text is true, and it stays quick and small."""

import random
import tracemalloc
from itertools import chain, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lampejo.ngram import NgramIndex

texts = st.one_of(
    st.lists(st.integers(0, 1), max_size=40),
    st.lists(st.integers(0, 3), max_size=60),
    st.lists(st.sampled_from([[1, 2, 3], [1, 2, 4], [2, 3], [7], [0, 0]]), max_size=15).map(lambda p: [*chain(*p)]),
)


def naive_match_len(text: list[int]) -> int:
    for length in range(len(text) - 1, 0, -1):
        suffix = text[-length:]
        if any(text[end - length : end] == suffix for end in range(length, len(text))):
            return length
    return 0


@given(texts)
@settings(max_examples=200, deadline=None)
def test_the_match_is_the_longest_suffix_that_occurred_before(text: list[int]) -> None:
    """A shorter match than there is weakens the drafts; a longer one makes drafts from nowhere look trustworthy."""
    index = NgramIndex()
    for i, token in enumerate(text):
        index.extend([token])
        assert index.match_len == naive_match_len(text[: i + 1])
        assert len(index) == i + 1


@given(texts, st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_the_proposal_is_what_followed_an_earlier_occurrence(text: list[int], num_tokens: int) -> None:
    """Positions that go stale when states are split give drafts that never followed this suffix."""
    index = NgramIndex()
    for i, token in enumerate(text):
        index.extend([token])
        known = text[: i + 1]
        draft = index.propose(num_tokens)
        if not index.match_len:
            assert draft == []
            continue
        assert len(draft) == num_tokens
        suffix = known[-index.match_len :]
        read_on = known + draft  # an occurrence near the end is continued by the proposal itself
        assert any(
            read_on[end - len(suffix) : end] == suffix and read_on[end : end + num_tokens] == draft
            for end in range(len(suffix), len(known))
        )


@given(texts, st.lists(st.integers(0, 60), max_size=5))
@settings(max_examples=50, deadline=None)
def test_commits_of_any_size_build_the_same_index(text: list[int], cuts: list[int]) -> None:
    """A draft that depends on how tokens were grouped into commits makes runs unrepeatable."""
    at_once, in_parts = NgramIndex(), NgramIndex()
    at_once.extend(text)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for begin, end in pairwise(bounds):
        in_parts.extend(text[begin:end])
    assert (at_once.match_len, at_once.propose(8)) == (in_parts.match_len, in_parts.propose(8))


def test_an_empty_text_proposes_nothing() -> None:
    """The first step of a request comes before any token."""
    index = NgramIndex()
    assert (index.match_len, index.propose(4)) == (0, [])


def test_the_most_recent_occurrence_is_continued() -> None:
    """A variable renamed in the last edit is proposed under its old name for ever."""
    index = NgramIndex()
    index.extend([5, 6, 1, 8, 5, 6, 2, 9, 5, 6])
    assert index.match_len == 2
    assert index.propose(3) == [2, 9, 5]
    index.extend([3, 7, 5, 6])
    assert index.propose(2) == [3, 7]


def test_a_periodic_text_is_continued_periodically() -> None:
    """A draft that stops at the end of the text wastes the width on tables, rules and loops."""
    index = NgramIndex()
    index.extend([1, 2, 3, 1, 2, 3, 1])
    assert index.match_len == 4
    assert index.propose(8) == [2, 3, 1, 2, 3, 1, 2, 3]


def test_proposing_leaves_no_trace() -> None:
    """Drafts that are rejected later must not enter the index."""
    index = NgramIndex()
    index.extend([1, 2, 1])
    assert index.propose(0) == []
    assert [index.propose(5) for _ in range(3)] == [[2, 1, 2, 1, 2]] * 3
    assert (len(index), index.match_len) == (3, 1)


def made_up_text(num_tokens: int) -> list[int]:
    """Words by Zipf's law and phrases that come back, about as often as in code."""
    rng = random.Random(1)
    text: list[int] = []
    while len(text) < num_tokens:
        if len(text) > 100 and rng.random() < 0.1:
            begin = rng.randrange(len(text) - 40)
            text.extend(text[begin : begin + rng.randrange(2, 40)])
        else:
            text.append(int(5000 ** rng.random()))
    return text[:num_tokens]


@pytest.mark.parametrize(
    ("name", "text", "max_bytes_per_token"),
    [
        ("text", made_up_text(20_000), 250),
        ("one token", [7] * 20_000, 60),
        ("worst case", [1] + [2] * 10_000 + [3] + [2] * 9_998, 450),
    ],
)
def test_memory_is_linear_in_the_text(name: str, text: list[int], max_bytes_per_token: int) -> None:
    """An index with a dict per state costs more than the request's key-value cache."""
    tracemalloc.start()
    index = NgramIndex()
    index.extend(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < max_bytes_per_token * len(text), f"{name}: {peak / len(text):.0f} bytes per token"

"""What is asked."""

import pytest

from lampejo.bench.texts import ALL
from lampejo.bench.workloads import CATEGORIES, CONCURRENT, EDITING, long_prompt, mixed


@pytest.mark.parametrize("name", CATEGORIES)
def test_each_category_has_eight_different_prompts_or_more(name):
    """V4: natural prompts, and enough of them."""
    prompts = [prompt[-1]["content"] for prompt in CATEGORIES[name]]
    assert len(set(prompts)) == len(prompts) >= 8
    assert all(prompt[-1]["role"] == "user" for prompt in CATEGORIES[name])


def test_texts_to_edit_have_the_length_of_real_ones():
    """150 to 400 tokens each, at about four characters a token."""
    assert all(500 <= len(text) <= 1700 for _, text in EDITING)
    assert len({text for _, text in EDITING}) == len(EDITING)


def test_requests_beside_each_other_ask_different_things():
    """Fault: sixteen times the same prompt, of which the prefix cache answers fifteen."""
    assert len(set(map(repr, mixed(16)))) == 16
    assert mixed(4)[0] in CATEGORIES[CONCURRENT[0]]
    assert mixed(16, skip=16)[0] not in mixed(16)


def test_long_prompts_have_the_length_asked_for_and_never_more():
    """Fault: a prompt over the context is an error, one far below it measures something else."""

    def count(messages):
        return len(messages[0]["content"])

    for num_tokens in (100, 1000, 5000):
        prompt = long_prompt(num_tokens, count)
        assert prompt is not None and num_tokens - 1 <= count(prompt) <= num_tokens
    assert long_prompt(10**6, count) is None


def test_long_prompts_repeat_nothing():
    """V4: a text that repeats itself flatters n-gram drafts."""
    lines = [line for text in ALL for line in text.splitlines() if len(line) > 40]
    assert len(set(lines)) == len(lines)

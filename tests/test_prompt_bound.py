"""What is refused as too long without encoding it is too long."""

import random
import sys
import unicodedata

import pytest
from tokenizers import AddedToken, normalizers, pre_tokenizers

import tokenizer_samples as samples
from lampejo import prompt_bound
from lampejo.errors import UserError
from lampejo.prompt_bound import _UNSTABLE, PromptBound
from lampejo.tokenizer import from_gguf
from scripted import make_tokenizer, scripted_llm

ODD = ["e\u0301", "\u1100\u1161\u11a8", "\uac00\u11a8", "\u212b", "\u2126\u0313\u0301\u0345", "\u1fef", "か\u3099", "a"]


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "qwen35", "llama-bpe"])
def test_no_text_is_told_longer_than_it_is(pre, monkeypatch):
    """Fault: a prompt that has room refused; NFC, special tokens and the cuts between parts included."""
    monkeypatch.setattr(prompt_bound, "_PART", 7)
    tokenizer = from_gguf(samples.gguf_metadata(pre))
    bound = PromptBound(tokenizer, 0)
    rng = random.Random(4)
    odd = ["".join(rng.choices([*ODD, *samples.SPECIALS, "\n", " "], k=30)) for _ in range(300)]
    spelled = ["".join(tokenizer.token_text(i).text for i in rng.choices(range(256, 400), k=9)) for _ in range(300)]
    num_told = 0
    for text in [*samples.TEXTS, *samples.random_texts(seed=5, count=500), *odd, *spelled]:
        num_tokens = len(tokenizer.encode(text, add_special_tokens=False))
        assert not bound.is_longer(text, num_tokens), text
        num_told += bound.is_longer(text, num_tokens // 20)
    assert num_told > 20


def test_characters_that_are_counted_stay_in_nfc():
    """Alone, after one another, and whatever is written before or behind: no composition has one as its second part."""
    stable = [char for char in map(chr, range(sys.maxunicode + 1)) if not _UNSTABLE.search(char)]
    assert len(stable) > 30_000
    assert all(unicodedata.normalize("NFC", char) == char and not unicodedata.combining(char) for char in stable)
    seconds = set()
    for code in range(sys.maxunicode + 1):
        parts = unicodedata.decomposition(chr(code)).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            seconds.add(chr(int(parts[1], 16)))
    seconds |= {chr(code) for code in [*range(0x1161, 0x1176), *range(0x11A8, 0x11C3)]}
    assert seconds and not seconds & set(stable)


def test_a_tokenizer_that_may_drop_text_has_no_bound():
    """Fault: a bound that is none where a token swallows spaces; bytes that have no token are not counted."""
    text = "ab" * 5000
    for change in ("none", "strip", "normalizer", "split"):
        tokenizer = from_gguf(samples.gguf_metadata("smollm"))
        if change == "strip":
            tokenizer.backend.add_tokens([AddedToken("<x>", lstrip=True)])
        elif change == "normalizer":
            tokenizer.backend.normalizer = normalizers.NFKC()
        elif change == "split":
            tokenizer.backend.pre_tokenizer = pre_tokenizers.Split("a", "removed")
        assert PromptBound(tokenizer, 0).is_longer(text, 10) == (change == "none")
    few = PromptBound(make_tokenizer(), 0)
    longest = len("<none>")
    assert few.is_longer("ab" * 60, 120 // longest - 1) and few.is_longer("aé" * 60, 60 // longest - 1)
    assert not few.is_longer("aé" * 60, 60 // longest)
    assert len(make_tokenizer().encode("aé" * 50)) == 50


def test_a_prompt_that_is_far_too_long_is_refused_without_encoding_it(monkeypatch):
    """Fault: seconds of work on megabytes that have no room anyway."""
    with scripted_llm(lambda text: 5, max_context=64) as llm:
        encode = llm.tokenizer.encode
        long = "ab" * 1000
        complaints = []
        for prompt in (long, [{"role": "user", "content": long}], llm.tokenizer.encode(long)):
            monkeypatch.setattr(llm.tokenizer, "encode", lambda *_, **__: pytest.fail("it was encoded"))
            with pytest.raises(UserError, match="leaves no room in the context of 64") as caught:
                llm.stream(prompt)
            complaints.append(str(caught.value))
        monkeypatch.setattr(llm.tokenizer, "encode", encode)
        assert complaints[0] == complaints[1] and "more than 64 tokens" in complaints[0]
        assert "has 2000 tokens" in complaints[2]
        assert len(llm.encode(long)) == 2000
        assert llm.generate("ab" * 20, max_tokens=2).num_prompt_tokens == 40

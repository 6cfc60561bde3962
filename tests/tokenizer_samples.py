"""Small vocabularies and texts for the tests of tokenizer, text and chat; built here, nothing is downloaded."""

import functools
import json
import random
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from lampejo.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "Hello world",
    "The quick brown fox jumps over the lazy dog.",
    "don't I'll we've you're he'd it's I'm DON'T I'LL WE'VE 'tis ''s 'S",
    "it'Sabc IT'LLxyz he'Dog I'mine o'reilly they'Rex",
    "def f(x, *args):\n    if x != 0:\n        return x**2  # square\n\treturn None\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] << 2; }\r\n\r\n",
    "a 123 45.67 x2 1,000,000 2024-12-31 007 1e-5 0xFF",
    "a1b22c333d4444e55555",
    "Olá! A ação não é só emoção: coração, pão, às três, você, üöä.",
    "日本語のテキスト、中文文本。한국어 텍스트",
    "Привет, мир! שלום עולם مرحبا بالعالم नमस्ते",
    "😀 🎉🎉 👩‍👩‍👧‍👦 🇧🇷 é́ ñ",
    "  leading,   runs    of     spaces  and trailing   ",
    "\n\n\n\t\t mixed \t\n \n  whitespace\r\n \r x\n",
    "tabs\tand\u00a0no-break\u3000ideographic\u2003em spaces",
    "\"quotes\" 'single' «guillemets» “curly” `code` ```block```",
    "!!! ??? ... --- *** ### $$$ %%% &&& (((x))) [[y]] {{z}} <<>>",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "text<|endoftext|>text <|im_end|><|im_end|> <|not_special|> <|im_start",
    "https://example.org/a/b?c=d&e=%20#f user@mail.example",
    "x" * 300 + " " * 70 + "\n" * 9,
    "e\u0301 a\u0308 n\u0303",
]
"""The last one is decomposed (not NFC)."""

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = ["<think>", "</think>", "<tool_call>"]


@functools.cache
def _trained() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Tokens and merges of a byte-level BPE whose merges cross words, digits and lines, so that every split shows."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=2000, min_frequency=1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    pieces = [text[i : i + 6] for text in TEXTS for i in range(0, len(text), 2)]
    numbers = ["123", "45", "12345", "123", "1234"] * 9
    backend.train_from_iterator([*pieces, *(piece.lower() for piece in pieces), *numbers], trainer)
    vocab = backend.get_vocab()
    merges = json.loads(backend.to_str())["model"]["merges"]
    return tuple(sorted(vocab, key=vocab.__getitem__)), tuple(" ".join(merge) for merge in merges)


def gguf_metadata(pre: str, /, **changes: Any) -> dict[str, Any]:
    """Tokenizer metadata of a GGUF file: specials first, then the vocabulary, then user-defined tokens."""
    tokens, merges = _trained()
    metadata: dict[str, Any] = {
        "general.architecture": "qwen2" if pre == "qwen2" else "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*SPECIALS, *tokens, *USER_DEFINED],
        "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * len(tokens) + [4] * len(USER_DEFINED),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
    }
    metadata.update({f"tokenizer.ggml.{key}": value for key, value in changes.items()})
    return {key: value for key, value in metadata.items() if value is not None}


@functools.cache
def _trained_marked() -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Tokens and merges of words marked by "▁"; rare characters are left to the bytes."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=220, limit_alphabet=60, show_progress=False)
    backend.train_from_iterator([*TEXTS, "the " * 50, "a time " * 50, "    x   y" * 9], trainer)
    vocab = backend.get_vocab()
    merges = json.loads(backend.to_str())["model"]["merges"]
    return tuple(sorted(vocab, key=vocab.__getitem__)), tuple((left, right) for left, right in merges)


def sentencepiece_backend(decoder: str = "llama") -> Backend:
    """SentencePiece-like: words marked by "▁", single bytes for all other characters."""
    words, merges = _trained_marked()
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocab |= {word: 259 + i for i, word in enumerate(words)}
    backend = Backend(
        models.BPE(vocab=vocab, merges=list(merges), unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    if decoder == "llama":
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        backend.normalizer = None
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return backend


def sentencepiece_tokenizer(decoder: str = "llama") -> Tokenizer:
    return Tokenizer(sentencepiece_backend(decoder), {"bos_token": "<s>", "eos_token": "</s>"})


def random_texts(seed: int, count: int) -> list[str]:
    """Shuffled pieces of TEXTS, joined without regard to word borders, and characters from all of Unicode."""
    rng = random.Random(seed)
    pieces = [text[i : i + 7] for text in TEXTS for i in range(0, len(text), 5)]
    planes = [(0x20, 0x7E), (0xA0, 0x24F), (0x370, 0x5FF), (0x900, 0x97F), (0x3040, 0x30FF), (0x4E00, 0x9FFF)]
    planes += [(0x1F300, 0x1F6FF), (0x2000, 0x206F), (0x20A0, 0x20BF)]
    texts = []
    for _ in range(count):
        parts = rng.choices(pieces, k=rng.randint(1, 12))
        parts += ["".join(chr(rng.randint(*rng.choice(planes))) for _ in range(rng.randint(0, 9)))]
        rng.shuffle(parts)
        texts.append("".join(parts))
    return texts

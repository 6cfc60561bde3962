"""Texts that are certainly too long, told without encoding them: encoding takes a second for each 100,000 words."""

import json
import re
from functools import cached_property
from typing import Any

import numpy as np

from lampejo.errors import PromptTooLong
from lampejo.tokenizer import Tokenizer

_PART = 1 << 18  # characters that are looked at without letting another thread of Python in
# Characters that NFC leaves as they are, unless one that is not among them follows.
_STABLE = (
    "\x00-\u02ff\u0391-\u03ce\u0400-\u0482\u05d0-\u05ea\u0620-\u064a\u0e01-\u0e30\u2010-\u2027\u3000-\u3029"
    "\u3041-\u3096\u30a1-\u30fa\u3400-\u9fff\uac00-\ud7a3\uff01-\uff5e\U0001f300-\U0001faff"
)
_UNSTABLE = re.compile(f"[{_STABLE}]?[^{_STABLE}]+")


class PromptBound:
    """A lower bound of how many tokens a text is.

    Tokens of a byte-level vocabulary cover the bytes of a text, so there are at least as many as its bytes, by those
    of the longest token. The longest tokens are spaces and dashes; the runs of equal bytes in a text are no more than
    those of its tokens together, so there are also at least as many tokens as runs, by the most runs that one token
    has. Taking something out makes neither more, so what NFC might change, and bytes without a token, are not counted.
    """

    def __init__(self, tokenizer: Tokenizer, max_context: int) -> None:
        self._tokenizer = tokenizer
        self._max_context = max_context

    def check(self, text: str) -> None:
        """``PromptTooLong`` for a text that certainly has no room in the context; no word about others."""
        if self.is_longer(text, self._max_context):
            raise PromptTooLong(f"more than {self._max_context}", self._max_context)

    def is_longer(self, text: str, num_tokens: int) -> bool:
        """Whether it is certainly more tokens than that; False tells nothing."""
        if len(text) <= num_tokens or self._most is None:
            return False
        runs_left, bytes_left = (num_tokens * most for most in self._most)
        is_changed = self._tokenizer.backend.normalizer is not None
        for start in range(0, len(text), _PART):
            part = text[start : start + _PART]
            if is_changed:
                part = (part if part.isascii() else _UNSTABLE.sub("", part))[:-1]
            raw = part.encode("utf-8", "surrogatepass").translate(None, self._dropped)
            runs_left -= max(0, _num_runs(raw) - 1)  # one may go on from the part before
            bytes_left -= len(raw)
            if runs_left < 0 or bytes_left < 0:
                return True
        return False

    @cached_property
    def _dropped(self) -> bytes:
        """Bytes without a token of their own."""
        tokens = [self._tokenizer.token_text(i).bytes for i in range(self._tokenizer.vocab_size)]
        return bytes(set(range(256)) - {raw[0] for raw in tokens if len(raw) == 1})

    @cached_property
    def _most(self) -> tuple[int, int] | None:
        """Runs and bytes in one token; None where tokens need not cover the text."""
        if not _covers_text(self._tokenizer):
            return None
        pieces = [self._tokenizer.token_text(i).bytes for i in range(self._tokenizer.vocab_size)]
        pieces += [token.content.encode() for token in self._tokenizer.backend.get_added_tokens_decoder().values()]
        return max(map(_num_runs, pieces)), max(map(len, pieces))


def _covers_text(tokenizer: Tokenizer) -> bool:
    """Whether each byte of a text that has a token, after NFC if that is the normalizer, is a part of one."""
    backend = tokenizer.backend
    normalizer = {} if backend.normalizer is None else json.loads(backend.normalizer.__getstate__())
    splitter: dict[str, Any] = {"type": "Sequence", "pretokenizers": []}
    if backend.pre_tokenizer is not None:
        splitter = json.loads(backend.pre_tokenizer.__getstate__())
    steps = splitter["pretokenizers"] if splitter["type"] == "Sequence" else [splitter]
    return (
        tokenizer.rules.byte_level
        and normalizer.get("type") in (None, "NFC")
        and all(step["type"] in ("Split", "ByteLevel", "Digits") for step in steps)
        and all(step.get("behavior") != "Removed" for step in steps)
        and not any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    )


def _num_runs(raw: bytes) -> int:
    """Of equal bytes."""
    values = np.frombuffer(raw, dtype=np.uint8)
    return 1 + int(np.count_nonzero(values[1:] != values[:-1])) if len(values) else 0

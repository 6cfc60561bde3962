"""Ids into text as they are committed: incremental decoding and stop strings of one request."""

import codecs
from collections.abc import Sequence
from functools import lru_cache

from lampejo.errors import UserError
from lampejo.tokenizer import Tokenizer


class TextStream:
    """The visible text of one request, token by token.

    For any way of cutting the ids, the pieces taken join to ``tokenizer.decode(ids)``, cut before the earliest stop
    string. Cost per token does not grow with the text. ``prompt_ids``: give them when the text continues a raw prompt,
    so that a SentencePiece-like vocabulary keeps the space before the first word; without them the text stands alone.
    Stop strings completed before ``min_tokens`` tokens are pushed do not count.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), prompt_ids: Sequence[int] = (), min_tokens: int = 0
    ) -> None:
        if isinstance(stop, str) or any(not isinstance(text, str) or not text for text in stop):
            raise UserError("A stop string is empty or no string.", "Give a list of strings of one or more characters.")
        self.num_tokens = 0  # tokens pushed, invisible ones and the one that completed a stop string included
        self.stop_match: str | None = None  # the stop string that ended the text
        self._settings = (tokenizer, stop, prompt_ids, min_tokens)
        self._min_tokens = min_tokens
        self._stops = [_StopString(text) for text in dict.fromkeys(stop)]
        continues = any(tokenizer.piece(token_id) for token_id in prompt_ids)
        self._decoder = _ByteDecoder(tokenizer) if tokenizer.rules.byte_level else _PieceDecoder(tokenizer, continues)
        self._taken: list[str] = []
        self._pending: list[str] = []
        self._finished = False

    def fresh(self) -> "TextStream":
        """An empty one with the same settings, for another answer to the same prompt."""
        return TextStream(*self._settings)

    @property
    def stopped(self) -> bool:
        """A stop string has been completed; the text is final."""
        return self.stop_match is not None

    @property
    def text(self) -> str:
        """The whole text so far, taken or not."""
        return "".join(self._taken) + "".join(self._pending)

    def push(self, token_id: int) -> bool:
        """Add one committed token. True when a stop string is complete; tokens after that are ignored."""
        if self.stop_match is None:
            self.num_tokens += 1
            self._add(self._decoder.push(token_id))
        return self.stop_match is not None

    def take(self) -> str:
        """Text that is final and not yet taken; without a suffix that may become a stop string."""
        held = 0 if self._finished or self.stopped else max((stop.matched for stop in self._stops), default=0)
        pending = "".join(self._pending)
        ready = pending[: len(pending) - held]
        self._taken.append(ready)
        self._pending = [pending[len(ready) :]]
        return ready

    def finish(self) -> str:
        """End of the request: the rest of the text, incomplete characters as U+FFFD. Afterwards only ``text``."""
        if not self._finished and not self.stopped:
            self._add(self._decoder.finish())
        self._finished = True
        return self.take()

    def _add(self, piece: str) -> None:
        if not piece:
            return
        self._pending.append(piece)
        cut: int | None = None  # where the text ends, from the start of the piece; negative: in text held back before
        for stop in self._stops:
            start = stop.feed(piece)
            if start is not None and self.num_tokens >= self._min_tokens and (cut is None or start < cut):
                cut, self.stop_match = start, stop.text
        if cut is not None:
            pending = "".join(self._pending)
            self._pending = [pending[: len(pending) - len(piece) + cut]]


class _StopString:
    """Knuth-Morris-Pratt over one stop string; ``matched`` is how much of it the text now ends with."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._fallback = _borders(text)

    def feed(self, piece: str) -> int | None:
        """Where the first occurrence completed by ``piece`` begins, from the start of the piece; None without one."""
        text, fallback, matched = self.text, self._fallback, self.matched
        if not matched and text[0] not in piece:
            return None
        found: int | None = None
        for i, char in enumerate(piece):
            while matched and text[matched] != char:
                matched = fallback[matched - 1]
            if text[matched] == char:
                matched += 1
                if matched == len(text):
                    found = i + 1 - len(text) if found is None else found
                    matched = fallback[-1]
        self.matched = matched
        return found


@lru_cache(maxsize=1024)
def _borders(text: str) -> list[int]:
    """Of each beginning of the text the longest proper border. Remembered, since answers to one call have the same stop
    strings."""
    borders, border = [0] * len(text), 0
    for i in range(1, len(text)):
        while border and text[i] != text[border]:
            border = borders[border - 1]
        if text[i] == text[border]:
            border += 1
        borders[i] = border
    return borders


class _ByteDecoder:
    """Byte-level vocabularies: UTF-8 in pieces, each maximal wrong part one U+FFFD, as the whole decode does it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._piece = tokenizer.piece
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        return self._decode(self._piece(token_id))  # type: ignore[arg-type]

    def finish(self) -> str:
        return self._decode(b"", True)


class _PieceDecoder:
    """SentencePiece-like vocabularies: strings, and runs of single bytes.

    A run of bytes is held until it ends, because the whole decode judges it as one: valid UTF-8 or one U+FFFD a byte.
    """

    def __init__(self, tokenizer: Tokenizer, continues: bool) -> None:
        self._piece = tokenizer.piece
        self._run = bytearray()
        self._strip = 0 if continues else tokenizer.rules.strip_spaces
        self._bare_first = "" if continues else tokenizer.rules.bare_first
        self._tokenizer = tokenizer

    def push(self, token_id: int) -> str:
        piece = self._piece(token_id)
        if isinstance(piece, bytes):
            self._run += piece
            return ""
        if self._bare_first and piece:
            piece, self._bare_first = self._bare(token_id), ""
        return self._clean(self._close_run() + piece) if piece else ""

    def finish(self) -> str:
        return self._clean(self._close_run())

    def _bare(self, token_id: int) -> str:
        token = self._tokenizer.backend.id_to_token(token_id) or ""
        return token.replace(self._bare_first, "")

    def _close_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _clean(self, text: str) -> str:
        while self._strip and text.startswith(" "):
            text, self._strip = text[1:], self._strip - 1
        if text:
            self._strip = 0
        return text

"""Tries grammars in a process of its own, which is ended when one takes too much time or memory there.

llguidance looks at its limits now and then only. What it takes in between cannot be foreseen of every grammar, and not
be stopped in this process.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from lampejo.errors import Busy
from lampejo.grammar_costs import LIMITS, STACK, with_large_stack

MAX_SECONDS = 1.0  # of a processor's time, to compile a grammar and its first masks
MAX_BYTES = 1 << 30  # beyond the vocabulary
MAX_WAITING = 3  # trials at once, of which one runs; each holds one of the server's few threads
_WALL_SECONDS = 15  # where others keep the processors busy
_CHILD = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import lampejo.grammar_trial as t; t.serve()"


class Pieces:
    """A vocabulary as llguidance reads it: the bytes of each token. Those of special ids are never allowed. encode: ids
    of a text, as the model's tokenizer would write it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self,
        tokens: Sequence[bytes],
        special_ids: Sequence[int],
        eos_ids: Sequence[int],
        encode: Callable[[str], list[int]] = lambda text: [],
    ) -> None:
        self.tokens, self.special_token_ids = list(tokens), list(special_ids)
        self.eos_token_id = eos_ids[0]
        self.eos_ids = list(eos_ids)
        self._encode = encode
        special = frozenset(special_ids)
        self._ids = {piece: i for i, piece in enumerate(tokens) if i not in special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens with exactly these bytes, for what a grammar leaves no choice about: as the model's tokenizer would
        write it or, where that adds or loses something (a space before the first word), the longest first."""
        raw = text.encode() if isinstance(text, str) else text
        ids = self._encode(raw.decode(errors="replace"))
        if b"".join(self.tokens[i] for i in ids) == raw:
            return ids
        ids, start = [], 0
        while start < len(raw):
            sizes = range(min(self._longest, len(raw) - start), 0, -1)
            size = next((size for size in sizes if raw[start : start + size] in self._ids), 0)
            if not size:
                break
            ids.append(self._ids[raw[start : start + size]])
            start += size
        return ids

    def index(self) -> LLTokenizer:
        pieces: Any = self  # what it takes is told by its attributes, not its class
        return LLTokenizer(pieces, eos_token=self.eos_ids)


class Trials:
    """One process for all grammars of a vocabulary, from the first trial on; it forks for each."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._places = threading.Semaphore(MAX_WAITING)
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    def passes(self, text: str) -> bool:
        """Whether a grammar, as llguidance reads it, is compiled and gives its first masks within the bounds above; an
        error of it does too. ``Busy`` if others wait already."""
        if not self._places.acquire(blocking=False):
            raise Busy("Too many large grammars are being tried at once.", "Try again in a few seconds.")
        try:
            with self._lock:
                try:
                    return self._ask(text)
                except (OSError, EOFError):  # it was ended from outside
                    self._connection = None
                    return self._ask(text)
        finally:
            self._places.release()

    def _ask(self, text: str) -> bool:
        if self._connection is None:
            self._connection = self._start()
        self._connection.send(text)
        passed: bool = self._connection.recv()
        return passed

    def _start(self) -> Connection:
        ours, theirs = Pipe()
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, json.dumps(sys.path), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        weakref.finalize(ours, _end, process)
        ours.send((self._pieces.tokens, self._pieces.special_token_ids, self._pieces.eos_ids))
        return ours


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()


def serve() -> None:
    """In the process: a trial for each text that comes, until nobody can send any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the other
    os.nice(5)
    with contextlib.suppress(EOFError, OSError), Connection(int(sys.argv[2])) as connection:
        indexed = Pieces(*connection.recv()).index()
        while True:
            text = connection.recv()
            child = os.fork()
            if child == 0:
                _try(indexed, text)
            connection.send(os.waitpid(child, 0)[1] == 0)


def _try(indexed: LLTokenizer, text: str) -> None:
    """Ends its process, by a signal or an abort where a bound is met."""
    import resource

    signal.alarm(_WALL_SECONDS)
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # not everywhere
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + STACK + MAX_BYTES,) * 2)

    def work() -> None:
        matcher = LLMatcher(indexed, text, log_level=0, limits=LIMITS)
        for _ in range(2):
            matcher.compute_bitmask()

    try:
        with_large_stack(work)
    except BaseException:
        os._exit(1)
    os._exit(0)

"""Grammars in processes of their own, which the system ends when one takes too much time or memory there.

llguidance looks at its limits now and then only. What it takes in between cannot be foreseen of every grammar, and not
be stopped in this process. Large ones are tried elsewhere before they are compiled here; those that join patterns,
whose worst may come with any token, stay elsewhere for all of an answer.
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
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from lampejo.errors import Busy
from lampejo.grammar_costs import LIMITS, STACK, with_large_stack

MAX_SECONDS = 0.5  # of a processor's time, to compile a grammar and its first mask
MAX_BYTES = 1 << 30  # beyond the vocabulary
MAX_STEP_SECONDS = 0.3  # of a grammar that is held elsewhere: to compile it, for a mask, or for a token
MAX_HELD = 16  # answers by such grammars at once
MAX_HELD_BYTES = 1 << 28  # of each, beyond the vocabulary
MAX_WAITING = 3  # trials at once, of which one runs; each holds one of the server's few threads
_WALL_SECONDS = 15  # where others keep the processors busy
_CHILD = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import lampejo.grammar_trial as t; t.serve()"


class TokenTable:
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
        table: Any = self  # what it takes is told by its attributes, not its class
        return LLTokenizer(table, eos_token=self.eos_ids)


class Trials:
    """One process for all grammars of a vocabulary, from the first trial on; it forks for each."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._places = threading.Semaphore(MAX_WAITING)
        self._held = threading.Semaphore(MAX_HELD)
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._process_id = 0

    def hold(self, text: str) -> "HeldMatcher":
        """A matcher of a grammar in a process of its own. ``Busy`` if there are too many."""
        if not self._held.acquire(blocking=False):
            raise Busy(
                f"{MAX_HELD} answers by grammars that join patterns are being written.", "Try again in a few seconds."
            )
        ours, theirs = Pipe()
        held = HeldMatcher(ours)
        weakref.finalize(held, self._held.release)
        with theirs:
            self._do(text, theirs)
        held.wait()
        return held

    def passes(self, text: str) -> bool:
        """Whether a grammar, as llguidance reads it, is compiled and gives its first masks within the bounds above; an
        error of it does too. ``Busy`` if others wait already."""
        return self._do(text)

    def _do(self, text: str, theirs: Connection | None = None) -> bool:
        if not self._places.acquire(blocking=False):
            raise Busy("Too many large grammars are being tried at once.", "Try again in a few seconds.")
        try:
            with self._lock:
                try:
                    return self._ask(text, theirs)
                except (OSError, EOFError):  # it was ended from outside
                    self._connection = None
                    return self._ask(text, theirs)
        finally:
            self._places.release()

    def _ask(self, text: str, theirs: Connection | None) -> bool:
        if self._connection is None:
            self._connection = self._start()
        self._connection.send((text, theirs is not None))
        if theirs is not None:
            send_handle(self._connection, theirs.fileno(), self._process_id)
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
        self._process_id = process.pid
        weakref.finalize(ours, _end, process)
        ours.send((self._table.tokens, self._table.special_token_ids, self._table.eos_ids))
        return ours


class HeldMatcher:
    """What a guide needs of llguidance's matcher, from the process at the other end. It fails when that one ends."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._error, self._is_stopped = "", False

    def wait(self) -> Any:
        """For what the other end says next; it begins when the grammar is compiled."""
        try:
            answer, self._error, self._is_stopped = self._connection.recv()
            return answer
        except (EOFError, OSError):
            self._error = f"too complex: {MAX_STEP_SECONDS} seconds or {MAX_HELD_BYTES >> 20} MB are not enough for it"
            return None

    def _ask(self, request: int | None) -> Any:
        with contextlib.suppress(OSError):  # it has ended, which is met when it is waited for
            self._connection.send(request)
        return self.wait()

    def compute_bitmask(self) -> bytes:
        return self._ask(None) or b""

    def consume_token(self, token_id: int) -> bool:
        return bool(self._ask(token_id))

    def is_error(self) -> bool:
        return bool(self._error)

    def get_error(self) -> str:
        return self._error

    def is_stopped(self) -> bool:
        return self._is_stopped or self.is_error()

    def stop_reason(self) -> str:
        return ""


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()


def serve() -> None:
    """In the process: a fork for each text that comes, until nobody can send any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the other
    with contextlib.suppress(EOFError, OSError), Connection(int(sys.argv[2])) as connection:
        indexed, ended = TokenTable(*connection.recv()).index(), list[int]()
        while True:
            text, is_held = connection.recv()
            theirs = Connection(recv_handle(connection)) if is_held else None
            child = os.fork()
            if child == 0:
                connection.close()
                _in_fork(indexed, text, theirs)
            if theirs is not None:
                theirs.close()
                ended.append(child)
            connection.send(is_held or os.waitpid(child, 0)[1] == 0)
            ended = [child for child in ended if os.waitpid(child, os.WNOHANG)[0] == 0]


def _in_fork(indexed: LLTokenizer, text: str, theirs: Connection | None) -> None:
    """Ends its process: by a signal or an abort where a bound is met."""
    try:
        _bound(MAX_BYTES if theirs is None else MAX_HELD_BYTES)
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS if theirs is None else MAX_STEP_SECONDS)
        if theirs is None:
            os.nice(5)  # nobody's next token waits for it
            signal.alarm(_WALL_SECONDS)
            with_large_stack(lambda: _matcher(indexed, text).compute_bitmask())
        else:
            _hold(with_large_stack(lambda: _matcher(indexed, text)), theirs)
    except BaseException:
        os._exit(1)
    os._exit(0)


def _matcher(indexed: LLTokenizer, text: str) -> LLMatcher:
    return LLMatcher(indexed, text, log_level=0, limits=LIMITS)


def _bound(num_bytes: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # not everywhere
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + STACK + num_bytes,) * 2)


def _hold(matcher: LLMatcher, connection: Connection) -> None:
    answer: Any = None
    while True:
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send((answer, matcher.get_error() if matcher.is_error() else "", matcher.is_stopped()))
        request = connection.recv()
        signal.setitimer(signal.ITIMER_PROF, MAX_STEP_SECONDS)
        answer = matcher.compute_bitmask() if request is None else matcher.consume_token(request)

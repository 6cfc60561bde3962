"""The engine's thread: requests go in through one inbox, deltas come out through each request's own outbox."""

import asyncio
import atexit
import contextlib
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator

from lampejo.engine import Engine
from lampejo.errors import UserError
from lampejo.request import Request, TokenDelta

Item = TokenDelta | BaseException


class SyncOutbox:
    """Deltas of one request for a thread that waits for them."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Item] = queue.SimpleQueue()

    def put(self, item: Item) -> None:
        self._queue.put(item)

    def __iter__(self) -> Iterator[TokenDelta]:
        """Until the request ends; raises what ended the engine."""
        while True:
            item = self._queue.get()
            if isinstance(item, BaseException):
                raise item
            yield item
            if item.finish_reason:
                return


class AsyncOutbox:
    """Deltas for one coroutine of ``loop``. Its methods are called in the loop's own thread, which takes its time from
    the kernels: what would be an ``asyncio.Queue`` and a timeout around it is spelled out."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._items: deque[Item] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Item) -> None:
        self._items.append(item)
        self._wake()

    def interrupt(self, error: BaseException) -> None:
        """``get`` raises it next, whatever else is there."""
        self._items.appendleft(error)
        self._wake()

    async def get(self) -> TokenDelta:
        """The next delta; raises what ended the engine."""
        while not self._items:
            self._waiter = self.loop.create_future()
            await self._waiter
        item = self._items.popleft()
        if isinstance(item, BaseException):
            raise item
        return item

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


Outbox = SyncOutbox | AsyncOutbox


class Frontend:
    """Owns the engine and the one thread that touches it. ``submit``, ``abort``, ``close`` may be called anywhere.

    The thread keeps the frontend and its engine alive until it is told to end.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.error: BaseException | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outboxes: dict[int, Outbox] = {}
        # Between submit and the end of the thread, so that no request is left behind. Reentrant, because the garbage
        # collector may call ``stop`` in the middle of either.
        self._lock = threading.RLock()
        self._closed = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="lampejo-engine", daemon=True)
        self._thread.start()
        _alive.add(self)

    def submit(self, request: Request, outbox: Outbox) -> None:
        """Queues a request. After a fatal error every submission fails at once with it."""
        if os.getpid() != self._pid:
            raise RuntimeError("The model was loaded before this process was forked; load it again in this process.")
        with self._lock:
            if self.error is not None:
                raise RuntimeError("The engine has failed; load the model again.") from self.error
            if self._closed:
                raise RuntimeError("The engine is closed.")
            request.submitted_at = time.perf_counter()
            self._inbox.put(lambda: self._add(request, outbox))

    def abort(self, request: Request) -> None:
        """Ends a request; its outbox gets no more deltas. Harmless when it is over already."""
        self._inbox.put(lambda: self._abort(request))

    def stop(self) -> None:
        """Aborts what runs and lets the thread end, without waiting for it."""
        if os.getpid() != self._pid:  # a fork has no thread, and another may have held the lock when it was made
            return
        with self._lock:
            self._closed = True
        self._inbox.put(None)

    def close(self) -> None:
        """Aborts what runs and ends the thread."""
        self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _add(self, request: Request, outbox: Outbox) -> None:
        self._outboxes[request.id] = outbox
        self.engine.add(request)

    def _abort(self, request: Request) -> None:
        if self._outboxes.pop(request.id, None) is not None:
            self.engine.abort(request)

    def _run(self) -> None:
        try:
            while self._take_inbox():
                if self.engine.has_work:
                    self._deliver(self.engine.step())
            error: BaseException = RuntimeError("The engine is closed.")
        except BaseException as e:  # whatever it is, nobody may be left waiting
            error = e
        with self._lock:
            if not self._closed:
                self.error = error
            self._closed = True
        self._drain()
        self._put([(outbox, error) for outbox in self._outboxes.values()])
        self._outboxes.clear()

    def _take_inbox(self) -> bool:
        """Does what was asked since the last step; waits if there is nothing to do. False at the end."""
        while True:
            try:
                command = self._inbox.get(block=not self.engine.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _drain(self) -> None:
        """Registers late submissions, so that they hear of the end too."""
        while not self._inbox.empty():
            command = self._inbox.get()
            if command is not None:
                with contextlib.suppress(Exception):  # the engine may be in pieces; nobody waits for what it says now
                    command()

    def _deliver(self, deltas: list[TokenDelta]) -> None:
        self._put([(self._outboxes[d.request.id], _failure(d) or d) for d in deltas])
        for delta in deltas:
            if delta.finish_reason:
                self._outboxes.pop(delta.request.id, None)

    def _put(self, items: list[tuple[Outbox, Item]]) -> None:
        """One call per event loop and step, however many requests it serves."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Outbox, Item]]] = {}
        for outbox, item in items:
            if isinstance(outbox, AsyncOutbox):
                by_loop.setdefault(outbox.loop, []).append((outbox, item))
            else:
                outbox.put(item)
        for loop, batch in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, batch)
            except RuntimeError:  # the loop was closed; its requests have no readers any more
                for _, item in batch:
                    if isinstance(item, TokenDelta):
                        self._abort(item.request)


def _failure(delta: TokenDelta) -> BaseException | None:
    """What ends one request alone."""
    if delta.finish_reason != "error" or delta.request.guide is None:
        return None
    return UserError(f"The answer cannot go on by its grammar: {delta.request.guide.error}.", "Simplify the grammar.")


_alive: weakref.WeakSet[Frontend] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Before the interpreter comes down: a thread that is inside torch or the kernels then would abort the process."""
    for frontend in list(_alive):
        frontend.close()


def _put_all(items: list[tuple[Outbox, Item]]) -> None:
    for outbox, item in items:
        outbox.put(item)

"""Responses that notice when their reader has gone, and server-sent events (the EventSource format of HTML)."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
STALLED_S = 60.0  # that one event may wait for its reader to take those before it
_ABORT = "lampejo.abort"  # in the scope: drops the connection with all that waits to be sent

T = TypeVar("T")


def remember_abort(scope: Scope, send: Send) -> None:
    """ASGI has no word for it; uvicorn's transport is found beside ``send``, before any layer has wrapped that."""
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    if isinstance(transport, asyncio.Transport):
        scope[_ABORT] = transport.abort


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def to_json(value: Any) -> bytes:
    """Compact UTF-8. Half of a surrogate pair, which is no UTF-8, is escaped as it came."""
    return _ENCODER.encode(value).encode("utf-8", "backslashreplace")


def to_long_json(value: Any, depth: int = 5) -> bytes:
    """The same, with what stands within so many levels each by itself: no call holds the lock of Python for long."""
    if not depth or not isinstance(value, dict | list):
        return to_json(value)
    if isinstance(value, list):
        return b"[" + b",".join(to_long_json(part, depth - 1) for part in value) + b"]"
    parts = (to_json(name) + b":" + to_long_json(part, depth - 1) for name, part in value.items())
    return b"{" + b",".join(parts) + b"}"


def event(value: Any, name: str | None = None) -> bytes:
    """One server-sent event; Anthropic's have names."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + to_json(value) + b"\n\n"


class JsonResponse(Response):
    """A JSON object as the body."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


class EventStream(Response):
    """Sends events as they come, and a comment whenever nothing came for ``keep_alive_s``. When the reader goes, or
    takes nothing any more for ``STALLED_S``, the generator is closed at once, not at its next event. ``close`` is
    called at the end in any case: closing a generator that never began runs nothing of it."""

    def __init__(
        self, events: AsyncGenerator[bytes, None], keep_alive_s: float, close: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self.headers["Content-Type"] = "text/event-stream; charset=utf-8"
        del self.headers["Content-Length"]
        self.events = events
        self.keep_alive_s = keep_alive_s
        self._close = close
        self._is_sending = False
        self._at = 0.0  # when the last sending began or ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._body(receive, send, scope.get(_ABORT))
        finally:
            self._close()

    async def _body(self, receive: Receive, send: Send, abort: Callable[[], None] | None) -> None:
        self._at = time.monotonic()
        write, gone, watch = (asyncio.ensure_future(p) for p in (self._write(send), _gone(receive), self._watch(send)))
        try:
            await asyncio.wait((write, gone, watch), return_when=asyncio.FIRST_COMPLETED)
            if watch.done() and abort is not None:
                abort()
        finally:
            for task in (write, gone, watch):
                task.cancel()
            results = await asyncio.gather(write, gone, watch, return_exceptions=True)
            await self.events.aclose()
        if isinstance(results[0], Exception) and not isinstance(results[0], OSError):
            raise results[0]

    async def _write(self, send: Send) -> None:
        async for data in self.events:
            await self._send(send, data)
        await self._send(send, b"", more_body=False)

    async def _watch(self, send: Send) -> None:
        """Keeps it alive; comes to an end when the reader has stalled."""
        while True:
            left = (STALLED_S if self._is_sending else self.keep_alive_s) - (time.monotonic() - self._at)
            if left > 0:
                await asyncio.sleep(min(left, self.keep_alive_s))
            elif self._is_sending:
                return
            else:
                try:
                    async with asyncio.timeout(STALLED_S):
                        await self._send(send, KEEP_ALIVE)
                except TimeoutError:
                    return

    async def _send(self, send: Send, data: bytes, more_body: bool = True) -> None:
        self._is_sending, self._at = True, time.monotonic()
        await send({"type": "http.response.body", "body": data, "more_body": more_body})
        self._is_sending, self._at = False, time.monotonic()


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled if the client disconnects before it is there. The body must have been
    read."""
    answer = await unless(_gone(request.receive), work)
    if answer is None:
        raise ClientDisconnect
    return answer


async def unless(end: Coroutine[Any, Any, object], work: Coroutine[Any, Any, T]) -> T | None:
    """The result of ``work``; None if ``end`` comes before, and then it is cancelled."""
    tasks = asyncio.ensure_future(work), asyncio.ensure_future(end)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

"""Responses that notice when their reader has gone, and server-sent events (the EventSource format of HTML)."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

T = TypeVar("T")


def to_json(value: Any) -> bytes:
    """Compact UTF-8. Half of a surrogate pair, which is no UTF-8, is escaped as it came."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


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
    """Sends events as they come, and a comment whenever nothing came for ``keep_alive_s``. When the reader goes,
    the generator is closed at once, not at its next event. ``close`` is called at the end in any case: closing a
    generator that never began runs nothing of it."""

    def __init__(
        self, events: AsyncGenerator[bytes, None], keep_alive_s: float, close: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self.headers["Content-Type"] = "text/event-stream; charset=utf-8"
        del self.headers["Content-Length"]
        self.events = events
        self.keep_alive_s = keep_alive_s
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._body(receive, send)
        finally:
            self._close()

    async def _body(self, receive: Receive, send: Send) -> None:
        tasks = [asyncio.ensure_future(part) for part in (self._write(send), _gone(receive), self._keep_alive(send))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            await self.events.aclose()
        if isinstance(results[0], Exception) and not isinstance(results[0], OSError):
            raise results[0]

    async def _write(self, send: Send) -> None:
        self._sent_at = asyncio.get_running_loop().time()
        async for data in self.events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
            self._sent_at = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._sent_at = loop.time()
        while True:
            silent = loop.time() - self._sent_at
            if silent >= self.keep_alive_s:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
                self._sent_at, silent = loop.time(), 0.0
            await asyncio.sleep(self.keep_alive_s - silent)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled if the client disconnects before it is there. The body must have been
    read."""
    answer, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    finally:
        answer.cancel()
        gone.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

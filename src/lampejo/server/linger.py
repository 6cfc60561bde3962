"""An answer that comes before the end of the body: the rest is read and thrown away before the connection is closed.

Who closes with bytes unread resets the connection (RFC 9112, 9.6), and the client, who still sends, never sees why it
was refused.
"""

import asyncio
import contextlib

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lampejo.server.http import unless

MAX_BYTES = 256_000_000  # that are thrown away; who sends more gets the reset after all
MAX_SECONDS = 10.0


class Linger:
    """The outermost layer of the application."""

    def __init__(
        self, app: ASGIApp, ending: asyncio.Event, max_bytes: int = MAX_BYTES, max_seconds: float = MAX_SECONDS
    ) -> None:
        self.app = app
        self._ending = ending
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(scope):
            await self.app(scope, receive, send)
            return
        is_read = is_early = False
        held: Message | None = None  # the end of an answer, after which the server closes

        async def receive_seen() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = is_read or message["type"] == "http.disconnect" or not message.get("more_body", False)
            return message

        async def send_held(message: Message) -> None:
            nonlocal is_early, held
            if message["type"] == "http.response.start":
                is_early = not is_read
                if is_early:
                    MutableHeaders(scope=message)["Connection"] = "close"
            elif is_early and not message.get("more_body", False):
                held = {**message, "body": b""}
                message = {**message, "more_body": True}
            await send(message)

        async def discard() -> None:
            num_bytes = 0
            while not is_read and num_bytes <= self._max_bytes:
                num_bytes += len((await receive_seen()).get("body", b""))

        await self.app(scope, receive_seen, send_held)
        if held is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._max_seconds):
                    await unless(self._ending.wait(), discard())
            await send(held)


def _has_body(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"

"""A server whose engine is held at will, so that no test depends on how fast anything is."""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
from fastapi import FastAPI

from lampejo.api import LLM
from lampejo.server.app import make_app
from lampejo.server.config import ServerConfig
from lampejo.server.service import Service

STORY = "A flash of light, then another, and so on until the morning came. "


class Held:
    """An engine that takes a step only when it is let; it is let go at the end of the block."""

    def __init__(self, llm: LLM) -> None:
        self.plans: list[list[Any]] = []  # of each step: (prompt's text, number of known tokens)
        self._permits = threading.Semaphore(0)
        self._is_open = False
        self._verify = llm.engine.runner.verify
        llm.engine.runner.verify = self._held  # type: ignore[method-assign]

    def let(self, num_steps: int = 1) -> None:
        self._permits.release(num_steps)

    def open(self) -> None:
        self._is_open = True
        self._permits.release()

    def __enter__(self) -> "Held":
        return self

    def __exit__(self, *_: object) -> None:
        self.open()

    def _held(self, batch: Any) -> Any:
        self.plans.append([(row.request, row.num_known) for row in batch.rows])
        if not self._is_open:
            self._permits.acquire()
        return self._verify(batch)


@contextlib.asynccontextmanager
async def served(llm: LLM, **config: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Service, FastAPI]]:
    app = make_app(llm, ServerConfig(**config))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
        yield client, app.state.service, app


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what another task or thread is about to do."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


async def read_until(
    app: FastAPI, body: Any, goes: Callable[[bytes], bool], path: str = "/v1/chat/completions"
) -> tuple[int, bytes]:
    """Calls the application as a server does, event by event. The reader goes after the part for which ``goes`` says
    so. Gives the status and what was read."""
    asked, gone = False, asyncio.Event()
    status, parts = 0, []

    async def receive() -> dict[str, Any]:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        part = message.get("body", b"")
        parts.append(part)
        if not gone.is_set() and goes(part):
            gone.set()

    scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode()}
    scope |= {"query_string": b"", "root_path": "", "scheme": "http", "server": ("localhost", 80)}
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    await app(scope | {"headers": headers, "client": None}, receive, send)  # type: ignore[arg-type]
    return status, b"".join(parts)


def nothing_is_left(llm: LLM, service: Service) -> bool:
    scheduler = llm.engine.scheduler
    return service.num_active == 0 and not (scheduler.running or scheduler.waiting or llm.frontend._outboxes)

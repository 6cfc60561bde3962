"""A small server for the page: it answers what the last message asks for, as slowly or as wrongly as told."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator

import uvicorn
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse

from lampejo.web import routes

PLAIN = "The answer is **42**, as ever."
METRICS = {
    "mean_acceptance_length": 2.5,
    "draft_acceptance_rate": 0.6,
    "acceptance_histogram": [1, 2, 1],
    "num_spec_steps": 4,
    "num_accepted_draft_tokens": 4,
    "num_draft_tokens": 8,
}


class PageServer:
    """answers: what is written back to a message, by its text; a message of "wait" gets words until the reader goes.

    bodies: what was asked; key: what must be given; failure: (status, message) of the next request, once.
    """

    def __init__(self) -> None:
        self.answers: dict[str, str] = {}
        self.thoughts: dict[str, str] = {}
        self.bodies: list[dict] = []
        self.key: str | None = None
        self.failure: tuple[int, str] | None = None
        self.differs_without_drafts = False
        self.finish_reason = "stop"
        self.pace = 0.001  # seconds between two steps
        self.num_gone = 0
        self.app = FastAPI()
        self.app.include_router(routes())
        self.app.add_api_route("/v1/models", self.models)
        self.app.add_api_route("/v1/chat/completions", self.chat, methods=["POST"])

    def refusal(self, request: Request) -> JSONResponse | None:
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "The API key is missing or wrong."}}, 401)
        return None

    async def models(self, request: Request) -> JSONResponse:
        card = {"id": "scripted", "lampejo": {"mode": "scripted drafts"}}
        return self.refusal(request) or JSONResponse({"object": "list", "data": [card]})

    async def chat(self, request: Request):
        body = await request.json()
        self.bodies.append(body)
        if refusal := self.refusal(request):
            return refusal
        if self.failure is not None:
            (status, message), self.failure = self.failure, None
            headers = {"Retry-After": "7"} if status == 429 else {}
            return JSONResponse({"error": {"message": message, "type": "x", "code": None}}, status, headers)
        return StreamingResponse(self.events(body, request), media_type="text/event-stream")

    async def events(self, body: dict, request: Request) -> AsyncIterator[bytes]:
        asked = body["messages"][-1]["content"]
        is_traced = body.get("lampejo", {}).get("trace", False)
        has_drafts = body.get("lampejo", {}).get("drafts", True)
        if asked.startswith("wait"):
            try:
                for number in range(2000):
                    yield chunk({"content": f"word{number} "})
                    await asyncio.sleep(0.02)
            finally:
                self.num_gone += 1
            return
        for thought in parts(self.thoughts.get(asked, "")):
            yield chunk({"reasoning_content": thought})
        text = self.answers.get(asked, PLAIN)
        if self.differs_without_drafts and not has_drafts:
            text = text.replace("ever", "never")
        words = parts(text)
        if asked.startswith("break"):
            yield chunk({"content": words[0]})
            return
        size = 3 if has_drafts else 1
        for step, i in enumerate(range(0, len(words), size)):
            tokens = words[i : i + size]
            origins = [*(["dflash", "ngram"][j % 2] for j in range(len(tokens) - 1)), "target"]
            trace = [
                {"id": sum(map(ord, token)), "text": token, "origin": origin}
                for token, origin in zip(tokens, origins, strict=True)
            ]
            lampejo = {"tokens": trace, "step": step} if is_traced else None
            yield chunk({"content": "".join(tokens)}, lampejo=lampejo)
            await asyncio.sleep(self.pace)
            if asked.startswith("fail midway"):
                yield b'data: {"error":{"message":"The engine has failed: out of luck","type":"server_error"}}\n\n'
                return
        last = {"usage": {"completion_tokens": len(words)}, "choices": []}
        yield chunk({}, finish_reason=self.finish_reason)
        if has_drafts:
            last["metrics"] = {"speculative_decoding": METRICS}
        yield b": keep-alive\n\n"
        yield f"data: {json.dumps(last)}\r\n\r\n".encode()
        yield b"data: [DONE]\n\n"


def parts(text: str) -> list[str]:
    """Pieces of four characters."""
    return [text[i : i + 4] for i in range(0, len(text), 4)]


def chunk(delta: dict, *, finish_reason: str | None = None, lampejo: dict | None = None) -> bytes:
    value: dict = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}
    if lampejo is not None:
        value["lampejo"] = lampejo
    return f"data: {json.dumps(value)}\n\n".encode()


@contextlib.contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """The address of an application that runs in a thread."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)

"""One line per call: what an operator needs, and nothing that a user said."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from lampejo.server import access_log
from lampejo.server.access_log import AccessLog
from lampejo.server.config import Security, ServerConfig
from lampejo.server.errors import ApiError
from lampejo.server.http import EventStream, JsonResponse, event
from lampejo.server.security import protect
from lampejo.server.service import Job, Service
from lampejo.speculate import NgramDrafter
from scripted import ids_of, scripted_llm

KEY = "sk-secret-1234"


class Server:
    """A service behind the log, and the lines that it wrote."""

    def __init__(self, service: Service, caplog: pytest.LogCaptureFixture) -> None:
        self.service = service
        self.caplog = caplog
        self.app = FastAPI()
        self.app.add_api_route("/v1/completions", self.complete, methods=["POST"])
        self.app.add_api_route("/v1/messages", self.complete, methods=["POST"])
        self.app.add_api_route("/health", lambda: PlainTextResponse("ok"))
        self.app.add_api_route("/broken", lambda: 1 / 0)
        self.app.add_exception_handler(ApiError, lambda request, error: JsonResponse(error.openai(), error.status))
        protect(self.app, service.config)
        self.app.add_middleware(AccessLog, counts=service.counts)

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        answers = await self.service.start(
            Job([ids_of(body["prompt"])], {"max_tokens": body["max_tokens"]}, body.get("n", 1))
        )
        if not body.get("stream"):
            async for _ in answers:
                pass
            return JsonResponse(answers.usage | answers.metrics)

        async def events() -> AsyncIterator[bytes]:
            try:
                async for piece in answers:
                    yield event(piece.chunk.text)
            finally:
                answers.close()

        return EventStream(events(), 15.0)

    def client(self, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app, **options), base_url="http://localhost", headers={"x-api-key": KEY}
        )

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(record.message) for record in self.caplog.records if record.name == "lampejo.access"]


@pytest.fixture
def server(caplog: pytest.LogCaptureFixture) -> Iterator[Server]:
    caplog.set_level(logging.INFO, "lampejo.access")
    config = ServerConfig(security=Security((KEY,)))
    with scripted_llm(lambda text: text[len(text) % 3], [NgramDrafter(3)], width=6, page_size=8) as llm:
        yield Server(Service(llm, config), caplog)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_line_tells_what_the_response_tells(server, stream):
    """Tokens, cached tokens and acceptance length are those of the response."""
    body = {"prompt": "abcdefgh" * 4, "max_tokens": 40, "n": 2}
    async with server.client() as client:
        told = (await client.post("/v1/completions", json=body)).json()
        response = await client.post("/v1/completions", json=body | {"stream": stream})
        assert response.status_code == 200
    first, line = server.lines
    assert line.pop("time").endswith("+00:00")
    assert 0 < line["first_token_seconds"] <= line.pop("seconds")
    assert line.pop("first_token_seconds") > 0
    assert (first["prompt_tokens"], first["completion_tokens"]) == (told["prompt_tokens"], told["completion_tokens"])
    assert first["cached_tokens"] == told["prompt_tokens_details"]["cached_tokens"]
    assert first["acceptance_length"] == round(told["speculative_decoding"]["mean_acceptance_length"], 2) > 1
    assert line == {
        "request_id": response.headers["x-request-id"],
        "client": "127.0.0.1",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "prompt_tokens": 32,
        "cached_tokens": 24,
        "completion_tokens": 80,
        "acceptance_length": first["acceptance_length"],
        "finish_reasons": ["length", "length"],
    }


async def test_no_line_has_text_of_the_user_or_of_the_model_or_a_key(server):
    """A log is read by more people than may read the conversations."""
    async with server.client() as client:
        await client.post("/v1/completions?user=jane&api_key=sk-query", json={"prompt": "my password", "max_tokens": 9})
        await client.post("/v1/completions", json={"prompt": "q" * 600, "max_tokens": 9})
        await client.get("/v1/models", headers={"x-api-key": "sk-wrong"})
    assert len(server.lines) == 3
    for word in ("password", "qqq", "jane", "sk-"):
        assert word not in server.caplog.text


async def test_refused_and_broken_calls_are_told_and_counted(server):
    """What never reached the model is what an operator looks for."""
    async with server.client(raise_app_exceptions=False) as client:
        assert (await client.get("/v1/models", headers={"x-api-key": "no"})).headers["x-request-id"]
        await client.get("/nothing-here")
        await client.get("/broken")
        await client.get("/health")
    assert [(line["path"], line["status"]) for line in server.lines] == [
        ("/v1/models", 401),
        ("/nothing-here", 404),
        ("/broken", 500),
    ]
    assert server.service.counts.statuses == {401: 1, 404: 1, 500: 1, 200: 1}


@pytest.mark.parametrize("given", ["trace-1:a/b+c=.", "x" * 128])
async def test_a_caller_can_name_its_call(server, given):
    """One id through a whole system, also in the header that Anthropic's SDK reads."""
    async with server.client() as client:
        body = {"prompt": "abc", "max_tokens": 1}
        response = await client.post("/v1/messages", json=body, headers={"x-request-id": given})
    assert response.headers["x-request-id"] == response.headers["request-id"] == given
    assert server.lines[0]["request_id"] == given


@pytest.mark.parametrize("given", ["", "a b", 'x"}', "x" * 129, "\u00e9", "{{7*7}}"])
async def test_a_name_that_could_upset_a_log_is_replaced(server, given):
    """Fault: a caller that writes into somebody's log viewer."""
    async with server.client() as client:
        ids = [
            (await client.get("/health", headers={"x-request-id": given.encode("latin-1")})).headers["x-request-id"]
            for _ in range(2)
        ]
    assert ids[0] != ids[1]
    assert all(len(one) == 32 and one.isalnum() for one in ids)


async def test_a_reader_that_goes_in_the_middle_is_told_as_an_abort(server, monkeypatch):
    """M6: the status was sent already; that the answer was not is in its finish reason."""
    sent, gone = [], asyncio.Event()

    async def receive() -> dict[str, Any]:
        if not sent:
            body = json.dumps({"prompt": "abcdef" * 4, "max_tokens": 450, "stream": True}).encode()
            sent.append("body")
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message.get("body"):
            gone.set()
            await asyncio.sleep(0)

    headers = [(b"host", b"localhost"), (b"x-api-key", KEY.encode()), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/completions",
    }
    scope |= {
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": headers,
    }
    await server.app(scope | {"client": ("10.1.2.3", 5), "server": ("localhost", 80)}, receive, send)
    (line,) = server.lines
    assert (line["status"], line["client"], line["finish_reasons"]) == (200, "10.1.2.3", ["abort"])
    assert line["completion_tokens"] < 450


async def test_nothing_is_written_unless_it_was_asked_for(server, capsys, monkeypatch):
    """Without --access-log the server is quiet; with it, each line is a JSON object on the standard output."""
    monkeypatch.setattr(access_log, "LOG", logging.getLogger("lampejo.access.test"))
    access_log.LOG.setLevel(logging.NOTSET)
    async with server.client() as client:
        access_log.LOG.setLevel(logging.WARNING)
        await client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3})
        assert capsys.readouterr().out == ""
        access_log.enable()
        await client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3})
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out)["completion_tokens"] == 3
    access_log.LOG.handlers.clear()

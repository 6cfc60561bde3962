"""A refusal before the end of the body reaches clients that send all of it first: over TCP, where resets are."""

import asyncio
import http.client
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from lampejo.server.linger import Linger
from server_app import chat, listening, model_saying

SIZE = 24_000_000  # beyond the limit of a body, and beyond what sockets hold
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with model_saying("Hello") as llm, listening(llm) as (port, _):
        yield port


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/chat/completions", JSON, 413),
        ("/v1/messages", JSON, 413),
        ("/v1/chat/completions", {"Content-Type": "text/plain"}, 415),
        ("/v1/chat/completions", {**JSON, "Host": "evil.example.org"}, 403),
        ("/nothing", JSON, 404),
    ],
)
@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunked"])
def test_a_client_that_sends_all_before_it_reads_gets_the_refusal(port, path, headers, status, is_chunked):
    """Fault: the connection was reset, and urllib, which asks for its end, told no more than that."""
    pieces = (b"[" * 1_000_000 for _ in range(SIZE // 1_000_000))
    body: Any = pieces if is_chunked else b"[" * SIZE
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, headers, method="POST")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    with caught.value as response:
        assert response.status == status
        assert json.loads(response.read())["error"]["message"]
        assert response.headers["connection"] == "close"


def test_a_call_that_was_read_leaves_its_connection_open(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    for body, status in ((chat(), 200), ({"messages": []}, 400), (chat(), 200)):
        connection.request("POST", "/v1/chat/completions", json.dumps(body), JSON)
        response = connection.getresponse()
        assert (response.status, response.headers["connection"]) == (status, None)
        assert json.loads(response.read())
    connection.request("GET", "/nothing")
    response = connection.getresponse()
    assert (response.status, response.headers["connection"]) == (404, None)
    connection.close()


def test_who_waits_before_sending_is_told_at_once_and_sends_nothing(port):
    head = "POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(head.encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 404 ")


@pytest.mark.parametrize("ending", ["bytes", "seconds", "the client", "the body", "the server"])
async def test_what_is_thrown_away_is_bounded(ending):
    """O5's spirit: who goes on sending, or sends nothing more, holds nothing for ever."""
    sent: list[dict[str, Any]] = []
    num_received = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 413, "headers": []})
        await send({"type": "http.response.body", "body": b"too long"})

    async def receive() -> dict[str, Any]:
        nonlocal num_received
        num_received += 1
        assert sent[1]["body"] == b"too long", "the answer waited for what is thrown away"
        if ending in ("seconds", "the server"):
            await asyncio.sleep(3600)
        if ending == "the client" and num_received == 3:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": b"x" * 100, "more_body": ending != "the body" or num_received < 3}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "headers": [(b"content-length", b"99999999")]}
    server_ends = asyncio.Event()
    if ending == "the server":
        asyncio.get_running_loop().call_later(0.01, server_ends.set)
    seconds = 0.01 if ending == "seconds" else 3600
    await Linger(app, server_ends, max_bytes=1000, max_seconds=seconds)(scope, receive, send)
    assert num_received == {"bytes": 11, "seconds": 1, "the server": 1}.get(ending, 3)
    assert (b"connection", b"close") in sent[0]["headers"]
    assert [message.get("more_body", False) for message in sent[1:]] == [True, False]
    assert sent[2]["body"] == b""

"""Deadlines, and readers who go, stop reading, or are slow. The engine is held at will (``held.py``)."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from held import STORY, Held, nothing_is_left, read_until, served, until
from lampejo.server import http
from lampejo.server.errors import ApiError
from lampejo.server.http import EventStream
from lampejo.server.service import ARRIVED, Job, Service
from scripted import ids_of, knowing
from server_app import ask, chat, listening, model_saying


async def test_a_request_whose_time_is_over_before_its_first_token_is_told_so():
    """504 where the response has not begun, an error event where it has."""
    with model_saying("Hello") as llm, Held(llm) as held:
        async with served(llm, timeout_s=0.02) as (client, service, _):
            response = await ask(client, chat())
            assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
            text = (await ask(client, chat(stream=True))).text
            assert '"code":"timeout"' in text and text.endswith("data: [DONE]\n\n")
            held.open()
            await until(lambda: nothing_is_left(llm, service))


async def test_an_answer_that_has_begun_is_cut_at_its_deadline_with_what_there_is():
    """The reason is length, usage counts what was told."""
    with model_saying(STORY) as llm, Held(llm) as held:
        async with served(llm, timeout_s=1) as (client, service, _):
            held.let(4)
            told = (await ask(client, chat())).json()
            (choice,) = told["choices"]
            assert choice["finish_reason"] == "length"
            assert choice["message"]["content"] == STORY[:4] and told["usage"]["completion_tokens"] == 4
            held.open()
            await until(lambda: nothing_is_left(llm, service))


async def test_the_time_of_a_request_runs_from_its_arrival():
    """Fault: the clock starts when the prompt is rendered and encoded, however long that took."""
    with model_saying("Hello") as llm, Held(llm) as held:
        async with served(llm, timeout_s=600) as (_, service, _):
            answers = await service.start(Job([ids_of("Hello")], {"max_tokens": 3}))
            for answer in answers._answers:
                answer.watch.arrived_at -= 601  # so long it was on its way to here
            with pytest.raises(ApiError) as told:
                async with asyncio.timeout(30):
                    await anext(aiter(answers))
            assert told.value.status == 504
            held.open()
            await until(lambda: nothing_is_left(llm, service))


async def test_the_time_of_a_request_runs_from_before_its_body_was_read(monkeypatch):
    """Fault: a body of megabytes, and a grammar, took their time before the clock began."""
    began = []

    def late(self: Service, job: Job) -> Any:
        began.append(time.perf_counter() - (ARRIVED.get() or 0))
        return requests(self, job)

    requests = Service._requests
    monkeypatch.setattr(Service, "_requests", late)
    with model_saying("Hello") as llm:
        async with served(llm) as (client, service, _):
            for stream in (False, True):
                started = time.perf_counter()

                async def slow(stream: bool = stream) -> AsyncIterator[bytes]:
                    await asyncio.sleep(0.05)
                    yield json.dumps(chat(stream=stream)).encode()

                headers = {"content-type": "application/json"}
                response = await client.post("/v1/chat/completions", content=slow(), headers=headers)
                assert response.status_code == 200
                assert 0.05 <= began.pop() <= time.perf_counter() - started
            assert ARRIVED.get() is None
            assert service.counts.first_token.sum >= 0.1


async def test_a_reader_who_goes_is_noticed_within_a_step_a_hundred_times():
    """M6: in the middle of blocks, of waiting, of prefill. No row, no page is left; the next answer is right."""
    with model_saying(STORY, [knowing(ids_of(STORY))], width=5, page_size=8, max_rows=2) as llm, Held(llm) as held:
        async with served(llm) as (client, service, app):
            for i in range(100):
                num_events, taken = 1 + i % 9, []  # the first has the role alone

                def goes(part: bytes, num_events: int = num_events, taken: list[bytes] = taken) -> bool:
                    taken.append(part)
                    held.let()
                    return len(taken) > num_events  # the first part is that of the headers

                await read_until(app, chat(str(i % 3), stream=True), goes)
                assert service.num_active == 0
                at_leaving = len(held.plans)
                while not nothing_is_left(llm, service):
                    held.let()
                    await asyncio.sleep(0.001)
                assert len(held.plans) <= at_leaving + 1, "it was noticed a step too late"
                while held._permits.acquire(blocking=False):
                    pass
            held.open()
            llm.engine.pool.check_integrity()
            assert llm.engine.pool.num_free == llm.engine.pool.num_pages
            assert (await ask(client, chat())).json()["choices"][0]["message"]["content"] == STORY


async def test_a_caller_who_goes_before_the_whole_answer_ends_it():
    """M6: also where nothing is streamed."""
    with model_saying(STORY) as llm, Held(llm) as held:
        async with served(llm) as (_, service, app):
            calls = [asyncio.create_task(read_until(app, chat(), lambda _: False)) for _ in range(3)]
            await until(lambda: service.num_active == 3 and bool(held.plans))
            calls[1].cancel()  # the server's own task for the connection
            await until(lambda: service.num_active == 2)
            held.open()
            for call in (calls[0], calls[2]):
                status, text = await call
                assert status == 200 and json.loads(text)["choices"][0]["message"]["content"] == STORY
            await until(lambda: nothing_is_left(llm, service))


@pytest.mark.parametrize("place", ["an event", "a comment"])
async def test_a_reader_who_takes_nothing_any_more_is_taken_for_gone(monkeypatch, place):
    """M6. Fault: a stream that nobody read kept its place in the queue for as long as its connection stood."""
    monkeypatch.setattr(http, "STALLED_S", 0.02)
    num_sent, aborted = 0, []

    async def send(message: Any) -> None:
        nonlocal num_sent
        num_sent += 1
        if (message.get("body") == http.KEEP_ALIVE) if place == "a comment" else num_sent == 4:
            await asyncio.Event().wait()

    async def receive() -> Any:
        await asyncio.Event().wait()

    with model_saying(STORY) as llm, Held(llm) as held:
        async with served(llm, keep_alive_s=0.01 if place == "a comment" else 0.5) as (_, service, _):
            held.let(3)
            answers = await service.start(Job([ids_of("Hello")], {"max_tokens": 60}))

            async def parts():
                async for piece in answers:
                    yield piece.chunk.text.encode()

            stream = EventStream(parts(), service.config.keep_alive_s, answers.close)
            scope = {http._ABORT: lambda: aborted.append(True)}
            async with asyncio.timeout(30):
                await stream(scope, receive, send)  # type: ignore[arg-type]
            assert aborted == [True] and service.num_active == 0
            held.open()
            await until(lambda: nothing_is_left(llm, service))


async def test_the_deadline_ends_an_answer_whose_reader_is_slow():
    """Fault: what was there already was told to the end, however late."""
    with model_saying(STORY) as llm:
        async with served(llm, timeout_s=600) as (_, service, _):
            answers = await service.start(Job([ids_of("assistant:")], {"max_tokens": 9}))
            await until(lambda: len(answers._outbox._items) == 9)
            for answer in answers._answers:
                answer.watch.arrived_at -= 601
                answer.watch.num_tokens = 1
            pieces = [piece async for piece in answers]
            assert [(piece.timed_out, piece.finish_reason) for piece in pieces] == [(True, "length")]
            assert service.num_active == 0


async def test_the_connection_of_a_stalled_reader_is_dropped(monkeypatch):
    """M6: with a real socket, whose buffers are full; what waits in them would keep it open for ever."""
    monkeypatch.setattr(http, "STALLED_S", 0.2)

    def small(*args: Any, **kwargs: Any) -> socket.socket:
        made = create_server(*args, **kwargs)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # those that it accepts have the same
        return made

    create_server = socket.create_server
    monkeypatch.setattr(socket, "create_server", small)
    body = json.dumps(chat(max_tokens=2000, stream=True, logprobs=True, top_logprobs=20, ignore_eos=True)).encode()
    with model_saying("a" * 4000, num_pages=1024) as llm, listening(llm, keep_alive_s=0.5) as (port, service):
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            reader.connect(("127.0.0.1", port))
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            reader.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            await until(lambda: service.num_active == 1)
            await until(lambda: service.num_active == 0)
            reader.settimeout(30)
            read = b""
            with contextlib.suppress(ConnectionResetError):
                while part := reader.recv(65536):
                    read += part
            assert b"200 OK" in read and len(read) < 30_000, "the server's own buffer has 64 kB, which are dropped"
        await until(lambda: nothing_is_left(llm, service))

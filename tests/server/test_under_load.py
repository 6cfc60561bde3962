"""The server under load and in trouble: full queues, a long prompt beside streams, an engine that fails, an orderly
end. The engine is held at will (``held.py``), so that nothing here depends on how fast anything is."""

import asyncio
import json
from typing import Any

import pytest

from held import STORY, Held, nothing_is_left, read_until, served, until
from lampejo.errors import UserError
from lampejo.server.http import EventStream
from lampejo.server.service import Answers, Service
from scripted import ids_of, knowing, scripted_llm
from server_app import ask, chat, model_saying, saying

# --- a full queue -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_says_when_to_come_back_and_those_before_it_are_answered(stream):
    """O1: 429 with Retry-After, in OpenAI's shape, before anything is streamed."""
    with model_saying("Hello", max_rows=1) as llm, Held(llm) as held:
        async with served(llm, max_queue=1) as (client, service, _):
            let_in = [asyncio.create_task(ask(client, chat())) for _ in range(2)]
            await until(lambda: service.num_active == 2 and service.num_running == 1)
            refused = await ask(client, chat(stream=stream))
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert (refused.json()["error"]["type"], refused.json()["error"]["code"]) == (
                "rate_limit_error",
                "queue_full",
            )
            health = (await client.get("/health")).json()
            assert (health["num_requests_running"], health["num_requests_waiting"]) == (1, 1)
            held.open()
            answers = await asyncio.gather(*let_in)
            assert [answer.json()["choices"][0]["message"]["content"] for answer in answers] == ["Hello"] * 2
            assert (await ask(client, chat())).status_code == 200
            await until(lambda: nothing_is_left(llm, service))


async def test_all_requests_of_a_call_need_room_in_the_queue():
    """O1. Fault: a call with 1,024 prompts got in where 8 might wait, and everybody waited behind it. One that is alone
    is taken, however many it has: it would never get in otherwise."""
    many = {"prompt": ["assistant:"] * 3, "n": 2, "max_tokens": 5}
    with model_saying("Hello", max_rows=1) as llm, Held(llm) as held:
        async with served(llm, max_queue=3) as (client, service, _):
            first = asyncio.create_task(ask(client, chat()))
            await until(lambda: service.num_active == 1)
            refused = await ask(client, many, "/v1/completions")
            assert (refused.status_code, service.num_active) == (429, 1)
            assert "This call has 6, and 4 can be" in refused.json()["error"]["message"]
            fitting = asyncio.create_task(ask(client, chat(n=3)))
            await until(lambda: service.num_active == 4)
            assert (await ask(client, chat())).status_code == 429
            held.open()
            assert (await first).status_code == (await fitting).status_code == 200
            await until(lambda: nothing_is_left(llm, service))
            assert len((await ask(client, many, "/v1/completions")).json()["choices"]) == 6
            await until(lambda: nothing_is_left(llm, service))


async def test_the_time_to_come_back_follows_what_requests_have_taken():
    """O1: a guess from the mean of those that are over, between a second and a minute."""
    with model_saying("Hello", max_rows=2) as llm:
        async with served(llm, max_queue=0) as (_, service, _):
            service.num_active = 2
            assert service.retry_after_s() == 1, "nothing is known yet"
            for seconds in (10, 30):
                service.counts.whole.observe(seconds)
            assert service.retry_after_s() == 10, "20 s each, two at once"
            service.counts.whole.observe(10_000)
            assert service.retry_after_s() == 60
            service.num_active = 0


# --- an orderly end ---------------------------------------------------------------------------------------------------


async def test_a_server_that_ends_refuses_new_requests_and_ends_those_that_run():
    """O1: /health tells 503 at once; the running stream comes to its own end."""
    with model_saying(STORY) as llm, Held(llm) as held:
        async with served(llm) as (client, service, _):
            running = asyncio.create_task(ask(client, chat(stream=True)))
            await until(lambda: service.num_active == 1 and bool(held.plans))
            service.draining = True
            refused = await ask(client, chat())
            assert (refused.status_code, refused.headers["connection"]) == (503, "close")
            health = await client.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "shutting down")
            held.open()
            text = (await running).text
            assert '"finish_reason":"stop"' in text and text.endswith("data: [DONE]\n\n")
            await asyncio.wait_for(service.idle.wait(), 30)


# --- an engine that fails ---------------------------------------------------------------------------------------------


async def test_a_fatal_error_fails_all_present_and_future_requests_and_the_health(monkeypatch):
    """O2: streams that have begun end with an error event, those that have not with 500; nothing hangs."""
    with model_saying(STORY, max_rows=2) as llm, Held(llm) as held:
        async with served(llm) as (client, service, app):
            streams = [
                asyncio.create_task(read_until(app, chat(stream=True), lambda _: False)) for _ in range(3)
            ]  # one of which waits
            whole = asyncio.create_task(ask(client, chat()))
            await until(lambda: service.num_active == 4)
            held.let(5)
            await until(lambda: len(held.plans) == 6)

            def fail(batch: Any) -> None:
                raise MemoryError("no room for logits")

            held._verify = fail
            held.open()
            for status, text in await asyncio.gather(*streams):
                assert status == 200
                *_, error, done, end = text.decode().split("\n\n")
                told = json.loads(error.removeprefix("data: "))["error"]
                assert told["type"] == "server_error" and "no room for logits" in told["message"]
                assert (done, end) == ("data: [DONE]", "")
            for response in (await whole, await ask(client, chat())):
                assert response.status_code == 500
                assert "no room for logits" in response.json()["error"]["message"]
            health = await client.get("/health")
            assert (health.status_code, health.json()["status"]) == (500, "failed")
            assert service.num_active == 0 and service.idle.is_set()


async def test_what_is_wrong_with_one_request_fails_that_one_alone(monkeypatch):
    """S4, O2: found out while it is decoded, it is the caller's mistake, and the engine goes on."""
    started: list[Answers] = []
    start = Service.start

    async def watched(self: Service, job: Any) -> Answers:
        started.append(await start(self, job))
        return started[-1]

    monkeypatch.setattr(Service, "start", watched)
    with model_saying(STORY) as llm, Held(llm) as held:
        async with served(llm) as (client, service, _):
            bad = asyncio.create_task(ask(client, chat()))
            await until(lambda: len(started) == 1)
            good = asyncio.create_task(ask(client, chat()))
            started[0]._outbox.put(UserError("The grammar is too much."))
            assert (await bad).status_code == 400
            assert "The grammar is too much." in (await bad).json()["error"]["message"]
            held.open()
            assert (await good).json()["choices"][0]["message"]["content"] == STORY
            assert (await client.get("/health")).status_code == 200
            await until(lambda: nothing_is_left(llm, service))


# --- long prompts -----------------------------------------------------------------------------------------------------


async def test_a_silent_stream_is_kept_alive_by_comments():
    """T6: while a long prompt is computed; the comments are no events."""
    with model_saying("Hello") as llm, Held(llm) as held:
        async with served(llm, keep_alive_s=0.005) as (_, _, app):
            comments = 0

            def goes(part: bytes) -> bool:
                nonlocal comments
                comments += part == b": keep-alive\n\n"
                if comments == 3:
                    held.open()
                return False

            status, text = await read_until(app, chat(stream=True), goes)
    assert status == 200 and comments >= 3
    data = [line for line in text.decode().splitlines() if line.startswith("data: {")]
    told = "".join(json.loads(line[6:])["choices"][0]["delta"].get("content", "") for line in data)
    assert told == "Hello"


async def test_no_stream_waits_for_more_than_one_chunk_of_anothers_prompt():
    """Whatever is being prefilled, each stream gets its tokens in every step."""
    prompts = ["short", "x" * 300, "also short", "y" * 350]
    with model_saying(STORY * 2, page_size=8, max_rows=4, token_budget=24, num_pages=256) as llm, Held(llm) as held:
        async with served(llm) as (client, service, _):
            calls = [asyncio.create_task(ask(client, chat(prompt, stream=True))) for prompt in prompts]
            await until(lambda: service.num_active == len(prompts))
            held.open()
            for call in calls:
                assert (await call).text.endswith("data: [DONE]\n\n")
    seen_decoding: set[int] = set()
    last_step = {request.id: i for i, plan in enumerate(held.plans) for request, _ in plan}
    for i, plan in enumerate(held.plans):
        assert sum(num_known for _, num_known in plan) <= 24
        present = {request.id for request, _ in plan}
        waiting = {one for one in seen_decoding if last_step[one] > i}
        assert waiting <= present, "a stream was left out of a step"
        seen_decoding |= {request.id for request, num_known in plan if num_known == 1}
    beside = [plan for plan in held.plans if {1} < {num_known for _, num_known in plan}]
    assert len(beside) > 20, "the long prompts were computed beside streams"


# --- prefixes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", [False, True])
async def test_the_second_turn_of_a_chat_finds_the_first_in_the_prefix_cache(drafts):
    """M1 and M2, over HTTP: usage tells what was found, and the answer is that of a server that never saw the first."""
    first = chat("x" * 300)
    second = {"messages": [*first["messages"], {"role": "assistant", "content": STORY}, *chat("More")["messages"]]}
    drafters = [knowing(ids_of(STORY))] if drafts else []
    with scripted_llm(saying(STORY), drafters, page_size=8) as llm, scripted_llm(saying(STORY), page_size=8) as cold:
        async with served(llm) as (client, *_), served(cold) as (cold_client, *_):
            usages = [(await ask(client, body)).json()["usage"] for body in (first, first, second)]
            found = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
            assert found[0] == 0 and min(found[1:]) > 0.9 * usages[0]["prompt_tokens"]
            warm, new = (await ask(client, second)).json(), (await ask(cold_client, second)).json()
            assert warm["choices"] == new["choices"]
            chunks = (await ask(client, first | {"stream": True, "stream_options": {"include_usage": True}})).text
            usage = json.loads(chunks.split("\n\n")[-3].removeprefix("data: "))["usage"]
            assert usage == usages[1]


async def test_each_of_many_at_once_gets_its_own_answer():
    """M7, in small: more calls than rows and pages, each equal to what it gets alone."""
    random_words = [f"word {i} " * (1 + i % 5) for i in range(24)]

    def target(text: Any) -> int:
        return text[(len(text) * 7) % len(text[:9])] if len(text) % 40 else 1

    with scripted_llm(target, page_size=8, max_rows=3, token_budget=16, num_pages=64) as llm:
        async with served(llm) as (client, service, _):
            alone = [(await ask(client, chat(words))).json()["choices"] for words in random_words]
            together = await asyncio.gather(*(ask(client, chat(words)) for words in random_words))
            assert [one.json()["choices"] for one in together] == alone
            await until(lambda: nothing_is_left(llm, service))
            llm.engine.pool.check_integrity()


async def test_a_stream_that_cannot_even_begin_closes_what_it_would_have_told():
    """M6. Fault: a generator that never began is closed without running its end, so its requests went on."""
    closed = []

    async def events():
        yield b""

    async def send(message):
        raise OSError("the client has gone")

    with pytest.raises(OSError):
        await EventStream(events(), 15.0, lambda: closed.append(True))({}, None, send)
    assert closed == [True]

"""The engine's thread: aborts, fatal errors, closing, many callers. Whatever happens, nobody waits for ever."""

import asyncio
import contextlib
import gc
import itertools
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lampejo.api import LLM
from lampejo.frontend import AsyncOutbox, SyncOutbox
from scripted import ids_of, random_target, scripted_llm
from tiny import ScriptedDrafter

PATIENCE = 60.0  # seconds after which a call counts as hanging
LONG = {"max_tokens": 400, "ignore_eos": True}


class Broken(Exception):
    """What the scripted device fails with."""


@pytest.fixture
def llm() -> Iterator[LLM]:
    a = ids_of("a")[0]
    drafter = ScriptedDrafter(lambda request, width: [a] * width)
    with scripted_llm(random_target(), [drafter], width=3, max_rows=4) as llm:
        yield llm
    assert not llm.frontend._thread.is_alive()


def within_time(function: Callable[[], Any]) -> Any:
    """The function's result or exception; fails instead of hanging."""
    with_result: list[Any] = []

    def call() -> None:
        try:
            with_result.append((function(), None))
        except BaseException as error:
            with_result.append((None, error))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert with_result, "it hangs"
    value, error = with_result[0]
    if error is not None:
        raise error
    return value


def soon(condition: Callable[[], bool]) -> bool:
    """Whether the condition comes true; the engine's thread needs a moment."""
    end = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


def is_idle(llm: LLM) -> bool:
    pool, speculator = llm.engine.pool, llm.engine.speculator
    return (
        not llm.engine.has_work
        and pool.num_free == pool.num_pages
        and not llm.frontend._outboxes
        and not speculator._chosen
        and not speculator.controller._tracks
    )


def test_closing_a_stream_in_the_middle_frees_its_row_and_leaves_others_alone(llm):
    """M6: a client goes away in the middle of a block; the rows beside it and those after it are answered right."""
    expected = llm.generate("beside", **LONG).ids
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(llm.generate, "beside", **LONG)
        for n in range(20):
            stream = llm.stream(f"gone {n}", **LONG)
            for _ in range(n % 4):
                next(stream)
            stream.close()
        assert beside.result(PATIENCE).ids == expected
    assert soon(lambda: is_idle(llm))
    llm.engine.pool.check_integrity()
    assert within_time(lambda: llm.generate("beside", **LONG)).ids == expected


def test_a_stream_that_nobody_reads_does_no_work(llm):
    """M6: closing an iterator that was never started cannot run its clean-up; so nothing is started before."""
    for _ in range(3):
        llm.stream("unread", **LONG)
    llm.stream("closed unread", **LONG).close()
    llm.generate("after", max_tokens=1)
    assert llm.engine.runner.num_steps == 1
    assert soon(lambda: is_idle(llm))


def test_an_aborted_request_ends_with_reason_abort_and_no_more_deltas(llm):
    request, outbox = llm.make_request("abort me", **LONG), SyncOutbox()
    llm.frontend.submit(request, outbox)
    first = within_time(lambda: next(iter(outbox)))
    llm.frontend.abort(request)
    llm.frontend.abort(request)
    assert soon(lambda: is_idle(llm))
    assert first.finish_reason is None
    assert request.finish_reason == "abort"
    num_output = request.num_output
    llm.generate("others go on", max_tokens=3)
    assert request.num_output == num_output < 400


def test_a_request_may_be_aborted_while_it_waits_for_a_row(llm):
    """M6: it was never scheduled; nothing of it stays in the queue."""
    streams = [llm.stream(f"row {i}", **LONG) for i in range(4)]
    for stream in streams:
        next(stream)
    request, outbox = llm.make_request("waiting", **LONG), SyncOutbox()
    llm.frontend.submit(request, outbox)
    llm.frontend.abort(request)
    for stream in streams:
        stream.close()
    assert soon(lambda: is_idle(llm))
    assert (request.finish_reason, request.num_cached, request.output_ids) == ("abort", None, [])


def test_an_idle_engine_does_no_steps(llm):
    """The thread waits for work; it does not spin."""
    llm.generate("warm", max_tokens=2)
    num_steps = llm.engine.runner.num_steps
    cpu = time.process_time()
    time.sleep(0.2)
    assert llm.engine.runner.num_steps == num_steps
    assert time.process_time() - cpu < 0.1


def test_a_fatal_error_fails_all_present_and_future_requests_at_once(llm, monkeypatch):
    """O2: the running, the waiting, the asynchronous and the later ones; and nothing hangs."""
    verify, steps, all_there = llm.engine.runner.verify, itertools.count(), threading.Event()

    def failing(batch: Any) -> Any:
        if next(steps) < 3:
            return verify(batch)
        assert all_there.wait(PATIENCE)
        raise Broken("the device is gone")

    monkeypatch.setattr(llm.engine.runner, "verify", failing)

    async def astream() -> None:
        async for _ in llm.astream("async", **LONG):
            pass

    with ThreadPoolExecutor(8) as pool:
        present = [pool.submit(lambda n=n: list(llm.stream(f"present {n}", **LONG))) for n in range(4)]
        present.append(pool.submit(llm.generate, "waiting", **LONG))
        present.append(pool.submit(lambda: asyncio.run(astream())))
        assert soon(lambda: len(llm.frontend._outboxes) + llm.frontend._inbox.qsize() == 6)
        all_there.set()
        for future in present:
            with pytest.raises(Broken, match="the device is gone"):
                future.result(PATIENCE)
    for later in (lambda: llm.generate("later"), lambda: next(llm.stream("later"))):
        with pytest.raises(RuntimeError, match="engine has failed") as caught:
            within_time(later)
        assert isinstance(caught.value.__cause__, Broken)
    with pytest.raises(RuntimeError, match="engine has failed"):
        asyncio.run(asyncio.wait_for(llm.agenerate("later"), PATIENCE))
    assert isinstance(llm.frontend.error, Broken)
    within_time(llm.close)


def test_an_engine_too_broken_even_to_abort_still_fails_everybody(llm, monkeypatch):
    """O2: what was asked during the last step is heard of too, whatever the engine says to it."""
    entered, go_on = threading.Event(), threading.Event()

    def verify(batch: Any) -> None:
        entered.set()
        go_on.wait(PATIENCE)
        raise Broken("the device is gone")

    def abort(request: Any) -> None:
        raise AssertionError("too broken to abort")

    monkeypatch.setattr(llm.engine.runner, "verify", verify)
    monkeypatch.setattr(llm.engine, "abort", abort)
    gone, (staying, late) = llm.make_request("gone"), [(llm.make_request(p), SyncOutbox()) for p in ("staying", "late")]
    llm.frontend.submit(gone, SyncOutbox())
    llm.frontend.submit(*staying)
    assert entered.wait(PATIENCE)
    llm.frontend.abort(gone)
    llm.frontend.submit(*late)
    go_on.set()
    for _, outbox in (staying, late):
        with pytest.raises(Broken):
            within_time(lambda outbox=outbox: list(outbox))
    assert isinstance(llm.frontend.error, Broken)


def test_closing_while_requests_run_ends_them_with_an_error():
    """Nobody is left waiting for an engine that is gone; closing twice is harmless."""
    llm = scripted_llm(random_target(), max_rows=2)
    with ThreadPoolExecutor(5) as pool:
        futures = [pool.submit(llm.generate, f"prompt {i}", **LONG) for i in range(5)]
        assert soon(lambda: llm.engine.runner.num_steps > 3)
        within_time(llm.close)
        within_time(llm.close)
        for future in futures:
            with pytest.raises(RuntimeError, match="engine is closed"):
                future.result(PATIENCE)
    with pytest.raises(RuntimeError, match="engine is closed"):
        llm.generate("later")
    assert llm.frontend.error is None


def test_many_threads_may_submit_at_once(llm):
    """M7: 16 threads, 160 requests, 4 rows; each answer is that of its own prompt."""
    prompts = [f"prompt number {i % 40}" for i in range(160)]
    expected = {prompt: llm.generate(prompt, max_tokens=9, ignore_eos=True).ids for prompt in prompts[:40]}
    with ThreadPoolExecutor(16) as pool:
        done = list(pool.map(lambda p: llm.generate(p, max_tokens=9, ignore_eos=True).ids, prompts))
    assert done == [expected[prompt] for prompt in prompts]
    assert soon(lambda: is_idle(llm))
    llm.engine.pool.check_integrity()


def run_async(work: Callable[[], Awaitable[Any]]) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(work(), PATIENCE)

    return asyncio.run(limited())


def test_the_async_variants_give_what_the_others_give(llm):
    """O2: one loop, many requests at once."""
    prompts = [f"prompt {i}" for i in range(9)]
    expected = llm.generate(prompts, max_tokens=20)

    async def work() -> None:
        done = await llm.agenerate(prompts, max_tokens=20)
        assert [c.ids for c in done] == [c.ids for c in expected]
        assert (await llm.agenerate(prompts[3], max_tokens=20)).text == expected[3].text
        chunks = [chunk async for chunk in llm.astream(prompts[5], max_tokens=20)]
        assert [i for chunk in chunks for i in chunk.ids] == expected[5].ids
        assert "".join(chunk.text for chunk in chunks) == chunks[-1].completion.text == expected[5].text
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)

    run_async(work)
    assert soon(lambda: is_idle(llm))


def test_cancelling_a_task_aborts_its_requests(llm):
    """M6: a disconnected client is a cancelled task; all prompts of an agenerate end with it."""
    expected = llm.generate("beside", **LONG).ids

    async def read(n: int) -> None:
        async for _ in llm.astream(f"stream {n}", **LONG):
            pass

    async def work() -> None:
        beside = asyncio.create_task(llm.agenerate("beside", **LONG))
        tasks = [asyncio.create_task(read(n)) for n in range(6)]
        tasks.append(asyncio.create_task(llm.agenerate([f"list {n}" for n in range(5)], **LONG)))
        await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        for task in tasks:
            with pytest.raises(asyncio.CancelledError):
                await task
        assert (await beside).ids == expected

    run_async(work)
    assert soon(lambda: is_idle(llm))
    llm.engine.pool.check_integrity()


def test_closing_an_async_stream_aborts_the_request_at_once(llm):
    """M6: not only when the garbage collector comes by."""
    aborted = []
    abort = llm.frontend.abort
    llm.frontend.abort = lambda request: (aborted.append(request), abort(request))

    async def work() -> None:
        stream = llm.astream("gone", **LONG)
        await anext(stream)
        assert not aborted
        await stream.aclose()
        assert len(aborted) == 1

    run_async(work)
    assert soon(lambda: is_idle(llm))


def test_an_event_loop_that_closes_between_check_and_call_harms_nobody_else(llm):
    """M6: a loop may die in the very moment in which its delta arrives."""

    class DyingLoop:
        def is_closed(self) -> bool:
            return False

        def call_soon_threadsafe(self, *_: object) -> None:
            raise RuntimeError("Event loop is closed")

    request = llm.make_request("orphan", **LONG)
    llm.frontend.submit(request, AsyncOutbox(DyingLoop()))  # type: ignore[arg-type]
    assert len(within_time(lambda: llm.generate("others", max_tokens=7, ignore_eos=True)).ids) == 7
    assert soon(lambda: is_idle(llm))
    assert llm.frontend.error is None


def test_requests_of_a_closed_loop_are_aborted(llm):
    """Fault: they were decoded to their ends, in rows and pages that others wait for, and nobody read them."""
    loop = asyncio.new_event_loop()
    loop.close()
    requests = [llm.make_request(f"orphan {n}", **LONG) for n in range(3)]
    requests.append(llm.make_request("ends in its first step", max_tokens=1))
    for request in requests:
        llm.frontend.submit(request, AsyncOutbox(loop))
    assert soon(lambda: all(request.finish_reason for request in requests) and is_idle(llm))
    assert [request.finish_reason for request in requests] == ["abort"] * 3 + ["length"]
    assert [request.num_output for request in requests[:3]] == [1] * 3
    assert llm.frontend.error is None


def test_a_loop_that_is_closed_with_requests_under_way_harms_nobody_else(llm):
    """M6: asyncio.run was left by an exception, for example."""

    async def leave() -> None:
        stream = llm.astream("left", **LONG)
        await anext(stream)
        raise KeyError("the caller's own fault")

    for _ in range(3):
        with pytest.raises(KeyError), contextlib.closing(asyncio.new_event_loop()) as loop:
            loop.run_until_complete(leave())
    assert len(within_time(lambda: llm.generate("others", max_tokens=7, ignore_eos=True)).ids) == 7
    assert soon(lambda: is_idle(llm))


def test_one_call_per_loop_and_step_serves_all_its_requests(llm):
    """However many requests of a loop a step advances, its loop is woken once."""
    calls = []

    async def work() -> None:
        loop = asyncio.get_running_loop()
        call = loop.call_soon_threadsafe

        def counted(f: Callable[..., Any], *args: Any) -> Any:
            if args and isinstance(args[0], list):  # deltas; the rest is from threads that prepare requests
                calls.append(len(args[0]))
            return call(f, *args)

        loop.call_soon_threadsafe = counted  # type: ignore
        await llm.agenerate([f"p{i}" for i in range(4)], max_tokens=20, ignore_eos=True)
        loop.call_soon_threadsafe = call  # type: ignore[method-assign]

    run_async(work)
    assert len(calls) <= llm.engine.runner.num_steps
    assert max(calls) == 4


# The life of the process and of the model in it


def run_script(script: str) -> tuple[int, str, str]:
    """Runs a program over a tiny model; returns its exit code and what it wrote to both streams."""
    start = """
        import torch
        from scripted import make_llm
        from lampejo.runner import Runner
        from tiny import make_target
        torch.set_num_threads(1)
        llm = make_llm(Runner(make_target(), None, 16, 32), max_context=512, num_pages=16)
        LONG = {"max_tokens": 400, "ignore_eos": True}
    """
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-W",
            "ignore:.*fork:DeprecationWarning",
            "-c",
            textwrap.dedent(start) + textwrap.dedent(script),
        ],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_program_may_end_in_the_middle_of_a_stream():
    """Fault: the thread was still inside torch when the interpreter came down, and the process aborted (rc 134)."""
    script = """
        stream = llm.stream("a long answer", **LONG)
        for _ in range(3):
            next(stream)
        print("done")
    """
    assert run_script(script) == (0, "done\n", "")


def test_a_program_that_fails_in_the_middle_of_a_stream_ends_with_its_own_error():
    """Fault: as above; the user saw an abort of the process instead of the exit code of the exception."""
    code, _, errors = run_script("""
        for chunk in llm.stream("a long answer", **LONG):
            raise KeyError("the caller's own fault")
    """)
    assert code == 1
    assert errors.splitlines()[-1] == 'KeyError: "the caller\'s own fault"'


def test_a_model_that_is_dropped_is_freed_with_its_thread():
    """Fault: the thread kept engine and weights of every model that was ever loaded."""
    num_threads, freed = threading.active_count(), []
    for _ in range(3):
        llm = scripted_llm(random_target())
        llm.generate("a prompt", max_tokens=3)
        unread = llm.stream("half read", **LONG)
        next(unread)
        freed += [weakref.ref(llm), weakref.ref(llm.engine), weakref.ref(llm.engine.runner)]
        del llm
        assert next(unread).ids  # a stream under way keeps its model
        del unread
        gc.collect()
    assert soon(lambda: threading.active_count() == num_threads)
    assert soon(lambda: [ref() for ref in freed] == [None] * 9)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_a_forked_process_is_told_to_load_the_model_again():
    """Fault: a fork has no engine thread, so every request waited for ever; also with a stream of the parent's open."""
    script = """
        import asyncio, os, warnings
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)  # Python 3.12 warns of the threads
        stream = llm.stream("a long answer", **LONG)
        next(stream)
        child = os.fork()
        if not child:
            asked = [llm.generate, lambda prompt: next(llm.stream(prompt)), lambda p: asyncio.run(llm.agenerate(p))]
            for ask in asked:
                try:
                    ask("a prompt")
                except RuntimeError as error:
                    print(error, flush=True)
            llm.close()
            raise SystemExit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert len(llm.generate("the parent goes on", **LONG).ids) == 400
    """
    code, output, errors = run_script(script)
    assert (code, errors) == (0, "")
    assert output.count("load it again in this process") == 3

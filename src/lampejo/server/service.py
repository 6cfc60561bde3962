"""Between the protocols and the engine: who is let in, for how long, and what comes out of each step.

A protocol makes a ``Job`` of a body; ``Service.start`` checks everything about it, queues its requests and gives
``Answers``, from which pieces come as steps commit them.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from lampejo.answer import Content, Event, ThoughtCounter, ToolStart
from lampejo.answer_parser import AnswerParser
from lampejo.api import LLM, Chunk, Progress, Prompt
from lampejo.errors import UserError
from lampejo.frontend import AsyncOutbox
from lampejo.request import DraftStats, Request
from lampejo.server.config import ServerConfig
from lampejo.server.counts import Counts, Watch
from lampejo.server.errors import BROKEN, TIMED_OUT, TOO_MANY, ApiError, from_user_error, refused, shutting_down
from lampejo.tokenizer import Tokenizer

MAX_ENCODED_BYTES = 2_000_000
BYTES_PER_TOKEN = 16  # of JSON, more than any text has in the mean; what fills the context has to be countable
MAX_REQUESTS = 1024  # of one job: prompts times answers to each


@dataclass(frozen=True)
class Job:
    """What is asked, whatever the protocol.

    params: keyword arguments of ``LLM.make_request``; n: answers to each prompt, with seeds seed, seed + 1, ...; tools:
    those that a chat offers, None for text that is no chat and has neither reasoning nor calls; names: what the
    protocol calls fields of ``params`` that have another name there, for errors; only_prompt: what is decoded
    is told to nobody, and not counted.
    """

    prompts: Sequence[Prompt]
    params: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    tools: Sequence[Mapping[str, Any]] | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    only_prompt: bool = False


@dataclass(frozen=True)
class Piece:
    """What one step added to the answer ``index`` (prompt by prompt, n of each). ``finish_reason`` ends it: "stop",
    "length" or "tool_calls"."""

    index: int
    events: Sequence[Event]
    chunk: Chunk
    finish_reason: str | None = None
    timed_out: bool = False


@dataclass
class _Answer:
    """One request on its way."""

    index: int
    request: Request
    progress: Progress
    watch: Watch
    parser: AnswerParser | None = None
    thoughts: ThoughtCounter | None = None
    called: bool = False  # a tool

    @property
    def num_reasoning(self) -> int:
        return self.thoughts.num_tokens if self.thoughts else 0

    def piece(self, chunk: Chunk, tokenizer: Tokenizer) -> Piece:
        if self.thoughts is not None:
            for token_id in chunk.ids:
                self.thoughts.push(tokenizer.piece(token_id))
        events = self._events(chunk.text, bool(chunk.finish_reason))
        finish_reason = chunk.finish_reason
        if finish_reason == "stop" and self.called:
            finish_reason = "tool_calls"
        return Piece(self.index, events, chunk, finish_reason)

    def cut(self) -> Piece:
        """The end of an answer whose time is over."""
        return Piece(self.index, self._events("", True), Chunk("", [], [], [], "length"), "length", timed_out=True)

    def _events(self, text: str, is_last: bool) -> list[Event]:
        if self.parser is None:
            return [Content(text)] if text else []
        events = self.parser.push(text) if text else []
        if is_last:
            events = events + self.parser.finish()
        self.called = self.called or any(isinstance(event, ToolStart) for event in events)
        return events


class Answers:
    """The answers of one job, decoded together. Iterate once; ``close`` aborts what still runs, and has to be called if
    the iteration does not come to its end by itself."""

    def __init__(self, service: "Service", answers: Sequence[_Answer], outbox: AsyncOutbox, n: int) -> None:
        self._service = service
        self._answers = answers
        self._outbox = outbox
        self._n = n
        self._running = {answer.request.id: answer for answer in answers}
        self._closed = False
        self._ending = "abort"  # of those that still run when this is closed
        self.created = int(time.time())

    @property
    def requests(self) -> list[Request]:
        """In the order of the pieces' indices."""
        return [answer.request for answer in self._answers]

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts in OpenAI's shape, complete after the last piece. A prompt counts once, however many answers."""
        prompts = [answer.request for answer in self._answers[:: self._n]]
        num_prompt = sum(request.num_prompt for request in prompts)
        num_completion = sum(answer.watch.num_told for answer in self._answers)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": sum(request.num_cached or 0 for request in prompts)},
            "completion_tokens_details": {
                "reasoning_tokens": sum(answer.num_reasoning for answer in self._answers),
            },
        }

    @property
    def metrics(self) -> dict[str, Any]:
        """The ``metrics`` object of a response, over all answers."""
        stats = DraftStats()
        for answer in self._answers:
            stats.add(answer.request.stats)
        return {"speculative_decoding": stats.as_dict()}

    @property
    def first_token_s(self) -> float | None:
        """From arrival to the first token of any of the answers; None before."""
        seconds = [w.first_at - w.arrived_at for w in (answer.watch for answer in self._answers) if w.num_tokens]
        return min(seconds, default=None)

    @property
    def endings(self) -> list[str]:
        """How each answer ended; one that still runs will be aborted."""
        return [answer.request.finish_reason or self._ending for answer in self._answers]

    async def __aiter__(self) -> AsyncGenerator[Piece, None]:
        config, running = self._service.config, self._running
        left_s = config.timeout_s - (time.perf_counter() - self._answers[0].watch.arrived_at)
        if left_s <= 0:
            self._outbox.interrupt(TimeoutError())
        timer = self._outbox.loop.call_later(left_s, self._outbox.interrupt, TimeoutError())
        try:
            while running:
                try:
                    delta = await self._outbox.get()
                except TimeoutError:
                    if not any(answer.watch.num_tokens for answer in self._answers):
                        message = f"Nothing was generated within {config.timeout_s:g} seconds."
                        raise ApiError(TIMED_OUT, message, code="timeout") from None
                    for answer in list(running.values()):
                        yield answer.cut()
                    return
                except UserError as error:  # of this job alone: its grammar, once it was tried, was too much
                    self._ending = "error"
                    raise from_user_error(error) from error
                except Exception as error:  # what ended the engine
                    self._ending = "error"
                    raise self._service.failure(error) from error
                answer = running[delta.request.id]
                self._service.counts.step(answer.watch, delta)
                if delta.finish_reason:
                    del running[delta.request.id]
                yield answer.piece(answer.progress.chunk(delta), self._service.llm.tokenizer)
        finally:
            timer.cancel()
            self.close()

    def close(self) -> None:
        """Nobody wants more of them. Harmless when they are over already."""
        if self._closed:
            return
        self._closed = True
        for answer in self._running.values():
            self._service.llm.frontend.abort(answer.request)
            self._service.counts.broken_off(self._ending)
        self._running.clear()
        self._service.leave(len(self._answers))


# When an HTTP call came, by ``time.perf_counter``: before its body was read, and its grammar made.
ARRIVED: ContextVar[float | None] = ContextVar("arrived", default=None)
# What an HTTP call has started, for the access log; None where there is no log.
STARTED: ContextVar[list[Answers] | None] = ContextVar("started", default=None)


class Service:
    """One model, and who may use it now. All methods belong to the event loop's thread."""

    def __init__(self, llm: LLM, config: ServerConfig) -> None:
        self.llm = llm
        self.config = config
        self.draining = False
        self.ending = asyncio.Event()  # set once it drains; bodies that still come are waited for no longer
        self.num_active = 0  # requests that were let in and are not over
        self.counts = Counts()
        self.style = llm.style
        self.idle = asyncio.Event()
        self.idle.set()
        self._max_rows = llm.engine.scheduler.max_rows

    @property
    def num_running(self) -> int:
        """Requests that have a row of the batch. The engine's thread owns that list; its length alone is read."""
        return len(self.llm.engine.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Requests that were let in and have no row yet."""
        return max(0, self.num_active - self.num_running)

    @property
    def max_encoded_bytes(self) -> int:
        """Of a body whose text is encoded however long it is, unlike that of a prompt: some seconds of one core, and
        what Python's other threads wait for its ids stays below some tens of milliseconds."""
        return min(self.config.max_body_bytes, max(MAX_ENCODED_BYTES, BYTES_PER_TOKEN * self.llm.max_context))

    @property
    def error(self) -> BaseException | None:
        """What ended the engine, None while it works."""
        return self.llm.frontend.error

    async def start(self, job: Job) -> Answers:
        """Queues a job's requests. ``ApiError`` before anything is sent: malformed, too many, shutting down, broken."""
        num_requests = len(job.prompts) * job.n
        if not 1 <= num_requests <= MAX_REQUESTS:
            raise refused(
                "n" if job.n > 1 else "prompt", f"{num_requests} answers at once; 1 to {MAX_REQUESTS} can be."
            )
        arrived_at = ARRIVED.get() or time.perf_counter()
        self._let_in(num_requests)
        self._enter(num_requests)
        try:
            requests = await asyncio.to_thread(self._requests, job)
            outbox = AsyncOutbox(asyncio.get_running_loop())
            answers = [
                _Answer(i, r, Progress(r), Watch(arrived_at, not job.only_prompt)) for i, r in enumerate(requests)
            ]
            if job.tools is not None:
                for answer in answers:
                    self._take_apart(answer, job.tools)
            for request in requests:
                self.llm.frontend.submit(request, outbox)
        except UserError as error:
            self.leave(num_requests)
            raise from_user_error(error, job.names) from error
        except RuntimeError as error:  # the engine is closed or broken
            self.leave(num_requests)
            raise self.failure(error) from error
        except BaseException:
            self.leave(num_requests)
            raise
        started = Answers(self, answers, outbox, job.n)
        if (of_this_call := STARTED.get()) is not None:
            of_this_call.append(started)
        return started

    def _requests(self, job: Job) -> list[Request]:
        """Renders, encodes and checks; not in the event loop's thread, since prompts may be long."""
        requests = []
        seed = job.params.get("seed")
        for prompt in job.prompts:
            first = self.llm.make_request(prompt, **job.params)
            requests.append(first)
            for i in range(1, job.n):
                requests.append(self.llm.another(first, None if seed is None else seed + i))
        return requests

    def _take_apart(self, answer: _Answer, tools: Sequence[Mapping[str, Any]]) -> None:
        start = self.llm.answer_start(answer.request.prompt_ids)
        answer.parser, answer.thoughts = AnswerParser(start, tools), ThoughtCounter(start)

    def _let_in(self, num_requests: int) -> None:
        """A job that has more requests than can ever wait beside others is taken when there are none."""
        if self.error is not None:
            raise self.failure(self.error)
        if self.draining:
            raise shutting_down()
        most = self._max_rows + self.config.max_queue
        if self.num_active and self.num_active + num_requests > most:
            message = f"{self.num_active} requests are running or waiting; try again later."
            if num_requests > 1:
                message += f" This call has {num_requests}, and {most} can be beside others: try fewer."
            raise ApiError(
                TOO_MANY,
                message,
                code="queue_full",
                headers={"Retry-After": str(self.retry_after_s())},
            )

    def retry_after_s(self) -> int:
        """When a place may be free: by how long requests have taken so far, 1 to 60 seconds."""
        whole, num_before = self.counts.whole, max(0, self.num_active - self._max_rows)
        seconds = whole.sum / max(1, sum(whole.counts)) * (1 + num_before) / self._max_rows
        return min(max(1, math.ceil(seconds)), 60)

    def failure(self, error: BaseException) -> ApiError:
        """The engine has ended: 500, or 503 if it was told to."""
        if self.error is None:
            return shutting_down()
        cause = error.__cause__ or error
        return ApiError(BROKEN, f"The engine has failed: {cause}", code="engine_failed")

    def _enter(self, num_requests: int) -> None:
        self.num_active += num_requests
        self.idle.clear()

    def leave(self, num_requests: int) -> None:
        """Counts a job's requests out, whatever became of them."""
        self.num_active -= num_requests
        if self.num_active == 0:
            self.idle.set()

"""A job's answers as an HTTP response: a stream of events, or whole once all is there."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from lampejo.request import Request as EngineRequest
from lampejo.server.http import EventStream, JsonResponse, to_long_json, unless_gone
from lampejo.server.service import Answers, Job, Service
from lampejo.tokenizer import Tokenizer


class Writer(Protocol):
    """Pieces of answers in the shape of one protocol. Either method is called once, and closes the answers."""

    def stream(self, answers: Answers) -> AsyncGenerator[bytes, None]: ...
    async def whole(self, answers: Answers) -> dict[str, Any]: ...


async def respond(request: Request, service: Service, job: Job, writer: Writer, is_streamed: bool | None) -> Response:
    """Starts the job. Its work ends with the client's connection; the request's body must have been read."""
    if is_streamed:
        answers = await service.start(job)
        return EventStream(writer.stream(answers), service.config.keep_alive_s, answers.close)

    async def work() -> Response:
        told = await writer.whole(await service.start(job))
        if job.params.keys() & {"logprobs", "prompt_logprobs"}:  # megabytes
            return Response(await asyncio.to_thread(to_long_json, told), media_type="application/json")
        return JsonResponse(told)

    return await unless_gone(request, work())


def prompt_logprobs(tokenizer: Tokenizer, request: EngineRequest, num_top: int) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: for each token of the prompt its log probability and those of the ``num_top``
    likeliest, by id; None for the first, before which nothing is. A rank beyond these is not known, and null."""
    told: list[dict[str, Any] | None] = [None]
    for entry in request.of_prompt:
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(entry.top[:num_top], start=1)}
        logprobs = dict(entry.top[:num_top]) | {entry.token_id: entry.logprob}
        told.append(
            {
                str(token_id): {
                    "logprob": max(logprob, -9999.0),
                    "rank": ranks.get(token_id),
                    "decoded_token": tokenizer.token_text(token_id).text,
                }
                for token_id, logprob in logprobs.items()
            }
        )
    return told

"""A job's answers as an HTTP response: a stream of events, or whole once all is there."""

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from lampejo.server.http import EventStream, JsonResponse, unless_gone
from lampejo.server.service import Answers, Job, Service


class Writer(Protocol):
    """Pieces of answers in the shape of one protocol. Either method is called once, and closes the answers."""

    def stream(self, answers: Answers) -> AsyncGenerator[bytes, None]: ...
    async def whole(self, answers: Answers) -> dict[str, Any]: ...


async def respond(request: Request, service: Service, job: Job, writer: Writer, is_streamed: bool | None) -> Response:
    """Starts the job. Its work ends with the client's connection; the request's body must have been read."""
    if is_streamed:
        return EventStream(writer.stream(await service.start(job)), service.config.keep_alive_s)

    async def work() -> dict[str, Any]:
        return await writer.whole(await service.start(job))

    return JsonResponse(await unless_gone(request, work()))

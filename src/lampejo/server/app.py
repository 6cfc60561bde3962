"""The application: routes, checks before them, and errors in the shape of the API that was called."""

import logging
import time

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from lampejo import __version__, web
from lampejo.api import LLM
from lampejo.server import (
    anthropic,
    metrics,
    models_info,
    openai_chat,
    openai_completions,
    responses,
    security,
    tokens,
)
from lampejo.server.access_log import CLIENT_GONE, AccessLog
from lampejo.server.config import ServerConfig
from lampejo.server.errors import BROKEN, ApiError
from lampejo.server.http import JsonResponse, remember_abort
from lampejo.server.linger import Linger
from lampejo.server.service import ARRIVED, Service

LOG = logging.getLogger("lampejo.server")


def make_app(llm: LLM, config: ServerConfig) -> FastAPI:
    """``app.state.service`` is the service behind it."""
    app = _App(title="lampejo", version=__version__, redoc_url=None, openapi_tags=[])
    service = app.state.service = Service(llm, config)
    names = models_info.ModelName(service)
    app.include_router(openai_chat.routes(service, names))
    app.include_router(openai_completions.routes(service, names))
    app.include_router(responses.routes(service, names))
    app.include_router(anthropic.routes(service, names))
    app.include_router(tokens.routes(service, names))
    app.include_router(models_info.routes(service, names))
    app.include_router(metrics.routes(service, names.names[0]))
    app.include_router(web.routes())
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(Exception, _our_mistake)
    app.add_middleware(HeadAsGet)
    security.protect(app, config)
    app.add_middleware(AccessLog, counts=service.counts)
    app.add_middleware(Linger, ending=service.ending)
    return app


class HeadAsGet:
    """Whatever answers GET answers HEAD too; HTTP servers leave the body out by themselves."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self.app(scope, receive, send)


class _App(FastAPI):
    """Notes about a call what is only known outside of all layers: when it came, how its connection is dropped."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        remember_abort(scope, send)
        arrived = ARRIVED.set(time.perf_counter())
        try:
            await super().__call__(scope, receive, send)
        finally:
            ARRIVED.reset(arrived)


def _told(request: Request, error: ApiError) -> Response:
    return JsonResponse(error.body(request.url.path), status_code=error.status, headers=error.headers)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _told(request, error)


async def _http_exception(request: Request, error: Exception) -> Response:
    """No such path, or no such method there."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}. GET /openapi.json tells what there is."
    return _told(request, ApiError(error.status_code, message, headers=error.headers))


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)  # which nobody reads


async def _our_mistake(request: Request, error: Exception) -> Response:
    request_id = request.state.request_id
    LOG.error("%s %s failed (%s)", request.method, request.url.path, request_id, exc_info=error)
    message = f"Something went wrong in the server; its log tells what, under {request_id}."
    return _told(request, ApiError(BROKEN, message, headers={"X-Request-Id": request_id}))

"""What the server is and how it is: /v1/models, /health, /version."""

import hashlib
import json
import time
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from lampejo import __version__
from lampejo.api import LLM
from lampejo.errors import shown
from lampejo.server.errors import BROKEN, NOT_FOUND, UNAVAILABLE, ApiError
from lampejo.server.http import JsonResponse
from lampejo.server.service import Service
from lampejo.terminal import drafting_mode

_WEIGHTS = ("dtype", "weights", "kv_dtype", "quantization")
_DEFINING = ("model", "architecture", *_WEIGHTS, "ops", "device", "page_size", "policy")


def effective_mode(llm: LLM) -> dict[str, Any]:
    """How this server decodes: who drafts, how wide, on what, in which precision."""
    info = llm.info
    if not info:  # an engine without a model, in tests
        return {"mode": "plain decoding"}
    names = ("drafter", "drafters", "width", "policy", "lossless", "device", "ops", *_WEIGHTS)
    return {"mode": drafting_mode(info), **{name: info.get(name) for name in names}}


def fingerprint(llm: LLM) -> str:
    """OpenAI's ``system_fingerprint``: equal as long as the same request and seed give the same answer."""
    told = json.dumps([__version__, *(llm.info.get(name) for name in _DEFINING)], default=str)
    return "fp_" + hashlib.sha256(told.encode()).hexdigest()[:12]


class ModelName:
    """What the model is called, and what else it answers to."""

    def __init__(self, service: Service) -> None:
        own = service.llm.info.get("model", "model")
        self.names = tuple(dict.fromkeys([*service.config.names, own]))
        self.created = int(time.time())

    def check(self, name: str | None) -> str:
        """The name to tell in the response; ``ApiError`` if no such model is here."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            known = ", ".join(self.names)
            message = f"The model {shown(name)} is not here; this server has {known}."
            raise ApiError(NOT_FOUND, message, param="model", code="model_not_found")
        return name


def routes(service: Service, names: ModelName) -> APIRouter:
    router = APIRouter()
    llm = service.llm

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": names.created,
            "owned_by": "lampejo",
            "root": names.names[-1],
            "max_model_len": llm.max_context,
            "lampejo": effective_mode(llm),
        }

    @router.get("/v1/models", tags=["server"])
    async def models() -> Response:
        return JsonResponse({"object": "list", "data": [card(name) for name in names.names]})

    @router.get("/v1/models/{name:path}", tags=["server"])
    async def model(name: str) -> Response:
        return JsonResponse(card(names.check(name)))

    @router.get("/health", tags=["server"])
    async def health() -> Response:
        """200 while requests are taken; 503 while shutting down; 500 when the engine has failed."""
        status, told = (200, "ok") if not service.draining else (UNAVAILABLE, "shutting down")
        if service.error is not None:
            status, told = BROKEN, "failed"
        body = {"status": told, "model": names.names[0], **effective_mode(llm)}
        body |= {"num_requests_running": service.num_running}
        body |= {"num_requests_waiting": service.num_waiting}
        if service.error is not None:
            body["error"] = service.failure(service.error).message
        return JsonResponse(body, status_code=status)

    @router.get("/version", tags=["server"])
    async def version() -> Response:
        return JsonResponse({"version": __version__})

    return router

"""/tokenize and /detokenize: text to ids and back, as vLLM and llama-server have them."""

from typing import Any

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from lampejo.errors import UserError
from lampejo.server.chat_job import Chat, chat_job
from lampejo.server.errors import from_user_error, refused
from lampejo.server.fields import Body, read, schema_of
from lampejo.server.http import JsonResponse
from lampejo.server.models_info import ModelName
from lampejo.server.service import Service


class TokenizeBody(Body):
    """Text in ``prompt`` (or ``content``), or a chat in ``messages``."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = True


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[int]


def routes(service: Service, names: ModelName) -> APIRouter:
    router = APIRouter()
    llm = service.llm

    def encode(body: TokenizeBody) -> list[int]:
        if body.messages is None:
            text = body.prompt if body.prompt is not None else body.content
            assert text is not None
            return llm.tokenizer.encode(text, add_special_tokens=body.add_special_tokens) if text else []
        kwargs = {**(body.chat_template_kwargs or {}), "add_generation_prompt": body.add_generation_prompt}
        job = chat_job(Chat(body.messages, tools=body.tools or (), template_kwargs=kwargs), service.style)
        return llm.encode(job.prompts[0], **job.params["chat_template_kwargs"])

    @router.post("/tokenize", tags=["server"], openapi_extra=schema_of(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """Ids of a text or a chat."""
        body = await read(request, TokenizeBody, service.config.max_body_bytes)
        names.check(body.model)
        if (body.messages is None) == (body.prompt is None and body.content is None):
            raise refused("prompt", "give either prompt or messages.")
        try:
            ids = await run_in_threadpool(encode, body)
        except UserError as error:
            raise from_user_error(error) from error
        return JsonResponse({"count": len(ids), "max_model_len": llm.max_context, "tokens": ids})

    @router.post("/detokenize", tags=["server"], openapi_extra=schema_of(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """Text of ids."""
        body = await read(request, DetokenizeBody, service.config.max_body_bytes)
        names.check(body.model)
        try:
            ids = llm.encode(body.tokens) if body.tokens else []  # for its checks
            text = await run_in_threadpool(llm.tokenizer.decode, ids)
        except UserError as error:
            raise refused("tokens", str(error)) from error
        return JsonResponse({"prompt": text, "content": text})

    return router

"""/tokenize and /detokenize: text to ids and back, as vLLM and llama-server have them."""

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

from fastapi import APIRouter
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
    continue_final_message: bool = False
    add_special_tokens: bool | None = None  # vLLM's name
    add_special: bool | None = None  # llama-server's
    return_token_strs: bool | None = None

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "chat_template": (),
        "mm_processor_kwargs": ({},),
        "parse_special": (True,),
        "with_pieces": (False,),
    }

    @property
    def adds_special(self) -> bool | None:
        return self.add_special if self.add_special_tokens is None else self.add_special_tokens


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[int]


def routes(service: Service, names: ModelName) -> APIRouter:
    router = APIRouter()
    llm = service.llm

    def tokenized(body: TokenizeBody) -> Response:
        ids = encode(body)
        told: dict[str, Any] = {"count": len(ids), "max_model_len": llm.max_context, "tokens": ids}
        if body.return_token_strs:
            told["token_strs"] = [llm.tokenizer.token_text(token_id).text for token_id in ids]
        return JsonResponse(told)

    def encode(body: TokenizeBody) -> list[int]:
        if body.messages is None:
            text = body.prompt if body.prompt is not None else body.content
            assert text is not None
            return llm.tokenizer.encode(text, add_special_tokens=body.adds_special is not False) if text else []
        if body.adds_special:
            raise refused("add_special_tokens", "a chat has those that its template writes.")
        kwargs = {**(body.chat_template_kwargs or {}), "add_generation_prompt": body.add_generation_prompt}
        if body.continue_final_message:
            kwargs["continue_final_message"] = True
        job = chat_job(Chat(body.messages, tools=body.tools or (), template_kwargs=kwargs), service.style)
        return llm.encode(job.prompts[0], **job.params["chat_template_kwargs"])

    @router.post("/tokenize", tags=["server"], openapi_extra=schema_of(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """Ids of a text or a chat."""
        body = await read(request, TokenizeBody, service.max_encoded_bytes)
        names.check(body.model)
        if (body.messages is None) == (body.prompt is None and body.content is None):
            raise refused("prompt", "give either prompt or messages.")
        try:
            return await asyncio.to_thread(tokenized, body)
        except UserError as error:
            raise from_user_error(error) from error

    def decoded(ids: list[int]) -> Response:
        text = llm.tokenizer.decode(llm.encode(ids)) if ids else ""  # encoded for its checks
        return JsonResponse({"prompt": text, "content": text})

    @router.post("/detokenize", tags=["server"], openapi_extra=schema_of(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """Text of ids."""
        body = await read(request, DetokenizeBody, service.max_encoded_bytes)
        names.check(body.model)
        try:
            return await asyncio.to_thread(decoded, body.tokens)
        except UserError as error:
            raise refused("tokens", str(error)) from error

    return router

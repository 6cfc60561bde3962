"""/v1/messages and /v1/messages/count_tokens: Anthropic's Messages, stream or not.

What is not streamed is a fold over the same events. Beyond Anthropic: ``metrics`` with the statistics of speculation,
in the message or in the ``message_delta`` of a stream. ``cache_control``, ``metadata`` and ``service_tier`` are
accepted and change nothing: prefixes are cached by themselves, and there is one tier. Signatures of thinking blocks are
empty, and are not looked at when they come back.
"""

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lampejo.answer import Content, Event, Reasoning, ToolArguments, ToolStart
from lampejo.errors import UserError
from lampejo.request import Request as EngineRequest
from lampejo.server.anthropic_body import MessagesBody, PromptBody
from lampejo.server.chat_job import chat_job_of
from lampejo.server.errors import ApiError, from_user_error
from lampejo.server.fields import read, schema_of
from lampejo.server.http import JsonResponse, event
from lampejo.server.models_info import ModelName
from lampejo.server.respond import respond
from lampejo.server.service import Answers, Piece, Service


def routes(service: Service, names: ModelName) -> APIRouter:
    router = APIRouter()
    llm = service.llm

    @router.post("/v1/messages", tags=["anthropic"], openapi_extra=schema_of(MessagesBody))
    async def messages(request: Request) -> Response:
        """An answer to a chat, whole or as server-sent events."""
        body = await read(request, MessagesBody, service.config.max_body_bytes)
        name = names.check(body.model)
        job = await chat_job_of(body, service.style)
        head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": name}
        writer = MessageWriter(head, body.shows_thinking)
        return await respond(request, service, job, writer, body.stream)

    @router.post("/v1/messages/count_tokens", tags=["anthropic"], openapi_extra=schema_of(PromptBody))
    async def count_tokens(request: Request) -> Response:
        """How many tokens a chat has as a prompt."""
        body = await read(request, PromptBody, service.max_encoded_bytes)
        names.check(body.model)
        job = await chat_job_of(body, service.style)
        try:
            ids = await asyncio.to_thread(llm.encode, job.prompts[0], **job.params["chat_template_kwargs"])
        except UserError as error:
            raise from_user_error(error, job.names) from error
        return JsonResponse({"input_tokens": len(ids)})

    return router


class MessageWriter:
    """Pieces of an answer in Anthropic's shape."""

    def __init__(self, head: Mapping[str, Any], shows_thinking: bool) -> None:
        self.head = head
        self.content = _ContentBlocks(shows_thinking)

    async def stream(self, answers: Answers) -> AsyncGenerator[bytes, None]:
        try:
            async for told in self._events(answers):
                yield event(told, told["type"])
        except ApiError as error:
            yield event(error.anthropic(), "error")
        finally:
            answers.close()

    async def whole(self, answers: Answers) -> dict[str, Any]:
        message: dict[str, Any] = {}
        try:
            async for told in self._events(answers):
                if told["type"] == "message_start":
                    message = told["message"]
                elif told["type"] == "message_delta":
                    message |= {**told["delta"], "usage": told["usage"], "metrics": told["metrics"]}
        finally:
            answers.close()
        return {**message, "content": self.content.blocks}

    async def _events(self, answers: Answers) -> AsyncGenerator[dict[str, Any], None]:
        """The message starts with its first token: only then it is known how much of the prompt was cached."""
        begun = False
        async for piece in answers:
            if not begun:
                start = {**self.head, "content": [], "stop_reason": None, "stop_sequence": None}
                yield {"type": "message_start", "message": {**start, "usage": _usage(answers)}}
                begun = True
            for part in piece.events:
                for told in self.content.add(part):
                    yield told
        for told in self.content.close():
            yield told
        delta = _ending(piece, answers.requests[0])
        yield {"type": "message_delta", "delta": delta, "usage": _usage(answers), "metrics": answers.metrics}
        yield {"type": "message_stop"}


class _ContentBlocks:
    """The content of a message. ``add`` and ``close`` give the events of a stream that add up to ``blocks``."""

    def __init__(self, shows_thinking: bool) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._shows_thinking = shows_thinking
        self._is_open = False
        self._texts: list[str] = []  # of the open block

    def add(self, part: Event) -> list[dict[str, Any]]:
        if isinstance(part, Content):
            return self._add_text({"type": "text", "text": ""}, part.text)
        if isinstance(part, Reasoning):
            return self._add_text({"type": "thinking", "thinking": "", "signature": ""}, part.text)
        if isinstance(part, ToolStart):
            call_id = f"toolu_{part.id.removeprefix('call_')}"
            return self._open({"type": "tool_use", "id": call_id, "name": part.name, "input": {}})
        if isinstance(part, ToolArguments):
            return [self._delta({"type": "input_json_delta", "partial_json": part.text}, part.text)]
        return self.close()

    def close(self) -> list[dict[str, Any]]:
        if not self._is_open:
            return []
        block, text = self.blocks[-1], "".join(self._texts)
        if block["type"] == "tool_use":
            block["input"] = _arguments(text)
        else:
            block[block["type"]] = text
        self._is_open, self._texts = False, []
        return [{"type": "content_block_stop", "index": len(self.blocks) - 1}]

    def _add_text(self, empty: dict[str, Any], text: str) -> list[dict[str, Any]]:
        kind = empty["type"]
        is_new = not self._is_open or self.blocks[-1]["type"] != kind
        told = self._open(empty) if is_new else []
        if kind == "text" or self._shows_thinking:
            told.append(self._delta({"type": f"{kind}_delta", kind: text}, text))
        return told

    def _open(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        told = self.close()
        self.blocks.append(block)
        self._is_open = True
        return [*told, {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}]

    def _delta(self, delta: dict[str, Any], text: str) -> dict[str, Any]:
        self._texts.append(text)
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def _arguments(text: str) -> dict[str, Any]:
    """Of a call; an empty object if the answer was cut before they were complete."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _ending(last: Piece, request: EngineRequest) -> dict[str, Any]:
    match = request.text.stop_match if request.text else None
    reason = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}[last.finish_reason or "stop"]
    if match is not None:
        reason = "stop_sequence"
    elif last.finish_reason == "length" and not last.timed_out and request.num_output != request.stops.max_tokens:
        reason = "model_context_window_exceeded"
    return {"stop_reason": reason, "stop_sequence": match}


def _usage(answers: Answers) -> dict[str, Any]:
    """Anthropic counts what came from the cache apart."""
    usage = answers.usage
    num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
    }

"""/v1/responses: OpenAI's Responses, stream or not, without a memory: nothing is stored, whatever ``store`` says; the
client sends the whole conversation each time.

What is not streamed is a fold over the same events. Reasoning is told in ``content``, never as a summary. Its
``encrypted_content``, for clients that ask for it and send that back alone, is the same text in base64. Beyond OpenAI:
``metrics`` with the statistics of speculation, and the fields of ``SamplingBody``.
"""

import base64
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lampejo.answer import Content, Event, Reasoning, ToolArguments, ToolStart
from lampejo.server.chat_job import chat_job_of
from lampejo.server.errors import BROKEN, ApiError
from lampejo.server.fields import read, schema_of
from lampejo.server.http import event
from lampejo.server.models_info import ModelName
from lampejo.server.respond import respond
from lampejo.server.responses_body import ResponsesBody
from lampejo.server.service import Answers, Service


def routes(service: Service, names: ModelName) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/responses", tags=["openai"], openapi_extra=schema_of(ResponsesBody))
    async def responses(request: Request) -> Response:
        """An answer to a chat, whole or as server-sent events."""
        body = await read(request, ResponsesBody, service.config.max_body_bytes)
        name = names.check(body.model)
        body.check_stream()
        job = await chat_job_of(body, service.style)
        head = {"id": f"resp_{secrets.token_hex(24)}", "object": "response", "model": name, **body.echoed()}
        writer = ResponseWriter(head, body.encrypts)
        return await respond(request, service, job, writer, body.stream)

    return router


class ResponseWriter:
    """Pieces of an answer in the shape of Responses."""

    def __init__(self, head: Mapping[str, Any], encrypts: bool) -> None:
        self.head = head
        self.output = _Output(encrypts)

    async def stream(self, answers: Answers) -> AsyncGenerator[bytes, None]:
        number = 0
        try:
            async for told in self._events(answers):
                yield event({"type": told["type"], "sequence_number": number, **told}, told["type"])
                number += 1
        except ApiError as error:
            code = "server_error" if error.status >= BROKEN else "invalid_prompt"
            failure = {"code": code, "message": error.message}
            response = self._response(answers, "failed", error=failure)
            told = {"type": "response.failed", "sequence_number": number, "response": response}
            yield event(told, told["type"])
        finally:
            answers.close()

    async def whole(self, answers: Answers) -> dict[str, Any]:
        response: dict[str, Any] = {}
        try:
            async for told in self._events(answers):
                response = told.get("response", response)
        finally:
            answers.close()
        return response

    async def _events(self, answers: Answers) -> AsyncGenerator[dict[str, Any], None]:
        for kind in ("response.created", "response.in_progress"):
            yield {"type": kind, "response": self._response(answers, "in_progress")}
        async for piece in answers:
            for part in piece.events:
                for told in self.output.add(part):
                    yield told
        is_cut = piece.finish_reason == "length"
        for told in self.output.close("incomplete" if is_cut else "completed"):
            yield told
        more: dict[str, Any] = {"usage": _usage(answers), "metrics": answers.metrics}
        if is_cut:
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        status = "incomplete" if is_cut else "completed"
        yield {"type": f"response.{status}", "response": self._response(answers, status, **more)}

    def _response(self, answers: Answers, status: str, **more: Any) -> dict[str, Any]:
        sampling = answers.requests[0].sampling
        return {
            **self.head,
            "created_at": answers.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": self.output.items,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "usage": None,
            **more,
        }


class _Output:
    """The items of a response. ``add`` and ``close`` give the events of a stream that add up to ``items``."""

    def __init__(self, encrypts: bool) -> None:
        self.items: list[dict[str, Any]] = []
        self._encrypts = encrypts
        self._is_open = False
        self._texts: list[str] = []  # of the open item

    def add(self, part: Event) -> list[dict[str, Any]]:
        if isinstance(part, Content):
            told = [] if self._is("message") else self._open("message", role="assistant", content=[])
            return [*told, self._delta("response.output_text.delta", part.text, content_index=0, logprobs=[])]
        if isinstance(part, Reasoning):
            told = [] if self._is("reasoning") else self._open("reasoning", summary=[], content=[])
            return [*told, self._delta("response.reasoning_text.delta", part.text, content_index=0)]
        if isinstance(part, ToolStart):
            return self._open("function_call", call_id=part.id, name=part.name, arguments="")
        if isinstance(part, ToolArguments):
            return [self._delta("response.function_call_arguments.delta", part.text)]
        return []  # the call's end is told with the next item, or with the answer's end, which may be a cut

    def close(self, status: str = "completed") -> list[dict[str, Any]]:
        if not self._is_open:
            return []
        item, text = self.items[-1], "".join(self._texts)
        self._is_open, self._texts = False, []
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            named = {"name": item["name"], "arguments": text}
            told = [self._event("response.function_call_arguments.done", **named)]
        else:
            part = _part(item["type"], text)
            item["content"] = [part]
            if self._encrypts and item["type"] == "reasoning":
                item["encrypted_content"] = base64.b64encode(text.encode("utf-8", "replace")).decode()
            more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            told = [
                self._event(f"response.{part['type']}.done", content_index=0, text=text, **more),
                self._event("response.content_part.done", content_index=0, part=part),
            ]
        return [*told, self._of_item("response.output_item.done")]

    def _is(self, kind: str) -> bool:
        return self._is_open and self.items[-1]["type"] == kind

    def _open(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        told = self.close()
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        item = {"id": f"{prefix}_{secrets.token_hex(24)}", "type": kind, "status": "in_progress", **fields}
        self.items.append(item)
        self._is_open = True
        told.append(self._of_item("response.output_item.added"))
        if kind != "function_call":
            told.append(self._event("response.content_part.added", content_index=0, part=_part(kind, "")))
        return told

    def _delta(self, kind: str, text: str, **fields: Any) -> dict[str, Any]:
        self._texts.append(text)
        return self._event(kind, delta=text, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}

    def _of_item(self, kind: str) -> dict[str, Any]:
        return {"type": kind, "output_index": len(self.items) - 1, "item": dict(self.items[-1])}


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "message":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": text}


def _usage(answers: Answers) -> dict[str, Any]:
    usage = answers.usage
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }

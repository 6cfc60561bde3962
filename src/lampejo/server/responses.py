"""/v1/responses: OpenAI's Responses, stream or not, without a memory: nothing is stored, whatever ``store`` says; the
client sends the whole conversation each time.

What is not streamed is a fold over the same events. Reasoning is told in ``content``, never as a summary. Its
``encrypted_content``, for clients that ask for it and send that back alone, is the same text in base64. Beyond OpenAI:
``metrics`` with the statistics of speculation, and the fields of ``SamplingBody``.
"""

import base64
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lampejo.answer import Content, Event, Reasoning, ToolArguments, ToolStart
from lampejo.server.chat_job import Chat, chat_job
from lampejo.server.errors import ApiError, refused
from lampejo.server.fields import read, schema_of
from lampejo.server.http import EventStream, JsonResponse, event, unless_gone
from lampejo.server.models_info import ModelName
from lampejo.server.sampling_fields import SamplingBody
from lampejo.server.service import Answers, Service

_ENCRYPTED = "reasoning.encrypted_content"


class ResponsesBody(SamplingBody):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    truncation: Literal["auto", "disabled"] | None = None  # a prompt that does not fit is an error with either
    chat_template_kwargs: dict[str, Any] | None = None

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "previous_response_id": (),
        "conversation": (),
        "prompt": (),
        "background": (False,),
        "background_options": (),
        "context_management": ([],),
        "moderation": (),
        "image": (),
        "top_logprobs": (0,),
        "n": (1,),
    }

    def chat(self) -> Chat:
        params = self.sampling()
        if self.is_traced:
            raise refused("lampejo.trace", "this API has no place for it; /v1/chat/completions has.")
        if "message.output_text.logprobs" in (self.include or ()):
            raise refused("include", "log probabilities are told by /v1/chat/completions only.")
        if self.max_output_tokens is not None:
            if self.max_output_tokens < 1:
                raise refused("max_output_tokens", "it must be at least 1.")
            params["max_tokens"] = self.max_output_tokens
        tools = [_tool(tool, i) for i, tool in enumerate(self.tools or ())]
        choice, names = _tool_choice(self.tool_choice)
        if names is not None:
            tools = [tool for tool in tools if tool["function"].get("name") in names]
        return Chat(
            _messages(self.instructions, self.input),
            params,
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            response_format=self._format(),
            template_kwargs=self._template_kwargs(),
            fields=self.model_dump(),
        )

    @property
    def encrypts(self) -> bool:
        return _ENCRYPTED in (self.include or ())

    def _format(self) -> Any:
        text = self.text or {}
        if text.get("verbosity") not in (None, "medium"):
            raise refused("text", "this server cannot set the verbosity. Leave it out.")
        return text.get("format")

    def _template_kwargs(self) -> dict[str, Any]:
        reasoning = self.reasoning or {}
        harmless = {"summary": "auto", "generate_summary": "auto", "context": "auto", "mode": "standard"}
        for name, value in harmless.items():
            if reasoning.get(name) not in (None, value):
                raise refused("reasoning", f"{name} cannot be {reasoning[name]!r} here. Leave it out.")
        kwargs = dict(self.chat_template_kwargs or {})
        effort = reasoning.get("effort")
        if effort is not None:
            if not isinstance(effort, str):
                raise refused("reasoning", "effort is none, minimal, low, medium, high, xhigh or max.")
            kwargs.setdefault("reasoning_effort", effort)
            if effort == "none":
                kwargs.setdefault("enable_thinking", False)
        return kwargs

    def echoed(self) -> dict[str, Any]:
        """What a response repeats of its request."""
        text, reasoning = self.text or {}, self.reasoning or {}
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "background": False,
            "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "service_tier": "default",
            "store": False,
            "text": {"format": text.get("format") or {"type": "text"}},
            "tool_choice": self.tool_choice or "auto",
            "tools": [{"strict": None, "parameters": None, **tool} for tool in self.tools or ()],
            "truncation": self.truncation or "disabled",
        }


def routes(service: Service, names: ModelName) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/responses", tags=["openai"], openapi_extra=schema_of(ResponsesBody))
    async def responses(request: Request) -> Response:
        """An answer to a chat, whole or as server-sent events."""
        body = await read(request, ResponsesBody, service.config.max_body_bytes)
        name = names.check(body.model)
        body.check_stream()
        job = chat_job(body.chat(), service.style)
        head = {"id": f"resp_{secrets.token_hex(24)}", "object": "response", "model": name, **body.echoed()}
        writer = ResponseWriter(head, body.encrypts)
        if body.stream:
            answers = await service.start(job)
            return EventStream(writer.stream(answers), service.config.keep_alive_s)

        async def work() -> dict[str, Any]:
            return await writer.whole(await service.start(job))

        return JsonResponse(await unless_gone(request, work()))

    return router


# --- what is asked, in the words of chat completions ------------------------------------------------------------------


def _tool(tool: Mapping[str, Any], i: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise refused("tools", f"tool {i} is of type {tool.get('type')!r}; only functions can be called.")
    if tool.get("defer_loading") or tool.get("async") or tool.get("allowed_callers") not in (None, ["direct"]):
        raise refused("tools", f"tool {i} has more than name, description, parameters and strict.")
    names = ("name", "description", "parameters", "strict", "output_schema")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _tool_choice(choice: str | Mapping[str, Any] | None) -> tuple[str | dict[str, Any] | None, set[Any] | None]:
    """The choice, and the names of the functions among which it is, None for all of them."""
    if choice is None or isinstance(choice, str):
        return choice, None
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}, None
    allowed, mode = choice.get("tools"), choice.get("mode")
    if choice.get("type") != "allowed_tools" or mode not in ("auto", "required") or not isinstance(allowed, list):
        raise refused("tool_choice", "it is auto, none, required, a function, or allowed_tools with mode and tools.")
    names = {tool.get("name") for tool in allowed if isinstance(tool, Mapping) and isinstance(tool.get("name"), str)}
    return mode, names


def _messages(instructions: str | None, items: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The items of an answer (reasoning, text, calls) become one message again."""
    told: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(items, str):
        return [*told, {"role": "user", "content": items}]
    if not items:
        raise refused("input", "it is empty.")
    for i, item in enumerate(items):
        where = f"input[{i}]"
        kind = item.get("type", "message")
        if kind == "function_call_output":
            text = _text(item.get("output"), f"{where}.output")
            told.append({"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": text})
        elif kind == "function_call":
            call = {"name": _string(item, "name", where), "arguments": _string(item, "arguments", where)}
            calls = _assistants(told, "content", "reasoning_content", "tool_calls").setdefault("tool_calls", [])
            calls.append({"id": _string(item, "call_id", where), "type": "function", "function": call})
        elif kind == "reasoning":
            if thoughts := _thoughts(item, where):
                told.append({"role": "assistant", "reasoning_content": thoughts})
        elif kind == "message" and item.get("role") == "assistant":
            _assistants(told, "reasoning_content")["content"] = _text(item.get("content"), f"{where}.content")
        elif kind == "message" and item.get("role") in ("user", "system", "developer"):
            told.append({"role": item["role"], "content": _text(item.get("content"), f"{where}.content")})
        elif kind == "message":
            raise refused(f"{where}.role", f"it is {item.get('role')!r}; there are user, assistant, system, developer.")
        else:
            raise refused(where, f"{kind!r} is not supported; there are messages, reasoning and function calls.")
    return told


def _assistants(told: list[dict[str, Any]], *fields: str) -> dict[str, Any]:
    """The last message, if it is the assistant's and has no more than these fields; else a new one."""
    if not told or told[-1]["role"] != "assistant" or told[-1].keys() - {"role", *fields}:
        told.append({"role": "assistant"})
    return told[-1]


def _string(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise refused(f"{where}.{name}", "it must be a string.")
    return value


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refused(where, "it must be text or a list of parts.")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        name = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}.get(str(kind))
        if name is None:
            raise refused(f"{where}[{i}]", f"{kind!r} cannot be read; this model reads text alone.")
        texts.append(_string(part, name, f"{where}[{i}]"))
    return "\n".join(texts)


def _thoughts(item: Mapping[str, Any], where: str) -> str:
    content, encrypted = item.get("content") or (), item.get("encrypted_content")
    if isinstance(content, list):
        return "\n".join(_string(part, "text", where) for part in content if isinstance(part, Mapping))
    if encrypted is None:
        return ""  # a summary is none of the model's own words
    try:
        return base64.b64decode(encrypted, validate=True).decode()
    except (TypeError, ValueError):
        raise refused(f"{where}.encrypted_content", "it is not of this server.") from None


# --- what is answered -------------------------------------------------------------------------------------------------


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
            failure = {"code": "server_error", "message": error.message}
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

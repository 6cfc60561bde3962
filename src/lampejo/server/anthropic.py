"""/v1/messages and /v1/messages/count_tokens: Anthropic's Messages, stream or not.

What is not streamed is a fold over the same events. Beyond Anthropic: ``metrics`` with the statistics of speculation,
in the message or in the ``message_delta`` of a stream. ``cache_control``, ``metadata`` and ``service_tier`` are
accepted and change nothing: prefixes are cached by themselves, and there is one tier. Signatures of thinking blocks are
empty, and are not looked at when they come back.
"""

import json
import re
import secrets
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from lampejo import request as engine
from lampejo.answer import Content, Event, Reasoning, ToolArguments, ToolStart
from lampejo.errors import UserError
from lampejo.server.chat_job import Chat, chat_job
from lampejo.server.errors import ApiError, from_user_error, refused
from lampejo.server.fields import Body, read, schema_of
from lampejo.server.http import EventStream, JsonResponse, event, unless_gone
from lampejo.server.models_info import ModelName
from lampejo.server.service import Answers, Piece, Service

# Claude Code begins its system prompt with a line for Anthropic's accounts. It has a hash of the request, so that with
# it no prefix would ever be found in the cache again.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")


class PromptBody(Body):
    """What makes a prompt; all that counting its tokens takes."""

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "container": (),
        "mcp_servers": ([],),
        "diagnostics": (),
        "speed": ("standard",),
        "inference_geo": (),
        "compaction": (),
        "thread": (),
        "output_format": (),  # its place is output_config
        "lampejo": (),
    }

    def chat(self) -> Chat:
        for edit in (self.context_management or {}).get("edits") or ():
            if not (isinstance(edit, Mapping) and "thinking" in str(edit.get("type")) and edit.get("keep") == "all"):
                raise refused("context_management", "this server edits no context. Leave it out.")
        choice, parallel = _tool_choice(self.tool_choice or {"type": "auto"})
        config = self.output_config or {}
        return Chat(
            _messages(self.system, self.messages),
            self._params(),
            tools=[_tool(tool, i) for i, tool in enumerate(self.tools or ())],
            tool_choice=choice,
            parallel_tool_calls=parallel,
            response_format=config.get("format"),
            template_kwargs=self._template_kwargs(),
            fields=self.model_dump(),
        )

    @property
    def shows_thinking(self) -> bool:
        return (self.thinking or {}).get("display") != "omitted"

    def _params(self) -> dict[str, Any]:
        return {}

    def _template_kwargs(self) -> dict[str, Any]:
        kwargs: dict[str, Any] = {}
        if self.thinking is not None:
            kind = self.thinking.get("type")
            if kind not in ("enabled", "adaptive", "disabled"):
                raise refused("thinking", f"its type is {kind!r}; there are enabled, adaptive and disabled.")
            if self.thinking.get("display") not in (None, "summarized", "omitted"):
                raise refused("thinking", "its display is summarized or omitted.")
            kwargs["enable_thinking"] = kind != "disabled"
        effort = (self.output_config or {}).get("effort")
        if effort is not None:
            if not isinstance(effort, str):
                raise refused("output_config", "effort is low, medium, high, xhigh or max.")
            kwargs["reasoning_effort"] = effort
        return kwargs


class MessagesBody(PromptBody):
    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None

    def _params(self) -> dict[str, Any]:
        params = self.given("max_tokens", "temperature", "top_p", "top_k")
        if self.stop_sequences:
            if not all(self.stop_sequences):
                raise refused("stop_sequences", "one of them is empty.")
            params["stop"] = self.stop_sequences
        thinking = self.thinking or {}
        if thinking.get("type") == "enabled":
            budget = thinking.get("budget_tokens")
            if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
                raise refused("thinking", "it needs budget_tokens, a number of at least 1.")
            params["thinking_budget"] = budget
        return params


def routes(service: Service, names: ModelName) -> APIRouter:
    router = APIRouter()
    llm = service.llm

    @router.post("/v1/messages", tags=["anthropic"], openapi_extra=schema_of(MessagesBody))
    async def messages(request: Request) -> Response:
        """An answer to a chat, whole or as server-sent events."""
        body = await read(request, MessagesBody, service.config.max_body_bytes)
        name = names.check(body.model)
        job = chat_job(body.chat(), service.style)
        head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": name}
        writer = MessageWriter(head, body.shows_thinking)
        if body.stream:
            answers = await service.start(job)
            return EventStream(writer.stream(answers), service.config.keep_alive_s)

        async def work() -> dict[str, Any]:
            return await writer.whole(await service.start(job))

        return JsonResponse(await unless_gone(request, work()))

    @router.post("/v1/messages/count_tokens", tags=["anthropic"], openapi_extra=schema_of(PromptBody))
    async def count_tokens(request: Request) -> Response:
        """How many tokens a chat has as a prompt."""
        body = await read(request, PromptBody, service.config.max_body_bytes)
        names.check(body.model)
        job = chat_job(body.chat(), service.style)
        try:
            ids = await run_in_threadpool(llm.encode, job.prompts[0], **job.params["chat_template_kwargs"])
        except UserError as error:
            raise from_user_error(error, job.fields) from error
        return JsonResponse({"input_tokens": len(ids)})

    return router


# --- what is asked, in OpenAI's words ---------------------------------------------------------------------------------


def _tool(tool: Mapping[str, Any], i: int) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise refused("tools", f"this server has no {tool['type']!r} (tool {i}); only tools with an input_schema.")
    if tool.get("defer_loading") or tool.get("allowed_callers") not in (None, ["direct"]):
        raise refused("tools", f"tool {i} is not for the model itself, which this server does not support.")
    if not isinstance(tool.get("input_schema"), Mapping):
        raise refused("tools", f"tool {i} has no input_schema.")
    function = {name: tool[name] for name in ("name", "description") if tool.get(name) is not None}
    function["parameters"] = tool["input_schema"]
    function |= {name: tool[name] for name in ("strict", "input_examples") if tool.get(name)}
    return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, Any]) -> tuple[str | dict[str, Any], bool]:
    """The choice, and whether there may be several calls."""
    told = {"auto": "auto", "any": "required", "none": "none", "tool": None}
    kind = choice.get("type")
    if not isinstance(kind, str) or kind not in told:
        raise refused("tool_choice", f"its type is {kind!r}; there are auto, any, tool and none.")
    alone = choice.get("disable_parallel_tool_use")
    if alone is not None and not isinstance(alone, bool):
        raise refused("tool_choice", "disable_parallel_tool_use is true or false.")
    return told[kind] or {"type": "function", "function": {"name": choice.get("name")}}, not alone


Blocks = Sequence[tuple[str, Mapping[str, Any]]]  # each with where it stands


def _messages(system: str | Sequence[Any] | None, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages of one role in a row are one turn."""
    if not messages:
        raise refused("messages", "there is none.")
    told = _of_system(list(_blocks(system or [], "system")))
    makers = {"user": _of_user, "assistant": _of_assistant, "system": _of_system}
    for i, message in enumerate(messages):
        if message.get("role") not in makers:
            raise refused(f"messages[{i}].role", f"it is {message.get('role')!r}; there are user and assistant.")
    for role, turn in groupby(enumerate(messages), lambda pair: pair[1]["role"]):
        blocks = [block for i, message in turn for block in _blocks(message.get("content"), f"messages[{i}].content")]
        told += makers[role](blocks)
    if messages[-1]["role"] == "assistant":
        raise refused("messages", "the last is the assistant's; to have it continued is not supported.")
    return told


def _blocks(content: Any, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise refused(where, "it must be text or a list of blocks.")
    for i, block in enumerate(content):
        if not isinstance(block, Mapping):
            raise refused(f"{where}[{i}]", "it is no block.")
        yield f"{where}[{i}]", block


def _text(blocks: Blocks) -> str:
    texts = []
    for where, block in blocks:
        if block.get("type") != "text":
            raise refused(where, f"{block.get('type')!r} cannot be read there; this model reads text alone.")
        texts.append(_string(block, "text", where))
    return "\n".join(texts)


def _string(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise refused(f"{where}.{name}", "it must be a string.")
    return value


def _of_system(blocks: Blocks) -> list[dict[str, Any]]:
    text = _BILLING.sub("", _text(blocks))
    return [{"role": "system", "content": text}] if text else []


def _of_user(blocks: Blocks) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = []
    for is_result, part in groupby(blocks, lambda pair: pair[1].get("type") == "tool_result"):
        if not is_result:
            told.append({"role": "user", "content": _text(list(part))})
            continue
        for where, block in part:
            content = block.get("content")
            text = "" if content is None else _text(list(_blocks(content, f"{where}.content")))
            text = f"Error: {text}" if block.get("is_error") else text  # templates know no other way to say so
            told.append({"role": "tool", "tool_call_id": _string(block, "tool_use_id", where), "content": text})
    return told


def _of_assistant(blocks: Blocks) -> list[dict[str, Any]]:
    thoughts, texts, calls = [], [], []
    for where, block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(_string(block, "thinking", where))
        elif kind == "tool_use":
            if not isinstance(block.get("input"), Mapping):
                raise refused(f"{where}.input", "it must be an object.")
            function = {"name": _string(block, "name", where), "arguments": block["input"]}
            calls.append({"id": _string(block, "id", where), "type": "function", "function": function})
        else:
            texts.append(_text([(where, block)]))
    told: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if any(thoughts):
        told["reasoning_content"] = "\n".join(thoughts)
    return [told | ({"tool_calls": calls} if calls else {})]


# --- what is answered -------------------------------------------------------------------------------------------------


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


def _ending(last: Piece, request: engine.Request) -> dict[str, Any]:
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

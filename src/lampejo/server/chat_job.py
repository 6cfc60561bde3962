"""A chat of any protocol as a job: messages in the form that templates read, tools, and what takes the answer apart."""

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lampejo.answer import Style
from lampejo.errors import UserError, shown
from lampejo.grammar import Grammar
from lampejo.server.errors import from_user_error, refused
from lampejo.server.fields import part_text
from lampejo.server.service import Job

# In one chat. All of them go through its template, for whose loops Python takes some microseconds a message.
MAX_MESSAGES = 10_000
MAX_TOOLS = 1_000

_TEXTS = {"text": "text", "refusal": "refusal"}


@dataclass(frozen=True)
class Chat:
    """What a protocol asks for, in OpenAI's words. params: keyword arguments of ``LLM.make_request``; names: the
    protocol's own words for fields of these two, where they differ."""

    messages: Sequence[Mapping[str, Any]]
    params: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool = True
    response_format: Mapping[str, Any] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)


class ChatBody(Protocol):
    """A body of any protocol that asks for a chat."""

    def chat(self) -> Chat: ...


async def chat_job_of(body: ChatBody, style: Style) -> Job:
    """``chat_job`` in another thread: ten thousand messages and a grammar take their time."""
    return await asyncio.to_thread(lambda: chat_job(body.chat(), style))


def chat_job(chat: Chat, style: Style) -> Job:
    """style: how the model writes calls. ``ApiError`` for messages and tools that no template could render, for choices
    and formats that cannot be enforced."""
    if not chat.messages:
        raise refused("messages", "there are none.")
    for name, items, most in (("messages", chat.messages, MAX_MESSAGES), ("tools", chat.tools, MAX_TOOLS)):
        if len(items) > most:
            raise refused(chat.names.get(name, name), f"there are {len(items):,}; {most:,} can be. Leave some out.")
    template_kwargs = dict(chat.template_kwargs)
    tools = [_tool(tool, i) for i, tool in enumerate(chat.tools)]
    if chat.tool_choice == "none":
        tools = []
    if tools:
        if style.tools is None:
            raise refused(
                "tools",
                "this model's chat template knows none. Leave them out, or serve another, like qwen2.5-coder-1.5b.",
            )
        template_kwargs["tools"] = tools
    messages = [_message(message, i) for i, message in enumerate(chat.messages)]
    params = {**chat.params, "chat_template_kwargs": template_kwargs}
    try:
        grammar = _grammar(chat, tools, style)
    except UserError as error:
        raise from_user_error(error, chat.names) from error
    if grammar is not None:
        params["grammar"] = grammar
    return Job([messages], params, chat.n, tools, chat.names)


def _grammar(chat: Chat, tools: Sequence[Mapping[str, Any]], style: Style) -> Grammar | None:
    answer = Grammar.for_response_format(chat.response_format)
    if answer is None or not tools or chat.tool_choice not in (None, "auto"):
        return Grammar.for_tools(tools, chat.tool_choice, chat.parallel_tool_calls, style) or answer
    calls = Grammar.for_tools(tools, "required", chat.parallel_tool_calls, style)
    assert calls is not None
    return Grammar.either(calls, answer)


def _tool(tool: Mapping[str, Any], i: int) -> Mapping[str, Any]:
    if tool.get("type") != "function":
        raise refused("tools", f"tool {i} is of type {shown(tool.get('type'))}; only functions can be called.")
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise refused("tools", f"tool {i} has no function with a name.")
    if not isinstance(function.get("parameters", {}), Mapping):
        raise refused("tools", f"the parameters of {shown(function['name'])} are not a JSON schema.")
    return tool


def _message(message: Mapping[str, Any], i: int) -> dict[str, Any]:
    """Roles and contents as templates know them: text is one string, a call's arguments are an object."""
    told = {name: value for name, value in message.items() if value is not None}
    if told.get("role") == "developer":
        told["role"] = "system"
    for name in ("function_call", "audio"):
        if told.get(name):
            raise refused(f"messages[{i}].{name}", "templates do not read it. Calls go into tool_calls.")
    if "content" not in told and isinstance(told.get("refusal"), str):
        told["content"] = told["refusal"]
    if isinstance(told.get("reasoning"), str):  # vLLM's present name
        told.setdefault("reasoning_content", told["reasoning"])
    calls = told.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise refused(f"messages[{i}].tool_calls", "it must be a list.")
        told["tool_calls"] = [_call(call, f"messages[{i}].tool_calls[{j}]") for j, call in enumerate(calls)]
    elif "tool_calls" in told:
        del told["tool_calls"]
    if isinstance(told.get("content"), list):
        told["content"] = "\n".join(
            part_text(part, f"messages[{i}].content[{j}]", _TEXTS) for j, part in enumerate(told["content"])
        )
    if calls or told.get("reasoning_content"):
        told.setdefault("content", "")
    return told


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise refused(where, "a call has a function with name and arguments.")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # what a model wrote is not always JSON
            arguments = json.loads(arguments)
    return {**call, "function": {**function, "arguments": arguments}}

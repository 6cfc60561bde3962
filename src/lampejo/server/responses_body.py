"""Bodies of OpenAI's Responses, in the words of its chats."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lampejo.errors import shown
from lampejo.server.chat_job import Chat
from lampejo.server.errors import refused
from lampejo.server.fields import check_names, part_text, string
from lampejo.server.sampling_fields import Text, ThinkingBody, complete

NAMES = {
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "messages": "input",
}
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_ENCRYPTED = "reasoning.encrypted_content"


@complete
class ResponsesBody(ThinkingBody):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    metadata: dict[str, Text] | None = None

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"n": (1,), "prompt_logprobs": ()}
    places: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_output_tokens"),
        **dict.fromkeys(("messages", "prompt"), "input"),
        **dict.fromkeys(("response_format", "output_format"), "text.format"),
        **dict.fromkeys(("reasoning_effort", "output_config"), "reasoning.effort"),
        **dict.fromkeys(("n", "logprobs", "top_logprobs", "prompt_logprobs"), "/v1/chat/completions"),
        "system": "instructions",
        "stop_sequences": "stop",
    }

    def chat(self) -> Chat:
        params = self.sampling()
        self.check_untraced()
        if not all(isinstance(value, str) for value in (self.metadata or {}).values()):
            raise refused("metadata", "its values must be strings.")
        if "message.output_text.logprobs" in (self.include or ()):
            raise refused("include", "log probabilities are told by /v1/chat/completions only.")
        if self.max_output_tokens is not None:
            params["max_tokens"] = self.max_output_tokens
        (kwargs, budget), names = self.thoughts(self._effort(), "reasoning.effort"), dict(NAMES)
        if budget is not None:
            names["thinking_budget"], params["thinking_budget"] = budget
        tools = [_tool(tool, i) for i, tool in enumerate(self.tools or ())]
        choice, allowed = _tool_choice(self.tool_choice)
        if allowed is not None:
            tools = [tool for tool in tools if tool["function"].get("name") in tuple(allowed)]
        return Chat(
            _messages(self.instructions, self.input),
            params,
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            response_format=self._format(),
            template_kwargs=kwargs,
            names=names,
        )

    @property
    def encrypts(self) -> bool:
        return _ENCRYPTED in (self.include or ())

    def _format(self) -> Any:
        text = self.text or {}
        check_names(text, "text", ("format", "verbosity"))
        if text.get("verbosity") not in (None, "low", "medium", "high"):  # a hint, which changes nothing here
            raise refused("text.verbosity", "it is low, medium or high.")
        return text.get("format")

    def _effort(self) -> Any:
        reasoning = self.reasoning or {}
        harmless = {"summary": "auto", "generate_summary": "auto", "context": "auto", "mode": "standard"}
        check_names(reasoning, "reasoning", ("effort", *harmless))
        for name, value in harmless.items():
            if reasoning.get(name) not in (None, value):
                raise refused("reasoning", f"{name} cannot be {shown(reasoning[name])} here. Leave it out.")
        return reasoning.get("effort")

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
            "truncation": "disabled",
        }


def _tool(tool: Mapping[str, Any], i: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise refused("tools", f"tool {i} is of type {shown(tool.get('type'))}; only functions can be called.")
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
            told.append({"role": "tool", "tool_call_id": string(item, "call_id", where), "content": text})
        elif kind == "function_call":
            call = {"name": string(item, "name", where), "arguments": string(item, "arguments", where)}
            calls = _assistants(told, "content", "reasoning_content", "tool_calls").setdefault("tool_calls", [])
            calls.append({"id": string(item, "call_id", where), "type": "function", "function": call})
        elif kind == "reasoning":
            if thoughts := _thoughts(item, where):
                told.append({"role": "assistant", "reasoning_content": thoughts})
        elif kind == "message" and item.get("role") == "assistant":
            _assistants(told, "reasoning_content")["content"] = _text(item.get("content"), f"{where}.content")
        elif kind == "message" and item.get("role") in ("user", "system", "developer"):
            told.append({"role": item["role"], "content": _text(item.get("content"), f"{where}.content")})
        elif kind == "message":
            raise refused(
                f"{where}.role", f"it is {shown(item.get('role'))}; there are user, assistant, system, developer."
            )
        else:
            raise refused(where, f"{shown(kind)} is not supported; there are messages, reasoning and function calls.")
    return told


def _assistants(told: list[dict[str, Any]], *fields: str) -> dict[str, Any]:
    """The last message, if it is the assistant's and has no more than these fields; else a new one."""
    if not told or told[-1]["role"] != "assistant" or told[-1].keys() - {"role", *fields}:
        told.append({"role": "assistant"})
    return told[-1]


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refused(where, "it must be text or a list of parts.")
    return "\n".join(part_text(part, f"{where}[{i}]", _TEXTS) for i, part in enumerate(content))


def _thoughts(item: Mapping[str, Any], where: str) -> str:
    content, encrypted = item.get("content") or (), item.get("encrypted_content")
    if content:
        if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
            raise refused(f"{where}.content", "it must be a list of parts.")
        return "\n".join(string(part, "text", f"{where}.content") for part in content)
    if encrypted is None:
        return ""  # a summary is none of the model's own words
    try:
        return base64.b64decode(encrypted, validate=True).decode()
    except (TypeError, ValueError):
        raise refused(f"{where}.encrypted_content", "it is not of this server.") from None

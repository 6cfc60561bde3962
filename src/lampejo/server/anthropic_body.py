"""Bodies of Anthropic's Messages, in the words of OpenAI's chats."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar

from lampejo.errors import shown
from lampejo.server.chat_job import Chat
from lampejo.server.errors import refused
from lampejo.server.fields import check_names, part_text, string
from lampejo.server.sampling_fields import KNOWN, OwnBody, complete, tell_effort

NAMES = {
    "stop": "stop_sequences",
    "thinking_budget": "thinking.budget_tokens",
    "response_format": "output_config.format",
    "messages": "messages",  # as templates have them they are others, counted otherwise
    "continue_final_message": "messages",
    "chat_template_kwargs": "output_config",
}

# Claude Code begins its system prompt with a line for Anthropic's accounts. It has a hash of the request, so that with
# it no prefix would ever be found in the cache again.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")


class PromptBody(OwnBody):
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
        **{name: KNOWN[name] for name in ("container", "mcp_servers", "diagnostics", "speed", "compaction", "thread")},
        **{name: KNOWN[name] for name in ("enable_thinking", "reasoning_effort", "chat_template_kwargs")},
        **{name: KNOWN[name] for name in ("chat_template", "output_format")},
        "inference_geo": (),
    }
    places: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("response_format", "output_format"), "output_config.format"),
        **dict.fromkeys(("reasoning_effort", "reasoning"), "output_config.effort"),
        **dict.fromkeys(("enable_thinking", "chat_template_kwargs"), "thinking"),
        **dict.fromkeys(("thinking_token_budget", "thinking_budget"), "thinking.budget_tokens"),
        "thinking_budget_tokens": "thinking.budget_tokens",
        **dict.fromkeys(("max_completion_tokens", "max_output_tokens"), "max_tokens"),
        **dict.fromkeys(("input", "prompt"), "messages"),
        **dict.fromkeys(("n", "logprobs", "top_logprobs", "prompt_logprobs"), "/v1/chat/completions"),
        "instructions": "system",
        "stop": "stop_sequences",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    }

    def chat(self) -> Chat:
        edits = (self.context_management or {}).get("edits") or []
        if not isinstance(edits, list) or not all(map(_changes_nothing, edits)):
            raise refused("context_management", "this server edits no context. Leave it out.")
        choice, parallel = _tool_choice(self.tool_choice or {"type": "auto"})
        config = self.output_config or {}
        self.check_untraced()
        params = self._params()
        if not self.own("drafts", True):
            params["drafts"] = False
        return Chat(
            _messages(self.system, self.messages),
            params,
            tools=[_tool(tool, i) for i, tool in enumerate(self.tools or ())],
            tool_choice=choice,
            parallel_tool_calls=parallel,
            response_format=config.get("format"),
            template_kwargs=self._template_kwargs(),
            names=NAMES,
        )

    @property
    def shows_thinking(self) -> bool:
        return (self.thinking or {}).get("display") != "omitted"

    def _params(self) -> dict[str, Any]:
        return {}

    def _template_kwargs(self) -> dict[str, Any]:
        kwargs: dict[str, Any] = {}
        if self.messages and self.messages[-1].get("role") == "assistant":
            kwargs["continue_final_message"] = True  # Anthropic's prefill
        check_names(self.thinking, "thinking", ("type", "budget_tokens", "display"))
        check_names(self.output_config, "output_config", ("effort", "format"))
        if self.thinking is not None:
            kind = self.thinking.get("type")
            if kind not in ("enabled", "adaptive", "disabled"):
                raise refused("thinking", f"its type is {shown(kind)}; there are enabled, adaptive and disabled.")
            if kind != "enabled" and self.thinking.get("budget_tokens") is not None:
                raise refused("thinking", f"budget_tokens is of the type enabled, not {kind}.")
            if self.thinking.get("display") not in (None, "summarized", "omitted"):
                raise refused("thinking", "its display is summarized or omitted.")
            kwargs["enable_thinking"] = kind != "disabled"
        tell_effort((self.output_config or {}).get("effort"), "output_config.effort", kwargs)
        return kwargs


@complete
class MessagesBody(PromptBody):
    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None  # not of Anthropic
    stop_sequences: list[str] | None = None
    stream: bool | None = None

    def _params(self) -> dict[str, Any]:
        params = self.given("max_tokens", "temperature", "top_p", "top_k", "seed")
        if self.stop_sequences:
            if not all(self.stop_sequences):
                raise refused("stop_sequences", "one of them is empty.")
            params["stop"] = self.stop_sequences
        thinking = self.thinking or {}
        if thinking.get("type") == "enabled":
            budget = thinking.get("budget_tokens")
            if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
                raise refused("thinking.budget_tokens", "it must be a whole number of at least 1.")
            params["thinking_budget"] = budget
        return params


def _changes_nothing(edit: Any) -> bool:
    """Of a context: Claude Code asks for all of its thinking to be kept."""
    return isinstance(edit, Mapping) and "thinking" in str(edit.get("type")) and edit.get("keep") == "all"


def _tool(tool: Mapping[str, Any], i: int) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise refused("tools", f"this server has no {shown(tool['type'])} (tool {i}); only tools with an input_schema.")
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
        raise refused("tool_choice", f"its type is {shown(kind)}; there are auto, any, tool and none.")
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
        if message.get("role") not in tuple(makers):
            raise refused(f"messages[{i}].role", f"it is {shown(message.get('role'))}; there are user and assistant.")
    for role, turn in groupby(enumerate(messages), lambda pair: pair[1]["role"]):
        blocks = [block for i, message in turn for block in _blocks(message.get("content"), f"messages[{i}].content")]
        told += makers[role](blocks)
    if told[-1].get("tool_calls"):
        raise refused("messages", "the last has a call, which cannot be continued; send its result.")
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
    return "\n".join(part_text(block, where, {"text": "text"}) for where, block in blocks)


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
            told.append({"role": "tool", "tool_call_id": string(block, "tool_use_id", where), "content": text})
    return told


def _of_assistant(blocks: Blocks) -> list[dict[str, Any]]:
    thoughts, texts, calls = [], [], []
    for where, block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(string(block, "thinking", where))
        elif kind == "tool_use":
            if not isinstance(block.get("input"), Mapping):
                raise refused(f"{where}.input", "it must be an object.")
            function = {"name": string(block, "name", where), "arguments": block["input"]}
            calls.append({"id": string(block, "id", where), "type": "function", "function": function})
        else:
            texts.append(_text([(where, block)]))
    told: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if any(thoughts):
        told["reasoning_content"] = "\n".join(thoughts)
    return [told | ({"tool_calls": calls} if calls else {})]

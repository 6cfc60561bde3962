"""What known clients send, over all APIs: taken, with sensible answers."""

import json
from dataclasses import dataclass
from typing import Any

import pytest

from server_app import ask, client_of, events, text_of, thinking_model

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
HELLO = "Hello there."
ARGUMENTS = '{"path": "a.py"}'
CALL = f'<tool_call>{{"name": "read_file", "arguments": {ARGUMENTS}}}</tool_call>'
TITLE = '{"title": "Greetings"}'

USER = {"role": "user", "content": "Hello"}
SYSTEM = {"role": "system", "content": "You code."}
READ_FILE = {
    "name": "read_file",
    "description": "Reads a file.",
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string", "enum": ["a.py"]}},  # a scripted model cannot be led into more
        "required": ["path"],
        "additionalProperties": False,
    },
}
TOOL = {"type": "function", "function": READ_FILE}
STRICT_TOOL = {"type": "function", "function": {**READ_FILE, "strict": True}}
TITLE_SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Title",
    "type": "object",
    "properties": {"title": {"type": "string", "title": "Title"}},
    "required": ["title"],
    "additionalProperties": False,
}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}


@dataclass
class Sent:
    """A body in the form that a client sends it, shortened, put together from the client's sources, its documentation
    or what it was seen to send. says: what the model answers; told: what the client reads, of a call its arguments."""

    path: str
    body: dict[str, Any]
    says: str = HELLO
    told: str | None = None


SENT = {
    "Open WebUI, a chat": Sent(
        CHAT,
        {
            "model": "model",
            "messages": [SYSTEM, USER],
            "temperature": 0.8,
            "top_p": 0.9,
            "frequency_penalty": 0,
            "seed": 42,
            "stop": ["</s>"],
            "logit_bias": {},
            "user": "chat-7",
            **STREAMED,
        },
    ),
    "Open WebUI, tools of the model itself": Sent(
        CHAT, {"model": "model", "messages": [USER], "tools": [TOOL], **STREAMED}, CALL, ARGUMENTS
    ),
    "Open WebUI, a pipeline's user": Sent(
        CHAT, {"messages": [USER], "user": {"name": "Ana", "id": "7", "email": "a@example.org", "role": "admin"}}
    ),
    "Roo Code": Sent(
        CHAT,
        {
            "model": "model",
            "temperature": 0,
            "messages": [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "<user_message>Hi"}]}],
            **STREAMED,
            "tools": [STRICT_TOOL],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "max_completion_tokens": 8192,
        },
        CALL,
        ARGUMENTS,
    ),
    "Zed": Sent(
        CHAT,
        {
            "model": "model",
            "messages": [USER],
            "stream": True,
            "max_completion_tokens": 4096,
            "stop": [],
            "temperature": 1.0,
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "tools": [TOOL],
            "prompt_cache_key": None,
            "reasoning_effort": None,
        },
        CALL,
        ARGUMENTS,
    ),
    "Copilot with a model of one's own": Sent(
        CHAT,
        {
            "model": "model",
            "messages": [SYSTEM, USER],
            "temperature": 0.1,
            "top_p": 1,
            "max_tokens": 16000,
            "n": 1,
            **STREAMED,
        },
    ),
    "Aider": Sent(CHAT, {"model": "model", "messages": [SYSTEM, USER], "temperature": 0, "stream": True}),
    "LibreChat": Sent(
        CHAT,
        {"model": "model", "user": "65f0c0", "messages": [USER], "temperature": 1, "presence_penalty": 0, **STREAMED},
    ),
    "LangChain, an agent after its call": Sent(
        CHAT,
        {
            "model": "model",
            "messages": [
                USER,
                {
                    "content": None,
                    "role": "assistant",
                    "tool_calls": [
                        {"type": "function", "id": "c", "function": {"name": "read_file", "arguments": ARGUMENTS}}
                    ],
                },
                {"content": "print(1)", "role": "tool", "tool_call_id": "c"},
            ],
            "stream": False,
            "temperature": 0.0,
            "tools": [TOOL],
        },
    ),
    "LangChain, a structure by a call": Sent(
        CHAT,
        {
            "model": "model",
            "messages": [USER],
            "stream": False,
            "parallel_tool_calls": False,
            "tool_choice": {"type": "function", "function": {"name": "read_file"}},
            "tools": [STRICT_TOOL],
        },
        CALL,
        ARGUMENTS,
    ),
    "LangChain, a structure by its schema": Sent(
        CHAT,
        {
            "model": "model",
            "messages": [USER],
            "stream": False,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "Title", "description": "Of a chat.", "strict": True, "schema": TITLE_SCHEMA},
            },
        },
        TITLE,
    ),
    "AI SDK, an object": Sent(
        CHAT,
        {
            "model": "model",
            "user": "u",
            "max_tokens": 100,
            "temperature": 0,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": TITLE_SCHEMA, "strict": True, "name": "response"},
            },
            "reasoning_effort": "low",
            "verbosity": "low",
            "messages": [USER],
            **STREAMED,
        },
        TITLE,
    ),
    "AI SDK, JSON without a schema": Sent(
        CHAT, {"model": "model", "messages": [USER], "response_format": {"type": "json_object"}}, TITLE
    ),
    "OpenHands through litellm": Sent(
        CHAT,
        {
            "model": "model",
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "You code.", **EPHEMERAL}]},
                {"role": "user", "content": [{"type": "text", "text": "Hello", **EPHEMERAL}]},
            ],
            "tools": [{**TOOL, **EPHEMERAL}],
            "metadata": {"trace_version": "1", "tags": "app:openhands"},
            "drop_params": True,
            "seed": None,
        },
        CALL,
        ARGUMENTS,
    ),
    "Continue, after a call": Sent(
        CHAT,
        {
            "model": "model",
            "messages": [
                SYSTEM,
                USER,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {"id": "c", "type": "function", "function": {"name": "read_file", "arguments": ARGUMENTS}}
                    ],
                },
                {"role": "tool", "content": "print(1)\n", "tool_call_id": "c"},
            ],
            **STREAMED,
            "tools": [TOOL],
        },
    ),
    "OpenCode": Sent(
        CHAT,
        {
            "model": "model",
            "max_tokens": 32000,
            "messages": [SYSTEM, USER],
            "tools": [TOOL],
            "tool_choice": "auto",
            **STREAMED,
        },
        CALL,
        ARGUMENTS,
    ),
    "Continue, completing code": Sent(
        COMPLETIONS,
        {
            "model": "model",
            "prompt": "assistant:",
            "max_tokens": 64,
            "temperature": 0.01,
            "top_p": None,
            "frequency_penalty": None,
            "presence_penalty": None,
            "stop": ["<|fim_prefix|>", "/src/", "#- coding: utf-8"],
            "stream": True,
        },
    ),
    "Codex": Sent(
        RESPONSES,
        {
            "model": "model",
            "input": [
                {
                    "type": "message",
                    "id": "msg_01a2-1",
                    "role": "developer",
                    "content": [{"type": "input_text", "text": "<skills_instructions>"}],
                },
                {
                    "type": "message",
                    "id": "msg_01a2-2",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "Hello"}],
                },
            ],
            "tools": [{"type": "function", **READ_FILE, "strict": False}],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "01a2",
            "client_metadata": {"session_id": "01a2", "x-codex-turn-metadata": '{"request_kind":"turn"}'},
        },
        CALL,
        ARGUMENTS,
    ),
    "AI SDK, Responses": Sent(
        RESPONSES,
        {
            "model": "model",
            "input": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
            ],
            "temperature": 0,
            "text": {
                "format": {
                    "type": "json_schema",
                    "strict": True,
                    "name": "response",
                    "description": "Of a chat.",
                    "schema": TITLE_SCHEMA,
                }
            },
            "store": False,
            "metadata": {"run": "1"},
            "user": "u",
            "service_tier": "auto",
        },
        TITLE,
    ),
    "Claude Code": Sent(
        MESSAGES,
        {
            "model": "model",
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "<system-reminder>"},
                        {"type": "text", "text": "Hello", **EPHEMERAL},
                    ],
                },
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "A file.", "signature": ""},
                        {"type": "tool_use", "id": "t", "name": "read_file", "input": {"path": "b.py"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "1"}]},
                        {"type": "text", "text": "<system-reminder>", **EPHEMERAL},
                    ],
                },
                {"role": "system", "content": "Types of agents: claude"},
            ],
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.fa0; cc_entrypoint=sdk-cli;"},
                {"type": "text", "text": "You code.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
            ],
            "tools": [
                {
                    "name": "read_file",
                    "description": "Reads.",
                    "input_schema": READ_FILE["parameters"],
                    "eager_input_streaming": True,
                }
            ],
            "metadata": {"user_id": '{"device_id":"0","account_uuid":"","session_id":"1"}'},
            "max_tokens": 32000,
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
            "stream": True,
        },
        CALL,
        ARGUMENTS,
    ),
    "Claude Code, a title": Sent(
        MESSAGES,
        {
            "model": "model",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
            "system": [{"type": "text", "text": "Write a title."}],
            "tools": [],
            "metadata": {"user_id": "u"},
            "max_tokens": 32000,
            "thinking": {"type": "disabled"},
            "temperature": 1,
            "output_config": {"format": {"type": "json_schema", "schema": TITLE_SCHEMA}},
            "stream": True,
        },
        TITLE,
    ),
    "Cline by Anthropic's API": Sent(
        MESSAGES,
        {
            "model": "model",
            "max_tokens": 8192,
            "temperature": 0,
            "system": [{"text": "You code.", "type": "text", **EPHEMERAL}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello", **EPHEMERAL}]}],
            "stream": True,
        },
    ),
}


@pytest.mark.parametrize("name", SENT)
async def test_a_body_of_a_known_client_gets_a_sensible_answer(name):
    """P1: whether the client streams or not; what steers other things than the answer does no harm."""
    sent = SENT[name]
    told = reads(sent.told or sent.says)
    with thinking_model(sent.says) as llm:
        async with client_of(llm) as client:
            for is_streamed in (False, True):
                body = {**sent.body, "stream": is_streamed}
                if "temperature" in body:
                    body["temperature"] = 0  # so that the answer is certain
                if is_streamed:
                    assert reads(streamed(sent.path, await events(client, body, sent.path))) == told
                    continue
                body.pop("stream_options", None)
                response = await ask(client, body, sent.path)
                assert response.status_code == 200, response.text
                assert reads(whole(sent.path, response.json())) == told


def reads(text: str) -> Any:
    """What a client makes of it."""
    return json.loads(text) if text.startswith("{") else text


def whole(path: str, answer: dict[str, Any]) -> str:
    """The text of an answer, or the arguments of its call."""
    if path == CHAT:
        (choice,) = answer["choices"]
        calls = choice["message"].get("tool_calls")
        assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
        return calls[0]["function"]["arguments"] if calls else choice["message"]["content"]
    if path == COMPLETIONS:
        return answer["choices"][0]["text"]
    if path == RESPONSES:
        item = answer["output"][-1]
        return item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
    block = answer["content"][-1]
    return json.dumps(block["input"]) if block["type"] == "tool_use" else block["text"]


def streamed(path: str, chunks: list[Any]) -> str:
    if path == CHAT:
        deltas = [c["delta"] for chunk in chunks if chunk for c in chunk["choices"]]
        calls = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls") or []]
        return "".join(calls) or text_of(chunks)
    if path == COMPLETIONS:
        return "".join(c["text"] for chunk in chunks if chunk for c in chunk["choices"] if c["index"] == 0)
    if path == RESPONSES:
        kinds = ("response.output_text.delta", "response.function_call_arguments.delta")
        return "".join(chunk["delta"] for chunk in chunks if chunk["type"] in kinds)
    deltas = [chunk["delta"] for chunk in chunks if chunk["type"] == "content_block_delta"]
    return "".join(delta.get("partial_json") or delta.get("text", "") for delta in deltas)

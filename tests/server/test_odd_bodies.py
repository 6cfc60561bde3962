"""Bodies with something odd in any place: answered or refused, never a mistake of the server (P1, O5)."""

import copy
import json
import random
from typing import Any

import pytest

from server_app import client_of, thinking_model

ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1.5,
    10**30,
    "",
    "x",
    "\ud800",
    [],
    {},
    ["x"],
    [[]],
    [None],
    {"type": "x"},
    {"x": [1]},
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
FORM = {"type": "json_schema", "name": "f", "schema": SCHEMA}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}

BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        "max_tokens": 3,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": ""},
                    {"type": "text", "text": "Well."},
                    {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "2"}]},
                    {"type": "text", "text": "So?"},
                ],
            },
        ],
        "tools": [{"name": "add", "description": "Adds.", "input_schema": SCHEMA, "strict": False}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
        "thinking": {"type": "enabled", "budget_tokens": 2, "display": "summarized"},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "stop_sequences": ["zzz"],
        "temperature": 0,
        "top_k": 5,
        "metadata": {"user_id": "u"},
    },
    "/v1/responses": {
        "max_output_tokens": 3,
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "reasoning", "summary": [], "encrypted_content": "SG0u"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Well."}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "2"}]},
        ],
        "tools": [{"type": "function", **FUNCTION, "strict": False}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]},
        "text": {"format": FORM, "verbosity": "medium"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "metadata": {"a": "b"},
        "chat_template_kwargs": {"enable_thinking": True},
        "stream": False,
        "lampejo": {"drafts": True},
    },
    "/v1/chat/completions": {
        "max_tokens": 3,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "auto",
        "response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": SCHEMA, "strict": True}},
        "chat_template_kwargs": {"enable_thinking": True},
        "logit_bias": {"5": 1.0},
        "stop": ["zzz"],
        "lampejo": {"drafts": True},
    },
}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything inside of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, part in items for place in [(*path, key), *places(part, (*path, key))]]


def changed(body: dict[str, Any], place: tuple[Any, ...], odd: Any) -> dict[str, Any]:
    body = copy.deepcopy(body)
    inner: Any = body
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = odd
    return body


@pytest.mark.parametrize("path", BODIES)
async def test_nothing_odd_anywhere_makes_the_server_fail(path):
    """Fault: a list where a name was expected, and the answer is 500."""
    rng = random.Random(0)
    body = BODIES[path]
    with thinking_model("Hello") as llm:
        async with client_of(llm) as client:
            assert (await client.post(path, json=body)).status_code == 200
            for place in places(body):
                for odd in rng.sample(ODD, 4):
                    content = json.dumps(changed(body, place, odd))
                    response = await client.post(path, content=content, headers={"content-type": "application/json"})
                    assert response.status_code in (200, 400, 404), (place, odd, response.text)
                    assert response.status_code == 200 or response.json()["error"]["message"]


CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
WRONG: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    (CHAT, {"stop": ["\ud800"]}, "stop"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0]"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format"),
    (CHAT, {"response_format": {"type": "regex", "pattern": "("}}, "response_format"),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    (COMPLETIONS, {"prompt": "\ud800"}, "prompt"),
    (RESPONSES, {"input": "\ud800"}, "input"),
    (MESSAGES, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    (COMPLETIONS, {"logprobs": 99}, "logprobs"),
    (RESPONSES, {"max_output_tokens": 2**40}, "max_output_tokens"),
    (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format"),
    (RESPONSES, {"text": {"format": {"type": "regex", "pattern": "("}}}, "text.format"),
    (MESSAGES, {"max_tokens": 0}, "max_tokens"),
    (MESSAGES, {"stop_sequences": ["\ud800"]}, "stop_sequences"),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 2**40}}, "thinking.budget_tokens"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    (MESSAGES, {"output_config": {"format": {"type": "regex", "pattern": "("}}}, "output_config.format"),
]
SOUND: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    COMPLETIONS: {"prompt": "Hi"},
    RESPONSES: {"input": "Hi"},
    MESSAGES: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5},
}


@pytest.mark.parametrize(("path", "fields", "named"), WRONG)
async def test_errors_name_the_field_of_the_api_that_was_called(path, fields, named):
    """Fault: Anthropic's caller is told of ``response_format``, which no API of Anthropic's has."""
    with thinking_model("Hello") as llm:
        async with client_of(llm) as client:
            content = json.dumps({**SOUND[path], **fields})
            response = await client.post(path, content=content, headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert response.status_code == 400 and error["message"].startswith(f"{named}"), error
    assert error["message"][len(named)] in " :" and (path == MESSAGES or error["param"] == named)


@pytest.mark.parametrize(
    ("path", "name"), [(CHAT, "max_tokens"), (CHAT, "max_completion_tokens"), (RESPONSES, "max_output_tokens")]
)
async def test_an_error_about_two_fields_names_both_as_its_api_does(path, name):
    """P1. Fault: a caller of Responses is told of ``max_tokens``, which that API refuses."""
    with thinking_model("Hello") as llm:
        async with client_of(llm) as client:
            response = await client.post(path, json={**SOUND[path], name: 5, "min_tokens": 6})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "min_tokens")
    assert error["message"] == f"min_tokens is 6, which is larger than {name} (5)."


@pytest.mark.parametrize("path", BODIES)
async def test_errors_echo_little_of_what_they_are_about(path):
    """O5. Fault: a megabyte in a field comes back as a megabyte of error."""
    long: list[Any] = ["x" * 100_000, {"x" * 100_000: 1}, [["x"] * 100] * 1000]
    body = BODIES[path] | {
        "chat_template_kwargs": {"tools": 1},
        "model": "model",
        "stream_options": {"include_usage": 1},
    }
    with thinking_model("Hello") as llm:
        async with client_of(llm) as client:
            for place in places(body):
                for odd in long:
                    response = await client.post(path, json=changed(body, place, odd))
                    assert response.status_code == 200 or len(response.content) < 2000, (place, response.text[:300])

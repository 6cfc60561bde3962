"""/v1/messages: what Anthropic's clients send and read."""

import json
from typing import Any

import pytest

from lampejo.server.anthropic import MessagesBody
from scripted import CHAT
from server_app import CALLS, ask, client_of, events, thinking_model

PATH = "/v1/messages"
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {"a": {}}}}


def body(said: Any = "Hello", **fields: Any) -> dict[str, Any]:
    return {"max_tokens": 400, "messages": [{"role": "user", "content": said}], **fields}


def folded(told: list[Any]) -> dict[str, Any]:
    """The message that a stream's events add up to, and nothing out of place in them."""
    message: dict[str, Any] = {}
    texts: list[str] = []
    is_open = False
    for event in told:
        kind = event["type"]
        if kind == "message_start":
            assert not message
            message = event["message"]
        elif kind == "content_block_start":
            assert not is_open and event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            is_open, texts = True, []
        elif kind == "content_block_delta":
            assert is_open and event["index"] == len(message["content"]) - 1
            (text,) = [value for name, value in event["delta"].items() if name != "type"]
            texts.append(text)
        elif kind == "content_block_stop":
            assert is_open and event["index"] == len(message["content"]) - 1
            block, is_open = message["content"][-1], False
            if block["type"] == "tool_use":
                block["input"] = json.loads("".join(texts))
            else:
                block[block["type"]] = "".join(texts)
        elif kind == "message_delta":
            assert not is_open
            message |= {**event["delta"], "usage": event["usage"], "metrics": event["metrics"]}
    assert [told[0]["type"], *(event["type"] for event in told[-2:])] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    return message


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Two answers to one question, but for ids and what was cached meanwhile."""
    fields = ("type", "role", "model", "stop_reason", "stop_sequence")
    contents = [[{**block, "id": None} for block in message["content"]] for message in (one, other)]
    return [one[f] for f in fields] == [other[f] for f in fields] and contents[0] == contents[1]


@pytest.mark.parametrize("width", [0, 1, 7, 16])
async def test_a_stream_adds_up_to_the_whole_message_whatever_the_blocks(width):
    """T1, T3, T4, T5: thinking, text and two calls, in order, each in a block of its own."""
    with thinking_model(CALLS, width=width) as llm:
        async with client_of(llm) as client:
            whole = (await ask(client, body(tools=[TOOL]), PATH)).json()
            told = await events(client, body(tools=[TOOL]), PATH)
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole["content"][0] == {"type": "thinking", "thinking": "Let me add.", "signature": ""}
    assert whole["content"][1] == {"type": "text", "text": "Adding."}
    assert [block["input"] for block in whole["content"][2:]] == [{"a": 1, "b": [2, 3]}, {}]
    assert all(block["id"].startswith("toolu_") and block["name"] == "add" for block in whole["content"][2:])
    assert whole["stop_reason"] == "tool_use"
    assert same(whole, folded(told))
    assert whole["usage"]["output_tokens"] == told[-2]["usage"]["output_tokens"] == len(CALLS) + 1
    assert whole["usage"]["output_tokens_details"] == {"thinking_tokens": len("<think>Let me add.</think>")}
    assert whole["metrics"].keys() == told[-2]["metrics"].keys() == {"speculative_decoding"}


async def test_every_event_has_its_name():
    """Fault: clients that listen by name hear nothing."""
    with thinking_model("Hello") as llm:
        async with client_of(llm) as client:
            text = (await ask(client, body(stream=True), PATH)).text
    parts = [part.split("\n") for part in text.strip().split("\n\n")]
    assert len(parts) >= 6
    for name, data in parts:
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]


@pytest.mark.parametrize(
    ("fields", "reason", "match", "text"),
    [
        ({}, "end_turn", None, "one, two, three"),
        ({"max_tokens": 5}, "max_tokens", None, "one, "),
        ({"stop_sequences": ["zzz", "two"]}, "stop_sequence", "two", "one, "),
    ],
)
async def test_the_reason_why_an_answer_ends_is_told(fields, reason, match, text):
    with thinking_model("one, two, three") as llm:
        async with client_of(llm) as client:
            for message in (
                (await ask(client, body(**fields), PATH)).json(),
                folded(await events(client, body(**fields), PATH)),
            ):
                assert (message["stop_reason"], message["stop_sequence"]) == (reason, match)
                assert message["content"] == [{"type": "text", "text": text}]


async def test_the_end_of_the_context_is_told_apart_from_max_tokens():
    with thinking_model("x" * 100, max_context=64) as llm:
        async with client_of(llm) as client:
            message = (await ask(client, body(), PATH)).json()
    assert message["stop_reason"] == "model_context_window_exceeded"


async def test_what_was_cached_is_counted_apart():
    """Anthropic's input_tokens are those that were not read from the cache."""
    with thinking_model("x", page_size=16) as llm:
        async with client_of(llm) as client:
            usages = [(await ask(client, body("word " * 40), PATH)).json()["usage"] for _ in range(2)]
            counted = (await ask(client, body("word " * 40), f"{PATH}/count_tokens")).json()["input_tokens"]
            start = (await events(client, body("word " * 40), PATH))[0]["message"]["usage"]
    assert usages[0]["cache_read_input_tokens"] == 0 and usages[0]["input_tokens"] == counted
    assert usages[1]["cache_read_input_tokens"] > 150
    assert usages[1]["cache_read_input_tokens"] + usages[1]["input_tokens"] == counted
    assert start["cache_read_input_tokens"] == usages[1]["cache_read_input_tokens"]


async def test_thinking_can_be_left_out_of_the_answer():
    with thinking_model(CALLS) as llm:
        async with client_of(llm) as client:
            asked = body(tools=[TOOL], thinking={"type": "adaptive", "display": "omitted"})
            whole = (await ask(client, asked, PATH)).json()
            assert same(whole, folded(await events(client, asked, PATH)))
    assert whole["content"][0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert "Let me add" not in json.dumps(whole)


async def test_a_thinking_budget_ends_the_reasoning():
    """Fault: budget_tokens accepted and ignored."""
    answer = f"<think>{'Hm. ' * 40}</think> Done."
    with thinking_model(answer) as llm:
        async with client_of(llm) as client:
            for budget in (20, 50):
                asked = body(thinking={"type": "enabled", "budget_tokens": budget}, max_tokens=300)
                message = (await ask(client, asked, PATH)).json()
                num_thinking = message["usage"]["output_tokens_details"]["thinking_tokens"]
                assert budget <= num_thinking <= budget + len("\n</think>\n\n")
                assert [block["type"] for block in message["content"]] == ["thinking", "text"]


ENUM = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
async def test_a_tool_is_called_where_the_choice_says_so(choice):
    """Fault: tool_choice accepted and ignored. The model would say something else."""
    choice = {**choice, "disable_parallel_tool_use": True}
    tools = [{"name": "add", "input_schema": ENUM}]
    with thinking_model("No.", CHAT + "{# <tool_call> #}") as llm:
        async with client_of(llm) as client:
            asked = body(tools=tools, tool_choice=choice, temperature=0)
            message = (await ask(client, asked, PATH)).json()
            none = (await ask(client, {**asked, "tool_choice": {"type": "none"}}, PATH)).json()
    assert message["stop_reason"] == "tool_use"
    assert [(block["name"], block["input"]) for block in message["content"]] == [("add", {"a": 1})]
    assert none["content"] == [{"type": "text", "text": "No."}]


async def test_an_answer_cut_inside_a_call_ends_all_the_same():
    """Fault: half a call's arguments parsed as JSON."""
    answer = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    with thinking_model(answer) as llm:
        async with client_of(llm) as client:
            message = (await ask(client, body(tools=[TOOL], max_tokens=45), PATH)).json()
            told = await events(client, body(tools=[TOOL], max_tokens=45), PATH)
    assert message["stop_reason"] == told[-2]["delta"]["stop_reason"] == "max_tokens"
    assert message["content"][-1]["type"] == "tool_use" and message["content"][-1]["input"] == {}


async def test_system_blocks_turns_and_results_reach_the_template(monkeypatch):
    """Consecutive messages of a role are one turn; a result is a message of its own, after the call that it answers."""
    seen = []
    with thinking_model("ok") as llm:
        encode = llm._encode
        monkeypatch.setattr(
            llm, "_encode", lambda messages, kwargs, **_: seen.append((messages, kwargs)) or encode("x", {})
        )
        async with client_of(llm) as client:
            call = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}
            thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
            cached = {"cache_control": {"type": "ephemeral"}}
            result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "2"}]}
            failed = {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no", "is_error": True}
            messages = [
                {"role": "user", "content": "One."},
                {"role": "user", "content": [{"type": "text", "text": "Two.", **cached}]},
                {"role": "assistant", "content": [thought, {"type": "text", "text": "Well."}, call]},
                {"role": "user", "content": [result, failed, {"type": "text", "text": "Go on."}]},
            ]
            asked = body(
                messages=messages,
                system=[{"type": "text", "text": "S1"}, {"type": "text", "text": "S2", **cached}],
                tools=[TOOL],
                thinking={"type": "disabled"},
            )
            assert (await ask(client, asked, PATH)).status_code == 200
    told, kwargs = seen[0]
    function = {"name": "add", "arguments": {"a": 1}}
    assert told == [
        {"role": "system", "content": "S1\nS2"},
        {"role": "user", "content": "One.\nTwo."},
        {
            "role": "assistant",
            "content": "Well.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "2"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: no"},
        {"role": "user", "content": "Go on."},
    ]
    assert kwargs["enable_thinking"] is False
    told_tool = {"name": "add", "description": "Adds.", "parameters": TOOL["input_schema"]}
    assert kwargs["tools"] == [{"type": "function", "function": told_tool}]


async def test_the_line_for_anthropics_accounts_does_not_spoil_the_cache():
    """Fault: Claude Code's first line has a hash of the request, so that every prompt is computed anew."""
    with thinking_model("x", page_size=16) as llm:
        async with client_of(llm) as client:
            for number in range(2):
                line = f"x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={number};"
                system = [{"type": "text", "text": line}, {"type": "text", "text": "Be helpful. " * 20}]
                usage = (await ask(client, body(system=system), PATH)).json()["usage"]
    assert usage["cache_read_input_tokens"] > 200


async def test_an_answer_goes_on_from_the_assistants_last_message():
    """Anthropic's prefill: the answer is what follows it."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}]
    with thinking_model(" Well, yes.") as llm:
        async with client_of(llm) as client:
            whole = (await ask(client, body(messages=messages), PATH)).json()
            assert same(whole, folded(await events(client, body(messages=messages), PATH)))
    assert whole["content"] == [{"type": "text", "text": " yes."}]


USE = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {}}
IMAGE = [{"type": "image", "source": {"type": "url", "url": "https://example.org/x.png"}}]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": IMAGE}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": [USE]}]}, "messages"),
        ({"system": IMAGE}, "system[0]"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_k": "many"}, "top_k"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2**40}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "wild"}}, "thinking"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"tools": [{"name": "x"}]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "maybe"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        *(({name: {"some": "thing"}}, name) for name in MessagesBody.refused),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name_in_the_shape_of_this_api(fields, named):
    """P1: never accepted and ignored."""
    with thinking_model("x") as llm:
        async with client_of(llm) as client:
            response = await ask(client, body(**fields), PATH)
    told = response.json()
    assert response.status_code == 400, told
    assert told["type"] == "error" and told["error"]["type"] == "invalid_request_error"
    assert told["error"]["message"].startswith(named)


async def test_fields_that_change_nothing_are_accepted():
    """What Claude Code and others send along."""
    fields = {
        "model": None,
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "tools": [TOOL | {"cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}],
        "tool_choice": {"type": "auto"},
        "temperature": 1,
    }
    with thinking_model("x") as llm:
        async with client_of(llm) as client:
            response = await client.post(f"{PATH}?beta=true", json=body(**fields), headers={"anthropic-beta": "x"})
    assert response.status_code == 200, response.text
    assert response.headers["request-id"]


async def test_a_stream_that_fails_ends_with_an_error_event():
    """O2: in the shape of this API, after what was already said."""
    with thinking_model("x" * 200) as llm:
        runner = llm.engine.runner
        verify, steps = runner.verify, []

        def failing(batch):
            steps.append(batch)
            if len(steps) > 3:
                raise RuntimeError("out of luck")
            return verify(batch)

        runner.verify = failing
        async with client_of(llm) as client:
            told = await events(client, body(), PATH)
    assert told[0]["type"] == "message_start"
    assert told[-1]["type"] == "error" and told[-1]["error"]["type"] == "api_error"

"""/v1/responses: what clients of OpenAI's Responses send and read."""

import json
from typing import Any

import pytest

from lampejo.server.responses import ResponsesBody
from scripted import CHAT
from server_app import CALLS, QWEN, ask, client_of, events, thinking_model

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}


def body(said: Any = "Hello", **fields: Any) -> dict[str, Any]:
    return {"input": said, **fields}


def folded(told: list[Any]) -> dict[str, Any]:
    """The response that a stream's events add up to, and nothing out of place in them."""
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert [event["type"] for event in told[:2]] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    texts: list[str] = []
    expected = None  # the next event, where only one may follow
    for event in told[2:-1]:
        kind = event["type"].removeprefix("response.")
        assert expected in (None, kind)
        expected = None
        if kind == "output_item.added":
            assert event["output_index"] == len(items) and event["item"]["status"] == "in_progress"
            items.append(event["item"])
            texts = []
            expected = None if event["item"]["type"] == "function_call" else "content_part.added"
            continue
        assert event["output_index"] == len(items) - 1
        if kind == "output_item.done":
            item = event["item"]
            assert (item["id"], item["type"]) == (items[-1]["id"], items[-1]["type"])
            assert "".join(texts) == (item.get("arguments") or "".join(p["text"] for p in item.get("content", ())))
            items[-1] = item
            continue
        assert event["item_id"] == items[-1]["id"]
        if kind.endswith(".delta"):
            texts.append(event["delta"])
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == "".join(texts)
            expected = "content_part.done"
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == "".join(texts)
            expected = "output_item.done"
        elif kind == "content_part.done":
            expected = "output_item.done"
        else:
            assert kind == "content_part.added" and not texts
    response = told[-1]["response"]
    assert told[-1]["type"] == f"response.{response['status']}"
    assert response["output"] == items
    return response


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Two answers to one question, but for ids, times and what was cached meanwhile."""
    different = ("id", "created_at", "completed_at", "usage", "metrics", "output")
    rest = [{name: value for name, value in each.items() if name not in different} for each in (one, other)]
    outputs = [[{**item, "id": None, "call_id": None} for item in each["output"]] for each in (one, other)]
    return one.keys() == other.keys() and rest[0] == rest[1] and outputs[0] == outputs[1]


@pytest.mark.parametrize("width", [0, 1, 7, 16])
async def test_a_stream_adds_up_to_the_whole_response_whatever_the_blocks(width):
    """T1, T3, T4, T5: reasoning, a message and two calls, in order, each an item of its own."""
    with thinking_model(CALLS, width=width) as llm:
        async with client_of(llm) as client:
            whole = (await ask(client, body(tools=[TOOL]), PATH)).json()
            streamed = folded(await events(client, body(tools=[TOOL]), PATH))
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert {item["status"] for item in whole["output"]} == {"completed"} == {whole["status"]}
    assert whole["output"][0]["content"] == [{"type": "reasoning_text", "text": "Let me add."}]
    assert whole["output"][1]["content"][0]["text"] == "Adding."
    assert [json.loads(item["arguments"]) for item in whole["output"][2:]] == [{"a": 1, "b": [2, 3]}, {}]
    assert same(whole, streamed)
    assert whole["usage"]["output_tokens"] == streamed["usage"]["output_tokens"] == len(CALLS) + 1
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": len("<think>Let me add.</think>")}
    assert whole["metrics"].keys() == streamed["metrics"].keys() == {"speculative_decoding"}


async def test_every_event_has_its_name():
    """Fault: clients that listen by name hear nothing."""
    with thinking_model("Hello") as llm:
        async with client_of(llm) as client:
            text = (await ask(client, body(stream=True), PATH)).text
    parts = [part.split("\n") for part in text.strip().split("\n\n")]
    assert len(parts) >= 9
    for name, data in parts:
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]


async def test_an_answer_that_was_cut_is_incomplete_and_says_why():
    with thinking_model("one, two, three") as llm:
        async with client_of(llm) as client:
            whole = (await ask(client, body(max_output_tokens=5), PATH)).json()
            assert same(whole, folded(await events(client, body(max_output_tokens=5), PATH)))
    assert whole["status"] == "incomplete" == whole["output"][0]["status"]
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert whole["output"][0]["content"][0]["text"] == "one, "


async def test_drafts_can_be_turned_off_and_the_text_is_the_same():
    with thinking_model(CALLS, width=5) as llm:
        async with client_of(llm) as client:
            drafted = (await ask(client, body(), PATH)).json()
            plain = (await ask(client, body(lampejo={"drafts": False}), PATH)).json()
    assert same(drafted, plain)
    assert plain["metrics"]["speculative_decoding"]["num_spec_steps"] == 0
    assert drafted["metrics"]["speculative_decoding"]["num_spec_steps"] > 5


async def test_the_items_of_an_answer_can_be_sent_back_and_become_one_message(monkeypatch):
    """Stateless: what a response has as output is input of the next request, reasoning in either form."""
    seen = []
    with thinking_model(CALLS) as llm:
        async with client_of(llm) as client:
            asked = body(tools=[TOOL], include=["reasoning.encrypted_content"], store=False)
            output = (await ask(client, asked, PATH)).json()["output"]
            encode = llm._encode
            monkeypatch.setattr(
                llm, "_encode", lambda messages, kwargs, **_: seen.append((messages, kwargs)) or encode("x", {})
            )
            results = [
                {"type": "function_call_output", "call_id": item["call_id"], "output": "2"} for item in output[2:]
            ]
            sealed = [{**output[0], "content": None}, *output[1:]]
            for items in (output, sealed):
                conversation = [{"role": "user", "content": [{"type": "input_text", "text": "Add."}]}, *items, *results]
                asked = body(conversation, instructions="Be brief.", tools=[TOOL], reasoning={"effort": "none"})
                assert (await ask(client, asked, PATH)).status_code == 200
    told, kwargs = seen[0]
    assert seen[1] == seen[0]
    assert [message["role"] for message in told] == ["system", "user", "assistant", "tool", "tool"]
    assert told[0]["content"] == "Be brief." and told[1]["content"] == "Add."
    assert told[2]["content"] == "Adding." and told[2]["reasoning_content"] == "Let me add."
    arguments = [call["function"]["arguments"] for call in told[2]["tool_calls"]]
    assert arguments == [{"a": 1, "b": [2, 3]}, {}]
    assert [call["id"] for call in told[2]["tool_calls"]] == [message["tool_call_id"] for message in told[3:]]
    assert kwargs["enable_thinking"] is False and kwargs["reasoning_effort"] == "none"
    assert kwargs["tools"] == [{"type": "function", "function": {"name": "add", "parameters": TOOL["parameters"]}}]


ENUM = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "add"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]},
    ],
)
async def test_a_tool_is_called_where_the_choice_says_so(choice):
    """Fault: tool_choice accepted and ignored. The model would say something else."""
    tools = [{**TOOL, "parameters": ENUM}, {**TOOL, "name": "sub", "parameters": ENUM}]
    tools = tools[:1] if choice == "required" else tools
    with thinking_model("No.", CHAT + "{# <tool_call> #}") as llm:
        async with client_of(llm) as client:
            asked = body(tools=tools, tool_choice=choice, temperature=0, parallel_tool_calls=False)
            response = (await ask(client, asked, PATH)).json()
            none = (await ask(client, {**asked, "tool_choice": "none"}, PATH)).json()
    assert [(item["name"], json.loads(item["arguments"])) for item in response["output"]] == [("add", {"a": 1})]
    assert none["output"][0]["content"][0]["text"] == "No."


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("answer", "start"), [('{"b": 2}', "<think>Hm.</think>"), ('{"b": 2}', ""), (CALL, ""), ("No.", "")]
)
async def test_with_tools_and_a_format_the_answer_is_either_a_call_or_of_the_format(answer, start):
    """Fault: one of the two accepted and ignored. Agents send both. The drafts change nothing."""
    form = {
        "type": "json_schema",
        "name": "b",
        "schema": {**ENUM, "properties": {"b": {"enum": [2]}}, "required": ["b"]},
    }
    template = QWEN if start else CHAT + "{# <tool_call> #}"
    said = (start + answer).replace("\n", "#")  # the place of line ends in the vocabulary
    with thinking_model(said, template, width=7) as llm:
        async with client_of(llm) as client:
            asked = body(tools=[{**TOOL, "parameters": ENUM}], text={"format": form}, temperature=0)
            response = (await ask(client, asked, PATH)).json()
            assert same(response, (await ask(client, {**asked, "lampejo": {"drafts": False}}, PATH)).json())
    assert response["status"] == "completed"
    last = response["output"][-1]
    if last["type"] == "function_call":
        assert (last["name"], json.loads(last["arguments"])) == ("add", {"a": 1})
    else:
        assert json.loads(last["content"][0]["text"]) == {"b": 2}
    if answer != "No.":
        assert last["type"] == ("function_call" if answer == CALL else "message")


async def test_only_allowed_tools_are_offered(monkeypatch):
    """Fault: allowed_tools accepted and ignored."""
    with thinking_model("x") as llm:
        encode, seen = llm._encode, []
        monkeypatch.setattr(llm, "_encode", lambda messages, kwargs, **_: seen.append(kwargs) or encode("x", {}))
        allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}
        async with client_of(llm) as client:
            asked = body(tools=[TOOL, {**TOOL, "name": "sub"}], tool_choice=allowed)
            assert (await ask(client, asked, PATH)).status_code == 200
    assert [tool["function"]["name"] for tool in seen[0]["tools"]] == ["add"]


IMAGE = [{"role": "user", "content": [{"type": "input_image", "image_url": "https://example.org/x.png"}]}]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": IMAGE}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        (
            {"input": [{"type": "reasoning", "encrypted_content": "gA*"}]},
            "input[0].encrypted_content",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"verbosity": "lots"}}, "text.verbosity"),
        ({"thinking_budget": -2}, "thinking_budget"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"lampejo": {"trace": True}}, "lampejo.trace"),
        *(({name: {"some": "thing"}}, name) for name in ResponsesBody.refused),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(fields, named):
    """P1: never accepted and ignored."""
    with thinking_model("x") as llm:
        async with client_of(llm) as client:
            response = await ask(client, body(**fields), PATH)
    told = response.json()["error"]
    assert response.status_code == 400, told
    assert told["type"] == "invalid_request_error" and told["message"].startswith(named)


async def test_fields_that_change_nothing_are_accepted():
    """What agents send along."""
    fields = {
        "store": True,
        "metadata": {"run": "1"},
        "truncation": "disabled",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "background": False,
        "previous_response_id": None,
        "temperature": 0,
        "top_p": 1,
    }
    with thinking_model("x") as llm:
        async with client_of(llm) as client:
            response = await ask(client, body(**fields), PATH)
    told = response.json()
    assert response.status_code == 200, told
    assert told["metadata"] == {"run": "1"} and told["truncation"] == "disabled"
    assert told["store"] is False and told["temperature"] == 0


async def test_a_stream_that_fails_ends_with_a_failed_response():
    """O2: as an event, after what was already said."""
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
    assert told[-1]["type"] == "response.failed" and told[-1]["response"]["status"] == "failed"
    assert told[-1]["response"]["error"]["code"] == "server_error"
    assert told[-1]["sequence_number"] == len(told) - 1

"""/v1/chat/completions: what OpenAI's clients send and read."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from lampejo.answer import style_of
from lampejo.server.openai_chat import ChatBody, ChatWriter
from scripted import CHAT, ids_of, knowing
from server_app import ask, chat, client_of, events, model_saying, text_of

STORY = "A flash of light, then another: 1, 2, 3 and so on until the morning came and the sea was calm again. "


@pytest.mark.parametrize("answer", ["x", "Hello", STORY * 4])
async def test_a_stream_put_together_equals_the_whole_answer(answer):
    """T1 and T3: the role, text, the reason, usage, [DONE], in this order; usage and reason are equal too."""
    with model_saying(answer, [knowing(ids_of(answer))], width=5) as llm:
        async with client_of(llm) as client:
            whole = (await ask(client, chat())).json()
            chunks = await events(client, chat(stream_options={"include_usage": True}))
    message = whole["choices"][0]["message"]
    assert message["content"] == text_of(chunks) == answer
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    reasons = [c["finish_reason"] for chunk in chunks[:-2] for c in chunk["choices"]]
    assert reasons[-1] == whole["choices"][0]["finish_reason"] == "stop" and not any(reasons[:-1])
    assert chunks[-1] is None
    usage, used = chunks[-2]["usage"], whole["usage"]
    assert chunks[-2]["choices"] == []
    assert [usage[k] for k in ("prompt_tokens", "completion_tokens")] == [
        used[k] for k in ("prompt_tokens", "completion_tokens")
    ]
    assert usage["completion_tokens"] == len(answer) + 1
    assert chunks[-2]["metrics"].keys() == whole["metrics"].keys() == {"speculative_decoding"}


async def test_drafts_can_be_turned_off_for_one_request_and_the_text_is_the_same():
    """V2: the statistics show that nothing was drafted; the trace tells who proposed each token."""
    with model_saying(STORY, [knowing(ids_of(STORY))], width=5) as llm:
        async with client_of(llm) as client:
            drafted = (await ask(client, chat(lampejo={"trace": True}))).json()
            plain = (await ask(client, chat(lampejo={"drafts": False, "trace": True}))).json()
    assert drafted["choices"] == plain["choices"]
    assert drafted["metrics"]["speculative_decoding"]["num_spec_steps"] > 5
    assert plain["metrics"]["speculative_decoding"]["num_spec_steps"] == 0
    assert {token["origin"] for token in plain["lampejo"]["tokens"]} == {"target"}
    assert {token["origin"] for token in drafted["lampejo"]["tokens"]} == {"target", "scripted"}
    assert "".join(token["text"] for token in drafted["lampejo"]["tokens"]) == STORY


def test_a_traced_token_that_is_part_of_a_character_has_its_bytes():
    """Fault: an emoji of three tokens that no reader of the trace can put together."""
    pieces = {7: b"\xf0\x9f", 8: b"\x8e\x89", 9: b"ok", 10: "<end>"}
    tokenizer: Any = SimpleNamespace(piece=pieces.get)
    traced = ChatWriter(tokenizer, ChatBody(messages=[]), {}).trace(list(pieces), ["target"] * 4)
    assert bytes(traced[0]["bytes"] + traced[1]["bytes"]).decode() == "🎉"
    assert traced[2:] == [
        {"id": 9, "text": "ok", "origin": "target"},
        {"id": 10, "text": "<end>", "origin": "target"},
    ]


@pytest.mark.parametrize("name", sorted(ChatBody.refused))
async def test_fields_that_cannot_be_honoured_are_refused_by_name(name):
    """P1: never accepted and ignored."""
    with model_saying("x") as llm:
        async with client_of(llm) as client:
            response = await ask(client, {**chat(), name: {"some": "thing"}})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == name
            for harmless in ChatBody.refused[name]:
                assert (await ask(client, {**chat(), name: harmless})).status_code == 200


QWEN = CHAT + "{# <tool_call> <think> #}"  # what a template knows is read off its text
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALLS = """<think>
Let me add.
</think>

Adding.
<tool_call>
{"name": "add", "arguments": {"a": 1, "b": [2, 3]}}
</tool_call>
<tool_call>
{"name": "add", "arguments": {}}
</tool_call>"""


@pytest.mark.parametrize("width", [0, 1, 7, 16])
async def test_reasoning_and_calls_are_told_apart_whatever_the_blocks(width):
    """T3, T4, T5: stream and whole answer are equal, two calls have indices 0 and 1, reasoning is counted by tokens."""
    answer = CALLS.replace("\n", " ")
    with model_saying(answer, [knowing(ids_of(answer), 16)], width=width) as llm:
        llm.chat_template, llm.style = QWEN, style_of(QWEN)
        async with client_of(llm) as client:
            whole = (await ask(client, chat(tools=TOOLS))).json()
            chunks = await events(client, chat(tools=TOOLS, stream_options={"include_usage": True}))
    choice, usage = whole["choices"][0], whole["usage"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == "Adding." == text_of(chunks)
    assert message["reasoning_content"] == "Let me add." == text_of(chunks, name="reasoning_content")
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [{"a": 1, "b": [2, 3]}, {}]
    streamed: dict[int, str] = {}
    names = {}
    for chunk in chunks[:-2]:
        for call in chunk["choices"][0]["delta"].get("tool_calls", ()):
            streamed[call["index"]] = streamed.get(call["index"], "") + call["function"]["arguments"]
            names |= {call["index"]: call["function"]["name"]} if "name" in call["function"] else {}
    assert list(streamed.values()) == [call["function"]["arguments"] for call in message["tool_calls"]]
    assert names == {0: "add", 1: "add"}
    assert chunks[-2]["usage"] == usage | {"prompt_tokens_details": chunks[-2]["usage"]["prompt_tokens_details"]}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len("<think> Let me add. </think>")}


async def test_tools_of_a_model_that_knows_none_are_refused():
    """P1: never accepted and ignored."""
    with model_saying("x") as llm:
        async with client_of(llm) as client:
            response = await ask(client, chat(tools=TOOLS))
            assert response.status_code == 400 and response.json()["error"]["param"] == "tools"
            assert (await ask(client, chat(tools=TOOLS, tool_choice="none"))).status_code == 200

"""What one call may ask for, so that no other waits for it: beyond that it is refused by the name of the field."""

import json
import threading
from typing import Any

import httpx
import pytest

from lampejo.accept import TokenLogprobs
from lampejo.errors import UserError
from lampejo.server import chat_job, openai_chat, openai_completions, respond
from lampejo.server import fields as fields_module
from lampejo.server.errors import ApiError
from lampejo.server.fields import Body, parse
from lampejo.server.http import to_json, to_long_json
from lampejo.server.openai_chat import ChatWriter
from lampejo.server.openai_completions import CompletionWriter
from server_app import ask, chat, client_of, model_saying

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


def message(response: Any, status: int = 400) -> str:
    assert response.status_code == status, response.text
    return response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "name", "bound"),
    [
        ({"stop": [str(i) for i in range(300)]}, "stop", "256"),
        ({"stop": "a" * 5000}, "stop", "1,000"),
        ({"stop_token_ids": [5] * 2000}, "stop_token_ids", "1,024"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_too_many_ends_are_refused_with_field_bound_and_remedy(fields, name, bound):
    """Fault: 100,000 stop strings, or one of five million characters, held everybody's streams for seconds."""
    with model_saying("Hello") as llm:
        async with client_of(llm) as client:
            for path, body in ((CHAT, chat(**fields)), (TEXT, {"prompt": "a", **fields})):
                response = await ask(client, body, path)
                told = message(response)
                assert told.startswith(name) and bound in told and told.count(". ") == 1, told
                assert response.json()["error"]["param"] == name
            if name == "stop":
                stops = [fields["stop"]] if isinstance(fields["stop"], str) else fields["stop"]
                response = await ask(client, chat(max_tokens=5, stop_sequences=stops), MESSAGES)
                assert message(response).startswith("stop_sequences has") and bound in message(response)
            assert not llm.engine.has_work


async def test_n_answers_share_what_is_made_of_a_bias():
    """Fault: a bias of the whole vocabulary was checked and made into tensors for each of n answers."""
    with model_saying("Hello") as llm:
        first = llm.make_request("abc", logit_bias={5: 1.0}, temperature=1.0, seed=3)
        other, drawn = llm.another(first, 4), llm.another(first, None)
        assert other.sampling is first.sampling is drawn.sampling
        assert (first.seed, other.seed) == (3, 4) and drawn.seed not in (3, 4)
        with pytest.raises(UserError, match="seed"):
            llm.another(first, 2**64)


# --- how much one body may have ---------------------------------------------------------------------------------------


async def send(client: httpx.AsyncClient, raw: bytes, path: str) -> httpx.Response:
    return await client.post(path, content=raw, headers={"content-type": "application/json"})


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, MESSAGES, "/tokenize"])
@pytest.mark.parametrize(
    "part", [b'"metadata":[' + b'{"a":1},' * 90_000 + b"1]", b",".join(b'"k%d":1' % i for i in range(126_000))]
)
async def test_a_body_of_very_many_parts_is_refused_before_it_is_parsed(monkeypatch, path, part):
    """Fault: parsing 16 MB of small objects held the lock of Python, and so every stream, for 1.7 seconds."""
    monkeypatch.setattr(fields_module, "json", None)  # it is not come to
    with model_saying("Hello") as llm:
        async with client_of(llm) as client:
            response = await send(client, b'{"messages":[{"role":"user","content":"x"}],' + part + b"}", path)
        assert response.status_code == 400
        error = response.json()["error"]
        assert "250,000 brackets, colons and commas" in error["message"] and error["type"] == "invalid_request_error"


@pytest.mark.parametrize("text", ['{"a": [1, 2, {"b": ""}]}, ', "\\", '\\"', '"[', '\\\\",', "a,\n", "\u0000,[é"])
def test_marks_in_texts_do_not_count(monkeypatch, text):
    """Whatever a text has, escaped or not; the count is that of the structure."""
    monkeypatch.setattr(fields_module, "MAX_MARKS", 6)
    body = {"x": text * 500, text: [1, 2]}
    raw = json.dumps(body).encode()
    assert parse(raw, Body).model_extra == body, "2 brackets, 2 colons, 2 commas"
    with pytest.raises(ApiError, match="more than 6 brackets"):
        parse(json.dumps({**body, "y": 1}).encode(), Body)


async def test_too_many_messages_or_tools_are_refused_under_the_name_of_the_field(monkeypatch):
    """Fault: half a million messages, checked and rendered one by one, before the prompt was found to be too long."""
    monkeypatch.setattr(chat_job, "MAX_MESSAGES", 4)
    monkeypatch.setattr(chat_job, "MAX_TOOLS", 2)
    turns = [{"role": "user" if i % 2 == 0 else "assistant", "content": "a"} for i in range(5)]
    function = {"name": "f", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}] * 3
    with model_saying("Hello") as llm:
        async with client_of(llm) as client:
            for path, body, name in (
                (CHAT, {"messages": turns}, "messages"),
                (CHAT, chat(tools=tools), "tools"),
                ("/tokenize", {"messages": turns}, "messages"),
                (RESPONSES, {"input": turns}, "input"),
                (RESPONSES, {"input": "a", "tools": [{"type": "function", **function}] * 3}, "tools"),
                (MESSAGES, {"messages": turns, "max_tokens": 5}, "messages"),
            ):
                response = await ask(client, body, path)
                bound = 2 if name == "tools" else 4
                told = f"{name}: there are {bound + 1}; {bound} can be. Leave some out."
                assert message(response) == told, path
            assert (await ask(client, {"messages": turns[:3]})).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "told"),
    [
        (CHAT, {"messages": [1] * 1000}, "messages: input should be a valid dictionary."),
        (CHAT, chat(stop=[1] * 1000), "stop: input should be a valid string."),
        (CHAT, chat(stop_token_ids=["a"] * 1000), "stop_token_ids: input should be a valid integer."),
        (CHAT, chat(logit_bias={str(i): "a" for i in range(40)}), "logit_bias of token 0 must be a number, not 'a'."),
        (TEXT, {"prompt": [None] * 1000}, "prompt: input should be a valid string; or input should be a valid integer"),
        (TEXT, {"prompt": [[1] * 1000, [1, "a"] * 1000]}, "prompt: input should be a valid string"),
        (RESPONSES, {"input": [1] * 1000}, "input: input should be a valid string; or input should be a valid dict"),
        (RESPONSES, {"input": "a", "metadata": {str(i): 1 for i in range(40)}}, "metadata: its values must be strings"),
        (MESSAGES, {"messages": [1] * 1000, "max_tokens": 1}, "messages: input should be a valid dictionary."),
        ("/detokenize", {"tokens": ["a"] * 1000}, "tokens: input should be a valid integer."),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_of_many_wrong_items_the_first_is_told(monkeypatch, path, fields, told):
    """Fault: 240,000 complaints, a second for each list that an API knows, four for a prompt of completions."""
    counts = []
    told_of = fields_module._told
    monkeypatch.setattr(fields_module, "_told", lambda error: counts.append(error.error_count()) or told_of(error))
    with model_saying("Hello") as llm:
        async with client_of(llm) as client:
            assert message(await ask(client, fields, path)).startswith(told)
    assert max(counts, default=0) <= 4, "one for each form that the field can have"


# --- how long an answer may take to be written ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        "a",
        None,
        {"a": []},
        {"é": [[[[[[{"b": [1, 2.5, None, True, "\ud800"]}]]]]]]},
        [{"a": {"b": {"c": [{}]}}}],
    ],
)
def test_long_json_is_the_same_json(value):
    """Whatever stands at, above and below the levels that are written one by one."""
    assert to_long_json(value) == to_json(value)
    assert all(to_long_json(value, depth) == to_json(value) for depth in range(8))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(logprobs=True, top_logprobs=20, n=2, prompt_logprobs=3)),
        (TEXT, {"prompt": ["assistant:", "assistant:"], "logprobs": 20, "echo": True, "prompt_logprobs": 3}),
    ],
)
async def test_log_probabilities_are_written_in_another_thread(monkeypatch, path, body):
    """Fault: thousands of tokens with twenty alternatives each, on the event loop: nobody else got a token."""
    here = []

    def watched(make):
        return lambda *args: here.append(threading.current_thread() is threading.main_thread()) or make(*args)

    for owner, name in (
        (ChatWriter, "_logprobs"),
        (CompletionWriter, "_of_prompt"),
        (openai_chat, "prompt_logprobs"),
        (openai_completions, "prompt_logprobs"),
        (respond, "to_long_json"),
    ):
        monkeypatch.setattr(owner, name, watched(getattr(owner, name)))
    with model_saying("Hello") as llm:
        llm.engine.runner.logprobs_after = lambda hidden, ids, num_top: [  # type: ignore[method-assign]
            TokenLogprobs(token_id, -1.0, ((token_id, -1.0),)) for token_id in ids
        ]
        async with client_of(llm) as client:
            response = await ask(client, body, path)
    assert response.status_code == 200 and response.headers["content-type"] == "application/json"
    assert all(choice["logprobs"] for choice in response.json()["choices"])
    assert len(here) >= 3 and not any(here)

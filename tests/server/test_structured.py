"""Answers in a form, over HTTP: refused before anything is sent, or kept, with reasoning before them or not."""

import json
from typing import Any

import jsonschema
import pytest

from lampejo import Grammar, grammar_trial
from lampejo.answer import style_of
from scripted import scripted_llm
from server_app import QWEN, ask, chat, client_of, events, model_saying, text_of
from test_grammar import SCHEMA, TOKENS, whimsical
from tiny import ScriptedDrafter

UNSUPPORTED = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}}}
ENDLESS = {"properties": {"a": {"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}b.*"} for i in range(20)]}}}
KEPT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": UNSUPPORTED}, "response_format"),
        ({"response_format": {"type": "regex", "pattern": "(a"}}, "response_format"),
        ({"response_format": {"type": "grammar", "grammar": "start: nothing"}}, "response_format"),
        ({"response_format": {**KEPT, "json_schema": {"name": "x", "schema": ENDLESS}}}, "response_format"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": ENDLESS}}],
                "tool_choice": "required",
            },
            "tools",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "no type"}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
async def test_a_form_that_cannot_be_enforced_is_400_before_a_stream_begins(fields, param, stream):
    """S4: never 200 with an empty answer."""
    with model_saying("Hello") as llm:
        llm.chat_template, llm.style = QWEN, style_of(QWEN)
        async with client_of(llm) as client:
            response = await ask(client, chat(stream=stream, **fields))
            assert response.status_code == 400
            assert response.headers["content-type"] == "application/json"
            assert response.json()["error"]["param"] == param
            assert (await ask(client, chat())).status_code == 200


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "{{ messages[0].content }}<think>"])
async def test_a_schema_is_kept_in_streams_and_whole_answers_with_drafts_and_without(template):
    """S1, S3, T1, T4: the same answer four times, and its content is JSON by the schema whatever the reasoning was."""
    told: list[Any] = []
    truth: list[int] = []
    drafter = ScriptedDrafter(lambda request, width: truth[request.num_output :][:width], 16)
    for is_drafted in (False, True):
        with scripted_llm(whimsical(3), [drafter] if is_drafted else [], TOKENS, width=16) as llm:
            llm.chat_template, llm.style = template, style_of(template)
            body = chat("0", response_format=KEPT, max_tokens=300, seed=4, temperature=0.5)
            async with client_of(llm) as client:
                whole = (await ask(client, body)).json()
                chunks = await events(client, {**body, "stream_options": {"include_usage": True}})
            message = whole["choices"][0]["message"]
            told.append((message.get("content"), message.get("reasoning_content"), whole["usage"]))
            usage = next(chunk["usage"] for chunk in reversed(chunks) if chunk and chunk.get("usage"))
            told.append((text_of(chunks), text_of(chunks, name="reasoning_content") or None, usage))
            assert whole["choices"][0]["finish_reason"] == "stop"
            if is_drafted:
                assert whole["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
            else:
                params = {"temperature": 0.5, "seed": 4, "max_tokens": 300}
                truth.extend(llm.generate(body["messages"], grammar=Grammar.json_schema(SCHEMA), **params).ids)
    for content, reasoning, usage in told:
        jsonschema.validate(json.loads(content), SCHEMA)
        assert (content, reasoning) == told[0][:2]
        num_reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
        assert 0 <= num_reasoning < usage["completion_tokens"]
        assert (num_reasoning > 0) == (reasoning is not None) == ("<think>" in template)
        assert usage["completion_tokens"] == told[0][2]["completion_tokens"]
        assert num_reasoning == told[0][2]["completion_tokens_details"]["reasoning_tokens"]


@pytest.mark.parametrize(("field", "value"), [("guided_json", {}), ("structured_outputs", {"regex": "a"})])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat()),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
    ],
)
async def test_a_form_asked_for_in_the_words_of_other_servers_is_refused_not_ignored(path, body, field, value):
    """P1: text of any form would look like an answer in it."""
    with model_saying("Hello") as llm:
        async with client_of(llm) as client:
            response = await ask(client, {**body, field: value}, path)
            assert response.status_code == 400 and response.json()["error"]["param"] == field
            assert (await ask(client, {**body, field: None}, path)).status_code == 200


async def test_completions_are_of_no_form():
    """P1: ``response_format`` is for chats; the one that asks for nothing does no harm."""
    with model_saying("Hello") as llm:
        async with client_of(llm) as client:
            for kind, status in (("json_object", 400), ("text", 200)):
                body = {"prompt": "Hi", "response_format": {"type": kind}}
                assert (await ask(client, body, "/v1/completions")).status_code == status


async def test_a_form_that_would_be_one_too_many_of_its_kind_is_to_come_again_later(monkeypatch):
    """429: it holds a process, or a thread while it is tried."""
    monkeypatch.setattr(grammar_trial, "MAX_HELD", 0)
    monkeypatch.setattr(grammar_trial, "MAX_WAITING", 0)
    joined = {"type": "grammar", "grammar": "start: A\nA: /a+/ & ~/aa/"}
    large = {"type": "grammar", "grammar": "start: " + '"a" ' * 2000}
    with model_saying("Hello") as llm:
        async with client_of(llm) as client:
            for form in (joined, large):
                response = await ask(client, chat(response_format=form))
                assert response.status_code == 429
                assert int(response.headers["retry-after"]) > 0
            assert (await ask(client, chat())).status_code == 200

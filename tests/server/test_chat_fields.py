"""Fields of /v1/chat/completions: each one honoured or refused by name; what known clients send is answered."""

import threading
from typing import Any

import httpx
import pytest

from lampejo.answer import style_of
from lampejo.api import LLM
from lampejo.server.app import make_app
from lampejo.server.config import ServerConfig
from lampejo.server.service import MAX_ENCODED_BYTES
from scripted import CHAT, CONTEXT
from server_app import CALLING, ask, chat, client_of, events, model_saying, text_of

FUNCTION = {
    "name": "read_file",
    "description": "Reads a file",
    "parameters": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"path": {"type": "string"}},
        "required": ["path"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a.py"}'}}
AFTER_A_CALL = [
    {"role": "user", "content": "read a.py"},
    {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "A file."},
    {"role": "tool", "tool_call_id": "call_1", "content": "print(1)"},
]
TEXT_PART = [{"type": "text", "text": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "the openai SDK with all that hosted models take": {
        "messages": [
            {"role": "developer", "content": "Be short."},
            {"role": "user", "content": "Hello", "name": "Ana"},
        ],
        "max_completion_tokens": 30,
        "metadata": {"run": "7"},
        "parallel_tool_calls": True,
        "prediction": {"type": "content", "content": "Hello"},
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "reasoning_effort": "low",
        "safety_identifier": "u-1",
        "service_tier": "auto",
        "store": False,
        "user": "u-1",
        "verbosity": "low",
    },
    "nulls, as typed clients write what was not set": {
        "messages": [{"role": "user", "content": "Hello"}],
        **dict.fromkeys(["audio", "function_call", "functions", "logit_bias", "logprobs", "max_tokens", "modalities"]),
        **dict.fromkeys(["n", "presence_penalty", "response_format", "seed", "stop", "stream", "stream_options"]),
        **dict.fromkeys(["temperature", "tool_choice", "tools", "top_logprobs", "top_p", "user", "web_search_options"]),
    },
    "Open WebUI, its title task": {
        "messages": [{"role": "user", "content": "### Task:\nA title, please."}],
        "stream": False,
        "max_completion_tokens": 40,
        "metadata": {"task": "title_generation", "chat_id": "c"},
    },
    "Cline": {
        "messages": [{"role": "system", "content": "You code."}, {"role": "user", "content": TEXT_PART * 2}],
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "the AI SDK in the midst of an agent's loop": {
        "messages": AFTER_A_CALL,
        "max_tokens": 40,
        "temperature": 0,
        "top_p": 1,
        "tools": TOOLS,
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "Continue": {
        "messages": [{"role": "user", "content": TEXT_PART}],
        "max_tokens": 40,
        "tools": TOOLS,
        "parallel_tool_calls": False,
        "stream": True,
    },
    "lm-eval, local-chat-completions": {
        "messages": [{"role": "user", "content": "Hello", "type": "text"}],
        "max_tokens": 40,
        "temperature": 0,
        "stop": ["\n\n", "Question:"],
        "seed": 1234,
    },
    "guidellm": {
        "messages": [{"role": "user", "content": TEXT_PART}],
        "max_tokens": 20,
        "max_completion_tokens": 20,
        "ignore_eos": True,
        "stop": None,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
    "vLLM's own extensions": {
        "messages": [{"role": "user", "content": "Hello"}],
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": [],
        "min_tokens": 0,
        "ignore_eos": False,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "skip_special_tokens": True,
        "chat_template_kwargs": {"enable_thinking": False},
    },
}


def with_tools(llm: LLM) -> LLM:
    llm.chat_template = CALLING
    llm.style = style_of(llm.chat_template)
    return llm


@pytest.mark.parametrize("name", BODIES)
async def test_what_known_clients_send_is_answered(name):
    """P1: fields that steer other things than the answer are taken; none of these is a 400."""
    body = BODIES[name]
    with with_tools(model_saying("Hello there.")) as llm:
        async with client_of(llm) as client:
            if not body.get("stream"):
                response = await ask(client, body)
                assert response.status_code == 200, response.text
                assert response.json()["choices"][0]["message"]["content"] == "Hello there."
                return
            chunks = await events(client, body)
    assert chunks[-1] is None and text_of(chunks).startswith("Hello there.")
    if (body.get("stream_options") or {}).get("continuous_usage_stats"):
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]]
        assert counts[0] == 0 and counts[-1] == 20 and counts == sorted(counts)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2.5),
        ("max_tokens", "ten"),
        ("max_completion_tokens", 10**30),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", 1e300),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", 1.5),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("seed", 2**70),
        ("seed", 1.5),
        ("n", 0),
        ("n", 129),
        ("n", "2"),
        ("stop", [""]),
        ("stop", [1]),
        ("stop", {"a": 1}),
        ("stop_token_ids", [97]),
        ("stop_token_ids", [-1]),
        ("min_tokens", -1),
        ("min_tokens", 10_000_000_000),
        ("ignore_eos", "yes"),
        ("logit_bias", {"97": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"five": 1}),
        ("logit_bias", [5]),
        ("logprobs", 3),
        ("top_logprobs", 3),
        ("top_logprobs", 10**6),
        ("stream", "true"),
        ("stream_options", {"include_usage": True}),
        ("messages", []),
        ("messages", "Hello"),
        ("messages", [{"content": "Hello"}]),
        ("messages", [{"role": "user"}]),
        ("messages", [{"role": "user", "content": 5}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]),
        ("messages", [{"role": "user", "content": ["Hello"]}]),
        ("messages", [{"role": "assistant", "tool_calls": "x"}]),
        ("messages", [{"role": "assistant", "tool_calls": [{"function": {}}]}]),
        ("messages", ["Hello"]),
        ("messages", [{"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}}]),
        ("messages", [{"role": "assistant", "audio": {"id": "audio_1"}}]),
        ("tools", [{"type": "web_search"}]),
        ("tools", [{"type": "function"}]),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": []}}]),
        ("tool_choice", "sometimes"),
        ("tool_choice", {"type": "function", "function": {"name": "another"}}),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema"}),
        ("reasoning_effort", "much"),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("thinking_token_budget", -2),
        ("thinking_budget", "some"),
        ("thinking_budget_tokens", 2**40),
        ("thinking", {"type": "wild"}),
        ("thinking", {"type": "enabled", "budget_tokens": "some"}),
        ("thinking", {"type": "enabled", "keep": "all"}),
        ("include_reasoning", False),
        ("return_token_ids", True),
        ("chat_template_kwargs", {"thinking_budget": 1.5}),
        ("chat_template_kwargs", ["enable_thinking"]),
        ("chat_template_kwargs", {"messages": []}),
        ("lampejo", {"drafts": "no"}),
        ("lampejo", {"draft": False}),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_its_name(field, value):
    """P1 and O5: 400 in OpenAI's shape, naming the field, before any work; never a 500."""
    with with_tools(model_saying("Hello")) as llm:
        async with client_of(llm) as client:
            body = chat(tools=TOOLS) if field == "tool_choice" else chat()
            response = await ask(client, body | {field: value})
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert field in (error["param"] or "") or field in error["message"], error
            assert not llm.engine.has_work
            assert (await ask(client, chat())).status_code == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"messages"',
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"temperature": NaN}',
        b'{"temperature": -Infinity}',
        b'{"temperature": 1e999, "messages": [{"role": "user", "content": "x"}]}',
        b'{"max_tokens": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "regex", "pattern": "\\ud800"}}',
        b"{}",
    ],
    ids=range(15),
)
async def test_a_body_that_is_broken_is_told_so(raw):
    """O5: 400 whatever it is, and the server goes on."""
    with model_saying("Hello") as llm:
        async with client_of(llm) as client:
            headers = {"Content-Type": "application/json"}
            response = await client.post("/v1/chat/completions", content=raw, headers=headers)
            assert response.status_code == 400, response.text
            assert response.json()["error"]["message"]
            assert (await ask(client, chat())).status_code == 200


async def test_a_body_over_the_limit_is_refused_while_it_is_read():
    """O5: 413, and not a byte more than the limit is kept."""
    with model_saying("Hello") as llm:
        async with client_of(llm, max_body_bytes=500) as client:
            assert (await ask(client, chat("x" * 400))).status_code == 200
            response = await ask(client, chat("x" * 500))
            assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/tokenize"])
async def test_a_body_that_says_it_is_over_the_limit_is_refused_before_it_is_read(path):
    """O5: 413 at once. Fault: megabytes of what is refused anyway are collected."""
    sent = []

    async def parts():
        for _ in range(100):
            sent.append(1)
            yield b" " * 10

    with model_saying("Hello") as llm:
        app = make_app(llm, ServerConfig(max_body_bytes=500))
        seen = []

        async def before_the_rest_is_thrown_away(scope, receive, send):
            async def send_seen(message):
                if message["type"] == "http.response.start":
                    seen.append((message["status"], len(sent)))
                await send(message)

            await app(scope, receive, send_seen)

        transport = httpx.ASGITransport(before_the_rest_is_thrown_away)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for length in ({"Content-Length": "1000"}, {}):
                sent.clear()
                headers = {"Content-Type": "application/json", **length}
                response = await client.post(path, content=parts(), headers=headers)
                assert response.status_code == 413, response.text
    assert seen == [(413, 0), (413, 51)]


async def test_a_text_that_is_only_counted_has_a_bound_of_its_own():
    """O5: 413 beyond what takes seconds; what fills the context several times over is counted."""
    with model_saying("Hello") as llm:
        async with client_of(llm) as client:
            long, longer = "x" * (4 * CONTEXT), "x" * MAX_ENCODED_BYTES
            for path, field in (("/tokenize", "count"), ("/v1/messages/count_tokens", "input_tokens")):
                assert (await ask(client, chat(long), path)).json()[field] > 4 * CONTEXT
                assert (await ask(client, chat(longer), path)).status_code == 413
            llm.max_context = MAX_ENCODED_BYTES
            assert (await ask(client, {"prompt": longer}, "/tokenize")).json()["count"] == MAX_ENCODED_BYTES


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/messages/count_tokens"])
async def test_counting_a_long_text_leaves_the_event_loop_alone(path, monkeypatch):
    """Fault: running streams stand still while ids are made, spelled and written."""
    threads = []

    def noted(work):
        def noting(*args, **kwargs):
            threads.append(threading.get_ident())
            return work(*args, **kwargs)

        return noting

    with model_saying("Hello") as llm:
        async with client_of(llm) as client:
            for name in ("encode", "decode", "token_text"):
                monkeypatch.setattr(llm.tokenizer, name, noted(getattr(llm.tokenizer, name)))
            monkeypatch.setattr(llm, "encode", noted(llm.encode))
            body = {"tokens": [5, 6]} if path == "/detokenize" else chat(return_token_strs=True)
            response = await ask(client, body, path)
    assert response.status_code == 200, response.text
    assert len(threads) >= 2 and threading.get_ident() not in threads


@pytest.mark.parametrize("num_more", [0, 1, 9 * CONTEXT])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_a_prompt_beyond_the_context_is_refused_in_the_words_that_clients_look_for(path, num_more):
    """B5, O5: 400 before any work. Fault: an agent that would shorten its chat and go on takes it for the end."""
    text = ("xy" * CONTEXT * 5)[: CONTEXT + num_more]
    chats = {"messages": [{"role": "user", "content": text}], "max_tokens": 5}
    bodies = {"/v1/completions": {"prompt": text}, "/v1/responses": {"input": text}}
    param = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path, "messages")
    with model_saying("Hello") as llm:
        llm.chat_template = "{{ messages[0].content }}"
        async with client_of(llm) as client:
            response = await ask(client, {**bodies.get(path, chats), "stream": True}, path)
            assert llm.engine.scheduler.num_queried_tokens == 0
    error = response.json()["error"]
    counted = str(len(text)) if num_more <= 1 else f"more than {CONTEXT}"
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    if path == "/v1/messages":
        assert error["message"] == f"prompt is too long: {counted} tokens > {CONTEXT - 1} maximum"
        return
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert f"maximum context length is {CONTEXT} tokens; the prompt has {counted}." in error["message"]


async def test_another_model_than_the_one_that_is_here_is_refused():
    """P1: 404 in OpenAI's shape; the names that were given are all answered to."""
    with model_saying("Hello") as llm:
        async with client_of(llm, names=("coder", "chat")) as client:
            for name in ("coder", "chat", None):
                response = await ask(client, chat(model=name))
                assert response.json()["model"] == (name or "coder")
            response = await ask(client, chat(model="gpt-4o"))
            assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
            told = (await client.get("/v1/models")).json()["data"]
            assert [card["id"] for card in told] == ["coder", "chat", "model"]
            assert {card["lampejo"]["mode"] for card in told} == {"plain decoding"}


LOSING = "{% for m in messages if m.role in ['user', 'assistant'] %}{{ m.role }}: {{ m.content }}{% endfor %}assistant:"


@pytest.mark.parametrize(
    ("template", "messages", "lost"),
    [
        (CHAT, AFTER_A_CALL, "messages[1]"),
        (LOSING, [*AFTER_A_CALL[:1], AFTER_A_CALL[2]], "messages[1]"),
        (LOSING, [{"role": "system", "content": "Be brief."}, *AFTER_A_CALL[:1]], "messages[0]"),
        (LOSING, [*AFTER_A_CALL[:1], {"role": "critic", "content": "No."}], "messages[1]"),
        (CHAT, [*AFTER_A_CALL[:1], {"role": "critic", "content": "No."}], None),
        (CALLING, AFTER_A_CALL, None),
        (LOSING, AFTER_A_CALL[:1], None),
    ],
)
async def test_messages_that_the_template_leaves_out_are_refused(template, messages, lost):
    """P1. Fault: a call, its result or a role that the template does not know vanishes, and nobody is told. Before and
    after the template was seen to render other messages."""
    with model_saying("Hello") as llm:
        llm.chat_template, llm.style = template, style_of(template)
        async with client_of(llm) as client:
            for _ in range(2):
                response = await ask(client, {"messages": messages})
                assert response.status_code == (400 if lost else 200), response.text
                if lost:
                    assert response.json()["error"]["param"] == lost
                assert (await ask(client, chat())).status_code == 200

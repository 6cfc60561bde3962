"""Fields of /v1/chat/completions: each one honoured or refused by name; what known clients send is answered."""

import math
import threading
from typing import Any

import httpx
import pytest
import torch

from lampejo.answer import style_of
from lampejo.api import LLM
from lampejo.cache import CausalView
from lampejo.ops import Segment
from lampejo.server.app import make_app
from lampejo.server.config import ServerConfig
from lampejo.server.service import MAX_ENCODED_BYTES
from lampejo.speculate import NgramDrafter
from scripted import CHAT, CONTEXT, ids_of, knowing, make_llm, random_target, scripted_llm
from server_app import CALLING, ask, chat, client_of, events, model_saying, text_of, thinking_model
from tiny import EOS, make_engine, make_target

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


# --- P2: what steers the answer ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({"max_tokens": 5}, "One, ", "length"),
        ({"max_completion_tokens": 5}, "One, ", "length"),
        ({"max_tokens": 9, "max_completion_tokens": 5}, "One, ", "length"),
        ({"stop": "thr"}, "One, two, ", "stop"),
        ({"stop": ["four", "two"]}, "One, ", "stop"),
        ({"stop": []}, "One, two, three, four.", "stop"),
        ({"stop": ""}, "One, two, three, four.", "stop"),
        ({"stop_token_ids": ids_of("w")}, "One, t", "stop"),
        ({"ignore_eos": True, "max_tokens": 25, "stop": ["e, f"]}, "One, two, thre", "stop"),
        ({"logit_bias": {str(ids_of("t")[0]): -100}}, None, None),
    ],
)
@pytest.mark.parametrize("width", [0, 6])
async def test_each_field_that_steers_an_answer_does_so_streamed_and_whole(fields, text, reason, width):
    """P2: equal with and without drafts; usage counts the tokens that were decoded."""
    story = "One, two, three, four."
    with model_saying(story, [knowing(ids_of(story))], width=width) as llm:
        async with client_of(llm) as client:
            whole = (await ask(client, chat(**{"max_tokens": 40} | fields))).json()
            chunks = await events(client, chat(**{"max_tokens": 40} | fields))
    (choice,) = whole["choices"]
    assert text_of(chunks) == choice["message"]["content"]
    if text is None:
        assert "t" not in choice["message"]["content"]
    else:
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, reason)


async def test_answers_of_one_request_are_those_of_its_seeds():
    """P2: n answers with seed, seed + 1, ...; each is what that seed gives alone, streamed or not, and usage counts the
    prompt once."""
    fields = {"temperature": 1.0, "max_tokens": 20, "ignore_eos": True}
    with scripted_llm(random_target(), [NgramDrafter(3)], width=4, page_size=8) as llm:
        async with client_of(llm) as client:
            told = (await ask(client, chat(n=3, seed=41, **fields))).json()
            alone = [(await ask(client, chat(seed=41 + i, **fields))).json() for i in range(3)]
            chunks = await events(client, chat(n=3, seed=41, stream_options={"include_usage": True}, **fields))
    texts = [choice["message"]["content"] for choice in told["choices"]]
    assert [choice["index"] for choice in told["choices"]] == [0, 1, 2]
    assert texts == [one["choices"][0]["message"]["content"] for one in alone]
    assert texts == [text_of(chunks, i) for i in range(3)]
    assert len(set(texts)) == 3
    assert told["usage"]["completion_tokens"] == chunks[-2]["usage"]["completion_tokens"] == 60
    assert told["usage"]["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]


async def test_log_probabilities_are_those_of_teacher_forcing_one_per_token():
    """P2: streamed and whole, with drafts, within 1e-3 of one pass over the whole text in fp32; B7."""
    fields = {"logprobs": True, "top_logprobs": 4, "max_tokens": 30, "ignore_eos": True, "seed": 5, "temperature": 0.8}
    runner = make_engine(make_target(), max_context=CONTEXT).runner
    with make_llm(runner, [NgramDrafter(3)], max_context=CONTEXT, width=5) as llm:
        prompt = llm.encode(chat()["messages"])
        async with client_of(llm) as client:
            whole = (await ask(client, chat(**fields, lampejo={"trace": True}))).json()
            chunks = await events(client, chat(**fields))
    entries = whole["choices"][0]["logprobs"]["content"]
    streamed = [
        entry
        for chunk in chunks[:-1]
        for choice in chunk["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert [(e["token"], e["bytes"]) for e in streamed] == [(e["token"], e["bytes"]) for e in entries]
    assert whole["usage"]["completion_tokens"] == len(entries) == 30
    ids = [token["id"] for token in whole["lampejo"]["tokens"]]
    expected = teacher_forced(prompt + ids)[len(prompt) - 1 :]
    for j, (entry, again) in enumerate(zip(entries, streamed, strict=True)):
        assert math.isclose(entry["logprob"], expected[j, ids[j]], abs_tol=1e-3)
        assert math.isclose(entry["logprob"], again["logprob"], abs_tol=1e-3)
        tops = [top["logprob"] for top in entry["top_logprobs"]]
        assert torch.allclose(torch.tensor(tops), expected[j].topk(4).values, atol=1e-3)


def teacher_forced(ids: list[int]) -> torch.Tensor:
    """Log probabilities [T, V] after each token, by one pass."""
    engine = make_engine(make_target(), max_context=CONTEXT)
    pages = list(range(-(-len(ids) // engine.page_size)))
    view = CausalView(engine.runner.cache, [Segment(0, len(ids), 0, pages)], torch.arange(len(ids)))
    hidden, _ = engine.runner.target(torch.tensor(ids), torch.arange(len(ids)), view)
    return torch.log_softmax(engine.runner.target.logits(hidden).float(), -1)


async def test_the_models_own_defaults_hold_where_the_request_says_nothing():
    """P4: generation_config.json, field by field; the request overrides."""
    fields = {"max_tokens": 30, "seed": 9, "ignore_eos": True}
    with scripted_llm(random_target()) as llm:
        async with client_of(llm) as client:

            async def text(**more: Any) -> str:
                response = await ask(client, chat(**fields, **more))
                return response.json()["choices"][0]["message"]["content"]

            greedy, hot, penalised = (
                await text(),
                await text(temperature=1.3),
                await text(temperature=1.3, repetition_penalty=1.5),
            )
            assert len({greedy, hot, penalised}) == 3
            llm.generation_defaults = {"temperature": 1.3, "repetition_penalty": 1.5}
            assert await text() == penalised
            assert await text(repetition_penalty=1) == hot
            assert await text(repetition_penalty=1.0, temperature=0) == greedy


async def test_the_last_message_can_be_continued():
    """P1: the prompt ends with its text, and the answer is what comes after."""
    messages = [*chat("Count.")["messages"], {"role": "assistant", "content": "One, two"}]
    with scripted_llm(lambda text: [*ids_of(", three"), EOS][len(text) - len(prompt)]) as llm:
        prompt = llm.encode(messages, continue_final_message=True)
        assert llm.tokenizer.decode(prompt).endswith("assistant: One, two")
        async with client_of(llm) as client:
            body = {"messages": messages, "continue_final_message": True}
            told = (await ask(client, body)).json()
            assert told["choices"][0]["message"]["content"] == ", three"
            assert told["usage"]["prompt_tokens"] == len(prompt)
            response = await ask(client, body | {"add_generation_prompt": True})
            assert response.json()["error"]["param"] == "continue_final_message"


BUDGETS: list[dict[str, Any]] = [
    {"thinking_token_budget": 20},
    {"thinking_budget": 20},
    {"thinking_budget_tokens": 20},
    {"thinking": {"type": "enabled", "budget_tokens": 20}},
    {"chat_template_kwargs": {"thinking_budget": 20}},
    {"thinking_budget": 20, "thinking_token_budget": 20},
]


@pytest.mark.parametrize("fields", [*BUDGETS, {"thinking_budget": -1}, {"thinking_token_budget": 10_000}])
async def test_a_thinking_budget_ends_the_reasoning_by_whatever_name_it_comes(fields):
    """P1. Fault: one of the many names is accepted and ignored."""
    with thinking_model(f"<think>{'Hm. ' * 40}</think> Done.") as llm:
        async with client_of(llm) as client:
            told = (await ask(client, chat(max_tokens=400, **fields))).json()
    num_reasoning = told["usage"]["completion_tokens_details"]["reasoning_tokens"]
    if fields in BUDGETS:
        assert 20 <= num_reasoning <= 20 + len("\n</think>\n\n")
    else:
        assert num_reasoning == len(f"<think>{'Hm. ' * 40}</think>")
        assert told["choices"][0]["message"]["content"] == "Done."


async def test_two_budgets_that_differ_are_refused():
    with thinking_model("x") as llm:
        async with client_of(llm) as client:
            response = await ask(client, chat(thinking_budget=20, thinking={"type": "enabled", "budget_tokens": 30}))
    assert response.status_code == 400 and response.json()["error"]["param"] == "thinking.budget_tokens"


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, "unsaid"),
        ({"thinking": {"type": "disabled"}}, "no"),
        ({"thinking": {"type": "enabled"}}, "yes"),
        ({"enable_thinking": False}, "no"),
        ({"reasoning_effort": "none"}, "no"),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "no"),
    ],
)
async def test_whether_to_think_goes_to_the_template(fields, thinks):
    """P1: by the names that clients have for it."""
    template = "{{ messages[0].content }}{{ {true: 'yes', false: 'no'}[enable_thinking] or 'unsaid' }}{# <think> #}"
    with thinking_model("x", template) as llm:
        async with client_of(llm) as client:
            told = (await ask(client, chat("", max_tokens=1, **fields))).json()
    assert told["usage"]["prompt_tokens"] == len(thinks)


async def test_log_probabilities_of_the_prompt_are_told_as_vllm_does():
    """P2: those of teacher forcing, one entry per token of the rendered prompt; not in streams."""
    with make_llm(make_engine(make_target(), max_context=CONTEXT).runner, max_context=CONTEXT) as llm:
        prompt = llm.encode(chat()["messages"])
        async with client_of(llm) as client:
            told = (await ask(client, chat(prompt_logprobs=2, max_tokens=1))).json()["prompt_logprobs"]
            refused = await ask(client, chat(prompt_logprobs=2, stream=True))
    expected = teacher_forced(prompt)
    assert told[0] is None and len(told) == len(prompt)
    for i in range(1, len(prompt)):
        own = told[i][str(prompt[i])]
        assert math.isclose(own["logprob"], expected[i - 1, prompt[i]], abs_tol=1e-3)
        assert own["decoded_token"] == llm.tokenizer.token_text(prompt[i]).text
        ranked = {entry["rank"]: entry["logprob"] for entry in told[i].values() if entry["rank"]}
        tops = expected[i - 1].topk(2).values.tolist()
        assert ranked.keys() == {1, 2} and math.isclose(ranked[2], tops[1], abs_tol=1e-3)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_logprobs"


# --- what is told -----------------------------------------------------------------------------------------------------


async def test_each_response_tells_how_its_tokens_were_speculated():
    """V2: whole, and in the last chunk of a stream, with usage in a chunk of its own or without; the same numbers."""
    story = "It goes on and on, and then it ends. "
    with model_saying(story, [knowing(ids_of(story))], width=4) as llm:
        async with client_of(llm) as client:
            whole = (await ask(client, chat())).json()
            chunks = await events(client, chat())
            counted = await events(client, chat(stream_options={"include_usage": True}))
    told = whole["metrics"]["speculative_decoding"]
    names = {"mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "num_spec_steps"}
    assert names | {"num_accepted_draft_tokens", "num_draft_tokens"} <= told.keys()
    assert told["num_spec_steps"] == sum(told["acceptance_histogram"]) > 5
    assert told["mean_acceptance_length"] > 4
    assert [c["metrics"]["speculative_decoding"] for c in chunks[:-1] if "metrics" in c] == [told]
    assert [c["metrics"]["speculative_decoding"] for c in counted[:-1] if "metrics" in c] == [told]
    assert "metrics" in chunks[-2] and "metrics" in counted[-2]


async def test_the_fingerprint_stays_while_the_same_seed_gives_the_same():
    """P2: drafts are not part of it, since they never change an answer."""
    with model_saying("x") as llm, model_saying("x", [knowing([EOS])], width=3) as drafting:
        async with client_of(llm) as one, client_of(drafting) as other:
            told = [(await ask(client, chat())).json()["system_fingerprint"] for client in (one, one, other)]
    assert len(set(told)) == 1 and told[0].startswith("fp_")

"""What known clients send, over all APIs: taken, with sensible answers. And no field of an SDK is overlooked (P1)."""

import inspect
import json
from dataclasses import dataclass
from typing import Any

import pytest

from lampejo.server.anthropic import MessagesBody
from lampejo.server.errors import ApiError
from lampejo.server.fields import Body
from lampejo.server.openai_chat import ChatBody
from lampejo.server.openai_completions import CompletionBody
from lampejo.server.responses import ResponsesBody
from lampejo.server.sampling_fields import EFFORTS, KNOWN
from server_app import ask, chat, client_of, events, text_of, thinking_model

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


# --- every field of the SDKs ------------------------------------------------------------------------------------------

TRANSPORT = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}  # of the SDK, not of the body
HEADERS = {"betas", "user_profile_id", "workspace_id"}
NO_ACCOUNTS = "who asks, who pays and where it runs; there are no accounts and no regions here"
OWN_CACHE = "prefixes are cached by themselves"
NO_STORE = "a label for what is stored or watched; nothing is stored"
HARMLESS = {
    "metadata": NO_STORE,
    "store": "nothing is stored, and nothing that is answered says so",
    "user": NO_ACCOUNTS,
    "safety_identifier": NO_ACCOUNTS,
    "service_tier": "there is one tier",
    "prompt_cache_key": OWN_CACHE,
    "prompt_cache_options": OWN_CACHE,
    "prompt_cache_retention": OWN_CACHE,
    "cache_control": OWN_CACHE,
    "prediction": "a hint about the text to come, which changes its speed and not its content; drafts need no hint",
    "verbosity": "a hint to models that were trained on it; no template of an open model knows it",
    "max_tool_calls": "of tools that the server runs itself; it has none",
    "access_programs": NO_ACCOUNTS,
    "billing_policy": NO_ACCOUNTS,
    "fallback_credit_token": NO_ACCOUNTS,
    "fallbacks": "other models for what this one declines by policy; it has no policy",
}
SDKS: dict[str, tuple[str, str, type[Body]]] = {
    "openai chat.completions": ("openai.resources.chat.completions", "Completions", ChatBody),
    "openai completions": ("openai.resources.completions", "Completions", CompletionBody),
    "openai responses": ("openai.resources.responses", "Responses", ResponsesBody),
    "anthropic messages": ("anthropic.resources.messages", "Messages", MessagesBody),
    "anthropic beta.messages": ("anthropic.resources.beta.messages", "Messages", MessagesBody),
}


@pytest.mark.parametrize("sdk", SDKS)
def test_each_parameter_of_the_sdk_is_honoured_refused_or_harmless(sdk):
    """P1. Fault: a field that a new version of an API brings is accepted and ignored, and nobody noticed."""
    module, name, body = SDKS[sdk]
    resource = getattr(pytest.importorskip(module), name)
    parameters = set(inspect.signature(resource.create).parameters) - TRANSPORT - HEADERS
    assert parameters - body.model_fields.keys() - body.refused.keys() - HARMLESS.keys() == set()
    assert not body.refused.keys() & HARMLESS.keys()


ANSWERED: tuple[type[Body], ...] = (ChatBody, CompletionBody, ResponsesBody, MessagesBody)
# What steers no answer, or is of one API alone and of no consequence to another.
OF_ONE_API = {"model", "stream", "metadata", "inference_geo", "return_token_strs"}


@pytest.mark.parametrize("body", ANSWERED)
def test_each_field_that_one_api_knows_is_honoured_or_refused_by_every_other(body):
    """P1. Fault: ``max_completion_tokens`` at /v1/completions is accepted, and ignored."""
    names = {name for kind in ANSWERED for name in (*kind.model_fields, *kind.refused)} - OF_ONE_API
    assert names == KNOWN.keys(), "a new field goes into the table"
    assert names - body.model_fields.keys() - body.refused.keys() == set()
    assert body.places.keys() <= body.refused.keys()


THINKING_OFF: list[dict[str, Any]] = [
    {"enable_thinking": False},
    {"thinking": {"type": "disabled"}},
    {"chat_template_kwargs": {"enable_thinking": False}},
]


@pytest.mark.parametrize("fields", THINKING_OFF)
def test_thinking_is_turned_off_by_the_same_words_in_both_forms_of_chats(fields):
    """P1. Fault: what docs/serving.md tells of chats is 400 at /v1/responses."""
    told = ResponsesBody.model_validate({"input": "Hello", **fields}).chat().template_kwargs
    assert told == ChatBody.model_validate({**chat(), **fields}).chat().template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ChatBody, {"thinking": {"type": "enabled", "keep": 1}}),
        (MessagesBody, {"thinking": {"type": "enabled", "budget_tokens": 5, "keep": 1}}),
        (MessagesBody, {"thinking": {"type": "adaptive", "budget_tokens": 5}}),
        (MessagesBody, {"output_config": {"keep": 1}}),
        (ResponsesBody, {"reasoning": {"effort": "low", "max_tokens": 9}}),
        (ResponsesBody, {"text": {"keep": 1}}),
    ],
)
def test_what_an_inner_object_has_is_honoured_or_refused_too(kind, fields):
    """P1. Fault: a budget, or a typing error, that changes nothing and is answered with 200."""
    base = {"input": "Hello"} if kind is ResponsesBody else chat(**({"max_tokens": 9} if kind is MessagesBody else {}))
    with pytest.raises(ApiError) as caught:
        kind.model_validate({**base, **fields}).chat()
    assert caught.value.param == next(iter(fields))


def test_all_forms_of_chats_know_the_same_efforts():
    """P1. Fault: "max" is refused by one API, and a typing error passes at another."""

    def forms(effort: Any) -> list[Any]:
        return [
            ChatBody.model_validate(chat(reasoning_effort=effort)),
            ResponsesBody.model_validate({"input": "Hello", "reasoning": {"effort": effort}}),
            MessagesBody.model_validate(chat(max_tokens=9, output_config={"effort": effort})),
        ]

    for effort in EFFORTS:
        assert all(body.chat().template_kwargs["reasoning_effort"] == effort for body in forms(effort))
    for body in forms("much"):
        with pytest.raises(ApiError, match="none, minimal, low, medium, high, xhigh, max"):
            body.chat()


def test_no_effort_means_no_thinking_in_all_forms_of_chats():
    """P1. Fault: what docs/serving.md tells of all three is not done at /v1/messages."""
    for body in (
        ChatBody.model_validate(chat(reasoning_effort="none")),
        ResponsesBody.model_validate({"input": "Hello", "reasoning": {"effort": "none"}}),
        MessagesBody.model_validate(chat(max_tokens=9, output_config={"effort": "none"})),
    ):
        assert body.chat().template_kwargs == {"reasoning_effort": "none", "enable_thinking": False}


async def test_a_seed_is_honoured_by_anthropics_api_too():
    with thinking_model(HELLO) as llm:
        async with client_of(llm) as client:
            assert (await ask(client, chat(max_tokens=9, seed=7), MESSAGES)).status_code == 200
            refused = await ask(client, chat(max_tokens=9, seed=2**70), MESSAGES)
    assert MessagesBody.model_validate(chat(max_tokens=9, seed=7)).chat().params["seed"] == 7
    assert refused.status_code == 400 and refused.json()["error"]["message"].startswith("seed")


BODIES = {COMPLETIONS: {"prompt": "Hi"}, RESPONSES: {"input": "Hi"}, MESSAGES: chat(max_tokens=9)}


@pytest.mark.parametrize("path", [CHAT, *BODIES])
async def test_every_api_decodes_without_drafts_if_asked_to(path):
    """P1. Fault: docs/serving.md tells it of all APIs, and /v1/messages refused it."""
    body = BODIES.get(path, chat())
    with thinking_model(HELLO) as llm:
        async with client_of(llm) as client:
            for drafts in (True, False):
                told = (await ask(client, {**body, "lampejo": {"drafts": drafts}}, path)).json()
                assert (told["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0) == drafts
            refused = await ask(client, {**body, "lampejo": {"draft": False}}, path)
            assert refused.status_code == 400 and refused.json()["error"]["message"].startswith("lampejo.draft: ")


async def test_tokens_are_counted_of_a_body_that_asks_for_no_drafts():
    with thinking_model(HELLO) as llm:
        async with client_of(llm) as client:
            path, body = "/v1/messages/count_tokens", chat(lampejo={"drafts": False})
            assert (await ask(client, body, path)).json() == (await ask(client, chat(), path)).json()
            assert (await ask(client, chat(lampejo={"drafts": 1}), path)).status_code == 400


@pytest.mark.parametrize("path", list(BODIES))
async def test_a_trace_is_refused_where_there_is_no_place_for_it(path):
    """P1. Fault: ``lampejo: {"trace": true}`` is accepted, and nothing is traced."""
    body = BODIES[path]
    with thinking_model(HELLO) as llm:
        async with client_of(llm) as client:
            response = await ask(client, {**body, "lampejo": {"trace": True}}, path)
    assert response.status_code == 400 and response.json()["error"]["message"].startswith("lampejo.trace: ")


@pytest.mark.parametrize(
    ("path", "body", "refused"),
    [
        (CHAT, chat(), ChatBody.refused),
        (COMPLETIONS, {"prompt": "assistant:"}, CompletionBody.refused),
        (RESPONSES, {"input": "Hello"}, ResponsesBody.refused),
        (MESSAGES, chat(max_tokens=9), MessagesBody.refused),
    ],
)
async def test_fields_that_are_refused_are_named_and_pass_with_values_that_change_nothing(path, body, refused):
    """P1: 400 with the field's name; null and what changes nothing are no reason to refuse."""
    with thinking_model(HELLO) as llm:
        async with client_of(llm) as client:
            for field, harmless in refused.items():
                response = await ask(client, {**body, field: {"some": "thing"}}, path)
                assert response.status_code == 400 and field in response.json()["error"]["message"], field
                for value in (None, *harmless):
                    assert (await ask(client, {**body, field: value}, path)).status_code == 200, (field, value)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat()),
        (COMPLETIONS, {"prompt": "assistant:"}),
        (RESPONSES, {"input": "Hello"}),
        (MESSAGES, chat(max_tokens=9)),
        ("/v1/messages/count_tokens", chat()),
        ("/tokenize", {"prompt": "Hello"}),
        ("/detokenize", {"tokens": [41, 42]}),
    ],
)
async def test_fields_that_no_api_has_change_nothing(path, body):
    """P1: unknown optional fields are accepted, whatever is in them."""
    unknown = {"a_field_of_tomorrow": {"deep": [1, None, "x"]}, "keep_alive": "5m", "extra": None}
    with thinking_model(HELLO) as llm:
        async with client_of(llm) as client:
            known, more = [await ask(client, one, path) for one in (body, {**body, **unknown})]
    assert known.status_code == more.status_code == 200, more.text
    assert outcome(known.json()) == outcome(more.json())


def outcome(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without what is of the moment."""
    text = json.dumps(
        {name: value for name, value in answer.items() if not name.startswith(("id", "created", "complet"))}
    )
    return {
        **json.loads(text),
        "usage": None,
        "metrics": None,
        "output": [i.get("content") for i in answer.get("output", [])],
    }

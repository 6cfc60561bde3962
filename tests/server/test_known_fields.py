"""Every field that an SDK or one of the APIs knows: honoured, harmless, or refused by name, in all of them (P1)."""

import inspect
import json
from typing import Any

import pytest

from lampejo.server.anthropic import MessagesBody
from lampejo.server.errors import ApiError
from lampejo.server.fields import Body
from lampejo.server.openai_chat import ChatBody
from lampejo.server.openai_completions import CompletionBody
from lampejo.server.responses import ResponsesBody
from lampejo.server.sampling_fields import EFFORTS, KNOWN
from server_app import ask, chat, client_of, thinking_model

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
HELLO = "Hello there."
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

"""The SDKs of OpenAI and Anthropic against the server: what they send is understood, what they get they can read."""

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from lampejo.api import LLM
from lampejo.server.app import make_app
from lampejo.server.config import ServerConfig
from page_server import serving
from server_app import CALLS, model_saying, thinking_model

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
httpx2 = pytest.importorskip("httpx2")  # which both bring along

HELLO = "Hello! How can I help?"
PERSON = '{"name": "Ana", "age": 30}'
ASKED: list[Any] = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"name": "add", "description": "Adds.", "parameters": SCHEMA}


class Person(BaseModel):
    name: str
    age: int


@contextlib.asynccontextmanager
async def in_process(llm: LLM) -> AsyncIterator[tuple[Any, Any]]:
    """Both clients, without a socket."""
    transport = httpx2.ASGITransport(make_app(llm, ServerConfig()))
    async with httpx2.AsyncClient(transport=transport) as http:
        common = {"api_key": "none", "http_client": http, "max_retries": 0}
        yield (
            openai.AsyncOpenAI(base_url="http://localhost/v1", **common),
            anthropic.AsyncAnthropic(base_url="http://localhost", **common),
        )


@contextlib.contextmanager
def over_a_socket(llm: LLM) -> Iterator[tuple[Any, Any]]:
    with (
        serving(make_app(llm, ServerConfig())) as address,
        openai.OpenAI(api_key="none", base_url=f"{address}/v1", max_retries=0) as one,
        anthropic.Anthropic(api_key="none", base_url=address, max_retries=0) as other,
    ):
        yield one, other


def test_the_sync_clients_talk_over_a_socket():
    """Whole and streamed, all three APIs; a stream's last snapshot is the whole answer."""
    with thinking_model(HELLO) as llm, over_a_socket(llm) as (openai_client, anthropic_client):
        chats, responses, messages = openai_client.chat.completions, openai_client.responses, anthropic_client.messages
        assert [model.id for model in openai_client.models.list()] == ["model"]
        assert chats.create(model="model", messages=ASKED).choices[0].message.content == HELLO
        pieces = [c.choices[0].delta.content or "" for c in chats.create(model="model", messages=ASKED, stream=True)]
        assert "".join(pieces) == HELLO and len(pieces) > 2
        completion = openai_client.completions.create(model="model", prompt="assistant:", max_tokens=5)
        assert completion.choices[0].text == HELLO[:5]
        assert responses.create(model="model", input="Hi").output_text == HELLO
        with responses.stream(model="model", input="Hi") as stream:
            texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
            assert "".join(texts) == stream.get_final_response().output_text == HELLO
        whole = messages.create(model="model", messages=ASKED, max_tokens=99)
        assert (whole.content[0].text, whole.stop_reason) == (HELLO, "end_turn")
        with messages.stream(model="model", messages=ASKED, max_tokens=99) as stream:
            assert "".join(stream.text_stream) == HELLO
            assert stream.get_final_message().usage.output_tokens == whole.usage.output_tokens == len(HELLO) + 1


async def test_openai_chat_with_tools_and_reasoning():
    with thinking_model(CALLS) as llm:
        async with in_process(llm) as (client, _):
            asked = {"model": "model", "messages": ASKED, "tools": [{"type": "function", "function": TOOL}]}
            whole = (await client.chat.completions.create(**asked)).choices[0]
            async with client.chat.completions.stream(**asked) as stream:
                kinds = {event.type async for event in stream}
                final = (await stream.get_final_completion()).choices[0]
    assert "tool_calls.function.arguments.done" in kinds
    for choice in (whole, final):
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Adding."
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
        assert calls == [("add", {"a": 1, "b": [2, 3]}), ("add", {})]


async def test_openai_responses_with_tools_and_reasoning_sent_back():
    """A second turn is the output of the first as input, as stateless clients do."""
    with thinking_model(CALLS) as llm:
        async with in_process(llm) as (client, _):
            asked: dict[str, Any] = {"model": "model", "tools": [{"type": "function", "strict": False, **TOOL}]}
            whole = await client.responses.create(**asked, input=ASKED)
            async with client.responses.stream(**asked, input=ASKED) as stream:
                kinds = [event.type async for event in stream]
                final = await stream.get_final_response()
            results = [
                {"type": "function_call_output", "call_id": item.call_id, "output": "2"} for item in whole.output[2:]
            ]
            again = await client.responses.create(**asked, input=[*ASKED, *whole.output, *results])
    assert kinds.count("response.function_call_arguments.done") == 2
    for response in (whole, final):
        assert response.status == "completed" and response.output_text == "Adding."
        assert response.output[0].content[0].text == "Let me add."
        assert [json.loads(item.arguments) for item in response.output[2:]] == [{"a": 1, "b": [2, 3]}, {}]
    assert again.usage.input_tokens > whole.usage.input_tokens


async def test_anthropic_messages_with_tools_and_thinking_sent_back():
    with thinking_model(CALLS) as llm:
        async with in_process(llm) as (_, client):
            tool = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
            asked = {"model": "model", "max_tokens": 300, "tools": [tool]}
            whole = await client.messages.create(**asked, messages=ASKED)
            async with client.messages.stream(**asked, messages=ASKED) as stream:
                kinds = {event.type async for event in stream}
                final = await stream.get_final_message()
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": "2"}
                for block in whole.content
                if block.type == "tool_use"
            ]
            turns = [*ASKED, {"role": "assistant", "content": whole.content}, {"role": "user", "content": results}]
            again = await client.messages.create(**asked, messages=turns)
            counted = await client.messages.count_tokens(model="model", messages=turns, tools=[tool])
    assert {"thinking", "text", "input_json", "content_block_stop", "message_stop"} <= kinds
    for message in (whole, final):
        assert message.stop_reason == "tool_use"
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert [block.input for block in message.content[2:]] == [{"a": 1, "b": [2, 3]}, {}]
    assert again.usage.input_tokens + again.usage.cache_read_input_tokens == counted.input_tokens


async def test_structured_output_is_parsed_by_all():
    with thinking_model(PERSON) as llm:
        async with in_process(llm) as (openai_client, anthropic_client):
            ana = Person(name="Ana", age=30)
            parsed = await openai_client.chat.completions.parse(model="model", messages=ASKED, response_format=Person)
            assert parsed.choices[0].message.parsed == ana
            response = await openai_client.responses.parse(model="model", input="Who?", text_format=Person)
            assert response.output_parsed == ana
            async with openai_client.responses.stream(model="model", input="Who?", text_format=Person) as stream:
                assert (await stream.get_final_response()).output_parsed == ana
            message = await anthropic_client.messages.parse(
                model="model", max_tokens=99, messages=ASKED, output_format=Person
            )
            assert message.parsed_output == ana


async def test_structured_output_is_enforced():
    """Fault: a schema that is accepted and ignored. The model would say something else."""
    answer = {"properties": {"answer": {"enum": ["yes", "no"]}}, "required": ["answer"]}
    schema = {"type": "object", "additionalProperties": False, **answer}
    form = {"type": "json_schema", "schema": schema}
    greedy: Any = {"model": "model", "extra_body": {"temperature": 0}}
    with model_saying("No.") as llm:
        async with in_process(llm) as (openai_client, anthropic_client):
            text = {"format": {"name": "answer", "strict": True, **form}}
            response = await openai_client.responses.create(**greedy, input="?", text=text)
            config = {"format": form}
            message = await anthropic_client.messages.create(
                **greedy, messages=ASKED, max_tokens=400, output_config=config
            )
    for told in (response.output_text, message.content[0].text):
        assert json.loads(told)["answer"] in ("yes", "no")


async def test_errors_are_those_of_each_sdk():
    with thinking_model("x") as llm:
        async with in_process(llm) as (openai_client, anthropic_client):
            with pytest.raises(openai.BadRequestError, match="temperature"):
                await openai_client.responses.create(model="model", input="Hi", temperature=-1)
            with pytest.raises(openai.NotFoundError):
                await openai_client.responses.create(model="gpt-0", input="Hi")
            with pytest.raises(openai.BadRequestError, match="previous_response_id"):
                await openai_client.responses.create(model="model", input="Hi", previous_response_id="resp_1")
            with pytest.raises(anthropic.BadRequestError, match="temperature"):
                odd = {"temperature": -1}
                await anthropic_client.messages.create(model="model", max_tokens=9, messages=ASKED, extra_body=odd)
            with pytest.raises(anthropic.NotFoundError):
                await anthropic_client.messages.create(model="claude-0", max_tokens=9, messages=ASKED)

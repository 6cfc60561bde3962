"""Other people's clients over a socket: ``llm`` and ``litellm``, whole, streamed, with tools and schemas."""

import asyncio
import contextlib
import json
import warnings
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from lampejo.answer import style_of
from lampejo.api import LLM
from lampejo.server.app import make_app
from lampejo.server.config import ServerConfig
from page_server import serving
from scripted import ids_of, scripted_llm
from server_app import QWEN, saying, thinking_model

HELLO = "Hello there."
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
SUM = "It is 5."
ADD = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
PERSON = '{"name": "Ana", "age": 30}'


@contextlib.contextmanager
def server(llm: LLM, **config: Any) -> Iterator[str]:
    with llm, serving(make_app(llm, ServerConfig(**config))) as url:
        yield url


def calling_once() -> LLM:
    """A model that calls ``add``, and tells the sum once it was told."""
    call, answer = saying(CALL), saying(SUM)
    result = ids_of("tool: 5")

    def target(text: Any) -> Any:
        text = list(text)
        is_told = any(text[i : i + len(result)] == result for i in range(len(text)))
        return (answer if is_told else call)(text)

    llm = scripted_llm(target)
    llm.chat_template, llm.style = QWEN, style_of(QWEN)
    return llm


# --- llm --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_llm(tmp_path, monkeypatch):
    """The command line of ``llm`` with a model of its own, as its documentation has one add it."""
    cli = pytest.importorskip("llm.cli").cli
    testing = pytest.importorskip("click.testing")
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    monkeypatch.setenv("OPENAI_API_KEY", "none")

    def run(url: str, *args: str) -> str:
        model = {"model_id": "lampejo", "model_name": "model", "api_base": f"{url}/v1"}
        models = json.dumps([model | {"supports_tools": True, "supports_schema": True}])  # which is YAML too
        (tmp_path / "extra-openai-models.yaml").write_text(models)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = testing.CliRunner().invoke(cli, ["-m", "lampejo", *args], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    return run


@pytest.mark.parametrize("args", [(), ("--no-stream",), ("-o", "max_tokens", "100", "-o", "temperature", "0")])
def test_llm_prints_the_answer(run_llm, args):
    """Streamed, which is its default, and whole."""
    with server(thinking_model(HELLO)) as url:
        assert run_llm(url, *args, "-s", "Be short", "Hello") == f"{HELLO}\n"


def test_llm_calls_a_function_and_reads_on(run_llm, tmp_path):
    """The call, its result and the model's last word, in a chain of two requests."""
    code = tmp_path / "tools.py"
    code.write_text("def add(a: int, b: int) -> int:\n    return a + b\n")
    with server(calling_once()) as url:
        assert run_llm(url, "--functions", str(code), "Two and three?").strip().endswith(SUM)


def test_llm_gets_json_by_a_schema(run_llm):
    with server(thinking_model(PERSON)) as url:
        assert json.loads(run_llm(url, "--schema", "name, age int", "A person")) == json.loads(PERSON)


# --- litellm ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def litellm():
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it is fetched
        warnings.simplefilter("ignore")
        litellm = pytest.importorskip("litellm")
        # It makes both itself where there are none, and never closes them: they would fail whatever test is running
        # when they are collected.
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        with httpx.Client() as session, contextlib.closing(loop):
            patch.setattr(litellm, "client_session", session)
            yield litellm
        asyncio.set_event_loop(None)


def ask(litellm: Any, url: str, **fields: Any) -> Any:
    asked = {"model": "openai/model", "api_base": f"{url}/v1", "api_key": "none", "num_retries": 0, **fields}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return litellm.completion(**{"messages": [{"role": "user", "content": "Hello"}], **asked})


def test_litellm_reads_answers_whole_and_streamed(litellm):
    with server(thinking_model(f"<think>Hm.</think>{HELLO}")) as url:
        message = ask(litellm, url, metadata={"run": "1"}, user="u").choices[0].message
        assert (message.content, message.reasoning_content) == (HELLO, "Hm.")
        chunks = list(ask(litellm, url, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == HELLO
    assert litellm.stream_chunk_builder(chunks).usage.completion_tokens > len(HELLO)


def test_litellm_gets_calls_and_sends_their_results(litellm):
    tools = [{"type": "function", "function": ADD}]
    with server(calling_once()) as url:
        message = ask(litellm, url, tools=tools, tool_choice="auto").choices[0].message
        (call,) = message.tool_calls
        assert json.loads(call.function.arguments) == {"a": 2, "b": 3}
        result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
        messages = [{"role": "user", "content": "Hello"}, message.model_dump(), result]
        assert ask(litellm, url, tools=tools, messages=messages).choices[0].message.content == SUM
        chunks = list(ask(litellm, url, tools=tools, stream=True))
    built = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert [json.loads(call.function.arguments) for call in built] == [{"a": 2, "b": 3}]


def test_litellm_raises_what_the_server_refuses(litellm):
    """Its errors are those of the status: clients retry by them."""
    with server(thinking_model(HELLO)) as url:
        with pytest.raises(litellm.BadRequestError, match="top_p"):
            ask(litellm, url, top_p=7)
        with pytest.raises(litellm.NotFoundError, match="another"):
            ask(litellm, url, model="openai/another")

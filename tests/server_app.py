"""The server in process: an application over a scripted or tiny model, and a client for it."""

import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import uvicorn

from lampejo.answer import style_of
from lampejo.api import LLM
from lampejo.server.app import make_app
from lampejo.server.config import ServerConfig
from lampejo.server.service import Service
from lampejo.speculate import Drafter
from scripted import CHAT, EOS, Target, ids_of, knowing, make_tokenizer, scripted_llm

MARK = ids_of("assistant:")  # the end of a prompt by ``scripted.CHAT``
TOLD = (
    "{{ m.content }}{% for c in m.tool_calls %} {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
)
CALLING = CHAT.replace("{{ m.content }}", TOLD) + "{# <tool_call> #}"
QWEN = CALLING + "{# <think> #}"  # what a template knows is read off its text
CALLS = """<think>Let me add.</think> Adding.
<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2, 3]}}</tool_call>
<tool_call>{"name": "add", "arguments": {}}</tool_call>""".replace("\n", " ")


def saying(answer: str) -> Target:
    """A target that answers every chat with this text."""
    ids = [*ids_of(answer), EOS]

    def target(text: Any) -> int:
        text = list(text)
        start = max((i for i in range(len(text)) if text[i : i + len(MARK)] == MARK), default=None)
        said = 0 if start is None else len(text) - start - len(MARK)
        return ids[said] if said < len(ids) else EOS

    return target


def model_saying(answer: str, drafters: list[Drafter] | None = None, **config: Any) -> LLM:
    return scripted_llm(saying(answer), drafters or [], **config)


def thinking_model(answer: str, template: str = QWEN, **config: Any) -> LLM:
    """A model whose template knows reasoning and tools, or what ``template`` names of them, with drafts that are always
    right. It can write line ends."""
    llm = model_saying(answer, [knowing(ids_of(answer), 16)], tokenizer=make_tokenizer("\n"), **config)
    llm.chat_template, llm.style = template, style_of(template)
    return llm


@contextlib.asynccontextmanager
async def client_of(llm: LLM, **config: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = make_app(llm, ServerConfig(**config))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
        yield client


@contextlib.contextmanager
def listening(llm: LLM, **config: Any) -> Iterator[tuple[int, Service]]:
    """A server in a thread of this process."""
    app = make_app(llm, ServerConfig(**config))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()[1], app.state.service
        finally:
            server.should_exit = True
            thread.join()


def chat(text: str = "Hello", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


async def ask(client: httpx.AsyncClient, body: Any, path: str = "/v1/chat/completions") -> httpx.Response:
    return await client.post(path, json=body)


async def events(client: httpx.AsyncClient, body: Any, path: str = "/v1/chat/completions") -> list[Any]:
    """The data of all events of a stream; [DONE] as None."""
    async with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = [line async for line in response.aiter_lines()]
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [None if one == "[DONE]" else json.loads(one) for one in data]


def text_of(chunks: list[Any], index: int = 0, name: str = "content") -> str:
    deltas = [c["delta"] for chunk in chunks if chunk for c in chunk["choices"] if c["index"] == index]
    return "".join(delta.get(name) or "" for delta in deltas)

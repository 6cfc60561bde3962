"""The whole application against those who mean it no good: hostile templates, bodies, pages, and what it tells them."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from lampejo.api import LLM
from lampejo.server.app import make_app
from lampejo.server.config import Security, ServerConfig
from lampejo.speculate import NgramDrafter
from scripted import scripted_llm

KEY = "sk-hardening-1"
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


@pytest.fixture
def llm() -> Iterator[LLM]:
    with scripted_llm(lambda text: text[len(text) % 5 + 1], [NgramDrafter(3)], width=4, page_size=8) as made:
        yield made


def client_of(llm: LLM, *keys: str, **config: Any) -> httpx.AsyncClient:
    app = make_app(llm, ServerConfig(security=Security(keys), **config))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost:8000", timeout=60)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ self.__init__.__globals__.__builtins__.open('/etc/passwd').read() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__ }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{{ 'x' * 10 ** 9 }}",
    ],
)
async def test_a_hostile_template_of_a_model_harms_no_server(llm, template):
    """O4: it cannot reach Python, and a body of 400 says so; the next request, on another template, is answered."""
    good, llm.chat_template = llm.chat_template, template
    async with client_of(llm) as client:
        response = await client.post("/v1/chat/completions", json=HELLO)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["type"] == "invalid_request_error"
        assert not any(word in response.text for word in ("root:", "uid=", "subclasses at", "<class"))
        llm.chat_template = good
        assert (await client.post("/v1/chat/completions", json=HELLO)).status_code == 200
    assert not llm.engine.has_work


async def test_a_request_cannot_bring_a_template_of_its_own(llm):
    """O4, P1: neither by the field that another server has, nor through the arguments of the template."""
    evil = "{{ cycler.__init__.__globals__.os.popen('id').read() }}"
    async with client_of(llm) as client:
        for extra in ({"chat_template": evil}, {"chat_template_kwargs": {"template": evil}}):
            response = await client.post("/v1/chat/completions", json=HELLO | extra)
            assert response.status_code == 400
            assert "template" in response.json()["error"]["message"]


async def test_words_of_a_message_are_no_template(llm):
    """O4: what a user writes is text, whatever it looks like."""
    llm.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    text = "{{ 7 * 7 }}{% raw %}"
    async with client_of(llm) as client:
        response = await client.post(
            "/v1/chat/completions", json=HELLO | {"messages": [{"role": "user", "content": text}]}
        )
    assert response.json()["usage"]["prompt_tokens"] == len(text)


async def test_keys_hold_for_the_whole_application(llm, caplog):
    """O3: every route that the application has, in both shapes; nothing tells the key."""
    app = make_app(llm, ServerConfig(security=Security((KEY,))))
    paths = set(app.openapi()["paths"]) | {"/nothing", "/v1/messages"}
    assert {"/v1/chat/completions", "/metrics", "/health"} <= paths
    with caplog.at_level(logging.DEBUG):
        async with client_of(llm, KEY) as client:
            for path in paths:
                for method in ("GET", "POST"):
                    response = await client.request(method, path, json={} if method == "POST" else None)
                    is_open = (method, path) in {("GET", "/health"), ("GET", "/")}
                    assert (response.status_code == 401) == (not is_open), path
            client.headers["x-api-key"] = KEY
            assert (await client.post("/v1/chat/completions", json=HELLO)).status_code == 200
            told = [
                (await client.get(path)).text for path in ("/metrics", "/health", "/v1/models", "/openapi.json", "/")
            ]
    assert KEY not in "".join(told) + caplog.text


async def test_a_page_of_another_name_or_origin_gets_nothing_from_the_application(llm):
    """DNS rebinding, and forms that need no permission."""
    async with client_of(llm) as client:
        rebound = await client.post("/v1/chat/completions", json=HELLO, headers={"Host": "evil.example.org:8000"})
        assert rebound.status_code == 403
        form = {"Content-Type": "text/plain", "Origin": "https://evil.example.org"}
        response = await client.post("/v1/chat/completions", content=json.dumps(HELLO), headers=form)
        assert response.status_code == 415
        assert "access-control-allow-origin" not in response.headers
    assert llm.engine.scheduler.num_queried_tokens == 0, "it reached the model"


async def test_metrics_tell_what_streams_and_wholes_told(llm):
    """Over HTTP the totals are the sums of usage and of metrics.speculative_decoding."""
    usages, stats = [], []
    async with client_of(llm, vllm_metrics=True) as client:
        for i in range(6):
            body = HELLO | {"max_tokens": 20 + i, "n": 1 + i % 2, "stream": i % 3 == 0, "ignore_eos": True}
            if body["stream"]:
                body["stream_options"] = {"include_usage": True}
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            events = (
                [response.text]
                if not body["stream"]
                else [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: {")]
            )
            last = json.loads(events[-1])
            usages.append(last["usage"])
            stats.append(last["metrics"]["speculative_decoding"])
        text = (await client.get("/metrics")).text
    told = dict(line.rsplit(" ", 1) for line in text.splitlines() if line and line[0] != "#")
    for prefix in ("lampejo:", "vllm:"):
        for name, expected in (
            ("generation_tokens_total", sum(usage["completion_tokens"] for usage in usages)),
            ("spec_decode_num_drafts_total", sum(s["num_spec_steps"] for s in stats)),
            ("spec_decode_num_draft_tokens_total", sum(s["num_draft_tokens"] for s in stats)),
            ("spec_decode_num_accepted_tokens_total", sum(s["num_accepted_draft_tokens"] for s in stats)),
        ):
            assert float(told[f'{prefix}{name}{{model_name="model"}}']) == expected > 0
        assert float(told[f'{prefix}request_success_total{{finished_reason="length",model_name="model"}}']) == 9


async def test_a_mistake_of_ours_tells_its_id_and_nothing_of_its_inside(llm, monkeypatch, caplog):
    """O5: a 500 has no traceback and no path; the log has it, under the id that the caller was told."""

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("at /secret/path with sk-key")

    monkeypatch.setattr(llm, "make_request", broken)
    async with client_of(llm) as client:
        response = await client.post("/v1/chat/completions", json=HELLO, headers={"x-request-id": "trace-7"})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.headers["x-request-id"] == "trace-7"
    assert "ZeroDivisionError" in caplog.text and "trace-7" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
async def test_the_access_log_of_the_application_tells_tokens_but_no_text(llm, caplog, stream):
    """Also where the answer is put together in a task of its own."""
    body = HELLO | {"messages": [{"role": "user", "content": "confidential"}], "max_tokens": 7, "ignore_eos": True}
    with caplog.at_level(logging.INFO, "lampejo.access"):
        async with client_of(llm) as client:
            response = await client.post("/v1/chat/completions", json=body | {"stream": stream})
    assert response.status_code == 200
    (line,) = [json.loads(record.message) for record in caplog.records if record.name == "lampejo.access"]
    assert (line["completion_tokens"], line["finish_reasons"], line["status"]) == (7, ["length"], 200)
    assert "confidential" not in caplog.text

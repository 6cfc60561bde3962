"""Keys, other origins, other names: who is let in, and that no key is ever told."""

import json
import logging
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import PlainTextResponse

from lampejo.errors import UserError
from lampejo.server import security
from lampejo.server.config import Security, ServerConfig, is_loopback
from lampejo.server.security import find_keys, protect

KEYS = ("sk-one-1234", "sk-two-5678")
PATHS = ["/v1/models", "/v1/chat/completions", "/v1/messages", "/metrics", "/tokenize", "/version", "/anything/else"]


def client_of(config: ServerConfig, base_url: str = "http://localhost:8000") -> httpx.AsyncClient:
    app = FastAPI(docs_url=None, openapi_url=None)

    @app.api_route("/{path:path}", methods=["GET", "POST", "HEAD", "PUT"])
    async def anything(path: str) -> PlainTextResponse:
        return PlainTextResponse("secret")

    protect(app, config)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=base_url)


def with_keys(**security: Any) -> ServerConfig:
    return ServerConfig(security=Security(KEYS, **security))


@pytest.mark.parametrize("path", PATHS)
async def test_without_a_key_nothing_is_answered_but_the_page_and_the_health(path):
    """O3: what is not named as open is closed, also paths that do not exist yet."""
    async with client_of(with_keys()) as client:
        for method in ("GET", "POST", "HEAD", "PUT"):
            response = await client.request(method, path)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert "secret" not in response.text
        for open_path in ("/", "/health", "/web/app.js", "/docs", "/openapi.json"):
            assert (await client.get(open_path)).status_code == 200
            assert (await client.post(open_path)).status_code == 401
        assert (await client.get("/health/")).status_code == 401
        assert (await client.get("/healthy")).status_code == 401


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("header", ["Authorization", "x-api-key"])
async def test_each_key_opens_the_api_in_the_headers_of_both_apis(key, header):
    """O3: OpenAI's clients send a bearer token, Anthropic's the key itself."""
    async with client_of(with_keys()) as client:
        for value in [f"Bearer {key}", f"bearer  {key}"] if header == "Authorization" else [key]:
            response = await client.post("/v1/messages", headers={header: value})
            assert (response.status_code, response.text) == (200, "secret")


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": KEYS[0]},
        {"Authorization": f"Basic {KEYS[0]}"},
        {"Authorization": "Bearer "},
        {"Authorization": f"Bearer {KEYS[0]}x"},
        {"Authorization": f"Bearer {KEYS[0][:-1]}"},
        {"Authorization": f"Bearer {KEYS[0]},{KEYS[1]}"},
        {"Authorization": f"Bearer {KEYS[0].upper()}"},
        {"Authorization": "Bearer schl\u00fcssel"},
        {"x-api-key": ""},
        {"x-api-key": f"Bearer {KEYS[0]}"},
        {"Cookie": f"x-api-key={KEYS[0]}"},
    ],
    ids=repr,
)
async def test_what_is_not_exactly_a_key_opens_nothing(headers):
    """O3"""
    async with client_of(with_keys()) as client:
        encoded = {name: value.encode("latin-1") for name, value in headers.items()}
        assert (await client.get("/v1/models", headers=encoded)).status_code == 401
        assert (await client.get(f"/v1/models?api_key={KEYS[0]}")).status_code == 401


async def test_every_known_key_is_compared_as_a_digest_whichever_is_right(monkeypatch):
    """O3: a comparison that stops early, or at the first key that fits, tells by its time how near a guess was."""
    seen = []

    def compare(a: bytes, b: bytes) -> bool:
        seen.append((len(a), len(b)))
        return a == b

    monkeypatch.setattr(security.hmac, "compare_digest", compare)
    counts = []
    async with client_of(with_keys()) as client:
        for key in (*KEYS, "sk-one-123", "x", "x" * 1000):
            seen.clear()
            await client.get("/v1/models", headers={"x-api-key": key})
            assert all(lengths == (32, 32) for lengths in seen)
            counts.append(len(seen))
    assert counts == [4] * 5


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_the_refusal_has_the_shape_of_the_api_that_was_called(path):
    """O3: an SDK raises its AuthenticationError with our message, whichever it is."""
    async with client_of(with_keys()) as client:
        anthropic = (await client.post(path)).json()
        assert (anthropic["type"], anthropic["error"]["type"]) == ("error", "authentication_error")
        openai = (await client.post("/v1/chat/completions")).json()
        assert openai["error"]["type"] == "authentication_error"
        assert openai["error"]["code"] == "invalid_api_key"
        assert openai["error"]["message"] == anthropic["error"]["message"]


async def test_no_key_is_told_in_a_refusal_a_log_or_a_description(caplog):
    """O3: neither a right key nor what was tried in its place."""
    config = with_keys()
    assert all(key not in text for key in KEYS for text in (repr(config), str(config), repr(config.security)))
    with caplog.at_level(logging.DEBUG):
        async with client_of(config) as client:
            response = await client.get("/v1/models", headers={"Authorization": f"Bearer {KEYS[0]}-nearly"})
    told = response.text + json.dumps(dict(response.headers)) + caplog.text
    assert KEYS[0] not in told


async def test_only_listed_origins_may_read_answers():
    """No page of the web is allowed by default."""
    origin, other = "https://chat.example.org", "https://evil.example.org"
    preflight = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    async with client_of(ServerConfig()) as client:
        response = await client.options("/v1/chat/completions", headers={"Origin": origin, **preflight})
        assert response.status_code == 405
        assert "access-control-allow-origin" not in response.headers
        response = await client.get("/v1/models", headers={"Origin": origin})
        assert "access-control-allow-origin" not in response.headers
    async with client_of(with_keys(cors=(origin,))) as client:
        response = await client.options("/v1/chat/completions", headers={"Origin": origin, **preflight})
        assert response.status_code == 200, "a browser asks before it sends the key"
        assert response.headers["access-control-allow-origin"] == origin
        assert "authorization" in response.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in response.headers
        response = await client.get("/v1/models", headers={"Origin": origin})
        assert response.status_code == 401
        assert response.headers["access-control-allow-origin"] == origin, "the page cannot read why"
        response = await client.options("/v1/chat/completions", headers={"Origin": other, **preflight})
        assert response.status_code == 400
        assert "access-control-allow-origin" not in response.headers
        response = await client.get("/v1/models", headers={"Origin": other, "x-api-key": KEYS[0]})
        assert "access-control-allow-origin" not in response.headers


OWN_HOSTS = [
    "localhost",
    "localhost:8000",
    "LOCALHOST:9",
    "127.0.0.1:8000",
    "127.8.9.1",
    "[::1]:8000",
    "my.localhost:1",
    "localhost.",
]
FOREIGN_HOSTS = [
    "evil.example.org",
    "evil.example.org:8000",
    "127.0.0.1.evil.org",
    "localhost.evil.org",
    "0.0.0.0:8000",
    "[::]:8000",
    "10.0.0.7",
    "evil.org:127.0.0.1",
    "",
    "[127.0.0.1",
    "evillocalhost",
]


@pytest.mark.parametrize("host", OWN_HOSTS + FOREIGN_HOSTS)
async def test_without_a_key_only_calls_to_this_machine_by_its_own_name_are_answered(host):
    """A page whose name is led to 127.0.0.1 must not read answers (DNS rebinding)."""
    async with client_of(ServerConfig()) as client:
        for path in ("/", "/health", "/v1/models", "/v1/messages"):
            response = await client.get(path, headers={"Host": host})
            if host in OWN_HOSTS:
                assert response.status_code == 200
            else:
                assert response.status_code == 403
                assert "secret" not in response.text
                assert "localhost" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "config", [with_keys(), ServerConfig(security=Security(insecure=True))], ids=["key", "insecure"]
)
async def test_a_key_or_insecure_lets_a_proxy_pass_calls_on_under_any_name(config):
    """A reverse proxy on the same machine keeps the name that its users know."""
    async with client_of(config) as client:
        headers = {"Host": "llm.example.org", "x-api-key": KEYS[0]}
        assert (await client.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "llm.example.org", ""])
def test_other_machines_are_let_near_only_with_a_key_or_when_told_so(host):
    """O3"""
    with pytest.raises(UserError, match=r"no API key is set.*--api-key-file.*--insecure"):
        ServerConfig(host=host)
    ServerConfig(host=host, security=Security(KEYS))
    ServerConfig(host=host, security=Security(insecure=True))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
def test_this_machine_alone_needs_no_key(host):
    """O3"""
    assert is_loopback(host)
    ServerConfig(host=host)


@pytest.mark.parametrize("key", ["", "two words", "schl\u00fcssel", "a\nb", "tab\t"])
def test_a_key_that_no_header_can_carry_is_refused_without_being_told(key):
    """O3: it would lock everyone out."""
    with pytest.raises(UserError) as caught:
        Security((key,))
    assert not key or key not in str(caught.value)


@pytest.mark.parametrize(
    "origin", ["chat.example.org", "https://chat.example.org/", "https://*.example.org/x", "null", "", "ftp://x"]
)
def test_what_is_no_origin_is_refused(origin):
    """A list with a slash too many allows nobody, and nobody knows why."""
    with pytest.raises(UserError, match="--cors"):
        Security(cors=(origin,))


def test_keys_come_from_flags_file_and_environment_together(tmp_path, monkeypatch):
    """Several keys; a child process inherits none."""
    file = tmp_path / "keys"
    file.write_text("# of the agents\nsk-a  # of Ana\n\n  sk-b  \n", "utf-8")
    monkeypatch.setenv("LAMPEJO_API_KEY", "sk-c, sk-d,sk-a,")
    assert find_keys(["sk-e"], str(file)) == ("sk-e", "sk-c", "sk-d", "sk-a", "sk-b")
    assert "LAMPEJO_API_KEY" not in security.os.environ
    assert find_keys([], None) == ()


def test_a_key_file_that_gives_no_key_is_an_error(tmp_path):
    """O3: an empty file must not leave the server open."""
    empty = tmp_path / "empty"
    empty.write_text("# none\n", "utf-8")
    for file, message in ((empty, "has no key"), (tmp_path / "absent", "No such file"), (tmp_path, "directory")):
        with pytest.raises(UserError, match=f"--api-key-file .*{message}"):
            find_keys([], str(file))

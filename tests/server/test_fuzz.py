"""Random requests by the API's own description: whatever comes, the server never fails (O5)."""

import json
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck

from lampejo.server.app import make_app
from lampejo.server.config import Security, ServerConfig
from server_app import chat, thinking_model

schemathesis = pytest.importorskip("schemathesis")

CONTEXT = 64  # so that an answer that goes on for ever ends soon
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat("Hi"),
    "/v1/completions": {"prompt": "assistant:"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": chat("Hi", max_tokens=9),
    "/v1/messages/count_tokens": chat("Hi"),
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [41]},
}
SETTINGS = hypothesis.settings(
    max_examples=40,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[hypothesis.Phase.generate],
)


@pytest.fixture(scope="module")
def schema() -> Iterator[Any]:
    with thinking_model("Hello.", max_context=CONTEXT) as llm:
        app = make_app(llm, ServerConfig(security=Security(insecure=True)))  # whatever the host is called
        yield schemathesis.openapi.from_asgi("/openapi.json", app)
        assert not llm.engine.has_work


def check(case: Any) -> None:
    """Bodies as they come, and with what is required made right, so that the fields beyond it are looked at too."""
    path, bodies = case.operation.path, [case.body]
    if path in GOOD and isinstance(case.body, dict):
        bodies.append(case.body | GOOD[path] | {"model": None})
    for case.body in bodies:
        response = case.call()
        assert response.status_code < 500, (path, case.body, response.text)
        if response.status_code >= 400:
            assert json.loads(response.text)["error"]["message"], (path, case.body)


@pytest.mark.slow
def test_random_requests_get_an_answer_or_are_told_why_not(schema):
    """O5: no 5xx from any operation, and errors are JSON with a message."""
    operations = [result.ok() for result in schema.get_all_operations()]
    assert GOOD.keys() <= {operation.path for operation in operations}
    for operation in operations:
        hypothesis.seed(0)(SETTINGS(hypothesis.given(case=operation.as_strategy())(check)))()

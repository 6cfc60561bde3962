"""What one call may ask for, so that no other waits for it: beyond that it is refused by the name of the field."""

from typing import Any

import pytest

from server_app import ask, chat, client_of, model_saying

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


def message(response: Any, status: int = 400) -> str:
    assert response.status_code == status, response.text
    return response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "name", "bound"),
    [
        ({"stop": [str(i) for i in range(300)]}, "stop", "256"),
        ({"stop": "a" * 5000}, "stop", "1,000"),
        ({"stop_token_ids": [5] * 2000}, "stop_token_ids", "1,024"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_too_many_ends_are_refused_with_field_bound_and_remedy(fields, name, bound):
    """Fault: 100,000 stop strings, or one of five million characters, held everybody's streams for seconds."""
    with model_saying("Hello") as llm:
        async with client_of(llm) as client:
            for path, body in ((CHAT, chat(**fields)), (TEXT, {"prompt": "a", **fields})):
                response = await ask(client, body, path)
                told = message(response)
                assert told.startswith(name) and bound in told and told.count(". ") == 1, told
                assert response.json()["error"]["param"] == name
            if name == "stop":
                stops = [fields["stop"]] if isinstance(fields["stop"], str) else fields["stop"]
                response = await ask(client, chat(max_tokens=5, stop_sequences=stops), MESSAGES)
                assert message(response).startswith("stop_sequences has") and bound in message(response)
            assert not llm.engine.has_work

"""Names every call (``x-request-id``), counts the responses, and writes one JSON object per call, if asked to.

The log has what an operator needs, and nothing that a user said: no text, no header, no query, no key.
"""

import json
import logging
import re
import sys
import time
import uuid
from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lampejo.server.counts import Counts
from lampejo.server.errors import is_anthropic
from lampejo.server.service import STARTED, Answers

LOG = logging.getLogger("lampejo.access")
CLIENT_GONE = 499  # no response was begun when its reader went: nginx's number for it
_WATCHED = ("/health", "/metrics")  # asked for every few seconds; told only when something is wrong
_REQUEST_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)


def enable() -> None:
    """Lines go to the standard output."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    LOG.propagate = False


class AccessLog:
    """Goes around everything else, so that refused calls are told too."""

    def __init__(self, app: ASGIApp, counts: Counts) -> None:
        self.app = app
        self.counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, now, status = datetime.now(UTC), time.perf_counter(), 0
        request_id = Headers(scope=scope).get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                if is_anthropic(scope["path"]):
                    headers["Request-Id"] = request_id  # what Anthropic calls it
            await send(message)

        answers: list[Answers] = []
        token = STARTED.set(answers)
        try:
            await self.app(scope, receive, send_named)
        except ClientDisconnect:
            status = status or CLIENT_GONE
            raise
        except Exception:
            status = status or 500
            raise
        finally:
            STARTED.reset(token)
            status = status or CLIENT_GONE
            self.counts.statuses[status] += 1
            if LOG.isEnabledFor(logging.INFO) and not (status == 200 and scope["path"] in _WATCHED):
                line = {
                    "time": began.isoformat(timespec="milliseconds"),
                    "request_id": request_id,
                    "client": scope["client"][0] if scope.get("client") else None,
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status,
                    "seconds": round(time.perf_counter() - now, 4),
                }
                for one in answers:
                    line |= _numbers(one)
                LOG.info(json.dumps(line))


def _numbers(answers: Answers) -> dict[str, Any]:
    """What a call asked of the model and got."""
    usage, first_token_s = answers.usage, answers.first_token_s
    length = answers.metrics["speculative_decoding"]["mean_acceptance_length"]
    return {
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "first_token_seconds": None if first_token_s is None else round(first_token_s, 4),
        "acceptance_length": None if length is None else round(length, 2),
        "finish_reasons": answers.endings,
    }

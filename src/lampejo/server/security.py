"""Who may call the server: API keys, web pages of other origins, names under which it may be addressed."""

import hashlib
import hmac
import os
import re
from collections.abc import Sequence
from pathlib import Path

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from lampejo.errors import UserError, why
from lampejo.server.config import ServerConfig, is_loopback
from lampejo.server.errors import ApiError
from lampejo.server.http import JsonResponse

KEY_VARIABLE = "LAMPEJO_API_KEY"
# What can be read without a key: the page, which asks for one, the description of the API, and whether we are alive.
_OPEN_PATHS = ("/", "/health", "/docs", "/openapi.json")
_OPEN_FOLDER = "/web/"
_HOST = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]]+))(?::\d*)?")


def protect(app: FastAPI, config: ServerConfig) -> None:
    """Puts the checks before the app's routes. The last one added is the first one passed."""
    security = config.security
    if security.api_keys:
        app.add_middleware(KeyCheck, keys=security.api_keys)
    if security.cors:  # outside of the keys: a browser asks without one first, and must be able to read a refusal
        app.add_middleware(
            CORSMiddleware,
            allow_origins=security.cors,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    if not (security.api_keys or security.insecure):
        app.add_middleware(HostCheck)


class KeyCheck:
    """401 for calls without one of the keys, as ``Authorization: Bearer KEY`` or ``x-api-key: KEY``."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope) or self._has_key(Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        error = ApiError(
            401,
            "The API key is missing or wrong. Send it as 'Authorization: Bearer KEY', or as 'x-api-key: KEY'.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await _refuse(error, scope, receive, send)

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key", ""), token.strip() if scheme.lower() == "bearer" else ""]
        # Every given key against every known one, as digests: the time taken tells nothing of any key.
        found = [hmac.compare_digest(_digest(one), known) for one in given for known in self._digests]
        return any(found)


class HostCheck:
    """403 for calls that address this machine by a name that is not its own.

    A web page can have its own name lead to 127.0.0.1 (DNS rebinding), and then read answers like its own. The name
    that the browser was told stays in the Host header.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host") if scope["type"] == "http" else None
        if host is None or _is_own_name(host):
            await self.app(scope, receive, send)
            return
        message = (
            "Without an API key only calls to localhost are answered, not to another name. Start the server with an"
            " API key, or with --insecure if a proxy on this machine passes calls on."
        )
        await _refuse(ApiError(403, message, code="host_not_allowed"), scope, receive, send)


def find_keys(given: Sequence[str], file: str | None) -> tuple[str, ...]:
    """The keys from flags, from a file with one per line (# begins a comment) and from ``LAMPEJO_API_KEY``, separated
    by commas. The variable is taken away, so that no child process inherits it."""
    keys = [*given, *filter(None, map(str.strip, os.environ.pop(KEY_VARIABLE, "").split(",")))]
    if file is not None:
        try:
            lines = Path(file).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            told = why(error) if isinstance(error, OSError) else "it is not UTF-8 text"
            raise UserError(f"--api-key-file {file} cannot be read: {told}.") from None
        found = [key for line in lines if (key := re.split(r"(?:^|\s)#", line)[0].strip())]
        if not found:
            raise UserError(f"--api-key-file {file} has no key.", "Put one on each line.")
        keys += found
    return tuple(dict.fromkeys(keys))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _is_open(scope: Scope) -> bool:
    path: str = scope["path"]
    return scope["method"] in ("GET", "HEAD") and (path in _OPEN_PATHS or path.startswith(_OPEN_FOLDER))


def _is_own_name(host: str) -> bool:
    """Whatever the port, which a tunnel may change."""
    match = _HOST.fullmatch(host)
    if match is None:
        return False
    name = (match[1] or match[2]).lower().removesuffix(".")
    return is_loopback(name) or name.endswith(".localhost")


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    await JsonResponse(error.body(scope["path"]), status_code=error.status, headers=error.headers)(scope, receive, send)

"""The page at /: a chat, and a view of speculation. Plain files, served with a policy that lets nothing else in."""

import hashlib
from collections.abc import Awaitable, Callable
from importlib import resources

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

CONTENT_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
HEADERS = {
    # What a model writes is text of a stranger: nothing runs, loads or is embedded but what this server sends.
    "Content-Security-Policy": "; ".join(
        [
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "connect-src 'self'",
            "img-src 'self' data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # may be kept, but has to be asked for again: a new version shows at once
}


def routes() -> APIRouter:
    """GET / is the page, GET /web/NAME one of its parts. Neither needs a key: they hold nothing secret."""
    router = APIRouter(include_in_schema=False)
    for file in resources.files(__package__).iterdir():
        content_type = CONTENT_TYPES.get(file.name.rpartition(".")[2])
        if content_type is not None:
            path = "/" if file.name == "index.html" else f"/web/{file.name}"
            router.add_api_route(path, _sender(file.read_bytes(), content_type), methods=["GET"])
    return router


def _sender(content: bytes, content_type: str) -> Callable[[Request], Awaitable[Response]]:
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {**HEADERS, "ETag": tag}

    async def send(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers={**headers, "Content-Type": content_type})

    return send

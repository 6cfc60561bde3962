"""What goes wrong with a request, in the shape of the API that was called."""

import re
from collections.abc import Mapping
from typing import Any

from lampejo.errors import Busy, PromptTooLong, UserError

BAD_REQUEST, NOT_FOUND, TOO_LARGE, NOT_JSON = 400, 404, 413, 415
TOO_MANY, BROKEN, UNAVAILABLE, TIMED_OUT = 429, 500, 503, 504

_LONGEST = 1000  # characters of a message; some quote the request, which may be megabytes

_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", TOO_MANY: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    NOT_FOUND: "not_found_error",
    TOO_LARGE: "request_too_large",
    TOO_MANY: "rate_limit_error",
    UNAVAILABLE: "overloaded_error",
    TIMED_OUT: "timeout_error",
}


def is_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's API; all others are OpenAI's, or are told to its clients."""
    return path.startswith("/v1/messages")


class ApiError(Exception):
    """A request that is not answered: HTTP status, message, and which field of the body it is about."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if len(message) > _LONGEST:
            message = f"{message[: _LONGEST - 200]} ... {message[-150:]}"
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param[:100] if param else None
        self.code = code
        self.headers = dict(headers or {})

    def openai(self) -> dict[str, Any]:
        """The body of the response, or of the last event of a stream, as OpenAI writes it."""
        kind = _OPENAI_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def body(self, path: str) -> dict[str, Any]:
        """In the shape of the API that ``path`` belongs to."""
        return self.anthropic() if is_anthropic(path) else self.openai()

    def anthropic(self) -> dict[str, Any]:
        """The same as Anthropic writes it."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}


class ContextExceeded(ApiError):
    """400: the prompt has no room in the context. Clients that shorten it and try again know it by OpenAI's code, or by
    words of the message, which differ between the two."""

    def __init__(self, error: PromptTooLong, param: str) -> None:
        most, counted = error.max_context, error.num_tokens
        message = f"This model's maximum context length is {most} tokens; the prompt has {counted}. {error.remedy}"
        super().__init__(BAD_REQUEST, message, param=param, code="context_length_exceeded")
        # One token of the context is the answer's.
        self._of_anthropic = f"prompt is too long: {counted} tokens > {most - 1} maximum"

    def anthropic(self) -> dict[str, Any]:
        return {"type": "error", "error": {"type": "invalid_request_error", "message": self._of_anthropic}}


def shutting_down() -> ApiError:
    """503: what comes now is not begun any more."""
    return ApiError(UNAVAILABLE, "The server is shutting down.", headers={"Connection": "close"})


def refused(param: str, message: str) -> ApiError:
    """400: a field of the body that cannot be honoured."""
    return ApiError(BAD_REQUEST, f"{param}: {message}", param=param)


def from_user_error(error: UserError, names: Mapping[str, str] | None = None) -> ApiError:
    """400, or 429 for ``Busy``; ``param`` is the field of the request that it is about. names: how the API that was
    called calls it, where that differs from the engine's name; what stands inside of such a field is not told, since
    that differs too."""
    field, names = error.field, names or {}
    if isinstance(error, PromptTooLong):
        return ContextExceeded(error, names.get("messages", "messages"))
    if field is None:
        if isinstance(error, Busy):
            return ApiError(TOO_MANY, str(error), headers={"Retry-After": "5"})
        return ApiError(BAD_REQUEST, str(error))
    told, complaint = names.get(re.split(r"[.\[]", field)[0], field), str(error)[len(field) :]
    if field == "min_tokens":  # the one complaint that names a second field
        complaint = complaint.replace("max_tokens", names.get("max_tokens", "max_tokens"))
    return ApiError(BAD_REQUEST, told + complaint, param=told)

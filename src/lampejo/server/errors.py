"""What goes wrong with a request, in the shape of the API that was called."""

import re
from collections.abc import Mapping
from typing import Any

from lampejo.errors import UserError

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

    def anthropic(self) -> dict[str, Any]:
        """The same as Anthropic writes it."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}


def refused(param: str, message: str) -> ApiError:
    """400: a field of the body that cannot be honoured."""
    return ApiError(BAD_REQUEST, f"{param}: {message}", param=param)


def from_user_error(error: UserError, names: Mapping[str, str] | None = None) -> ApiError:
    """400; ``param`` is the field of the request that it is about. names: how the API that was called calls it, where
    that differs from the engine's name; what stands inside of such a field is not told, since that differs too."""
    field = error.field
    if field is None:
        return ApiError(BAD_REQUEST, str(error))
    told = (names or {}).get(re.split(r"[.\[]", field)[0], field)
    return ApiError(BAD_REQUEST, told + str(error)[len(field) :], param=told)

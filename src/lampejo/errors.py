"""Exceptions that the CLI prints as one line, without a traceback."""

import reprlib
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 2, 80, 80
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 4


def shown(value: Any) -> str:
    """A value as errors quote it: its ``repr``, at most some hundred characters of it, however large it is."""
    return _SHORT.repr(value)


def why(error: BaseException) -> str:
    """What went wrong, in the system's words where it has some, without number and path."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


class DamagedModel(RuntimeError):
    """The weights compute what is no number; no answer can come of them."""


class UserError(ValueError):
    """The one exception for mistakes that the user can mend: what is wrong, clearly, and what to do about it.

    ``message`` names the thing (file, flag, key, value); ``remedy`` is a full sentence that tells the next step.
    ``field``: the parameter of a request that it is about, with which ``message`` then begins. An API that has another
    name for it can say so (``server.errors``).
    """

    def __init__(self, message: str, remedy: str = "", field: str | None = None) -> None:
        assert field is None or message.startswith(field), message
        super().__init__(f"{message} {remedy}".strip())
        self.message = message
        self.remedy = remedy
        self.field = field


class Busy(UserError):
    """What was asked could be done, but not at this moment."""


class PromptTooLong(UserError):
    """A prompt of ``num_tokens`` (a number in words, if it was not counted to its end) leaves no room for an answer."""

    def __init__(self, num_tokens: str, max_context: int) -> None:
        super().__init__(
            f"The prompt has {num_tokens} tokens, which leaves no room in the context of {max_context}.",
            "Shorten the prompt, or load the model with a larger context.",
        )
        self.num_tokens = num_tokens
        self.max_context = max_context

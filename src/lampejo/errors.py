"""Exceptions that the CLI prints as one line, without a traceback."""


class DamagedModel(RuntimeError):
    """The weights compute what is no number; no answer can come of them."""


class UserError(ValueError):
    """The one exception for mistakes that the user can mend: what is wrong, clearly, and what to do about it.

    ``message`` names the thing (file, flag, key, value); ``remedy`` is a full sentence that tells the next step.
    """

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(f"{message} {remedy}".strip())
        self.message = message
        self.remedy = remedy

"""The one exception for mistakes that the user can mend; the CLI prints it as one line, without a traceback."""


class UserError(ValueError):
    """A clear statement of what is wrong, and what to do about it.

    ``message`` names the thing (file, flag, key, value); ``remedy`` is a full sentence that tells the next step.
    """

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(f"{message} {remedy}".strip())
        self.message = message
        self.remedy = remedy

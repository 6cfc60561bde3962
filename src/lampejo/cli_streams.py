"""Standard streams that are closed, broken, full, or not in UTF-8."""

import contextlib
import os
import sys

from lampejo.errors import UserError


def check_stdin() -> None:
    """``UserError`` where there is none to read from."""
    if sys.stdin is None:
        raise UserError("The standard input is closed.", "Run the command with an input: a terminal, a file or a pipe.")


def mend_streams() -> None:
    """A standard output that was closed before we began swallows what is written; one that is not in UTF-8 shows "?"
    for the characters that it does not have."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def tell(line: str) -> None:
    """On the standard error, if that is still there."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def give_up_broken_streams() -> None:
    """What cannot be written is lost; Python would complain once more at its own end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

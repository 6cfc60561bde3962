"""What the parsers of tool calls share: the text that is still to be read, and the events so far."""

import json
import secrets
from typing import Any

from lampejo.answer import SPACE, Content, Event, ToolArguments, ToolEnd, ToolStart


class CallText:
    """Parsers take text from ``buffer``, and tell what they found. ``ended``: no more will come.

    White space after a call is dropped.
    """

    def __init__(self) -> None:
        self.buffer = ""
        self.ended = False
        self.events: list[Event] = []
        self._index = -1
        self._after_call = False  # and no content since

    def content(self, text: str) -> None:
        if self._after_call:
            text = text.lstrip(SPACE)
        if text:
            self._after_call = False
            self.events.append(Content(text))

    def start(self, name: str) -> None:
        self._index += 1
        self.events.append(ToolStart(self._index, f"call_{secrets.token_hex(12)}", name))

    def arguments(self, text: str) -> None:
        if text:
            self.events.append(ToolArguments(self._index, text))

    def end(self) -> None:
        self.events.append(ToolEnd(self._index))
        self._after_call = True


def parsed(text: str) -> Any:
    """JSON, None if it is none."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")

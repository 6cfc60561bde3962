"""The text of an answer taken apart: content, reasoning, tool calls.

Small state machines that take text in pieces of any size; what comes out does not depend on where the pieces end. Tags
are matched in text, so it does not matter whether a vocabulary has tokens for them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lampejo.answer import SPACE, TOOL_CALL, Content, Event, Reasoning, Start, Thoughts, split_held
from lampejo.answer_calls import CallText
from lampejo.answer_json import JsonCall
from lampejo.answer_xml import FUNCTION, XmlCall


class AnswerParser:
    """Takes an answer's text apart. start: see ``start_of``. tools: those that the request offers, in OpenAI's shape;
    without them calls are not looked for.

    Reasoning comes first, without white space at its ends, then content and tool calls in the order of the text.
    """

    def __init__(self, start: Start, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._thoughts = Thoughts(start)
        self._calls = _ContentWithCalls(tools) if tools else None
        self._reasoning = _Trimmed()
        self._content_begun = False

    def push(self, text: str) -> list[Event]:
        return self._events(*self._thoughts.push(text))

    def finish(self) -> list[Event]:
        """The end of the answer."""
        return self._events(*self._thoughts.finish(), is_last=True)

    def _events(self, reasoning: str, text: str, is_last: bool = False) -> list[Event]:
        events: list[Event] = []
        if shown := self._reasoning.push(reasoning):
            events.append(Reasoning(shown))
        if self._thoughts.has_begun and not self._content_begun:
            text = text.lstrip(SPACE)
        self._content_begun = self._content_begun or bool(text)
        if self._calls is not None:
            return events + self._calls.push(text, is_last)
        return [*events, Content(text)] if text else events


class _Trimmed:
    """Text without white space at its ends: what may be at the end is held back until more follows."""

    def __init__(self) -> None:
        self._begun = False
        self._held = ""

    def push(self, text: str) -> str:
        text = self._held + text
        if not self._begun:
            text = text.lstrip(SPACE)
            self._begun = bool(text)
        kept = text.rstrip(SPACE)
        self._held = text[len(kept) :]
        return kept


class _ContentWithCalls:
    """Content with tool calls in it, of either format. White space around calls is dropped.

    Arguments come out as they arrive. A call that is malformed before its name is known comes out as content with its
    tags, and what stands in a call without belonging to it follows the call as content. A call that the answer's end
    cuts ends where it is.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._tools = dict(map(_name_and_parameters, tools))
        self._text = CallText()
        self._call: JsonCall | XmlCall | None = None  # in which we are
        self._opened = False  # behind ``<tool_call>``, before what tells the format

    def push(self, text: str, is_last: bool = False) -> list[Event]:
        self._text.buffer += text
        self._text.ended = is_last
        while self._read():
            pass
        events, self._text.events = self._text.events, []
        return events

    def _read(self) -> bool:
        """False: it needs more text."""
        if self._call is not None:
            if not self._call.read():
                return False
            self._call = None
            return True
        return self._begin_call() if self._opened else self._content()

    def _content(self) -> bool:
        text = self._text
        found = [(at, tag) for tag in (TOOL_CALL, FUNCTION) if (at := text.buffer.find(tag)) >= 0]
        if found:
            at, tag = min(found)
            text.content(text.buffer[:at].rstrip(SPACE))
            text.buffer = text.buffer[at + len(tag) :]
            self._opened = tag == TOOL_CALL
            if tag == FUNCTION:
                self._call = XmlCall(text, FUNCTION, self._tools)
            return True
        kept = text.buffer
        if not text.ended:
            kept = min((split_held(kept, tag)[0] for tag in (TOOL_CALL, FUNCTION)), key=len).rstrip(SPACE)
        text.buffer = text.buffer[len(kept) :]
        text.content(kept)
        return False

    def _begin_call(self) -> bool:
        text, body = self._text, self._text.buffer.lstrip(SPACE)
        if body.startswith("{"):
            self._call = JsonCall(text)
        elif body.startswith(FUNCTION):
            space = text.buffer[: -len(body)]
            text.buffer = body[len(FUNCTION) :]
            self._call = XmlCall(text, TOOL_CALL + space + FUNCTION, self._tools)
        elif not text.ended and FUNCTION.startswith(body):
            return False
        else:
            text.content(TOOL_CALL)
        self._opened = False
        return True


def _name_and_parameters(tool: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Of a tool in OpenAI's shape: its name, and the schema of each parameter."""
    function = tool.get("function", tool)
    schema = function.get("parameters")
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return function.get("name", ""), properties if isinstance(properties, Mapping) else {}

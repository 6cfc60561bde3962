"""A tool call as Hermes and Qwen write it: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

import json
import re
from collections.abc import Callable

from lampejo.answer import END_TOOL_CALL, SPACE, TOOL_CALL
from lampejo.answer_calls import CallText, parsed

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class JsonCall:
    """Reads one call, from behind its opening tag to behind its closing tag."""

    def __init__(self, text: CallText) -> None:
        self._text = text
        self._state: Callable[[], bool] | None = self._head  # consumes from the buffer; False: it needs more
        self._depth, self._in_string, self._escaped = 0, False, False  # in the arguments

    def read(self) -> bool:
        """Reads on; True when the call is over."""
        while self._state is not None and self._state():
            pass
        return self._state is None

    def _head(self) -> bool:
        body, tag, rest = self._text.buffer.partition(END_TOOL_CALL)
        if (match := _HEAD.match(body)) and isinstance(name := parsed(match[1]), str):
            self._text.start(name)
            self._text.buffer = self._text.buffer[match.end() :]
            self._state = self._arguments
            return True
        if not (tag or self._text.ended):
            return False
        self._text.buffer, self._state = rest, None
        call = _whole_call(body)
        if call is None:
            self._text.content(TOOL_CALL + body + tag)
        else:
            self._text.start(call[0])
            self._text.arguments(call[1])
            self._text.end()
        return True

    def _arguments(self) -> bool:
        buffer = self._text.buffer
        for i, char in enumerate(buffer):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
            if (self._depth == 0 and not self._in_string) or (char == "<" and not self._in_string):
                end = i if char == "<" else i + 1
                self._text.arguments(buffer[:end])
                self._text.end()
                self._text.buffer, self._state = buffer[end:], self._tail
                return True
        self._text.arguments(buffer)
        self._text.buffer = ""
        if not self._text.ended:
            return False
        self._text.end()
        self._state = None
        return True

    def _tail(self) -> bool:
        body = self._text.buffer.lstrip(SPACE)
        if body.startswith(","):  # more keys, which are of no use
            extra, tag, rest = body.partition(END_TOOL_CALL)
            if not (tag or self._text.ended):
                return False
            if parsed('{"": 0' + extra) is None:
                self._text.content(extra)
            self._text.buffer, self._state = rest, None
            return True
        body = body.removeprefix("}").lstrip(SPACE)
        if not body.startswith(END_TOOL_CALL) and END_TOOL_CALL.startswith(body):
            return False
        self._text.buffer, self._state = body.removeprefix(END_TOOL_CALL), None
        return True


def _whole_call(body: str) -> tuple[str, str] | None:
    """Name and arguments of a call whose keys come in another order or whose arguments are written as a string."""
    call = parsed(body)
    if not isinstance(call, dict) or not isinstance(name := call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters"))
    if arguments is None:
        return name, "{}"
    if isinstance(arguments, str):
        return (name, arguments) if isinstance(parsed(arguments), dict) else None
    return (name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None

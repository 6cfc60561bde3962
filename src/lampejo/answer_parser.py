"""The text of an answer taken apart: content, reasoning, tool calls.

Small state machines that take text in pieces of any size; what comes out does not depend on where the pieces end. Tags
are matched in text, so it does not matter whether a vocabulary has tokens for them.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lampejo.answer import (
    END_TOOL_CALL,
    SPACE,
    TOOL_CALL,
    Content,
    Event,
    Reasoning,
    Start,
    Thoughts,
    ToolArguments,
    ToolEnd,
    ToolStart,
    split_held,
)

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_END_OF_NAME = re.compile(r"[>\n<]")


class _ToolCalls:
    """Content with tool calls in it, of either style. White space around calls is dropped.

    Arguments come out as they arrive. A call that is malformed before its name is known comes out as content with its
    tags, and what stands in a call without belonging to it follows the call as content. A call that the answer's end
    cuts ends where it is.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._parameters = dict(map(_name_and_parameters, tools))
        self._buffer = ""
        self._events: list[Event] = []
        self._state: Callable[[], bool] = self._text  # consumes from the buffer; False: it needs more
        self._ended = False
        self._raw = ""  # of the call that begins, up to the buffer
        self._index = -1
        self._name = ""
        self._after_call = False  # and no content since
        self._depth, self._in_string, self._escaped = 0, False, False  # in JSON arguments
        self._num_given = 0  # XML parameters
        self._parameter = ""
        self._value_begun = False
        self._junk = ""

    def push(self, text: str, is_last: bool = False) -> list[Event]:
        self._buffer += text
        self._ended = is_last
        while self._state():
            pass
        events, self._events = self._events, []
        return events

    def _text(self) -> bool:
        found = [(at, tag) for tag in (TOOL_CALL, _FUNCTION) if (at := self._buffer.find(tag)) >= 0]
        if found:
            at, self._raw = min(found)
            self._content(self._buffer[:at].rstrip(SPACE))
            self._buffer = self._buffer[at + len(self._raw) :]
            self._state = self._opened if self._raw == TOOL_CALL else self._function
            return True
        kept = self._buffer
        if not self._ended:
            kept = min((split_held(kept, tag)[0] for tag in (TOOL_CALL, _FUNCTION)), key=len).rstrip(SPACE)
        self._buffer = self._buffer[len(kept) :]
        self._content(kept)
        return False

    def _content(self, text: str) -> None:
        if self._after_call:
            text = text.lstrip(SPACE)
        if text:
            self._after_call = False
            self._events.append(Content(text))

    def _malformed(self) -> bool:
        self._content(self._raw)
        self._state = self._text
        return True

    def _start(self, name: str) -> None:
        self._index += 1
        self._name = name
        self._events.append(ToolStart(self._index, f"call_{secrets.token_hex(12)}", name))

    def _arguments(self, text: str) -> None:
        if text:
            self._events.append(ToolArguments(self._index, text))

    def _end(self, state: Callable[[], bool], junk: str = "") -> bool:
        self._events.append(ToolEnd(self._index))
        self._after_call = True
        self._content(junk)
        self._state = state
        return True

    def _opened(self) -> bool:
        body = self._buffer.lstrip(SPACE)
        if body.startswith("{"):
            self._state = self._json_head
        elif body.startswith(_FUNCTION):
            space = self._buffer[: -len(body)]
            self._raw += space + _FUNCTION
            self._buffer = body[len(_FUNCTION) :]
            self._state = self._function
        elif not self._ended and _FUNCTION.startswith(body):
            return False
        else:
            return self._malformed()
        return True

    # {"name": ..., "arguments": {...}}</tool_call>

    def _json_head(self) -> bool:
        body, tag, rest = self._buffer.partition(END_TOOL_CALL)
        if (match := _HEAD.match(body)) and isinstance(name := _parsed(match[1]), str):
            self._start(name)
            self._buffer = self._buffer[match.end() :]
            self._depth, self._in_string, self._escaped = 0, False, False
            self._state = self._json_arguments
            return True
        if not (tag or self._ended):
            return False
        self._buffer, self._state = rest, self._text
        call = _whole_call(body)
        if call is None:
            self._content(self._raw + body + tag)
            return True
        self._start(call[0])
        self._arguments(call[1])
        return self._end(self._text)

    def _json_arguments(self) -> bool:
        for i, char in enumerate(self._buffer):
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
                self._arguments(self._buffer[:end])
                self._buffer = self._buffer[end:]
                return self._end(self._json_tail)
        self._arguments(self._buffer)
        self._buffer = ""
        return self._end(self._text) if self._ended else False

    def _json_tail(self) -> bool:
        body = self._buffer.lstrip(SPACE)
        if body.startswith(","):  # more keys, which are of no use
            extra, tag, rest = body.partition(END_TOOL_CALL)
            if not (tag or self._ended):
                return False
            if _parsed('{"": 0' + extra) is None:
                self._content(extra)
            self._buffer, self._state = rest, self._text
            return True
        body = body.removeprefix("}").lstrip(SPACE)
        if not body.startswith(END_TOOL_CALL) and END_TOOL_CALL.startswith(body):
            return False
        self._buffer, self._state = body.removeprefix(END_TOOL_CALL), self._text
        return True

    # <function=name><parameter=p>value</parameter></function></tool_call>

    def _function(self) -> bool:
        match = _END_OF_NAME.search(self._buffer)
        if match is None and not self._ended:
            return False
        name = self._buffer[: match.start()].strip(SPACE) if match else ""
        if match is None or match[0] != ">" or not name:
            return self._malformed()
        self._start(name)
        self._buffer = self._buffer[match.end() :]
        self._num_given, self._junk = 0, ""
        self._state = self._xml_parameters
        return True

    def _xml_parameters(self) -> bool:
        body = self._buffer.lstrip(SPACE)
        if body.startswith(_PARAMETER):
            match = _END_OF_NAME.search(body, len(_PARAMETER))
            if match is not None and match[0] == ">":
                self._parameter = body[len(_PARAMETER) : match.start()].strip(SPACE)
                self._buffer = body[match.end() :]
                self._value_begun = False
                self._state = self._xml_text if self._kinds() == {"string"} else self._xml_value
                return True
            is_partial = match is None
        else:
            tag = next((tag for tag in (_END_FUNCTION, END_TOOL_CALL) if body.startswith(tag)), None)
            if tag is not None:
                self._arguments("}" if self._num_given else "{}")
                self._buffer = body[len(tag) :]
                return self._end(self._xml_tail if tag == _END_FUNCTION else self._text, self._junk)
            is_partial = any(tag.startswith(body) for tag in (_PARAMETER, _END_FUNCTION, END_TOOL_CALL))
        if is_partial and not self._ended:
            return False
        if is_partial:
            self._buffer = ""
            return self._end(self._text, self._junk)
        piece = (body[0] + body[1:].partition("<")[0]).rstrip(SPACE)
        space = self._buffer[: -len(body)]
        self._junk += (space if self._junk else "") + piece
        self._buffer = body[len(piece) :]
        return True

    def _give(self, value: str) -> None:
        """The parameter, with its value or the beginning of it."""
        key = json.dumps(self._parameter, ensure_ascii=False)
        self._arguments(f"{', ' if self._num_given else '{'}{key}: {value}")
        self._num_given += 1

    def _xml_text(self) -> bool:
        value, tag, rest = self._buffer.partition(_END_PARAMETER)
        if not tag:
            value = min((split_held(value, t)[0] for t in (_END_PARAMETER, "\n" + _END_PARAMETER)), key=len)
            rest = "" if self._ended else self._buffer[len(value) :]
        if not self._value_begun and (value or tag):
            self._give('"')
            self._value_begun = True
            value = value.removeprefix("\n")
        value = value.removesuffix("\n") if tag else value
        self._arguments(json.dumps(value, ensure_ascii=False)[1:-1] + ('"' if tag else ""))
        self._buffer = rest
        if tag:
            self._state = self._xml_parameters
            return True
        return self._end(self._text, self._junk) if self._ended else False

    def _xml_value(self) -> bool:
        value, tag, rest = self._buffer.partition(_END_PARAMETER)
        if not (tag or self._ended):
            return False
        self._buffer = rest
        if not tag:
            return self._end(self._text, self._junk)
        self._give(_converted(value.removeprefix("\n").removesuffix("\n"), self._kinds()))
        self._state = self._xml_parameters
        return True

    def _kinds(self) -> set[str]:
        return _kinds(self._parameters.get(self._name, {}).get(self._parameter))

    def _xml_tail(self) -> bool:
        body = self._buffer.lstrip(SPACE)
        if body.startswith(_FUNCTION):
            self._raw, self._buffer, self._state = _FUNCTION, body[len(_FUNCTION) :], self._function
            return True
        if not body.startswith(END_TOOL_CALL) and (END_TOOL_CALL.startswith(body) or _FUNCTION.startswith(body)):
            return False
        self._buffer, self._state = body.removeprefix(END_TOOL_CALL), self._text
        return True


def _name_and_parameters(tool: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Of a tool in OpenAI's shape: its name, and the schema of each parameter."""
    function = tool.get("function", tool)
    schema = function.get("parameters")
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return function.get("name", ""), properties if isinstance(properties, Mapping) else {}


def _parsed(text: str) -> Any:
    """JSON, None if it is none."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _whole_call(body: str) -> tuple[str, str] | None:
    """Name and arguments of a call whose keys come in another order or whose arguments are written as a string."""
    call = _parsed(body)
    if not isinstance(call, dict) or not isinstance(name := call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters"))
    if arguments is None:
        return name, "{}"
    if isinstance(arguments, str):
        return (name, arguments) if isinstance(_parsed(arguments), dict) else None
    return (name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def _kinds(schema: Any) -> set[str]:
    """JSON types that a parameter may have: a string where nothing is said, any where it is said elsewhere."""
    if not isinstance(schema, Mapping):
        return {"string"}
    if "type" in schema:
        kinds = schema["type"]
        return {kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)}
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return set().union(*map(_kinds, schema[key]))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return {_KINDS.get(type(value), "null") for value in values if isinstance(values, list)}
    return {"string"} if not schema.keys() & {"$ref", "allOf"} else {*_KINDS.values(), "null"}


def _converted(value: str, kinds: set[str]) -> str:
    """A parameter's text as JSON of one of its kinds; a string where it is none of the others."""
    text = value.strip(SPACE)
    if text.lower() in ("true", "false", "null", "none"):
        text = text.lower().replace("none", "null")
    parsed = _parsed(text)
    kind = _KINDS.get(type(parsed), "null" if text == "null" else "")
    if kind and kind != "string" and (kind in kinds or (kind == "integer" and "number" in kinds)):
        return json.dumps(parsed, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)


# --- the whole answer -------------------------------------------------------------------------------------------------


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


class AnswerParser:
    """Takes an answer's text apart. start: see ``start_of``. tools: those that the request offers, in OpenAI's shape;
    without them calls are not looked for.

    Reasoning comes first, without white space at its ends, then content and tool calls in the order of the text.
    """

    def __init__(self, start: Start, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._thoughts = Thoughts(start)
        self._calls = _ToolCalls(tools) if tools else None
        self._reasoning = _Trimmed()
        self._content_begun = False

    @property
    def in_reasoning(self) -> bool:
        return self._thoughts.state == "open"

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

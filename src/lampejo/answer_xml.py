"""A tool call as Qwen3-Coder writes it: ``<function=name><parameter=p>value</parameter></function>``, in
``<tool_call>`` or not. Its values are text; which JSON that is, the tool's schema tells."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from lampejo.answer import END_TOOL_CALL, SPACE, split_held
from lampejo.answer_calls import CallText, parsed

FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_END_OF_NAME = re.compile(r"[>\n<]")


class XmlCall:
    """Reads calls, from behind the first ``<function=`` to behind the last closing tag.

    opening: the tags up to there. tools: by name, the schema of each parameter.
    """

    def __init__(self, text: CallText, opening: str, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self._text = text
        self._opening = opening
        self._tools = tools
        self._state: Callable[[], bool] | None = self._function  # consumes from the buffer; False: it needs more
        self._name = ""
        self._num_given = 0  # parameters
        self._parameter = ""
        self._value_begun = False
        self._junk = ""

    def read(self) -> bool:
        """Reads on; True when the call is over."""
        while self._state is not None and self._state():
            pass
        return self._state is None

    def _function(self) -> bool:
        match = _END_OF_NAME.search(self._text.buffer)
        if match is None and not self._text.ended:
            return False
        self._name = self._text.buffer[: match.start()].strip(SPACE) if match else ""
        if match is None or match[0] != ">" or not self._name:
            self._text.content(self._opening)
            self._state = None
            return True
        self._text.start(self._name)
        self._text.buffer = self._text.buffer[match.end() :]
        self._num_given, self._junk = 0, ""
        self._state = self._parameters
        return True

    def _end(self, state: Callable[[], bool] | None) -> bool:
        self._text.end()
        self._text.content(self._junk)
        self._state = state
        return True

    def _parameters(self) -> bool:
        body = self._text.buffer.lstrip(SPACE)
        if body.startswith(_PARAMETER):
            match = _END_OF_NAME.search(body, len(_PARAMETER))
            if match is not None and match[0] == ">":
                self._parameter = body[len(_PARAMETER) : match.start()].strip(SPACE)
                self._text.buffer = body[match.end() :]
                self._value_begun = False
                self._state = self._string if self._kinds() == {"string"} else self._value
                return True
            is_partial = match is None
        else:
            tag = next((tag for tag in (_END_FUNCTION, END_TOOL_CALL) if body.startswith(tag)), None)
            if tag is not None:
                self._text.arguments("}" if self._num_given else "{}")
                self._text.buffer = body[len(tag) :]
                return self._end(self._tail if tag == _END_FUNCTION else None)
            is_partial = any(tag.startswith(body) for tag in (_PARAMETER, _END_FUNCTION, END_TOOL_CALL))
        if is_partial and not self._text.ended:
            return False
        if is_partial:
            self._text.buffer = ""
            return self._end(None)
        piece = (body[0] + body[1:].partition("<")[0]).rstrip(SPACE)
        space = self._text.buffer[: -len(body)]
        self._junk += (space if self._junk else "") + piece
        self._text.buffer = body[len(piece) :]
        return True

    def _give(self, value: str) -> None:
        """The parameter, with its value or the beginning of it."""
        key = json.dumps(self._parameter, ensure_ascii=False)
        self._text.arguments(f"{', ' if self._num_given else '{'}{key}: {value}")
        self._num_given += 1

    def _string(self) -> bool:
        """A value that comes out as it arrives."""
        value, tag, rest = self._text.buffer.partition(_END_PARAMETER)
        if not tag:
            value = min((split_held(value, t)[0] for t in (_END_PARAMETER, "\n" + _END_PARAMETER)), key=len)
            rest = "" if self._text.ended else self._text.buffer[len(value) :]
        if not self._value_begun and (value or tag):
            self._give('"')
            self._value_begun = True
            value = value.removeprefix("\n")
        value = value.removesuffix("\n") if tag else value
        self._text.arguments(json.dumps(value, ensure_ascii=False)[1:-1] + ('"' if tag else ""))
        self._text.buffer = rest
        if tag:
            self._state = self._parameters
            return True
        return self._end(None) if self._text.ended else False

    def _value(self) -> bool:
        """A value that has to be whole to be told."""
        value, tag, rest = self._text.buffer.partition(_END_PARAMETER)
        if not (tag or self._text.ended):
            return False
        self._text.buffer = rest
        if not tag:
            return self._end(None)
        self._give(_converted(value.removeprefix("\n").removesuffix("\n"), self._kinds()))
        self._state = self._parameters
        return True

    def _kinds(self) -> set[str]:
        return _kinds(self._tools.get(self._name, {}).get(self._parameter))

    def _tail(self) -> bool:
        body = self._text.buffer.lstrip(SPACE)
        if body.startswith(FUNCTION):
            self._opening, self._text.buffer, self._state = FUNCTION, body[len(FUNCTION) :], self._function
            return True
        if not body.startswith(END_TOOL_CALL) and (END_TOOL_CALL.startswith(body) or FUNCTION.startswith(body)):
            return False
        self._text.buffer, self._state = body.removeprefix(END_TOOL_CALL), None
        return True


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
    found = parsed(text)
    kind = _KINDS.get(type(found), "null" if text == "null" else "")
    if kind and kind != "string" and (kind in kinds or (kind == "integer" and "number" in kinds)):
        return json.dumps(found, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)

"""What an answer has to look like: JSON, a schema, a regular expression, a grammar, tool calls.

``Grammar`` says it in the words of llguidance (its Lark dialect: docs/syntax.md of that project), ``grammar_compiler``
compiles it for a model's vocabulary, and ``guide.Guide`` follows one answer. Where the model reasons first, the grammar
applies to what comes after; that the reasoning may come and has to end is a part of what is compiled.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llguidance import LLMatcher

from lampejo.answer import END_TOOL_CALL, TOOL_CALL, Style
from lampejo.errors import UserError, shown

# Between the tokens of JSON. Bounded, because small models are fond of going on with white space.
_JSON_OPTIONS = {"whitespace_pattern": r"[ \t\r\n]{1,64}"}


@dataclass(frozen=True)
class Grammar:
    """Made by the functions below; ``UserError`` for what they cannot express. about: the field of a request that it
    stands in, for errors; body: one of llguidance's grammars, as JSON; schemas: those in it of tools, each with the
    function's name (and the parameter's), as JSON."""

    about: str
    body: str
    schemas: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def json_object() -> "Grammar":
        """Any JSON object."""
        return Grammar.json_schema({"type": "object"})

    @staticmethod
    def json_schema(schema: Mapping[str, Any] | bool, about: str = "response_format") -> "Grammar":
        """JSON that a JSON Schema describes; what of the schema cannot be enforced is an error when it is compiled."""
        if not isinstance(schema, Mapping | bool):
            message = f"{about} needs a JSON schema, not {shown(schema)}."
            raise UserError(message, 'For example {"type": "object"}.', field=about)
        return _grammar(about, {"json_schema": _with_options(schema)})

    @staticmethod
    def regex(pattern: str, about: str = "response_format") -> "Grammar":
        """Text that matches as a whole, in the syntax of Rust's regex crate: no look-around, no references back."""
        if not isinstance(pattern, str) or not pattern:
            message = f"{about} needs a regular expression, not {shown(pattern)}."
            raise UserError(message, 'For example "[0-9]+".', field=about)
        try:
            escaped = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"][0]["lark_grammar"]
        except UnicodeEncodeError:
            raise UserError(f"{about} has {shown(pattern)}, which is not UTF-8 text.", field=about) from None
        return _grammar(about, {"lark_grammar": escaped})

    @staticmethod
    def lark(rules: str, about: str = "response_format") -> "Grammar":
        """A context-free grammar with the rule ``start``."""
        if not isinstance(rules, str) or not rules.strip():
            message = f"{about} needs a grammar, not {shown(rules)}."
            raise UserError(message, 'For example: start: "yes" | "no"', field=about)
        return _grammar(about, {"lark_grammar": rules})

    @staticmethod
    def for_response_format(value: Mapping[str, Any] | None) -> "Grammar | None":
        """OpenAI's ``response_format`` (or the ``text.format`` of its Responses), with two types more: ``{"type":
        "regex", "pattern": ...}`` and ``{"type": "grammar", "grammar": ...}``. None where it asks for nothing."""
        if value is None:
            return None
        kind = value.get("type") if isinstance(value, Mapping) else None
        if kind == "text":
            return None
        if kind == "json_object":
            return Grammar.json_object()
        if kind == "json_schema":
            told = value.get("json_schema", value)
            schema = told.get("schema") if isinstance(told, Mapping) else None
            if schema is None:
                raise UserError(
                    "response_format of type json_schema has no schema.",
                    "Give it as schema, in json_schema or beside the type.",
                    field="response_format",
                )
            return Grammar.json_schema(schema)
        if kind == "regex":
            return Grammar.regex(value.get("pattern", ""))
        if kind == "grammar":
            return Grammar.lark(value.get("grammar", ""))
        raise UserError(
            f"response_format has the type {shown(kind)}.",
            "There are text, json_object, json_schema, regex and grammar.",
            field="response_format",
        )

    @staticmethod
    def for_tools(
        tools: Sequence[Mapping[str, Any]], tool_choice: Any, parallel: bool, style: Style
    ) -> "Grammar | None":
        """OpenAI's ``tool_choice`` over tools in its shape, in the model's style; None where it asks for nothing.

        "required" and a named function: nothing but calls, with arguments by their schemas. "auto": calls, if any come,
        by the schemas where a function is ``strict``. ``parallel`` False: at most one.
        """
        functions = [tool["function"] for tool in tools]
        named = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
        if named is not None:
            name = named.get("name") if isinstance(named, Mapping) else None
            functions = [function for function in functions if function["name"] == name]
            if not functions:
                message = f"tool_choice names the function {shown(name)}, which is not among the tools."
                raise UserError(message, field="tool_choice")
        elif tool_choice in (None, "auto"):
            if parallel and not any(function.get("strict") for function in functions):
                return None
        elif tool_choice == "none":
            return None
        elif tool_choice != "required":
            raise UserError(
                f"tool_choice is {shown(tool_choice)}.",
                'It is "auto", "none", "required", or names a function.',
                field="tool_choice",
            )
        if not functions:
            if tool_choice == "required":
                raise UserError("tool_choice asks for a call, but there are no tools.", field="tool_choice")
            return None
        if style.tools is None:
            message = "tools are not known to this model's chat template."
            raise UserError(message, "Use a model that can call tools.", field="tools")
        rules = _ToolRules(style)
        calls = " | ".join(rules.call(function) for function in functions)
        free = named is None and tool_choice != "required"
        if free:
            # The first of these lexemes to match wins, so that text goes on to the tag, and not over it.
            start = "(lead body)* text" if parallel else "lead body | text"
            rules.add("lead[lazy]", rf"/(.|\n)*{TOOL_CALL}/")
            rules.add("text", r"/(.|\n)*/")
        else:
            rules.add("lead", quoted(TOOL_CALL))
            start = r"lead body (/\n?/ lead body)*" if parallel and named is None else "lead body"
        rules.add("body", f"({calls}) {quoted(END_TOOL_CALL)}")
        return replace(
            _grammar("tools", {"lark_grammar": "\n".join([f"start: {start}", *rules.lines])}),
            schemas=tuple(rules.schemas),
        )

    @staticmethod
    def either(one: "Grammar", other: "Grammar") -> "Grammar":
        """What one of two allows; ``about`` is that of the second."""
        body = json.dumps({"either": [json.loads(one.body), json.loads(other.body)]})
        return Grammar(other.about, body, one.schemas + other.schemas)


def _grammar(about: str, body: Mapping[str, Any]) -> Grammar:
    try:
        return Grammar(about, json.dumps(body))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{about} is not JSON: {error}.", field=about) from None


def quoted(text: str) -> str:
    """As a string of Lark, which are JSON's."""
    return json.dumps(text)


def _with_options(schema: Mapping[str, Any] | bool, lenient: bool = False) -> Mapping[str, Any] | bool:
    """lenient: what of the schema cannot be enforced is let be."""
    return {**schema, "x-guidance": {**_JSON_OPTIONS, "lenient": lenient}} if isinstance(schema, Mapping) else schema


class _ToolRules:
    """Lark rules for what stands between ``<tool_call>`` and ``</tool_call>``."""

    def __init__(self, style: Style) -> None:
        self.lines: list[str] = []
        self.schemas: list[tuple[str, str]] = []
        self._write = self._xml if style.tools == "xml" else self._json

    def add(self, name: str, rule: str) -> None:
        self.lines.append(f"{name}: {rule}")

    def call(self, function: Mapping[str, Any]) -> str:
        """The name of a rule for calls of one function."""
        name = f"call_{len(self.lines)}"
        schema = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
        self.add(name, self._write(function["name"], schema, not function.get("strict")))
        return name

    def _json(self, name: str, schema: Mapping[str, Any], lenient: bool) -> str:
        head = f'\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
        return f"{quoted(head)} {self._value(name, schema, lenient)} {quoted('}' + chr(10))}"

    def _value(self, about: str, schema: Mapping[str, Any], lenient: bool) -> str:
        """A rule of its own, whose schema is the root of its references."""
        name = f"value_{len(self.lines)}"
        self.schemas.append((about, json.dumps(_with_options(schema, lenient))))
        self.add(name, f"%json {self.schemas[-1][1]}")
        return name

    def _xml(self, name: str, schema: Mapping[str, Any], lenient: bool) -> str:
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        if not isinstance(properties, Mapping):
            raise UserError(f"tools have a schema for {name} whose properties are no object.", field="tools")
        root = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        parts = []
        for parameter, told in properties.items():
            value = self._parameter(f"{name}.{parameter}", told, root, lenient)
            head = quoted(f"<parameter={parameter}>\n")
            parts.append(f"{head} {value} {quoted(chr(10))}" + ("" if parameter in required else ")?"))
            if parameter not in required:
                parts[-1] = "(" + parts[-1]
        if not properties and schema.get("additionalProperties", True) is not False:
            parts.append(rf'("<parameter=" /[^<>\n]+/ ">\n" {self._text()} "\n")*')
        head, end = quoted(f"\n<function={name}>\n"), quoted("</function>\n")
        return f"{head} {' '.join(parts)} {end}"

    def _parameter(self, name: str, schema: Any, root: Mapping[str, Any], lenient: bool) -> str:
        """A value and its closing tag. Strings stand there as they are, everything else as JSON."""
        end = quoted("\n</parameter>")
        schema = schema if isinstance(schema, Mapping) else {}
        values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
        if isinstance(values, list) and all(isinstance(value, str) for value in values):
            return f"({' | '.join(map(quoted, values))}) {end}"
        kinds = schema.get("type", "string" if not schema.keys() & {"anyOf", "oneOf", "allOf", "$ref"} else None)
        if kinds != "string":
            return f"{self._value(name, {**root, **schema}, lenient)} {end}"
        bounds = sorted(schema.keys() & {"pattern", "format", "minLength", "maxLength"})
        if bounds and not lenient:
            message = f"tools have {bounds[0]} for {name}, which cannot be enforced in this model's calls."
            raise UserError(message, field="tools")
        return self._text()

    def _text(self) -> str:
        """Up to the first closing tag, which ends it for whoever reads the call."""
        name = f"text_{len(self.lines)}"
        self.add(f"{name}[lazy]", r"/(.|\n)*<\/parameter>/")
        return name

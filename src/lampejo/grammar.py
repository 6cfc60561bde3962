"""What an answer has to look like: JSON, a schema, a regular expression, a grammar, tool calls.

``Grammar`` says it in the words of llguidance (its Lark dialect: docs/syntax.md of that project), ``Grammars`` compiles
it for a model's vocabulary, and ``guide.Guide`` follows one answer. Where the model reasons first, the grammar applies
to what comes after; that the reasoning may come and has to end is a part of what is compiled.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from lampejo.answer import END_THINK, END_TOOL_CALL, THINK, TOOL_CALL, Start, Style
from lampejo.errors import UserError, shown
from lampejo.grammar_costs import LIMITS, REMEDY, TOO_COSTLY, check_cost, with_large_stack
from lampejo.guide import Guide, Vocabulary
from lampejo.sampling import check_number
from lampejo.tokenizer import Tokenizer

MAX_CHARS = 200_000  # of a grammar; llguidance compiles recursively, and what is longer could outgrow the stack
MAX_COMPILED = 32  # grammars that are kept, the latest used; each knows the lexer states that it has met
# Between the tokens of JSON. Bounded, because small models are fond of going on with white space.
_JSON_OPTIONS = {"whitespace_pattern": r"[ \t\r\n]{1,64}"}


@dataclass(frozen=True)
class Grammar:
    """Made by the functions below; ``UserError`` for what they cannot express. about: the field of a request that it
    stands in, for errors; body: one of llguidance's grammars, as JSON."""

    about: str
    body: str

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
            rules.add("lead", _quoted(TOOL_CALL))
            start = r"lead body (/\n?/ lead body)*" if parallel and named is None else "lead body"
        rules.add("body", f"({calls}) {_quoted(END_TOOL_CALL)}")
        return _grammar("tools", {"lark_grammar": "\n".join([f"start: {start}", *rules.lines])})

    @staticmethod
    def either(one: "Grammar", other: "Grammar") -> "Grammar":
        """What one of two allows; ``about`` is that of the second."""
        return Grammar(other.about, json.dumps({"either": [json.loads(one.body), json.loads(other.body)]}))


def _grammar(about: str, body: Mapping[str, Any]) -> Grammar:
    try:
        return Grammar(about, json.dumps(body))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{about} is not JSON: {error}.", field=about) from None


def _quoted(text: str) -> str:
    """As a string of Lark, which are JSON's."""
    return json.dumps(text)


def _with_options(schema: Mapping[str, Any] | bool, lenient: bool = False) -> Mapping[str, Any] | bool:
    """lenient: what of the schema cannot be enforced is let be."""
    return {**schema, "x-guidance": {**_JSON_OPTIONS, "lenient": lenient}} if isinstance(schema, Mapping) else schema


class _ToolRules:
    """Lark rules for what stands between ``<tool_call>`` and ``</tool_call>``."""

    def __init__(self, style: Style) -> None:
        self.lines: list[str] = []
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
        return f"{_quoted(head)} {self._value(schema, lenient)} {_quoted('}' + chr(10))}"

    def _value(self, schema: Mapping[str, Any], lenient: bool) -> str:
        """A rule of its own, whose schema is the root of its references."""
        name = f"value_{len(self.lines)}"
        self.add(name, f"%json {json.dumps(_with_options(schema, lenient))}")
        return name

    def _xml(self, name: str, schema: Mapping[str, Any], lenient: bool) -> str:
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        if not isinstance(properties, Mapping):
            raise UserError(f"tools have a schema for {name} whose properties are no object.", field="tools")
        root = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        parts = []
        for parameter, told in properties.items():
            value = self._parameter(f"{name}.{parameter}", told, root, lenient)
            head = _quoted(f"<parameter={parameter}>\n")
            parts.append(f"{head} {value} {_quoted(chr(10))}" + ("" if parameter in required else ")?"))
            if parameter not in required:
                parts[-1] = "(" + parts[-1]
        if not properties and schema.get("additionalProperties", True) is not False:
            parts.append(rf'("<parameter=" /[^<>\n]+/ ">\n" {self._text()} "\n")*')
        head, end = _quoted(f"\n<function={name}>\n"), _quoted("</function>\n")
        return f"{head} {' '.join(parts)} {end}"

    def _parameter(self, name: str, schema: Any, root: Mapping[str, Any], lenient: bool) -> str:
        """A value and its closing tag. Strings stand there as they are, everything else as JSON."""
        end = _quoted("\n</parameter>")
        schema = schema if isinstance(schema, Mapping) else {}
        values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
        if isinstance(values, list) and all(isinstance(value, str) for value in values):
            return f"({' | '.join(map(_quoted, values))}) {end}"
        kinds = schema.get("type", "string" if not schema.keys() & {"anyOf", "oneOf", "allOf", "$ref"} else None)
        if kinds != "string":
            return f"{self._value({**root, **schema}, lenient)} {end}"
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


class Grammars:
    """Compiles grammars for one model. Its methods may be called from any thread but an event loop's: the first grammar
    takes the time to index the vocabulary, about a second for 150,000 tokens, each new one some milliseconds."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        end_thinking = tokenizer.encode(f"\n{END_THINK}\n\n", add_special_tokens=False)
        self._vocabulary = Vocabulary(vocab_size, tokenizer.piece, tuple(eos_ids), end_thinking)
        self._indexed: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def guide(self, start: Start, grammar: Grammar | None = None, budget: int | None = None) -> Guide | None:
        """For one answer, None where there is nothing to enforce. budget: tokens of reasoning. ``UserError`` if the
        grammar is not supported, or nothing matches it."""
        if grammar is not None and not isinstance(grammar, Grammar):
            message = f"grammar must be a Grammar, not {shown(grammar)}."
            raise UserError(message, "Make one with Grammar.json_schema(...).")
        if budget is not None:
            check_number("thinking_budget", budget, 0, 2**31, whole=True)
        if grammar is None and (budget is None or start == "closed"):
            return None
        if budget is not None and END_THINK not in self._tokenizer.decode(self._vocabulary.end_thinking):
            message = f"thinking_budget has no use: {END_THINK} cannot be written with this model's tokens."
            raise UserError(message, field="thinking_budget")
        return Guide(self._vocabulary, start, self._matcher(grammar, start) if grammar else None, budget)

    def _matcher(self, grammar: Grammar, start: Start) -> LLMatcher:
        if len(grammar.body) > MAX_CHARS:
            message = f"{grammar.about} is a grammar of {len(grammar.body)} characters; {MAX_CHARS} are supported."
            raise UserError(message, REMEDY, field=grammar.about)
        if start != "closed":
            self._matcher(grammar, "closed")  # what is wrong with it shows there
        try:
            text = _with_reasoning(grammar, start)
        except RecursionError:
            raise _too_deep(grammar) from None
        with self._lock:
            if self._indexed is None:
                self._indexed = self._index()
            found = self._compiled.get(text)
            if found is not None:
                self._compiled.move_to_end(text)
        # All answers by a grammar share what its lexer has met; one that another answer has filled up is made anew.
        if found is not None and self._complaint(found) is None:
            return found
        try:
            for part in _parts(json.loads(grammar.body)):
                check_cost(part, grammar.about)
        except RecursionError:
            raise _too_deep(grammar) from None
        indexed = self._indexed
        matcher = with_large_stack(lambda: LLMatcher(indexed, text, log_level=0, limits=LIMITS))
        if matcher.is_error():
            raise _not_enforced(grammar, _in_a_line(matcher.get_error()))
        for _ in range(2):  # a lexer that the first mask has filled up fails at the second
            if (complaint := self._complaint(matcher)) is not None:
                if not TOO_COSTLY.search(complaint):
                    complaint = "nothing that this model can write matches it."
                raise _not_enforced(grammar, complaint)
        with self._lock:
            self._compiled[text] = matcher
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return matcher

    def _complaint(self, matcher: LLMatcher) -> str | None:
        """What is wrong with the first mask."""
        probe = Guide(self._vocabulary, "closed", matcher)
        probe.masks([])
        return probe.error

    def _index(self) -> LLTokenizer:
        if not self._vocabulary.eos_ids:
            raise UserError("A grammar needs a token that ends the answer, and this model has none.")
        pieces: Any = _Pieces(
            self._tokenizer, self._vocabulary
        )  # what it takes is told by its attributes, not its class
        return LLTokenizer(pieces, eos_token=list(self._vocabulary.eos_ids))


class _Pieces:
    """A tokenizer as llguidance reads it. Ids that have no text are special, and no grammar allows them."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
        self._tokenizer = tokenizer
        size = vocabulary.size
        pieces = [tokenizer.token_text(i).bytes for i in range(min(size, tokenizer.vocab_size))]
        self.special_token_ids = [
            i for i in range(size) if i in tokenizer.special_ids or i >= len(pieces) or not pieces[i]
        ]
        self.tokens = [*pieces, *(b"<[none]>" for _ in range(size - len(pieces)))]
        self.eos_token_id = vocabulary.eos_ids[0]
        special = frozenset(self.special_token_ids)
        self._ids = {piece: i for i, piece in enumerate(self.tokens) if i not in special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens with exactly these bytes, for what a grammar leaves no choice about: as the model's tokenizer would
        write it or, where that adds or loses something (a space before the first word), the longest first."""
        raw = text.encode() if isinstance(text, str) else text
        ids = self._tokenizer.encode(raw.decode(errors="replace"), add_special_tokens=False)
        if b"".join(self.tokens[i] for i in ids) == raw:
            return ids
        ids, start = [], 0
        while start < len(raw):
            sizes = range(min(self._longest, len(raw) - start), 0, -1)
            size = next((size for size in sizes if raw[start : start + size] in self._ids), 0)
            if not size:
                break
            ids.append(self._ids[raw[start : start + size]])
            start += size
        return ids


def _with_reasoning(grammar: Grammar, start: Start) -> str:
    """What llguidance compiles."""
    parts = _parts(json.loads(grammar.body))
    if start == "closed":
        return json.dumps({"grammars": parts})
    thoughts = r"thoughts /\s*/"
    if start == "maybe":
        thoughts = f"({_quoted(THINK)} {thoughts})?"
    rules = f"start: {thoughts} @answer\nthoughts[suffix={_quoted(END_THINK)}]: /(.|\\n)*/"
    return json.dumps({"grammars": [{"lark_grammar": rules}, *parts]})


def _parts(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A grammar's own parts, by name; the first begins."""
    if "either" not in body:
        return [{"name": "answer", **body}]
    one, other = body["either"]
    choice = {"name": "answer", "lark_grammar": "start: @one | @other"}
    return [choice, {"name": "one", **one}, {"name": "other", **other}]


def _too_deep(grammar: Grammar) -> UserError:
    return _not_enforced(grammar, "it is nested too deeply.")


def _not_enforced(grammar: Grammar, complaint: str) -> UserError:
    """complaint: llguidance's or ours."""
    remedy = REMEDY if TOO_COSTLY.search(complaint) else ""
    return UserError(f"{grammar.about} cannot be enforced: {complaint.rstrip('.')}.", remedy, field=grammar.about)


def _in_a_line(text: str) -> str:
    """An error without the lines of the grammar that it quotes and the marks below them."""
    lines = [line.strip() for line in text.splitlines()]
    return " ".join(line for line in lines if not re.match(r"\d+ \||\^*$", line))[:300]

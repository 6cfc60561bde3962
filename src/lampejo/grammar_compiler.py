"""Compiles grammars for the vocabulary of one model, within the bounds of what they may cost."""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from lampejo.answer import END_THINK, THINK, Start
from lampejo.errors import UserError, shown
from lampejo.grammar import Grammar, quoted
from lampejo.grammar_costs import LIMITS, REMEDY, TOO_COSTLY, check_cost, with_large_stack
from lampejo.grammar_trial import TokenTable, Trials
from lampejo.guide import Compiled, Guide, Matcher, Stuck, Vocabulary, next_mask
from lampejo.sampling import check_number
from lampejo.tokenizer import Tokenizer

MAX_CHARS = 200_000  # of a grammar; llguidance compiles recursively, and what is longer could outgrow the stack
MAX_UNTRIED = 4_000  # characters of a grammar that is small enough to be compiled without a trial
MAX_COMPILED = 32  # grammars that are kept, the latest used; each knows the lexer states that its drafts have met
_TOO_COMPLEX = "it is too complex to compile."


class Grammars:
    """Compiles grammars for one model. Its methods may be called from any thread but an event loop's: the first grammar
    takes the time to index the vocabulary, about a second for 150,000 tokens, each answer some milliseconds, a new
    grammar that is not evidently cheap its trial."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        end_thinking = tokenizer.encode(f"\n{END_THINK}\n\n", add_special_tokens=False)
        self._vocabulary = Vocabulary(vocab_size, tokenizer.piece, tuple(eos_ids), end_thinking)
        self._indexed: tuple[LLTokenizer, Trials] | None = None
        self._compiled: OrderedDict[str, Compiled] = OrderedDict()
        self._failed: OrderedDict[str, None] = OrderedDict()  # in their trials
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
        return Guide(self._vocabulary, start, self._compile(grammar, start) if grammar else None, budget)

    def _compile(self, grammar: Grammar, start: Start) -> Compiled:
        if len(grammar.body) > MAX_CHARS:
            message = f"{grammar.about} is a grammar of {len(grammar.body)} characters; {MAX_CHARS} are supported."
            raise UserError(message, REMEDY, field=grammar.about)
        if start != "closed":
            self._compile(grammar, "closed")  # what is wrong with it shows there
        try:
            text = _with_reasoning(grammar, start)
        except RecursionError:
            raise _too_deep(grammar) from None
        with self._lock:
            if self._indexed is None:
                self._indexed = self._index()
            indexed, trials = self._indexed
            found = self._compiled.get(text)
            if found is not None:
                self._compiled.move_to_end(text)
        # One that drafts have filled up is made anew.
        if found is not None and (found.shared is None or self._complaint(found.shared.deep_copy()) is None):
            return found
        if text in self._failed:
            raise _refusal(grammar, _TOO_COMPLEX)
        is_joined = _check(grammar)
        if is_joined:
            compiled = Compiled(lambda: trials.hold(text), None)
            matcher: Matcher = compiled.make()
        else:
            if found is None and len(text) > MAX_UNTRIED and not trials.passes(text):
                raise self._failure(grammar, text)

            def make() -> LLMatcher:
                return with_large_stack(lambda: LLMatcher(indexed, text, log_level=0, limits=LIMITS))

            compiled = Compiled(make, shared := make())
            matcher = shared
        if matcher.is_error():
            complaint: str | None = _in_a_line(matcher.get_error())
            if is_joined and TOO_COSTLY.search(str(complaint)):
                raise self._failure(grammar, text)
            raise _refusal(grammar, str(complaint)) if is_joined else self._not_enforced(grammar, str(complaint))
        for _ in range(2):  # a lexer that the first mask has filled up fails at the second
            if (complaint := self._complaint(matcher if is_joined else shared.deep_copy())) is not None:
                if not TOO_COSTLY.search(complaint):
                    complaint = "nothing that this model can write matches it."
                raise _refusal(grammar, complaint)
        with self._lock:
            self._compiled[text] = compiled
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled

    def _failure(self, grammar: Grammar, text: str) -> UserError:
        """Of a grammar that was too much for a process; it is not tried again."""
        with self._lock:
            self._failed[text] = None
            while len(self._failed) > MAX_COMPILED:
                self._failed.popitem(last=False)
        return _refusal(grammar, _TOO_COMPLEX)

    def _complaint(self, matcher: Matcher) -> str | None:
        """What is wrong with the first mask."""
        try:
            next_mask(matcher, self._vocabulary.size)
        except Stuck as stuck:
            return str(stuck)
        return None

    def _not_enforced(self, grammar: Grammar, complaint: str) -> UserError:
        """complaint: llguidance's or ours, which tells more where the schema of one tool is to blame."""
        for name, schema in grammar.schemas:
            body = json.dumps({"grammars": [{"json_schema": json.loads(schema)}]})
            error = with_large_stack(lambda body=body: LLMatcher.validate_grammar(body, limits=LIMITS))  # type: ignore[misc]
            if error:
                return _refusal(grammar, _in_a_line(error), _of_tool(grammar, name))
        return _refusal(grammar, complaint)

    def _index(self) -> tuple[LLTokenizer, Trials]:
        if not self._vocabulary.eos_ids:
            raise UserError("A grammar needs a token that ends the answer, and this model has none.")
        size = self._vocabulary.size
        tokens = [self._tokenizer.token_text(i).bytes for i in range(min(size, self._tokenizer.vocab_size))]
        # Ids that have no text are special too.
        special_ids = [i for i in range(size) if i in self._tokenizer.special_ids or i >= len(tokens) or not tokens[i]]
        table = TokenTable(
            [*tokens, *(b"<[none]>" for _ in range(size - len(tokens)))],
            special_ids,
            self._vocabulary.eos_ids,
            lambda text: self._tokenizer.encode(text, add_special_tokens=False),
        )
        return table.index(), Trials(table)


def _check(grammar: Grammar) -> bool:
    """Whether it joins patterns. ``UserError`` if it evidently costs too much, alone or with all that it has."""
    try:
        joins = [check_cost(part, grammar.about) for part in _parts(json.loads(grammar.body))]  # all of them
    except RecursionError:
        raise _too_deep(grammar) from None
    except UserError as error:
        raise _named_tool(grammar) or error from None
    return any(joins)


def _named_tool(grammar: Grammar) -> UserError | None:
    """What is wrong, where one tool is to blame."""
    for name, schema in grammar.schemas:
        try:
            check_cost({"json_schema": json.loads(schema)}, grammar.about)
        except RecursionError:
            return _too_deep(grammar)
        except UserError as error:
            message = f"{_of_tool(grammar, name)}{error.message.removeprefix(grammar.about)}"
            return UserError(message, error.remedy, field=grammar.about)
    return None


def _with_reasoning(grammar: Grammar, start: Start) -> str:
    """What llguidance compiles."""
    parts = _parts(json.loads(grammar.body))
    if start == "closed":
        return json.dumps({"grammars": parts})
    thoughts = r"thoughts /\s*/"
    if start == "maybe":
        thoughts = f"({quoted(THINK)} {thoughts})?"
    rules = f"start: {thoughts} @answer\nthoughts[suffix={quoted(END_THINK)}]: /(.|\\n)*/"
    return json.dumps({"grammars": [{"lark_grammar": rules}, *parts]})


def _parts(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A grammar's own parts, by name; the first begins."""
    if "either" not in body:
        return [{"name": "answer", **body}]
    one, other = body["either"]
    choice = {"name": "answer", "lark_grammar": "start: @one | @other"}
    return [choice, {"name": "one", **one}, {"name": "other", **other}]


def _too_deep(grammar: Grammar) -> UserError:
    return _refusal(grammar, "it is nested too deeply.")


def _of_tool(grammar: Grammar, name: str) -> str:
    return f"{grammar.about}: the schema for {name[:100]}"


def _refusal(grammar: Grammar, complaint: str, what: str = "") -> UserError:
    remedy = REMEDY if TOO_COSTLY.search(complaint) else ""
    for pattern, ours, our_remedy in _IN_OUR_WORDS:
        if pattern in complaint:
            complaint, remedy = ours, our_remedy
    return UserError(
        f"{what or grammar.about} cannot be enforced: {complaint.rstrip('.')}.", remedy, field=grammar.about
    )


# What llguidance says, where that speaks of its own options or numbers.
_IN_OUR_WORDS = [
    ("Unable to determine if regex is empty", "its patterns that have to match at once are too complex", REMEDY),
    (
        "oneOf constraints are not supported",
        "of oneOf it is not evident that no two alternatives can match the same",
        "Use anyOf, or give each alternative a required property with a const string of its own.",
    ),
    (
        "'multipleOf' has too many digits",
        "the step of multipleOf is no short decimal number for a computer",
        "Use one with fewer digits, for example 0.0005, 0.001 or a whole number, or leave multipleOf out.",
    ),
]


def _in_a_line(text: str) -> str:
    """An error without the lines of the grammar that it quotes and the marks below them."""
    lines = [line.strip() for line in text.splitlines()]
    return " ".join(line for line in lines if not re.match(r"\d+ \||\^*$", line))[:300]

"""What a grammar may cost: bounds for llguidance, and what it does without bounds is refused before.

Compiling has to come within a fraction of a second, and so has a mask, since all rows wait for it.
"""

import json
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from fractions import Fraction
from typing import Any, TypeVar

from llguidance import LLParserLimits

from lampejo.errors import UserError
from lampejo.grammar_joint import check_at_once, check_joined

# In llguidance's units; an ordinary schema needs far less.
LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    step_max_items=5_000,
    max_items_in_row=1_000,
    max_grammar_size=50_000,
    max_lexer_states=50_000,
    verbose_errors=False,
)
# What llguidance does in time that its limits do not bound: states for each remainder of a division (zeros at the end
# are for free), a comparison of each two patterns of names, and of each property with all others.
MAX_MULTIPLE = 10_000
MAX_PATTERN_PAIRS = 10_000
MAX_PROPERTIES = 2_000  # and names that are required
MAX_OPTIONAL = 240  # properties of one object: any of them may be the next, at four items of a row each
# How llguidance words that one of its limits was reached.
TOO_COSTLY = re.compile("fuel|limit|max is|too (big|large|many|complex)", re.IGNORECASE)
REMEDY = "Simplify it: fewer alternatives, shorter repetitions, smaller bounds."
STACK = 512 << 20  # bytes, of address space alone until they are used
_STACK_LOCK = threading.Lock()  # the size is that of all threads that are started meanwhile
_Result = TypeVar("_Result")


def check_cost(part: Mapping[str, Any], about: str) -> bool:
    """part: one of llguidance's grammars. Whether it joins patterns. ``UserError`` for what it would spend seconds on,
    ``RecursionError`` for what is nested too deeply."""
    rules = part.get("lark_grammar", "")
    is_joined = check_joined(rules, about)
    for schema in [part["json_schema"]] if "json_schema" in part else _schemas_in(rules):
        _check_schema(schema, about)
        is_joined = check_at_once(schema, about) or is_joined
    return is_joined


def _schemas_in(rules: str) -> Iterator[Any]:
    """Of a grammar in Lark: whatever could be an object of JSON after ``%json``."""
    if "%json" not in rules:
        return
    decoder = json.JSONDecoder(parse_int=lambda digits: int(digits) if len(digits) < 30 else float(digits))
    start = rules.find("{")
    while start >= 0:
        try:
            schema, end = decoder.raw_decode(rules, start)
            yield schema
        except ValueError:
            end = start + 1
        start = rules.find("{", end)


def _check_schema(schema: Any, about: str) -> None:
    multiple, num_patterns, num_properties, num_required = Fraction(1), 0, 0, 0
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        if not isinstance(value, Mapping):
            continue
        left += value.values()
        step = value.get("multipleOf")
        if isinstance(step, int | float) and 0 < step < math.inf:
            step = Fraction(str(step))
            multiple = Fraction(
                math.lcm(multiple.numerator, step.numerator), math.gcd(multiple.denominator, step.denominator)
            )
            if int(str(multiple.numerator).rstrip("0")) > MAX_MULTIPLE:
                raise UserError(
                    f"{about} has multipleOf {value['multipleOf']}: only multiples (of all such steps together) up to"
                    f" {MAX_MULTIPLE:,}, without the zeros at the end, can be enforced.",
                    "Choose a rounder number, or leave it out.",
                    field=about,
                )
        required = value.get("required")
        num_required += len(required) if isinstance(required, list) else 0
        patterns, properties = value.get("patternProperties"), value.get("properties")
        num_patterns += len(patterns) if isinstance(patterns, Mapping) else 0
        if isinstance(properties, Mapping):
            num_properties += len(properties)
            num_optional = len(properties) - (len(required) if isinstance(required, list) else 0)
            if num_optional > MAX_OPTIONAL:
                raise UserError(
                    f"{about} has an object of {num_optional} optional properties; {MAX_OPTIONAL} can be enforced.",
                    "Make more of them required, or put some into an object of their own.",
                    field=about,
                )
    if num_patterns * (num_patterns + num_properties) > MAX_PATTERN_PAIRS:
        message = f"{about} has {num_patterns} patternProperties, which are too many to be enforced."
        raise UserError(message, REMEDY, field=about)
    if max(num_properties, num_required) > MAX_PROPERTIES:
        kind, num = (
            ("properties", num_properties) if num_properties > MAX_PROPERTIES else ("required names", num_required)
        )
        message = f"{about} has {num} {kind} in one schema; {MAX_PROPERTIES} can be enforced."
        raise UserError(message, REMEDY, field=about)


def with_large_stack(work: Callable[[], _Result]) -> _Result:
    """Does it in a thread of its own; llguidance compiles recursively."""
    done: Future[_Result] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="lampejo-grammar")
    with _STACK_LOCK:
        before = threading.stack_size(STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return done.result()

"""Patterns that one text has to match at once, counted before llguidance meets them.

It joins them one by one, all alternatives of one with all of the others, and looks at its limits only afterwards: what
twenty small patterns cost is beyond any limit. What is counted here is never less than what it joins.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any
from urllib.parse import unquote

from lampejo.errors import UserError

MAX_AT_ONCE = 4
MAX_PRODUCT = 1_000_000  # of their lengths, if all were equally long
MAX_STEPS = 50_000  # through a schema, less than half a second
_FORMAT_CHARS = 100  # a ``format`` is a pattern of about so many characters
_REMEDY = "Write one pattern that says the same, or leave the less important out."
_LENGTHS = ("minLength", "maxLength")
_COMBINATORS = ("allOf", "anyOf", "oneOf")

Group = tuple[Any, ...]  # alternatives, of which one has to hold


def check_at_once(schema: Any, about: str) -> bool:
    """Whether any string of a JSON schema has to match two patterns. ``UserError`` if one has to match too many."""
    return _Places(schema, about).check()


def check_joined(rules: str, about: str) -> bool:
    """The same for a grammar in Lark, in which ``&`` joins the patterns."""
    bodies: dict[str, list[str]] = {}
    name = ""
    tokens = [match.group() for match in _LARK.finditer(rules)]
    for token, following in pairwise([*tokens, ""]):
        if _NAME.fullmatch(token) and following in (":", "."):
            name = token.lstrip("?!")
        bodies.setdefault(name, []).append(token)
    known: dict[str, tuple[int, int]] = {}

    def size(name: str, above: tuple[str, ...] = ()) -> tuple[int, int]:
        """How many ``&`` there are in a rule and those it names, and how many characters of patterns."""
        if name in known or name in above or len(above) > 200:
            return known.get(name, (0, 0))
        num_joins, num_chars = 0, 0
        for token in bodies[name][1:]:
            inner = (int(token == "&"), len(token))
            if token in bodies and token == token.upper():  # rules, in small letters, cannot be joined
                inner = size(token, (*above, name))
            num_joins, num_chars = num_joins + inner[0], num_chars + inner[1]
        known[name] = min(num_joins, 10**6), min(num_chars, 10**9)
        return known[name]

    for name, body in bodies.items():
        if "&" in body:
            _check(size(name)[0] + 1, size(name)[1], about)
    return any(token in "&~" for token in tokens)


# Strings, patterns, comments; then what matters between them. "~" before a number says how often.
_LARK = re.compile(
    r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\])+/|[?!]*[a-zA-Z_][\w-]*|~(?!\s*\d)|[&:.]', re.DOTALL
)
_NAME = re.compile(r"[?!]*[a-zA-Z_][\w-]*")


def _check(num_patterns: int, num_chars: int, about: str) -> None:
    if num_patterns > MAX_AT_ONCE:
        message = (
            f"{about} has {num_patterns} patterns that one text must match at once; {MAX_AT_ONCE} can be enforced."
        )
        raise UserError(message, _REMEDY, field=about)
    if num_patterns > 1 and (num_chars / num_patterns) ** num_patterns > MAX_PRODUCT:
        longest = int(num_patterns * MAX_PRODUCT ** (1 / num_patterns) + 1e-6)  # the root of 1e6 is 99.99999
        raise UserError(
            f"{about} has {num_patterns} patterns of {num_chars} characters that one text must match at once;"
            f" {longest} characters of {num_patterns} can be enforced.",
            _REMEDY,
            field=about,
        )


def _values(value: Any) -> Iterator[Any]:
    """A value of JSON and all in it."""
    left = [value]
    while left:
        yield (value := left.pop())
        left += _parts_of(value)


def _parts_of(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list) else value.values() if isinstance(value, Mapping) else ()


class _Places:
    """Walks to each place of the JSON that a schema describes, with all the schemas that hold there."""

    def __init__(self, root: Any, about: str) -> None:
        self._root, self._about = root, about
        values = list(_values(root))
        everywhere = [value for value in values if isinstance(value, Mapping)]
        # Schemas with an id may be the base of references.
        self._bases = (root, *(value for value in everywhere if {"$id", "id"} & value.keys()))
        self._everywhere = everywhere
        self._has_patterns = any(map(_num_patterns, everywhere))
        self._telling: set[int] = set()  # ids of what has patterns, lengths or references somewhere in it
        for value in reversed(values):
            is_end = isinstance(value, Mapping) and (_num_patterns(value) or {*_LENGTHS, "$ref"} & value.keys())
            if is_end or any(id(part) in self._telling for part in _parts_of(value)):
                self._telling.add(id(value))
        self._plain_by_id: dict[int, Mapping[str, Any]] = {}
        self._seen: set[frozenset[tuple[int, ...]]] = set()
        self._num_steps = 0
        self._is_joint = False

    def check(self) -> bool:
        left: list[list[Group]] = [[(self._root,)]] if self._has_patterns else []
        while left:
            left += self._place(left.pop())
        return self._is_joint

    def _place(self, groups: Sequence[Group]) -> Iterator[list[Group]]:
        """Checks what holds at one place; then come the places below it."""
        key = frozenset(tuple(map(id, group)) for group in groups)
        if key in self._seen:
            return
        self._seen.add(key)
        schemas, choices = self._unfolded(groups)
        if choices:
            for alternative in choices[0]:
                yield [*((schema,) for schema in schemas), (alternative,), *choices[1:]]
            return
        num_patterns = sum(map(_num_patterns, schemas))
        self._is_joint = self._is_joint or num_patterns > 1 or _joins_length(schemas)
        _check(num_patterns, sum(map(_num_chars, schemas)), self._about)
        for name in dict.fromkeys([*(name for schema in schemas for name in _mapping(schema, "properties")), None]):
            yield [group for schema in schemas for group in self._of_property(schema, name)]
        lists = ("prefixItems", "items")
        others = ("items", "additionalItems")
        yield [
            self._schemas([*(v for key in lists for v in _listed(schema, key)), *(schema.get(key) for key in others)])
            for schema in schemas
        ]

    def _of_property(self, schema: Mapping[str, Any], name: str | None) -> Iterator[Group]:
        """What a schema says of a property, None: of one that it does not name."""
        self._step()
        told = _mapping(schema, "properties").get(name)
        if told is not None:
            yield self._schemas([told])
        others = list(_mapping(schema, "patternProperties").values())
        yield self._schemas(others if told is not None else [*others, schema.get("additionalProperties")])

    def _unfolded(self, groups: Sequence[Group]) -> tuple[list[Mapping[str, Any]], list[Group]]:
        """The schemas that hold, each without what it is combined of, which stands beside it, and the choices."""
        left, schemas, choices, met = [*groups], [], [], set()
        while left:
            group = left.pop()
            self._step()
            if len(group) > 1:
                choices.append(group)
            elif group and isinstance(schema := group[0], Mapping) and id(schema) not in met:
                met.add(id(schema))
                left += self._parts(schema)
                # The same object each time, by which a place is known again.
                plain = {key: value for key, value in schema.items() if key not in (*_COMBINATORS, "$ref")}
                if (
                    _num_patterns(plain)
                    or plain.keys() & {*_LENGTHS}
                    or any(id(value) in self._telling for value in plain.values())
                ):
                    is_all = len(plain) == len(schema)
                    schemas.append(schema if is_all else self._plain_by_id.setdefault(id(schema), plain))
        return schemas, choices

    def _parts(self, schema: Mapping[str, Any]) -> Iterator[Group]:
        """What of a schema is in others, all of which hold."""
        yield from (self._schemas([part]) for part in _listed(schema, "allOf"))
        yield self._schemas(_listed(schema, "anyOf"))
        yield self._schemas(_listed(schema, "oneOf"))
        if isinstance(reference := schema.get("$ref"), str):
            yield self._targets(unquote(reference.partition("#")[2]))

    def _targets(self, fragment: str) -> Group:
        """What a reference may mean."""
        if not fragment.startswith("/"):
            names = (
                ("$anchor", fragment),
                ("$dynamicAnchor", fragment),
                ("$id", f"#{fragment}"),
                ("id", f"#{fragment}"),
            )
            anchored = (value for value in self._everywhere if any(value.get(key) == name for key, name in names))
            return tuple(anchored) if fragment else self._bases
        found = []
        for value in self._bases:
            for key in fragment.split("/")[1:]:
                key = key.replace("~1", "/").replace("~0", "~")
                if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
                    value = value[int(key)]
                else:
                    value = value.get(key) if isinstance(value, Mapping) else None
            found.append(value)
        return self._schemas(found)

    def _schemas(self, values: Sequence[Any]) -> Group:
        """Those of which anything can come here."""
        return tuple(value for value in values if isinstance(value, Mapping) and id(value) in self._telling)

    def _step(self) -> None:
        self._num_steps += 1
        if self._num_steps > MAX_STEPS:
            message = f"{self._about} has a schema whose parts combine in too many ways."
            raise UserError(message, "Use fewer allOf, anyOf and $ref inside of each other.", field=self._about)


def _num_patterns(schema: Mapping[str, Any]) -> int:
    return isinstance(schema.get("pattern"), str) + isinstance(schema.get("format"), str)


def _num_chars(schema: Mapping[str, Any]) -> int:
    pattern = schema.get("pattern")
    return (len(pattern) if isinstance(pattern, str) else 0) + _FORMAT_CHARS * isinstance(schema.get("format"), str)


# A row of characters and classes, each with how often it comes.
_FLAT = re.compile(
    r"\^?(?:(?:\[(?:\\[^pP]|[^\]\\])*\]|\\[^pP]|[^()|\[\]\\*+?{}])(?:\{\d+(?:,\d*)?\}|[*+?])?){0,60}", re.DOTALL
)


def _joins_length(schemas: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a pattern that is more than a short row is joined with a bound of its length, which is a pattern too."""
    patterns = [schema["pattern"] for schema in schemas if isinstance(schema.get("pattern"), str)]
    is_bound = any(key in schema for schema in schemas for key in _LENGTHS)
    return is_bound and not all(map(_FLAT.fullmatch, patterns))


def _mapping(schema: Mapping[str, Any], key: str) -> Mapping[Any, Any]:
    return value if isinstance(value := schema.get(key), Mapping) else {}


def _listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    return value if isinstance(value := schema.get(key), list) else []

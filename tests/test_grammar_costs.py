"""What a grammar may cost: what is refused before any work, what is tried elsewhere, and what is within the bounds."""

import random
import re
import threading

import pytest

from lampejo import grammar_joint
from lampejo.answer import Style
from lampejo.errors import Busy, UserError
from lampejo.grammar import Grammar
from lampejo.grammar_compiler import Grammars
from lampejo.grammar_joint import MAX_AT_ONCE, check_at_once, check_joined
from lampejo.grammar_trial import MAX_HELD, MAX_WAITING, TokenTable, Trials
from scripted import EOS, VOCAB, ids_of
from test_grammar import TOKENS, llm_of
from test_guide import allowed
from tiny import ScriptedDrafter

GRAMMARS_OF_TOKENS = Grammars(TOKENS, VOCAB, (EOS,))


def _in_all_of(*schemas: dict) -> dict:
    return {"allOf": list(schemas)}


AT_ONCE = [{"type": "string", "pattern": f".*a.{{{i}}}b.*"} for i in range(20)]
STEPS = [{"type": "integer", "multipleOf": prime} for prime in (97, 89, 83)]
COSTLY = {
    "a repetition of a million": Grammar.regex("a{1000000}"),
    "nested repetitions": Grammar.regex("((a{1000}){1000}){1000}"),
    "a long literal": Grammar.regex("a" * 190_000),
    "states without end": Grammar.lark("start: X\nX: /.*a.{20}/ & /.*b.{30}/ & /.*c.{40}/ & ~/.*d.{25}/"),
    "rules that may be empty": Grammar.lark(
        "start: a0*\n" + "".join(f"a{i}: a{i + 1}? a{i + 1}? a{i + 1}?\n" for i in range(2000)) + 'a2000: "x"?'
    ),
    "a product of steps": Grammar.json_schema(_in_all_of(*STEPS)),
    "a step of a large prime": Grammar.json_schema({"type": "number", "multipleOf": 0.1000003}),
    "a step inside of rules": Grammar.lark(
        'start: %json # {"a": \n  {"type": "integer", "x": ' + "1" * 5000 + ', "multiple\\u004ff": 56606267}'
    ),
    "names by many patterns": Grammar.json_schema(
        {"type": "object", "patternProperties": {f"^{i}-.*$": {} for i in range(300)}}
    ),
    "patterns and names": Grammar.json_schema(
        _in_all_of(
            {"type": "object", "patternProperties": {f"^{i}-.*$": {} for i in range(20)}},
            {"properties": {f"p{i}": {} for i in range(1900)}, "required": [f"p{i}" for i in range(1900)]},
        )
    ),
    "many optional names": Grammar.json_schema({"type": "object", "properties": {f"p{i}": {} for i in range(300)}}),
    "patterns at once": Grammar.json_schema(_in_all_of(*AT_ONCE)),
    "patterns at once, by a property": Grammar.json_schema(_in_all_of(*({"properties": {"a": a}} for a in AT_ONCE))),
    "patterns at once, by all other properties": Grammar.json_schema(
        _in_all_of(*({"type": "object", "additionalProperties": a} for a in AT_ONCE))
    ),
    "patterns at once, in items of alternatives": Grammar.json_schema(
        _in_all_of(*({"anyOf": [{"type": "array", "items": a}, {"type": "null"}]} for a in AT_ONCE))
    ),
    "patterns at once, by references": Grammar.json_schema(
        {
            "$defs": {
                "0": AT_ONCE[0],
                **{str(i): {**AT_ONCE[i], "allOf": [{"$ref": f"#/$defs/{i - 1}"}]} for i in range(1, 8)},
            },
            "$ref": "#/$defs/7",
        }
    ),
    "patterns at once, by names of theirs": Grammar.json_schema(
        {
            "$defs": {f"{i}": {"$anchor": f"a{i}", **AT_ONCE[i]} for i in range(8)},
            "allOf": [{"$ref": f"#a{i}"} for i in range(8)],
        }
    ),
    "patterns at once, by ids of an older draft": Grammar.json_schema(
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "definitions": {f"{i}": {"$id": f"#a{i}", **AT_ONCE[i]} for i in range(8)},
            "allOf": [{"items": [{"$ref": f"#a{i}"}]} for i in range(8)],
        }
    ),
    "patterns at once, in further items": Grammar.json_schema(
        _in_all_of(*({"type": "array", "items": [{}], "additionalItems": a} for a in AT_ONCE))
    ),
    "long patterns at once": Grammar.json_schema(
        _in_all_of(*({"type": "string", "pattern": f"{'(a|b)' * 100}{i}"} for i in range(3)))
    ),
    "joined in Lark": Grammar.lark("start: A\nA: " + " & ".join(f"/(.|\\n)*{i}(.|\\n)*/" for i in range(400))),
    "joined in Lark, one within the other": Grammar.lark(
        'start: /x/ C\nA: /.*a.{5}/ & /.*b.{5}/\nB: (A "p") & (A "q")\nC: (B "r") & (B "s") # none'
    ),
    "very many names that are required": Grammar.json_schema(
        {"type": "object", "required": [f"p{i}" for i in range(10_000)]}
    ),
    "very many rules": Grammar.lark(
        "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1} | r{i + 1}\n" for i in range(4000)) + 'r4000: "a"|'
    ),
    "very many names": Grammar.json_schema(
        {"type": "object", "properties": {f"p{i}": {} for i in range(3000)}, "required": [f"p{i}" for i in range(3000)]}
    ),
}


@pytest.mark.parametrize("num_patterns", [2, 3, 4])
def test_as_many_characters_as_the_refusal_tells_are_let_in(num_patterns):
    """Fault: 299 are told where the page tells 300, and 300 pass."""
    with pytest.raises(UserError, match=r"; \d+ characters of") as caught:
        grammar_joint._check(num_patterns, 10_000, "tools")
    told = int(caught.value.message.rpartition("; ")[2].split()[0])
    assert told == {2: 2000, 3: 300, 4: 126}[num_patterns]
    grammar_joint._check(num_patterns, told, "tools")
    with pytest.raises(UserError):
        grammar_joint._check(num_patterns, told + 1, "tools")


@pytest.mark.parametrize("name", COSTLY)
def test_a_grammar_that_would_take_seconds_is_refused_with_what_to_do(name):
    """O4's spirit: one of them took minutes to compile, others seconds for each token of all rows."""
    with llm_of() as llm:
        for prompt in ("x", "x<think>"):
            with pytest.raises(UserError, match=r"^response_format ") as caught:
                llm.stream(prompt, grammar=COSTLY[name])
            assert caught.value.remedy
        assert llm.generate("x", max_tokens=2).finish_reason == "length"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 1e6},
        {"type": "integer", "multipleOf": 1_000_000},
        _in_all_of(*STEPS[:2]),
        {"type": "object", "properties": {f"p{i}": {"type": "integer", "multipleOf": 60} for i in range(200)}},
        {"type": "object", "patternProperties": {f"^{chr(97 + i)}.*$": {"type": "null"} for i in range(26)}},
        {"type": "string", "minLength": 2000, "maxLength": 100_000},
        {"type": "array", "items": {"type": "integer"}, "minItems": 1000, "maxItems": 1_000_000},
        {"enum": [f"{i:x}" for i in range(5000)]},
        {"anyOf": [{"type": "object", "properties": {"kind": {"const": i}}, "required": ["kind"]} for i in range(200)]},
        _in_all_of(*AT_ONCE[:2]),
        {"type": "object", "properties": {f"p{i}": AT_ONCE[i % 20] for i in range(200)}},
        {"anyOf": AT_ONCE[:4]},
        {"allOf": [{"properties": {f"p{i}": AT_ONCE[i]}} for i in range(20)]},
        {"type": "object", "properties": {"multipleOf": {"const": 7}, "properties": {"type": "integer"}}},
    ],
)
def test_large_schemas_of_an_ordinary_kind_are_within_the_limits(schema):
    guide = GRAMMARS_OF_TOKENS.guide("closed", Grammar.json_schema(schema))
    rng = random.Random(2)
    for _ in range(20):
        token_id = rng.choice([i for i in allowed(guide) if i != EOS] or [EOS])
        ended = guide.push(token_id)
        assert guide.error is None
        if ended or token_id == EOS:
            break


@pytest.mark.parametrize("start", ["closed", "open"])
def test_errors_about_the_schema_of_a_tool_name_the_tool(start):
    fine = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for style, name in ((Style("json"), "weather"), (Style("xml"), "weather.a")):
        for bad, complaint in (
            ({"allOf": AT_ONCE}, "20 patterns"),
            ({"type": "array", "uniqueItems": True}, "uniqueItems"),
            ({"type": "integer", "multipleOf": 20011}, "multipleOf"),
        ):
            schemas = {"clock": fine, "weather": {"type": "object", "properties": {"a": bad}}}
            tools = [
                {"type": "function", "function": {"name": name, "strict": True, "parameters": schema}}
                for name, schema in schemas.items()
            ]
            with pytest.raises(UserError, match=rf"^tools: the schema for {name} .*{complaint}"):
                GRAMMARS_OF_TOKENS.guide(start, Grammar.for_tools(tools, "required", True, style))


@pytest.mark.parametrize(
    ("schema", "remedy"),
    [
        ({"oneOf": [{"type": "object"}, {"type": "object", "properties": {"a": {}}}]}, "anyOf"),
        ({"type": "number", "multipleOf": 0.0007}, "0.0005"),
    ],
)
def test_what_is_refused_is_told_in_words_of_what_a_request_can_change(schema, remedy):
    with pytest.raises(UserError, match=r"^response_format cannot be enforced") as caught:
        GRAMMARS_OF_TOKENS.guide("closed", Grammar.json_schema(schema))
    assert remedy in caught.value.remedy
    assert "coerce" not in str(caught.value) and "70000" not in str(caught.value)


def test_patterns_are_counted_where_they_meet():
    """Each pair of alternatives by itself, and what stands beside each other not at all."""
    some = AT_ONCE[: MAX_AT_ONCE // 2 + 1]
    apart = {"anyOf": [{"properties": {"a": {"allOf": some}}}, {"properties": {"b": {"allOf": some}}}]}
    met = {"allOf": [{"properties": {"a": {"allOf": some}}}, {"properties": {"a": {"allOf": AT_ONCE[-3:]}}}]}
    assert check_at_once(apart, "x")
    with pytest.raises(UserError, match=r"^x has 6 patterns"):
        check_at_once(met, "x")
    tree = {"$ref": "#/$defs/n", "$defs": {"n": {"properties": {"v": AT_ONCE[0], "l": {"$ref": "#"}}}}, "x": AT_ONCE}
    assert not check_at_once(tree, "x")


def test_a_schema_that_combines_in_too_many_ways_is_refused():
    """Each place is a product of alternatives here."""
    parts = [{"anyOf": [{"properties": {f"p{i}": AT_ONCE[j]}} for j in range(4)]} for i in range(12)]
    with pytest.raises(UserError, match=r"^x has a schema whose parts combine in too many ways"):
        check_at_once({"allOf": parts}, "x")


@pytest.mark.parametrize(
    ("rules", "is_joined"),
    [
        ('start: A " & " /a&b&c~d/ // & & & & &\nA: /[/]x/ # & & & & &', False),
        ('start: A~3..5 "\\" & & & &"\nA: "x"', False),
        ('start: A\nA: /[a-z]+/ & ~KEYWORD\nKEYWORD: "if" | "then"', True),
        ("start: " + " ".join(f"T{i}" for i in range(9)) + "".join(f"\nT{i}: /a/ & ~/b/" for i in range(9)), True),
    ],
)
def test_joins_of_lark_are_counted_and_what_looks_like_them_is_not(rules, is_joined):
    assert check_joined(rules, "x") == is_joined


@pytest.fixture(scope="module")
def trials() -> Trials:
    return Trials(TokenTable([bytes([i]) for i in range(256)] + [b"<end>"], [256], [256]))


def test_a_trial_ends_what_never_would(trials):
    """Past all counting: this one would take all memory first, and then not end."""
    endless = "start: A\nA: " + " & ".join(f"/(.|\\n)*{i}(.|\\n)*/" for i in range(400))
    assert trials.passes('start: "a"')
    assert not trials.passes(endless)
    assert trials.passes("start: no such rule")
    trials._connection.close()
    assert trials.passes('start: "a"'), "a process that has ended is started anew"


def test_trials_take_few_of_the_threads(trials):
    for _ in range(MAX_WAITING):
        assert trials._places.acquire(blocking=False)
    with pytest.raises(Busy, match="again in a few seconds"):
        trials.passes('start: "a"')
    for _ in range(MAX_WAITING):
        trials._places.release()
    assert trials.passes('start: "a"')


def test_grammars_are_tried_once_and_only_if_they_are_not_cheap(monkeypatch):
    tried = []
    monkeypatch.setattr(Trials, "passes", lambda self, text: tried.append(text) or "endless" not in text)
    grammars = Grammars(TOKENS, VOCAB, (EOS,))
    for _ in range(2):
        assert grammars.guide("closed", Grammar.json_schema({"type": "array", "items": AT_ONCE[0]}))
    assert not tried
    for _ in range(2):
        assert grammars.guide("closed", Grammar.json_schema({"enum": [f"{i:x}" for i in range(1000)]}))
    assert len(tried) == 1
    for _ in range(2):
        with pytest.raises(UserError, match=r"^response_format .*too complex to compile\. Simplify"):
            grammars.guide("closed", Grammar.json_schema({"enum": ["endless" * 1000]}))
    assert len(tried) == 2


# What llguidance does not end at its limits, and where it is met.
HIDDEN = "(((a[a-m]|[^b]a\\p{L}|[^a]x)){13,21}){20,24}"
ENDLESS = {
    "compiling": Grammar.lark(f"start: A\nA: /{HIDDEN}/ & /(.|\\n){{17,195}}/"),
    "a pattern and a length": Grammar.json_schema({"type": "string", "pattern": f"^{HIDDEN}$", "minLength": 17}),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_joins_patterns_ends_in_time_wherever_it_becomes_too_much(name):
    """Found at random: two patterns that cost seconds, or no end of them, though each alone is harmless."""
    before = set(threading.enumerate())
    try:
        guide = GRAMMARS_OF_TOKENS.guide("closed", ENDLESS[name])
    except UserError as error:
        assert error.remedy
    else:
        while guide.error is None and not guide.push(next(iter(allowed(guide)), EOS)):
            pass
    assert set(threading.enumerate()) == before


def test_an_answer_by_joined_patterns_is_the_same_with_drafts_and_beside_others():
    """It is held in another process, without drafts; its neighbours have theirs."""
    joined = Grammar.lark('start: A "!"\nA: /[a-z]{3,20}/ & ~/(.|\\n)*(q|z)(.|\\n)*/')
    ordinary = Grammar.regex("[a-z]{30}")
    told = []
    for drafter in (None, ScriptedDrafter(lambda request, width: ids_of("abcdefgh")[:width])):
        with llm_of(0, drafter, max_rows=4) as llm:
            for grammars in ([joined], [joined, ordinary, joined]):
                streams = [llm.stream("x", grammar=g, max_tokens=50, temperature=1.0, seed=3) for g in grammars]
                texts = ["".join(chunk.text for chunk in stream) for stream in streams]
                told += [text for text, g in zip(texts, grammars, strict=True) if g is joined]
    assert len(set(told)) == 1
    assert re.fullmatch("[a-pr-y]{3,20}!", told[0])


def test_a_process_that_holds_a_grammar_ends_with_its_answer(trials):
    held = trials.hold("start: A\nA: /a+/ & ~/aa/")
    assert held.compute_bitmask() and held.consume_token(ord("a")) and not held.is_error()
    assert trials.hold("start: none").get_error()
    others = [trials.hold('start: "ab"') for _ in range(MAX_HELD - 1)]
    with pytest.raises(Busy, match="are being written"):
        trials.hold('start: "ab"')
    assert all(other.consume_token(ord("a")) and not other.is_stopped() for other in others)
    del held, others
    matchers = [trials.hold('start: "ab"') for _ in range(MAX_HELD)]
    assert matchers[0].consume_token(ord("a")) and matchers[0].consume_token(ord("b")) and matchers[0].is_stopped()
    matchers[1]._connection.close()
    assert not matchers[1].consume_token(ord("a")) and "too complex" in matchers[1].get_error()

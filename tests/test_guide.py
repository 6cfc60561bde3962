"""A guide follows one answer: it goes back after drafts, forces the end of reasoning, refuses what cannot be."""

import copy
import json
import random
import threading
from types import SimpleNamespace

import jsonschema
import pytest
import torch

from lampejo.answer import Style
from lampejo.answer_parser import AnswerParser
from lampejo.errors import UserError
from lampejo.grammar import Grammar
from lampejo.grammar_compiler import MAX_CHARS, Grammars
from lampejo.guide import Guide
from lampejo.request import StopParams
from scripted import EOS, VOCAB, answering, knowing, lively_pair, scripted_llm
from test_answer import calls_of, merged
from test_grammar import GRAMMARS, SAMPLED, TOKENS, ids, llm_of, random_schema
from tiny import TINY, TINY_HYBRID, ScriptedDrafter, make_engine, make_request, prompt_of, run

GRAMMARS_OF_TOKENS = Grammars(TOKENS, VOCAB, (EOS,))
END = TOKENS.encode("\n</think>\n\n")


def allowed(guide: Guide) -> list[int]:
    masks = guide.masks([])
    return torch.arange(VOCAB)[masks[0]].tolist() if masks and masks[0] is not None else list(range(VOCAB))


@pytest.mark.parametrize("start", ["closed", "open", "maybe"])
@pytest.mark.parametrize("name", GRAMMARS)
def test_a_guide_goes_back_to_what_was_committed(name, start):
    """S2: whatever was drafted in between, it allows what one allows that has seen the committed tokens alone."""
    rng = random.Random(7)
    for _ in range(3):
        guide = GRAMMARS_OF_TOKENS.guide(start, GRAMMARS[name], 6)
        committed: list[int] = []
        for _ in range(40):
            drafts = [rng.choice(allowed(guide))]  # a right first one, so that there is something to go back from
            drafts += [rng.randrange(VOCAB) for _ in range(rng.randint(0, 6))]
            kept = guide.cut(drafts)
            masks = guide.masks(kept)
            assert drafts[: len(kept)] == kept
            assert not masks or len(masks) == len(kept) + 1
            fresh = GRAMMARS_OF_TOKENS.guide(start, GRAMMARS[name], 6)
            assert not any(fresh.push(token_id) for token_id in committed)
            assert allowed(fresh) == allowed(guide)
            for j, token_id in enumerate(kept):
                assert not masks or masks[j] is None or masks[j][token_id]
                fresh.push(token_id)
                after = torch.arange(VOCAB)[masks[j + 1]].tolist() if masks and masks[j + 1] is not None else None
                assert after in (None, allowed(fresh))
            committed.append(rng.choice(allowed(guide)))
            if guide.push(committed[-1]) or committed[-1] == EOS:
                break


def test_drafts_are_cut_before_what_is_refused_and_before_the_end():
    guide = GRAMMARS_OF_TOKENS.guide("closed", Grammar.regex("a[bc]+d"))
    assert guide.cut(ids("abcbx")) == ids("abcb")
    assert guide.cut(ids("xab")) == []
    assert guide.cut(ids("abd")) == ids("ab"), "the target says the last token itself"
    assert guide.cut([*ids("ab"), EOS]) == ids("ab")
    assert [guide.push(token_id) for token_id in ids("abd")] == [False, False, True]


def test_reasoning_ends_and_the_json_begins_inside_one_block():
    """S3: one token holds the end of the tag and the beginning of the JSON, and a draft spans both."""
    texts = ["I think</thin", 'k>{"kind": 7}']
    answer = [token_id for text in texts for token_id in ids(text)]
    assert ids("k>")[0] in answer
    prompt = ids("<think>")
    params = {"grammar": GRAMMARS["schema"], "max_tokens": 100}
    for drafters in ([], [knowing(answer)]):
        with scripted_llm(answering(len(prompt), answer), drafters, TOKENS, width=15) as llm:
            llm.style = Style("json", thinks=True)
            done = llm.generate(prompt, **params)
            assert done.text == "".join(texts)
            assert done.finish_reason == "stop"
            if drafters:
                assert max(i for i, n in enumerate(done.speculation["acceptance_histogram"]) if n) == 15
    straddling = ids("o</thin") + ids("k") + ids('>\n{"')
    assert len(straddling) == len("o</think") + 1
    guide = GRAMMARS_OF_TOKENS.guide("open", GRAMMARS["schema"])
    assert guide.cut([*straddling, *ids("kind")]) == [*straddling, *ids("kind")]
    assert guide.cut([*straddling, *ids("kinx")]) == [*straddling, *ids("kin")]


def test_the_end_of_reasoning_must_come_before_an_answer_may_end():
    guide = GRAMMARS_OF_TOKENS.guide("open", GRAMMARS["regex"])
    assert EOS not in allowed(guide)
    for token_id in [*ids("hm"), ids("</think>")[0]]:
        guide.push(token_id)
    assert {TOKENS.decode([i]) for i in allowed(guide)} >= {" ", "\n", "y", "n", "0"}
    assert ids("</think>")[0] not in allowed(guide)


@pytest.mark.parametrize(
    ("grammar", "complaint"),
    [
        ({"type": "string", "pattern": "(?=a)b"}, "look"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "no such type"}, "no such type"),
        ({"$ref": "#/nowhere"}, "nowhere"),
        ({"$ref": "https://example.com/schema"}, "example.com"),
        ({"$ref": "#"}, "nothing"),
        (False, "false"),
        (Grammar.regex("(a"), "unclosed"),
        (Grammar.regex(r"(a)\1"), "backreference"),
        (Grammar.regex("ï"), "nothing"),
        (Grammar.lark('begin: "a"'), "start"),
        (Grammar.lark("start: other"), "other"),
        (Grammar.lark('start: start "a"'), "nothing"),
        (Grammar.lark("start: " + "(" * 50_000 + '"a"' + ")" * 50_000), "nested"),
        (Grammar.lark("start: " + '"a" ' * MAX_CHARS), "characters"),
    ],
)
def test_a_grammar_that_cannot_be_enforced_is_refused_before_any_work(grammar, complaint):
    """S4."""
    grammar = grammar if isinstance(grammar, Grammar) else Grammar.json_schema(grammar)
    with llm_of() as llm:
        for prompt in ("x", "x<think>"):
            with pytest.raises(UserError, match=f"(?is)^response_format.*{complaint}"):
                llm.stream(prompt, grammar=grammar)
        assert llm.generate("x", max_tokens=2).finish_reason == "length"


def test_an_answer_whose_grammar_becomes_too_costly_ends_alone():
    """It is let in, since its first tokens cost little."""
    costly = Grammar.regex("((a{0,1000}){0,1000}){0,1000}")
    with scripted_llm(lambda text: ids("a")[0], [], TOKENS, max_rows=4) as llm:
        neighbour = llm.stream("y", max_tokens=50)
        next(neighbour)
        stream = llm.stream("x", grammar=costly, max_tokens=50)
        with pytest.raises(UserError, match=r"too many.*Simplify the grammar"):
            for chunk in stream:
                assert chunk.text == "a"
        assert [*neighbour][-1].finish_reason == "length"
        llm.engine.pool.check_integrity()


def test_a_lexer_that_one_answer_has_filled_up_is_made_anew_for_the_next():
    grammars = Grammars(TOKENS, VOCAB, (EOS,))
    grammar = Grammar.regex("((a{0,1000}){0,1000}){0,1000}")
    for _ in range(2):
        guide = grammars.guide("closed", grammar)
        allowed(guide)
        guide.push(ids("a")[0])
        while guide.error is None:
            allowed(guide)
            guide.push(ids("a")[0])
        assert "too many" in guide.error


def test_a_schema_nested_as_deeply_as_can_be_is_refused_as_a_mistake():
    """S4: wherever in the way of a schema Python's recursion ends."""
    complaints = set()
    schema: dict = {"type": "integer"}
    for depth in range(1100):
        schema = {"type": "array", "items": schema}
        if depth > 900 or depth == 130:
            with pytest.raises(UserError, match=r"^response_format ") as caught:
                GRAMMARS_OF_TOKENS.guide("open", Grammar.json_schema(schema))
            complaints.add(str(caught.value)[:40])
    assert len(complaints) > 1


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"type": "yaml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json_schema", "json_schema": {"schema": 3}},
        {"type": "regex"},
        {"type": "regex", "pattern": 3},
        {"type": "grammar", "grammar": " "},
        "json_object",
    ],
)
def test_a_response_format_that_says_nothing_is_refused(value):
    with pytest.raises(UserError, match=r"^response_format "):
        Grammar.for_response_format(value)


def test_response_formats_of_openai():
    assert Grammar.for_response_format(None) is None
    assert Grammar.for_response_format({"type": "text"}) is None
    schema = {"type": "integer"}
    expected = Grammar.json_schema(schema)
    assert Grammar.for_response_format({"type": "json_schema", "json_schema": {"schema": schema}}) == expected
    assert Grammar.for_response_format({"type": "json_schema", "name": "x", "schema": schema}) == expected
    assert Grammar.for_response_format({"type": "json_object"}) == Grammar.json_schema({"type": "object"})
    assert Grammar.for_response_format({"type": "regex", "pattern": "a"}) == Grammar.regex("a")
    assert Grammar.for_response_format({"type": "grammar", "grammar": 'start: "a"'}) == Grammar.lark('start: "a"')


@pytest.mark.parametrize("kind", ["rules", "references"])
def test_a_long_chain_of_rules_does_not_end_the_process(kind):
    """O4's spirit: llguidance compiles recursively, and a stack that is too small takes the whole server with it."""
    num = 5000
    if kind == "rules":
        chain = "".join(f"r{i}: r{i + 1}\n" for i in range(num))
        grammar = Grammar.lark(f'start: r0\n{chain}r{num}: "a"')
    else:
        chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(num)}
        grammar = Grammar.json_schema({"$ref": "#/$defs/a0", "$defs": {**chain, f"a{num}": {"const": 1}}})
    guides = []
    thread = threading.Thread(target=lambda: guides.append(GRAMMARS_OF_TOKENS.guide("closed", grammar)))
    thread.start()
    thread.join()
    assert [TOKENS.decode([i]) for i in allowed(guides[0])] == ["a" if kind == "rules" else "1"]
    assert threading.stack_size() == 0


def test_an_answer_that_gets_stuck_ends_alone_with_an_error():
    """No token of this vocabulary goes on after "a": that shows when it comes, and costs no other answer anything."""
    with llm_of(max_rows=4) as llm:
        stuck, fine = Grammar.regex("(a|b)ï"), Grammar.regex("(a|b)+")
        with pytest.raises(UserError, match="cannot go on by its grammar"):
            llm.generate(["x", "y"], grammar=stuck, max_tokens=5)
        assert set(llm.generate("x", grammar=fine, max_tokens=9).text) <= set("ab")
        llm.engine.pool.check_integrity()
        assert not llm.engine.has_work


@pytest.mark.parametrize("drafts", [[], ids("aaaaaaa")], ids=["plain", "drafted"])
def test_the_end_of_a_grammar_goes_before_min_tokens(drafts):
    """Fault: EOS masked by min_tokens and everything else by the grammar leaves nothing to choose."""
    with scripted_llm(lambda text: ids("a")[0], [knowing(drafts)], TOKENS, width=4) as llm:
        done = llm.generate("x", grammar=Grammar.regex("a{3}"), min_tokens=9)
        assert (done.text, done.finish_reason, len(done.ids)) == ("aaa", "stop", 3)
        done = llm.generate("x", grammar=Grammar.lark('start: "a" "a"? '), min_tokens=1, ignore_eos=True)
        assert (done.text, done.finish_reason) == ("aa", "stop")


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("budget", [0, 1, 5, 30])
def test_reasoning_ends_at_its_budget_whatever_is_drafted(budget, sampling):
    """The end is a part of the target's choice: the same with right, wrong and no drafts."""
    prompt, params = ids("a<think>"), {"thinking_budget": budget, "max_tokens": 60, "ignore_eos": True, **sampling}
    with llm_of(5, thinks=True) as llm:
        plain = llm.generate(prompt, **params).ids
    num_before = next(i for i in range(len(plain) + 1) if "</think>" in TOKENS.decode(plain[:i]))
    assert num_before <= budget + len(END) - 2
    assert num_before <= budget or plain[budget : budget + len(END)] == END
    for drafter in (knowing(plain, 7), knowing([EOS] * 60, 7), knowing(plain[:3] + [9] * 60, 7)):
        with llm_of(5, drafter, thinks=True) as llm:
            assert llm.generate(prompt, **params).ids == plain


def test_a_budget_waits_for_the_end_of_a_character():
    """Fault: a tag in the midst of a character's bytes."""
    pieces = [b"", b"<e>", "é".encode()[:1], "é".encode()[1:], b"a", b"</think>"]
    tokens = SimpleNamespace(
        piece=pieces.__getitem__,
        token_text=lambda i: SimpleNamespace(bytes=pieces[i]),
        encode=lambda text, add_special_tokens: [4, 5],
        decode=lambda ids: "a</think>",
        vocab_size=6,
        special_ids={0, 1},
    )
    guide = Grammars(tokens, 6, (1,)).guide("open", None, 1)  # type: ignore[arg-type]
    assert guide.masks([]) == []
    guide.push(2)
    assert guide.masks([]) == []
    guide.push(3)
    assert [mask.tolist() for mask in guide.masks([4])] == [  # type: ignore[union-attr]
        [False, False, False, False, True, False],
        [False, False, False, False, False, True],
    ]
    assert guide.cut([4, 4, 5]) == [4]


def test_budgets_and_grammars_of_a_wrong_kind_are_refused():
    with llm_of() as llm:
        for params in ({"thinking_budget": -1}, {"thinking_budget": 1.5}, {"thinking_budget": True}):
            with pytest.raises(UserError, match="thinking_budget"):
                llm.generate("x", **params)
        with pytest.raises(UserError, match="grammar"):
            llm.generate("x", grammar={"type": "object"})


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "unit": {"enum": ["C", "F"]},
                "days": {"$ref": "#/$defs/days"},
                "city": {"type": "string"},
            },
            "required": ["unit", "days"],
            "additionalProperties": False,
            "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}


def tool_answers(style: Style, tool_choice, parallel: bool) -> list[list[tuple]]:
    """Events of whimsical answers, those that max_tokens cut left out."""
    weather = copy.deepcopy(WEATHER)
    if style.tools == "xml":  # text up to a tag that whimsy never writes
        del weather["function"]["parameters"]["properties"]["city"]
    tools = [weather, CLOCK]
    grammar = Grammar.for_tools(tools, tool_choice, parallel, style)
    found = []
    with llm_of(8) as llm:
        for i in range(6):
            done = llm.generate(f"{i}", grammar=grammar, max_tokens=350, temperature=0.7, seed=i)
            if done.finish_reason == "stop":
                parser = AnswerParser("closed", tools)
                found.append(merged(parser.push(done.text) + parser.finish()))
    return found


@pytest.mark.parametrize("parallel", [True, False], ids=["parallel", "one"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("style", [Style("json"), Style("xml")], ids=["json", "xml"])
def test_required_tools_are_called_with_arguments_by_their_schemas(style, choice, parallel):
    answers = tool_answers(style, choice, parallel)
    assert len(answers) > 2
    for events in answers:
        assert not [event for event in events if event[0] == "Content"]
        calls = calls_of(events)
        assert calls
        assert len(calls) == 1 or (parallel and choice == "required")
        for name, arguments in calls:
            if name == "weather":
                assert arguments["unit"] in ("C", "F")
                assert arguments["days"] in range(1, 10)
                assert set(arguments) <= {"unit", "days", "city"}
                assert isinstance(arguments.get("city", ""), str)
            else:
                assert (name, arguments, choice) == ("clock", {}, "required")


@pytest.mark.parametrize("style", [Style("json"), Style("xml")], ids=["json", "xml"])
@pytest.mark.parametrize("parallel", [True, False], ids=["parallel", "one"])
def test_auto_leaves_text_free_and_binds_calls(style, parallel):
    """Text goes on as it likes, up to a tag; then there is nothing but a call."""
    tools = [WEATHER, CLOCK]
    guide = GRAMMARS_OF_TOKENS.guide("closed", Grammar.for_tools(tools, "auto", parallel, style))
    tag = ids("<tool_call>\n")
    for token_id in ids("I < see. "):
        assert EOS in allowed(guide)
        guide.push(token_id)
    assert tag[0] in allowed(guide)
    assert not guide.push(tag[0])
    assert EOS not in allowed(guide)
    text = {
        "json": '{"name": "weather", "arguments": {"unit": "C", "days": 3}}\n</tool_call>',
        "xml": "<function=weather>\n<parameter=unit>\nC\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "<parameter=city>\nA <b>\n</parameter>\n</function>\n</tool_call>",
    }[str(style.tools)]
    ended = [guide.push(token_id) for token_id in ids(text)]
    assert guide.error is None
    assert ended == [*[False] * (len(ended) - 1), not parallel]
    if parallel:
        assert {EOS, tag[0]} <= set(allowed(guide))


def test_a_choice_of_tools_that_asks_for_nothing_needs_no_grammar():
    style = Style("json")
    assert Grammar.for_tools([CLOCK], "auto", True, style) is None
    assert Grammar.for_tools([CLOCK], "none", False, style) is None
    assert Grammar.for_tools([], "auto", False, style) is None
    assert Grammar.for_tools([CLOCK], "auto", False, style) is not None
    assert Grammar.for_tools([WEATHER], "auto", True, style) is not None


@pytest.mark.parametrize(
    ("tools", "choice", "style", "complaint"),
    [
        ([CLOCK], {"type": "function", "function": {"name": "nope"}}, Style("json"), "tool_choice"),
        ([CLOCK], "always", Style("json"), "tool_choice"),
        ([], "required", Style("json"), "tool_choice"),
        ([CLOCK], "required", Style(None), "tools"),
    ],
)
def test_a_choice_of_tools_that_cannot_be_is_refused(tools, choice, style, complaint):
    with pytest.raises(UserError, match=f"^{complaint} "):
        Grammar.for_tools(tools, choice, True, style)


def test_what_of_a_strict_function_cannot_be_enforced_is_refused():
    """And let be where the function is not strict."""
    for style, schema in (
        (Style("json"), {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}),
        (Style("xml"), {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}}),
    ):
        function = {"name": "f", "strict": True, "parameters": schema}
        with pytest.raises(UserError, match=r"^tools.* f\b"):
            GRAMMARS_OF_TOKENS.guide(
                "closed", Grammar.for_tools([{"type": "function", "function": function}], "required", True, style)
            )
        function = {**function, "strict": False}
        grammar = Grammar.for_tools([{"type": "function", "function": function}], "required", True, style)
        assert GRAMMARS_OF_TOKENS.guide("closed", grammar).error is None
    assert json.loads(Grammar.json_object().body)


@pytest.mark.parametrize("config", [TINY, TINY_HYBRID], ids=["attention", "recurrent"])
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_model_of_layers_with_its_drafter_keeps_to_grammars_exactly(config, sampling):
    """S1, S2: rows with and without grammars side by side, states of recurrent layers included."""
    target, drafter = lively_pair(config, quick=True)
    rng = random.Random(3)
    schemas = [random_schema(rng) for _ in range(10)]

    def answers(**engine) -> list[list[int]]:
        requests = []
        for i, schema in enumerate(schemas):
            requests.append(make_request(prompt_of(9 + i, i), StopParams(max_tokens=300), **sampling))
            if i % 5:
                requests[-1].guide = GRAMMARS_OF_TOKENS.guide("closed", Grammar.json_schema(schema))
        found = run(make_engine(target, max_rows=4, max_context=600, **engine), requests)
        for request, schema in zip(requests, schemas, strict=True):
            if request.guide is not None and request.finish_reason == "stop":
                jsonschema.validate(json.loads(TOKENS.decode(request.output_ids)), schema)
        assert sum(request.finish_reason == "stop" for request in requests if request.guide) > 5
        return found

    plain = answers()
    assert answers(drafter=drafter, dflash=True, width=6) == plain
    truth = {tuple(prompt_of(9 + i, i)): answer for i, answer in enumerate(plain)}
    script = ScriptedDrafter(
        lambda request, width: [
            t if rng.random() < 0.85 else 9 for t in truth[tuple(request.prompt_ids)][request.num_output :][:width]
        ]
    )
    assert answers(drafters=[script], width=6) == plain

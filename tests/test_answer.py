"""The text of an answer taken apart: whatever pieces it comes in, and whatever the model writes."""

import json
import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lampejo.answer import (
    Content,
    Event,
    Reasoning,
    Style,
    ThoughtCounter,
    ToolArguments,
    ToolStart,
    start_of,
    style_of,
)
from lampejo.answer_parser import AnswerParser

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "limits": {"type": "array", "items": {"type": "number"}},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                },
            },
        },
    }
]
HERMES = """<tool_call>
{"name": "weather", "arguments": {"city": "Bel\\u00e9m \\"x\\" </tool_call>", "days": 2}}
</tool_call>"""
CODER = """<tool_call>
<function=weather>
<parameter=city>
São Paulo
"centro" <b>
</parameter>
<parameter=days>
2
</parameter>
<parameter=exact>
True
</parameter>
<parameter=limits>
[1, 2.5]
</parameter>
<parameter=note>
null
</parameter>
</function>
</tool_call>"""


def merged(events: Sequence[Event]) -> list[tuple]:
    """Events without their pieces and ids."""
    out: list[tuple] = []
    for event in events:
        if isinstance(event, Content | Reasoning | ToolArguments):
            key = (type(event).__name__, getattr(event, "index", None))
            assert event.text, "an empty event"
            if out and out[-1][:2] == key:
                out[-1] = (*key, out[-1][2] + event.text)
            else:
                out.append((*key, event.text))
        elif isinstance(event, ToolStart):
            assert re.fullmatch(r"call_\w{10,}", event.id)
            out.append(("ToolStart", event.index, event.name))
        else:
            out.append(("ToolEnd", event.index))
    return out


def parsed(pieces: Sequence[str], start="closed", tools=TOOLS) -> list[tuple]:
    parser = AnswerParser(start, tools)
    events = [event for piece in pieces for event in parser.push(piece)]
    return merged(events + parser.finish())


def calls_of(events: Sequence[tuple]) -> list[tuple]:
    """Name and arguments of each call, by index."""
    names = {event[1]: event[2] for event in events if event[0] == "ToolStart"}
    arguments = {event[1]: event[2] for event in events if event[0] == "ToolArguments"}
    assert [event[1] for event in events if event[0] == "ToolEnd"] == list(names)
    return [(names[i], json.loads(arguments[i])) for i in names]


HERMES_CALL = ("weather", {"city": 'Belém "x" </tool_call>', "days": 2})
CODER_CALL = (
    "weather",
    {"city": 'São Paulo\n"centro" <b>', "days": 2, "exact": True, "limits": [1, 2.5], "note": None},
)


@pytest.mark.parametrize(("text", "call"), [(HERMES, HERMES_CALL), (CODER, CODER_CALL)], ids=["json", "xml"])
@pytest.mark.parametrize("size", range(1, 17))
def test_a_call_in_pieces_of_any_size_has_the_same_name_and_arguments(text, call, size):
    """T5."""
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert calls_of(parsed(pieces)) == [call]


@pytest.mark.parametrize("text", [HERMES + "\n" + CODER, CODER + HERMES], ids=["json first", "xml first"])
def test_two_calls_in_one_piece_have_indices_0_and_1(text):
    """T5."""
    events = parsed([f"Both.\n{text}\n"])
    assert events[0] == ("Content", None, "Both.")
    assert {name for name, _ in calls_of(events)} == {"weather"}
    assert len(calls_of(events)) == 2
    assert [event for event in events if event[0] == "Content"] == events[:1], "white space around calls is no content"


def test_arguments_come_as_they_arrive():
    """Fault: a parser that waits for the end of the call."""
    for text, shown in ((HERMES, '{"city": "Bel'), (CODER, '{"city": "São Pau')):
        cut = text.index("\\u00e9") if text is HERMES else text.index("lo\n")
        parser = AnswerParser("closed", TOOLS)
        assert merged(parser.push(text[:cut]))[-1] == ("ToolArguments", 0, shown)


FRAGMENTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=weather>", "<function=", "</function>", ">", "<",
    "<parameter=city>", "<parameter=days>", "</parameter>", "\n", " ", "Hi", "é", "{", "}", '"', "\\", ",", ":",
    '{"name": "weather", "arguments": {"city": "x', '"}}', '{"name": "weather"}', '"name"', "3", "[1]", "true",
    '{"arguments": {"a": [1, "</tool_call>"]}, "name": "f"}', HERMES, CODER,
]  # fmt: skip


@settings(max_examples=600, deadline=None)
@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join),
    st.sampled_from(["open", "maybe", "closed"]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_the_events_do_not_depend_on_where_the_pieces_end(text, start, has_tools, rng):
    """T3, T4: whatever the model writes, whatever the split. Reasoning comes first, calls are whole and counted."""
    tools = TOOLS if has_tools else []
    whole = parsed([text], start, tools)
    assert parsed(list(text), start, tools) == whole
    cuts = sorted(rng.sample(range(len(text) + 1), min(3, len(text) + 1)))
    pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(pieces, start, tools) == whole
    kinds = [event[0] for event in whole]
    assert "Reasoning" not in kinds[1:]
    bare = [event for event in whole if event[0] in ("ToolStart", "ToolEnd")]
    assert [event[:2] for event in bare] == [(k, i) for i in range(len(bare) // 2) for k in ("ToolStart", "ToolEnd")]
    if not tools and start == "closed":
        assert whole == ([("Content", None, text)] if text else [])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>\nnothing like a call\n</tool_call> after",
        '<tool_call>\n{"name": "weather", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "argum',
        '<tool_call>{"name": "weather", oops}</tool_call> and on',
        "<tool_call>\n<function=a\nb>x",
        "<function=>x</function>",
        "1 <function and 2 < 3 <tool",
    ],
)
def test_a_malformed_call_comes_out_as_content(text):
    """Nothing is lost."""
    assert parsed([text]) == [("Content", None, text)]


@pytest.mark.parametrize(
    ("text", "arguments", "content"),
    [
        ('<tool_call>{"arguments": {"city": "x"}, "name": "weather"}</tool_call>', {"city": "x"}, None),
        ('<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"x\\"}"}</tool_call>', {"city": "x"}, None),
        ('<tool_call>{"name": "weather"}</tool_call>', {}, None),
        ('<tool_call>{"name": "weather", "arguments": {}, "id": "7"}</tool_call>', {}, None),
        ('<tool_call>{"name": "weather", "arguments": {}}', {}, None),
        ('<tool_call>{"name": "weather", "arguments": {}} or so</tool_call>', {}, "or so</tool_call>"),
        ("<function=weather></function>", {}, None),
        ("<function=weather>so: <parameter=days>1</parameter></function>!", {"days": 1}, "so:!"),
        ("<function=weather><parameter=days>one</parameter></function>", {"days": "one"}, None),
        ("<function=weather><parameter=city>12</parameter></function>", {"city": "12"}, None),
        ("<function=weather><parameter=city>\n\n</parameter></function>", {"city": ""}, None),
        ("<function=weather><parameter=new>12</parameter></tool_call>", {"new": "12"}, None),
        ("<function=weather><parameter=days>NaN</parameter></function>", {"days": "NaN"}, None),
        ("<function=weather><parameter=note>7</parameter></function>", {"note": "7"}, None),
        ("<function=weather><parameter=limits>[1</parameter></function>", {"limits": "[1"}, None),
    ],
)
def test_calls_that_models_write_a_little_wrong_are_calls_nevertheless(text, arguments, content):
    for pieces in ([text], list(text)):
        events = parsed(pieces)
        assert calls_of(events) == [("weather", arguments)]
        assert "".join(event[2] for event in events if event[0] == "Content") == (content or "")


@pytest.mark.parametrize("text", [HERMES, CODER], ids=["json", "xml"])
def test_an_answer_cut_inside_a_call_gives_a_beginning_of_its_arguments(text):
    """Every cut: arguments so far are a prefix of the whole, and the call ends."""
    whole = next(event[2] for event in parsed([text]) if event[0] == "ToolArguments")
    for cut in range(len(text)):
        events = parsed([text[:cut]])
        names = [event for event in events if event[0] == "ToolStart"]
        if not names:
            assert events == ([("Content", None, text[:cut])] if cut else [])
            continue
        assert events[-1] == ("ToolEnd", 0)
        given = "".join(event[2] for event in events if event[0] == "ToolArguments")
        assert whole.startswith(given)


@pytest.mark.parametrize(
    ("start", "text", "reasoning", "content"),
    [
        ("open", "\nWell.\n\nSo: 7\n</think>\n\nSeven.", "Well.\n\nSo: 7", "Seven."),
        ("maybe", "\n<think>\nWell.\n</think>\n\nSeven.\n", "Well.", "Seven.\n"),
        ("maybe", "<think>\n\n</think>\n\nSeven.", "", "Seven."),
        ("maybe", "\nSeven <think> of </think> nine", "", "\nSeven <think> of </think> nine"),
        ("closed", "<think>a</think>b", "", "<think>a</think>b"),
        ("open", "never done \n", "never done", ""),
        ("open", "a </think", "a </think", ""),
        ("maybe", " <thi", "", " <thi"),
        ("open", "<think>a</think>b</think>c", "<think>a", "b</think>c"),
    ],
)
def test_reasoning_is_told_from_content(start, text, reasoning, content):
    """T4."""
    for pieces in ([text], list(text)):
        events = parsed(pieces, start, [])
        assert "".join(event[2] for event in events if event[0] == "Reasoning") == reasoning
        assert "".join(event[2] for event in events if event[0] == "Content") == content


def test_a_call_inside_reasoning_is_reasoning():
    events = parsed([f"I could say {HERMES} now</think>\n{HERMES}"], "open")
    assert events[0] == ("Reasoning", None, f"I could say {HERMES} now")
    assert calls_of(events) == [HERMES_CALL]


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<th", "ink>", "</", "think>", "a", "é", "\n", " "]), max_size=10),
    st.sampled_from(["open", "maybe", "closed"]),
)
def test_every_token_of_reasoning_is_counted_once(tokens, start):
    """T4: tags included; a token that only may begin a tag counts when it is known that it does."""
    counter = ThoughtCounter(start)
    for i, token in enumerate(tokens):
        counter.push(token.encode())
        assert 0 <= counter.num_tokens <= i + 1
    text = "".join(tokens)
    if start == "closed" or (start == "maybe" and not text.lstrip().startswith("<think>")):
        assert counter.num_tokens == 0
        return
    ends = [i + 1 for i in range(len(tokens)) if "</think>" in "".join(tokens[: i + 1])]
    assert counter.num_tokens == (ends[0] if ends else len(tokens))


QWEN3 = "{% if tools %}<tool_call></tool_call>{% endif %}{% if not enable_thinking %}<think>\n\n</think>{% endif %}"


def test_the_style_is_read_from_the_template_and_the_start_from_the_prompt():
    assert style_of(QWEN3) == Style("json", thinks=True)
    assert style_of("<tool_call>\n<function=example>") == Style("xml", thinks=False)
    assert style_of("{{ messages }}") == style_of(None) == Style(None, thinks=False)
    thinking = Style("json", thinks=True)
    assert start_of("<|im_start|>assistant\n", thinking) == "maybe"
    assert start_of("<|im_start|>assistant\n<think>\n", thinking) == "open"
    assert start_of("<|im_start|>assistant\n<think>\n\n</think>\n\n", thinking) == "closed"
    assert start_of("What does <think>\n", Style()) == "closed"

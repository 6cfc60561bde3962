"""Chat templates: equal to transformers, in a sandbox, with clear errors."""

from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

import tokenizer_samples as samples
from lampejo import chat
from lampejo.chat import render_chat, validate_messages
from lampejo.errors import UserError
from lampejo.tokenizer import from_gguf

TOKENIZER = from_gguf(samples.gguf_metadata("qwen2"))
USER = [{"role": "user", "content": 'Olá <b> & "você"'}]

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# In the manner of Qwen2.5: tools in the system turn, calls and results as tagged JSON, whitespace control everywhere.
TOOLS_TEMPLATE = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'Be helpful.' }}
    {%- endif %}
    {{- "\\n\\n# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {%- set ns.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "system" and loop.first %}
        {%- continue %}
    {%- elif message.role == "user" or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson(indent=2) }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- raise_exception('Unexpected role ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

BLOCKS = """{# a comment #}
{% for m in messages %}
  {% generation %}
  {{ m.content | trim }} {{ loop.length }}{{ bos_token }}{{ eos_token }}
  {% endgeneration %}
  {% if loop.last %}
    {% break %}
  {% endif %}
{% endfor %}
{% set d = dict(a=1, b=[true, none, 'é<>&']) %}
{{ d | tojson }} {{ strftime_now('%Y') }} {{ [3, 1, 2] | sort | join(',') }} {{ d.items() | list | length }}
{% macro twice(x) %}{{ x * 2 }}{% endmacro %}{{ twice('ab') }} {{ 2 ** 3 }} {{ range(4) | list }}
"""

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "user": USER,
    "system": [{"role": "system", "content": "Seja breve."}, *USER],
    "turns": [*USER, {"role": "assistant", "content": "Oi!\n"}, {"role": "user", "content": "日本語 😀 '"}],
    "tool": [
        *USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "type": "function",
                    "function": {"name": "tempo", "arguments": {"cidade": "São Paulo", "n": [1, 2.5]}},
                },
                {"type": "function", "function": {"name": "hora", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": '{"graus": 21}'},
        {"role": "tool", "content": "12:00"},
    ],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "tempo",
            "description": 'O tempo <agora> & "depois"',
            "parameters": {"type": "object", "properties": {"cidade": {"type": "string"}}, "required": ["cidade"]},
        },
    }
]


def oracle() -> PreTrainedTokenizerFast:
    names = {name: TOKENIZER.special_tokens[name] for name in ("bos_token", "eos_token", "pad_token")}
    return PreTrainedTokenizerFast(tokenizer_object=Backend.from_str(TOKENIZER.backend.to_str()), **names)


@pytest.mark.parametrize("template", [SMOLLM2, TOOLS_TEMPLATE, BLOCKS], ids=["smollm2", "tools", "blocks"])
@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("prompted", [True, False])
def test_rendered_prompts_equal_transformers(
    template: str, name: str, tools: list[dict[str, Any]] | None, prompted: bool
) -> None:
    """Fault: whitespace control, JSON escapes or special tokens that differ from what the model was trained on."""
    messages = CONVERSATIONS[name]
    theirs = oracle().apply_chat_template(
        messages, chat_template=template, tools=tools, add_generation_prompt=prompted, tokenize=False
    )
    assert render_chat(template, messages, TOKENIZER, add_generation_prompt=prompted, tools=tools) == theirs


def test_template_kwargs_reach_the_template() -> None:
    """Fault: ``enable_thinking`` lost on its way."""
    on, off = (render_chat(TOOLS_TEMPLATE, USER, TOKENIZER, enable_thinking=value) for value in (True, False))
    assert off == on + "<think>\n\n</think>\n\n"
    assert off == oracle().apply_chat_template(
        USER, chat_template=TOOLS_TEMPLATE, add_generation_prompt=True, tokenize=False, enable_thinking=False
    )


def test_a_rendered_prompt_encodes_to_special_ids() -> None:
    """Fault: the template's markers encoded as text."""
    ids = TOKENIZER.encode(render_chat(SMOLLM2, USER, TOKENIZER), add_special_tokens=False)
    assert ids.count(1) == 3
    assert ids.count(2) == 2


@pytest.mark.parametrize("template", [None, ""])
def test_a_model_without_a_template_is_named(template: str | None) -> None:
    """Fault: messages joined by guesswork for base models."""
    with pytest.raises(UserError, match="no chat template") as caught:
        render_chat(template, USER, TOKENIZER)
    assert "raw prompt" in caught.value.remedy


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% if %}", "line 1"),
        ("ok\n{{ x", "line 2"),
        ("{{ raise_exception('Roles must alternate.') }}", "Roles must alternate"),
        ("{{ nothing.here }}", "'nothing' is undefined"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ messages | nofilter }}", "nofilter"),
        ("{% include 'other' %}", "loader"),
        ("{{ messages[0].content | tojson(separators=1) }}", "TypeError"),
    ],
)
def test_a_failing_template_gives_its_message(template: str, words: str) -> None:
    """Fault: a traceback of jinja, or an empty prompt."""
    with pytest.raises(UserError, match=words) as caught:
        render_chat(template, USER, TOKENIZER)
    assert caught.value.remedy


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append({}) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages[0].pop('role') }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ ''|attr('__class__')|attr('__mro__') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__ }}",
        "{{ (messages|attr('append'))(1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns.__class__.__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ (['{0.__class__.__mro__}']|map(attribute='format')|first)(1) }}",
        "{{ lipsum.__globals__ }}",
        "{{ self.__init__ }}",
        "{{ dict.mro() }}",
    ],
)
def test_a_hostile_template_stays_in_the_sandbox(template: str) -> None:
    """Case O4: no way to Python's internals, and no change to the caller's messages."""
    messages = [dict(USER[0])]
    try:
        assert render_chat(template, messages, TOKENIZER) == ""  # what is forbidden reads as undefined
    except UserError as error:
        assert "sandbox" in str(error) or "undefined" in str(error)
    assert messages == USER


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in messages[0].content * 1000 %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ 'a' * 10**10 }}",
        "{{ 10**10 * [1] }}",
        "{{ (2**64) ** 65 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{% set s = 'a' * 999999 %}{% for i in range(99) %}{{ s }}{% endfor %}",
        "{% for n in tree recursive %}{{ loop(tree) }}{% endfor %}",
    ],
)
def test_a_template_that_runs_on_is_cut(template: str) -> None:
    """Case O4: loops, calls, products and output are bounded; range(10**9) is refused by jinja's MAX_RANGE."""
    with pytest.raises(UserError, match=r"MAX_RANGE|steps|multiplication|power|characters|Recursion|seconds"):
        render_chat(template, USER, TOKENIZER, tree=[1, 2])


def test_slow_steps_are_cut_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case O4: few steps, each of them long."""
    monkeypatch.setattr(chat, "MAX_SECONDS", 0.05)
    with pytest.raises(UserError, match="seconds"):
        render_chat("{% set r = range(99999) | list %}{% for i in r %}{{ r | sum }}{% endfor %}", USER, TOKENIZER)


def test_a_long_honest_conversation_stays_within_the_bounds() -> None:
    """Fault: bounds so tight that agents with thousands of turns meet them."""
    messages = [*USER, {"role": "assistant", "content": "x"}] * 2500
    assert render_chat(TOOLS_TEMPLATE, messages, TOKENIZER, tools=TOOLS * 64).count("<|im_start|>") == 5002


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "empty"),
        ("hello", "not a list"),
        ({"role": "user"}, "not a list"),
        (None, "not a list"),
        (["hello"], r"messages\[0\] is not an object"),
        ([{"content": "x"}], r"messages\[0\] has no role"),
        ([*USER, {"role": "", "content": "x"}], r"messages\[1\] has no role"),
        ([{"role": 3, "content": "x"}], "has no role"),
        ([{"role": "user"}], "has no content"),
        ([{"role": "user", "content": None}], "has no content"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "has no content"),
        ([{"role": "user", "content": 3}], "neither"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "not text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "not text"),
        ([{"role": "user", "content": ["x"]}], "not text"),
    ],
)
def test_malformed_messages_are_named(messages: Any, words: str) -> None:
    """Case O5: each fault with the place and the right shape, before the template sees it."""
    for check in (lambda: validate_messages(messages), lambda: render_chat(SMOLLM2, messages, TOKENIZER)):
        with pytest.raises(UserError, match=words) as caught:
            check()
        assert caught.value.remedy


def test_good_messages_pass() -> None:
    """Fault: an assistant turn with tool calls and no content refused."""
    validate_messages(CONVERSATIONS["tool"])
    validate_messages([{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}])
    validate_messages([{"role": "user", "content": [{"type": "text", "text": "x"}]}])
    validate_messages(({"role": "custom", "content": ""},))


def test_rendering_twice_gives_the_same_and_leaves_the_messages_alone() -> None:
    """Fault: state kept in the compiled template or in constant loops."""
    template = "{% for x in [1, 2] %}{{ x }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "z"}]
    assert [render_chat(template, messages, TOKENIZER) for _ in range(3)] == ["12z"] * 3
    assert messages == [{"role": "user", "content": "z"}]


@pytest.mark.parametrize("template", ["{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"])
def test_a_message_to_be_continued_ends_the_prompt(template: str) -> None:
    """No end of turn after it, and its last blank stays, whatever the template does to texts."""
    messages = [{"role": "user", "content": "One, two"}, {"role": "assistant", "content": "three, "}]
    continued = render_chat(template, messages, TOKENIZER, continue_final_message=True)
    assert continued == "<user>One, two</><assistant>three, "


@pytest.mark.parametrize(
    ("template", "content", "words"),
    [
        ("{{ messages[0].content }}", "three", "leaves the last message's text out"),
        ("x", "", "needs text"),
    ],
)
def test_what_cannot_be_continued_is_refused(template: str, content: str, words: str) -> None:
    messages = [{"role": "user", "content": "One"}, {"role": "assistant", "content": content}]
    with pytest.raises(UserError, match=words):
        render_chat(template, messages, TOKENIZER, continue_final_message=True)


def test_a_text_that_imitates_the_marks_hides_no_message_that_is_lost() -> None:
    """Fault: marks that can be known beforehand; with them in its text, a request switched off the check for others."""
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}{# marks #}"
    marks = "".join(f"\ue0c1{i}\ue0df\ue0c1{k}:{i}\ue0df" for i in range(3) for k in range(30)) + "\ue0c0\ue0de"
    lost = [{"role": "user", "content": marks}, {"role": "critic", "content": "No."}]
    for _ in range(2):
        with pytest.raises(UserError, match=r"messages\[1\] would be lost"):
            chat.check_that_all_is_told(template, lost, TOKENIZER)


def test_a_text_that_imitates_the_mark_of_a_continued_message_cuts_no_prompt() -> None:
    """Fault: the prompt ended at the last mark in it, whoever had put it there."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %} {{ note }}"
    told = [{"role": "user", "content": "One"}, {"role": "assistant", "content": "two\ue0c0\ue0de"}]
    text = render_chat(template, told, TOKENIZER, continue_final_message=True, note="\ue0c0\ue0de \ue0c07\ue0de")
    assert text == "Onetwo\ue0c0\ue0de"


def test_a_template_is_looked_at_once_for_each_kind_of_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: every prompt is rendered twice for a check whose outcome is known."""
    rendered = []
    monkeypatch.setattr(chat, "render_chat", lambda *args, **kw: rendered.append(args) or render_chat(*args, **kw))
    template = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}{# once #}"
    user, critic = {"role": "user", "content": "One"}, {"role": "critic", "content": "Two"}
    for messages, num_rendered in (([user], 1), ([user], 1), ([user] * 2, 2), ([user] * 3, 2), ([user, critic], 3)):
        chat.check_that_all_is_told(template, messages, TOKENIZER)
        assert len(rendered) == num_rendered
    for _ in range(2):
        with pytest.raises(UserError, match=r"messages\[1\] would be lost"):
            chat.check_that_all_is_told("{{ messages[0].content }}", [user, critic], TOKENIZER)

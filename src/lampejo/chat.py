"""Messages into the model's prompt: chat templates, rendered in a sandbox."""

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from time import monotonic
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from lampejo.errors import UserError, shown
from lampejo.tokenizer import Tokenizer

MAX_STEPS = 1_000_000  # loop rounds and calls that one rendering may spend; a real template spends some per message
MAX_SECONDS = 10.0  # wall-clock time of one rendering, looked at in each step
MAX_CHARS = 16_000_000  # of the rendered prompt
MAX_REPEAT = 1_000_000  # characters or items that one multiplication may make

# Private characters, put where a message is to be continued, and where it is to be seen whether a message is rendered.
# Between them stands a number that is drawn for each rendering, so that no text can have one beforehand.
_CONTINUED = "\ue0c0{}\ue0de"
_PROBE = "\ue0c1{}:{}\ue0df"
_PROBES = re.compile(_PROBE.format("[0-9]+", "[0-9]+"))
_MAX_KINDS = 100  # of messages that are remembered of one template; a request may make up roles

_budget: ContextVar["_Budget"] = ContextVar("chat_template_budget")
_NOT_FOR_TEMPLATES = ("self", "prompt", "template", "messages", "tokenizer")  # what we pass on under these names


def render_chat(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    continue_final_message: bool = False,
    **template_kwargs: Any,
) -> str:
    """The prompt's text. Encode it with ``add_special_tokens=False``: the template writes BOS and the like itself.

    ``continue_final_message``: it ends with the last message's text, so that the answer goes on from there.
    ``template_kwargs`` are the request's ``chat_template_kwargs`` (``enable_thinking``, ...). Raises UserError when
    the model has no template, messages are malformed, or the template fails, breaks out of the sandbox or runs on.
    """
    if not template:
        raise UserError(
            "The model has no chat template.", "Send a raw prompt instead of messages, or use an instruct model."
        )
    validate_messages(messages)
    if continue_final_message:
        return _render_to_be_continued(template, messages, tokenizer, tools, template_kwargs)
    variables = {
        **tokenizer.special_tokens,
        "documents": None,
        **template_kwargs,
        "messages": list(messages),
        "tools": list(tools) if tools else None,
        "add_generation_prompt": add_generation_prompt,
    }
    token = _budget.set(_Budget())
    try:
        return _joined(_compile(template).generate(variables))
    except jinja2.TemplateSyntaxError as error:
        raise UserError(
            f"The model's chat template is not valid Jinja: {_bare(error.message)} (line {error.lineno}).",
            "Send a raw prompt, or give another template.",
        ) from error
    except SecurityError as error:
        raise UserError(
            f"The model's chat template was stopped by the sandbox: {_bare(error)}.",
            "Do not trust this model's files; send a raw prompt, or give another template.",
        ) from error
    except jinja2.TemplateError as error:  # raise_exception() of the template, undefined names
        raise UserError(
            f"The chat template refused the messages: {_bare(error)}.", "Change the messages, or send a raw prompt."
        ) from error
    except Exception as error:  # whatever expressions in the template raise
        raise UserError(
            f"The chat template failed on these messages: {type(error).__name__}: {_bare(error)}.",
            "Change the messages, or send a raw prompt.",
        ) from error
    finally:
        _budget.reset(token)


def _render_to_be_continued(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]] | None,
    template_kwargs: Mapping[str, Any],
) -> str:
    *before, last = messages
    content = last.get("content")
    if not isinstance(content, str) or not content:
        raise UserError(
            "continue_final_message needs text in the last message.",
            "Give some, or leave it out.",
            field="continue_final_message",
        )
    mark = _CONTINUED.format(_drawn())
    marked = [*before, {**last, "content": content + mark}]
    text, found, _ = render_chat(template, marked, tokenizer, False, tools, **template_kwargs).rpartition(mark)
    if not found:
        raise UserError("The chat template leaves the last message's text out, so that nothing can continue it.")
    return text


def check_that_all_is_told(
    template: str, messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, **template_kwargs: Any
) -> None:
    """Refuses messages that a template passes over in silence: unknown roles, calls and their results where it knows no
    tools, a second system message. Arguments as those of ``render_chat``, which has rendered them.

    For that the chat is rendered once more, with a mark in each message of a kind (role, first or not, with calls or
    not, with tools or not) that this template was not seen to render before. Text beside calls is not looked for: some
    templates leave it out on purpose.
    """
    known, has_tools = _kinds_told(template), bool(template_kwargs.get("tools"))
    kinds = [
        (message["role"], i == 0, bool(message.get("tool_calls")), has_tools) for i, message in enumerate(messages)
    ]
    drawn = _drawn()
    marks = {i: _PROBE.format(drawn, i) for i, kind in enumerate(kinds) if kind not in known}
    marked = {i: other for i, mark in marks.items() if (other := _marked(messages[i], mark)) is not None}
    if not marked:
        return
    try:
        looked_at = [marked.get(i, message) for i, message in enumerate(messages)]
        text = render_chat(template, looked_at, tokenizer, **template_kwargs)
    except UserError:
        return  # it looks at texts and names itself
    found = set(_PROBES.findall(text))
    for i in marked:
        if marks[i] not in found:
            what = "tool calls" if kinds[i][2] else f"messages of the role {shown(kinds[i][0])}"
            raise UserError(
                f"messages[{i}] would be lost: this model's chat template leaves out {what}, at least here.",
                "Leave it out too, put its text into another message, or use a model whose template knows it.",
                field=f"messages[{i}]",
            )
    if len(known) < _MAX_KINDS:
        known.update(kinds[i] for i in marked)


def _drawn() -> int:
    return secrets.randbelow(10**18)


@lru_cache(maxsize=32)
def _kinds_told(template: str) -> set[tuple[str, bool, bool, bool]]:
    """Which kinds of messages a template was seen to render; it grows."""
    return set()


def _marked(message: Mapping[str, Any], mark: str) -> Mapping[str, Any] | None:
    """The message with a mark at the end of its text, or of the name of its first call; None if it has neither."""
    calls, content = message.get("tool_calls"), message.get("content")
    if calls:
        call = calls[0] if isinstance(calls, Sequence) else None
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return None
        named = {**function, "name": function["name"] + mark}
        return {**message, "tool_calls": [{**call, "function": named}, *calls[1:]]}  # type: ignore[dict-item]
    if isinstance(content, str) and content:
        return {**message, "content": content + mark}
    if isinstance(content, list) and content and content[-1]["text"]:
        return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + mark}]}
    return None


def check_template_kwargs(kwargs: Any) -> None:
    """``UserError`` for arguments of a request's own that no template can be given."""
    if not isinstance(kwargs, Mapping):
        message = f"chat_template_kwargs must map names to values, not be {shown(kwargs)}."
        raise UserError(message, field="chat_template_kwargs")
    for name in kwargs:
        if not isinstance(name, str):
            message = f"chat_template_kwargs has the key {shown(name)}; names are strings."
            raise UserError(message, field="chat_template_kwargs")
        if name in _NOT_FOR_TEMPLATES:
            message = f"chat_template_kwargs cannot set {name!r}."
            raise UserError(message, "Leave it out: the request itself sets it.", field="chat_template_kwargs")
    tools = kwargs.get("tools")
    if tools is not None and not (
        isinstance(tools, Sequence) and not isinstance(tools, str) and all(isinstance(tool, Mapping) for tool in tools)
    ):
        message = f"chat_template_kwargs has tools, which must be a list of objects, not {shown(tools)}."
        raise UserError(message, field="chat_template_kwargs")


def _bare(error: object) -> str:
    """Some of it: a template may put a whole message into its error."""
    return str(error)[:500].rstrip(". ")


def _joined(pieces: Iterator[str]) -> str:
    parts, size = [], 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_CHARS:
            raise SecurityError(f"it writes more than {MAX_CHARS} characters")
        parts.append(piece)
    return "".join(parts)


def validate_messages(messages: Any) -> None:
    """Raise UserError unless ``messages`` is a non-empty list of ``{"role": ..., "content": ...}``.

    ``content`` is a string or a list of ``{"type": "text", "text": ...}``; it may be absent or None only beside
    ``tool_calls``. Which roles exist is the template's matter.
    """
    remedy = 'Each message is an object like {"role": "user", "content": "Hello"}.'
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise UserError("messages is not a list.", remedy, field="messages")
    if not messages:
        raise UserError("messages is empty.", "Send at least one message.", field="messages")
    for index, message in enumerate(messages):
        name = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise UserError(f"{name} is not an object.", remedy, field=name)
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise UserError(f"{name} has no role.", remedy, field=name)
        content = message.get("content")
        if content is None:
            if not message.get("tool_calls"):
                raise UserError(f"{name} has no content.", remedy, field=name)
        elif isinstance(content, list):
            for part in content:
                if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                    message = f"{name}.content has a part that is not text."
                    raise UserError(message, "Only text is supported.", field=f"{name}.content")
        elif not isinstance(content, str):
            message = f"{name}.content is neither a string nor a list of text parts."
            raise UserError(message, remedy, field=f"{name}.content")


@lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@lru_cache(maxsize=1)
def _environment() -> "_Sandbox":
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _tojson
    environment.filters["_counted"] = _counted
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    del environment.globals["lipsum"]
    return environment


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, and bounds on loops, calls and multiplications, which it does not have."""

    intercepted_binops = frozenset({"*", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None, lineno=loop.lineno)
        return tree

    def call(self, *args: Any, **kwargs: Any) -> Any:
        _budget.get().spend()
        return super().call(*args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if operator == "**" and not (numbers and abs(left) <= 2**64 and abs(right) <= 64):
            raise SecurityError("a power is too big")
        if operator == "*" and not numbers:
            items, times = (left, right) if hasattr(left, "__len__") else (right, left)
            if hasattr(items, "__len__") and isinstance(times, int) and len(items) * times > MAX_REPEAT:
                raise SecurityError(f"a multiplication makes more than {MAX_REPEAT} items")
        return super().call_binop(context, operator, left, right)


class _Budget:
    """What one rendering may still spend."""

    def __init__(self) -> None:
        self.steps = MAX_STEPS
        self.deadline = monotonic() + MAX_SECONDS

    def spend(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise SecurityError(f"it takes more than {MAX_STEPS} steps")
        if monotonic() > self.deadline:
            raise SecurityError(f"it takes more than {MAX_SECONDS:g} seconds")


def _counted(items: Any) -> Any:
    budget = _budget.get()
    for item in items:
        budget.spend()
        yield item


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's text for training; here its body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(lineno)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)

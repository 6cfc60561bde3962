"""What an answer consists of: events, the styles in which models mark them up, and where reasoning ends."""

from dataclasses import dataclass
from typing import Literal

THINK, END_THINK = "<think>", "</think>"
TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
SPACE = " \t\r\n"


@dataclass(frozen=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """What the model thought before."""

    text: str


@dataclass(frozen=True)
class ToolStart:
    """A call begins; calls of an answer are counted from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolArguments:
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


@dataclass(frozen=True)
class ToolEnd:
    """No more of a call. It is complete, unless the answer was cut before."""

    index: int


Event = Content | Reasoning | ToolStart | ToolArguments | ToolEnd


# --- what a model speaks ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Style:
    """How a model marks up its answers.

    tools: "json" for ``<tool_call>{"name": ..., "arguments": ...}</tool_call>`` (Hermes, Qwen), "xml" for
    ``<tool_call><function=name><parameter=p>value</parameter></function></tool_call>`` (Qwen3-Coder), None if its
    template knows no tools. thinks: it may reason between ``<think>`` and ``</think>`` first.
    """

    tools: Literal["json", "xml"] | None = None
    thinks: bool = False


def style_of(template: str | None) -> Style:
    """The style that a chat template teaches."""
    template = template or ""
    if "<function=" in template:
        tools: Literal["json", "xml"] | None = "xml"
    else:
        tools = "json" if TOOL_CALL in template else None
    return Style(tools, THINK in template or END_THINK in template)


Start = Literal["open", "maybe", "closed"]


def start_of(prompt: str, style: Style) -> Start:
    """Whether an answer begins in the midst of reasoning ("open": the prompt has the tag already), may begin with it,
    or does not ("closed": the prompt ended it, or the model does not think). ``prompt``: its last tokens suffice."""
    if not style.thinks:
        return "closed"
    end = prompt.rstrip(SPACE)
    return "open" if end.endswith(THINK) else "closed" if end.endswith(END_THINK) else "maybe"


class Thoughts:
    """Where reasoning begins and ends: ``<think>`` counts at the very start of an answer alone."""

    def __init__(self, start: Start) -> None:
        self.state: Start = start
        self.has_begun = start == "open"
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """What is reasoning in the next piece, and what is not. May hold back what could become a tag."""
        if self.state == "closed":
            return "", text
        text = self._held + text
        self._held = ""
        if self.state == "maybe":
            begin = text.lstrip(SPACE)
            if not begin.startswith(THINK):
                if THINK.startswith(begin):
                    self._held = text
                    return "", ""
                self.state = "closed"
                return "", text
            self.state, text = "open", begin[len(THINK) :]
            self.has_begun = True
        reasoning, tag, rest = text.partition(END_THINK)
        if tag:
            self.state = "closed"
        else:
            reasoning, self._held = split_held(text, END_THINK)
        return reasoning, rest

    def finish(self) -> tuple[str, str]:
        """What was held back."""
        held, self._held = self._held, ""
        return (held, "") if self.state == "open" else ("", held)


class ThoughtCounter:
    """Counts the tokens of an answer that are reasoning, its tags included, one by one."""

    def __init__(self, start: Start) -> None:
        self.num_tokens = 0
        self._thoughts = Thoughts(start)
        self._num_undecided = 0

    @property
    def is_open(self) -> bool:
        return self._thoughts.state == "open"

    def push(self, piece: bytes | str) -> None:
        """One token, as ``Tokenizer.piece`` spells it."""
        before = self._thoughts.state
        if before == "closed":
            return
        # The tags are ASCII, so it does not matter where the bytes of other characters are parted.
        self._thoughts.push(piece if isinstance(piece, str) else piece.decode("latin-1"))
        self._num_undecided += 1
        if before == "open" or self._thoughts.state == "open":
            self.num_tokens += self._num_undecided
            self._num_undecided = 0


def split_held(text: str, tag: str) -> tuple[str, str]:
    """The text without the longest end that may become ``tag``, and that end."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:size]):
            return text[:-size], text[-size:]
    return text, ""

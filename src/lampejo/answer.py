"""The text of an answer as events: content, reasoning, tool calls."""

from dataclasses import dataclass


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
    """A call is complete."""

    index: int


Event = Content | Reasoning | ToolStart | ToolArguments | ToolEnd

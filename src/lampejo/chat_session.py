"""``lampejo chat``: a conversation in a terminal or through a pipe."""

import contextlib
import io
import json
import sys
from collections.abc import Callable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lampejo.api import LLM, Chunk
from lampejo.cli_options import ModelOptions
from lampejo.errors import UserError, why
from lampejo.request import DraftStats
from lampejo.terminal import acceptance, drafter_line, drafting_mode, printable

HELP = """/help         this list
/stats        tokens, speed and acceptance of this chat
/save FILE    write the conversation as JSON into a new file
/system TEXT  another system message; without TEXT none
/clear        forget the conversation, keep the system message
/quit         end the chat, as Ctrl-D does
//text        send a message that begins with a slash
Ctrl-C stops an answer; what was said stays in the conversation."""

ANSWER_SHARE = 4  # a prompt may take all of the context but this part of it, so that there is room for an answer


def chat(model: ModelOptions, params: dict[str, Any], system: str | None) -> int:
    """Talks until the input ends. Returns the exit code."""
    interactive = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a stray byte is no reason to end a conversation
    with model.load() as llm:
        session = ChatSession(llm, params, system)
        if interactive:
            _note(
                f"{llm.info['model']}, context {llm.max_context}; {drafting_mode(llm.info)}. /help lists the commands."
            )
            if (line := drafter_line(llm.info)) and llm.info["dflash"]["is_packaged"]:  # others were told at load
                _note(line)
        return session.run(_line_from_terminal if interactive else sys.stdin.readline)


def _line_from_terminal() -> str:
    """A line with its end, or nothing at the end of the input, as ``readline`` gives it."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (editing and history of lines, where the platform has them)
    try:
        return input("> ") + "\n"
    except EOFError:
        print()
        return ""


def _note(text: str) -> None:
    """What lampejo itself has to say goes to the standard error stream; answers alone are output."""
    print(text, file=sys.stderr, flush=True)


class ChatSession:
    """The conversation, its limits and its statistics."""

    def __init__(self, llm: LLM, params: dict[str, Any], system: str | None) -> None:
        if not llm.chat_template:
            raise UserError(
                f"{llm.info['model']} has no chat template.", "Use 'lampejo generate --raw', or an instruct model."
            )
        self.llm = llm
        self.params = params
        self.system = system
        self.turns: list[dict[str, str]] = []  # user and assistant in turn
        self.stats = DraftStats()
        self.num_answers = self.num_tokens = 0
        self.last_speed = 0.0

    def run(self, read_line: Callable[[], str]) -> int:
        """Takes lines until there are no more. Ctrl-C while waiting for one is the caller's."""
        while line := read_line():
            text = line.strip()
            try:
                if text == "/quit":
                    return 0
                if text.startswith("/") and not text.startswith("//"):
                    self.command(*text.partition(" ")[::2])
                elif text:
                    self.answer(text[1:] if text.startswith("//") else text)
            except UserError as error:
                _note(f"lampejo: {' '.join(str(error).split())}")
        return 0

    def command(self, name: str, argument: str) -> None:
        argument = argument.strip()
        if name == "/help":
            _note(HELP)
        elif name == "/stats":
            _note(self.statistics())
        elif name == "/save":
            self.save(argument)
        elif name == "/clear":
            self.turns.clear()
            _note("The conversation is forgotten.")
        elif name == "/system":
            self.system = argument or None
            _note("The system message is set." if argument else "There is no system message now.")
        else:
            raise UserError(f"There is no command {name}.", "/help lists the commands; //text sends text with a slash.")

    @property
    def messages(self) -> list[dict[str, str]]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return system + self.turns

    def answer(self, text: str) -> None:
        """One turn, streamed. Whatever stops it, the conversation stays well-formed; a refused message changes none."""
        before = list(self.turns)
        self.turns.append({"role": "user", "content": text})
        said: list[str] = []
        try:
            num_dropped = self.drop_oldest_turns()
            chunks = self.llm.stream(self.messages, **self.params)  # refuses a message that is too long by itself
            if num_dropped:
                _note(
                    f"(the oldest {num_dropped} messages were dropped to fit the context of "
                    f"{self.llm.max_context} tokens)"
                )
            clean = printable if sys.stdout.isatty() else str
            for chunk in chunks:
                said.append(chunk.text)
                print(clean(chunk.text), end="", flush=True)
                if chunk.finish_reason:
                    self._count(chunk)
            print(flush=True)
        except KeyboardInterrupt:
            print(flush=True)
            _note("(stopped)")
        except BaseException:
            self.turns = before
            raise
        if any(said):
            self.turns.append({"role": "assistant", "content": "".join(said)})
        else:
            self.turns = before

    def drop_oldest_turns(self) -> int:
        """Makes room for an answer by forgetting from the front, a question with its answer at a time; how many."""
        most = self.llm.max_context - self.llm.max_context // ANSWER_SHARE
        num_dropped = 0
        while len(self.turns) > 1 and len(self.llm.encode(self.messages)) > most:
            del self.turns[:2]
            num_dropped += 2
        return num_dropped

    def statistics(self) -> str:
        speed = f", the last answer at {self.last_speed:.1f} tok/s" if self.num_answers else ""
        counts = f"{self.num_answers} finished answers, {self.num_tokens} tokens{speed}"
        used = (
            f"{len(self.llm.encode(self.messages)) if self.messages else 0} of {self.llm.max_context} tokens of context"
        )
        return "\n".join([counts, acceptance(self.stats.as_dict()), drafting_mode(self.llm.info), used])

    def save(self, name: str) -> None:
        if not name:
            raise UserError("/save needs the name of a file.", "For example: /save chat.json")
        content = {"model": self.llm.info["model"], "messages": self.messages}
        try:
            path = Path(name).expanduser()
            file = path.open("x", encoding="utf-8")
            try:
                with file:
                    json.dump(content, file, ensure_ascii=False, indent=2)
                    file.write("\n")
            except BaseException:
                path.unlink(missing_ok=True)  # ours: half a file would stand in the way of another try
                raise
        except FileExistsError:
            raise UserError(f"{name} exists already.", "Choose another name.") from None
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(f"{name} cannot be written: {why(error)}.", "Choose another name.") from None
        _note(f"Saved as {name}.")

    def _count(self, chunk: Chunk) -> None:
        completion = chunk.completion
        assert completion is not None
        self.num_answers += 1
        self.num_tokens += len(completion.ids)
        self.last_speed = completion.timings["tok_per_s"]
        _add(self.stats, completion.speculation)
        if completion.finish_reason == "length":
            _note("\n(cut at --max-tokens or at the end of the context)")


def _add(stats: DraftStats, speculation: Mapping[str, Any]) -> None:
    """Adds one answer's statistics, as a completion has them, to those of the chat."""
    steps, histogram = speculation["num_spec_steps"], speculation["acceptance_histogram"]
    stats.num_spec_steps += steps
    stats.num_draft_tokens += speculation["num_draft_tokens"]
    stats.num_accepted_draft_tokens += speculation["num_accepted_draft_tokens"]
    stats.num_inexact_tokens += speculation["num_inexact_tokens"]
    stats.policy = speculation["policy"] if stats.lossless else stats.policy
    stats.num_committed_tokens += round(steps * (speculation["mean_acceptance_length"] or 0))
    pairs = zip_longest(stats.acceptance_histogram, histogram, fillvalue=0)
    stats.acceptance_histogram = [a + b for a, b in pairs]

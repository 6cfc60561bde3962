"""What people see in a terminal: colours by origin, the statistics line, texts side by side."""

import os
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:  # ``lampejo top`` needs no PyTorch
    from lampejo.api import Completion

# Who proposed a token -> its name for people, its colour (SGR code), and the marks that stand in for colour.
ORIGINS = {
    "dflash": ("DFlash", "32", "[", "]"),
    "ngram": ("n-gram", "36", "{", "}"),
    "target": ("target", "", "", ""),
}


def wants_color(choice: str, stream: TextIO) -> bool:
    """``choice`` is always, never, or auto: a terminal that has not been asked for less (NO_COLOR, TERM=dumb)."""
    if choice != "auto":
        return choice == "always"
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def printable(text: str) -> str:
    """Text of a model for a terminal: control characters, which could move the cursor and more, become U+FFFD."""
    return "".join("\ufffd" if (c < " " and c not in "\n\t") or "\x7f" <= c <= "\x9f" else c for c in text)


class OriginPainter:
    """Shows by whom each piece of a text was proposed: in colour, or with brackets where there is none."""

    def __init__(self, color: bool) -> None:
        self.color = color
        self._open = "target"  # whose bracket is open

    def legend(self) -> str:
        return "tokens by origin: " + "  ".join(self.paint(name, label) for label, (name, *_) in ORIGINS.items())

    def paint(self, text: str, origin: str) -> str:
        """``text`` as it stands, painted on its own."""
        _, code, left, right = ORIGINS[origin]
        if self.color:
            return f"\x1b[{code}m{text}\x1b[0m" if code and text else text
        return left + text + right

    def next(self, text: str, origin: str) -> str:
        """The next piece of a running text; neighbours of one origin share a pair of brackets."""
        if self.color or not text:
            return self.paint(text, origin) if text else ""
        marks = "" if origin == self._open else ORIGINS[self._open][3] + ORIGINS[origin][2]
        self._open = origin
        return marks + text

    def end(self) -> str:
        """Closes an open bracket."""
        return "" if self.color else self.next("\0", "target")[:-1]


def drafting_mode(info: Mapping[str, Any]) -> str:
    """The effective mode, from ``LLM.info``: who drafts, how wide, whether lossy, and whether PyTorch's operations do a
    CPU's work, or which other device computes in which precision."""
    names = [info["drafter"] if name == "dflash" else name for name in info["drafters"]]
    mode = f"drafts by {' + '.join(names)}, width {info['width']}" if names else "plain decoding"
    if names and info.get("policy", "lossless") != "lossless":
        mode += f", NOT LOSSLESS above temperature 0 ({info['policy']} acceptance from {info['typical_threshold']:g})"
    if info.get("device", "cpu") != "cpu":
        return f"{mode}, {info['device']} in {info['weights']}"
    return f"{mode}, reference operations" if info.get("ops") == "reference" else mode


def memory_words(info: Mapping[str, Any]) -> str:
    """What a token of context takes, and a request beside its tokens, if the target has recurrent layers."""
    state = info["state_bytes_per_request"]
    words = f"keys and values {info['kv_dtype']}, {info['kv_bytes_per_token']:,} bytes per token"
    return words + (f"; recurrent state {state:,} bytes per request" if state else "")


def fallback_line(info: Mapping[str, Any]) -> str | None:
    """What to tell once, at load, where the reference operations run although nobody asked for them."""
    reason = info.get("ops_reason")
    if not reason:
        return None
    remedy = "; reinstall lampejo where a C++ compiler is at hand" if "not built" in reason else ""
    return f"lampejo: {reason}: running on PyTorch's operations, several times slower{remedy}"


def drafter_line(info: Mapping[str, Any]) -> str | None:
    """What a DFlash drafter is and takes; None without one."""
    drafter = info.get("dflash")
    if not drafter:
        return None
    memory, window = drafter["memory"], drafter["window"]
    length = drafter["trial_acceptance_length"]
    parts = [f"blocks of {drafter['block_size']}", *([f"window {window}"] if window else [])]
    parts += [f"{memory['weights'] / 1e6:,.0f} MB and {memory['context_per_token']:,} bytes per token of context"]
    parts += [f"{length:.1f} tokens per step on a built-in prompt"] if length else []
    return f"drafter {info['drafter']} ({drafter['reason']}): {', '.join(parts)}"


def start_lines(info: Mapping[str, Any]) -> list[str]:
    """What to tell once, at load: a drafter that did not come with the package, parts of a checkpoint that are left
    alone, a lossy policy, and warnings."""
    lines, line = [], drafter_line(info)
    if line and not info["dflash"]["is_packaged"]:
        lines.append(f"lampejo: {line}")
    lines += [f"lampejo: skipped: {info['skipped']}"] if info.get("skipped") else []
    if not info.get("lossless", True):
        what = "lets drafts change answers above temperature 0, whatever the seed"
        lines.append(f"lampejo: NOT LOSSLESS: --policy {info['policy']} {what}")
    return lines + [f"lampejo: warning: {warning}" for warning in info.get("warnings", [])]


def statistics_line(completion: "Completion", info: Mapping[str, Any]) -> str:
    """Tokens, speed, acceptance and the effective mode of one answer."""
    speed, first = completion.timings["tok_per_s"], completion.timings["first_token_s"]
    parts = [f"{len(completion.ids)} tokens ({completion.finish_reason}), {speed:.1f} tok/s, first after {first:.2f} s"]
    parts += [acceptance(completion.speculation)] if info["drafters"] else []
    return "; ".join([*parts, drafting_mode(info)])


def acceptance(speculation: Mapping[str, Any]) -> str:
    """The statistics of speculation in words; says so when nothing was drafted."""
    if not speculation["num_spec_steps"]:
        return "no drafts were verified"
    words = (
        f"acceptance length {speculation['mean_acceptance_length']:.2f} over {speculation['num_spec_steps']} steps"
        f" with drafts, {speculation['num_accepted_draft_tokens']} of {speculation['num_draft_tokens']} drafts accepted"
    )
    if speculation["lossless"]:
        return words
    return f"{words}, {speculation['num_inexact_tokens']} of them not the target's own choice (not lossless)"


def side_by_side(left: str, right: str, width: int) -> str:
    """Two texts in two columns that fill ``width`` together."""
    column = max(20, (width - 3) // 2)
    columns = [_wrapped(printable(text).expandtabs(4), column) for text in (left, right)]
    height = max(map(len, columns))
    padded = [lines + [""] * (height - len(lines)) for lines in columns]
    return "\n".join(f"{a:<{column}} | {b}".rstrip() for a, b in zip(*padded, strict=True))


def _wrapped(text: str, width: int) -> list[str]:
    lines: list[str] = []
    for line in text.strip("\n").split("\n"):
        first, *rest = textwrap.wrap(line, width, drop_whitespace=False, replace_whitespace=False) or [""]
        lines += [first, *(part.lstrip() for part in rest)]
    return lines


@contextmanager
def status(text: str) -> Iterator[None]:
    """Shows on a terminal what is being waited for, and takes it away again."""
    shown = sys.stderr.isatty()
    if shown:
        print(f"\r{text} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print(f"\r{' ' * (len(text) + 4)}\r", end="", file=sys.stderr, flush=True)


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Label and value, aligned."""
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


def number(value: float | None, digits: int = 3) -> str:
    """Three digits, or what is needed before the point; "-" for what is not known."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def columns(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, the first to the left, all others to the right."""
    table = [[str(cell) for cell in row] + [""] * (len(heads) - len(row)) for row in [heads, *rows]]
    widths = [max(len(row[i]) for row in table) for i in range(len(heads))]
    lines = [
        "  ".join(
            f"{cell:<{w}}" if i == 0 else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]
    return "\n".join(line.rstrip() for line in [lines[0], "-" * len(lines[0]), *lines[1:]])

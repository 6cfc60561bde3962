"""``lampejo top``: what a running server does, from its /metrics and /health. Needs neither the model nor PyTorch."""

import json
import math
import os
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from lampejo.errors import UserError, why
from lampejo.terminal import columns, number, printable, wants_color

PREFIX = "lampejo:"
WINDOW_S = 60.0
MOST_SLOTS = 16  # of the survival curve
TIMES = {
    "first token": "time_to_first_token_seconds",
    "between steps": "inter_token_latency_seconds",
    "per token": "request_time_per_output_token_seconds",
    "whole answer": "e2e_request_latency_seconds",
}
QUANTILES = (0.5, 0.9, 0.99)

Key = tuple[str, str]  # name without prefix; value of its one further label, or ""


@dataclass(frozen=True)
class TopOptions:
    """url of the server; once: one snapshot instead of a live view, also where the output is no terminal."""

    url: str
    api_key: str | None = field(default=None, repr=False)
    interval_s: float = 1.0
    once: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.interval_s <= 3600:
            raise UserError(f"--interval is {self.interval_s:g}; it must be above 0 and at most 3600 seconds.")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise UserError(f"{self.url!r} is no address of a server.", "For example: http://127.0.0.1:8000.")


def top_options(url: str, api_key: str | None, interval_s: float, once: bool) -> TopOptions:
    """An address may lack its scheme and may end in /v1, as clients want it."""
    url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    key = api_key or os.environ.get("LAMPEJO_API_KEY", "").partition(",")[0].strip() or None
    return TopOptions(url, key, interval_s, once)


def top(options: TopOptions) -> int:
    """Shows the server until Ctrl-C, or once. Returns the exit code."""
    history = deque([scrape(options)])
    color = wants_color("auto", sys.stdout)
    if options.once or not sys.stdout.isatty():
        time.sleep(options.interval_s)  # two snapshots make a speed
        _append(history, scrape(options))
        print("\n".join(view(history, options.url, color)))
        return 0
    told = ""
    print("\x1b[?1049h\x1b[?25l", end="")  # a screen of its own, without a cursor
    try:
        while True:
            size = shutil.get_terminal_size()
            shown = [*view(history, options.url, color), told][: size.lines - 1]
            print("\x1b[H" + "".join(f"{line}\x1b[K\r\n" for line in shown) + "\x1b[J", end="", flush=True)
            time.sleep(options.interval_s)
            try:
                _append(history, scrape(options))
                told = ""
            except UserError as error:
                told = f"{time.strftime('%H:%M:%S')} {error.message} Asking again."
    except KeyboardInterrupt:
        return 0
    finally:
        print("\x1b[?25h\x1b[?1049l", end="", flush=True)


@dataclass(frozen=True)
class Snapshot:
    """What a server told, at a time of this machine's clock."""

    at: float
    values: Mapping[Key, float]
    health: Mapping[str, Any]

    def since(self, earlier: "Snapshot") -> "Snapshot":
        """What was added since."""
        added = {key: value - earlier.values.get(key, 0.0) for key, value in self.values.items()}
        return Snapshot(self.at - earlier.at, added, self.health)

    def __getitem__(self, name: str) -> float:
        return self.values.get((name, ""), 0.0)

    def by_label(self, name: str) -> dict[str, float]:
        return {label: value for (n, label), value in self.values.items() if n == name}

    def share(self, part: str, whole: str) -> float | None:
        return self[part] / self[whole] if self[whole] else None

    def quantile(self, name: str, q: float) -> float | None:
        """In seconds, by a straight line inside the bucket where it falls; None if nothing was measured."""
        ends = sorted((float(end), count) for end, count in self.by_label(f"{name}_bucket").items())
        total = ends[-1][1] if ends else 0.0
        if total <= 0:
            return None
        start, below = 0.0, 0.0
        for end, count in ends:
            if count >= q * total:
                return start if math.isinf(end) else start + (end - start) * (q * total - below) / (count - below)
            start, below = end, count
        raise AssertionError("the last bucket holds everything")


def scrape(options: TopOptions) -> Snapshot:
    """Asks the server; ``UserError`` tells why it does not answer."""
    health = _get(options, "/health")
    text = _get(options, "/metrics")
    values: dict[Key, float] = {}
    try:
        status = json.loads(health)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith(PREFIX):
                    label = next((value for name, value in sample.labels.items() if name != "model_name"), "")
                    key = sample.name.removeprefix(PREFIX), label
                    values[key] = values.get(key, 0.0) + sample.value
    except ValueError:
        values = {}
    if not values or not isinstance(status, dict):
        raise UserError(f"{options.url} answers, but not as a lampejo server.", "Give the address of 'lampejo serve'.")
    return Snapshot(time.monotonic(), values, status)


def view(history: Sequence[Snapshot], url: str, color: bool) -> list[str]:
    """The screen: totals, speeds and times of the last minute beside those since the start, the survival curve."""
    width = shutil.get_terminal_size().columns
    now, recent = history[-1], history[-1].since(history[0])
    health = now.health
    endings = now.by_label("request_success_total")
    refused = sum(n for status, n in now.by_label("http_responses_total").items() if status >= "400")
    lines = [
        printable(f"{url}  {health.get('model', '')}")[:width],
        printable(str(health.get("mode", "")))[:width],
        "",
        f"{now['num_requests_running']:.0f} running, {now['num_requests_waiting']:.0f} waiting; since the start "
        + ", ".join(
            f"{count:,.0f} {word}"
            for word, count in (
                ("answered", endings.get("stop", 0) + endings.get("length", 0)),
                ("aborted", endings.get("abort", 0)),
                ("failed", endings.get("error", 0)),
                ("refused", refused),
            )
        ),
        f"pages in use {_bar(now['kv_cache_usage_perc'], 30, color)} {now['kv_cache_usage_perc']:.0%}",
        "",
    ]
    if health.get("status") != "ok":
        lines.insert(1, printable(f"{health.get('status')}: {health.get('error', 'no new requests')}")[:width])
    lines += columns(["", f"last {recent.at:.0f} s", "since start"], _rows(recent, now)).split("\n")
    drafted = recent if recent["spec_decode_num_drafts_total"] else now
    steps = drafted["spec_decode_num_drafts_total"]
    accepted = sorted(
        (int(k), n) for k, n in drafted.by_label("spec_decode_num_accepted_tokens_per_pos_total").items() if n
    )
    if accepted and steps:
        when = f"last {recent.at:.0f} s" if drafted is recent else "since start"
        lines += ["", f"drafts accepted by slot, of {steps:,.0f} steps ({when})"]
        lines += [
            f"{k + 1:>3} {_bar(n / steps, max(10, min(50, width - 12)), color)} {n / steps:.0%}"
            for k, n in accepted[:MOST_SLOTS]
        ]
    return lines


def _rows(recent: Snapshot, now: Snapshot) -> list[list[str]]:
    def speed(name: str) -> str:
        return f"{number(recent[name] / recent.at)}" if recent.at > 0 else "-"

    def each(text: str, name: str, of: str, form: str) -> list[str]:
        shares = [span.share(name, of) for span in (recent, now)]
        return [text, *("-" if share is None else format(share, form) for share in shares)]

    drafts = "spec_decode_num_drafts_total"
    rows = [
        ["generated tok/s", speed("generation_tokens_total")],
        ["prompt tok/s", speed("prompt_tokens_total")],
        ["generated tokens", *(f"{span['generation_tokens_total']:,.0f}" for span in (recent, now))],
        each("prompts found in cache", "prefix_cache_hits_total", "prefix_cache_queries_total", ".0%"),
        each("acceptance length", "spec_decode_num_committed_tokens_total", drafts, ".2f"),
        each("drafts accepted", "spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total", ".0%"),
    ]
    for text, name in TIMES.items():
        label = f"{text}, p{' p'.join(f'{q * 100:.0f}' for q in QUANTILES)}"
        rows.append([label, *(" ".join(_seconds(s.quantile(name, q)) for q in QUANTILES) for s in (recent, now))])
    return rows


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{number(value * 1000)}ms" if value < 1 else f"{number(value)}s"


def _bar(share: float, width: int, color: bool) -> str:
    filled = round(min(1.0, max(0.0, share)) * width)
    try:
        "█░".encode(sys.stdout.encoding or "ascii")
        full, empty = "█", "░"
    except (UnicodeEncodeError, LookupError):
        full, empty = "#", "."
    bar = full * filled
    return (f"\x1b[32m{bar}\x1b[0m" if color and bar else bar) + empty * (width - filled)


def _append(history: deque[Snapshot], new: Snapshot) -> None:
    """Keeps the last minute, and nothing from before a restart of the server."""
    last = history[-1]
    if any(value < last.values.get(key, 0.0) for key, value in new.values.items() if key[0].endswith("_total")):
        history.clear()
    history.append(new)
    while len(history) > 2 and new.at - history[1].at >= WINDOW_S:
        history.popleft()


class _Stay(urllib.request.HTTPRedirectHandler):
    """A key is for the server that was named, not for where it might send us."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _get(options: TopOptions, path: str) -> str:
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    is_here = urlsplit(options.url).hostname in ("localhost", "127.0.0.1", "::1")
    handlers = [_Stay(), *([urllib.request.ProxyHandler({})] if is_here else [])]
    try:
        request = urllib.request.Request(options.url + path, headers=headers)
        with urllib.request.build_opener(*handlers).open(request, timeout=10) as response:
            return response.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        with error:
            if path == "/health" and error.code >= 500:  # it tells of its trouble
                return error.read().decode("utf-8", "replace")
        if error.code == 401:
            raise UserError(f"{options.url} wants an API key.", "Give --api-key, or set LAMPEJO_API_KEY.") from None
        raise UserError(
            f"{options.url}{path} answers {error.code} ({error.reason}).", "Give the address of 'lampejo serve'."
        ) from None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise UserError(f"{options.url} does not answer: {why(reason)}.", "Is 'lampejo serve' running there?") from None

"""``lampejo top``: what it shows is what the server told, live, once, and when something is wrong."""

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from lampejo import cli_top
from lampejo.cli import USER_MISTAKE, main
from lampejo.cli_top import Snapshot, top_options, view
from lampejo.server.counts import BOUNDS, Counts

HEALTH = {"status": "ok", "model": "tiny", "mode": "drafts by ngram, width auto"}


def metrics_text(steps: int = 100, accepted: tuple[int, ...] = (80, 50, 20), tokens: int = 300, **gauges: float) -> str:
    """Metrics of a server after ``steps`` steps with drafts, of which so many accepted the draft at each slot."""
    values = {
        "num_requests_running": 3,
        "num_requests_waiting": 1,
        "kv_cache_usage_perc": 0.25,
        "spec_decode_num_drafts_total": steps,
        "spec_decode_num_draft_tokens_total": 4 * steps,
        "spec_decode_num_accepted_tokens_total": sum(accepted),
        "spec_decode_num_committed_tokens_total": steps + sum(accepted),
        "prefix_cache_queries_total": 1000,
        "prefix_cache_hits_total": 250,
        "prompt_tokens_total": 1000,
        "generation_tokens_total": tokens,
    } | gauges
    lines = [f'lampejo:{name}{{model_name="tiny"}} {value}' for name, value in values.items()]
    for name, label, found in (
        ("spec_decode_num_accepted_tokens_per_pos_total", "position", dict(enumerate(accepted))),
        ("request_success_total", "finished_reason", {"stop": 5, "length": 4, "abort": 2, "error": 1}),
        ("http_responses_total", "status", {200: 9, 429: 3, 500: 1}),
    ):
        lines += [f'lampejo:{name}{{model_name="tiny",{label}="{k}"}} {n}' for k, n in found.items()]
    counts = [0, 5, 9, 10, 10]
    for le, count in zip((0.01, 0.02, 0.05, 0.1, "+Inf"), counts, strict=True):
        lines.append(f'lampejo:time_to_first_token_seconds_bucket{{model_name="tiny",le="{le}"}} {count}')
    return "\n".join(lines) + "\n"


class StandIn:
    """Answers by path; ``asked`` are the headers of what came."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, str]] = {
            "/health": (200, json.dumps(HEALTH)),
            "/metrics": (200, metrics_text()),
        }
        self.asked: list[Any] = []
        self.headers: dict[str, str] = {}
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                stand_in.asked.append(self.headers)
                status, body = stand_in.answers.get(self.path, (404, "nothing here"))
                self.send_response(status)
                for name, value in stand_in.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def server() -> Iterator[StandIn]:
    stand_in = StandIn()
    thread = threading.Thread(target=stand_in.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield stand_in
    stand_in.server.shutdown()
    stand_in.server.server_close()
    thread.join()


def snapshot(at: float = 0.0, text: str | None = None, **health: Any) -> Snapshot:
    """What ``scrape`` makes of a text."""
    answers = {"/health": json.dumps(HEALTH | health), "/metrics": metrics_text() if text is None else text}
    original, cli_top._get = cli_top._get, lambda options, path: answers[path]
    try:
        return replace(cli_top.scrape(top_options("x", None, 1.0, True)), at=at)
    finally:
        cli_top._get = original


def test_one_snapshot_through_a_pipe_tells_everything(server, capsys):
    """A script, or a look over ssh."""
    assert main(["top", server.url, "--interval", "0.01"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    lines = out.splitlines()
    assert lines[:2] == [f"{server.url}  tiny", "drafts by ngram, width auto"]
    assert "3 running, 1 waiting; since the start 9 answered, 2 aborted, 1 failed, 4 refused" in lines
    rows = {line[:34].strip(): line.split()[-1] for line in lines if line and not line[0].isspace()}
    for label, value in (
        ("prompts found in cache", "25%"),
        ("acceptance length", "2.50"),
        ("drafts accepted", "38%"),
        ("generated tokens", "300"),
    ):
        assert next(v for k, v in rows.items() if k.startswith(label)) == value
    assert [line.split()[0] + " " + line.split()[-1] for line in lines[-3:]] == ["1 80%", "2 50%", "3 20%"]
    assert lines[-3].count("█") > lines[-2].count("█") > lines[-1].count("█") > 0
    assert any(line.startswith("pages in use █") and line.endswith("25%") for line in lines)


def test_the_view_compares_the_last_minute_with_everything(capsys):
    """Speeds are of now; an average since yesterday hides that it is slow today."""
    before = snapshot(0.0, metrics_text())
    after = snapshot(10.0, metrics_text(steps=110, accepted=(81, 50, 20), tokens=1300))
    lines = view([before, after], "http://x", color=False)
    row = {line[:30].strip(): line[30:].split() for line in lines}
    assert row["generated tok/s"][0] == "100"
    assert next(v for k, v in row.items() if k.startswith("generated tokens")) == ["1,000", "1,300"]
    assert row["acceptance length"] == ["1.10", "2.37"]
    assert any("of 10 steps (last 10 s)" in line for line in lines)
    assert lines[-1].split()[-1] == "10%"


def test_percentiles_are_read_off_the_buckets():
    """Against counting by hand: 10 answers, 5 of them between 10 and 20 ms, 4 up to 50, one up to 100."""
    now = snapshot()
    assert now.quantile("time_to_first_token_seconds", 0.5) == pytest.approx(0.02)
    assert now.quantile("time_to_first_token_seconds", 0.25) == pytest.approx(0.015)
    assert now.quantile("time_to_first_token_seconds", 0.9) == pytest.approx(0.05)
    assert now.quantile("time_to_first_token_seconds", 1.0) == pytest.approx(0.1)
    assert now.quantile("inter_token_latency_seconds", 0.5) is None
    assert now.since(now).quantile("time_to_first_token_seconds", 0.5) is None


def test_a_duration_beyond_all_buckets_is_told_as_the_last_end():
    """What the server can say of it: at least so long."""
    counts = Counts()
    counts.first_token.observe(5000.0)
    buckets = [f'lampejo:t_bucket{{le="{end}"}} 0' for end in BOUNDS] + ['lampejo:t_bucket{le="+Inf"} 1']
    assert snapshot(text="\n".join(buckets) + "\n").quantile("t", 0.5) == BOUNDS[-1]


def test_a_server_that_was_restarted_starts_a_new_minute():
    """Fault: speeds below zero."""
    history = deque([snapshot(0.0, metrics_text(tokens=5000)), snapshot(1.0, metrics_text(tokens=5001))])
    cli_top._append(history, snapshot(2.0, metrics_text(tokens=7)))
    assert [s["generation_tokens_total"] for s in history] == [7]
    for at in range(3, 200):
        cli_top._append(history, snapshot(float(at), metrics_text(tokens=at)))
    assert 60 <= history[-1].at - history[0].at <= 61


def test_a_server_without_drafts_or_work_is_shown_without_numbers_it_does_not_have(capsys):
    """Fault: divisions by zero, and curves of nothing."""
    idle = snapshot(text=metrics_text(0, (), 0, prefix_cache_queries_total=0, prefix_cache_hits_total=0))
    lines = view([idle], "http://x", color=False)
    row = {line[:30].strip(): line[30:].split() for line in lines}
    assert row["acceptance length"] == row["drafts accepted"] == row["prompts found in cache"] == ["-", "-"]
    assert not any("by slot" in line for line in lines)


def test_a_server_in_trouble_is_shown_as_such(server, capsys):
    """O1, O2: /health answers 503 or 500 then, and tells why."""
    server.answers["/health"] = (
        500,
        json.dumps(HEALTH | {"status": "failed", "error": "The engine has failed: out of \x1b[2J memory"}),
    )
    assert main(["top", server.url, "--once", "--interval", "0.01"]) == 0
    out = capsys.readouterr().out
    assert "failed: The engine has failed: out of \ufffd[2J memory" in out


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"/metrics": (401, "")}, "wants an API key. Give --api-key, or set LAMPEJO_API_KEY."),
        ({"/health": (200, "<html>")}, "answers, but not as a lampejo server"),
        ({"/health": (200, "[]")}, "answers, but not as a lampejo server"),
        ({"/metrics": (200, "vllm:x 1\n")}, "answers, but not as a lampejo server"),
        ({"/metrics": (200, "lampejo:x{ 1\n")}, "answers, but not as a lampejo server"),
        ({"/health": (404, "")}, "/health answers 404"),
        ({"/metrics": (302, "")}, "/metrics answers 302"),
    ],
    ids=lambda v: str(v)[:24],
)
def test_what_is_wrong_is_told_in_one_line(server, capsys, answers, message):
    """The wrong address, the wrong server, no key."""
    server.answers |= answers
    server.headers = {"Location": "/elsewhere"}
    assert main(["top", server.url, "--once", "--interval", "0.01"]) == USER_MISTAKE
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://127.0.0.1:1", "http://127.0.0.1:99999", "http://a b"])
def test_an_address_where_nobody_is_is_told_in_one_line(url, capsys):
    """The server is not there."""
    assert main(["top", url, "--once"]) == USER_MISTAKE
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "does not answer" in err or "is no address of a server" in err


def test_the_key_is_sent_and_followed_nowhere(server, capsys, monkeypatch):
    """O3: from the flag or the environment; a redirect must not carry it away."""
    arguments = ["top", server.url, "--once", "--interval", "0.01"]
    assert main([*arguments, "--api-key", "sk-flag"]) == 0
    monkeypatch.setenv("LAMPEJO_API_KEY", "sk-first, sk-second")
    assert main(arguments) == 0
    assert [headers["Authorization"] for headers in server.asked] == ["Bearer sk-flag"] * 4 + ["Bearer sk-first"] * 4
    server.asked.clear()
    server.answers["/metrics"] = (302, "")
    server.headers = {"Location": f"{server.url}/elsewhere"}
    assert main(arguments) == USER_MISTAKE
    assert len(server.asked) == 2
    assert "sk-" not in capsys.readouterr().err
    assert "sk-" not in repr(top_options("x", "sk-flag", 1.0, True))


@pytest.mark.parametrize("given", ["127.0.0.1:9", "http://127.0.0.1:9/", "http://127.0.0.1:9/v1", "127.0.0.1:9/v1/"])
def test_an_address_may_be_what_clients_take(given):
    """People copy the base URL that they gave to their client."""
    assert top_options(given, None, 1.0, True).url == "http://127.0.0.1:9"


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "inf"])
def test_an_interval_that_is_none_is_refused(interval, capsys):
    """Fault: a loop without a pause."""
    assert main(["top", "--interval", interval]) == USER_MISTAKE
    assert "--interval" in capsys.readouterr().err


def test_it_starts_without_pytorch(server):
    """Fault: three seconds of imports before a look."""
    code = "import sys, lampejo.cli as c\nc.main(sys.argv[1:])\nassert 'torch' not in sys.modules"
    argv = [sys.executable, "-c", code, "top", server.url, "--once", "--interval", "0.01"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "acceptance length" in done.stdout, done.stderr


def test_in_a_terminal_the_view_is_live_survives_a_gap_and_gives_the_screen_back(server):
    """The server restarts, the view goes on; Ctrl-C ends it with the cursor visible again."""
    master, slave = pty.openpty()
    argv = [sys.executable, "-m", "lampejo", "top", server.url, "--interval", "0.05"]
    env = os.environ | {"COLUMNS": "100", "LINES": "50", "TERM": "xterm", "PYTHONIOENCODING": "utf-8"}
    env.pop("NO_COLOR", None)
    process = subprocess.Popen(
        argv,
        stdout=slave,
        stderr=slave,
        env=env,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    os.close(slave)
    seen = b""

    def read_until(word: bytes) -> None:
        nonlocal seen
        seen = b""
        deadline = time.monotonic() + 60
        while word not in seen:
            assert time.monotonic() < deadline, seen
            seen += os.read(master, 65536)

    read_until(b"generated tokens")
    assert "\x1b[32m█".encode() in seen or b"\x1b[?1049h" in seen
    server.answers["/metrics"] = (503, "")
    read_until(b"Asking again")
    server.answers["/metrics"] = (200, metrics_text(tokens=4321))
    read_until(b"4,321")
    process.send_signal(signal.SIGINT)
    read_until(b"\x1b[?25h\x1b[?1049l")
    assert process.wait(60) == 0
    os.close(master)

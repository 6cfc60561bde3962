"""What a fresh process shows, and what machine this is."""

import os
import sys

import pytest

from lampejo.bench import startup
from lampejo.bench.startup import StartError, generate_command, machine, peak_rss_mb, start_to_first_token

SAYS = [sys.executable, "-c", "import sys; data = bytearray(80_000_000); print('hello', sys.stdin.read())"]
BREAKS = [sys.executable, "-c", "import sys; sys.exit('no model')"]
SILENT = [sys.executable, "-c", "pass"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_is_that_of_the_process_and_not_of_ours(monkeypatch):
    """Fault: on Linux a child's ru_maxrss may be what its parent held before exec."""
    monkeypatch.setattr(startup, "generate_command", lambda *_: SAYS)
    ours = bytearray(300_000_000)
    ours[::4096] = bytes(len(ours[::4096]))  # so that the pages are there
    assert 80 < peak_rss_mb((), "x" * 100, 1) < 300


@pytest.mark.parametrize("command", [BREAKS, SILENT])
def test_a_process_that_fails_or_says_nothing_is_not_timed(monkeypatch, command):
    """V3."""
    monkeypatch.setattr(startup, "generate_command", lambda *_: command)
    with pytest.raises(StartError, match="no model" if command is BREAKS else "code 0"):
        start_to_first_token(())


def test_the_first_byte_ends_the_clock(monkeypatch):
    """Time to the first token, not to the end of the process."""
    late = [sys.executable, "-uc", "import time; print('a', end=''); time.sleep(1.5)"]
    monkeypatch.setattr(startup, "generate_command", lambda *_: late)
    ended = os.times().elapsed
    seconds = start_to_first_token(())
    assert seconds < os.times().elapsed - ended - 1.0


def test_the_fresh_process_loads_the_same_model():
    command = generate_command(["--model", "m", "--drafter", "none"], 1, "Hi")
    assert command[1:4] == ["-m", "lampejo", "generate"]
    assert command[command.index("--model") + 1] == "m" and command[command.index("--max-tokens") + 1] == "1"
    assert command[command.index("--context") + 1] == "2048"
    assert generate_command(["--context", "99"], 1, "Hi").count("--context") == 1


def test_the_machine_is_described():
    assert {"cpu", "cores", "threads", "system", "torch"} <= set(machine())

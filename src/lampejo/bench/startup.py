"""What only a fresh process shows, start to first token and peak memory; and what machine this is."""

import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CONTEXT = 2048  # of both processes
PROMPT = "Write a haiku about the sea"


class StartError(Exception):
    """The process failed, or printed nothing."""


def generate_command(flags: Sequence[str], max_tokens: int, prompt: str) -> list[str]:
    """``lampejo generate`` as a process of this Python."""
    context = [] if "--context" in flags else ["--context", str(CONTEXT)]
    limits = ["--temperature", "0", "--max-tokens", str(max_tokens)]
    return [sys.executable, "-m", "lampejo", "generate", *flags, *context, *limits, prompt]


def start_to_first_token(flags: Sequence[str]) -> float:
    """Seconds from the start of ``lampejo generate --max-tokens 1`` to the first byte of its answer."""
    started = time.perf_counter()
    with subprocess.Popen(
        generate_command(flags, 1, PROMPT), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - started
        rest, errors = process.communicate()
    if process.returncode or not (first + rest).strip():
        raise StartError(f"lampejo generate ended with code {process.returncode}: {errors.decode().strip()[-300:]}")
    return seconds


def peak_rss_mb(flags: Sequence[str], prompt: str, max_tokens: int) -> float:
    """Most memory, in MB of 10^6 bytes, that ``lampejo generate`` held while it answered ``prompt``."""
    command = generate_command(flags, max_tokens, "-")
    peak = 0
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.write(prompt.encode())
        process.stdin.close()
        while process.poll() is None:
            peak = max(peak, _high_water_mark(process.pid))
            time.sleep(0.01)
        out, errors = process.stdout.read(), process.stderr.read()  # short enough for the pipes' buffers
    if process.returncode or not out.strip():
        raise StartError(f"lampejo generate ended with code {process.returncode}: {errors.decode().strip()[-300:]}")
    if not peak:
        raise StartError("this system does not tell the peak memory of a process")
    return peak / 1e6


def _high_water_mark(pid: int) -> int:
    """Peak resident memory in bytes as Linux counts it; what ``wait4`` tells may be the parent's, from before exec."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    lines = [line.split() for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(lines[0][1]) * 1024 if lines else 0


class Bystanders:
    """How many cores other processes kept busy, on average since this was made; Linux alone tells."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._before = _others_cpu_seconds()

    def cores(self) -> float | None:
        now = _others_cpu_seconds()
        if now is None or self._before is None:
            return None
        return max(0.0, now - self._before) / max(1e-9, time.monotonic() - self._started)


def _others_cpu_seconds() -> float | None:
    """CPU time of the whole machine less ours and that of our finished children."""
    lines = _lines("/proc/stat")
    if not lines:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, lines[0].split()[1:9])
    own = os.times()
    ours = own.user + own.system + own.children_user + own.children_system
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK") - ours


def machine() -> dict[str, Any]:
    """What the figures hold for."""
    import torch

    cpu = platform.processor() or platform.machine()
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_before": load,
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []

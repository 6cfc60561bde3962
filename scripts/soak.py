"""Hours of use in minutes: many requests at once against a real server, some of them given up; then what it costs.

    python scripts/soak.py                      # 1,000 requests, 8 at once: under 10 minutes on two cores
    python scripts/soak.py --requests 60        # a try; memory is judged from 500 requests on

What is checked (cases M5 to M7, and the limits of the server):

- answers: none fails, and every finished one equals its reference, which this process computed alone, without drafts;
- left_over: no request is left running or waiting, and no page in use;
- memory: after the first half, in which pages and buffers are touched for the first time, the server's resident memory
  grows by less than 10 MB per 1,000 requests (slope of the least squares);
- prefix: a prompt of 4,000 tokens sent a second time gets its first token in less than a tenth of the first time;
- http: a stream takes at most 5 % longer per token over HTTP than from the same engine in this process, in turn;

The last two want a machine with nothing else to do. The last line is one JSON object, ``checks`` in it tells how each
went. Exit code 1 if one failed, or if the server does not end in order.
"""

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

import lampejo
from lampejo.bench.texts import GLACIER, LETTER, LIGHTHOUSE, MINUTES, README_MD, RECIPE

PASSAGES = (LETTER, MINUTES, LIGHTHOUSE, README_MD, RECIPE, GLACIER)

NUM_QUESTIONS, ABORTED, MAX_TOKENS = 48, 0.2, 64
NUM_SAMPLES = 100  # of memory
SLOPE_LIMIT_MB, ENOUGH_FOR_SLOPE = 10.0, 500
PREFIX_LIMIT, HTTP_LIMIT = 0.1, 0.05
TIMEOUT = httpx.Timeout(120)


@dataclass
class Soak:
    """What came of it."""

    differing: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    num_finished: int = 0
    num_aborted: int = 0
    rss_mb: list[tuple[int, float]] = field(default_factory=list)  # after so many requests

    @property
    def rss_slope_mb(self) -> float | None:
        """Per 1,000 requests, after the first half; None if there were too few."""
        done = [n for n, _ in self.rss_mb]
        if not done or done[-1] < ENOUGH_FOR_SLOPE:
            return None
        half = [sample for sample in self.rss_mb if sample[0] >= done[-1] / 2]
        return 1000 * statistics.linear_regression(*zip(*half, strict=True)).slope


def questions(seed: int) -> list[dict[str, Any]]:
    """Requests of random lengths, greedy and sampled."""
    rng = random.Random(seed)
    words = " ".join(PASSAGES).split()
    found = []
    for _ in range(NUM_QUESTIONS):
        start, length = rng.randrange(len(words)), rng.choice([3, 20, 80, 300])
        text = "Go on: " + " ".join((words * 2)[start : start + length])
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": rng.randint(1, MAX_TOKENS)}
        found.append(body | {"temperature": rng.choice([0, 0, 0.7, 1.0]), "seed": rng.randrange(1000)})
    return found


@contextmanager
def serving(model: str) -> Iterator[tuple[str, int]]:
    """The address of a server of its own, and its process id. SystemExit if it does not start, or ends in disorder."""
    with tempfile.NamedTemporaryFile("w") as log:
        command = [sys.executable, "-m", "lampejo", "serve", model, "--port", "0"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        told = Path(log.name)
        try:
            while (match := re.search(r"http://[\d.]+:\d+", told.read_text())) is None:
                if process.poll() is not None:
                    raise SystemExit(f"the server did not start:\n{told.read_text()}")
                time.sleep(0.1)
            yield match[0], process.pid
        finally:
            process.terminate()
            code = process.wait(60)
        if code:
            raise SystemExit(f"the server ended with {code}:\n{told.read_text()[-2000:]}")


async def ask(client: httpx.AsyncClient, body: dict[str, Any], stop_after: int | None = None) -> str | None:
    """The text of a streamed answer; None if it was given up after so many chunks."""
    text, num_chunks = "", 0
    async with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            num_chunks += 1
            if stop_after is not None and num_chunks > stop_after:
                return None
    return text


def rss_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1000


def references(llm: lampejo.LLM, bodies: list[dict[str, Any]]) -> list[str]:
    """One after another, without drafts, in this process: the server sees each for the first time under load."""
    params = [{key: body[key] for key in ("max_tokens", "temperature", "seed")} for body in bodies]
    asked = tqdm(list(zip(bodies, params, strict=True)), unit="reference")
    return [llm.generate(body["messages"], drafts=False, **given).text for body, given in asked]


async def soak(url: str, pid: int, expected: list[str], args: argparse.Namespace) -> Soak:
    rng, result, bodies = random.Random(args.seed), Soak(), questions(args.seed)
    left = iter(range(args.requests))
    bar = tqdm(total=args.requests, unit="request")

    async def one_after_another(client: httpx.AsyncClient) -> None:
        for _ in left:
            n, stop_after = rng.randrange(len(bodies)), rng.randint(0, 8) if rng.random() < ABORTED else None
            try:
                text = await ask(client, bodies[n], stop_after)
            except Exception as error:
                result.failed.append(f"{type(error).__name__}: {error}")
            else:
                result.num_aborted += text is None
                result.num_finished += text is not None
                if text is not None and text != expected[n]:
                    result.differing.append(f"{bodies[n]}: {text!r} instead of {expected[n]!r}")
            bar.update()
            if bar.n % max(1, args.requests // NUM_SAMPLES) == 0:
                result.rss_mb.append((bar.n, rss_mb(pid)))

    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT) as client:
        await asyncio.gather(*(one_after_another(client) for _ in range(args.concurrency)))
    bar.close()
    return result


def left_over(url: str) -> dict[str, float]:
    """Requests that run or wait and pages in use, once everybody has gone."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    for _ in range(50):
        text = httpx.get(f"{url}/metrics").text
        values = {n: float(re.search(rf"^lampejo:{n}\{{.*\}} (\S+)$", text, re.M)[1]) for n in names}
        if not any(values.values()):
            break
        time.sleep(0.1)
    return values


def token_times(url: str, body: dict[str, Any]) -> list[float]:
    """When each piece of text of a streamed answer came. Read in the plainest way, since this process shares the
    processor with the server: httpx would take a third of a millisecond of it per piece, which is not the server's."""
    times = []
    connection = HTTPConnection(url.removeprefix("http://"), timeout=120)
    with closing(connection):
        headers = {"Content-Type": "application/json", "Connection": "close"}
        connection.request("POST", "/v1/chat/completions", json.dumps({**body, "stream": True}), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(response.read().decode())
        for data in iter(response.fp.read1, b""):
            num_pieces = data.count(b'"content":"') - data.count(b'"content":""')
            times += [time.perf_counter()] * num_pieces
    return times


def of_prefix(url: str, llm: lampejo.LLM, seed: int) -> dict[str, float]:
    """Seconds to the first token of a prompt of about 4,000 tokens, never seen and seen before."""
    first, second = [], []
    for i in range(3):
        text = " ".join(random.Random(f"{seed} {i}").choices(" ".join(PASSAGES).split(), k=6000))
        text = llm.tokenizer.decode(llm.tokenizer.encode(text)[:4000])
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, "temperature": 0}
        for seconds in (first, second):
            started = time.perf_counter()
            seconds.append(token_times(url, body)[0] - started)
    ratio = statistics.median(b / a for a, b in zip(first, second, strict=True))
    return {"first_s": statistics.median(first), "second_s": statistics.median(second), "ratio": ratio}


def of_http(url: str, llm: lampejo.LLM, rounds: int) -> dict[str, float]:
    """Milliseconds per token of the same plain stream over HTTP and in this process, in turn, each first every other
    time. From the first token to the last, so that prefill is no part of it."""
    messages = [{"role": "user", "content": "Tell a long story."}]
    params = {"max_tokens": 192, "temperature": 0.0, "ignore_eos": True}
    body = {"messages": messages, **params, "lampejo": {"drafts": False}}

    def over_http() -> list[float]:
        return token_times(url, body)

    def alone() -> list[float]:
        chunks = llm.stream(messages, drafts=False, **params)
        return [time.perf_counter() for chunk in chunks if chunk.text]

    arms = [(over_http, []), (alone, [])]
    for i in tqdm(range(rounds + 1), unit="round"):
        for stream, ms in arms if i % 2 else arms[::-1]:
            times = stream()
            if i:  # the first one warms up
                ms.append(1000 * (times[-1] - times[0]) / (len(times) - 1))
    http_ms, alone_ms = (ms for _, ms in arms)
    added = statistics.median(a / b for a, b in zip(http_ms, alone_ms, strict=True)) - 1
    return {"http_ms": statistics.median(http_ms), "alone_ms": statistics.median(alone_ms), "added": added}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9, help="of the two streams that are compared")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with lampejo.load(args.model) as llm, serving(args.model) as (url, pid):
        expected = references(llm, questions(args.seed))
        started = time.perf_counter()
        result = asyncio.run(soak(url, pid, expected, args))
        seconds = time.perf_counter() - started
        left = left_over(url)
        prefix, http = of_prefix(url, llm, args.seed), of_http(url, llm, args.rounds)
        slope = result.rss_slope_mb
        checks = {
            "answers": result.num_finished > 0 and not (result.failed or result.differing),
            "left_over": not any(left.values()),
            "memory": None if slope is None else slope < SLOPE_LIMIT_MB,  # null: too few requests to tell
            "prefix": prefix["ratio"] < PREFIX_LIMIT,
            "http": http["added"] < HTTP_LIMIT,
        }
        told = {
            "checks": checks,
            "requests": args.requests,
            "concurrency": args.concurrency,
            "seconds": seconds,
            "finished": result.num_finished,
            "aborted": result.num_aborted,
            "failed": result.failed[:5],
            "differing": result.differing[:5],
            "left_over": left,
            "rss_mb": [round(mb) for _, mb in result.rss_mb],
            "rss_slope_mb_per_1000": slope,
            "prefix": prefix,
            "http": http,
        }
        print(json.dumps(told), flush=True)
    return int(False in checks.values())


if __name__ == "__main__":
    sys.exit(main())

"""Hours of use in minutes: many requests at once against a real server, some of them given up; then what it costs.

    python scripts/soak.py                      # 1,000 requests, 8 at once
    python scripts/soak.py --requests 200

Checks that every finished answer equals its reference (asked alone, without drafts), that no request is left running
and no page in use, and how memory moves (cases M5 to M7). Then measures the time to the first token of a prompt of
4,000 tokens the first and the second time, and what HTTP adds to a token (streams beside the same engine in this
process, in turn). The last line is one JSON object. Exit code 1 if anything differs or is left over.
"""

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

import lampejo
from lampejo.bench.texts import GLACIER, LETTER, LIGHTHOUSE, MINUTES, README_MD, RECIPE

PASSAGES = (LETTER, MINUTES, LIGHTHOUSE, README_MD, RECIPE, GLACIER)

NUM_QUESTIONS, ABORTED, MAX_TOKENS = 48, 0.2, 64
TIMEOUT = httpx.Timeout(120)


@dataclass
class Soak:
    """What came of it."""

    differing: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    num_finished: int = 0
    num_aborted: int = 0
    rss_mb: list[float] = field(default_factory=list)


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
    """The address of a server of its own, and the process."""
    command = [sys.executable, "-m", "lampejo", "serve", model, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if match := re.search(r"http://[\d.]+:\d+", line):
                yield match[0], process.pid
                break
        else:
            raise SystemExit("the server did not start")
    finally:
        process.terminate()
        code = process.wait(60)
    if code:
        raise SystemExit(f"the server ended with {code}")


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


async def soak(url: str, pid: int, num_requests: int, concurrency: int, seed: int) -> Soak:
    rng, result, bodies = random.Random(seed), Soak(), questions(seed)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT) as client:
        references = [await ask(client, body | {"lampejo": {"drafts": False}}) for body in bodies]
        left = iter(range(num_requests))
        bar = tqdm(total=num_requests, unit="request")

        async def one_after_another() -> None:
            for i in left:
                n, stop_after = rng.randrange(len(bodies)), rng.randint(0, 8) if rng.random() < ABORTED else None
                try:
                    text = await ask(client, bodies[n], stop_after)
                except Exception as error:
                    result.failed.append(f"{type(error).__name__}: {error}")
                else:
                    result.num_aborted += text is None
                    result.num_finished += text is not None
                    if text is not None and text != references[n]:
                        result.differing.append(f"{bodies[n]}: {text!r} instead of {references[n]!r}")
                if i % max(1, num_requests // 20) == 0:
                    result.rss_mb.append(rss_mb(pid))
                bar.update()

        await asyncio.gather(*(one_after_another() for _ in range(concurrency)))
        bar.close()
    return result


def left_over(url: str) -> dict[str, float]:
    """Requests that run or wait and pages in use, once everybody has gone."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    for _ in range(50):
        text = httpx.get(f"{url}/metrics").text
        values = {n: float(re.search(rf"^lampejo:{n}\{{.*\}} (\S+)$", text, re.M)[1]) for n in names}  # type: ignore[index]
        if not any(values.values()):
            break
        time.sleep(0.1)
    return values


def first_token_s(url: str, body: dict[str, Any]) -> float:
    started = time.perf_counter()
    with httpx.stream("POST", f"{url}/v1/chat/completions", json={**body, "stream": True}, timeout=TIMEOUT) as response:
        for line in response.iter_lines():
            if '"content":"' in line and '"role"' not in line:
                return time.perf_counter() - started
    raise SystemExit("no token came")


def of_prefix(url: str, llm: lampejo.LLM, seed: int) -> dict[str, float]:
    """Seconds to the first token of a prompt of about 4,000 tokens, never seen and seen before."""
    first, second = [], []
    for i in range(3):
        text = " ".join(random.Random(f"{seed} {i}").choices(" ".join(PASSAGES).split(), k=6000))
        text = llm.tokenizer.decode(llm.tokenizer.encode(text)[:4000])
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, "temperature": 0}
        first.append(first_token_s(url, body))
        second.append(first_token_s(url, body))
    return {"first_s": statistics.median(first), "second_s": statistics.median(second)}


def of_http(url: str, llm: lampejo.LLM, rounds: int = 9) -> dict[str, float]:
    """Tokens per second of the same streams over HTTP and in this process, in turn, without drafts."""
    body = {"messages": [{"role": "user", "content": "Tell a long story."}], "max_tokens": 192, "temperature": 0}
    body |= {"ignore_eos": True, "lampejo": {"drafts": False, "trace": False}}
    params = {"max_tokens": 192, "temperature": 0.0, "ignore_eos": True, "drafts": False}
    over_http, alone = [], []
    for _ in range(rounds):
        times = []
        with httpx.stream("POST", f"{url}/v1/chat/completions", json={**body, "stream": True}) as response:
            times = [time.perf_counter() for line in response.iter_lines() if '"content":"' in line]
        over_http.append((len(times) - 2) / (times[-1] - times[1]))
        times = [time.perf_counter() for chunk in llm.stream(body["messages"], **params) if chunk.text]
        alone.append((len(times) - 1) / (times[-1] - times[0]))
    ratios = [a / b for a, b in zip(over_http, alone, strict=True)]
    return {"http_chunks_per_s": statistics.median(over_http), "alone_chunks_per_s": statistics.median(alone),
            "ratio": statistics.median(ratios)}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with serving(args.model) as (url, pid):
        started = time.perf_counter()
        result = asyncio.run(soak(url, pid, args.requests, args.concurrency, args.seed))
        seconds = time.perf_counter() - started
        left = left_over(url)
        with lampejo.load(args.model) as llm:
            prefix, http = of_prefix(url, llm, args.seed), of_http(url, llm)
    half = len(result.rss_mb) // 2
    told = {
        "requests": args.requests,
        "concurrency": args.concurrency,
        "seconds": round(seconds, 1),
        "finished": result.num_finished,
        "aborted": result.num_aborted,
        "failed": result.failed[:5],
        "differing": result.differing[:5],
        "left_over": left,
        "rss_mb": [round(x) for x in result.rss_mb],
        "rss_mb_of_second_half": round(max(result.rss_mb[half:]) - result.rss_mb[half], 1),
        "prefix": prefix | {"ratio": prefix["second_s"] / prefix["first_s"]},
        "http": http,
    }
    print(json.dumps(told))
    return int(bool(result.failed or result.differing or any(left.values())))


if __name__ == "__main__":
    sys.exit(main())

"""Output speed and time to first token of OpenAI-compatible servers under the same load, in turn.

The bench's own prompts, each in a stream of its own, so many at once. A round asks each server once; the first does not
count. The last line is JSON: medians over the rounds, and of the time to first token over all answers.

    llama-server -m model.gguf -np 8 -c 16384 --port 8080 &
    lampejo serve model.gguf &
    python scripts/servers_in_turn.py http://127.0.0.1:8000 http://127.0.0.1:8080
"""

import argparse
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI

from lampejo.bench.workloads import mixed


def answer(client, model, messages, max_tokens):
    """Seconds to the first text, and tokens of output."""
    started, first, num_tokens = time.perf_counter(), None, 0
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if first is None and chunk.choices and chunk.choices[0].delta.content:
            first = time.perf_counter() - started
        if chunk.usage:
            num_tokens = chunk.usage.completion_tokens
    return first, num_tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("urls", nargs="+", metavar="URL")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    clients = {url: OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) for url in args.urls}
    models = {url: client.models.list().data[0].id for url, client in clients.items()}
    speeds = {url: [] for url in args.urls}
    firsts = {url: [] for url in args.urls}
    for turn in range(args.rounds + 1):
        prompts = mixed(args.at_once, skip=turn * args.at_once)
        for url, client in clients.items():
            started = time.perf_counter()
            with ThreadPoolExecutor(args.at_once) as pool:
                done = list(pool.map(lambda p: answer(client, models[url], list(p), args.max_tokens), prompts))  # noqa: B023
            seconds = time.perf_counter() - started
            if turn:
                speeds[url].append(sum(n for _, n in done) / seconds)
                firsts[url] += [first for first, _ in done if first is not None]
    told = {
        url: {
            "tok_per_s": round(statistics.median(speeds[url]), 1),
            "first_token_s": round(statistics.median(firsts[url]), 3),
            "num_answers": len(firsts[url]),
        }
        for url in args.urls
    }
    for url, figures in told.items():
        print(f"{url}: {figures['tok_per_s']} tok/s, first token after {figures['first_token_s']} s (median)")
    print(json.dumps(told))


if __name__ == "__main__":
    main()

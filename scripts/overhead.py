"""What a token costs outside the model's operations: scheduling, batches, acceptance, text, statistics.

Runs the real engine over a stand-in for the model that answers at once, and counts all time not spent in it. The last
line is JSON. With the model's own vocabulary the time holds acceptance's tensor work too (arg-max, noise and penalties
over all logits); with a vocabulary of 512 next to nothing but Python remains.

    python scripts/overhead.py
"""

import argparse
import json
import statistics
import time
from types import SimpleNamespace

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from lampejo.config import EngineConfig
from lampejo.engine import Engine
from lampejo.request import Request, StopParams
from lampejo.runner import VerifyOutput
from lampejo.sampling import SamplingParams
from lampejo.scores import Scores
from lampejo.speculate import NGRAM_MAX_WIDTH, NgramDrafter, Speculator
from lampejo.text import TextStream
from lampejo.tokenizer import Tokenizer
from lampejo.width import RowOffer, WidthController

NUM_PROMPT = 1000
SMALL, REAL = 512, 49152


class InstantRunner:
    """A target that says at each position what a periodic text has there, and takes (by its clock) no time for it."""

    def __init__(self, vocab_size: int, period: int) -> None:
        self.device = torch.device("cpu")
        self.drafter = None
        self.target = SimpleNamespace(config=SimpleNamespace(vocab_size=vocab_size))
        self.period = period
        self.logits = 2 * torch.randn(256, vocab_size, generator=torch.Generator().manual_seed(0))
        self.changed = torch.empty(0, dtype=torch.long)
        self.seconds = 0.0
        self.num_state_slots = 0

    def verify(self, batch):
        started = time.perf_counter()
        ids = (batch.positions[batch.logit_index] + 1) % self.period + 2
        self.logits[torch.arange(len(self.changed)), self.changed] = 0.0
        self.changed = ids
        logits = self.logits[: len(ids)]
        logits[torch.arange(len(ids)), ids] = 18.0  # 99 % of the probability at temperature 1
        out = VerifyOutput(Scores(logits), torch.empty(len(batch.ids), 0), torch.empty(len(batch.ids), 0))
        self.seconds += time.perf_counter() - started
        return out

    def commit(self, out, num_committed, saves):
        """Nothing to keep."""


class PerfectDrafter:
    """Stands for DFlash: knows the text, costs nothing."""

    name = "dflash"

    def __init__(self, period: int) -> None:
        self.period = period

    def offer(self, request):
        return RowOffer(request.id, self.name, NGRAM_MAX_WIDTH)

    def draft(self, requests, widths):
        ends = [len(request.ids) for request in requests]
        return [[(end + j) % self.period + 2 for j in range(w)] for end, w in zip(ends, widths, strict=True)]

    def observe(self, batch, taps, num_committed):
        pass

    def forget(self, request):
        pass


def tokenizer_of(vocab_size):
    """Byte-level with short tokens, as long a list as the model's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, *(a + b for a in alphabet for b in alphabet)][:vocab_size]
    backend = Backend(models.BPE({name: i for i, name in enumerate(names)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, {})


CASES = {
    "plain": ({}, 0, []),
    "plain, sampled": ({"temperature": 0.8, "top_p": 0.95, "seed": 1}, 0, []),
    "7 drafts": ({}, 7, ["dflash"]),
    "15 drafts": ({}, 15, ["dflash"]),
    "automatic width, n-gram and DFlash": ({}, None, ["ngram", "dflash"]),
    "7 drafts, sampled": ({"temperature": 0.8, "seed": 1}, 7, ["dflash"]),
    "7 drafts, penalties": ({"repetition_penalty": 1.1, "frequency_penalty": 0.1}, 7, ["dflash"]),
}


def measure(vocab_size, num_rows, sampling, width, drafter_names, tokenizer, num_steps=150):
    """Median seconds per step outside the stand-in, and mean tokens committed per step."""
    period = 400 if width == 0 or width is None else 211
    config = EngineConfig(width=width, max_rows=num_rows, token_budget=2048).resolve(8192)
    config = EngineConfig(**{**vars(config), "num_pages": num_rows * 260})
    runner = InstantRunner(vocab_size, period)
    drafters = {"ngram": NgramDrafter(), "dflash": PerfectDrafter(period)}
    speculator = Speculator([drafters[name] for name in drafter_names], WidthController(NGRAM_MAX_WIDTH, width))
    engine = Engine(runner, speculator, config, [0])
    for n in range(num_rows):
        stops = StopParams(max_tokens=6000, stop=("never said",))
        prompt = [(p + n) % period + 2 for p in range(NUM_PROMPT)]
        text = TextStream(tokenizer, stops.stop)
        engine.add(Request(n, prompt, SamplingParams(**sampling, logprobs=None), stops, text))
    while any(request.num_output == 0 for request in [*engine.scheduler.waiting, *engine.scheduler.running]):
        engine.step()
    engine.step()
    seconds, num_tokens = [], 0
    for _ in range(num_steps):
        before, started = runner.seconds, time.perf_counter()
        deltas = engine.step()
        seconds.append(time.perf_counter() - started - (runner.seconds - before))
        num_tokens += sum(len(delta.ids) for delta in deltas)
    return statistics.median(seconds), num_tokens / num_steps


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    results = []
    print(f"{'':38} rows  tokens/step  Python us/step  us/token   with tensor work us/step  us/token")
    for name, (sampling, width, drafter_names) in CASES.items():
        for num_rows in (1, 8):
            figures = [
                measure(vocab_size, num_rows, sampling, width, drafter_names, tokenizer_of(vocab_size))
                for vocab_size in (SMALL, REAL)
            ]
            (small, num_small), (real, num_real) = figures
            row = {
                "case": name,
                "rows": num_rows,
                "tokens_per_step": round(num_real, 2),
                "python_us_per_step": round(small * 1e6),
                "python_us_per_token": round(small / num_small * 1e6),
                "us_per_step": round(real * 1e6),
                "us_per_token": round(real / num_real * 1e6),
            }
            results.append(row)
            python = f"{row['python_us_per_step']:14}  {row['python_us_per_token']:8}"
            whole = f"{row['us_per_step']:24}  {row['us_per_token']:8}"
            print(f"{name:38} {num_rows:4}  {num_real:11.1f}  {python}   {whole}", flush=True)
    worst = max(row["python_us_per_token"] for row in results)
    print(json.dumps({"worst_python_us_per_token": worst, "results": results}))


if __name__ == "__main__":
    main()

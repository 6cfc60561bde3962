"""A benchmark over tiny models, and results made by hand."""

from typing import Any

import torch

from lampejo.bench.arms import make_speculators
from lampejo.bench.measure import Bench, Results, Suite
from lampejo.bench.stats import Sample
from lampejo.config import EngineConfig
from lampejo.loader import Loaded
from lampejo.models.config import ModelConfig
from lampejo.runner import Runner
from lampejo.speculate import NGRAM_MAX_WIDTH, Speculator
from lampejo.width import WidthController
from scripted import CHAT, EOS, ScriptedRunner, Target, lively_pair, make_tokenizer
from tiny import TINY

TINY_SUITE = Suite(
    num_prompts=2,
    num_sampled=1,
    max_tokens=6,
    runs=1,
    seconds=None,
    concurrency=(1, 3),
    concurrent_tokens=5,
    lengths=(300,),
    rounds=2,
    verify_rounds=2,
    starts=1,
)
CONTEXT = 3000


def config_of(max_context: int = CONTEXT) -> EngineConfig:
    return EngineConfig(num_pages=400).resolve(max_context)


def loaded_of(runner: Any, eos_ids: tuple[int, ...] = (EOS,)) -> Loaded:
    return Loaded(
        runner=runner,
        speculator=Speculator([], WidthController(NGRAM_MAX_WIDTH)),
        tokenizer=make_tokenizer(),
        chat_template=CHAT,
        generation_defaults={},
        eos_ids=eos_ids,
        info={"model": "tiny", "quantization": "none", "device": "cpu", "dtype": "float32", "drafter": "tiny"},
        load_s=0.0,
    )


def scripted_bench(target: Target, arms: tuple[str, ...] = ("plain", "ngram"), rates: Any = None) -> Bench:
    """Over a scripted target, which has no DFlash drafter."""
    config = config_of()
    assert config.num_pages is not None
    loaded = loaded_of(ScriptedRunner(target, config.num_pages, config.page_size))
    speculators = make_speculators(loaded, arms, None, rates)
    return Bench(loaded, config, speculators, Results(list(speculators)))


def tiny_loaded(model: ModelConfig = TINY) -> Loaded:
    """A random target with a random DFlash drafter; nothing ends its answers."""
    config = config_of()
    assert config.num_pages is not None
    target, drafter = lively_pair(model)
    with torch.inference_mode():
        target.model.embed_tokens.weight[:3] *= 0.01  # so that it says characters rather than special tokens
    slots = config.max_rows + config.num_snapshots
    runner = Runner(target, drafter, config.num_pages, config.page_size, num_state_slots=slots)
    return loaded_of(runner, eos_ids=())


def sample(arm: str = "plain", speed: float | None = 100.0, **others: Any) -> Sample:
    fields: dict[str, Any] = {
        "category": "chat",
        "prompt": 0,
        "sampled": False,
        "run": 0,
        "num_tokens": 10,
        "ttft_s": 0.1,
        "num_spec_steps": 0 if arm == "plain" else 4,
        "num_spec_tokens": 0.0 if arm == "plain" else 10.0,
    }
    return Sample(**{**fields, "arm": arm, "tok_per_s": speed, **others})


def made_results() -> Results:
    """As a run of two arms beside one peer would leave them."""
    results = Results(["plain", "auto"])
    for prompt, (plain, auto) in enumerate([(100.0, 150.0), (50.0, 100.0), (200.0, 500.0)]):
        for sampled in (False, True):
            results.samples += [
                sample("plain", plain, prompt=prompt, sampled=sampled),
                sample("auto", auto, prompt=prompt, sampled=sampled),
            ]
    results.slots = {"auto": [0.8, 0.5]}
    results.concurrency = {
        1: {"plain": [10.0, 12.0], "auto": [20.0, 18.0], "llama.cpp": [5.0, 6.0]},
        4: {"plain": [40.0, None], "auto": [50.0, 44.0], "llama.cpp": [10.0, 9.0]},
    }
    timings = {"first_token_s": 0.5, "total_s": 1.0, "tok_per_s": 20.0, "num_prompt_tokens": 300}
    results.lengths = {300: {"plain": [timings, None], "auto": [timings, {**timings, "tok_per_s": 30.0}]}}
    results.verify = {1: [0.010, 0.020], 2: [0.011, 0.024], 4: [0.015, 0.026]}
    results.peers = {
        "llama.cpp": {
            "plain": [50.0, 100.0, 80.0],
            "our_plain": [100.0, 150.0, 160.0],
            "prefill": [100.0, 110.0, None],
            "our_prefill": [300.0, 220.0, 250.0],
        }
    }
    results.start_s = [1.5, 1.0, 2.0]
    results.peak_rss_mb = 512.25
    return results


MACHINE = {"cpu": "a <fast> one", "threads": 2}
MODEL = {
    "model": "tiny & small",
    "quantization": "Q4_1",
    "device": "cpu",
    "dtype": "float32",
    "ops": "reference",
    "drafter": "none",
    "chat_template": "the model's own",
    "thinking": "the template has no such mode",
    "answers": "greedy",
}

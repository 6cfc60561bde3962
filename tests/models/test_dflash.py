"""The DFlash drafter against a second implementation of it, at every step of real decoding on tiny shapes."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dflash_reference import ReferenceDrafter
from lampejo.loader import build_drafter
from lampejo.models.dflash import DFlash
from lampejo.models.drafter_config import drafter_config_from_hf
from lampejo.models.llama import Llama
from lampejo.request import Request, StopParams
from lampejo.runner import Runner
from lampejo.sampling import gumbel_noise
from lampejo.speculate import DFlashDrafter
from lampejo.weights.drafters import open_drafter
from oracle import ROPES, forward
from tiny import TINY, TINY_DRAFTER, make_drafter, make_engine, make_request, make_target, prompt_of, run

TOLERANCE = 1e-4
CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 6,
    "num_target_layers": TINY.num_layers,
    "hidden_size": TINY.hidden_size,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 256,
    "vocab_size": TINY.vocab_size,
    "tie_word_embeddings": False,
    "layer_types": ["full_attention", "full_attention"],
}
RULES: dict[str, Any] = {"mask_token_id": 96, "target_layer_ids": [0, 2]}
SLIDING, MIXED = ["sliding_attention"] * 2, ["sliding_attention", "full_attention"]
# Name -> changes at top level, changes in dflash_config.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain v1": ({}, {}),
    "no layer types": ({"layer_types": None}, {}),
    "a window in both directions": ({"layer_types": SLIDING, "sliding_window": 7, "is_causal": False}, {}),
    "a window smaller than the block": ({"layer_types": SLIDING, "sliding_window": 3, "is_causal": False}, {}),
    "a window, causal by default": ({"layer_types": SLIDING, "sliding_window": 9}, {}),
    "a windowed and a full layer": ({"layer_types": MIXED, "sliding_window": 20}, {}),
    "causal without a window": ({"is_causal": True}, {}),
    "a draft vocabulary": ({}, {"draft_vocab_size": 40}),
    "a draft vocabulary and a Markov head": ({}, {"draft_vocab_size": 40, "markov_rank": 5}),
    "five heads over one": ({"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 10}, {}),
    "three layers, three taps in their own order": (
        {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, {"target_layer_ids": [3, 0, 1]}
    ),
    "blocks of two": ({"block_size": 2}, {}),
    "a window, a draft vocabulary, a Markov head, yarn": (
        {"layer_types": MIXED, "sliding_window": 11, "rope_parameters": ROPES["yarn"]},
        {"draft_vocab_size": 60, "markov_rank": 3},
    ),
} | {f"{kind} rope": ({"rope_theta": None, "rope_parameters": rope}, {}) for kind, rope in ROPES.items()}  # fmt: skip


def write_drafter(folder: Path, name: str) -> Path:
    """A drafter with random weights of a sensible size, in files."""
    top, rules = CASES[name]
    merged = {**CONFIG, **top, "dflash_config": {**RULES, **rules}}
    config = {key: value for key, value in merged.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(make_drafter(drafter_config_from_hf(config)).state_dict(), folder / "model.safetensors")
    return folder


def read_drafter(folder: Path, target: Llama) -> DFlash:
    return build_drafter(*open_drafter(folder, target.config, ""))


class CheckedDrafter(DFlashDrafter):
    """Holds every draft of ours, made on the cached context, against the reference's on the context recomputed.

    What it then lets the engine verify has 0, 1, 2, ... right drafts in turn, so that every accepted length occurs.
    """

    def __init__(self, runner: Runner, reference: ReferenceDrafter, truth: dict[tuple[int, ...], list[int]]) -> None:
        super().__init__(runner)
        self.reference, self.truth = reference, truth
        self.num_checked = self.num_ties = 0
        self.accepted_lengths: set[int] = set()
        self._turn = 0
        assert runner.drafter is not None
        runner.drafter.register_forward_hook(lambda module, inputs, hidden: setattr(self, "hidden", hidden))

    def draft(self, requests: Sequence[Request], widths: Sequence[int]) -> list[list[int]]:
        drafts = super().draft(requests, widths)
        hidden = self.hidden.view(len(requests), -1, self.hidden.shape[-1])
        for request, width, draft, ours in zip(requests, widths, drafts, hidden, strict=True):
            self._check(request, width, draft, ours)
        return [self._right_until(request, width) for request, width in zip(requests, widths, strict=True)]

    def _check(self, request: Request, width: int, draft: list[int], ours: torch.Tensor) -> None:
        anchor, anchor_id = len(request.ids) - 1, request.ids[-1]
        layers = tuple(range(TINY.num_layers))
        states = forward(self.runner.target, request.ids[:anchor], layers)[1].chunk(len(layers), dim=-1)
        taps = torch.cat([states[i] for i in self.reference.rules["target_layer_ids"]], dim=-1)
        block = self.reference.block(self.reference.context(taps), anchor_id, anchor)
        assert (ours - block).abs().max() < TOLERANCE, f"anchor {anchor}"

        def noise(position: int) -> torch.Tensor:
            return gumbel_noise(request.seed, [position], torch.arange(TINY.vocab_size))[0]

        expected, gaps = self.reference.draft(block, anchor_id, anchor, request.sampling.temperature, noise)
        assert len(draft) == width
        for token_id, wanted, gap in zip(draft, expected, gaps, strict=False):
            self.num_checked += 1
            if token_id != wanted:  # rounding may decide between equals; what follows hangs on it
                assert gap < TOLERANCE, f"anchor {anchor}: {draft} instead of {expected}"
                self.num_ties += 1
                break

    def _right_until(self, request: Request, width: int) -> list[int]:
        num_right = self._turn % (width + 1)
        self._turn += 1
        self.accepted_lengths.add(num_right)
        right = self.truth[tuple(request.prompt_ids)][request.num_output : request.num_output + width]
        return [t if j < num_right else (t + 1) % TINY.vocab_size for j, t in enumerate(right)]


# A real token may equal the mask token; a prompt of one token leaves a context of one.
PROMPTS = [[5], [96, 96, 3, 96], prompt_of(40, seed=1), prompt_of(75, seed=2)]
STOPS = StopParams(max_tokens=24, ignore_eos=True)
SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 5}, {}, {"temperature": 1.3, "seed": 6}]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", CASES)
def test_drafts_on_the_cached_context_equal_the_reference_on_the_context_recomputed(
    tmp_path: Path, name: str, tied: bool
):
    """R1, C4, C5: after every accepted length, in unequal batches, after chunked prefill, across pages, with noise."""
    target = make_target(replace(TINY, tie_word_embeddings=tied))
    requests = [make_request(p, STOPS, **s) for p, s in zip(PROMPTS, SAMPLINGS, strict=True)]
    truth = run(make_engine(target), [make_request(p, STOPS, **s) for p, s in zip(PROMPTS, SAMPLINGS, strict=True)])
    folder = write_drafter(tmp_path, name)
    engine = make_engine(target, drafter=read_drafter(folder, target), width=5, page_size=8, token_budget=24)
    checked = CheckedDrafter(
        engine.runner,
        ReferenceDrafter(folder, target.model.embed_tokens.weight, target.lm_head.weight),
        {tuple(p): t for p, t in zip(PROMPTS, truth, strict=True)},
    )
    engine.speculator.drafters.append(checked)
    assert run(engine, requests) == truth
    block_size = checked.reference.rules["block_size"]
    assert checked.accepted_lengths == set(range(block_size))
    assert checked.num_checked > 100 * (1 if block_size > 2 else 0.4)
    assert checked.num_ties < 0.02 * checked.num_checked


def test_a_context_taken_from_the_prefix_cache_gives_the_same_drafts(tmp_path: Path):
    """M1: pages that another request has filled hold the drafter's context too; also after a page of its answer."""
    target, prompt = make_target(), prompt_of(50)
    folder = write_drafter(tmp_path, "a draft vocabulary and a Markov head")
    engine = make_engine(target, drafter=read_drafter(folder, target), width=5, page_size=8)
    truth = run(make_engine(target), [make_request(prompt, STOPS)])[0]
    reference = ReferenceDrafter(folder, target.model.embed_tokens.weight, target.lm_head.weight)
    longer = prompt + truth[:20]
    checked = CheckedDrafter(engine.runner, reference, {tuple(prompt): truth, tuple(longer): truth[20:]})
    engine.speculator.drafters.append(checked)
    for text, stops, least in ((prompt, STOPS, 0), (prompt, STOPS, 48), (longer, StopParams(max_tokens=4), 64)):
        request = make_request(text, stops)
        run(engine, [request])
        assert request.num_cached is not None and request.num_cached >= least
        assert request.stats.num_spec_steps > 0


@pytest.mark.parametrize("draft_vocab_size", [None, 40])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_draft_logits_are_the_targets_own_head_over_all_of_its_vocabulary(tied: bool, draft_vocab_size: int | None):
    """C4: fault: the embedding taken for an untied head, or the last ids lost to padding."""
    target = make_target(replace(TINY, tie_word_embeddings=tied))
    last = TINY.vocab_size - 1
    drafter = make_drafter(replace(TINY_DRAFTER, draft_vocab_size=draft_vocab_size))
    known = torch.arange(TINY.vocab_size)
    if draft_vocab_size is not None:
        drafter.draft_token_ids[-1] = last
        known = drafter.draft_token_ids.long()
    seen: list[torch.Tensor] = []
    drafter.register_forward_hook(lambda module, inputs, hidden: seen.append(hidden))
    engine = make_engine(target, drafter=drafter, dflash=True, width=5)
    runner, request = engine.runner, make_request(prompt_of(20), STOPS)
    run_until_decoding(engine, request)
    draft = runner.draft([request], [5])[0]
    assert draft == known[target.logits(seen.pop()[1:])[:, known].argmax(-1)].tolist()
    # A head whose last row wins: the last id of the vocabulary can be drafted.
    hidden = torch.ones(6, TINY.hidden_size)
    drafter.register_forward_hook(lambda module, inputs, output: hidden)
    runner.draft_head.weight[-1] = 100.0
    assert runner.draft([request], [5])[0] == [last] * 5


def run_until_decoding(engine: Any, request: Request) -> None:
    engine.add(request)
    while request.num_output == 0:
        engine.step()


def test_a_narrower_draft_is_the_beginning_of_a_wider_one():
    """FORMATS: the first slots of a block are drafted as if all were verified; the block is not cut short."""
    config = replace(TINY_DRAFTER, draft_vocab_size=50, markov_rank=4)
    engine = make_engine(make_target(), drafter=make_drafter(config), dflash=True, width=5)
    requests = [make_request(prompt_of(n, seed=n), STOPS) for n in (9, 30)]
    for request in requests:
        run_until_decoding(engine, request)
    whole = engine.runner.draft(requests, [5, 5])
    for widths in ([1, 1], [2, 4], [5, 3]):
        assert engine.runner.draft(requests, widths) == [d[:w] for d, w in zip(whole, widths, strict=True)]
    assert engine.runner.draft(requests[1:], [3]) == [whole[1][:3]]

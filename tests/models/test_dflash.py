"""The DFlash drafter against a second implementation of it, at every step of real decoding on tiny shapes."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dflash_checks import CheckedDrafter, Texts, decode_checked, read_drafter, reference_for
from lampejo.models.drafter_config import drafter_config_from_hf
from lampejo.request import Request, StopParams
from oracle import ROPES
from published import as_speculators, random_weights, tensor_shapes, write
from tiny import TINY, TINY_DRAFTER, make_drafter, make_engine, make_request, make_target, prompt_of, run

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


# What the speculators library adds. Own parts are random, so that taking the target's instead would show.
SPECULATORS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "from the anchor on": {"sample_from_anchor": True},
    "a draft vocabulary on the target's head": {"draft_ids": range(0, 97, 2)},
    "a draft vocabulary on its own head": {"draft_ids": range(5, 70), "own_head": True},
    "its own embedding": {"own_embedding": True},
    "its own embedding and head, from the anchor on": {
        "own_embedding": True, "own_head": True, "sample_from_anchor": True
    },
    "windows in both directions, from the anchor on": {"sliding_window_non_causal": True, "sample_from_anchor": True},
    "all of it": {
        "draft_ids": range(1, 97, 3), "own_embedding": True, "own_head": True, "sample_from_anchor": True,
        "sliding_window_non_causal": True,
    },
}  # fmt: skip


def write_saved(
    folder: Path, draft_ids: Sequence[int] = (), own_embedding: bool = False, own_head: bool = False, **changes: Any
) -> Path:
    """A drafter in the layout of the speculators library, with a windowed and a full layer."""
    config = {**CONFIG, "layer_types": MIXED, "sliding_window": 9, "dflash_config": RULES}
    hidden, vocab_size = CONFIG["hidden_size"], CONFIG["vocab_size"]
    generator = torch.Generator().manual_seed(7)
    embedding = torch.randn(vocab_size, hidden, generator=generator)
    head = torch.randn(len(draft_ids) or vocab_size, hidden, generator=generator)
    return write(
        folder,
        *as_speculators(
            config,
            random_weights(tensor_shapes(config)),
            draft_ids=list(draft_ids) or None,
            embedding=embedding if own_embedding else None,
            head=head if own_head else None,
            **changes,
        ),
    )


# A real token may equal the mask token; a prompt of one token leaves a context of one.
PROMPTS = [[5], [96, 96, 3, 96], prompt_of(40, seed=1), prompt_of(75, seed=2)]
STOPS = StopParams(max_tokens=24, ignore_eos=True)
SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 5}, {}, {"temperature": 1.3, "seed": 6}]


@cache
def texts(tied: bool) -> Texts:
    return Texts(make_target(replace(TINY, tie_word_embeddings=tied)), PROMPTS, 24, SAMPLINGS)


@pytest.mark.parametrize(("name", "tied"), [("plain v1", True), *((name, i % 2 > 0) for i, name in enumerate(CASES))])
def test_drafts_on_the_cached_context_equal_the_reference_on_the_context_recomputed(
    tmp_path: Path, name: str, tied: bool
):
    """R1, C4, C5: after every accepted length, in unequal batches, after chunked prefill, across pages, with noise."""
    folder = write_drafter(tmp_path, name)
    known = texts(tied)
    assert_checked(decode_checked(folder, reference_for(folder, known.target), known, token_budget=24))


def assert_checked(checked: CheckedDrafter) -> None:
    """Every accepted length occurred, and drafts were compared, not passed as ties."""
    assert checked.accepted_lengths == set(range(checked.reference.num_drafts + 1))
    assert checked.num_checked > 30 * min(checked.reference.num_drafts, 3)
    assert checked.num_ties < 0.02 * checked.num_checked


@pytest.mark.parametrize("name", SPECULATORS)
def test_drafters_of_the_speculators_library_draft_as_the_reference_does(tmp_path: Path, name: str):
    """FORMATS 2: row j predicts anchor + j + 1, draft ids, own embedding and head, the causality of windows."""
    folder = write_saved(tmp_path, **SPECULATORS[name])
    known = texts(tied=False)
    assert_checked(decode_checked(folder, reference_for(folder, known.target), known, token_budget=24))


def test_a_context_taken_from_the_prefix_cache_gives_the_same_drafts(tmp_path: Path):
    """M1: pages that another request has filled hold the drafter's context too; also after a page of its answer."""
    target, prompt = make_target(), prompt_of(50)
    folder = write_drafter(tmp_path, "a draft vocabulary and a Markov head")
    engine = make_engine(target, drafter=read_drafter(folder, target), width=5, page_size=8)
    longer = prompt + Texts(target, [prompt], 20).answers[tuple(prompt)]
    checked = CheckedDrafter(engine.runner, reference_for(folder, target), Texts(target, [prompt, longer], 24))
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

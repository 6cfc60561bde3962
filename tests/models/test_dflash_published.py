"""Drafters of the published shapes, run through the whole engine on tiny targets of every architecture.

The weights of the releases cannot be had here; all the rest is held against the second implementation: their layers,
taps, blocks of 16, windows and causality, on targets with as many layers as theirs, and on targets whose residual
streams come from experts and from recurrent layers.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_checks import CheckedDrafter, Texts, decode_checked, reference_for
from dflash_reference import ReferenceDrafter
from lampejo.ops.cpu import instruction_set
from published import PUBLISHED, Published, as_speculators, random_weights, small, tensor_shapes, write, write_gguf
from tiny import TINY, TINY_TARGETS, make_target, prompt_of

ROWS = {row.name: row for row in PUBLISHED}
JUNE, FIRST = ROWS["Qwen3.6-35B-A3B-DFlash, June"], ROWS["Qwen3.5-4B-DFlash"]
PROMPTS = [[5], *(prompt_of(n, seed=n) for n in (9, 14, 21, 33, 40))]
SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 3}]
NUM_TOKENS = 36
FOUR_LAYERS = {"hidden_size": TINY.hidden_size, "num_target_layers": 4, "target_layer_ids": [3, 0, 2]}  # round about


def shrunk(row: Published, **changes: Any) -> dict[str, Any]:
    """The file of a drafter for a tiny target. Windows get so short that the texts of a test are longer."""
    window = None if row.window is None else row.window // 256 - 3  # 4096 -> 13, 2048 -> 5: less than a block too
    sizes = {"vocab_size": TINY.vocab_size, "mask_token_id": 96, "sliding_window": window, **changes}
    return small(row.config, **sizes)


def assert_checked(checked: CheckedDrafter) -> None:
    assert checked.accepted_lengths == set(range(checked.reference.num_drafts + 1))
    assert checked.num_checked > 200 and checked.num_ties < 0.02 * checked.num_checked


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.name, marks=[pytest.mark.slow] * (row.target_layers not in (32, 48)))
        for row in PUBLISHED
    ],
)
def test_every_published_shape_drafts_as_the_reference_does(row: Published, tmp_path: Path):
    """Taps of a target of 32 to 64 layers, five to eight drafter layers, blocks of 16, windows, at every step."""
    known = deep(row.target_layers)
    folder = write(tmp_path / "d", shrunk(row))
    assert_checked(decode_checked(folder, reference_for(folder, known.target), known, token_budget=112))


@cache
def deep(num_layers: int) -> Texts:
    """A narrow target with as many layers as a released one."""
    sizes = {"num_layers": num_layers, "hidden_size": 16, "intermediate_size": 24, "num_heads": 4}
    return Texts(make_target(replace(TINY, tie_word_embeddings=False, **sizes)), PROMPTS, NUM_TOKENS, page_size=16)


@cache
def shallow(architecture: str) -> Texts:
    """Four layers, and texts with noise."""
    target = make_target(replace(TINY_TARGETS[architecture], tie_word_embeddings=False))
    return Texts(target, PROMPTS, NUM_TOKENS, SAMPLINGS, page_size=16)


@pytest.mark.parametrize("architecture", [name for name in TINY_TARGETS if name != "llama"])
@pytest.mark.parametrize("row", [FIRST, JUNE], ids=lambda row: row.name)
def test_published_shapes_draft_right_on_every_architecture(row: Published, architecture: str, tmp_path: Path):
    """Taps of experts and of recurrent layers, committed states after every accepted length, with noise too."""
    known = shallow(architecture)
    folder = write(tmp_path / "d", shrunk(row, **FOUR_LAYERS))
    assert_checked(decode_checked(folder, reference_for(folder, known.target), known))


@pytest.mark.parametrize("architecture", ["qwen3_moe", "qwen3_5"])
def test_a_saved_drafter_with_all_it_may_have_drafts_right_on_them_too(architecture: str, tmp_path: Path):
    """FORMATS 2: the other convention of layer ids, own embedding, draft vocabulary, from the anchor on; and yarn."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    known, config = shallow(architecture), shrunk(JUNE, **FOUR_LAYERS)
    config |= {"rope_parameters": yarn, "max_position_embeddings": 64}
    ids = list(range(0, 97, 2))
    saved = as_speculators(
        config,
        random_weights(tensor_shapes(config)),
        draft_ids=ids,
        embedding=torch.randn(97, config["hidden_size"]),
        sample_from_anchor=True,
    )
    folder = write(tmp_path / "d", *saved)
    assert_checked(decode_checked(folder, reference_for(folder, known.target), known))


def test_a_gguf_drafter_drafts_as_the_folder_that_it_was_made_of(tmp_path: Path):
    """FORMATS 3: the reference reads the folder, ours the GGUF."""
    known, config = shallow("qwen3"), shrunk(JUNE, **FOUR_LAYERS)
    weights = random_weights(tensor_shapes(config))
    reference = reference_for(write(tmp_path / "d", config, weights), known.target)
    assert_checked(decode_checked(write_gguf(tmp_path / "d.gguf", config, weights), reference, known))


def rounded(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """To 8 bits per 32 along a row, exactly as the kernels hold them, so that rounding of weights is no difference."""
    result = {}
    for name, tensor in weights.items():
        if tensor.ndim == 2:
            groups = tensor.float().view(len(tensor), -1, 32)
            scale = (groups.abs().amax(-1, keepdim=True) / 127).half().float()
            tensor = ((groups / scale).round().clamp(-127, 127) * scale).view(tensor.shape)
        result[name] = tensor.float()
    return result


@pytest.mark.skipif(instruction_set() is None, reason="the CPU kernels were not built")
@pytest.mark.parametrize("kind", ["first", "June", "saved"])
def test_drafts_on_the_kernels_equal_the_reference_up_to_the_rounding_of_activations(kind: str, tmp_path: Path):
    """The fused block attention with windows and causality, 16 rows, and the head on rows from the anchor on."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    row = FIRST if kind == "first" else JUNE
    config = shrunk(row, **FOUR_LAYERS | sizes)
    weights = rounded(random_weights(tensor_shapes(config)))
    generator = torch.Generator().manual_seed(8)
    own = rounded({name: torch.randn(97, 64, generator=generator) for name in ("embedding", "head")})
    saved = as_speculators(
        config, weights, **own, sample_from_anchor=kind == "saved", sliding_window_non_causal=kind != "saved"
    )
    folder = write(tmp_path / "d", *saved)
    reference = ReferenceDrafter(folder, torch.empty(0), torch.empty(0))  # needs none of the packed target's parts
    target = make_target(replace(TINY, **sizes, num_heads=4, num_kv_heads=2, tie_word_embeddings=False), packed=True)
    known = Texts(target, PROMPTS, NUM_TOKENS, page_size=16)
    checked = decode_checked(folder, reference, known, packed_pages=16, tolerance=0.25)
    assert checked.accepted_lengths == set(range(reference.num_drafts + 1))
    assert checked.num_checked > 200 and checked.num_ties < 0.06 * checked.num_checked
    assert checked.worst > 1e-4  # it is the kernels that were compared

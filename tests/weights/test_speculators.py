"""The published drafters: known by name, and read right from files of exactly their shapes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lampejo.errors import UserError
from lampejo.models.config import DrafterConfig, ModelConfig, RopeConfig
from lampejo.models.drafter_config import drafter_config_from_hf
from lampejo.weights.drafters import open_drafter
from lampejo.weights.speculators import SPECULATORS, speculator_for, speculator_named, speculators_like
from published import FULL, PUBLISHED, SLIDING, Published, as_speculators, random_weights, small, tensor_shapes, write
from published import write_gguf as write_drafter_gguf


def target_of(row: Published) -> ModelConfig:
    """What a small target needs to have for a small drafter of this row."""
    return ModelConfig(
        "llama", row.vocab_size, 16, 24, row.target_layers, 4, 2, 8, 1e-6, RopeConfig(1e6), 4096, True
    )  # fmt: skip


# Names --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    ["Qwen3.5-4B", "Qwen3.5-9B", "Qwen3.5-27B", "Qwen3.5-35B-A3B", "Qwen3.5-122B-A10B", "Qwen3.6-35B-A3B"],
)
def test_the_six_are_known_in_both_directions_and_from_both_publishers(target: str):
    """FORMATS 1: Modal's first, Z Lab's with the same weights."""
    known = next(known for known in SPECULATORS if f"Qwen/{target}" in known.targets)
    assert known.repos == (f"modal-labs/{target}-DFlash", f"z-lab/{target}-DFlash")
    assert speculator_for([f"Qwen/{target}"], known.sizes) is known
    assert all(speculator_named(repo) is known for repo in known.repos)


def test_the_older_ones_are_known_too():
    """FORMATS 1: Qwen3, Qwen3-Coder, Qwen3.6-27B, Llama 3.1."""
    expected = {
        "Qwen/Qwen3-4B": "z-lab/Qwen3-4B-DFlash-b16",
        "Qwen/Qwen3-8B": "z-lab/Qwen3-8B-DFlash-b16",
        "Qwen/Qwen3-Coder-30B-A3B-Instruct": "z-lab/Qwen3-Coder-30B-A3B-DFlash",
        "Qwen/Qwen3-Coder-Next": "z-lab/Qwen3-Coder-Next-DFlash",
        "Qwen/Qwen3.6-27B": "z-lab/Qwen3.6-27B-DFlash",
        "meta-llama/Llama-3.1-8B-Instruct": "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
    }
    for target, repo in expected.items():
        known = speculator_named(repo)
        assert known is not None and known.repos == (repo,)
        assert speculator_for([target], known.sizes) is known
    assert len(SPECULATORS) == 6 + len(expected)
    assert sum(known.trained_on is not None for known in SPECULATORS) == 2  # those of Qwen3-4B and 8B, without thinking


@pytest.mark.parametrize(
    "name",
    ["Qwen/Qwen3.5-27B", "Qwen3.5-27B", "qwen3_5-27b", "Qwen/Qwen3.5-27B-FP8", "unsloth/Qwen3.5-27B-GGUF",
     "Qwen3.5-27B-UD-Q4_K_XL", "Qwen3.5 27B", "someone/Qwen3.5-27B-GPTQ-Int4", "Qwen3.5-27B-bf16", "Qwen3.5-27B-4bit"],
)  # fmt: skip
def test_a_target_is_recognised_whatever_its_publisher_case_and_quantisation(name: str):
    """Fault: an FP8 release, a GGUF or a local copy without the drafter that belongs to it."""
    known = speculator_for([name], (5120, 64, 248320))
    assert known is not None and known.targets == ("Qwen/Qwen3.5-27B",)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Qwen/Qwen3.5-27B", (5120, 62, 248320)),  # a model of that name with other layers
        ("Qwen/Qwen3.5-27B-Base", (5120, 64, 248320)),
        ("Qwen/Qwen3.6-27B-Instruct", (5120, 64, 248320)),
        ("Qwen/Qwen3-4B-Instruct-2507", (2560, 36, 151936)),
        ("My-Qwen3-4B", (2560, 36, 151936)),
        ("", (2560, 36, 151936)),
    ],
)
def test_another_model_of_the_same_sizes_or_name_is_not_mistaken(name: str, sizes: tuple[int, int, int]):
    """Fault: fine-tunes and base models silently given a drafter that was not made for them."""
    assert speculator_for([name], sizes) is None


def test_models_of_the_same_sizes_are_found_for_the_hint():
    """Two releases may share their sizes: both are told."""
    assert [known.targets[0] for known in speculators_like((2048, 40, 248320))] == [
        "Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3.6-35B-A3B",
    ]  # fmt: skip
    assert speculators_like((2048, 41, 248320)) == ()


# Files --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row.name)
def test_the_configuration_of_every_published_drafter_is_read_as_released(row: Published):
    """C1, C5: taps, mask, block, windows, causality and RoPE of every row of the table, in the files' full sizes."""
    config = drafter_config_from_hf(row.config)
    assert (config.hidden_size, config.intermediate_size, config.head_dim) == (row.hidden, row.mlp, 128)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (row.num_layers, row.heads, row.kv_heads)
    assert (config.target_layer_ids, config.num_target_layers) == (tuple(row.taps), row.target_layers)
    assert (config.mask_token_id, config.vocab_size) == (row.mask, row.vocab_size)
    assert (config.block_size, config.max_drafts, config.sample_from_anchor) == (16, 15, False)
    assert config.windows == row.windows
    assert config.causal == tuple(window is not None for window in row.windows)
    assert config.rope == RopeConfig(float(row.theta)) and config.rms_norm_eps == 1e-6
    assert not config.own_embedding and not config.own_head and config.tap_size == row.hidden


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row.name)
def test_checkpoints_of_every_published_shape_open_for_their_targets(row: Published, tmp_path: Path):
    """C2, C3: the key list of the releases, no tensor more or less; and for no target with another number of layers."""
    config = small(row.config)
    weights = random_weights(tensor_shapes(config))
    assert len(weights) == 3 + 11 * row.num_layers
    folder = write(tmp_path / "d", config, weights)
    opened, tensors = open_drafter(folder, target_of(row), row.name)
    assert opened.target_layer_ids == tuple(row.taps) and opened.windows == row.windows
    assert tensors.keys() == weights.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in weights.items())
    with pytest.raises(UserError, match="number of target layers"):
        open_drafter(folder, replace(target_of(row), num_layers=row.target_layers + 1), row.name)
    if row.june:
        with pytest.raises(UserError, match="lacks the key 'block_size'"):
            drafter_config_from_hf(
                {**config, "dflash_config": {k: v for k, v in config["dflash_config"].items() if k != "block_size"}}
            )


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row.name)
def test_the_same_drafter_in_all_three_layouts_is_the_same_drafter(row: Published, tmp_path: Path):
    """FORMATS 1-3: both id conventions, windows, causality, RoPE; names of tensors; nothing is transposed."""
    config = small(row.config)
    weights = random_weights(tensor_shapes(config))
    plain = open_drafter(write(tmp_path / "z", config, weights), target_of(row), "")
    gguf = open_drafter(write_drafter_gguf(tmp_path / "d.gguf", config, weights), target_of(row), "")
    theirs, tensors = as_speculators(config, weights)
    saved = open_drafter(write(tmp_path / "s", theirs, tensors), target_of(row), "")
    for other in (gguf, saved):
        assert other[0].rms_norm_eps == pytest.approx(1e-6)  # GGUF keeps it in 32 bits
        told = {name: getattr(other[0], name) for name in ("rms_norm_eps", "target_hidden_size")}
        assert other[0] == replace(plain[0], num_target_layers=None, **told) and other[0].tap_size == 16
        assert other[1].keys() == plain[1].keys()
        assert all(torch.equal(tensor.float(), plain[1][name].float()) for name, tensor in other[1].items())


# The speculators library ----------------------------------------------------------------------------------------------

ROW = next(row for row in PUBLISHED if row.name == "Qwen3.6-27B-DFlash")
VOCAB = 300
CONFIG = small(ROW.config, vocab_size=VOCAB, mask_token_id=297)
WEIGHTS = random_weights(tensor_shapes(CONFIG))
TARGET = replace(target_of(ROW), vocab_size=VOCAB)


def open_saved(folder: Path, **changes: Any) -> tuple[DrafterConfig, dict[str, torch.Tensor]]:
    return open_drafter(write(folder, *as_speculators(CONFIG, WEIGHTS, **changes)), TARGET, "Qwen/Qwen3.6-27B")


def test_a_draft_vocabulary_comes_from_its_maps(tmp_path: Path):
    """FORMATS 2: d2t holds differences, t2d a mark for each target id; both must say the same."""
    ids = [0, 3, 4, 9, 150, 299]
    config, tensors = open_saved(tmp_path / "d", draft_ids=ids)
    assert config.draft_vocab_size == 6 and not config.own_head
    assert tensors["draft_token_ids"].tolist() == ids and "d2t" not in tensors and "t2d" not in tensors
    saved, maps = as_speculators(CONFIG, WEIGHTS, draft_ids=ids)
    maps["t2d"][1] = True
    with pytest.raises(UserError, match="d2t and t2d contradict"):
        open_drafter(write(tmp_path / "torn", saved, maps), TARGET, "")
    del maps["t2d"]
    with pytest.raises(UserError, match="lacks tensors: t2d"):
        open_drafter(write(tmp_path / "half", saved, maps), TARGET, "")
    with pytest.raises(UserError, match="d2t"):
        open_drafter(write(tmp_path / "none", saved, WEIGHTS), TARGET, "")


def test_an_embedding_and_a_head_of_its_own_are_read(tmp_path: Path):
    """FORMATS 2: self-contained weights; copies for training are left out."""
    embedding, head = torch.randn(VOCAB, 16).bfloat16(), torch.randn(6, 16).bfloat16()
    extra = {"verifier_norm.weight": torch.ones(16), "verifier_lm_head.weight": head.clone()}
    saved, tensors = as_speculators(CONFIG, WEIGHTS, draft_ids=list(range(6)), embedding=embedding, head=head)
    config, opened = open_drafter(write(tmp_path / "d", saved, tensors | extra), TARGET, "")
    assert config.own_embedding and config.own_head
    assert torch.equal(opened["embed_tokens.weight"], embedding) and torch.equal(opened["lm_head.weight"], head)
    assert not extra.keys() & opened.keys()
    with pytest.raises(UserError, match=r"'lm_head.weight' has shape \[6, 16\].*\[300, 16\]"):
        open_saved(tmp_path / "whole", head=head)


def test_a_drafter_of_another_hidden_size_needs_both_of_its_own(tmp_path: Path):
    """FORMATS 2: target_hidden_size; the target's embedding and head would not fit."""
    wide = replace(TARGET, hidden_size=24)
    shapes = tensor_shapes(CONFIG) | {"fc.weight": (16, len(ROW.taps) * 24)}
    own = {"embedding": torch.randn(VOCAB, 16).bfloat16(), "head": torch.randn(VOCAB, 16).bfloat16()}
    both = as_speculators(CONFIG, random_weights(shapes), target_hidden_size=24, **own)
    config, _ = open_drafter(write(tmp_path / "both", *both), wide, "")
    assert (config.hidden_size, config.tap_size) == (16, 24)
    with pytest.raises(UserError, match="hidden size is 24, the model's is 16"):
        open_drafter(tmp_path / "both", TARGET, "")
    one = as_speculators(CONFIG, random_weights(shapes), target_hidden_size=24, head=own["head"])
    with pytest.raises(UserError, match="no embedding and head of its own"):
        open_drafter(write(tmp_path / "one", *one), wide, "")


def test_rules_of_a_saved_drafter(tmp_path: Path):
    """FORMATS 2: causality of sliding layers, prediction from the anchor on, the recorded verifier."""
    causal = (True,) * 4 + (False,)
    assert open_saved(tmp_path / "a")[0].causal == causal
    assert open_saved(tmp_path / "b", sliding_window_non_causal=True)[0].causal == (False,) * 5
    anchored = open_saved(tmp_path / "c", sample_from_anchor=True)[0]
    assert anchored.sample_from_anchor and anchored.max_drafts == anchored.block_size == 16
    about = {"speculators_config": {"verifier": {"name_or_path": "Qwen/Qwen3.6-27B"}}}
    assert open_saved(tmp_path / "e", **about)[0].target_name == "Qwen/Qwen3.6-27B"
    about["speculators_config"]["verifier"]["name_or_path"] = "Qwen/Qwen3-8B"
    with pytest.raises(UserError, match=r"made for Qwen/Qwen3-8B, the model is Qwen/Qwen3\.6-27B"):
        open_saved(tmp_path / "f", **about)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"aux_hidden_state_layer_ids": None}, "lacks the key 'target_layer_ids'"),
        ({"aux_hidden_state_layer_ids": [0, 17]}, "'aux_hidden_state_layer_ids' is .*plus one"),
        ({"aux_hidden_state_layer_ids": [2, 65]}, "taps layer 64, the model's layers are 0 to 63"),
        ({"mask_token_id": None}, "lacks the key 'mask_token_id'"),
        ({"mask_token_id": 300}, "'mask_token_id' is 300"),
        ({"block_size": None}, "lacks the key 'block_size'"),
        ({"sliding_window_non_causal": None}, "lacks the key 'sliding_window_non_causal'"),
        ({"transformer_layer_config": None}, "lacks the key 'transformer_layer_config'"),
        ({"transformer_layer_config": [1]}, "'transformer_layer_config' is"),
        ({"draft_vocab_size": 301}, "'draft_vocab_size' is 301"),
        ({"shift_label": True}, "'shift_label' = True"),
        ({"projector_type": "domino"}, "Domino"),
        ({"speculators_model_type": "dspark"}, "DSpark"),
        ({"speculators_model_type": "dflash2"}, "DFlash2"),
        ({"speculators_model_type": "eagle3"}, "not DFlash"),
    ],
)
def test_what_a_saved_drafter_lacks_or_has_too_much_is_named(tmp_path: Path, change: dict[str, Any], message: str):
    """C1, C2: every key that decides how the drafter computes."""
    with pytest.raises(UserError, match=message) as caught:
        open_saved(tmp_path / "d", **change)
    assert caught.value.remedy


# llama.cpp's GGUF -----------------------------------------------------------------------------------------------------


def open_gguf(path: Path, **metadata: Any) -> tuple[DrafterConfig, dict[str, torch.Tensor]]:
    return open_drafter(write_drafter_gguf(path, CONFIG, WEIGHTS, **metadata), TARGET, "")


def test_rules_of_a_gguf_drafter(tmp_path: Path):
    """FORMATS 3: causality, prediction from the anchor on, RoPE scaling, quantised matrices, the mask's two places."""
    assert open_gguf(tmp_path / "a.gguf")[0].causal == (True,) * 4 + (False,)
    assert open_gguf(tmp_path / "b.gguf", attention__causal=False)[0].causal == (False,) * 5
    anchored = open_gguf(tmp_path / "c.gguf", sample_from_anchor=True)[0]
    assert anchored.sample_from_anchor and anchored.max_drafts == 16
    placed = open_gguf(tmp_path / "d.gguf", tokenizer__ggml__mask_token_id=None, mask_token_id=291)[0]
    assert placed.mask_token_id == 291
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 4096}
    config = {**CONFIG, "rope_scaling": None, "rope_theta": None, "rope_parameters": yarn}
    path = write_drafter_gguf(tmp_path / "e.gguf", config, WEIGHTS)
    assert open_drafter(path, TARGET, "")[0].rope == drafter_config_from_hf(config).rope
    wide = small(ROW.config, vocab_size=VOCAB, mask_token_id=297, hidden_size=32, intermediate_size=64, head_dim=32)
    weights = random_weights(tensor_shapes(wide))
    quantised = write_drafter_gguf(tmp_path / "f.gguf", wide, weights, kind="Q8_0")
    tensors = open_drafter(quantised, replace(TARGET, hidden_size=32), "")[1]
    assert all(torch.allclose(tensors[name], t.float(), atol=0.03, rtol=0.01) for name, t in weights.items())


def test_a_gguf_drafter_may_bring_its_vocabulary_embedding_and_head(tmp_path: Path):
    """llama.cpp: d2t holds target ids, not differences."""
    ids = torch.tensor([0, 3, 4, 9, 150, 299])
    own = {"embed_tokens.weight": torch.randn(VOCAB, 16), "lm_head.weight": torch.randn(6, 16), "draft_token_ids": ids}
    path = write_drafter_gguf(tmp_path / "d.gguf", CONFIG, WEIGHTS | own)
    config, tensors = open_drafter(path, TARGET, "")
    assert (config.draft_vocab_size, config.own_embedding, config.own_head) == (6, True, True)
    assert all(torch.equal(tensors[name].float(), own[name].float()) for name in own)
    differences = own | {"draft_token_ids": ids - torch.arange(6)}
    with pytest.raises(UserError, match="ascending"):
        open_drafter(write_drafter_gguf(tmp_path / "e.gguf", CONFIG, WEIGHTS | differences), TARGET, "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_layers": None}, "lacks the key 'target_layers'"),
        ({"target_layers": [0, 17]}, "'target_layers' is .*plus one"),
        ({"target_layers": [2, 65, 3, 4, 5]}, "taps layer 64"),
        ({"tokenizer__ggml__mask_token_id": None}, "lacks the key 'mask_token_id'"),
        ({"tokenizer__ggml__mask_token_id": 300}, "'mask_token_id' is 300"),
        ({"block_size": None}, "lacks the key 'block_size'"),
        ({"rope__freq_base": None}, "lacks the key 'rope.freq_base'"),
        ({"attention__sliding_window_pattern": None}, "lacks the key 'attention.sliding_window_pattern'"),
        ({"attention__sliding_window_pattern": [True, False]}, "a list of 5"),
        ({"rope__dimension_count": 4}, "'rope.dimension_count' = 4 is not supported"),
    ],
)
def test_what_a_gguf_drafter_lacks_is_named(tmp_path: Path, change: dict[str, Any], message: str):
    """C1: as for the other layouts."""
    with pytest.raises(UserError, match=message) as caught:
        open_gguf(tmp_path / "d.gguf", **change)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("name", "family"), [("selector_hidden", "DFlash2"), ("markov_w1", "DSpark"), ("conf_proj", "DSpark")]
)
def test_newer_families_in_gguf_are_refused_by_name(tmp_path: Path, name: str, family: str, monkeypatch):
    """C2: llama.cpp keeps them under the same architecture."""
    monkeypatch.setitem(published_top(), "extra", name)
    path = write_drafter_gguf(tmp_path / "d.gguf", CONFIG, WEIGHTS | {"extra.weight": torch.ones(4, 4)})
    with pytest.raises(UserError, match=f"of the {family} family"):
        open_drafter(path, TARGET, "")


def published_top() -> dict[str, str]:
    import published

    return published._GGUF_TOP


def test_layers_given_for_a_file_that_tells_them_are_refused(tmp_path: Path):
    """A flag without effect."""
    with pytest.raises(UserError, match="tells its target's layers itself"):
        open_drafter(write_drafter_gguf(tmp_path / "d.gguf", CONFIG, WEIGHTS), TARGET, "", (1, 2))


def test_a_window_is_read_from_the_file_and_from_nothing_else(tmp_path: Path):
    """FORMATS 1: sliding layers need a window, and the flag must not deny it."""
    types = [SLIDING, FULL, SLIDING, FULL, SLIDING]
    folder = write(tmp_path / "d", {**CONFIG, "layer_types": types, "sliding_window": 77})
    assert open_drafter(folder, TARGET, "")[0].windows == (77, None, 77, None, 77)
    broken = dict(WEIGHTS)
    del broken["layers.4.mlp.up_proj.weight"]
    save_file(broken, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"lacks tensors: layers\.4\.mlp\.up_proj\.weight"):
        open_drafter(folder, TARGET, "")

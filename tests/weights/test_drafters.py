"""Drafters are read strictly, and only for the target that they were made for."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from makefiles import DRAFTER_CONFIG, write_drafter, write_folder, write_gguf, write_target
from safetensors.torch import load_file

import lampejo
from lampejo.errors import UserError
from lampejo.models.config import ModelConfig, RopeConfig
from lampejo.weights.checkpoint import open_checkpoint
from lampejo.weights.drafters import find_drafter, open_drafter, same_model

TARGET = ModelConfig("llama", 64, 32, 64, 2, 4, 2, 8, 1e-5, RopeConfig(1e4), 128, True)
SMOLLM2 = ModelConfig("llama", 49152, 576, 1536, 30, 9, 3, 64, 1e-5, RopeConfig(1e5), 8192, True)
PACKAGED = Path(lampejo.__file__).parent / "data" / "smollm2-135m-dflash-proto"
EXTENDED = {**DRAFTER_CONFIG["dflash_config"], "draft_vocab_size": 16, "markov_rank": 3}


def test_the_drafter_in_the_package_opens_for_its_target():
    """Fault: the default does not work after install."""
    config, tensors = open_drafter(PACKAGED, SMOLLM2, "SmolLM2-135M-Instruct")
    assert (config.block_size, config.draft_vocab_size, config.markov_rank) == (6, 8192, 64)
    assert all(torch.equal(tensors[name], t) for name, t in load_file(PACKAGED / "model.safetensors").items())
    assert len(tensors) == 28


def test_v1_and_extended_drafters_open_and_their_tensors_are_fresh(tmp_path):
    """Fault: files without our keys refused, or tensors that keep a file open."""
    config, tensors = open_drafter(write_drafter(tmp_path / "v1"), TARGET, "any")
    assert config.draft_vocab_size is None and set(tensors) == set(load_file(tmp_path / "v1" / "model.safetensors"))
    config, tensors = open_drafter(str(write_drafter(tmp_path / "ours", dflash_config=EXTENDED)), TARGET, "any")
    assert tensors["markov_head.predecessor.weight"].shape == (17, 3)
    assert tensors["draft_token_ids"].tolist() == list(range(0, 32, 2))


def test_missing_layer_ids_can_be_given(tmp_path):
    """C1: --target-layer-ids fills in for old files, and nothing else does."""
    folder = write_drafter(tmp_path / "d", dflash_config={"mask_token_id": 5})
    assert open_drafter(folder, TARGET, "any", (0, 1))[0].target_layer_ids == (0, 1)
    with pytest.raises(UserError, match="--target-layer-ids"):
        open_drafter(folder, TARGET, "any")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 48}, "hidden size is 48, the model's is 32"),
        ({"num_target_layers": 3}, "number of target layers is 3, the model's is 2"),
        ({"vocab_size": 128}, "vocabulary is 128, the model's is 64"),
        ({"target": "Other-7B-Instruct"}, "made for Other-7B-Instruct, the model is Tiny-Chat"),
    ],
)
def test_a_drafter_made_for_another_target_is_refused(tmp_path, change, message):
    """C3: hidden size, layers, vocabulary, recorded target: found and expected."""
    folder = write_drafter(tmp_path / "d")
    write_folder(folder, load_file(folder / "model.safetensors"), {**DRAFTER_CONFIG, **change})
    with pytest.raises(UserError, match=message) as caught:
        open_drafter(folder, TARGET, "Tiny-Chat")
    assert "Choose the drafter made for this model" in caught.value.remedy


def test_the_recorded_target_matches_its_own_files_and_repositories():
    """C3: names differ in organisation, case, punctuation and quantisation."""
    for name in ("SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2_135m_instruct-Q8_0"):
        assert same_model("HuggingFaceTB/SmolLM2-135M-Instruct", name)
    for name in ("SmolLM2-135M", "SmolLM2-1.7B-Instruct", "model", ""):
        assert not same_model("SmolLM2-135M-Instruct", name)


def test_an_unknown_target_name_is_not_held_against_the_drafter(tmp_path):
    """Fault: a target built in memory has no name."""
    config, _ = open_drafter(write_drafter(tmp_path / "d", target="Other-7B"), TARGET, "")
    assert config.target_name == "Other-7B"


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("layers.0.attention_conv.weight", "DFlash2"), ("layers.0.mlp_conv.weight", "DFlash2"),
        ("candidate_selector.weight", "DFlash2"), ("confidence_head.weight", "DSpark"),
        ("markov_head.embed.weight", "DSpark"), ("layer_fusion.weight", "DFly"), ("prefix_gru.weight_ih", "Domino"),
        ("fusion_weights", "DFlare"),
    ],
)  # fmt: skip
def test_tensors_of_newer_families_give_them_away(tmp_path, name, family):
    """C2: a v1 configuration around newer tensors."""
    folder = write_drafter(tmp_path / "d", add={name: torch.ones(2)})
    with pytest.raises(UserError, match=f"of the {family} family") as caught:
        open_drafter(folder, TARGET, "any")
    assert "Supported: DFlash v1" in caught.value.remedy


def test_missing_unknown_and_misshapen_tensors_are_refused_by_name(tmp_path):
    """C2: also the embedding or head that some files carry, and fc for another number of taps."""
    cases = [
        ({"remove": "hidden_norm.weight"}, "lacks tensors: hidden_norm.weight"),
        ({"add": {"lm_head.weight": torch.ones(64, 32)}}, "unknown tensors: lm_head.weight"),
        ({"add": {"d2t": torch.ones(2)}}, "unknown tensors: d2t"),
        ({"add": {"fc.weight": torch.ones(32, 96)}}, r"'fc.weight' has shape \[32, 96\].*\[32, 64\]"),
        ({"add": {"markov_head.successor.weight": torch.ones(4, 4)}}, "unknown tensors: markov_head"),
        ({"dflash_config": EXTENDED, "remove": "draft_token_ids"}, "lacks tensors: draft_token_ids"),
        ({"add": {"norm.weight": torch.ones(32, dtype=torch.int32)}}, "'norm.weight' has type I32"),
    ]
    for i, (change, message) in enumerate(cases):
        with pytest.raises(UserError, match=message):
            open_drafter(write_drafter(tmp_path / str(i), **change), TARGET, "any")


def test_draft_ids_must_be_ascending_ids_of_the_vocabulary(tmp_path):
    """C7: an id outside the vocabulary would index past the target's head."""
    for i, ids in enumerate((range(49, 65), range(-1, 15), [*range(15), 3], [0] * 16)):
        bad = {"draft_token_ids": torch.tensor(list(ids), dtype=torch.int32)}
        with pytest.raises(UserError, match="draft_token_ids must be ascending"):
            open_drafter(write_drafter(tmp_path / str(i), add=bad, dflash_config=EXTENDED), TARGET, "any")


def test_a_mask_that_ends_the_targets_answers_is_refused(tmp_path):
    """C1: the drafter's own file may not know the target's end tokens."""
    with pytest.raises(UserError, match="mask_token_id 5 ends"):
        open_drafter(write_drafter(tmp_path / "d"), TARGET, "any", eos_ids=(2, 5))


def test_what_is_no_drafter_folder_is_told_so(tmp_path):
    """C2: a target, a GGUF, a cut file."""
    with pytest.raises(UserError, match="not a DFlash drafter"):
        open_drafter(write_target(tmp_path / "t"), TARGET, "any")
    with pytest.raises(UserError, match="no DFlash drafter: its architecture is 'llama'"):
        open_drafter(write_gguf(tmp_path / "x.gguf"), TARGET, "any")
    (tmp_path / "notes.txt").write_text("taps 1, 9, 17")
    with pytest.raises(UserError, match="not a drafter's folder"):
        open_drafter(tmp_path / "notes.txt", TARGET, "any")
    folder = write_drafter(tmp_path / "d")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(UserError, match="truncated"):
        open_drafter(folder, TARGET, "any")
    with pytest.raises(UserError, match="does not exist"):
        open_drafter(tmp_path / "nowhere", TARGET, "any")


def test_the_packaged_drafter_is_found_for_its_target_only(tmp_path):
    """C3: by name and sizes both."""
    with open_checkpoint(write_gguf(tmp_path / "m.gguf")) as checkpoint:
        checkpoint.name, checkpoint.config = "SmolLM2-135M-Instruct", SMOLLM2
        assert find_drafter(checkpoint) == PACKAGED
        checkpoint.config = replace(SMOLLM2, num_layers=32)
        assert find_drafter(checkpoint) is None
        checkpoint.name, checkpoint.config = "SmolLM2-135M", SMOLLM2
        assert find_drafter(checkpoint) is None

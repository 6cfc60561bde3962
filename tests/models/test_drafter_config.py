"""Drafters' config.json into our words: releases, mistakes, anything."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config_files import YARN, anything, without
from lampejo.errors import UserError
from lampejo.models.config import RopeConfig
from lampejo.models.drafter_config import drafter_config_from_hf

DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 16,
    "num_target_layers": 36,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "rope_scaling": None,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "eos_token_id": 151645,
    "layer_types": ["full_attention"] * 5,
    "sliding_window": None,
    "use_sliding_window": False,
}


def test_a_released_drafter_is_translated():
    """The Qwen3-4B drafter's file, as published."""
    config = drafter_config_from_hf(DRAFTER)
    assert (config.block_size, config.mask_token_id) == (16, 151669)
    assert config.target_layer_ids == (1, 9, 17, 25, 33) and config.num_target_layers == 36
    assert config.windows == (None,) * 5 and config.causal == (False,) * 5
    assert config.rope == RopeConfig(1e6) and config.target_name is None


def test_keys_may_stand_at_top_level_or_inside_but_not_disagree():
    """C1: a few files carry both keys at top level, newer ones the block size inside."""
    flat = {**without(DRAFTER, "dflash_config"), **DRAFTER["dflash_config"]}
    inside = {**without(DRAFTER, "block_size"), "dflash_config": {**DRAFTER["dflash_config"], "block_size": 16}}
    assert drafter_config_from_hf(flat) == drafter_config_from_hf(inside) == drafter_config_from_hf(DRAFTER)
    with pytest.raises(UserError, match="'block_size' is 8 at top level, 16 in dflash_config"):
        drafter_config_from_hf({**inside, "block_size": 8})


@pytest.mark.parametrize(
    "key",
    ["block_size", "num_target_layers", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
     "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "max_position_embeddings", "vocab_size"],
)  # fmt: skip
def test_a_key_missing_from_a_drafter_is_named(key):
    """C1: a wrong guess would only lower the acceptance, unseen."""
    with pytest.raises(UserError, match=f"lacks the key '{key}'"):
        drafter_config_from_hf(without(DRAFTER, key))


def test_missing_target_layer_ids_or_mask_are_refused_by_name():
    """C1: older code guessed them, wrongly for most files."""
    for key in ("target_layer_ids", "mask_token_id"):
        broken = {**DRAFTER, "dflash_config": without(DRAFTER["dflash_config"], key)}
        with pytest.raises(UserError, match=f"lacks the key '{key}'"):
            drafter_config_from_hf(broken)
    broken = {**DRAFTER, "dflash_config": {"mask_token_id": 5}}
    assert drafter_config_from_hf(broken, (1, 2)).target_layer_ids == (1, 2)
    with pytest.raises(UserError, match="but \\[1, 2\\] were given"):
        drafter_config_from_hf(DRAFTER, (1, 2))


@pytest.mark.parametrize("mask", [-1, 151936, 151645, 151643, True, "mask"])
def test_a_mask_token_outside_the_vocabulary_or_with_another_meaning_is_refused(mask):
    """C1: equal to EOS or pad, or no token at all."""
    broken = {**DRAFTER, "pad_token_id": 151643, "dflash_config": {**DRAFTER["dflash_config"], "mask_token_id": mask}}
    with pytest.raises(UserError, match="'mask_token_id'"):
        drafter_config_from_hf(broken)


@pytest.mark.parametrize("ids", [[], [36], [-1], [1, 1], "1,2", [True], [1.0]])
def test_taps_that_the_target_does_not_have_are_refused(ids):
    """C1: also layers counted from one."""
    broken = {**DRAFTER, "dflash_config": {**DRAFTER["dflash_config"], "target_layer_ids": ids}}
    with pytest.raises(UserError, match="'target_layer_ids'"):
        drafter_config_from_hf(broken)


FAMILIES = [
    ({"architectures": ["DFlash2DraftModel"]}, "DFlash2"),
    ({"dflash_config": {**DRAFTER["dflash_config"], "candidate_selector": {"k": 4}}}, "DFlash2"),
    ({"architectures": ["DSparkDraftModel"]}, "DSpark"),
    ({"dflash_config": {**DRAFTER["dflash_config"], "projector_type": "domino"}}, "Domino"),
    ({"dflash_config": {**DRAFTER["dflash_config"], "layer_fusion": "mean"}}, "DFly"),
    ({"dflash_config": {**DRAFTER["dflash_config"], "selector_rank": 256}}, "DFlash2"),
    ({"architectures": ["Qwen3DSparkModel"]}, "DSpark"),
    ({"enable_confidence_head": True}, "DSpark"),
    ({"speculators_model_type": "dspark"}, "DSpark"),
    ({"speculators_model_type": "dflash2"}, "DFlash2"),
    ({"speculators_model_type": "dflash", "projector_type": "domino"}, "Domino"),
    ({"speculators_model_type": "eagle3"}, "speculators_model_type is 'eagle3'"),
    ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "not a DFlash drafter.*LlamaForCausalLM"),
    ({"dflash_config": {**DRAFTER["dflash_config"], "projector_type": "mlp"}}, "Projector type 'mlp'"),
    ({"attention_bias": True}, "'attention_bias' = True"),
    ({"dflash_config": {**DRAFTER["dflash_config"], "final_logit_softcapping": 20.0}}, "'final_logit_softcapping'"),
    ({"dflash_config": {**DRAFTER["dflash_config"], "input_embedding_scale": 2.0}}, "'input_embedding_scale' = 2.0"),
]


@pytest.mark.parametrize(("change", "message"), FAMILIES)
def test_newer_families_are_refused_by_name(change, message):
    """C2: DFlash2, DSpark, Domino, DFly; and what would change the computation unseen."""
    with pytest.raises(UserError, match=message) as caught:
        drafter_config_from_hf({**DRAFTER, **change})
    assert "DFlash v1" in caught.value.remedy


def test_windows_and_causality_follow_the_rule_of_the_format():
    """FORMATS 1: is_causal if the key is there, else causal only for sliding layers."""
    types = ["sliding_attention"] * 4 + ["full_attention"]
    sliding = {**DRAFTER, "layer_types": types, "sliding_window": 2048, "use_sliding_window": True}
    config = drafter_config_from_hf(sliding)
    assert config.windows == (2048, 2048, 2048, 2048, None)
    assert config.causal == (True, True, True, True, False)
    assert drafter_config_from_hf({**sliding, "is_causal": False}).causal == (False,) * 5
    assert drafter_config_from_hf({**sliding, "is_causal": True}).causal == (True,) * 5
    for change in (
        {"use_sliding_window": False}, {"sliding_window": None}, {"sliding_window": 0}, {"layer_types": types[1:]},
        {"layer_types": ["linear_attention"] * 5}, {"layer_types": None},
    ):  # fmt: skip
        with pytest.raises(UserError, match=r"sliding_window|layer_types"):
            drafter_config_from_hf({**sliding, **change})


def test_the_drafters_own_rope_is_plain_whatever_its_target_has():
    """FORMATS 1: partial or multimodal RoPE in the file tells about the target."""
    parameters = {
        "rope_type": "default",
        "rope_theta": 1e7,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
    }
    config = drafter_config_from_hf({**without(DRAFTER, "rope_theta"), "rope_parameters": parameters})
    assert config.rope == RopeConfig(1e7)
    yarn = drafter_config_from_hf({**DRAFTER, "rope_scaling": {"type": "yarn", **YARN}})
    assert yarn.rope == RopeConfig(1e6, "yarn", 4.0, 32768)


def test_our_extension_is_read_and_checked():
    """prototype/README: draft vocabulary and Markov head."""
    inner = {**DRAFTER["dflash_config"], "draft_vocab_size": 8192, "markov_rank": 64}
    config = drafter_config_from_hf({**DRAFTER, "dflash_config": inner, "target": "Qwen3-4B"})
    assert (config.draft_vocab_size, config.markov_rank, config.target_name) == (8192, 64, "Qwen3-4B")
    for change in ({"draft_vocab_size": 151937}, {"draft_vocab_size": 0}, {"draft_vocab_size": None}):
        with pytest.raises(UserError, match=r"draft_vocab_size|markov_rank"):
            drafter_config_from_hf({**DRAFTER, "dflash_config": {**inner, **change}})


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([*DRAFTER, "mask_token_id", "target", "is_causal", "rope_parameters"]), anything)
def test_any_value_at_any_key_of_a_drafter_is_read_or_refused(key, value):
    """C7: nothing but a UserError may come out."""
    for config in ({**DRAFTER, key: value}, {**DRAFTER, "dflash_config": {**DRAFTER["dflash_config"], key: value}}):
        try:
            drafter_config_from_hf(config)
        except UserError:
            continue

"""Translation of config.json and GGUF metadata: what is read, what is refused, and that nothing else can happen."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config_files import YARN, anything, without
from lampejo.errors import UserError
from lampejo.models.config import DeltaNetConfig, ExpertsConfig, ModelConfig, RopeConfig
from lampejo.models.gguf_config import model_config_from_gguf
from lampejo.models.hf_config import model_config_from_hf

QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": 32768,
    "hidden_act": "silu",
}
# Targets ------------------------------------------------------------------------------------------------------------


def test_qwen2_is_translated():
    """Fault: biases or heads taken from another architecture's defaults."""
    assert model_config_from_hf(QWEN2) == ModelConfig(
        "qwen2", 151936, 1536, 8960, 28, 12, 2, 128, 1e-6, RopeConfig(1e6), 32768, True, True
    )


def test_llama_and_mistral_are_the_same_maths():
    """Fault: Mistral refused although only its name differs, or its window ignored."""
    llama = model_config_from_hf({**QWEN2, "model_type": "llama"})
    assert llama.architecture == "llama" and not llama.qkv_bias
    assert model_config_from_hf({**QWEN2, "model_type": "mistral", "sliding_window": None}) == llama
    with pytest.raises(UserError, match="'sliding_window' = 4096 is not supported"):
        model_config_from_hf({**QWEN2, "model_type": "mistral", "sliding_window": 4096})


def test_defaults_for_absent_keys_are_those_of_transformers():
    """Fault: grouped heads or a tied head assumed where the file is silent."""
    from transformers import LlamaConfig

    small = without(QWEN2, "num_key_value_heads", "tie_word_embeddings", "rope_theta", "hidden_act")
    config = model_config_from_hf({**small, "model_type": "llama"})
    theirs = LlamaConfig(**without(small, "model_type"))
    assert config.num_kv_heads == theirs.num_key_value_heads == 12
    assert config.tie_word_embeddings is theirs.tie_word_embeddings is False
    assert config.rope.theta == 10_000.0


@pytest.mark.parametrize(
    "key",
    ["model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
     "rms_norm_eps", "max_position_embeddings"],
)  # fmt: skip
def test_a_missing_key_is_named(key):
    """C1-like: no number is guessed."""
    with pytest.raises(UserError, match=f"lacks the key '{key}'"):
        model_config_from_hf(without(QWEN2, key))


def test_an_unsupported_architecture_is_named_beside_those_supported():
    """C2: the message says what was found and what would do."""
    with pytest.raises(UserError, match=r"'gemma3' is not supported. Supported architectures: llama, mistral, qwen2"):
        model_config_from_hf({**QWEN2, "model_type": "gemma3"})


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_act", "gelu"), ("attention_bias", True), ("mlp_bias", True), ("use_sliding_window", True),
     ("partial_rotary_factor", 0.5),
     ("rope_scaling", {"type": "dynamic", "factor": 2.0}), ("rope_scaling", {"type": "longrope"}),
     ("rope_scaling", {"rope_type": "default", "mrope_section": [16, 24, 24]}),
     ("rope_parameters", {"full_attention": {"rope_type": "default", "rope_theta": 1e4}})],
)  # fmt: skip
def test_what_would_change_the_maths_is_refused(key, value):
    """Fault: an unknown switch ignored, and fluent nonsense comes out."""
    with pytest.raises(UserError, match="not supported"):
        model_config_from_hf({**QWEN2, key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [("vocab_size", 0), ("vocab_size", "many"), ("vocab_size", True), ("hidden_size", 1 << 40), ("rms_norm_eps", 0),
     ("rms_norm_eps", float("nan")), ("rope_theta", -1), ("num_hidden_layers", 1 << 20), ("num_key_value_heads", 5),
     ("head_dim", 63), ("tie_word_embeddings", "yes"), ("max_position_embeddings", 2.5)],
)  # fmt: skip
def test_impossible_values_are_refused(key, value):
    """C7: damaged or hostile numbers."""
    with pytest.raises(UserError):
        model_config_from_hf({**QWEN2, key: value})


LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
ROPES = [
    ({"type": "linear", "factor": 2.0}, RopeConfig(1e6, "linear", 2.0)),
    ({"rope_type": "llama3", **LLAMA3}, RopeConfig(1e6, "llama3", 8.0, 8192, 1.0, 4.0)),
    ({"type": "yarn", **YARN}, RopeConfig(1e6, "yarn", 4.0, 32768)),
    ({"rope_type": "yarn", **YARN, "attention_factor": 1.5, "beta_fast": 16}, RopeConfig(
        1e6, "yarn", 4.0, 32768, attention_factor=1.5, beta_fast=16.0)),
    ({"rope_type": "yarn", **YARN, "mscale": 1.0, "mscale_all_dim": 0.5}, RopeConfig(
        1e6, "yarn", 4.0, 32768,
        attention_factor=(0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1))),
    ({"rope_type": "default"}, RopeConfig(1e6)),
]  # fmt: skip


@pytest.mark.parametrize(("scaling", "expected"), ROPES)
def test_both_spellings_of_rope_mean_the_same(scaling, expected):
    """C5: rope_theta and rope_scaling of old files, rope_parameters of new ones."""
    old = model_config_from_hf({**QWEN2, "rope_scaling": scaling})
    new = model_config_from_hf(
        {**without(QWEN2, "rope_theta"), "rope_parameters": {**scaling, "rope_theta": 1e6}},
    )
    assert old == new
    assert old.rope == expected
    assert old.max_context == (131072 if expected.kind == "yarn" else 32768)


def test_a_rope_scaling_without_its_numbers_is_refused():
    """C1-like: Llama 3's scaling with a default would be wrong from position 8192 on."""
    for key in LLAMA3:
        with pytest.raises(UserError, match=key):
            model_config_from_hf({**QWEN2, "rope_scaling": {"rope_type": "llama3", **without(LLAMA3, key)}})


# Qwen3 and later ----------------------------------------------------------------------------------------------------

QWEN3 = {**QWEN2, "model_type": "qwen3", "head_dim": 128, "max_window_layers": 28}
MOE = {
    **QWEN3, "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.001,
}  # fmt: skip
NEXT = {
    **MOE, "model_type": "qwen3_next", "num_hidden_layers": 8, "head_dim": 256, "shared_expert_intermediate_size": 512,
    "full_attention_interval": 4, "partial_rotary_factor": 0.25, "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 64,
}  # fmt: skip
NEW_ROPE = {
    "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25, "rope_theta": 1e7,
    "rope_type": "default",
}  # fmt: skip
KINDS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
NOT_IN_MOE = ("intermediate_size", "decoder_sparse_step", "mlp_only_layers", "norm_topk_prob")
TEXT = {
    **without(NEXT, "rope_theta", "partial_rotary_factor", "use_sliding_window", *NOT_IN_MOE),
    "model_type": "qwen3_5_moe_text", "rope_parameters": NEW_ROPE, "layer_types": KINDS * 2, "attn_output_gate": True,
    "mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32", "eos_token_id": 248044,
}  # fmt: skip
VISION = {"model_type": "qwen3_5_moe", "text_config": TEXT, "vision_config": {"depth": 27}, "image_token_id": 248056}
DELTA_NET = DeltaNetConfig((0, 1, 2, 4, 5, 6), 16, 32, 128, 64, 4)


def test_qwen3_is_translated():
    """Fault: norms of q and k left out, or biases left in."""
    assert model_config_from_hf(QWEN3) == ModelConfig(
        "qwen3", 151936, 1536, 8960, 28, 12, 2, 128, 1e-6, RopeConfig(1e6), 32768, True, qk_norm=True
    )


def test_experts_are_translated():
    """Fault: the size of an expert confused with that of an MLP; weights normalised though the file says otherwise."""
    expected = ModelConfig(
        "qwen3_moe", 151936, 1536, 8960, 28, 12, 2, 128, 1e-6, RopeConfig(1e6), 32768, True, qk_norm=True,
        experts=ExpertsConfig(128, 8, 768),
    )  # fmt: skip
    assert model_config_from_hf(MOE) == expected
    assert model_config_from_hf({**without(MOE, "num_experts"), "num_local_experts": 128}) == expected, "transformers 5"
    assert not model_config_from_hf({**MOE, "norm_topk_prob": False}).experts.normalised
    dense = model_config_from_hf({**MOE, "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert dense.experts.dense_layers == (0, 2, 3, 4)


def test_hybrids_are_translated():
    """Fault: layers of the wrong kind, RoPE over whole heads, norms without 1 +, no output gate or shared expert."""
    config = model_config_from_hf(NEXT)
    assert config == ModelConfig(
        "qwen3_next", 151936, 1536, 8960, 8, 12, 2, 256, 1e-6, RopeConfig(1e6), 32768, True, qk_norm=True,
        attention_gate=True, norm_offset=True, rotary_dim=64, experts=ExpertsConfig(128, 8, 768, 512),
        delta_net=DELTA_NET,
    )  # fmt: skip
    assert config.num_attention_layers == 2 and config.ordinals == (0, 1, 2, 0, 3, 4, 5, 1)
    text = model_config_from_hf(TEXT)
    sizes = {"architecture": "qwen3_5_moe", "rope": RopeConfig(1e7), "intermediate_size": 768}
    assert text == replace(config, **sizes), "each layer has experts, and the file no size of an MLP"
    dense = without({**TEXT, "model_type": "qwen3_5_text", "intermediate_size": 8960}, "num_experts")
    assert model_config_from_hf(dense) == replace(text, architecture="qwen3_5", intermediate_size=8960, experts=None)


def test_the_text_is_a_part_of_a_model_with_vision():
    """Fault: a tied head that is not seen, since the flag stands at one level or at the other."""
    assert model_config_from_hf(VISION) == model_config_from_hf(TEXT)
    untied = {**VISION, "text_config": {**TEXT, "tie_word_embeddings": False}}
    assert not model_config_from_hf(untied).tie_word_embeddings
    assert model_config_from_hf({**untied, "tie_word_embeddings": True}).tie_word_embeddings
    with pytest.raises(UserError, match="lacks the key 'text_config'"):
        model_config_from_hf(without(VISION, "text_config"))
    with pytest.raises(UserError, match="text_config lacks the key 'linear_key_head_dim'"):
        model_config_from_hf({**VISION, "text_config": without(TEXT, "linear_key_head_dim")})


def test_defaults_of_the_new_targets_are_those_of_transformers():
    """Fault: another layer taken for one with attention, or more of a head rotated, where the file is silent."""
    from transformers import Qwen3MoeConfig, Qwen3NextConfig

    silent = without(NEXT, "full_attention_interval", "partial_rotary_factor", "norm_topk_prob", "decoder_sparse_step")
    config, theirs = model_config_from_hf(silent), Qwen3NextConfig(**without(silent, "model_type"))
    recurrent = [i for i, kind in enumerate(theirs.layer_types) if kind == "linear_attention"]
    assert list(config.delta_net.layers) == recurrent
    assert config.rotary_dim == theirs.rope_parameters["partial_rotary_factor"] * theirs.head_dim
    assert config.experts.normalised is theirs.norm_topk_prob is True
    silent = without(MOE, "norm_topk_prob", "mlp_only_layers")
    assert model_config_from_hf(silent).experts.normalised is Qwen3MoeConfig().norm_topk_prob is False


@pytest.mark.parametrize(
    ("config", "key"),
    [(QWEN3, "head_dim"), *((MOE, key) for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")),
     *((NEXT, key) for key in ("shared_expert_intermediate_size", "linear_num_key_heads", "linear_num_value_heads",
                               "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"))],
)  # fmt: skip
def test_a_missing_key_of_the_new_targets_is_named(config, key):
    """C1-like: no number is guessed."""
    with pytest.raises(UserError, match=f"lacks the key '{key}'"):
        model_config_from_hf(without(config, key))


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [(QWEN3, "layer_types", ["sliding_attention"] * 28), (QWEN3, "partial_rotary_factor", 0.25),
     (QWEN3, "rope_scaling", NEW_ROPE), (QWEN3, "use_sliding_window", True), (NEXT, "attn_output_gate", False),
     (NEXT, "hidden_act", "gelu"), (NEXT, "layer_types", [*KINDS, *KINDS[:3], "sliding_attention"]),
     (NEXT, "layer_types", KINDS), (NEXT, "layer_types", ["full_attention"] * 8),
     (NEXT, "layer_types", ["linear_attention"] * 8), (NEXT, "full_attention_interval", 0),
     (NEXT, "partial_rotary_factor", 1.5), (NEXT, "partial_rotary_factor", 0.001), (NEXT, "head_dim", 20),
     (NEXT, "linear_num_value_heads", 24), (NEXT, "linear_conv_kernel_dim", 1), (NEXT, "num_hidden_layers", 1 << 30),
     (MOE, "num_experts_per_tok", 129), (MOE, "mlp_only_layers", [-1]), (MOE, "decoder_sparse_step", 0)],
)  # fmt: skip
def test_what_the_new_targets_cannot_be_is_refused(config, key, value):
    """C7, and the fault of an unknown switch that is ignored; by name in all cases."""
    with pytest.raises(UserError, match=r"not supported|must be|cannot be right|both kinds"):
        model_config_from_hf({**config, key: value})


# GGUF ---------------------------------------------------------------------------------------------------------------

GGUF = {
    "general.architecture": "qwen2",
    "qwen2.context_length": 32768,
    "qwen2.embedding_length": 1536,
    "qwen2.block_count": 28,
    "qwen2.feed_forward_length": 8960,
    "qwen2.attention.head_count": 12,
    "qwen2.attention.head_count_kv": 2,
    "qwen2.attention.layer_norm_rms_epsilon": 1e-6,
    "qwen2.rope.freq_base": 1e6,
}
SHAPES = {"token_embd.weight": (151936, 1536)}


def test_gguf_metadata_mean_the_same_as_config_json():
    """Fault: the two translations drift apart."""
    assert model_config_from_gguf(GGUF, SHAPES) == model_config_from_hf(QWEN2)
    untied = model_config_from_gguf(GGUF, {**SHAPES, "output.weight": (151936, 1536)})
    assert untied == model_config_from_hf({**QWEN2, "tie_word_embeddings": False})


def test_values_per_layer_are_accepted_while_they_are_equal():
    """Fault: heads of layer 0 taken for all layers."""
    heads = {**GGUF, "qwen2.attention.head_count_kv": [2] * 28}
    assert model_config_from_gguf(heads, SHAPES).num_kv_heads == 2
    with pytest.raises(UserError, match="head_count_kv"):
        model_config_from_gguf({**GGUF, "qwen2.attention.head_count_kv": [2] * 27 + [4]}, SHAPES)


@pytest.mark.parametrize(
    ("extra", "message"),
    [({"general.architecture": "gemma"}, "'gemma' is not supported. Supported architectures: llama, qwen2"),
     ({"general.architecture": ["llama"]}, "not supported"),
     ({"qwen2.rope.dimension_count": 64}, "rope.dimension_count"),
     ({"qwen2.attention.value_length": 64}, "value_length"),
     ({"qwen2.expert_count": 8}, "with experts"),
     ({"qwen2.rope.scaling.type": "longrope"}, "longrope"),
     ({"qwen2.block_count": -1}, "block_count"),
     ({"tokenizer.ggml.tokens": ["x"] * 151937}, "151937 tokens")],
)  # fmt: skip
def test_gguf_metadata_that_we_cannot_serve_are_refused(extra, message):
    """C2, C7: named, before any weight is read."""
    with pytest.raises(UserError, match=message):
        model_config_from_gguf({**GGUF, **extra}, SHAPES)


@pytest.mark.parametrize("key", [key for key in GGUF if "freq_base" not in key and "_kv" not in key])
def test_a_missing_gguf_key_is_named(key):
    """C1-like."""
    with pytest.raises(UserError, match=key.removeprefix("qwen2.")):
        model_config_from_gguf(without(GGUF, key), SHAPES)


def test_yarn_in_gguf_multiplies_the_attention_factor():
    """C5: GGUF's attn_factor comes on top of YaRN's own, transformers' replaces it."""
    scaling = {
        "qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 32768,
    }  # fmt: skip
    config = model_config_from_gguf({**GGUF, **scaling}, SHAPES)
    assert config == model_config_from_hf({**QWEN2, "rope_scaling": {"type": "yarn", **YARN}})
    halved = model_config_from_gguf({**GGUF, **scaling, "qwen2.rope.scaling.attn_factor": 0.5}, SHAPES)
    assert halved.rope.attention_factor == pytest.approx(0.5 * (0.1 * math.log(4) + 1))


# Anything -----------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([*QWEN2, "rope_scaling", "rope_parameters", "head_dim"]), anything, anything)
def test_any_value_at_any_key_of_a_target_is_read_or_refused(key, value, other):
    """C7: nothing but a UserError may come out."""
    changed = {**QWEN2, key: value, "rope_scaling": {"rope_type": "yarn", "factor": other}}
    for config in (changed, {**QWEN2, key: value}):
        try:
            assert isinstance(model_config_from_hf(config), ModelConfig)
        except UserError:
            continue


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([*NEXT, *TEXT]), anything)
def test_any_value_at_any_key_of_a_hybrid_is_read_or_refused(key, value):
    """C7: nothing but a UserError may come out."""
    for config in ({**NEXT, key: value}, {**VISION, key: value}, {**VISION, "text_config": {**TEXT, key: value}}):
        try:
            assert isinstance(model_config_from_hf(config), ModelConfig)
        except UserError:
            continue


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([*GGUF, "qwen2.rope.scaling.type", "qwen2.rope.dimension_count"]), anything)
def test_any_value_at_any_key_of_gguf_metadata_is_read_or_refused(key, value):
    """C7: nothing but a UserError may come out."""
    try:
        assert isinstance(model_config_from_gguf({**GGUF, key: value}, SHAPES), ModelConfig)
    except UserError:
        return

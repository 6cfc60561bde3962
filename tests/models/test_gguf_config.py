"""GGUF metadata of the Qwen3.x architectures: configurations equal to those from config.json, or errors."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lampejo.errors import UserError
from lampejo.models.config import ModelConfig
from lampejo.models.gguf_config import model_config_from_gguf
from lampejo.models.hf_config import model_config_from_hf

# As in Qwen3.5-35B-A3B
QWEN35_MOE = {
    "general.architecture": "qwen35moe",
    "qwen35moe.context_length": 262144,
    "qwen35moe.embedding_length": 2048,
    "qwen35moe.block_count": 41,
    "qwen35moe.nextn_predict_layers": 1,
    "qwen35moe.attention.head_count": 16,
    "qwen35moe.attention.head_count_kv": 2,
    "qwen35moe.attention.key_length": 256,
    "qwen35moe.attention.value_length": 256,
    "qwen35moe.attention.layer_norm_rms_epsilon": 1e-6,
    "qwen35moe.rope.freq_base": 1e7,
    "qwen35moe.rope.dimension_count": 64,
    "qwen35moe.rope.dimension_sections": [11, 11, 10, 0],
    "qwen35moe.expert_count": 256,
    "qwen35moe.expert_used_count": 8,
    "qwen35moe.expert_feed_forward_length": 512,
    "qwen35moe.expert_shared_feed_forward_length": 512,
    "qwen35moe.ssm.conv_kernel": 4,
    "qwen35moe.ssm.state_size": 128,
    "qwen35moe.ssm.group_count": 16,
    "qwen35moe.ssm.time_step_rank": 32,
    "qwen35moe.ssm.inner_size": 4096,
    "qwen35moe.full_attention_interval": 4,
}
SHAPES = {"token_embd.weight": (248320, 2048), "output.weight": (248320, 2048)}
CONFIG = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 248320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
    },
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}  # fmt: skip


def test_the_largest_files_mean_the_same_as_their_config_json():
    """Fault: the two translations drift apart. What the converter bakes in is all that differs."""
    ours, theirs = model_config_from_gguf(QWEN35_MOE, SHAPES), model_config_from_hf(CONFIG)
    assert theirs.delta_net is not None
    assert ours == replace(theirs, norm_offset=False, delta_net=replace(theirs.delta_net, tiled=True))


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=5,
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from([*QWEN35_MOE, "qwen35moe.expert_gating_func", "qwen35moe.feed_forward_length"]), anything)
def test_any_value_at_any_key_is_read_or_refused(key, value):
    """C7: nothing but a UserError may come out."""
    try:
        assert isinstance(model_config_from_gguf({**QWEN35_MOE, key: value}, SHAPES), ModelConfig)
    except UserError:
        return


@pytest.mark.parametrize("key", ["block_count", "ssm.time_step_rank", "ssm.group_count", "expert_count"])
def test_huge_numbers_cost_nothing(key):
    """C7: a list of two billion layers."""
    huge = {**QWEN35_MOE, f"qwen35moe.{key}": (1 << 31) - 1}
    if key == "expert_count":  # held against the tensors
        assert model_config_from_gguf(huge, SHAPES).experts.num_experts == (1 << 31) - 1
        return
    with pytest.raises(UserError):
        model_config_from_gguf(huge, SHAPES)

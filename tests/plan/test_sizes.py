"""What models are made of: counts that agree with another library and with publishers, bytes that requests keep."""

import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lampejo.models.hf_config import model_config_from_hf
from lampejo.plan.precision import CPU_PRECISIONS, GPU_PRECISIONS, stored_precision
from lampejo.plan.published import DRAFTERS, TARGETS, published_drafter, published_target
from lampejo.plan.sizes import context_bytes, count, drafter_sizes, num_active, part_of
from lampejo.weights.checkpoint import open_checkpoint
from lampejo.weights.describe import state_bytes
from lampejo.weights.speculators import SPECULATORS
from lampejo.weights.store import find

# What publishers say, in billions: total, and active per token where it differs.
SAID = {
    "Qwen/Qwen3-4B": (4.02, 4.02),
    "Qwen/Qwen3-8B": (8.19, 8.19),
    "Qwen/Qwen3-30B-A3B": (30.5, 3.35),
    "Qwen/Qwen3-Coder-Next": (79.7, 3.9),
    "Qwen/Qwen3.5-27B": (26.9, 26.9),
    "Qwen/Qwen3.5-35B-A3B": (34.7, 3.46),
    "Qwen/Qwen3.5-122B-A10B": (122.1, 9.8),
}


def config_of(name):
    return model_config_from_hf(TARGETS[name].config)


@pytest.mark.parametrize("name", TARGETS)
def test_every_known_target_has_as_many_parameters_as_transformers_makes(name):
    """Fault: a matrix that is counted twice or not at all, or sizes that are no such model's."""
    config = TARGETS[name].config
    text = dict(config.get("text_config", config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**text))
    assert count(config_of(name)).total == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", SAID)
def test_counts_are_those_that_publishers_state(name):
    """Fault: sizes that two libraries agree on and that no checkpoint has; active parameters of a token."""
    parameters = count(config_of(name))
    total, active = SAID[name]
    assert parameters.total / 1e9 == pytest.approx(total, rel=0.005)
    assert num_active(config_of(name), parameters) / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize(("alias", "total"), [("smollm2", 134_515_008), ("qwen2.5-coder-1.5b", 1_777_088_000)])
def test_counts_are_those_of_real_files(alias, total):
    """The sizes of a GGUF, against the sum of its tensors; Qwen's file has an untied copy of the head."""
    if find(alias) is None:
        pytest.skip(f"{alias} was not pulled")
    with open_checkpoint(alias) as checkpoint:
        parameters = count(checkpoint.config)
        assert parameters.total == sum(math.prod(checkpoint.info(name)[0]) for name in checkpoint.tensor_names())
        assert parameters.total == total
        stored = stored_precision(checkpoint, checkpoint.config)
    packed = stored.bytes(parameters)
    assert packed.total < checkpoint.path.stat().st_size * 1.2
    assert 4.6 <= stored.bits.mlp <= 8.5 and 4.6 <= stored.bits.embedding <= 8.5


def test_qwen2_5_of_1_5_billion_is_counted_with_its_tied_head():
    """Fault: a tied head counted as a second matrix."""
    qwen = {
        "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960,
        "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768, "rope_theta": 1e6, "tie_word_embeddings": True,
    }  # fmt: skip
    parameters = count(model_config_from_hf(qwen))
    assert parameters.total == 1_543_714_304 and parameters.head == 0
    assert count(model_config_from_hf({**qwen, "tie_word_embeddings": False})).head == parameters.embedding


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("lm_head.weight", "head"),
        ("model.layers.3.mlp.experts.gate_up_proj", "experts"),
        ("model.layers.3.mlp.shared_expert.up_proj.weight", "mlp"),
        ("model.layers.3.mlp.shared_expert_gate.weight", "mlp"),
        ("model.layers.3.mlp.gate.weight", "mixers"),  # the router
        ("model.layers.3.mlp.gate_proj.weight", "mlp"),
        ("model.layers.3.linear_attn.in_proj_qkv.weight", "mixers"),
        ("model.norm.weight", "mixers"),
    ],
)
def test_parts_are_told_apart_by_how_a_step_reads_them(name, part):
    """Fault: a router taken for an expert, which is not read by every token."""
    assert part_of(name) == part


def test_what_a_request_keeps_of_qwen3_5_122b():
    """12 layers with 2 key/value heads of 256 in 16 bits; 36 layers with 64 matrices of 128 x 128 in fp32."""
    config = config_of("Qwen/Qwen3.5-122B-A10B")
    assert context_bytes(config) == 2 * 12 * 2 * 256 * 2
    assert state_bytes(config) == 36 * (64 * 128 * 128 + (2 * 16 * 128 + 64 * 128) * 3) * 4
    assert state_bytes(config_of("Qwen/Qwen3-8B")) == 0


def test_every_published_drafter_is_known_and_belongs_to_a_known_target():
    """Fault: a speculator in the registry that a plan cannot count without a network."""
    for speculator in SPECULATORS:
        target = next(found for found in map(published_target, speculator.targets) if found)
        config = model_config_from_hf(target.config)
        assert speculator.sizes == (config.hidden_size, config.num_layers, config.vocab_size)
        known = published_drafter(speculator.repos[0])
        assert known is not None and len(known.windows) == known.layers
    assert len(DRAFTERS) == len(SPECULATORS)


def test_a_drafter_is_counted_and_its_windows_bound_what_it_reads():
    """The drafter of Qwen3.5-122B-A10B: 6 layers, all with a window of 4,096."""
    target = config_of("Qwen/Qwen3.5-122B-A10B")
    sizes = drafter_sizes(DRAFTERS["Qwen3.5-122B-A10B-DFlash"].config(target))
    per_layer = 3072 * 128 * (32 + 8 + 8 + 32) + 3 * 3072 * 9216 + 2 * 3072 + 2 * 128
    assert sizes.total == 3072 * 8 * 3072 + 6 * per_layer + 2 * 3072
    assert sizes.context_bytes == 6 * 2 * 8 * 128 * 2
    assert sizes.context_read(1000) == 1000 * sizes.context_bytes
    assert sizes.context_read(100_000) == 4096 * sizes.context_bytes
    mixed = drafter_sizes(DRAFTERS["Qwen3.6-27B-DFlash"].config(config_of("Qwen/Qwen3.6-27B")))
    assert mixed.context_read(10_000) == pytest.approx(mixed.context_bytes * (4 * 2048 + 10_000) / 5)


def test_precisions_weigh_what_published_checkpoints_weigh():
    """The 122B in bf16 is 250 GB with vision and MTP, in NVFP4 75.6 GB without MTP (sizes on the hub)."""
    parameters = count(config_of("Qwen/Qwen3.5-122B-A10B"))
    sizes = {name: precision.bytes(parameters).total / 1e9 for name, precision in GPU_PRECISIONS.items()}
    assert sizes["bf16"] == pytest.approx(244.2, abs=0.1)
    assert sizes["fp8"] == pytest.approx(123.6, abs=0.2)
    assert sizes["fp4"] == pytest.approx(75.6, rel=0.05)
    small = count(config_of("Qwen/Qwen3-4B"))
    assert CPU_PRECISIONS["q8"].bytes(small).total == pytest.approx(small.total * 8.5 / 8)

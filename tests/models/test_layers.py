"""RoPE of targets and drafters against the reference, near and far (case C5)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from makefiles import DRAFTER_CONFIG, write_drafter
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from lampejo import ops
from lampejo.loader import build_drafter, load_target
from lampejo.models.layers import Rope
from lampejo.weights.checkpoint import open_checkpoint
from lampejo.weights.drafters import open_drafter
from oracle import ROPES, make_llama, save

POSITIONS = torch.tensor([0, 1, 31, 1_000, 8_191, 100_000])


def assert_equal_to_the_reference(rope: Rope, head_dim: int, parameters: dict[str, Any]) -> None:
    """cos, sin and a rotated head, at every position; a fault would be of the size of the numbers themselves."""
    config = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, max_position_embeddings=256,
                         rope_parameters=parameters)  # fmt: skip
    x = torch.randn(len(POSITIONS), 3, head_dim)
    cos, sin = LlamaRotaryEmbedding(config)(x, POSITIONS[None])
    expected = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)[0][0].transpose(0, 1)
    our_cos, our_sin = rope(POSITIONS)
    for ours, reference in ((our_cos, cos), (our_sin, sin)):
        assert torch.allclose(torch.cat([ours, ours], dim=-1), reference[0], atol=1e-6)
    assert torch.allclose(ops.rope(x, our_cos, our_sin), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ROPES)
def test_rope_of_a_target_equals_the_reference_at_near_and_far_positions(tmp_path: Path, kind: str):
    """C5: read from a checkpoint that transformers wrote; at 100,000 a frequency wrong by 1e-6 would show."""
    save(make_llama(rope_parameters=ROPES[kind], num_hidden_layers=1), tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        target = load_target(checkpoint)
    assert_equal_to_the_reference(target.rope, 12, ROPES[kind])


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("kind", ROPES)
def test_rope_of_a_drafter_equals_the_reference_at_near_and_far_positions(tmp_path: Path, kind: str, head_dim: int):
    """C5: the drafter's RoPE comes from its own file, not from its target."""
    changes = {"rope_parameters": ROPES[kind], "rope_theta": None, "max_position_embeddings": 256}
    folder = write_drafter(tmp_path / "drafter", **changes)
    with open_checkpoint(save_target(tmp_path / "target")) as checkpoint:
        config, tensors = open_drafter(folder, checkpoint.config, "")
    assert_equal_to_the_reference(build_drafter(config, tensors).rope, config.head_dim, ROPES[kind])
    assert_equal_to_the_reference(Rope(config.rope, head_dim), head_dim, ROPES[kind])


def save_target(folder: Path) -> Path:
    """A target of the sizes that ``write_drafter`` makes drafters for, with another RoPE."""
    names = ("vocab_size", "hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads")
    sizes = {name: DRAFTER_CONFIG[name] for name in names}
    save(make_llama(**sizes, num_hidden_layers=DRAFTER_CONFIG["num_target_layers"]), folder)
    return folder

"""Tiny random models of `transformers`, the reference that ours are held against, and plain attention for forwards."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from lampejo.models.llama import Llama

# Sizes that hide no mix-up: an odd vocabulary, odd numbers of heads, heads larger than their share of the hidden size.
SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 54,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# Every kind of RoPE scaling that we read, with an original context so short that tests pass it.
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "original_max_position_embeddings": 32,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn with its own factors": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 2.5, "original_max_position_embeddings": 32,
        "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0,
    },
}  # fmt: skip


def randomise(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Weights large enough that every part shows in the logits; norms near one, biases that count."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif "embed" in name:
                parameter.copy_(0.3 * noise)
            elif name.endswith("bias"):
                parameter.copy_(noise)
            else:
                parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)
    return model.eval()


def make_llama(seed: int = 0, **changes: Any) -> PreTrainedModel:
    return randomise(LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})), seed)


def make_qwen2(seed: int = 0, **changes: Any) -> PreTrainedModel:
    return randomise(Qwen2ForCausalLM(Qwen2Config(**{**SIZES, **changes})), seed)


def save(
    model: PreTrainedModel, folder: Path, dtype: torch.dtype = torch.float32, shard: str = "1GB"
) -> PreTrainedModel:
    """Writes the model in ``dtype`` and returns what `transformers` reads from there, in fp32."""
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return model.from_pretrained(folder, dtype=torch.float32).eval()


def causal_attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of one text without any cache: what ``Llama.forward`` asks of its caller, at its simplest."""
    heads = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(0, 1)


@torch.inference_mode()
def forward(target: Llama, ids: list[int], tap_layers: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [T, V] and taps [T, len(tap_layers) * H] of a whole text."""
    hidden, taps = target(torch.tensor(ids), torch.arange(len(ids)), causal_attention, tap_layers)
    return target.logits(hidden), taps

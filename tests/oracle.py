"""Tiny random models of `transformers`, the reference that ours are held against, and a view for forwards of a text."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from lampejo import ops
from lampejo.cache import PagedCache
from lampejo.models.config import ModelConfig
from lampejo.models.layers import Target

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
# What the layers of some architectures have beyond that. Heads that are no multiples of each other, an odd number of
# experts; a quarter of a head of 16 is rotated.
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
DELTA_NET = {
    "num_hidden_layers": 4, "head_dim": 16, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 24, "linear_value_head_dim": 40,
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": SIZES["hidden_size"],
    "num_position_embeddings": 16,
}  # fmt: skip
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
    """Weights large enough that every part shows in the logits; norms near one, biases that count, memories of all
    lengths."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.add_(0.2 * noise)  # to what multiplies by 1, be it 1 or 0
            elif "embed" in name:
                parameter.copy_(0.3 * noise)
            elif name.endswith("bias"):
                parameter.copy_(noise)
            elif name.endswith("A_log"):
                parameter.copy_(noise - 2)
            elif "conv1d" in name:  # keys of a good size: they are scaled to unit length, and their rounding with them
                parameter.copy_(1.5 * noise)
            else:
                parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)
    return model.eval()


def make(name: str, extra: dict[str, Any], seed: int = 0, **changes: Any) -> PreTrainedModel:
    """``name`` and ``extra``: of the classes in `transformers`, and what their configuration has beyond SIZES."""
    config_name = f"{name}TextConfig" if name.startswith("Qwen3_5") else f"{name}Config"
    config = getattr(transformers, config_name)(**{**SIZES, **extra, **changes})
    return randomise(getattr(transformers, f"{name}ForCausalLM")(config), seed)


def make_with_vision(name: str, extra: dict[str, Any], seed: int = 0, **changes: Any) -> PreTrainedModel:
    """As releases have it: the text's configuration and weights are parts of a larger model's."""
    text = {**SIZES, **extra, **changes}
    tied = {"tie_word_embeddings": text.get("tie_word_embeddings", False)}
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=VISION, **tied)
    return randomise(getattr(transformers, f"{name}ForConditionalGeneration")(config), seed)


Make = Callable[..., PreTrainedModel]
_SHARED = {**EXPERTS, "shared_expert_intermediate_size": 28}
make_llama: Make = partial(make, "Llama", {})
make_qwen2: Make = partial(make, "Qwen2", {})
make_qwen3: Make = partial(make, "Qwen3", {})
make_qwen3_moe: Make = partial(make, "Qwen3Moe", EXPERTS)
make_qwen3_next: Make = partial(make, "Qwen3Next", _SHARED | DELTA_NET)
make_qwen3_5: Make = partial(make, "Qwen3_5", DELTA_NET)
make_qwen3_5_moe: Make = partial(make, "Qwen3_5Moe", _SHARED | DELTA_NET)
make_qwen3_5_with_vision: Make = partial(make_with_vision, "Qwen3_5", DELTA_NET)
make_qwen3_5_moe_with_vision: Make = partial(make_with_vision, "Qwen3_5Moe", _SHARED | DELTA_NET)


def save(
    model: PreTrainedModel,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    shard: str = "1GB",
    stacked: bool = False,
) -> PreTrainedModel:
    """Writes the model in ``dtype`` and returns what `transformers` reads from there, in fp32. ``stacked``: the experts
    of a layer in one tensor, else one by one."""
    model.to(dtype).save_pretrained(folder, max_shard_size=shard, save_original_format=not stacked)
    return model.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()


class RowView:
    """What a target asks of its caller, for one text, kept from chunk to chunk; nothing is ever taken back."""

    def __init__(self, config: ModelConfig, max_tokens: int, delta_net: Callable[..., Any] = ops.delta_net) -> None:
        """``delta_net``: the form of the recurrence."""
        self.position, self.delta_net, self.sizes = 0, delta_net, config.delta_net
        sizes = config.num_attention_layers, -(-max_tokens // 16), 16, config.num_kv_heads, config.head_dim
        self.cache = PagedCache(*sizes, torch.float32, torch.device("cpu"))
        self.states: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        caches = self.cache.k[layer], self.cache.v[layer]
        ops.write_pages(*caches, k, v, torch.arange(self.position, self.position + len(q)))
        pages = range(caches[0].shape[0])
        return ops.paged_attention(q, *caches, [ops.Segment(0, len(q), self.position, pages)])

    def recur(
        self, layer: int, mixed: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, conv_weight: torch.Tensor
    ) -> torch.Tensor:
        assert self.sizes is not None
        heads = self.sizes.num_value_heads, self.sizes.key_head_dim, self.sizes.value_head_dim
        start = torch.zeros(len(conv_weight), self.sizes.conv_size - 1), torch.zeros(heads)
        before = self.states.get(layer, start)
        out, *after = self.delta_net(mixed, log_decay, beta, conv_weight, self.sizes, *before)
        self.states[layer] = tuple(after)
        return out

    @torch.inference_mode()
    def forward(
        self, target: Target, ids: list[int], tap_layers: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The next tokens of the text -> logits [T, V] and taps [T, len(tap_layers) * H]."""
        positions = torch.arange(self.position, self.position + len(ids))
        hidden, taps = target(torch.tensor(ids), positions, self, tap_layers)
        self.position += len(ids)
        return target.logits(hidden), taps


def forward(target: Target, ids: list[int], tap_layers: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [T, V] and taps [T, len(tap_layers) * H] of a whole text."""
    return RowView(target.config, len(ids)).forward(target, ids, tap_layers)

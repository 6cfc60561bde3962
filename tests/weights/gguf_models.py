"""Tiny models of `transformers`, and GGUF files of them as llama.cpp's converter writes them.

What it changes on the way: norms are stored as 1 + weight, A_log as -exp(A_log), the convolution without its middle
dimension; Qwen3-Next's fused projection is taken apart; Qwen3.5's value heads go from "key head by key head" to tiled.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from oracle import randomise

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True}
SHARED = {"shared_expert_intermediate_size": 64}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
PARTIAL = {"rope_parameters": {**ROPE["rope_parameters"], "partial_rotary_factor": 0.25}}
MROPE = {"rope_parameters": {**PARTIAL["rope_parameters"], "mrope_section": [2, 1, 1], "mrope_interleaved": True}}
# GGUF's name of an architecture -> the class's name in transformers, and what its configuration has beyond SIZES
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", ROPE),
    "qwen3moe": ("Qwen3Moe", ROPE | EXPERTS),
    "qwen3next": ("Qwen3Next", PARTIAL | EXPERTS | SHARED | DELTA),
    "qwen35": ("Qwen3_5", MROPE | DELTA),
    "qwen35moe": ("Qwen3_5Moe", MROPE | EXPERTS | SHARED | DELTA),
}


def make_model(arch: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    name, extra = MODELS[arch]
    config_name = f"{name}TextConfig" if name.startswith("Qwen3_5") else f"{name}Config"
    config = getattr(transformers, config_name)(**{**SIZES, **extra, **changes})
    return randomise(getattr(transformers, f"{name}ForCausalLM")(config), seed)


def write_model(
    path: Path,
    arch: str,
    model: PreTrainedModel,
    types: dict[str, str] | None = None,
    fused: bool = False,
    remove: str | None = None,
    extra: dict[str, torch.Tensor] | None = None,
    **metadata: Any,
) -> Path:
    """``types`` gives tensors another type than F32, by a part of their GGUF name. ``fused``: gate and up of experts in
    one tensor, and Qwen3-Next's projection as the first converters left it. ``remove`` a tensor, or add ``extra`` ones.
    ``metadata``: pairs of value and type by key, without the architecture and with ``__`` for the dots, in place of
    those that follow from the model; None: without it."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    _write_metadata(writer, arch, config)
    for key, value in metadata.items():
        name = f"{arch}.{key.replace('__', '.')}"
        writer.kv_data[0].pop(name, None)
        if value is not None:
            writer.add_key_value(name, value[0], value[1])
    tensors = dict(_tensors(arch, model, fused)) | (extra or {})
    tensors.pop(remove or "", None)
    for name, values in tensors.items():
        kind = next((kind for part, kind in (types or {}).items() if part in name), "F32")
        number = gguf.GGMLQuantizationType[kind]
        data = gguf.quantize(np.ascontiguousarray(values.detach().numpy()), number)
        writer.add_tensor(name, data, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_metadata(writer: gguf.GGUFWriter, arch: str, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", 1))
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if hasattr(config, "num_experts"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if hasattr(config, "linear_num_key_heads"):
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        writer.add_full_attention_interval(DELTA["full_attention_interval"])
        writer.add_rope_dimension_count(config.head_dim // 4)
    if "mrope_section" in config.rope_parameters:
        writer.add_rope_dimension_sections([*config.rope_parameters["mrope_section"], 0])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    tokens = [*(chr(33 + i) for i in range(90)), "!!"]
    writer.add_token_list([*tokens, *(f"[PAD{i}]" for i in range(len(tokens), config.vocab_size))])
    writer.add_token_types([1] * len(tokens) + [3] * (config.vocab_size - len(tokens)))
    writer.add_token_merges(["! !"])
    writer.add_eos_token_id(95)


def _tensors(arch: str, model: PreTrainedModel, fused: bool) -> list[tuple[str, torch.Tensor]]:
    config, out = model.config, []
    names = gguf.get_tensor_name_map(
        next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), config.num_hidden_layers
    )
    for name, x in model.state_dict().items():
        if "norm.weight" in name and not name.endswith("linear_attn.norm.weight") and hasattr(config, "layer_types"):
            x = x + 1 if arch in ("qwen3next", "qwen35", "qwen35moe") else x
        if name.endswith("A_log"):
            x = -x.exp()
        if name.endswith("conv1d.weight"):
            x = x.squeeze(1)
        if name.endswith("shared_expert_gate.weight"):
            x = x.squeeze(0)
        if arch.startswith("qwen35") and "linear_attn" in name:
            x = _tiled(name, x, config)
        if fused:
            out.append((name, x))
        elif name.endswith("in_proj_qkvz.weight"):
            out += _apart(name, x, config)
        elif name.endswith("gate_up_proj"):
            out += zip((name.replace("gate_up", "gate"), name.replace("gate_up", "up")), x.chunk(2, dim=1), strict=True)
        else:
            out.append((name, x))
    found = []
    for name, x in out:
        base, _, suffix = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, "", "weight")
        suffix = f".{suffix}"
        if name.endswith("dt_bias"):
            base, suffix = name.replace("dt_bias", "dt_proj"), ".bias"
        if name.endswith("A_log"):
            suffix = ""
        mapped = names.get_name(base)
        assert mapped is not None, name
        found.append((mapped + suffix, x))
    return found


def _apart(name: str, x: torch.Tensor, config: Any) -> list[tuple[str, torch.Tensor]]:
    heads, value = config.linear_num_key_heads, config.linear_num_value_heads * config.linear_value_head_dim
    key = config.linear_key_head_dim
    q, k, v, z = x.view(heads, -1, x.shape[1]).split([key, key, value // heads, value // heads], dim=1)
    joined = torch.cat([part.flatten(0, 1) for part in (q, k, v)])
    return [(name.replace("qkvz", "qkv"), joined), (name.replace("qkvz", "z"), z.flatten(0, 1))]


def _tiled(name: str, x: torch.Tensor, config: Any) -> torch.Tensor:
    heads, group = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads

    def rows(part: torch.Tensor) -> torch.Tensor:
        return part.view(heads, group, -1, *part.shape[1:]).transpose(0, 1).reshape(part.shape)

    keys = 2 * heads * config.linear_key_head_dim
    if "in_proj_qkv" in name or "conv1d" in name:
        return torch.cat([x[:keys], rows(x[keys:])])
    if "out_proj" in name:
        return rows(x.T).T
    return x if name.endswith("linear_attn.norm.weight") else rows(x)

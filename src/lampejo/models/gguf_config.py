"""GGUF's names, of metadata and tensors, in the words of ``config.py``. The only place that translates them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lampejo.errors import UserError
from lampejo.models.config import (
    DEFAULT_THETA,
    Keys,
    ModelConfig,
    RopeConfig,
    checked,
    stretched_context,
    unsupported_architecture,
    yarn_scale,
)

GGUF_ARCHITECTURES = ("llama", "qwen2")

_GGUF_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(gguf_name: str) -> str:
    """The checkpoint name of a GGUF tensor; names that we do not know stay as they are, to be refused by name."""
    parts = gguf_name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[1].isdecimal() and parts[2] in _GGUF_LAYER:
        return f"model.layers.{parts[1]}.{_GGUF_LAYER[parts[2]]}.{parts[3]}"
    return _GGUF_TOP.get(gguf_name, gguf_name)


def model_config_from_gguf(
    metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]], rope_factors: Sequence[float] | None = None
) -> ModelConfig:
    """Translate GGUF metadata.

    ``tensors``: shapes (rows first) by GGUF name; they decide vocabulary size and tied head. ``rope_factors``: the
    values of ``rope_freqs.weight`` if the file has it; that is how GGUF stores Llama 3's RoPE scaling.
    """
    arch = Keys(metadata, "GGUF metadata").need("general.architecture")
    if arch not in GGUF_ARCHITECTURES:
        raise unsupported_architecture(arch, GGUF_ARCHITECTURES)
    prefix = f"{arch}."
    # Some writers store one value per layer; lists of equal values mean the same as the value.
    same = {key.removeprefix(prefix): _same(value) for key, value in metadata.items() if key.startswith(prefix)}
    keys = Keys(same, f"GGUF metadata, {prefix}*")
    if keys.whole("expert_count", 0, least=0):
        raise unsupported_architecture(f"{arch} with experts", GGUF_ARCHITECTURES)
    hidden_size, num_heads = keys.whole("embedding_length"), keys.whole("attention.head_count")
    max_position = keys.whole("context_length")
    head_dim = keys.whole("attention.key_length", max(hidden_size // num_heads, 1))
    for key in ("rope.dimension_count", "attention.value_length"):
        if keys.whole(key, head_dim) != head_dim:
            raise keys.unsupported(key, f"Only heads of one size, rotated in full, are (here {head_dim}).")
    embedding = tensors.get("token_embd.weight", ())
    if len(embedding) != 2:
        raise UserError("The GGUF file lacks the matrix 'token_embd.weight'.", "Fetch the file again.")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > embedding[0]:
        raise UserError(
            f"The GGUF file has {len(tokens)} tokens but {embedding[0]} embeddings.", "Fetch the file again."
        )
    rope = rope_from_gguf(keys, max_position, rope_factors, head_dim)
    return checked(
        ModelConfig(
            architecture=arch,
            vocab_size=embedding[0],
            hidden_size=hidden_size,
            intermediate_size=keys.whole("feed_forward_length"),
            num_layers=keys.whole("block_count"),
            num_heads=num_heads,
            num_kv_heads=keys.whole("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
            rope=rope,
            max_context=stretched_context(max_position, rope),
            tie_word_embeddings="output.weight" not in tensors,
            qkv_bias=arch == "qwen2",
        ),
        "GGUF metadata",
    )


def _same(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value and all(item == value[0] for item in value) else value


def rope_from_gguf(keys: Keys, max_position: int, factors: Sequence[float] | None, head_dim: int) -> RopeConfig:
    theta = keys.number("rope.freq_base", DEFAULT_THETA)
    kind = keys.values.get("rope.scaling.type") or ("linear" if keys.has("rope.scale_linear") else "none")
    if factors is not None:
        if kind != "none":
            raise keys.unsupported("rope.scaling.type", "It cannot be combined with rope_freqs.weight.")
        return _llama3_rope(theta, factors, head_dim)
    if kind == "none":
        return RopeConfig(theta=theta)
    if kind == "linear":
        factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    if kind != "yarn" or keys.has("rope.scaling.yarn_log_multiplier"):
        raise keys.unsupported("rope.scaling.type", "Supported types: none, linear, yarn.")
    factor = keys.number("rope.scaling.factor")
    attention_factor = None
    if keys.has("rope.scaling.attn_factor"):  # GGUF multiplies YaRN's own factor, transformers replaces it
        attention_factor = keys.number("rope.scaling.attn_factor") * yarn_scale(factor)
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=keys.whole("rope.scaling.original_context_length", max_position),
        attention_factor=attention_factor,
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def _llama3_rope(theta: float, factors: Sequence[float], head_dim: int) -> RopeConfig:
    """Find the Llama 3 scaling whose frequency divisors are ``factors`` ``[head_dim / 2]``."""
    found = [float(f) for f in factors]
    if len(found) == head_dim // 2 and all(math.isfinite(f) and f > 0 for f in found):
        if all(f == 1.0 for f in found):
            return RopeConfig(theta=theta)
        for original in (8192, 2048, 4096, 16384, 32768, 65536, 131072):
            rope = RopeConfig(theta, "llama3", round(max(found), 4), original, 1.0, 4.0)
            if all(
                math.isclose(f, w, rel_tol=1e-4) for f, w in zip(found, _llama3_divisors(rope, head_dim), strict=True)
            ):
                return rope
    raise UserError(
        "The GGUF file's rope_freqs.weight is not a Llama 3 scaling.", "Use the safetensors of the same model instead."
    )


def _llama3_divisors(rope: RopeConfig, head_dim: int) -> list[float]:
    """By what Llama 3's scaling divides each of the ``head_dim / 2`` frequencies."""
    divisors = []
    for i in range(head_dim // 2):
        turns = rope.original_max_position / (2 * math.pi * rope.theta ** (2 * i / head_dim))
        smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        smooth = min(max(smooth, 0.0), 1.0)
        divisors.append(1.0 / ((1 - smooth) / rope.factor + smooth))
    return divisors

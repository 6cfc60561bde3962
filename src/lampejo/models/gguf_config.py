"""GGUF's names, of metadata and tensors, in the words of ``config.py``. The only place that translates them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lampejo.errors import UserError
from lampejo.models.config import (
    DEFAULT_THETA,
    DeltaNetConfig,
    ExpertsConfig,
    Keys,
    ModelConfig,
    RopeConfig,
    check_layers,
    checked,
    stretched_context,
    unsupported_architecture,
    yarn_scale,
)

_ARCHITECTURES = {  # GGUF's name -> ours
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "qwen3next": "qwen3_next",
    "qwen35": "qwen3_5",
    "qwen35moe": "qwen3_5_moe",
}
_SOFTMAX = 1  # of expert_gating_func

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",  # its name in hybrid models
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_gate_exps.weight": "mlp.experts.gate_proj.weight",
    "ffn_up_exps.weight": "mlp.experts.up_proj.weight",
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj.weight",
    "ffn_down_exps.weight": "mlp.experts.down_proj.weight",
    "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",
    "ffn_gate_shexp.weight": "mlp.shared_expert.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_expert.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_expert.down_proj.weight",
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_in.weight": "linear_attn.in_proj_qkvz.weight",  # of the first converters, in place of the two above
    "ssm_ba.weight": "linear_attn.in_proj_ba.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
} | {f"attn_{x}.{kind}": f"self_attn.{x}_proj.{kind}" for x in "qkv" for kind in ("weight", "bias")}


def hf_name(gguf_name: str, mtp_layers: range) -> str:
    """The checkpoint name of a GGUF tensor; names that we do not know stay as they are, to be refused by name.

    ``mtp_layers`` are those of multi-token prediction, which the hub's checkpoints call ``mtp``.
    """
    prefix, _, rest = gguf_name.partition(".")
    layer, _, name = rest.partition(".")
    if prefix == "blk" and layer.isdecimal() and len(layer) < 6:
        if int(layer) in mtp_layers:
            return f"mtp.layers.{mtp_layers.index(int(layer))}.{name}"
        if name in _LAYER:
            return f"model.layers.{layer}.{_LAYER[name]}"
    return _TOP.get(gguf_name, gguf_name)


def mtp_layers_of(keys: Keys) -> range:
    """The layers behind those of the text. ``keys`` are the architecture's."""
    num_layers = keys.whole("block_count")
    return range(num_layers - keys.whole("nextn_predict_layers", 0, least=0), num_layers)


def keys_of(metadata: Mapping[str, Any]) -> Keys:
    """The architecture's own metadata, by their names without the architecture's."""
    prefix = f"{metadata['general.architecture']}."
    # Some writers store one value per layer; lists of equal values mean the same as the value.
    same = {key.removeprefix(prefix): _same(value) for key, value in metadata.items() if key.startswith(prefix)}
    return Keys(same, f"GGUF metadata, {prefix}*")


def model_config_from_gguf(
    metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]], rope_factors: Sequence[float] | None = None
) -> ModelConfig:
    """Translate GGUF metadata.

    ``tensors``: shapes (rows first) by GGUF name; they decide vocabulary size and tied head. ``rope_factors``: the
    values of ``rope_freqs.weight`` if the file has it; that is how GGUF stores Llama 3's RoPE scaling.
    """
    arch = Keys(metadata, "GGUF metadata").need("general.architecture")
    if not isinstance(arch, str) or arch not in _ARCHITECTURES:
        raise unsupported_architecture(arch, tuple(_ARCHITECTURES))
    keys = keys_of(metadata)
    architecture = _ARCHITECTURES[arch]
    has_experts = architecture in ("qwen3_moe", "qwen3_next", "qwen3_5_moe")
    is_hybrid = architecture in ("qwen3_next", "qwen3_5", "qwen3_5_moe")
    if not has_experts and keys.whole("expert_count", 0, least=0):
        raise unsupported_architecture(f"{arch} with experts", tuple(_ARCHITECTURES))
    hidden_size, num_heads = keys.whole("embedding_length"), keys.whole("attention.head_count")
    max_position = keys.whole("context_length")
    num_layers = mtp_layers_of(keys).start
    if num_layers < 1:
        raise keys.bad("nextn_predict_layers", keys.need("nextn_predict_layers"), "less than block_count")
    check_layers(num_layers, keys.where)
    head_dim = keys.whole("attention.key_length", max(hidden_size // num_heads, 1))
    if keys.whole("attention.value_length", head_dim) != head_dim:
        raise keys.unsupported("attention.value_length", f"Only values as large as keys are (here {head_dim}).")
    embedding = tensors.get("token_embd.weight", ())
    if len(embedding) != 2:
        raise UserError("The GGUF file lacks the matrix 'token_embd.weight'.", "Fetch the file again.")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > embedding[0]:
        raise UserError(
            f"The GGUF file has {len(tokens)} tokens but {embedding[0]} embeddings.", "Fetch the file again."
        )
    rope = rope_from_gguf(keys, max_position, rope_factors, head_dim)
    experts = _experts(keys) if has_experts else None
    return checked(
        ModelConfig(
            architecture=architecture,
            vocab_size=embedding[0],
            hidden_size=hidden_size,
            intermediate_size=keys.whole("feed_forward_length", experts.intermediate_size if experts else None),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=keys.whole("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
            rope=rope,
            max_context=stretched_context(max_position, rope),
            tie_word_embeddings="output.weight" not in tensors,
            qkv_bias=architecture == "qwen2",
            qk_norm=architecture.startswith("qwen3"),
            attention_gate=is_hybrid,
            norm_offset=False,  # GGUF stores 1 + weight
            rotary_dim=_rotary_dim(keys, head_dim, is_hybrid),
            experts=experts,
            delta_net=_delta_net(keys, num_layers, tiled=architecture != "qwen3_next") if is_hybrid else None,
        ),
        "GGUF metadata",
    )


def _rotary_dim(keys: Keys, head_dim: int, partial: bool) -> int | None:
    """How much of a head RoPE rotates. Its sections are for images: in a text they all rotate by the same position."""
    dim = keys.whole("rope.dimension_count", None if partial else head_dim)
    if not partial and dim != head_dim:
        raise keys.unsupported("rope.dimension_count", f"Only heads rotated in full are (here {head_dim}).")
    if dim > head_dim or dim % 2:
        raise keys.bad("rope.dimension_count", dim, f"an even number of at most {head_dim}")
    if keys.has("rope.dimension_sections"):
        sections = keys.ids("rope.dimension_sections")
        if not partial or sum(sections) != dim // 2:
            raise keys.unsupported("rope.dimension_sections", f"Only sections that add up to {dim // 2} are.")
    return None if dim == head_dim else dim


def _experts(keys: Keys) -> ExpertsConfig:
    if keys.whole("expert_gating_func", _SOFTMAX, least=0) != _SOFTMAX:
        raise keys.unsupported("expert_gating_func")
    if keys.number("expert_weights_scale", 1.0) != 1.0:
        raise keys.unsupported("expert_weights_scale")
    num_experts, num_active = keys.whole("expert_count"), keys.whole("expert_used_count")
    if num_active > num_experts:
        raise keys.bad("expert_used_count", num_active, f"at most {num_experts}, the number of experts")
    return ExpertsConfig(
        num_experts=num_experts,
        num_active=num_active,
        intermediate_size=keys.whole("expert_feed_forward_length"),
        shared_intermediate_size=keys.whole("expert_shared_feed_forward_length", 0, least=0),
        normalised=True,  # GGUF does not say; of these architectures llama.cpp assumes it
    )


def _delta_net(keys: Keys, num_layers: int, tiled: bool) -> DeltaNetConfig:
    interval, num_value_heads = keys.whole("full_attention_interval", 4), keys.whole("ssm.time_step_rank")
    num_key_heads, value_size = keys.whole("ssm.group_count"), keys.whole("ssm.inner_size")
    if keys.has("attention.recurrent_layers"):
        raise keys.unsupported("attention.recurrent_layers")
    if num_value_heads % num_key_heads or value_size % num_value_heads:
        wanted = "a multiple of ssm.group_count that divides ssm.inner_size"
        raise keys.bad("ssm.time_step_rank", num_value_heads, wanted)
    return DeltaNetConfig(
        layers=tuple(i for i in range(num_layers) if (i + 1) % interval),
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_head_dim=keys.whole("ssm.state_size"),
        value_head_dim=value_size // num_value_heads,
        conv_size=keys.whole("ssm.conv_kernel", least=2),
        tiled=tiled,
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

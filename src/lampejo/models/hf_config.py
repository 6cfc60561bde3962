"""The keys of a target's ``config.json``, in the words of ``config.py``. The only place that translates them."""

from collections.abc import Mapping
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
    shorten,
    stretched_context,
    unsupported_architecture,
    yarn_scale,
)

MODEL_TYPES = {  # config.json model_type -> our architecture
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "qwen3_next": "qwen3_next",
    "qwen3_5": "qwen3_5",  # with vision beside the text
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
}
_WITH_EXPERTS = ("qwen3_moe", "qwen3_next", "qwen3_5_moe")
_HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
_ROPE_KINDS = ("default", "linear", "llama3", "yarn")


def text_config_of(config: Mapping[str, Any]) -> Keys:
    """The part of a ``config.json`` that is about text: all of it, but for models with vision."""
    if config.get("model_type") not in ("qwen3_5", "qwen3_5_moe"):
        return Keys(config, "config.json")
    keys = Keys(config, "config.json")
    text = keys.need("text_config")
    if not isinstance(text, Mapping):
        raise keys.bad("text_config", text, "an object")
    tied = keys.flag("tie_word_embeddings") or Keys(text, "config.json, text_config").flag("tie_word_embeddings")
    return Keys({**text, "tie_word_embeddings": tied}, "config.json, text_config")


def model_config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Translate the ``config.json`` of a hub checkpoint; ``UserError`` for what is missing or not supported."""
    model_type = Keys(config, "config.json").need("model_type")
    if "dflash_config" in config or "speculators_model_type" in config:
        raise UserError("This is a drafter, not a model that generates text.", "Give it with --drafter instead.")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        raise unsupported_architecture(model_type, tuple(MODEL_TYPES))
    architecture, keys = MODEL_TYPES[model_type], text_config_of(config)
    is_hybrid, is_qwen3 = architecture in _HYBRIDS, architecture.startswith("qwen3")
    if keys.values.get("hidden_act", "silu") != "silu":
        raise keys.unsupported("hidden_act")
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if keys.values.get(key):
            raise keys.unsupported(key)
    if is_hybrid and not keys.flag("attn_output_gate", True):
        raise keys.unsupported("attn_output_gate")
    max_position = keys.whole("max_position_embeddings")
    if model_type == "mistral" and keys.has("sliding_window") and keys.whole("sliding_window") < max_position:
        raise keys.unsupported("sliding_window", "Choose a release without a window (Mistral 7B v0.2 and later).")
    hidden_size, num_heads = keys.whole("hidden_size"), keys.whole("num_attention_heads")
    num_layers = keys.whole("num_hidden_layers")
    check_layers(num_layers, keys.where)
    head_dim = keys.whole("head_dim", None if is_qwen3 else max(hidden_size // num_heads, 1))
    rope = rope_from_hf(keys, max_position, DEFAULT_THETA)
    recurrent = _recurrent_layers(keys, num_layers, is_hybrid)
    experts = _experts(keys, architecture, num_layers) if architecture in _WITH_EXPERTS else None
    has_mlps = experts is None or experts.dense_layers
    return checked(
        ModelConfig(
            architecture=architecture,
            vocab_size=keys.whole("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=keys.whole(
                "intermediate_size", None if has_mlps or experts is None else experts.intermediate_size
            ),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=keys.whole("num_key_value_heads", num_heads),
            head_dim=head_dim,
            rms_norm_eps=keys.number("rms_norm_eps"),
            rope=rope,
            max_context=stretched_context(max_position, rope),
            tie_word_embeddings=keys.flag("tie_word_embeddings"),
            qkv_bias=architecture == "qwen2",
            qk_norm=is_qwen3,
            attention_gate=is_hybrid,
            norm_offset=is_hybrid,
            rotary_dim=_rotary_dim(keys, head_dim, is_hybrid),
            experts=experts,
            delta_net=_delta_net(keys, recurrent) if is_hybrid else None,
        ),
        "config.json",
    )


def _rotary_dim(keys: Keys, head_dim: int, is_hybrid: bool) -> int | None:
    """How much of a head RoPE rotates. Its sections are for images: in a text they all rotate by the same position."""
    rope = keys.values.get("rope_parameters") or keys.values.get("rope_scaling") or {}
    factors = Keys({"partial_rotary_factor": keys.values.get("partial_rotary_factor"), **rope}, keys.where)
    factor = factors.number("partial_rotary_factor", 0.25 if is_hybrid else 1.0)
    if not is_hybrid and factor != 1.0:
        raise factors.unsupported("partial_rotary_factor")
    if not is_hybrid and "mrope_section" in rope:
        raise factors.unsupported("mrope_section")
    dim = int(head_dim * factor)
    if not 0 < dim <= head_dim or dim % 2:
        wanted = f"a part of heads of {head_dim} dimensions, and an even number of them"
        raise factors.bad("partial_rotary_factor", factor, wanted)
    return None if dim == head_dim else dim


def _recurrent_layers(keys: Keys, num_layers: int, is_hybrid: bool) -> tuple[int, ...]:
    """The layers without attention, from ``layer_types`` (transformers 5) or ``full_attention_interval`` (before)."""
    kinds = keys.values.get("layer_types")
    if kinds is None:
        interval = keys.whole("full_attention_interval", 4) if is_hybrid else 1
        return tuple(layer for layer in range(num_layers) if (layer + 1) % interval)
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise keys.bad("layer_types", kinds, f"a list of {num_layers} kinds of layers")
    known = ("full_attention", "linear_attention") if is_hybrid else ("full_attention",)
    if any(kind not in known for kind in kinds):
        raise keys.unsupported("layer_types", f"Known kinds: {', '.join(known)}.")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")


def _delta_net(keys: Keys, layers: tuple[int, ...]) -> DeltaNetConfig:
    num_key_heads, num_value_heads = keys.whole("linear_num_key_heads"), keys.whole("linear_num_value_heads")
    if num_value_heads % num_key_heads:
        raise keys.bad("linear_num_value_heads", num_value_heads, f"a multiple of linear_num_key_heads {num_key_heads}")
    return DeltaNetConfig(
        layers=layers,
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_head_dim=keys.whole("linear_key_head_dim"),
        value_head_dim=keys.whole("linear_value_head_dim"),
        conv_size=keys.whole("linear_conv_kernel_dim", least=2),
    )


def _experts(keys: Keys, architecture: str, num_layers: int) -> ExpertsConfig:
    by_name = "num_local_experts" if keys.has("num_local_experts") else "num_experts"  # transformers 5 writes the first
    num_experts, num_active = keys.whole(by_name), keys.whole("num_experts_per_tok")
    if num_active > num_experts:
        raise keys.bad("num_experts_per_tok", num_active, f"at most {num_experts}, the number of experts")
    dense: tuple[int, ...] = ()
    if architecture != "qwen3_5_moe":
        step, named = keys.whole("decoder_sparse_step", 1), keys.ids("mlp_only_layers", "layer")
        dense = tuple(layer for layer in range(num_layers) if layer in named or (layer + 1) % step)
    shared = 0 if architecture == "qwen3_moe" else keys.whole("shared_expert_intermediate_size")
    return ExpertsConfig(
        num_experts=num_experts,
        num_active=num_active,
        intermediate_size=keys.whole("moe_intermediate_size"),
        shared_intermediate_size=shared,
        normalised=architecture == "qwen3_5_moe" or keys.flag("norm_topk_prob", architecture == "qwen3_next"),
        dense_layers=dense,
    )


def rope_from_hf(keys: Keys, max_position: int, default_theta: float | None) -> RopeConfig:
    """RoPE from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before)."""
    scaling = keys.values.get("rope_parameters") or keys.values.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping) or any(isinstance(value, Mapping) for value in scaling.values()):
        raise UserError(f"{keys.where}: rope parameters per layer are not supported.", "Choose another model.")
    rope = Keys({"rope_theta": keys.values.get("rope_theta"), **scaling}, f"{keys.where}, rope parameters")
    kind = scaling.get("rope_type", scaling.get("type")) or "default"
    if default_theta is None and kind == "mrope":  # a drafter's RoPE is plain even where this tells about its target
        kind = "default"
    if kind not in _ROPE_KINDS:
        raise UserError(f"RoPE type {shorten(kind)} is not supported.", f"Supported types: {', '.join(_ROPE_KINDS)}.")
    theta = rope.number("rope_theta", default_theta)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=rope.number("factor"))
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind="llama3",
            factor=rope.number("factor"),
            original_max_position=rope.whole("original_max_position_embeddings"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
    if not rope.flag("truncate", True):
        raise rope.unsupported("truncate")
    factor = rope.number("factor")
    attention_factor = rope.number("attention_factor") if rope.has("attention_factor") else None
    if attention_factor is None and scaling.get("mscale") and scaling.get("mscale_all_dim"):
        attention_factor = yarn_scale(factor, rope.number("mscale")) / yarn_scale(factor, rope.number("mscale_all_dim"))
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=rope.whole(
            "original_max_position_embeddings", keys.whole("original_max_position_embeddings", max_position)
        ),
        attention_factor=attention_factor,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
    )

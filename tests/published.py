"""The published drafters, by their files: configurations as released, and checkpoints of those shapes that are small.

What is not known of a file is filled with something of its kind, and said so. ``small`` keeps what decides how a file
is read and how its drafter computes: layers, heads, taps, mask, block, windows, and how all of it is written down.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from safetensors.torch import save_file

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Published:
    """A row of the table of released drafters. ``layers`` and ``vocab_size`` are the target's and the file's."""

    name: str
    hidden: int
    num_layers: int
    mlp: int
    heads: int
    kv_heads: int
    target_layers: int
    taps: list[int]
    mask: int
    theta: int
    window: int | None = None
    num_full: int = 0  # layers without the window, the last ones
    june: bool = False  # newer files: block size inside, rope_parameters
    vocab_size: int = 248320

    @property
    def windows(self) -> tuple[int | None, ...]:
        num_full = self.num_layers if self.window is None else self.num_full
        return (self.window,) * (self.num_layers - num_full) + (None,) * num_full

    @property
    def config(self) -> dict[str, Any]:
        """``config.json`` as released."""
        rules: dict[str, Any] = {"mask_token_id": self.mask, "target_layer_ids": self.taps}
        config: dict[str, Any] = {
            "architectures": ["DFlashDraftModel"], "attention_bias": False, "attention_dropout": 0.0,
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "bos_token_id": None, "dtype": "bfloat16",
            "eos_token_id": None, "head_dim": 128, "hidden_act": "silu", "hidden_size": self.hidden,
            "initializer_range": 0.02, "intermediate_size": self.mlp,
            "layer_types": [FULL if window is None else SLIDING for window in self.windows],
            "max_position_embeddings": 262144, "max_window_layers": self.num_layers, "model_type": "qwen3",
            "num_attention_heads": self.heads, "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.kv_heads, "num_target_layers": self.target_layers, "rms_norm_eps": 1e-06,
            "sliding_window": self.window, "tie_word_embeddings": False, "use_cache": False,
            "use_sliding_window": self.window is not None, "vocab_size": self.vocab_size,
        }  # fmt: skip
        if self.june:
            config |= {
                "dflash_config": {"block_size": 16, **rules},
                "rope_parameters": {"rope_theta": self.theta, "rope_type": "default"},
            }
        else:
            config |= {
                "block_size": 16, "dflash_config": rules, "rope_scaling": None, "rope_theta": self.theta
            }  # fmt: skip
        return config


QWEN3 = {"theta": 1_000_000, "vocab_size": 151936, "mask": 151669}
FIRST, JUNE = {"theta": 10_000_000, "mask": 248070}, {"theta": 10_000_000, "mask": 248077, "june": True}
FOUR, EIGHT = [1, 9, 17, 25, 33], [1, 6, 11, 16, 22, 27, 32, 37]
PUBLISHED = (
    Published("Qwen3-4B-DFlash-b16", 2560, 5, 9728, 32, 8, 36, FOUR, **QWEN3),
    Published("Qwen3-8B-DFlash-b16", 4096, 5, 12288, 32, 8, 36, FOUR, **QWEN3),
    Published("Qwen3-Coder-30B-A3B-DFlash", 2048, 8, 6144, 32, 4, 48, [1, 12, 23, 34, 45], **QWEN3),
    # MLP, heads and taps of this one are not known: those of its sister stand in.
    Published("Qwen3-Coder-Next-DFlash", 2048, 8, 6144, 32, 4, 48, [1, 12, 23, 34, 45], **QWEN3),
    Published("Qwen3.5-4B-DFlash", 2560, 5, 9728, 32, 8, 32, [1, 8, 15, 22, 29], **FIRST),
    Published("Qwen3.5-9B-DFlash", 4096, 5, 12288, 32, 8, 32, [1, 8, 15, 22, 29], **FIRST),
    Published("Qwen3.5-27B-DFlash, first", 5120, 5, 17408, 32, 8, 64, [1, 16, 31, 46, 61], **FIRST),
    # Its taps are not known: eight, evenly spaced, as its sisters of June have them.
    Published(
        "Qwen3.5-27B-DFlash, June", 5120, 6, 17408, 32, 8, 64, [1, 10, 18, 27, 35, 44, 52, 61],
        window=4096, num_full=1, **JUNE,
    ),
    Published("Qwen3.5-35B-A3B-DFlash, first", 2048, 8, 6144, 32, 4, 40, [1, 10, 19, 28, 37], **FIRST),
    Published("Qwen3.6-35B-A3B-DFlash, June", 2048, 6, 6144, 32, 8, 40, EIGHT, window=4096, num_full=1, **JUNE),
    Published(
        "Qwen3.6-27B-DFlash", 5120, 5, 17408, 32, 8, 64, [1, 16, 31, 46, 61], window=2048, num_full=1, **FIRST
    ),
    Published(
        "Qwen3.5-122B-A10B-DFlash", 3072, 6, 9216, 32, 8, 48, [1, 7, 14, 20, 26, 32, 39, 45], window=4096, **JUNE
    ),
)  # fmt: skip


def small(config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """The same file of a smaller drafter; ``changes`` replace keys wherever they stand."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "head_dim": 8, **changes}
    result = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            value = small_inner(value, changes)
        elif key in sizes:
            value = sizes[key]
        result[key] = value
    return result


def small_inner(inner: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: changes.get(key, value) for key, value in inner.items()}


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The key list of a release in z-lab's layout."""
    hidden, mlp, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    num_taps = len({**config, **config["dflash_config"]}["target_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, num_taps * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)
    }  # fmt: skip
    for i in range(config["num_hidden_layers"]):
        parts: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,), "mlp.down_proj": (hidden, mlp), "mlp.gate_proj": (mlp, hidden),
            "mlp.up_proj": (mlp, hidden), "post_attention_layernorm": (hidden,), "self_attn.k_norm": (head,),
            "self_attn.k_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries), "self_attn.q_norm": (head,),
            "self_attn.q_proj": (queries, hidden), "self_attn.v_proj": (keys, hidden),
        }  # fmt: skip
        shapes |= {f"layers.{i}.{part}.weight": shape for part, shape in parts.items()}
    return shapes


def random_weights(shapes: Mapping[str, tuple[int, ...]], seed: int = 1) -> dict[str, torch.Tensor]:
    """Large enough that every part shows in the drafts, norms near one; in bfloat16, as released."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        is_norm = len(shape) == 1
        weights[name] = (1 + 0.1 * noise if is_norm else 1.5 * noise / shape[-1] ** 0.5).bfloat16()
    return weights


def write(folder: Path, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor] | None = None) -> Path:
    """A drafter's folder in z-lab's layout, with random weights if none are given."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(weights or random_weights(tensor_shapes(config))), folder / "model.safetensors")
    return folder


def as_speculators(
    config: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor],
    *,
    draft_ids: list[int] | None = None,
    embedding: torch.Tensor | None = None,
    head: torch.Tensor | None = None,
    **changes: Any,
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The same drafter as the ``speculators`` library saves it; ``head`` [draft ids, H] and ``embedding`` are its own.

    ``changes`` replace keys at top level.
    """
    rules = {**config, **config["dflash_config"]}
    outside = ("architectures", "auto_map", "block_size", "dflash_config", "num_target_layers", "is_causal")
    vocab_size = config["vocab_size"]
    saved = {
        "architectures": ["DFlashDraftModel"], "aux_hidden_state_layer_ids": [i + 1 for i in rules["target_layer_ids"]],
        "block_size": rules["block_size"], "draft_vocab_size": len(draft_ids) if draft_ids else vocab_size,
        "dtype": "bfloat16", "mask_token_id": rules["mask_token_id"], "max_anchors": 3072,
        "sample_from_anchor": False, "sliding_window_non_causal": False, "speculators_model_type": "dflash",
        "speculators_config": {
            "algorithm": "dflash", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": rules["block_size"] - 1}],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "/data/targets/pinned"},
        },
        "speculators_version": "0.5.0", "target_hidden_size": None,
        "transformer_layer_config": {key: value for key, value in config.items() if key not in outside},
        **changes,
    }  # fmt: skip
    tensors = dict(weights)
    if draft_ids:
        known = torch.zeros(vocab_size, dtype=torch.bool)
        known[draft_ids] = True
        tensors |= {"t2d": known, "d2t": torch.tensor(draft_ids) - torch.arange(len(draft_ids))}
    if embedding is not None:
        tensors["embed_tokens.weight"] = embedding
    if head is not None:
        tensors["lm_head.weight"] = head
    return saved, tensors


_GGUF_TOP = {"fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm", "embed_tokens": "token_embd",
             "lm_head": "output"}  # fmt: skip
_GGUF_PARTS = {
    "input_layernorm": "attn_norm", "mlp.down_proj": "ffn_down", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "post_attention_layernorm": "ffn_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.k_proj": "attn_k",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.q_proj": "attn_q",
    "self_attn.v_proj": "attn_v",
}  # fmt: skip


def write_gguf(
    path: Path, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], kind: str = "F32", **metadata: Any
) -> Path:
    """The same drafter as llama.cpp's converter writes it. ``draft_token_ids`` becomes ``d2t``; ``metadata`` (dots as
    two underscores) replaces values, None takes them away."""
    rules = {**config, **config["dflash_config"]}
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    values: dict[str, Any] = {
        "block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"], "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(scaling.get("rope_theta", config.get("rope_theta"))),
        "block_size": rules["block_size"], "target_layers": [i + 1 for i in rules["target_layer_ids"]],
    }  # fmt: skip
    if scaling.get("rope_type", "default") != "default":
        values |= {
            "rope.scaling.type": scaling["rope_type"], "rope.scaling.factor": float(scaling["factor"]),
            "rope.scaling.original_context_length": scaling.get("original_max_position_embeddings"),
        }  # fmt: skip
    if SLIDING in (config.get("layer_types") or []):
        values |= {
            "attention.sliding_window": config["sliding_window"],
            "attention.sliding_window_pattern": [kind == SLIDING for kind in config["layer_types"]],
        }
    if config.get("is_causal") is not None:
        values["attention.causal"] = config["is_causal"]
    values |= {key.replace("__", "."): value for key, value in metadata.items() if not key.startswith("tokenizer")}
    writer = GGUFWriter(path, "dflash")
    for key, value in values.items():
        if value is not None:
            _add_value(writer, f"dflash.{key}", value)
    mask = metadata.get("tokenizer__ggml__mask_token_id", rules["mask_token_id"])
    if mask is not None:
        writer.add_uint32("tokenizer.ggml.mask_token_id", mask)
    for name, tensor in weights.items():
        if name == "draft_token_ids":
            writer.add_tensor("d2t", tensor.long().numpy())
            continue
        parts = name.removesuffix(".weight").split(".")
        theirs = f"blk.{parts[1]}.{_GGUF_PARTS['.'.join(parts[2:])]}" if parts[0] == "layers" else _GGUF_TOP[parts[0]]
        data, quantised = tensor.float().numpy(), tensor.ndim == 2 and kind != "F32"
        if quantised:
            packed = quantize(data, GGMLQuantizationType[kind])
            writer.add_tensor(f"{theirs}.weight", packed, raw_dtype=GGMLQuantizationType[kind])
        else:
            writer.add_tensor(f"{theirs}.weight", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
           list: writer.add_array}[type(value)]  # fmt: skip
    add(key, value)

"""Small checkpoints for the tests of the readers, written by the reference libraries."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from safetensors.torch import save_file

from lampejo.models.config import DrafterConfig, RopeConfig
from lampejo.weights.drafter_files import drafter_shapes

HF_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
DRAFTER_CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 4,
    "num_target_layers": 2,
    "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 1]},
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "vocab_size": 64,
    "tie_word_embeddings": False,
}


def target_shapes(config: dict[str, Any] = HF_CONFIG) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama checkpoint with a tied head."""
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for i in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden), "mlp.down_proj": (hidden, mlp),
        }  # fmt: skip
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def random_tensors(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def write_folder(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], shards: int = 1) -> Path:
    """A model folder; several shards with an index if asked for."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for i in range(shards):
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        names = list(tensors)[i::shards]
        save_file({n: tensors[n] for n in names}, folder / name)
        weight_map |= dict.fromkeys(names, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_target(folder: Path, **changes: Any) -> Path:
    config = {**HF_CONFIG, **changes}
    return write_folder(folder, random_tensors(target_shapes(config)), config)


def write_drafter(folder: Path, remove: str = "", add: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A drafter for ``write_target``; ``remove`` and ``add`` change its tensors, ``changes`` its config."""
    config = {**DRAFTER_CONFIG, **changes}
    extension = config["dflash_config"]
    sizes = DrafterConfig(4, 5, (0, 1), 2, 32, 48, 1, 4, 2, 8, 1e-6, RopeConfig(1e4), 64, (None,), (False,),
                          extension.get("draft_vocab_size"), extension.get("markov_rank"))  # fmt: skip
    tensors = random_tensors(drafter_shapes(sizes))
    if "draft_token_ids" in tensors:
        tensors["draft_token_ids"] = torch.arange(0, 2 * len(tensors["draft_token_ids"]), 2, dtype=torch.int32)
    tensors.pop(remove, None)
    return write_folder(folder, tensors | (add or {}), config)


def write_gguf(
    path: Path,
    types: dict[str, str] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    rope_theta: float = 10000.0,
    **metadata: Any,
) -> Path:
    """The same tiny Llama as GGUF with random weights.

    ``types`` gives tensors another type than F32, by name; ``extra`` are further ones; ``metadata`` are pairs of value
    and type by key, with ``__`` for the dots.
    """
    arch = metadata.pop("architecture", "llama")
    writer = GGUFWriter(path, arch)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(rope_theta)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(64)])
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")
    for key, value in metadata.items():
        writer.add_key_value(key.replace("__", "."), value[0], value[1])
    names = {
        "attn_norm": (32,), "ffn_norm": (32,), "attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32),
        "attn_output": (32, 32), "ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64),
    }  # fmt: skip
    shapes = {"token_embd.weight": (64, 32), "output_norm.weight": (32,)}
    shapes |= {f"blk.{i}.{name}.weight": shape for i in range(2) for name, shape in names.items()}
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        kind = (types or {}).get(name)
        if kind is None:
            writer.add_tensor(name, random.standard_normal(shape, np.float32))
        else:
            add_quantised(writer, name, shape, GGMLQuantizationType[kind], random)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_quantised(
    writer: GGUFWriter, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, random: np.random.Generator
) -> np.ndarray:
    """Random bytes of a block format, their half-precision scales made finite; returns them."""
    per_block, num_bytes = GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // per_block * num_bytes), np.uint8)
    writer.add_tensor(name, finite(blocks, kind), raw_dtype=kind)
    return blocks


def finite(blocks: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Clear the top exponent bit of every half-precision field, so that no scale is infinite or NaN."""
    num_bytes = GGML_QUANT_SIZES[kind][1]
    view = blocks.reshape(-1, num_bytes)
    at = {"F16": [1], "BF16": [1], "F32": [3], "Q4_0": [1], "Q4_1": [1, 3], "Q5_0": [1], "Q5_1": [1, 3], "Q8_0": [1],
          "Q4_K": [1, 3], "Q5_K": [1, 3], "Q6_K": [209]}.get(kind.name, [])  # fmt: skip
    for column in at:
        view[:, column] &= 0xBF
    return blocks


def gguf_bytes(
    metadata: list[tuple[bytes, bytes]] = (), tensors: list[tuple[bytes, list[int], int, int]] = (), data: bytes = b"",
    counts: tuple[int, int] | None = None, version: int = 3, magic: bytes = b"GGUF",
) -> bytes:  # fmt: skip
    """A GGUF file by hand: metadata as (key, encoded type and value), tensors as (name, dims, type, offset)."""
    num_tensors, num_values = counts or (len(tensors), len(metadata))
    out = magic + struct.pack("<IQQ", version, num_tensors, num_values)
    for key, value in metadata:
        out += struct.pack("<Q", len(key)) + key + value
    for name, dims, kind, offset in tensors:
        out += struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        out += struct.pack("<IQ", kind, offset)
    return out + b"\0" * (-len(out) % 32) + data


def safetensors_bytes(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file by hand; ``header`` is JSON text or something to encode."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data

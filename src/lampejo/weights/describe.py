"""What ``lampejo inspect`` tells about a checkpoint."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from lampejo.config import EngineConfig
from lampejo.models.config import DrafterConfig, ModelConfig
from lampejo.models.drafter_config import drafter_config_from_hf
from lampejo.weights.checkpoint import Checkpoint
from lampejo.weights.drafters import find_drafter, known_drafter
from lampejo.weights.files import read_json


def facts(checkpoint: Checkpoint, kv_dtype: torch.dtype) -> dict[str, Any]:
    """Everything as JSON can hold it; nothing is dequantised for it. ``kv_dtype``: of keys and values in a default run,
    which holds the context of a drafter in the package too. ``matching_drafters``: that one, else published ones."""
    files = [checkpoint.path] if checkpoint.path.is_file() else sorted(checkpoint.path.glob("*.safetensors"))
    names = [name for name in checkpoint.tensor_names() if name != "rope_freqs.weight"]
    drafter, known = find_drafter(checkpoint), known_drafter(checkpoint)
    cached: list[ModelConfig | DrafterConfig] = [checkpoint.config]
    if drafter:
        cached.append(drafter_config_from_hf(read_json(drafter / "config.json")))
    return {
        "name": checkpoint.name,
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "num_bytes": sum(file.stat().st_size for file in files),
        "num_parameters": sum(math.prod(checkpoint.info(name)[0]) for name in names),
        "quantization": checkpoint.quantization,
        "skipped": checkpoint.skipped,
        "config": asdict(checkpoint.config),
        "kv_bytes_per_token": sum(kv_bytes_per_token(part, kv_dtype.itemsize) for part in cached),
        "kv_dtype": str(kv_dtype).removeprefix("torch."),
        "state_bytes_per_request": state_bytes(checkpoint.config),
        "eos_ids": list(checkpoint.eos_ids),
        "generation_defaults": checkpoint.generation_defaults,
        "chat_template": checkpoint.chat_template,
        "matching_drafters": [drafter.name] if drafter else list(known.repos) if known else [],
    }


def skipped_parts(skipped: Mapping[str, int]) -> str:
    """What a checkpoint holds beside the model of the text, in words; empty if nothing."""
    return ", ".join(f"{kind} ({count} tensors)" for kind, count in skipped.items())


def kv_bytes_per_token(config: ModelConfig | DrafterConfig, element_bytes: int) -> int:
    """Keys and values of all layers for one token."""
    num_layers = config.num_attention_layers if isinstance(config, ModelConfig) else config.num_layers
    return 2 * num_layers * config.num_kv_heads * config.head_dim * element_bytes


def state_bytes(config: ModelConfig) -> int:
    """State of all recurrent layers for one request, whatever its length, in fp32; a cached prefix holds another."""
    sizes = config.delta_net
    if sizes is None:
        return 0
    matrices = sizes.num_value_heads * sizes.key_head_dim * sizes.value_head_dim
    return 4 * len(sizes.layers) * (matrices + sizes.num_channels * (sizes.conv_size - 1))


def describe(checkpoint: Checkpoint, kv_dtype: torch.dtype) -> list[tuple[str, str]]:
    """Label and value for people, in the order of reading."""
    known, config = facts(checkpoint, kv_dtype), checkpoint.config
    rope = f"theta {config.rope.theta:g}"
    if config.rope.kind != "default":
        rope += f", {config.rope.kind} x{config.rope.factor:g}"
    template = checkpoint.chat_template
    first_line = next((line.strip() for line in (template or "").splitlines() if line.strip()), "")
    kv_bytes = known["kv_bytes_per_token"]
    kv_size = f"{kv_bytes:,} bytes per token in {known['kv_dtype']}"
    kv_size += ", the drafter's context included" if find_drafter(checkpoint) else ""
    state = known["state_bytes_per_request"]
    rows, snapshots = EngineConfig.max_rows, EngineConfig.num_snapshots
    total = f"{(rows + snapshots) * state / 1e6:,.0f} MB for {rows} requests and {snapshots} cached prefixes"
    recurrent = [("recurrent state", f"{state:,} bytes per request in float32; {total}")] if state else []
    layers, experts = str(config.num_layers), []
    if config.delta_net:
        layers += f", {len(config.delta_net.layers)} of them Gated DeltaNet"
    if config.experts:
        mix = config.experts
        shared = f", and a shared one of {mix.shared_intermediate_size}" if mix.shared_intermediate_size else ""
        experts = [("experts", f"{mix.num_experts} of size {mix.intermediate_size}, {mix.num_active} active{shared}")]
    skipped = [("skipped", skipped_parts(checkpoint.skipped))] if checkpoint.skipped else []
    return [
        ("name", checkpoint.name),
        ("path", str(checkpoint.path)),
        ("format", checkpoint.format),
        ("size", f"{known['num_bytes'] / 1e6:,.1f} MB"),
        ("architecture", config.architecture),
        ("parameters", f"{known['num_parameters']:,}"),
        ("quantization", checkpoint.quantization),
        *skipped,
        ("layers", layers),
        ("hidden size", str(config.hidden_size)),
        ("MLP size", str(config.intermediate_size)),
        *experts,
        ("heads", f"{config.num_heads} of {config.head_dim}, {config.num_kv_heads} key/value"),
        ("vocabulary", f"{config.vocab_size} ({'tied' if config.tie_word_embeddings else 'untied'} head)"),
        ("context", str(config.max_context)),
        ("keys and values", f"{kv_size}; {kv_bytes * config.max_context / 1e6:,.0f} MB for all of it"),
        *recurrent,
        ("RoPE", rope),
        ("end tokens", ", ".join(map(str, checkpoint.eos_ids)) or "none"),
        ("sampling defaults", ", ".join(f"{k} {v}" for k, v in checkpoint.generation_defaults.items()) or "none"),
        ("chat template", f"yes: {first_line[:80]}" if template else "no"),
        ("matching drafters", ", ".join(known["matching_drafters"]) or "none known"),
    ]

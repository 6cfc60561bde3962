"""What ``lampejo inspect`` tells about a checkpoint."""

import math

from lampejo.weights.checkpoint import Checkpoint
from lampejo.weights.drafters import find_drafter


def describe(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """Label and value, in the order of reading; nothing is dequantised for it."""
    config = checkpoint.config
    sizes = [math.prod(checkpoint.info(name)[0]) for name in checkpoint.tensor_names() if name != "rope_freqs.weight"]
    rope = f"theta {config.rope.theta:g}"
    if config.rope.kind != "default":
        rope += f", {config.rope.kind} x{config.rope.factor:g}"
    template = checkpoint.chat_template
    first_line = next((line.strip() for line in (template or "").splitlines() if line.strip()), "")
    drafter = find_drafter(checkpoint)
    return [
        ("name", checkpoint.name),
        ("path", str(checkpoint.path)),
        ("format", checkpoint.format),
        ("architecture", config.architecture),
        ("parameters", f"{sum(sizes):,}"),
        ("quantization", checkpoint.quantization),
        ("layers", str(config.num_layers)),
        ("hidden size", str(config.hidden_size)),
        ("MLP size", str(config.intermediate_size)),
        ("heads", f"{config.num_heads} of {config.head_dim}, {config.num_kv_heads} key/value"),
        ("vocabulary", f"{config.vocab_size} ({'tied' if config.tie_word_embeddings else 'untied'} head)"),
        ("context", str(config.max_context)),
        ("RoPE", rope),
        ("end tokens", ", ".join(map(str, checkpoint.eos_ids)) or "none"),
        ("sampling defaults", ", ".join(f"{k} {v}" for k, v in checkpoint.generation_defaults.items()) or "none"),
        ("chat template", f"yes: {first_line[:80]}" if template else "no"),
        ("matching drafters", f"{drafter.name} (in the package)" if drafter else "none in the package"),
    ]

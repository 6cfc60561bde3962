"""What a checkpoint says about its architecture, in our words.

The only place that translates ``config.json`` keys and GGUF metadata names; defaults for absent keys stand here and
nowhere else.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. ``kind`` is one of ``default``, ``linear``, ``llama3``, ``yarn``."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None  # yarn: scales cos and sin; None derives it from ``factor``
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of a target model."""

    architecture: str  # "llama" | "qwen2"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_context: int
    tie_word_embeddings: bool
    qkv_bias: bool = False


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes and rules of a DFlash drafter (arXiv 2602.06036). Layer ids are 0-based: tap l is the output of layer l."""

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    vocab_size: int
    windows: tuple[int | None, ...]  # per layer: sliding window over the context, None = all of it
    causal: tuple[bool, ...]  # per layer: block rows see only earlier block rows
    draft_vocab_size: int | None = None  # our extension: logits over a reduced vocabulary
    markov_rank: int | None = None  # our extension: a bias from the token before the slot
    target_name: str | None = None  # the target it was trained for, if recorded

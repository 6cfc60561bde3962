"""What a checkpoint says about its architecture, in our words.

``hf_config.py`` and ``gguf_config.py`` translate the files of targets, ``drafter_config.py`` and
``gguf_drafter_config.py`` those of drafters: the only places that know their keys, and defaults for absent ones.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from lampejo.errors import UserError


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
class ExpertsConfig:
    """A mixture of experts in place of the MLP. ``dense_layers`` keep a plain MLP."""

    num_experts: int
    num_active: int  # per token, the shared expert not counted
    intermediate_size: int  # of one expert
    shared_intermediate_size: int = 0  # 0: no shared expert
    normalised: bool = True  # the weights of a token's experts add up to 1
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class DeltaNetConfig:
    """Gated DeltaNet (arXiv 2412.06464) in place of attention in ``layers``; the other layers have attention."""

    layers: tuple[int, ...]
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_size: int  # tokens that the short convolution sees, the present one included
    tiled: bool = False  # value head v reads key head v % num_key_heads (GGUF); else each key head's are neighbours

    @property
    def num_channels(self) -> int:
        """Of the short convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of a target model."""

    architecture: str  # "llama" | "qwen2" | "qwen3" | "qwen3_moe" | "qwen3_next" | "qwen3_5" | "qwen3_5_moe"
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
    qk_norm: bool = False  # RMSNorm over each head of q and k
    attention_gate: bool = False  # q_proj gives each head an output gate too, applied as a sigmoid before o_proj
    norm_offset: bool = False  # norms multiply by 1 + weight
    rotary_dim: int | None = None  # first dimensions of a head that RoPE rotates; None: all
    experts: ExpertsConfig | None = None
    delta_net: DeltaNetConfig | None = None

    @property
    def num_attention_layers(self) -> int:
        """Layers with keys and values."""
        return self.num_layers - (len(self.delta_net.layers) if self.delta_net else 0)

    @property
    def ordinals(self) -> tuple[int, ...]:
        """Each layer's place among the layers of its kind: attention, or Gated DeltaNet."""
        recurrent = self.delta_net.layers if self.delta_net else ()
        kinds = [layer in recurrent for layer in range(self.num_layers)]
        return tuple(kinds[:layer].count(kind) for layer, kind in enumerate(kinds))


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes and rules of a DFlash drafter (arXiv 2602.06036). Layer ids are 0-based: tap l is the output of layer l."""

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None  # None: the file does not tell
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
    target_hidden_size: int = 0  # of the taps; 0: as hidden_size
    sample_from_anchor: bool = False  # row j of a block predicts the token after it; else, from row 1 on, that at it
    own_embedding: bool = False  # the file brings it; else the target's
    own_head: bool = False

    @property
    def tap_size(self) -> int:
        return self.target_hidden_size or self.hidden_size

    @property
    def max_drafts(self) -> int:
        """Most tokens that one pass proposes."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    # what targets differ in, and all DFlash drafters have in common
    qkv_bias: ClassVar[bool] = False
    qk_norm: ClassVar[bool] = True
    attention_gate: ClassVar[bool] = False
    norm_offset: ClassVar[bool] = False


DEFAULT_THETA = 10_000.0  # what Llama 1 and 2 used; their files do not say it
C = TypeVar("C", ModelConfig, DrafterConfig)
_LARGEST = 1 << 31  # no size in a real file comes near; larger ones are damage or malice


class Keys:
    """Typed access to a configuration dict; every failure is a ``UserError`` that names the key."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def need(self, key: str) -> Any:
        if not self.has(key):
            raise UserError(f"{self.where} lacks the key {key!r}.", "Fetch the file again from where it was published.")
        return self.values[key]

    def whole(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = default if default is not None and not self.has(key) else self.need(key)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _LARGEST:
            raise self.bad(key, value, f"a whole number of at least {least}")
        return value

    def ids(self, key: str, kind: str = "token id") -> tuple[int, ...]:
        """An id, several of them, or none at all."""
        value = self.values.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < _LARGEST for i in ids):
            raise self.bad(key, value, f"a {kind} or a list of them")
        return tuple(ids)

    def number(self, key: str, default: float | None = None) -> float:
        value = default if default is not None and not self.has(key) else self.need(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self.bad(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.bad(key, value, "true or false")
        return value

    def bad(self, key: str, value: object, wanted: str) -> UserError:
        return UserError(f"{self.where}: {key!r} is {shorten(value)}, but it must be {wanted}.", "The file is damaged.")

    def unsupported(self, key: str, remedy: str = "Choose a model without it.") -> UserError:
        return UserError(f"{self.where}: {key!r} = {shorten(self.values.get(key))} is not supported.", remedy)


def shorten(value: object) -> str:
    """A value from a file, fit for a one-line message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def unsupported_architecture(found: object, supported: tuple[str, ...]) -> UserError:
    return UserError(
        f"Architecture {shorten(found)} is not supported.", f"Supported architectures: {', '.join(supported)}."
    )


def check_layers(num_layers: int, where: str) -> None:
    if num_layers > 4096:
        raise UserError(f"{where}: {num_layers} layers cannot be right.", "The file is damaged.")


def checked(config: C, where: str) -> C:
    """Relations between sizes that every later line relies on."""
    check_layers(config.num_layers, where)
    if isinstance(config, ModelConfig) and config.num_attention_layers in (0, config.num_layers) and config.delta_net:
        raise UserError(
            f"{where}: {config.num_attention_layers} of {config.num_layers} layers have attention, but a hybrid model "
            "has layers of both kinds.",
            "The file is damaged.",
        )
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise UserError(
            f"{where}: {config.num_heads} heads over {config.num_kv_heads} key/value heads of {config.head_dim} "
            "dimensions do not fit each other.",
            "The file is damaged.",
        )
    return config


def stretched_context(max_position: int, rope: RopeConfig) -> int:
    """YaRN stretches the original context by its factor; files often leave ``max_position_embeddings`` as it was."""
    return max(max_position, int(rope.original_max_position * rope.factor)) if rope.kind == "yarn" else max_position


def yarn_scale(factor: float, scale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

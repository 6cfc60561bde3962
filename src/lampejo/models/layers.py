"""Layers that the architectures share. They have no side effects; attention is handed in by the caller.

Shape legend: T tokens, H hidden, Q query heads, G key/value heads, D head size, V vocabulary; Hv value heads of Dv and
C channels of a Gated DeltaNet.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn

from lampejo import ops
from lampejo.models.config import DrafterConfig, ModelConfig, RopeConfig

# attend(layer, q [T, Q, D], k [T, G, D], v [T, G, D]) -> [T, Q, D]. Serving stores k and v in pages (``cache``),
# training does not.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Rotation = tuple[torch.Tensor, torch.Tensor]  # cos, sin, each [T, D/2]


class View(Protocol):
    """All that a target asks of its caller: attention, and what Gated DeltaNet layers keep of the tokens before.

    ``layer`` counts among the layers of the same kind.
    """

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """As ``Attend``."""

    def recur(
        self, layer: int, mixed: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, conv_weight: torch.Tensor
    ) -> torch.Tensor:
        """mixed [T, C], log_decay and beta [T, Hv], conv_weight [C, K] of ``ops.delta_net`` -> [T, Hv, Dv], fp32."""


class Linear(nn.Module):
    """``weight`` [N, K] and maybe ``bias`` [N], as a checkpoint stores them; left without values until it is loaded."""

    def __init__(self, num_in: int, num_out: int, bias: bool = False) -> None:
        super().__init__()
        self.weight: torch.Tensor = nn.Parameter(torch.empty(num_out, num_in))
        self.bias = nn.Parameter(torch.empty(num_out)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.linear(x, self.weight, self.bias)

    def select(self, rows: torch.Tensor) -> "Linear":
        """The same layer for some of its outputs. rows [n] -> weight [n, K]."""
        part = Linear(self.weight.shape[1], 0, bias=self.bias is not None)
        part.weight = nn.Parameter(self.weight[rows], requires_grad=False)
        if self.bias is not None:
            part.bias = nn.Parameter(self.bias[rows], requires_grad=False)
        return part


class Embedding(nn.Embedding):
    """``weight`` [N, K], left without values until it is loaded."""

    def reset_parameters(self) -> None:
        """PyTorch would draw random values here, and on the meta device import its compiler for that: two seconds."""


class RMSNorm(nn.Module):
    """Multiplies by ``weight``; with ``offset`` by 1 + weight."""

    def __init__(self, size: int, eps: float, offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, self.weight, self.eps, self.offset)


class MLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, intermediate)
        self.up_proj = Linear(hidden, intermediate)
        self.down_proj = Linear(intermediate, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x)))


class Attention(nn.Module):
    """Attention with what the configuration asks for: biases, norms of q and k, an output gate."""

    def __init__(self, config: ModelConfig | DrafterConfig) -> None:
        super().__init__()
        self.head_dim, self.gated = config.head_dim, config.attention_gate
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, q_size * (2 if self.gated else 1), bias=config.qkv_bias)
        self.k_proj = Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = Linear(q_size, config.hidden_size)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, config.norm_offset)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, config.norm_offset)

    def key_value(self, x: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, H] -> k, v [T, G, D]; a drafter's block rows and context go through the same projections."""
        k = self.k_proj(x).view(len(x), -1, self.head_dim)
        if self.k_norm is not None:
            k = self.k_norm(k)
        return ops.rope(k, *rotation), self.v_proj(x).view(len(x), -1, self.head_dim)

    def forward(self, x: torch.Tensor, rotation: Rotation, layer: int, attend: Attend) -> torch.Tensor:
        q, gate = self.q_proj(x), None
        if self.gated:  # each head has its rows of q, then those of its gate
            q, gate = q.view(len(x), -1, 2 * self.head_dim).chunk(2, dim=-1)  # [T, Q, D] each
        q = q.reshape(len(x), -1, self.head_dim)
        if self.q_norm is not None:
            q = self.q_norm(q)
        k, v = self.key_value(x, rotation)
        out = attend(layer, ops.rope(q, *rotation), k, v)
        if gate is not None:
            out = out * ops.sigmoid(gate)
        return self.o_proj(out.reshape(len(x), -1))


class Layer(nn.Module):
    """A pre-norm layer: ``self_attn`` or ``linear_attn`` mixes tokens, ``mlp`` sees each alone."""

    def __init__(
        self,
        config: ModelConfig | DrafterConfig,
        mlp: nn.Module | None = None,
        linear_attn: nn.Module | None = None,
    ) -> None:
        """``mlp`` and ``linear_attn`` take the places of a plain MLP and of attention."""
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_offset)
        self.self_attn = None if linear_attn else Attention(config)
        self.linear_attn = linear_attn
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_offset)
        self.mlp = mlp or MLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: torch.Tensor, rotation: Rotation, layer: int, attend: Attend) -> torch.Tensor:
        mixer = self.linear_attn if self.self_attn is None else self.self_attn
        assert mixer is not None
        x = x + mixer(self.input_layernorm(x), rotation, layer, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Rope:
    """Turns absolute positions into the cos and sin of the rotary embedding, for all kinds of scaling that we read."""

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        """``head_dim``: how many dimensions of a head are rotated."""
        with torch.device("cpu"):  # models are built on the meta device, and these are no weights
            self.frequencies, self.scale = _scaled_frequencies(config, head_dim)  # [D/2], radians per position

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """positions [T] -> cos, sin [T, D/2], fp32."""
        angle = positions.float()[:, None] * self.frequencies.to(positions.device)
        return angle.cos() * self.scale, angle.sin() * self.scale


def _scaled_frequencies(config: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Frequencies [D/2] and the factor on cos and sin.

    llama3: Llama 3.1 model card; yarn: arXiv 2309.00071 section 3.4. Computed in fp32 from exponents in
    fp32, as the models were trained.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    base = 1.0 / (config.theta**exponent)
    if config.kind == "default":
        return base, 1.0
    if config.kind == "linear":
        return base / config.factor, 1.0
    if config.kind == "llama3":
        wavelength = 2 * math.pi / base
        longest, shortest = (
            config.original_max_position / config.low_freq_factor,
            config.original_max_position / config.high_freq_factor,
        )
        smooth = (config.original_max_position / wavelength - config.low_freq_factor) / (
            config.high_freq_factor - config.low_freq_factor
        )
        blended = (1 - smooth) * base / config.factor + smooth * base
        scaled = torch.where(wavelength > longest, base / config.factor, blended)
        return torch.where(wavelength < shortest, base, scaled), 1.0
    assert config.kind == "yarn", config.kind

    def rotations_dim(num_rotations: float) -> float:
        """The dimension that turns ``num_rotations`` times over the original context."""
        turns = config.original_max_position / (num_rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.theta))

    low = max(math.floor(rotations_dim(config.beta_fast)), 0)
    high = min(math.ceil(rotations_dim(config.beta_slow)), head_dim - 1)
    ramp = ((torch.arange(head_dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    kept, stretched = 1 - ramp, 1.0 / (config.factor * config.theta**exponent)
    frequencies = stretched * (1 - kept) + base * kept  # to the last bit: it counts at position 100,000
    scale = config.attention_factor
    if scale is None:
        scale = 0.1 * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0
    return frequencies, scale


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig, layers: Iterable[Layer]) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_offset)


class Target(nn.Module):
    """A target of any architecture: ids in, normed hidden states and taps out; ``logits`` applies the head where they
    are wanted. Parameters are named as in the checkpoint.

    ``recurrence``: what moves the states of its Gated DeltaNet layers, two operations like ``ops.plan_runs`` and
    ``ops.delta_net_runs``.
    """

    recurrence: tuple[Callable[..., Any], Callable[..., torch.Tensor]] = ops.plan_runs, ops.delta_net_runs

    def __init__(self, config: ModelConfig, layers: Iterable[Layer]) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, layers)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.rope = Rope(config.rope, config.rotary_dim or config.head_dim)

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, view: View, tap_layers: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """ids, positions [T] -> hidden after the last norm [T, H], taps [T, len(tap_layers) * H].

        Tap l is the residual stream after layer l, 0-based.
        """
        x = self.embed(ids)  # [T, H]
        rotation = self.rope(positions)
        taps = {}
        for i, (layer, ordinal) in enumerate(zip(self.model.layers, self.config.ordinals, strict=True)):
            x = layer(x, rotation, ordinal, view)
            if i in tap_layers:
                taps[i] = x.clone()  # fused layers change x in place
        joined = torch.cat([taps[i] for i in tap_layers], dim=-1) if tap_layers else x.new_empty(len(ids), 0)
        return self.model.norm(x), joined

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [T] -> [T, H]; the drafter reads the same embedding."""
        return self.model.embed_tokens(ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [T, H] -> [T, V], fp32."""
        return self.lm_head(hidden).float()

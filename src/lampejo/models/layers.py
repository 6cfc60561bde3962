"""Layers that the architectures share. They have no side effects; attention is handed in by the caller.

Shape legend: T tokens, H hidden, Q query heads, G key/value heads, D head size.
"""

import math
from collections.abc import Callable

import torch
from torch import nn

from lampejo import ops
from lampejo.models.config import RopeConfig

# attend(layer, q [T, Q, D], k [T, G, D], v [T, G, D]) -> [T, Q, D]. Serving stores k and v in pages (``cache``),
# training does not.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Rotation = tuple[torch.Tensor, torch.Tensor]  # cos, sin, each [T, D/2]


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


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, self.weight, self.eps)


class MLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, intermediate)
        self.up_proj = Linear(hidden, intermediate)
        self.down_proj = Linear(intermediate, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x)))


class Rope:
    """Turns absolute positions into the cos and sin of the rotary embedding, for all kinds of scaling that we read."""

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
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

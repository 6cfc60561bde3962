"""Qwen3-Next and Qwen3.5: most layers are a Gated DeltaNet (arXiv 2412.06464), the others attention with an output gate
(arXiv 2505.06708) and RoPE over a part of each head; dense and with experts.

A Gated DeltaNet keeps one matrix per head in place of keys and values. Its short convolution and its recurrence are the
caller's (``View.recur``), since they alone know the tokens before.

Shape legend: T tokens, H hidden, Hk key heads of Dk, Hv value heads of Dv, C = 2 * Hk * Dk + Hv * Dv, K tokens that the
convolution sees.
"""

import torch
from torch import nn

from lampejo import ops
from lampejo.models.config import ModelConfig
from lampejo.models.experts import make_mlp
from lampejo.models.layers import Layer, Linear, RMSNorm, Rotation, Target, View


class Convolution(nn.Module):
    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, size))


class DeltaNet(nn.Module):
    """Projections by kind, as Qwen3.5 has them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.delta_net is not None
        self.sizes = sizes = config.delta_net
        self.key_size = sizes.num_key_heads * sizes.key_head_dim
        self.value_size = sizes.num_value_heads * sizes.value_head_dim
        self.make_projections(config.hidden_size)
        self.conv1d = Convolution(2 * self.key_size + self.value_size, sizes.conv_size)
        self.A_log = nn.Parameter(torch.empty(sizes.num_value_heads))
        self.dt_bias = nn.Parameter(torch.empty(sizes.num_value_heads))
        self.norm = RMSNorm(sizes.value_head_dim, config.rms_norm_eps)  # without offset, whatever the others have
        self.out_proj = Linear(self.value_size, config.hidden_size)

    def make_projections(self, hidden: int) -> None:
        self.in_proj_qkv = Linear(hidden, 2 * self.key_size + self.value_size)
        self.in_proj_z = Linear(hidden, self.value_size)
        self.in_proj_b = Linear(hidden, self.sizes.num_value_heads)
        self.in_proj_a = Linear(hidden, self.sizes.num_value_heads)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [T, H] -> q | k | v [T, C], output gate z [T, Hv * Dv], b and a [T, Hv]."""
        return self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)

    def forward(self, x: torch.Tensor, rotation: Rotation, layer: int, view: View) -> torch.Tensor:
        mixed, z, b, a = self.project(x)
        log_decay = -self.A_log.float().exp() * ops.softplus(a.float() + self.dt_bias.float())
        out = view.recur(layer, mixed, log_decay, ops.sigmoid(b.float()), self.conv1d.weight[:, 0])  # [T, Hv, Dv]
        out = ops.swiglu(z.view(out.shape), self.norm(out.to(x.dtype)))
        return self.out_proj(out.flatten(1))


class NextDeltaNet(DeltaNet):
    """Qwen3-Next has two projections, whose rows go key head by key head: its q, its k, then v and z of its value
    heads; and b, then a of its value heads."""

    def make_projections(self, hidden: int) -> None:
        self.in_proj_qkvz = Linear(hidden, 2 * (self.key_size + self.value_size))
        self.in_proj_ba = Linear(hidden, 2 * self.sizes.num_value_heads)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        num_heads, key = self.sizes.num_key_heads, self.sizes.key_head_dim
        value = self.value_size // num_heads
        qkvz = self.in_proj_qkvz(x).view(len(x), num_heads, -1).split([key, key, value, value], dim=-1)
        b, a = self.in_proj_ba(x).view(len(x), num_heads, -1).chunk(2, dim=-1)
        q, k, v, z = (part.flatten(1) for part in qkvz)
        return torch.cat([q, k, v], dim=-1), z, b.flatten(1), a.flatten(1)


class Qwen3_5(Target):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, (make_layer(config, i) for i in range(config.num_layers)))


def make_layer(config: ModelConfig, layer: int) -> Layer:
    assert config.delta_net is not None
    if layer not in config.delta_net.layers:
        return Layer(config, make_mlp(config, layer))
    mixer = NextDeltaNet if config.architecture == "qwen3_next" else DeltaNet
    return Layer(config, make_mlp(config, layer), mixer(config))

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
    """Projections by kind, as Qwen3.5 has them; the reader takes apart the fused ones of Qwen3-Next."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.delta_net is not None
        self.sizes = sizes = config.delta_net
        value_size = sizes.num_value_heads * sizes.value_head_dim
        self.in_proj_qkv = Linear(config.hidden_size, sizes.num_channels)
        self.in_proj_z = Linear(config.hidden_size, value_size)
        self.in_proj_b = Linear(config.hidden_size, sizes.num_value_heads)
        self.in_proj_a = Linear(config.hidden_size, sizes.num_value_heads)
        self.conv1d = Convolution(sizes.num_channels, sizes.conv_size)
        self.A_log = nn.Parameter(torch.empty(sizes.num_value_heads))
        self.dt_bias = nn.Parameter(torch.empty(sizes.num_value_heads))
        self.norm = RMSNorm(sizes.value_head_dim, config.rms_norm_eps)  # without offset, whatever the others have
        self.out_proj = Linear(value_size, config.hidden_size)

    def forward(self, x: torch.Tensor, rotation: Rotation, layer: int, view: View) -> torch.Tensor:
        mixed, z, b, a = self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)
        log_decay = -self.A_log.float().exp() * ops.softplus(a.float() + self.dt_bias.float())
        out = view.recur(layer, mixed, log_decay, ops.sigmoid(b.float()), self.conv1d.weight[:, 0])  # [T, Hv, Dv]
        out = ops.swiglu(z.view(out.shape), self.norm(out.to(x.dtype)))
        return self.out_proj(out.flatten(1))


class Qwen3_5(Target):
    def __init__(self, config: ModelConfig) -> None:
        assert config.delta_net is not None
        recurrent = config.delta_net.layers
        super().__init__(
            config,
            (
                Layer(config, make_mlp(config, i), DeltaNet(config) if i in recurrent else None)
                for i in range(config.num_layers)
            ),
        )

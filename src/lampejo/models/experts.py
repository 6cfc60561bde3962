"""A mixture of experts in place of the MLP (arXiv 2401.06066: many small experts, maybe one that all tokens share).

Shape legend: T tokens, H hidden, E experts, I inner size of an expert.
"""

import torch
from torch import nn

from lampejo import ops
from lampejo.models.config import ExpertsConfig, ModelConfig
from lampejo.models.layers import MLP, Linear


class Experts(nn.Module):
    """The matrices of all experts, stacked."""

    def __init__(self, hidden: int, config: ExpertsConfig) -> None:
        super().__init__()
        shape = config.num_experts, hidden, config.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(shape[0], 2 * shape[2], shape[1]))  # gate rows first
        self.down_proj = nn.Parameter(torch.empty(shape))


class SparseMLP(nn.Module):
    def __init__(self, hidden: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = Linear(hidden, config.num_experts)
        self.experts = Experts(hidden, config)
        self.shared_expert: MLP | None = None
        if config.shared_intermediate_size:
            self.shared_expert = MLP(hidden, config.shared_intermediate_size)
            self.shared_expert_gate = Linear(hidden, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] -> [T, H]."""
        matrices = self.experts.gate_up_proj, self.experts.down_proj
        out = ops.experts(x, self.gate(x), *matrices, self.config.num_active, self.config.normalised)
        if self.shared_expert is None:
            return out
        return out + ops.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)


def make_mlp(config: ModelConfig, layer: int) -> MLP | SparseMLP:
    """What the configuration puts behind the attention of a layer."""
    if config.experts is None or layer in config.experts.dense_layers:
        return MLP(config.hidden_size, config.intermediate_size)
    return SparseMLP(config.hidden_size, config.experts)

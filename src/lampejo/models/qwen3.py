"""Qwen3 (arXiv 2505.09388), dense and with experts: norms over the heads of q and k, no biases."""

from lampejo.models.config import ModelConfig
from lampejo.models.experts import make_mlp
from lampejo.models.layers import Layer, Target


class Qwen3(Target):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, (Layer(config, make_mlp(config, i)) for i in range(config.num_layers)))

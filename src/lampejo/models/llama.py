"""Llama-like decoders (arXiv 2302.13971), Qwen2 with its q/k/v biases (arXiv 2407.10671) included."""

from lampejo.models.config import ModelConfig
from lampejo.models.layers import Layer, Target


class Llama(Target):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, (Layer(config) for _ in range(config.num_layers)))

"""From an architecture's name to its class."""

from lampejo.models.config import ModelConfig
from lampejo.models.layers import Target
from lampejo.models.llama import Llama
from lampejo.models.qwen3 import Qwen3
from lampejo.models.qwen3_5 import Qwen3_5

_CLASSES: dict[str, type[Llama] | type[Qwen3] | type[Qwen3_5]] = {
    "llama": Llama,
    "qwen2": Llama,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3,
    "qwen3_next": Qwen3_5,
    "qwen3_5": Qwen3_5,
    "qwen3_5_moe": Qwen3_5,
}


def make_target(config: ModelConfig) -> Target:
    """A target without values in its parameters."""
    return _CLASSES[config.architecture](config)

"""``lampejo inspect``: what a model is, without loading its weights."""

import json

from lampejo.config import EngineConfig
from lampejo.loader import choose_ops, kv_dtype_of
from lampejo.ops.place import choose_place
from lampejo.terminal import table
from lampejo.weights.checkpoint import open_checkpoint
from lampejo.weights.describe import describe, facts


def inspect(model: str, as_json: bool) -> int:
    """Prints a table, or one JSON object. Returns the exit code."""
    with open_checkpoint(model) as checkpoint:
        config = EngineConfig()
        place = choose_place(config.device, config.dtype)
        kv_dtype = kv_dtype_of(choose_ops(config, checkpoint.config, place)[0], place)
        if as_json:
            print(json.dumps(facts(checkpoint, kv_dtype), ensure_ascii=False))
        else:
            print(table(describe(checkpoint, kv_dtype)))
    return 0

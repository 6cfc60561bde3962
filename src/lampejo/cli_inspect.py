"""``lampejo inspect``: what a model is, without loading its weights."""

import json

from lampejo.terminal import table
from lampejo.weights.checkpoint import open_checkpoint
from lampejo.weights.describe import describe, facts


def inspect(model: str, as_json: bool) -> int:
    """Prints a table, or one JSON object. Returns the exit code."""
    with open_checkpoint(model) as checkpoint:
        print(json.dumps(facts(checkpoint), ensure_ascii=False) if as_json else table(describe(checkpoint)))
    return 0

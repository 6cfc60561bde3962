"""Scripts that stand on the engine's inside keep running; what they measure is read by people."""

import importlib.util
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent.parent / "scripts"


def load_script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_overhead_of_every_case_can_be_measured():
    """Fault: a stand-in for the model that lacks what the engine has come to ask of one."""
    overhead = load_script("overhead")
    tokenizer = overhead.tokenizer_of(overhead.SMALL)
    for sampling, width, drafters in overhead.CASES.values():
        seconds, num_tokens = overhead.measure(overhead.SMALL, 2, sampling, width, drafters, tokenizer, num_steps=3)
        assert seconds > 0 and num_tokens >= 2

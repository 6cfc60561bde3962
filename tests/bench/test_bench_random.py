"""``scripts/bench_random.py``: a benchmark on random weights of published shapes; here of the same, but small."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lampejo.bench.measure import SUITES
from lampejo.loader import load_target
from lampejo.plan import published
from tiny_bench import TINY_SUITE

SMALL = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "max_position_embeddings": 4096, "vocab_size": 2000, "intermediate_size": 96, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 4,
}  # fmt: skip
NAMES = ("Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-35B-A3B")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "bench_random.py"
    spec = importlib.util.spec_from_file_location("bench_random", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The published configurations with small numbers, what is written in them stays; and a short suite."""
    monkeypatch.setitem(SUITES, "quick", TINY_SUITE)
    for name in NAMES:
        known = published.TARGETS[name]
        text = known.config["text_config"]
        text = {key: SMALL.get(key, value) for key, value in text.items()} | {"layer_types": text["layer_types"][:4]}
        monkeypatch.setitem(published.TARGETS, name, replace(known, config={**known.config, "text_config": text}))
        drafter = published.DRAFTERS[f"{name[5:]}-DFlash"]
        tiny = replace(drafter, layers=2, windows=(None,) * 2, mlp=48, heads=4, kv_heads=2, head_dim=16, taps=2)
        monkeypatch.setitem(published.DRAFTERS, f"{name[5:]}-DFlash", tiny)


def run(script: ModuleType, capsys: pytest.CaptureFixture[str], *flags: str) -> Any:
    code = script.main([*flags, "--context", "1024", "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out.splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_a_shape_is_measured_without_weights(name, script, small, capsys):
    """All arms, a given acceptance, the costs of verifying; and the weights are called random."""
    flags = "--device cpu --dtype fp32 --sections categories,verify --categories chat --max-tokens 16 --width 4"
    found = run(script, capsys, name, *flags.split(), "--synthetic-acceptance", "0.7")
    assert found["failed"] == 0 and list(found["arms"]) == ["plain", "dflash", "synthetic"]
    assert found["model"]["model"] == f"{name} (random weights)" and found["model"]["quantization"] == "random"
    assert found["model"]["drafter"].endswith("-DFlash (random weights)")
    accepted = found["arms"]["synthetic"]["acceptance_per_slot"]
    assert len(accepted) == 4 and 0.4 < accepted[0] < 1 and accepted != found["arms"]["dflash"]["acceptance_per_slot"]
    assert len(found["verify_cost"]) == 17


def test_weights_are_small_beside_the_embedding_and_different_everywhere(script, small, tmp_path):
    """Fault: layers without effect, which a kernel may find cheap, or choices that a rounding turns."""
    checkpoint = script.RandomCheckpoint(NAMES[1], tmp_path)
    target = load_target(checkpoint)
    weights = dict(target.named_parameters())
    assert all(p.std() > 0 for name, p in weights.items() if "norm" not in name)
    assert torch.equal(weights["lm_head.weight"][1:], weights["model.embed_tokens.weight"][:-1])
    others = [p for name, p in weights.items() if "norm" not in name and name != "lm_head.weight"]
    assert len({p.double().sum().item() for p in others}) == len(others)
    expert = "model.layers.0.mlp.experts.3"
    assert checkpoint.read(f"{expert}.gate_proj.weight").shape == (32, 64)
    assert checkpoint.stored(f"{expert}.down_proj.weight").shape == (64, 32)


@pytest.mark.parametrize("flags", [[], ["--json"], ["Qwen/Qwen9-1T"]])
def test_what_is_not_known_is_refused(flags, script, capsys):
    assert script.main(flags) == 2
    assert "Qwen/Qwen3.5-4B" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_shape_is_measured_on_a_gpu(name, script, small, capsys):
    """From flags to figures, in bf16; no answer parts from plain's but at a near-tie."""
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU here")
    flags = "--device cuda --sections categories,verify --categories chat --max-tokens 16 --width 4"
    found = run(script, capsys, name, *flags.split(), "--synthetic-acceptance", "0.7")
    assert found["failed"] == 0 and (found["model"]["device"], found["model"]["ops"]) == ("cuda:0", "device")

"""The layouts of the releases: experts one by one or stacked, fp8 or not, and what the text leaves alone."""

import math
import re
from pathlib import Path

import pytest
import torch
from gguf_models import make_model
from hypothesis import given, settings
from hypothesis import strategies as st
from makefiles import write_folder
from release_files import fp8_config, one_by_one, parts_of, stacked, to_fp8

from lampejo.errors import UserError
from lampejo.loader import load_target
from lampejo.models.config import DeltaNetConfig, ExpertsConfig, ModelConfig, RopeConfig
from lampejo.ops.cpu import instruction_set
from lampejo.ops.cpu.fused import PackedMatrix
from lampejo.weights.checkpoint import open_checkpoint
from lampejo.weights.describe import describe, facts
from lampejo.weights.layout import Layout
from oracle import forward

IDS = [3, 17, 41, 5, 5, 88, 60, 2, 9, 33, 71, 28]
GATE_UP, DOWN = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"


def logits_of(folder: Path) -> torch.Tensor:
    with open_checkpoint(folder) as checkpoint:
        return forward(load_target(checkpoint), IDS)[0]


@torch.inference_mode()
def expected(model) -> torch.Tensor:
    return model(torch.tensor([IDS])).logits[0]


@pytest.fixture(scope="module")
def moe():
    return make_model("qwen3moe")


@pytest.mark.parametrize("arch", ["qwen3moe", "qwen3next", "qwen35moe"])
@pytest.mark.parametrize("layout", ["stacked", "one by one", "fp8 stacked", "fp8 one by one"])
def test_every_layout_of_experts_gives_the_same_logits(tmp_path, arch, layout):
    """Faults: gate and up exchanged, experts in the order of their names (1, 10, 11, 2), scales of another block."""
    model = make_model(arch)
    tensors, config = parts_of(model)
    if "one by one" in layout:
        tensors = one_by_one(tensors)
    if "fp8" in layout:
        tensors, meant = to_fp8(tensors)
        config = fp8_config(config)
        model.load_state_dict(stacked(meant, model.state_dict()))
    folder = write_folder(tmp_path / "m", tensors, config, shards=3)
    torch.testing.assert_close(logits_of(folder), expected(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["stacked", "one by one", "fp8 stacked", "fp8 one by one"])
def test_single_experts_have_one_name_and_only_their_rows_are_read(tmp_path, moe, layout, monkeypatch):
    """Fault: 256 experts in memory to pack one of them."""
    tensors, config = parts_of(moe)
    tensors = one_by_one(tensors) if "one by one" in layout else tensors
    meant = tensors
    if "fp8" in layout:
        (tensors, meant), config = to_fp8(tensors), fp8_config(config)
    whole = stacked(meant, moe.state_dict())
    with open_checkpoint(write_folder(tmp_path / "m", tensors, config)) as checkpoint:
        assert torch.equal(checkpoint.read(GATE_UP), whole[GATE_UP]) and torch.equal(checkpoint.read(DOWN), whole[DOWN])
        num_read = []
        read_rows = checkpoint._source.read_rows
        monkeypatch.setattr(checkpoint._source, "read_rows", lambda *a: num_read.append(a[2] - a[1]) or read_rows(*a))
        for e in (0, 3, 7):
            gate, up = whole[GATE_UP][e].chunk(2)
            for part, values in (("gate", gate), ("up", up), ("down", whole[DOWN][e])):
                name = f"model.layers.1.mlp.experts.{e}.{part}_proj.weight"
                num_read.clear()
                assert torch.equal(checkpoint.read(name), values)
                assert max(num_read) <= len(values)
                assert checkpoint.info(name)[0] == tuple(values.shape)
                if instruction_set() is not None:
                    packed = PackedMatrix(checkpoint.stored(name)).rows(torch.arange(len(values)))
                    step = values.abs().amax() / 127
                    assert ((packed - values).abs() <= 0.51 * step).all()


def test_an_expert_too_many_too_few_or_of_another_size_is_refused_by_name(tmp_path, moe):
    """C2: never half a mixture."""
    tensors, config = parts_of(moe)
    single = one_by_one(tensors)
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    without = {n: x for n, x in single.items() if n != name}
    cases = [
        (without, r"lacks tensors: .*experts.5.up_proj"),
        (single | {name.replace(".5.", ".8."): single[name].clone()}, r"has unknown tensors: .*experts.8.up_proj"),
        (single | {name: torch.zeros(31, 64)}, r"experts.5.up_proj.weight' has shape \[31, 64\].*\[32, 64\]"),
        (tensors | {GATE_UP: tensors[GATE_UP][:7]}, r"has shape \[7, 64, 64\].*\[8, 64, 64\]"),
        (tensors | {DOWN: tensors[DOWN].transpose(1, 2).contiguous()}, r"has shape \[8, 32, 64\].*\[8, 64, 32\]"),
        (single | {DOWN: tensors[DOWN]}, r"has unknown tensors: .*experts.*down_proj"),
        ({n: x for n, x in single.items() if "layers.1.mlp.experts" not in n}, r"lacks tensors: .*gate_up_proj"),
    ]
    for i, (changed, message) in enumerate(cases):
        with (
            pytest.raises(UserError, match=message),
            open_checkpoint(write_folder(tmp_path / str(i), changed, config)) as c,
        ):
            load_target(c)


def test_a_fused_projection_of_another_size_is_refused(tmp_path):
    """C2: its rows would be dealt out wrongly."""
    tensors, config = parts_of(make_model("qwen3next"))
    name = "model.layers.0.linear_attn.in_proj_ba.weight"
    folder = write_folder(tmp_path / "m", tensors | {name: tensors[name][:-1].contiguous()}, config)
    with pytest.raises(UserError, match=r"in_proj_ba.weight' has shape \[11, 64\].*\[12, 64\]"):
        open_checkpoint(folder)


def with_other_parts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As Qwen3.5's releases: the text under ``model.language_model``, vision and MTP beside it."""
    out = {re.sub("^model", "model.language_model", name): x for name, x in tensors.items()}
    vision = {f"model.visual.blocks.{i}.attn.qkv.weight": torch.randn(6, 2) for i in range(3)}
    mtp = {"mtp.fc.weight": torch.randn(4, 8), "mtp.layers.0.mlp.experts.gate_up_proj": torch.randn(8, 64, 64)}
    return out | vision | mtp


def test_vision_and_mtp_are_left_alone_and_reported(tmp_path):
    """Faults: a release refused for what the text does not need; or taken silently; or read."""
    model = make_model("qwen35")
    tensors, config = parts_of(model)
    config = {"model_type": "qwen3_5", "text_config": config, "vision_config": {"depth": 3}}
    folder = write_folder(tmp_path / "m", with_other_parts(tensors), config, shards=2)
    torch.testing.assert_close(logits_of(folder), expected(model), rtol=1e-4, atol=1e-4)
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.skipped == facts(checkpoint, torch.float32)["skipped"] == {"MTP": 2, "vision": 3}
        assert dict(describe(checkpoint, torch.float32))["skipped"] == "MTP (2 tensors), vision (3 tensors)"
        assert checkpoint.quantization == "float32" and not any("visual" in name for name in checkpoint.tensor_names())
        assert facts(checkpoint, torch.float32)["num_parameters"] == sum(x.numel() for x in tensors.values())
    with open_checkpoint(write_folder(tmp_path / "text", tensors, config)) as checkpoint:
        assert checkpoint.skipped == {} and "skipped" not in dict(describe(checkpoint, torch.float32))


def test_a_tensor_under_both_names_is_refused(tmp_path):
    """C7: which of the two is meant?"""
    tensors, config = parts_of(make_model("qwen35"))
    twice = tensors | {"model.language_model.norm.weight": tensors["model.norm.weight"].clone()}
    with pytest.raises(UserError, match=r"'model.norm.weight' twice"):
        open_checkpoint(write_folder(tmp_path / "m", twice, config))


MOE = ModelConfig(
    "qwen3_next", 96, 64, 96, 2, 6, 2, 32, 1e-6, RopeConfig(1e4), 128, False,
    experts=ExpertsConfig(2, 1, 32), delta_net=DeltaNetConfig((0,), 2, 6, 16, 16, 4),
)  # fmt: skip
PARTS = ("gate", "up", "down", "gate_up")
EXPERT_NAMES = [f"model.layers.0.mlp.experts.{e}{part}_proj.weight" for e in ("0.", "1.", "2.", "") for part in PARTS]
NAMES = [*EXPERT_NAMES, "mtp.x", "x", *(f"model.layers.0.linear_attn.in_proj_{part}.weight" for part in ("qkvz", "ba"))]
SIZES = [(32, 64), (64, 32), (2, 32, 64), (2, 64, 64), (2, 64, 32), (12, 64), (256, 64), (), (0,), (5,)]


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), st.sampled_from(SIZES), max_size=14))
def test_whatever_tensors_there_are_each_has_its_rows_or_is_refused(shapes):
    """C7: nothing but a UserError may come out, and no rows beyond a tensor's end."""
    try:
        layout = Layout("m", {name: name for name in shapes}, shapes, MOE)
    except UserError:
        return
    for name, shape in layout.shapes.items():
        runs = layout.find(name).runs
        assert layout.find(name).shape == shape and sum(r.stop - r.start for r in runs) == math.prod(shape[:-1])
        assert all(0 <= r.start <= r.stop <= math.prod(shapes[r.tensor][:-1]) for r in runs)

"""Checkpoints in 8-bit floats with a scale per block, and those that are something else."""

import json
from pathlib import Path

import pytest
import torch
from gguf_models import make_model
from makefiles import write_folder
from release_files import fp8_config, one_by_one, parts_of, to_fp8
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from lampejo.errors import UserError
from lampejo.weights.checkpoint import check_tensors, open_checkpoint

FP8_NAME = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def fp8_folder(tmp_path_factory) -> Path:
    tensors, config = parts_of(make_model("qwen3"))
    return write_folder(tmp_path_factory.mktemp("fp8") / "m", to_fp8(tensors)[0], fp8_config(config))


def changed(folder: Path, to: Path, quantization: object = None, **tensors: torch.Tensor | None) -> Path:
    """A copy with other tensors (None: without it; ``weight`` and ``scale`` for those of FP8_NAME) or method."""
    found = load_file(folder / "model.safetensors")
    for key, value in tensors.items():
        name = FP8_NAME if key == "weight" else FP8_NAME + "_scale_inv"
        found.pop(name)
        if value is not None:
            found[name] = value
    config = json.loads((folder / "config.json").read_text())
    if quantization is not None:
        config["quantization_config"] = quantization
    return write_folder(to, found, config)


def test_an_fp8_release_says_so(fp8_folder):
    """Fault: inspect shows scales as parameters."""
    with open_checkpoint(fp8_folder) as checkpoint:
        assert checkpoint.quantization == "float8_e4m3 (28 tensors), float32 (19)"
        assert checkpoint.info(FP8_NAME) == ((192, 64), "F8_E4M3")
        assert not any("scale" in name for name in checkpoint.tensor_names())
        check_tensors(checkpoint, {name: checkpoint.info(name)[0] for name in checkpoint.tensor_names()})


@pytest.mark.parametrize("arch", ["qwen3", "qwen35moe"])
def test_values_equal_those_of_transformers(tmp_path, arch):
    """Fault: a product rounded to bfloat16 on its way. transformers knows whole blocks only."""
    tensors, config = parts_of(make_model(arch))
    block = (16, 32)
    stored = to_fp8(one_by_one(tensors), block)[0]
    folder = write_folder(tmp_path / "m", stored, fp8_config(config, block))
    dequantised = FineGrainedFP8Config(dequantize=True, weight_block_size=block)
    theirs = AutoModelForCausalLM.from_pretrained(folder, quantization_config=dequantised, dtype=torch.float32)
    with open_checkpoint(folder) as checkpoint:
        for name, values in theirs.state_dict().items():
            assert torch.equal(checkpoint.read(name), values), name


SCALES = torch.ones(12, 3)
METHODS = {
    "another method": ({"quant_method": "gptq", "bits": 4}, {}, "method 'gptq' is not supported"),
    "no method": ({"weight_block_size": [16, 24]}, {}, "method None is not supported"),
    "another format": ({"quant_method": "fp8", "fmt": "e5m2"}, {}, "method 'fp8 e5m2' is not supported"),
    "a scale per tensor": ({"quant_method": "fp8"}, {}, "weight_block_size None is not supported"),
    "block of nothing": ({"quant_method": "fp8", "weight_block_size": [0, 128]}, {}, r"weight_block_size \[0, 128\]"),
    "block of texts": ({"quant_method": "fp8", "weight_block_size": ["1", "2"]}, {}, "weight_block_size"),
    "three sizes": ({"quant_method": "fp8", "weight_block_size": [1, 2, 3]}, {}, "weight_block_size"),
    "a text": ("fp8", {}, "'quantization_config' is 'fp8', but it must be an object"),
    "other blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, {}, "_scale_inv' has shape .* but"),
    "no scales": (None, {"scale": None}, f"the fp8 tensor '{FP8_NAME}' has no '{FP8_NAME}_scale_inv'"),
    "no weight": (None, {"weight": None}, f"'{FP8_NAME}_scale_inv' is the scale of no fp8 tensor"),
    "scales of plain floats": (None, {"weight": torch.zeros(192, 64)}, "is the scale of no fp8 tensor"),
    "a row of scales short": (None, {"scale": SCALES[:-1].clone()}, r"has shape \[11, 3\] and .* \[12, 3\]"),
    "scales transposed": (None, {"scale": SCALES.T.contiguous()}, r"has shape \[3, 12\]"),
    "whole scales": (None, {"scale": SCALES.int()}, "type I32, but must be floats"),
    "a vector": (None, {"weight": torch.zeros(64).to(torch.float8_e4m3fn)}, r"but must be floats of shape \[0, 0\]"),
    "another 8-bit float": (None, {"weight": torch.zeros(192, 64).to(torch.float8_e5m2)}, "is the scale of no fp8"),
}  # fmt: skip


@pytest.mark.parametrize("case", METHODS)
def test_other_methods_and_scales_that_do_not_fit_are_refused(tmp_path, fp8_folder, case):
    """C2: weights off by a scale are fluent nonsense."""
    quantization, tensors, message = METHODS[case]
    with pytest.raises(UserError, match=message) as caught:
        open_checkpoint(changed(fp8_folder, tmp_path / "m", quantization, **tensors))
    assert caught.value.remedy


def test_fp8_weights_without_a_word_about_it_are_refused(tmp_path, fp8_folder):
    """C2: config.json of the bfloat16 release beside fp8 files."""
    config = json.loads((fp8_folder / "config.json").read_text())
    del config["quantization_config"]
    folder = write_folder(tmp_path / "m", load_file(fp8_folder / "model.safetensors"), config)
    with pytest.raises(UserError, match="has type F8_E4M3, which is not supported"):
        open_checkpoint(folder)

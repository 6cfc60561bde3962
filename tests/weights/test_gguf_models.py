"""GGUF files of every Qwen3.x architecture against `transformers`, and what is refused."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFValueType as Value
from gguf_models import MODELS, SIZES, make_model, write_model

from kernel_checks import assert_equal_up_to_codes, see_as_kernels, through_pages
from lampejo.config import EngineConfig
from lampejo.errors import UserError
from lampejo.loader import load_model, load_target
from lampejo.ops.cpu import instruction_set
from lampejo.ops.cpu.fused import PackedMatrix
from lampejo.terminal import start_lines
from lampejo.weights.checkpoint import open_checkpoint
from oracle import forward

IDS = [3, 17, 41, 5, 5, 88, 60, 2, 9, 33, 71, 28]


def logits_of(path) -> torch.Tensor:
    with open_checkpoint(path) as checkpoint:
        return forward(load_target(checkpoint), IDS)[0]


@torch.inference_mode()
def expected(model) -> torch.Tensor:
    return model(torch.tensor([IDS])).logits[0]


@pytest.mark.parametrize("arch", MODELS)
def test_logits_equal_those_of_the_model_that_was_converted(tmp_path, arch):
    """Faults: norms, decays, heads or projections left as the converter changed them; RoPE over the whole head."""
    model = make_model(arch)
    path = write_model(tmp_path / "m.gguf", arch, model)
    torch.testing.assert_close(logits_of(path), expected(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arch", ["qwen3next", "qwen35moe"])
def test_files_of_other_converters_give_the_same_logits(tmp_path, arch):
    """Faults: gate and up of experts exchanged where they are one tensor; the rows of ``ssm_in`` dealt out wrongly."""
    model = make_model(arch)
    path = write_model(tmp_path / "m.gguf", arch, model, fused=True)
    torch.testing.assert_close(logits_of(path), expected(model), rtol=1e-4, atol=1e-4)


def test_a_tied_head_is_the_embedding(tmp_path):
    """Fault: a head of zeros."""
    model = make_model("qwen3", tie_word_embeddings=True)
    path = write_model(tmp_path / "m.gguf", "qwen3", model, remove="output.weight")
    torch.testing.assert_close(logits_of(path), expected(model), rtol=1e-4, atol=1e-4)


MIXED = {"gate_exps": "Q4_1", "up_exps": "Q8_0", "down_exps": "Q5_0", "attn_qkv": "Q8_0", "attn_gate": "Q4_0",
         "ssm_out": "Q4_1", "ssm_ba": "Q8_0", "ssm_alpha": "F16", "ssm_beta": "BF16", "attn_q.": "Q4_0",
         "ffn_down": "Q5_1", "token_embd": "Q8_0"}  # fmt: skip


@pytest.mark.parametrize("arch", MODELS)
def test_quantised_tensors_are_read_as_they_mean(tmp_path, arch):
    """Fault: experts' gate and up of different types in one of our matrices; rows of the wrong length."""
    model = make_model(arch)
    rounded = make_model(arch)
    path = write_model(tmp_path / "m.gguf", arch, model, MIXED)
    plain = write_model(tmp_path / "plain.gguf", arch, rounded)
    with open_checkpoint(path) as quantised, open_checkpoint(plain) as floats:
        assert quantised.tensor_names() == floats.tensor_names()
        for name in floats.tensor_names():
            values, meant = floats.read(name), quantised.read(name)
            assert values.shape == meant.shape == quantised.info(name)[0]
            kinds = quantised.info(name)[1].split("+")
            if kinds == ["F32"]:
                assert torch.equal(values, meant)
            elif len(kinds) == 1 and kinds[0].startswith("Q"):
                number = gguf.GGMLQuantizationType[kinds[0]]
                blocks = gguf.quantize(values.numpy(), number)
                np.testing.assert_array_equal(meant.numpy(), gguf.dequantize(blocks, number))
            else:
                assert (values - meant).abs().max() < 0.1 * values.abs().max()
        if "moe" in arch:
            assert quantised.info("model.layers.0.mlp.experts.gate_up_proj")[1] == "Q4_1+Q8_0"


@pytest.mark.skipif(instruction_set() is None, reason="the CPU kernels were not built")
def test_matrices_go_to_the_kernels_with_the_codes_of_the_file(tmp_path):
    """Fault: experts or taken-apart projections rounded once more on their way."""
    types = {"exps": "Q4_1", "ssm_in": "Q4_0", "ssm_ba": "Q8_0"}
    path = write_model(tmp_path / "m.gguf", "qwen3next", make_model("qwen3next"), types, fused=True)
    with open_checkpoint(path) as checkpoint:
        names = [f"mlp.experts.{e}.{part}_proj.weight" for e in (0, 5) for part in ("gate", "up", "down")]
        for name in [*names, *(f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))]:
            stored, values = checkpoint.stored(f"model.layers.0.{name}"), checkpoint.read(f"model.layers.0.{name}")
            assert torch.equal(PackedMatrix(stored).rows(torch.arange(len(values))), values)


@pytest.mark.parametrize("arch", ["qwen35", "qwen35moe"])
def test_layers_of_multi_token_prediction_are_left_alone_and_reported(tmp_path, arch):
    """Fault: a layer more than the model has; or a tensor dropped without a word."""
    model = make_model(arch)
    extra = {f"blk.4.{name}.weight": torch.ones(64) for name in ("nextn.enorm", "nextn.hnorm", "attn_norm")}
    path = write_model(tmp_path / "m.gguf", arch, model, extra=extra, block_count=(5, Value.UINT32),
                       nextn_predict_layers=(1, Value.UINT32))  # fmt: skip
    torch.testing.assert_close(logits_of(path), expected(model), rtol=1e-4, atol=1e-4)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config.num_layers == 4 and checkpoint.skipped == {"MTP": 3}
    loaded, _ = load_model(str(path), "none", EngineConfig(ops="reference", max_context=32), None, None)
    assert "lampejo: skipped: MTP (3 tensors)" in start_lines(loaded.info)
    path = write_model(tmp_path / "n.gguf", arch, model, extra=extra)
    with pytest.raises(UserError, match=r"unknown tensors: .*blk\.4"), open_checkpoint(path) as checkpoint:
        load_target(checkpoint)


@pytest.mark.skipif(instruction_set() is None, reason="the CPU kernels were not built")
@pytest.mark.parametrize("arch", MODELS)
def test_files_run_on_the_kernels(tmp_path, arch):
    """Fault: an expert in another's place, value heads in the order of another format, norms with the offset twice."""
    types = {"exps": "Q8_0", "attn_k": "Q8_0", "ffn_up": "Q8_0"}
    path = write_model(tmp_path / "m.gguf", arch, make_model(arch), types)
    loaded, _ = load_model(str(path), "none", EngineConfig(max_context=64), None, None)
    assert loaded.info["ops"] == f"cpu ({instruction_set()})" and loaded.info["ops_reason"] is None
    with open_checkpoint(path) as checkpoint:
        expected = through_pages(see_as_kernels(load_target(checkpoint)), IDS, len(IDS))
    assert_equal_up_to_codes(through_pages(loaded.runner.target, IDS, len(IDS)), expected)


U32, F32, STRING = Value.UINT32, Value.FLOAT32, Value.STRING
WRONG = {
    "no rotated part": ("qwen35", {"rope__dimension_count": None}, "lacks the key 'rope.dimension_count'"),
    "more than a head rotated": ("qwen35", {"rope__dimension_count": (34, U32)}, "an even number of at most 32"),
    "an odd part rotated": ("qwen35", {"rope__dimension_count": (7, U32)}, "an even number of at most 32"),
    "a part rotated where none may be": ("qwen3", {"rope__dimension_count": (8, U32)}, "rotated in full"),
    "sections of something else": ("qwen35moe", {"rope__dimension_count": (16, U32)}, "sections.*add up to 8"),
    "another router": ("qwen3moe", {"expert_gating_func": (2, U32)}, "expert_gating_func"),
    "scaled experts": ("qwen3moe", {"expert_weights_scale": (2.5, F32)}, "expert_weights_scale"),
    "no experts": ("qwen3moe", {"expert_count": None}, "lacks the key 'expert_count'"),
    "more active than there are": ("qwen3moe", {"expert_used_count": (9, U32)}, "expert_used_count.*at most 8"),
    "experts in a dense model": ("qwen3", {"expert_count": (8, U32)}, "qwen3 with experts"),
    "no state": ("qwen3next", {"ssm__state_size": None}, "lacks the key 'ssm.state_size'"),
    "heads that do not divide": ("qwen35", {"ssm__time_step_rank": (5, U32)}, "a multiple of ssm.group_count"),
    "no convolution": ("qwen35", {"ssm__conv_kernel": (1, U32)}, "at least 2"),
    "layers by list": ("qwen35", {"attention__recurrent_layers": ("x", STRING)}, "recurrent_layers"),
    "nothing but MTP": ("qwen35", {"nextn_predict_layers": (4, U32)}, "less than block_count"),
    "values of another size": ("qwen3", {"attention__value_length": (16, U32)}, "attention.value_length"),
    "sizes a text": ("qwen35", {"ssm__inner_size": ("96", STRING)}, "ssm.inner_size.*whole number"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_metadata_that_cannot_be_are_refused_by_name(tmp_path, case):
    """C2, C7: before any tensor is read."""
    arch, metadata, message = WRONG[case]
    path = write_model(tmp_path / "m.gguf", arch, make_model(arch), **metadata)
    with pytest.raises(UserError, match=message) as caught:
        open_checkpoint(path)
    assert caught.value.remedy


TENSORS = {
    "experts incomplete": ("qwen3moe", "blk.2.ffn_up_exps.weight", {}, r"lacks tensors: .*experts.*up_proj"),
    "experts of another size": ("qwen3moe", None, {"blk.0.ffn_up_exps.weight": torch.zeros(8, 31, 64)},
                                r"ffn_up_exps.weight' has shape \[8, 31, 64\].*\[8, 32, 64\]"),
    "a bias that we do not know": ("qwen3", None, {"blk.0.attn_q.bias": torch.zeros(192)}, "unknown.*q_proj.bias"),
    "attention's projections in one": ("qwen3", None, {"blk.0.attn_qkv.weight": torch.zeros(320, 64)},
                                       "unknown.*in_proj_qkv"),
    "decays that grow": ("qwen35", None, {"blk.0.ssm_a": torch.ones(6)}, "decays of .*A_log' are not negative"),
    "no decays": ("qwen35", "blk.0.ssm_a", {}, "lacks tensors: .*A_log"),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path, case):
    """C2: never half a model."""
    arch, remove, extra, message = TENSORS[case]
    path = write_model(tmp_path / "m.gguf", arch, make_model(arch), remove=remove, extra=extra)
    with pytest.raises(UserError, match=message), open_checkpoint(path) as checkpoint:
        load_target(checkpoint)


def test_one_part_of_a_file_in_parts_says_so(tmp_path):
    """Fault: "lacks tensors" for a file that is sound, but one of several."""
    writer = gguf.GGUFWriter(tmp_path / "m-00001-of-00003.gguf", "qwen3")
    writer.add_uint16("split.count", 3)
    writer.add_tensor("token_embd.weight", np.zeros((SIZES["vocab_size"], 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match="one of 3 parts") as caught:
        open_checkpoint(tmp_path / "m-00001-of-00003.gguf")
    assert "llama-gguf-split --merge" in caught.value.remedy


def test_qwen35_files_have_the_tokens_of_qwen(tmp_path):
    """Fault: an answer that goes on past <|endoftext|>, of which GGUF keeps one of two."""
    path = write_model(tmp_path / "m.gguf", "qwen35", make_model("qwen35"))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.eos_ids == (95,)
        assert checkpoint.config.delta_net.tiled and checkpoint.config.rotary_dim == 8
        assert not checkpoint.config.norm_offset and checkpoint.config.attention_gate

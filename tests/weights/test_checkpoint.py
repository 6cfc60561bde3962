"""Checkpoints as the model loader sees them; strictness; and what a failed load leaves behind."""

import gc
import json
import sys
from pathlib import Path

import pytest
import torch
from gguf import GGUFValueType
from makefiles import HF_CONFIG, random_tensors, target_shapes, write_folder, write_gguf, write_target
from safetensors.torch import save_file

from lampejo.errors import UserError
from lampejo.models.gguf_config import hf_name
from lampejo.weights.aliases import ALIASES
from lampejo.weights.checkpoint import check_tensors, open_checkpoint
from lampejo.weights.describe import describe
from lampejo.weights.tensors import rotate_half_order


def test_smollm2_is_described_for_people():
    """Fault: inspect hides what one needs to know."""
    with open_checkpoint("smollm2") as checkpoint:
        lines = dict(describe(checkpoint, torch.float16))
    assert lines["name"] == "SmolLM2-135M-Instruct"
    assert lines["parameters"] == "134,515,008"
    assert lines["quantization"] == "Q4_1 (210 tensors), F32 (61), Q8_0 (1)"
    assert lines["context"] == "8192" and lines["end tokens"] == "2"
    assert lines["chat template"].startswith("yes: {% for message in messages %}")
    assert lines["matching drafters"].startswith("smollm2-135m-dflash-proto")


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_gives_its_tensors_configuration_and_defaults(tmp_path, shards):
    """P4: generation_config.json holds defaults and further end tokens."""
    tensors = random_tensors(target_shapes())
    folder = write_folder(tmp_path / "tiny-model", tensors, HF_CONFIG, shards)
    generation = {"eos_token_id": [3, 2], "do_sample": True, "temperature": 0.7, "top_k": 20, "max_length": 99}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    with open_checkpoint(str(folder)) as checkpoint:
        assert (checkpoint.name, checkpoint.format, checkpoint.folder) == ("tiny-model", "safetensors", folder)
        assert checkpoint.quantization == "bfloat16" and checkpoint.metadata == {}
        assert checkpoint.eos_ids == (2, 3)
        assert checkpoint.generation_defaults == {"temperature": 0.7, "top_k": 20}
        assert checkpoint.info("model.norm.weight") == ((32,), "BF16")
        check_tensors(checkpoint, target_shapes())
        for name, tensor in tensors.items():
            assert torch.equal(checkpoint.read(name), tensor.float())
            assert torch.equal(checkpoint.read(name, torch.bfloat16), tensor)
        assert dict(describe(checkpoint, torch.float16))["chat template"] == "no"


def test_a_model_that_is_not_meant_to_be_sampled_has_no_sampling_defaults(tmp_path):
    """P4: do_sample false beside a temperature, as old files have it."""
    folder = write_target(tmp_path / "m")
    (folder / "generation_config.json").write_text(
        '{"do_sample": false, "temperature": 0.7, "repetition_penalty": 1.1}'
    )
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.generation_defaults == {"repetition_penalty": 1.1}


TEMPLATES = {
    "text": ({"tokenizer_config.json": json.dumps({"chat_template": "A"})}, "A"),
    "named": (
        {"tokenizer_config.json": json.dumps({"chat_template": [
            {"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]})},
        "D",
    ),
    "file wins": ({"tokenizer_config.json": '{"chat_template": "A"}', "chat_template.jinja": "J"}, "J"),
    "none": ({"tokenizer_config.json": "{}"}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", TEMPLATES)
def test_the_chat_template_is_found_in_all_its_places(tmp_path, case):
    """Fault: a model answers without its template, badly and silently."""
    written, expected = TEMPLATES[case]
    folder = write_target(tmp_path / "m")
    for name, text in written.items():
        (folder / name).write_text(text)
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.chat_template == expected


def test_llama_gguf_rows_return_to_the_order_of_the_hub():
    """Fault: interleaved instead of halved heads; the model babbles. The permutation here is the converter's."""
    hub = torch.arange(4 * 8 * 3).view(32, 3)
    stored = hub.view(4, 2, 4, 3).transpose(1, 2).reshape(32, 3)
    assert torch.equal(rotate_half_order(stored, 4), hub)


def test_only_llama_files_are_reordered(tmp_path):
    """Fault: Qwen2 files, which keep the hub's order, reordered all the same."""
    name = "model.layers.0.self_attn.k_proj.weight"
    with (
        open_checkpoint(write_gguf(tmp_path / "l.gguf")) as llama,
        open_checkpoint(write_gguf(tmp_path / "q.gguf", architecture="qwen2")) as qwen,
    ):
        assert torch.equal(llama.read(name), rotate_half_order(qwen.read(name), 2))
        assert qwen.config.qkv_bias and not llama.config.qkv_bias
        assert llama.info("model.layers.0.mlp.down_proj.weight") == ((32, 64), "F32")


def test_gguf_checkpoint_tells_ends_template_and_types(tmp_path):
    """Fault: the turn's end token is another than the text's, and only one is heeded."""
    path = write_gguf(
        tmp_path / "Tiny-Chat-Q4_K_M.gguf",
        {"token_embd.weight": "Q8_0"},
        tokenizer__ggml__eot_token_id=(7, GGUFValueType.UINT32),
    )
    with open_checkpoint(path) as checkpoint:
        assert (checkpoint.name, checkpoint.format, checkpoint.folder) == ("Tiny-Chat", "gguf", None)
        assert checkpoint.eos_ids == (2, 7) and checkpoint.chat_template == "{{ messages }}"
        assert checkpoint.quantization == "F32 (19 tensors), Q8_0 (1)"
        assert checkpoint.metadata["tokenizer.ggml.tokens"][:2] == ["t0", "t1"]
        check_tensors(checkpoint, target_shapes())


def test_an_end_token_outside_the_vocabulary_is_refused(tmp_path):
    """C7: a damaged id would never be generated, and answers would never end."""
    path = write_gguf(tmp_path / "m.gguf", tokenizer__ggml__eot_token_id=(64, GGUFValueType.UINT32))
    with pytest.raises(UserError, match="end token 64 is outside"):
        open_checkpoint(path)


def test_unknown_missing_and_misshapen_tensors_are_refused_by_name(tmp_path):
    """C2: names, the architecture found, and those supported."""
    tensors = random_tensors(target_shapes())
    cases = [
        (tensors | {"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}, "unknown tensors: .*q_norm.*supported"),
        ({n: t for n, t in tensors.items() if "layers.1.mlp" not in n}, "architecture llama.*lacks.*layers.1.mlp.down"),
        (tensors | {"model.norm.weight": torch.ones(31)}, r"'model.norm.weight' has shape \[31\].*\[32\]"),
    ]
    for i, (changed, message) in enumerate(cases):
        folder = write_folder(tmp_path / str(i), changed, HF_CONFIG)
        with open_checkpoint(folder) as checkpoint, pytest.raises(UserError, match=message):
            check_tensors(checkpoint, target_shapes())


def test_buffers_that_follow_from_the_configuration_are_skipped(tmp_path):
    """Fault: old checkpoints, which carry inv_freq, refused for it."""
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4, dtype=torch.float64)}
    folder = write_folder(tmp_path / "m", random_tensors(target_shapes()) | extra, HF_CONFIG)
    with open_checkpoint(folder) as checkpoint:
        check_tensors(checkpoint, target_shapes())


def test_a_tied_head_in_the_file_must_repeat_the_embedding(tmp_path):
    """C4: a head that differs is never dropped silently."""
    tensors = random_tensors(target_shapes())
    embedding = tensors["model.embed_tokens.weight"]
    same = write_folder(tmp_path / "same", tensors | {"lm_head.weight": embedding.clone()}, HF_CONFIG)
    with open_checkpoint(same) as checkpoint:
        check_tensors(checkpoint, target_shapes())
    other = write_folder(tmp_path / "other", tensors | {"lm_head.weight": embedding + 1}, HF_CONFIG)
    with open_checkpoint(other) as checkpoint, pytest.raises(UserError, match=r"'lm_head.weight' differs"):
        check_tensors(checkpoint, target_shapes())


def test_integer_and_fp8_weights_are_refused_when_opened(tmp_path):
    """Fault: codes taken for numbers."""
    tensors = random_tensors(target_shapes()) | {"model.norm.weight": torch.ones(32, dtype=torch.float8_e4m3fn)}
    with pytest.raises(UserError, match=r"'model.norm.weight' has type F8_E4M3.*bfloat16"):
        open_checkpoint(write_folder(tmp_path / "m", tensors, HF_CONFIG))


def test_llama3_scaling_in_a_gguf_is_understood(tmp_path):
    """C5: GGUF keeps Llama 3's scaling as divisors, without its parameters."""
    from lampejo.models.config import RopeConfig
    from lampejo.models.gguf_config import _llama3_divisors

    rope = RopeConfig(500_000.0, "llama3", 32.0, 8192, 1.0, 4.0)
    divisors = torch.tensor(_llama3_divisors(rope, 8))
    path = write_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": divisors.numpy()}, rope_theta=500_000.0)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config.rope == rope
        check_tensors(checkpoint, target_shapes())
    path = write_gguf(tmp_path / "n.gguf", extra={"rope_freqs.weight": torch.tensor([1.0, 2, 3, 4]).numpy()})
    with pytest.raises(UserError, match="not a Llama 3 scaling"):
        open_checkpoint(path)


def broken_folders(tmp_path: Path) -> list[Path]:
    """One for every stage at which a load can fail."""
    cut = write_target(tmp_path / "cut")
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    last_shard = write_folder(tmp_path / "shard", random_tensors(target_shapes()), HF_CONFIG, shards=3)
    (last_shard / "model-00003-of-00003.safetensors").write_bytes(b"\0" * 64)
    generation = write_target(tmp_path / "generation")
    (generation / "generation_config.json").write_text("{")
    gguf = write_gguf(tmp_path / "no-architecture.gguf", architecture="mamba")
    ends = write_gguf(tmp_path / "ends.gguf", tokenizer__ggml__eot_token_id=(999, GGUFValueType.UINT32))
    return [cut, last_shard, generation, gguf, ends]


def held() -> tuple[int, int]:
    """Open files, and bytes of memory in use, of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(list(Path("/proc/self/fd").iterdir())), pages * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_five_failed_loads_leave_no_open_file_no_mapping_and_no_memory(tmp_path):
    """C6: the process stays usable, and every message says what to do."""
    folders = broken_folders(tmp_path)
    good = write_target(tmp_path / "good")

    def failing() -> None:
        for folder in folders:
            with pytest.raises(UserError) as caught:
                open_checkpoint(folder)
            assert caught.value.remedy

    failing()  # what is imported or cached on the first use is no leak
    gc.collect()
    handles, memory = held()
    for _ in range(5):
        failing()
    gc.collect()
    handles_now, memory_now = held()
    assert handles_now == handles
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert memory_now - memory < 8 << 20
    with open_checkpoint(good) as checkpoint:
        check_tensors(checkpoint, target_shapes())


def test_damaged_json_beside_good_weights_names_its_file(tmp_path):
    """C7: config.json cut, a list, with a key twice, of the wrong type, or absent."""
    folder = write_target(tmp_path / "m")
    good = (folder / "config.json").read_text()
    for text in ("", good[:-5], "[]", '{"a": 1, "a": 2}', '"x"', "\ufffe", '{"model_type": 5}', "[" * 50_000):
        (folder / "config.json").write_text(text)
        with pytest.raises(UserError, match=r"config.json|Architecture 5"):
            open_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"config.json does not exist"):
        open_checkpoint(folder)
    (folder / "config.json").write_text(good)
    (folder / "tokenizer_config.json").write_text('{"chat_template": 5}')
    with pytest.raises(UserError, match="chat template is not a text"):
        open_checkpoint(folder)


def test_a_folder_with_one_gguf_opens_that_file(tmp_path):
    """Fault: people give the folder that they downloaded into."""
    write_gguf(tmp_path / "m.gguf")
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.format == "gguf"


def test_gguf_names_map_one_to_one():
    """Fault: two names of the file fall on one of ours, and a tensor vanishes."""
    names = ["token_embd.weight", "output.weight", "output_norm.weight", "rope_freqs.weight", "blk.3.attn_q.bias"]
    assert [hf_name(name, range(4, 5)) for name in names] == [
        "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "rope_freqs.weight",
        "model.layers.3.self_attn.q_proj.bias",
    ]  # fmt: skip
    odd = ["blk.x.attn_q.weight", "blk.0.ssm_d", "blk.9.attn_q.w", "x"]
    assert [hf_name(name, range(4, 5)) for name in odd] == odd
    assert hf_name("blk.4.nextn.enorm.weight", range(4, 5)) == "mtp.layers.0.nextn.enorm.weight"


def test_two_gguf_tensors_with_one_name_are_refused(tmp_path):
    """C7: 'blk.0' and a name that is already translated."""
    path = write_gguf(tmp_path / "m.gguf", extra={"model.norm.weight": torch.ones(32).numpy()})
    with pytest.raises(UserError, match=r"'model.norm.weight' twice"):
        open_checkpoint(path)


def test_the_aliases_are_the_documented_ones():
    """C8: names in the documentation resolve."""
    assert list(ALIASES) == ["smollm2", "qwen2.5-coder-1.5b"]
    assert sum(len(alias.pieces) for alias in ALIASES.values()) == 23


def test_a_drafter_given_as_the_model_is_told_apart(tmp_path):
    """C2: the two are easily mixed up on a command line."""
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3", "dflash_config": {}}')
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(UserError, match="is a drafter"):
        open_checkpoint(folder)

"""Targets of every architecture against `transformers` on tiny random checkpoints: logits, taps, greedy text."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from makefiles import write_gguf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from kernel_checks import assert_equal_up_to_codes, see_as_kernels, through_pages
from lampejo import ops
from lampejo.batch import make_batch
from lampejo.loader import load_target
from lampejo.models.layers import Target
from lampejo.ops.cpu import instruction_set
from lampejo.ops.cpu.library import Q8
from lampejo.request import StopParams
from lampejo.runner import Runner
from lampejo.scheduler import ScheduledRow
from lampejo.speculate import NgramDrafter
from lampejo.states import RowState
from lampejo.weights.checkpoint import open_checkpoint
from oracle import (
    ROPES,
    SIZES,
    RowView,
    forward,
    make_llama,
    make_qwen2,
    make_qwen3,
    make_qwen3_5,
    make_qwen3_5_moe,
    make_qwen3_5_moe_with_vision,
    make_qwen3_5_with_vision,
    make_qwen3_moe,
    make_qwen3_next,
    save,
)
from tiny import (
    TINY_DRAFTER,
    TINY_TARGETS,
    make_drafter,
    make_engine,
    make_request,
    make_target,
    prompt_of,
    run,
)

TOLERANCE = 1e-4
NUM_TOKENS = 150  # past every original context in ROPES, and past a chunk of keys


@dataclass(frozen=True)
class Case:
    """How a checkpoint is made; ``changes`` are keys of its config.json."""

    make: Callable[..., PreTrainedModel]
    changes: dict[str, Any]
    dtype: torch.dtype = torch.float32
    shard: str = "1GB"
    seed: int = 0
    stacked: bool = False  # the experts of a layer in one tensor
    num_greedy: int = 80


TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
ONE_KV_HEAD = {"num_attention_heads": 5, "num_key_value_heads": 1, "hidden_size": 40, "head_dim": 8}
OWN_KV_HEADS = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": None}
DENSE_LAYERS = {"mlp_only_layers": [3], "decoder_sparse_step": 2, "num_hidden_layers": 4}  # experts in layer 1 alone
# Attention first, the whole of each head rotated, one key head, a longer convolution
OTHER_LAYERS = {
    "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
    "rope_parameters": {**ROPES["default"], "partial_rotary_factor": 1.0},
    "linear_num_key_heads": 1, "linear_conv_kernel_dim": 6,
}  # fmt: skip
MROPE = {**ROPES["default"], "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0], "mrope_interleaved": True}
CASES = {
    "llama, tied head": Case(make_llama, TIED),
    "llama, untied head": Case(make_llama, UNTIED),
    "qwen2, tied head": Case(make_qwen2, TIED),
    "qwen2, untied head": Case(make_qwen2, UNTIED),
    "five heads over one": Case(make_llama, TIED | ONE_KV_HEAD, seed=1),
    "every head its own keys": Case(make_llama, UNTIED | OWN_KV_HEADS),
    "qwen2, five heads over one": Case(make_qwen2, UNTIED | ONE_KV_HEAD),
    "another epsilon": Case(make_llama, TIED | {"rms_norm_eps": 0.05}),
    "in shards": Case(make_llama, UNTIED, shard="20KB"),
    "bfloat16": Case(make_llama, TIED, torch.bfloat16),
    "float16 in shards": Case(make_qwen2, UNTIED, torch.float16, "20KB"),
    "qwen3": Case(make_qwen3, UNTIED, num_greedy=200),
    "qwen3, tied head, yarn": Case(make_qwen3, TIED | {"rope_parameters": ROPES["yarn"]}),
    "qwen3_moe": Case(make_qwen3_moe, UNTIED | {"norm_topk_prob": True}, num_greedy=200),
    "qwen3_moe, stacked experts": Case(make_qwen3_moe, UNTIED | {"norm_topk_prob": True}, stacked=True),
    "qwen3_moe, weights as they are": Case(make_qwen3_moe, TIED | {"norm_topk_prob": False}),
    "qwen3_moe, dense layers": Case(make_qwen3_moe, UNTIED | DENSE_LAYERS),
    "qwen3_next": Case(make_qwen3_next, UNTIED, num_greedy=200),
    "qwen3_next, a dense layer": Case(make_qwen3_next, UNTIED | {"mlp_only_layers": [3]}),
    "qwen3_5": Case(make_qwen3_5, UNTIED, num_greedy=200),
    "qwen3_5, other layers": Case(make_qwen3_5, TIED | OTHER_LAYERS),
    "qwen3_5 with vision": Case(make_qwen3_5_with_vision, TIED | {"rope_parameters": MROPE}),
    "qwen3_5_moe": Case(make_qwen3_5_moe, UNTIED, num_greedy=200),
    "qwen3_5_moe with vision, stacked experts": Case(make_qwen3_5_moe_with_vision, UNTIED, shard="20KB", stacked=True),
} | {
    f"{name}, {kind} rope": Case(make, TIED | {"rope_parameters": rope})
    for kind, rope in ROPES.items()
    for name, make in (("llama", make_llama), ("qwen2", make_qwen2))
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def models(case: Case, tmp_path: Path) -> Iterator[tuple[PreTrainedModel, Target]]:
    """The same checkpoint in transformers and through our loader."""
    oracle = save(case.make(case.seed, **case.changes), tmp_path, case.dtype, case.shard, case.stacked)
    assert (tmp_path / "model.safetensors.index.json").exists() == (case.shard != "1GB")
    with open_checkpoint(tmp_path) as checkpoint:
        yield oracle, load_target(checkpoint)


def text_of(num_tokens: int) -> list[int]:
    """Random ids over the whole vocabulary, its last id included."""
    return [*prompt_of(num_tokens - 1, vocab_size=SIZES["vocab_size"]), SIZES["vocab_size"] - 1]


def greedy(oracle: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """The greedy continuation; it must have no near-tie, or rounding would decide what the test says."""
    ids = torch.tensor([prompt])
    out = oracle.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(out.logits).topk(2, dim=-1).values
    assert (best[:, 0] - best[:, 1]).min() > 2 * TOLERANCE, "a near-tie: give this case another seed"
    return out.sequences[0, len(prompt) :].tolist()


def test_logits_and_taps_equal_those_of_transformers(models: tuple[PreTrainedModel, Target]):
    """Fault: heads, biases, norms, scaling or types read otherwise than they were written; a tap one layer off."""
    oracle, target = models
    ids, num_layers = text_of(NUM_TOKENS), target.config.num_layers
    with torch.inference_mode():
        expected = oracle(torch.tensor([ids]), output_hidden_states=True)
    logits, taps = forward(target, ids, tuple(range(num_layers)))
    assert logits.shape == (len(ids), SIZES["vocab_size"]), "the vocabulary of the file, not padded (C4)"
    assert expected.logits.std() > 0.5, "logits so small could not show a fault"
    assert (logits - expected.logits[0]).abs().max() < TOLERANCE
    for layer, tap in enumerate(taps.chunk(num_layers, dim=-1)):
        # transformers gives the last state after the last norm
        ours = tap if layer < num_layers - 1 else target.model.norm(tap)
        assert (ours - expected.hidden_states[layer + 1][0]).abs().max() < TOLERANCE


def test_prefill_in_chunks_through_pages_gives_the_same_logits_and_taps(models: tuple[PreTrainedModel, Target]):
    """Fault: a chunk that does not see the ones before it, or sees its own future; positions that restart."""
    oracle, target = models
    ids, config = text_of(NUM_TOKENS), target.config
    drafter_config = replace(
        TINY_DRAFTER, target_layer_ids=(1, 0), hidden_size=config.hidden_size, vocab_size=config.vocab_size
    )
    runner = Runner(target, make_drafter(drafter_config), num_pages=40, page_size=16)
    request = make_request(ids)
    request.state = RowState(slot=0)
    request.pages = torch.randperm(40).tolist()[: -(-len(ids) // 16)]
    logits, taps = [], []
    for end in (1, 8, 40, 41, 100, NUM_TOKENS):  # a chunk is its first token and the rest as drafts, to have all logits
        chunk = ids[request.num_computed : end]
        request.ids = ids[: request.num_computed + 1]
        batch = make_batch([ScheduledRow(request, 1, len(chunk))], [chunk[1:]], 16, (), runner.device)
        out = runner.verify(batch)
        runner.commit(out, [len(chunk)], [()])
        logits.append(out.logits)
        taps.append(out.taps)
        request.num_computed = end
    with torch.inference_mode():
        expected = oracle(torch.tensor([ids]), output_hidden_states=True)
    assert (torch.cat(logits) - expected.logits[0]).abs().max() < TOLERANCE
    second, first = torch.cat(taps).chunk(2, dim=-1)  # in the order of target_layer_ids
    for tap, layer in ((first, 0), (second, 1)):
        assert (tap - expected.hidden_states[layer + 1][0]).abs().max() < TOLERANCE


def test_greedy_text_equals_that_of_transformers(models: tuple[PreTrainedModel, Target], case: Case):
    """Fault: anything in the decode loop that changes a token; plain, and with drafts, after a chunked prefill."""
    oracle, target = models
    prompt = text_of(50)
    expected = greedy(oracle, prompt, case.num_greedy)
    for drafters in ([], [NgramDrafter(1)]):
        engine = make_engine(target, drafters, eos_ids=(), width=6 if drafters else 0, token_budget=32)
        request = make_request(prompt, StopParams(max_tokens=case.num_greedy))
        assert run(engine, [request]) == [expected]
        assert bool(request.stats.num_spec_steps) == bool(drafters)


@pytest.mark.parametrize("architecture", TINY_TARGETS)
def test_chunks_of_every_size_give_the_same_bits(architecture: str):
    """Principle 3, for all layers together: no last bit tells what was computed beside a token. Also the fault of a
    convolution or a recurrence that loses a token between two chunks."""
    target, ids = make_target(TINY_TARGETS[architecture]), prompt_of(26)
    whole, whole_taps = forward(target, ids, (0, 2, 3))
    for size in range(1, len(ids)):
        view = RowView(target.config, len(ids))
        parts = [view.forward(target, ids[i : i + size], (0, 2, 3)) for i in range(0, len(ids), size)]
        logits, taps = (torch.cat(part) for part in zip(*parts, strict=True))
        assert torch.equal(logits, whole) and torch.equal(taps, whole_taps)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_both_forms_of_the_recurrence_in_turn_give_the_logits_of_transformers(name: str, tmp_path: Path):
    """Fault: a prefill by the chunked form that ends in another state than decoding goes on from."""
    oracle, ids = save(CASES[name].make(0), tmp_path), text_of(NUM_TOKENS)
    with open_checkpoint(tmp_path) as checkpoint, torch.inference_mode():
        target, expected = load_target(checkpoint), oracle(torch.tensor([ids])).logits[0]
    for size in (7, 64, 65, NUM_TOKENS):
        view, logits = RowView(target.config, len(ids)), []
        for i in range(0, len(ids), size):
            view.delta_net = (ops.delta_net_chunked, ops.delta_net)[i // size % 2]
            logits.append(view.forward(target, ids[i : i + size])[0])
        assert (torch.cat(logits) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("architecture", TINY_TARGETS)
def test_targets_compute_in_half_precision(architecture: str):
    """Fault: a part that goes on in fp32, and meets weights that are not; devices hold weights in 16 bits."""
    target, ids = make_target(TINY_TARGETS[architecture]), prompt_of(60)
    expected, _ = forward(target, ids)
    for dtype, share in ((torch.float16, 0.05), (torch.bfloat16, 0.4)):
        logits, taps = forward(target.to(dtype), ids, (1,))
        assert taps.dtype is dtype and logits.dtype is torch.float32
        assert (logits - expected).abs().mean() < share * expected.std()


needs_kernels = pytest.mark.skipif(instruction_set() is None, reason="the CPU kernels were not built")


@needs_kernels
@pytest.mark.parametrize("architecture", TINY_TARGETS)
def test_targets_on_the_kernels_are_the_reference_on_rounded_numbers(architecture: str):
    """Fault: norms, gates, biases or experts that the fused layers leave out."""
    config, ids = TINY_TARGETS[architecture], prompt_of(60)
    expected = through_pages(see_as_kernels(make_target(config)), ids, len(ids))
    ours = through_pages(make_target(config, packed=True), ids, len(ids))
    assert_equal_up_to_codes(ours, expected)


@needs_kernels
@pytest.mark.parametrize("architecture", TINY_TARGETS)
def test_chunks_of_every_size_give_the_same_bits_on_the_kernels(architecture: str):
    """Principle 3, for all layers together, through pages, states and commits."""
    target, ids = make_target(TINY_TARGETS[architecture], packed=True), prompt_of(26)
    whole = through_pages(target, ids, len(ids))
    for size in range(1, len(ids)):
        assert torch.equal(through_pages(target, ids, size), whole)


PACKED = [
    "qwen3",
    "qwen3_moe",
    "qwen3_moe, stacked experts",
    "qwen3_moe, dense layers",
    "qwen3_next, a dense layer",
    "qwen3_5",
    "qwen3_5, other layers",
    "qwen3_5_moe with vision, stacked experts",
]


@needs_kernels
@pytest.mark.parametrize("name", PACKED)
def test_checkpoints_are_packed_as_they_are_read(name: str, tmp_path: Path):
    """Fault: an expert in another's place, gate and up exchanged, a projection taken apart wrongly; in all layouts of
    the releases."""
    case, ids = CASES[name], text_of(60)
    changes = case.changes | {"head_dim": 16}  # the kernels take heads of multiples of 8
    save(case.make(case.seed, **changes), tmp_path, case.dtype, case.shard, case.stacked)
    with open_checkpoint(tmp_path) as checkpoint:
        targets = see_as_kernels(load_target(checkpoint)), load_target(checkpoint, Q8)
    expected, ours = (through_pages(target, ids, len(ids)) for target in targets)
    assert_equal_up_to_codes(ours, expected)


def test_vision_and_mtp_are_left_out_by_name(tmp_path: Path):
    """Fault: tensors dropped without a word, or a release refused for what the text does not need."""
    save(make_qwen3_5_with_vision(eos_token_id=7), tmp_path)
    mtp = {"mtp.fc.weight": torch.zeros(2, 2), "mtp.layers.0.mlp.up_proj.weight": torch.zeros(2, 2)}
    save_file(load_file(tmp_path / "model.safetensors") | mtp, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        num_vision = sum(name.startswith("model.visual.") for name in load_file(tmp_path / "model.safetensors"))
        assert checkpoint.skipped == {"MTP": 2, "vision": num_vision} and num_vision > 10
        assert checkpoint.eos_ids == (7,), "of the text's part of config.json"
        load_target(checkpoint)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_gguf_file_gives_what_transformers_makes_of_it(tmp_path: Path, architecture: str):
    """Fault: rows of q and k in the order of one architecture taken for that of the other; biases left out."""
    biases = {}
    if architecture == "qwen2":
        random = np.random.default_rng(1)
        sizes = {"attn_q": 32, "attn_k": 16, "attn_v": 16}
        biases = {
            f"blk.{i}.{name}.bias": random.standard_normal(size, np.float32)
            for i in range(2)
            for name, size in sizes.items()
        }
    path = write_gguf(tmp_path / "model.gguf", {"token_embd.weight": "Q8_0"}, biases, architecture=architecture)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    with open_checkpoint(path) as checkpoint:
        target = load_target(checkpoint)
    ids = prompt_of(60, vocab_size=64)
    with torch.inference_mode():
        expected = oracle(torch.tensor([ids])).logits[0]
    assert ((forward(target, ids)[0] - expected).abs() / expected.abs().max()).max() < 1e-5

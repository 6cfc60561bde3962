"""From names to a ready runner: what is refused, and that a refusal leaves nothing behind."""

import gc
import json
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from makefiles import write_drafter, write_target
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

import lampejo
from lampejo.config import EngineConfig
from lampejo.errors import UserError
from lampejo.loader import load_model
from lampejo.models.dflash import DFlash
from lampejo.models.llama import Llama
from lampejo.models.targets import make_target
from lampejo.ops.cpu import instruction_set
from lampejo.ops.cpu.library import LIBRARY, Q8
from lampejo.ops.reference import KEY_CHUNK
from lampejo.packing import pack_drafter
from lampejo.terminal import memory_words
from lampejo.weights.checkpoint import Checkpoint, open_checkpoint
from lampejo.weights.describe import describe, facts
from oracle import make_qwen3_5, save
from tiny import TINY, TINY_DRAFTER, make_drafter

SIZES = {"vocab_size": 260, "hidden_size": 32}
OPEN_FILES = Path("/proc/self/fd")
RULES = {"mask_token_id": 259, "target_layer_ids": [0, 1]}


def add_tokenizer(folder: Path) -> Path:
    """One token for each byte and one that ends the text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tokenizer(write_target(tmp_path_factory.mktemp("models") / "Tiny-Chat", **SIZES, eos_token_id=256))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafter(tmp_path_factory.mktemp("drafters") / "d", **SIZES, dflash_config=RULES)


def load(target: Path, drafter: str | Path = "auto", threads: int | None = None, **config: Any) -> Any:
    return load_model(str(target), str(drafter), EngineConfig(**config), threads, None)


@pytest.mark.parametrize(
    ("name", "drafters", "shown"),
    [
        ("none", [], "none"),
        ("ngram", ["ngram"], "ngram"),
        ("auto", ["ngram"], "ngram (no DFlash drafter is known for this model)"),
    ],
)
def test_what_is_asked_for_is_what_drafts_and_info_tells_it(target: Path, name: str, drafters: list[str], shown: str):
    """Design principle 6: the effective mode is visible; "auto" without a drafter says so."""
    loaded, config = load(target, name)
    assert loaded.info["drafters"] == drafters and loaded.info["drafter"] == shown
    assert loaded.info["model"] == "Tiny-Chat" and loaded.info["architecture"] == "llama"
    assert (config.max_context, loaded.info["max_context"], loaded.info["width"]) == (128, 128, "auto")
    assert loaded.eos_ids == (256,)


def test_a_drafter_in_a_folder_drafts_for_the_target_that_it_fits(target: Path, drafter: Path):
    """Fault: a given drafter that is loaded and then not used; its memory not counted."""
    loaded, config = load(target, drafter, width=2)
    assert loaded.info["drafters"] == ["dflash"] and loaded.info["drafter"] == "d" and loaded.info["width"] == 2
    plain, _ = load(target, "none")
    size = loaded.runner.cache.k.element_size()  # fp32 on the reference operations, f16 on the kernels
    context_bytes = 2 * 1 * 2 * 8 * size  # keys and values, one layer, two heads of 8
    assert loaded.info["kv_bytes_per_token"] == plain.info["kv_bytes_per_token"] + context_bytes
    with lampejo.LLM(loaded, config) as llm:
        answer = llm.generate("abcabcabc", max_tokens=20, ignore_eos=True)
    assert len(answer.ids) == 20 and answer.speculation["num_spec_steps"] > 0
    with lampejo.load(str(target), "none") as llm:
        assert llm.generate("abcabcabc", max_tokens=20, ignore_eos=True).ids == answer.ids


def test_dflash_without_a_known_drafter_is_refused_with_the_ways_out(target: Path):
    """Design principle 6: never a silent fall-back."""
    with pytest.raises(UserError, match="No DFlash drafter is known for Tiny-Chat") as caught:
        load(target, "dflash")
    assert "ngram, auto or none" in caught.value.remedy


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "hidden size is 64, the model's is 32"),
        ({"vocab_size": 300}, "vocabulary is 300, the model's is 260"),
        ({"num_target_layers": 5}, "number of target layers is 5, the model's is 2"),
        ({"target": "SmolLM2-135M-Instruct"}, "made for SmolLM2-135M-Instruct, the model is Tiny-Chat"),
        ({"dflash_config": RULES | {"mask_token_id": 256}}, "mask_token_id 256 ends the target's answers"),
        ({"dflash_config": {"mask_token_id": 259}}, "lacks the key 'target_layer_ids'"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(target: Path, tmp_path: Path, changes: dict[str, Any], message: str):
    """C1, C3: what was found and what was expected."""
    folder = write_drafter(tmp_path / "d", **{**SIZES, "dflash_config": RULES})
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message) as caught:
        load(target, folder)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"threads": 0}, "threads"),
        ({"threads": -3}, "threads"),
        ({"threads": 10**9}, "threads"),
        ({"threads": 1.5}, "threads"),
        ({"width": -1}, "width is -1"),
        ({"width": 1.5}, "width is 1.5"),
        ({"width": True}, "width is True"),
        ({"max_context": 129}, "context of 129 tokens does not fit this model"),
        ({"max_context": 1}, "context of 1 tokens"),
        ({"max_context": -5}, "context of -5 tokens"),
        ({"max_context": float("nan")}, "max_context is nan"),
        ({"num_pages": 1}, "1 pages of 32 tokens hold less"),
        ({"page_size": 0}, "page_size is 0"),
        ({"page_size": 48}, "page_size is 48"),
        ({"page_size": 256}, "page_size is 256"),
        ({"max_rows": 0}, "max_rows"),
        ({"token_budget": 3}, "token_budget"),
    ],
)
def test_impossible_settings_are_refused_before_any_work(target: Path, changes: dict[str, Any], message: str):
    """A number that cannot work; a billion threads would end the process."""
    before = torch.get_num_threads()
    with pytest.raises(UserError, match=message):
        load(target, **changes)
    assert torch.get_num_threads() == before


def test_every_page_size_that_is_allowed_divides_a_chunk_of_keys():
    """Fault: pages that do not add up to a chunk fail in the middle of a request."""
    allowed = []
    for page_size in range(1, 300):
        try:
            allowed.append(EngineConfig(page_size=page_size).resolve(1000).page_size)
        except UserError:
            continue
    assert allowed == [n for n in range(1, 300) if KEY_CHUNK % n == 0]


def test_threads_are_set_by_a_load_that_succeeds_only(target: Path, tmp_path: Path):
    """C6: a failed load must not leave the process slower than it found it."""
    before = torch.get_num_threads()
    try:
        with pytest.raises(UserError):
            load(target, "dflash", threads=before + 1)
        assert torch.get_num_threads() == before
        load(target, "none", threads=before + 1, ops="reference")
        assert torch.get_num_threads() == before + 1
        if instruction_set() is not None:  # then the kernels get them: two pools would wait for each other's cores
            load(target, "none", threads=2)
            assert (LIBRARY.lampejo_get_threads(), torch.get_num_threads()) == (2, 1)
            load(target, "none", ops="reference")
            assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def cut(folder: Path, copy: Path, num_bytes: int) -> Path:
    """A copy whose weights lack their last bytes."""
    shutil.copytree(folder, copy)
    data = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(data[:-num_bytes])
    return copy


def held() -> dict[str, int]:
    """What a failed load could leave behind in this process."""
    gc.collect()
    alive = gc.get_objects()
    tensors = [o for o in alive if issubclass(type(o), torch.Tensor)]
    return {
        "threads": threading.active_count(),
        "files": len(list(OPEN_FILES.iterdir())) if OPEN_FILES.is_dir() else 0,
        "models": sum(issubclass(type(o), Llama | DFlash) for o in alive),
        "tensors": len(tensors),
        "bytes": sum(t.numel() * t.element_size() for t in tensors),
    }


def grown(before: dict[str, int]) -> dict[str, int]:
    """What there is more of; less is no fault of ours, earlier tests may still be clearing up."""
    return {name: count for name, count in held().items() if count > before[name]}


def test_five_failed_loads_in_a_row_leave_nothing_and_the_next_one_works(target: Path, drafter: Path, tmp_path: Path):
    """C6: threads, file handles, models and tensors as before, whatever part it was that failed."""
    lacking = tmp_path / "lacking"
    shutil.copytree(target, lacking)
    (lacking / "tokenizer.json").unlink()
    failures: list[tuple[Callable[[], Any], str]] = [
        (lambda: lampejo.load("no-such-model"), "Unknown model"),
        (lambda: lampejo.load(str(cut(target, tmp_path / "cut target", 1000))), "truncated|shorter|damaged|bytes"),
        (lambda: lampejo.load(str(lacking)), "tokenizer.json"),
        (lambda: lampejo.load(str(target), str(cut(drafter, tmp_path / "cut", 64))), "truncated|shorter|damaged|bytes"),
        (lambda: lampejo.load(str(target), str(drafter), config=EngineConfig(max_context=9999)), "does not fit"),
    ]

    def fail(attempt: Callable[[], Any], message: str) -> None:
        with pytest.raises(UserError, match=message) as caught:
            attempt()
        assert caught.value.remedy
        caught.value.__traceback__ = None  # it holds the frames that pytest shows, not what the process holds

    before = held()
    for attempt, message in failures:
        fail(attempt, message)
        assert not grown(before), message
    with lampejo.load(str(target), str(drafter), config=EngineConfig(width=2)) as llm:
        assert len(llm.generate("still here", max_tokens=5, ignore_eos=True).ids) == 5
    del llm
    assert not grown(before), "closing gives everything back too"


@pytest.mark.skipif(instruction_set() is None, reason="the CPU kernels were not built")
def test_what_the_kernels_cannot_do_is_refused_by_name():
    """Fault: kernels asked for and silently replaced, or given sizes that they overrun."""
    with pytest.raises(UserError, match="no fp32 weights"):
        load_model("smollm2", "none", EngineConfig(ops="cpu", quantize="none", max_context=64), None, None)
    with pytest.raises(UserError, match=r"blocks of 16, pages of 8\)"):
        pack_drafter(make_drafter(replace(TINY_DRAFTER, block_size=16)), {}, Q8, page_size=8)


@pytest.mark.parametrize("page_size", [4, 128])
def test_pages_that_the_kernels_do_not_know_are_the_reason_for_the_reference(target: Path, page_size: int):
    """Fault: a page size silently makes everything slower."""
    loaded, _ = load(target, "none", page_size=page_size)
    assert loaded.info["ops"] == "reference"
    assert ("not built" if instruction_set() is None else f"pages of {page_size}") in loaded.info["ops_reason"]
    asked_for, _ = load(target, "none", page_size=page_size, ops="reference")
    assert asked_for.info["ops"] == "reference" and asked_for.info["ops_reason"] is None


def test_info_tells_the_precision_of_weights_and_keys(target: Path):
    """Fault: whether a quantised answer was computed in its own codes, 8 bits or fp32 is nowhere to be read."""
    exact, config = load(target, "none", ops="reference")
    assert exact.info["page_size"] == config.page_size  # on the kernels it takes part in rounding
    assert (exact.info["weights"], exact.info["kv_dtype"], exact.info["dtype"]) == ("fp32", "float32", "float32")
    if instruction_set() is not None:
        packed, _ = load(target, "none", quantize="q4")
        assert (packed.info["weights"], packed.info["kv_dtype"]) == ("q4: 15", "float16")  # 2 layers of 7, a tied head


@pytest.mark.parametrize(("kind", "most"), [("none", 0), ("ngram", 15), ("auto", 15), ("dflash", 3)])
def test_a_width_that_no_drafter_offers_is_refused(target: Path, drafter: Path, kind: str, most: int):
    """Fault: a fixed width is accepted, and fewer drafts are made without a word."""
    name = drafter if kind == "dflash" else kind  # blocks of 4
    assert load(target, name, width=most)[0].info["width"] == most
    with pytest.raises(UserError, match=f"width is {most + 1}, .* offers {most} drafts"):
        load(target, name, width=most + 1)


def test_packing_that_cannot_happen_is_refused(target: Path, monkeypatch: pytest.MonkeyPatch):
    """Fault: --quantize accepted and without effect, because the reference operations run."""
    with pytest.raises(UserError, match="quantize is q4, but the reference operations compute in fp32"):
        load(target, "none", ops="reference", quantize="q4")
    assert load(target, "none", ops="reference", quantize="none")[0].info["weights"] == "fp32"
    monkeypatch.setattr("lampejo.loader.LIBRARY", None)
    with pytest.raises(UserError, match=r"--quantize q8 is for the CPU kernels.*not built"):
        load(target, "none", quantize="q8")


def test_keys_and_values_that_memory_cannot_hold_are_refused_with_a_context_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Fault: a traceback from the allocator, after all weights were read, for a model with a long context."""
    sizes = {**SIZES, "eos_token_id": 256, "max_position_embeddings": 2**30}
    target = add_tokenizer(write_target(tmp_path / "Tiny-Long", **sizes))
    monkeypatch.setattr("lampejo.loader._total_memory", lambda: 2**26)
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("weights were read before the refusal"))
    with pytest.raises(UserError, match=r"this machine has 0\.1 GB") as caught:
        load(target, "none")
    monkeypatch.undo()
    context = int(re.findall(r"--context (\d+)", caught.value.remedy)[0])
    monkeypatch.setattr("lampejo.loader._total_memory", lambda: 2**26)
    loaded, config = load(target, "none", max_context=context)
    assert context > 1000 and loaded.info["max_context"] == context
    assert 2**23 < config.num_pages * config.page_size * loaded.info["kv_bytes_per_token"] <= 2**25


def test_recurrent_states_are_told_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Fault: states of gigabytes that nobody announced; keys and values counted for layers that have none."""
    save(make_qwen3_5(vocab_size=260, eos_token_id=256), tmp_path / "Tiny-Hybrid")
    folder = add_tokenizer(tmp_path / "Tiny-Hybrid")
    loaded, _ = load(folder, "none", ops="reference", max_rows=3, num_snapshots=2)
    with open_checkpoint(str(folder)) as checkpoint:
        known, table = facts(checkpoint, torch.float32), dict(describe(checkpoint, torch.float32))
    per_request = 4 * 3 * (6 * 24 * 40 + 3 * (2 * 3 * 24 + 6 * 40))  # three layers: matrices, windows of three tokens
    assert known["state_bytes_per_request"] == loaded.info["state_bytes_per_request"] == per_request
    assert f"{per_request:,} bytes per request" in table["recurrent state"]
    assert f"{32 * per_request / 1e6:.0f} MB for 16 requests and 16 cached prefixes" in table["recurrent state"]
    assert memory_words(loaded.info).endswith(f"; recurrent state {per_request:,} bytes per request")
    assert known["kv_bytes_per_token"] == loaded.info["kv_bytes_per_token"] == 2 * 1 * 3 * 16 * 4  # one layer
    assert loaded.runner.num_state_slots == 5

    monkeypatch.setattr("lampejo.loader._total_memory", lambda: 2**26)
    with pytest.raises(UserError, match=r"states of 16 requests and 1000 cached prefixes would take 0\.1 GB") as caught:
        load(folder, "none", ops="reference", num_snapshots=1000)
    assert "num_snapshots" in caught.value.remedy


def test_the_default_pool_of_a_long_context_does_not_ask_for_it_twice():
    """Fault: memory for two requests of 131,072 tokens where one was asked for."""
    assert EngineConfig().resolve(131_072).num_pages == (131_072 + 8192) // 32
    assert EngineConfig().resolve(2048).num_pages == 2 * 2048 // 32


def test_models_that_wait_for_their_weights_draw_no_random_ones(monkeypatch: pytest.MonkeyPatch):
    """On the meta device they would be lost, and PyTorch imports its compiler to draw them: two seconds of a start."""
    monkeypatch.setattr(torch.nn.init, "normal_", lambda *_: pytest.fail("random values were drawn"))
    with torch.device("meta"):
        make_target(TINY)
        DFlash(replace(TINY_DRAFTER, markov_rank=4))

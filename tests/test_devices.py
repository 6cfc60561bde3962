"""Other devices than the CPU, as far as they can be tested without one: where a model goes, in what precision, what is
refused; and on the device "meta", which has shapes and types but no values, that a step never asks for a value.

``test_gpu_ring`` has what a GPU computes.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from makefiles import write_drafter, write_target

from lampejo import ops
from lampejo.batch import make_batch
from lampejo.config import EngineConfig
from lampejo.errors import UserError
from lampejo.loader import load_model, load_target
from lampejo.models import targets
from lampejo.models.dflash import DFlash
from lampejo.ops import device as device_ops
from lampejo.ops.place import ON_CPU, Place, choose_place, enough_memory
from lampejo.request import Request
from lampejo.runner import Runner
from lampejo.scheduler import ScheduledRow
from lampejo.states import RowState
from lampejo.terminal import drafting_mode
from lampejo.weights.checkpoint import open_checkpoint
from oracle import make_qwen3_5_moe, save
from test_loader import RULES, SIZES, add_tokenizer
from tiny import TINY_DRAFTER, TINY_TARGETS, make_request, prompt_of

META = Place(torch.device("meta"), torch.bfloat16)


def with_gpus(monkeypatch: pytest.MonkeyPatch, num: int, bf16: bool = True, built: bool = True) -> None:
    """PyTorch tells that there are so many."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bf16 or including_emulation)
    monkeypatch.setattr(torch.version, "cuda", "13.0" if built else None)


@pytest.mark.parametrize(
    ("device", "dtype", "num_gpus", "expected"),
    [
        ("auto", "auto", 0, ("cpu", torch.float32)),
        ("auto", "auto", 1, ("cuda:0", torch.bfloat16)),
        ("auto", "fp32", 0, ("cpu", torch.float32)),
        ("cpu", "auto", 2, ("cpu", torch.float32)),
        ("cuda", "fp16", 1, ("cuda:0", torch.float16)),
        ("cuda:1", "fp32", 2, ("cuda:1", torch.float32)),
    ],
)
def test_a_model_goes_where_it_is_sent(device, dtype, num_gpus, expected, monkeypatch):
    """Fault: a GPU that lies idle, or another than was asked for; bf16 on a CPU, where rows would see each other."""
    with_gpus(monkeypatch, num_gpus)
    place = choose_place(device, dtype)
    assert (str(place.device), place.dtype) == expected


def test_a_gpu_without_bf16_gets_fp16(monkeypatch):
    """Fault: emulated arithmetic, many times slower, as the default of an older GPU."""
    with_gpus(monkeypatch, 1, bf16=False)
    assert choose_place("auto", "auto").dtype == torch.float16
    assert choose_place("auto", "bf16").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("device", "dtype", "num_gpus", "built", "message", "remedy"),
    [
        ("cuda", "auto", 0, False, "this PyTorch was built without CUDA", "Install a PyTorch for CUDA"),
        ("cuda", "auto", 0, True, "no GPU can be used here", "nvidia-smi"),
        ("cuda:2", "auto", 2, True, "cuda:2, but there are 2 GPUs", "from cuda:0"),
        ("gpu", "auto", 1, True, "device is 'gpu'", "cuda:N"),
        ("cuda:x", "auto", 1, True, "device is 'cuda:x'", "cuda:N"),
        ("cpu:1", "auto", 1, True, "device is 'cpu:1'", "cuda:N"),
        ("cpu", "bf16", 1, True, "dtype is bf16, but a CPU", "--quantize"),
        ("auto", "fp16", 0, False, "dtype is fp16, but a CPU", "--quantize"),
        ("auto", "fp8", 1, True, "dtype is 'fp8'", ""),
    ],
)
def test_places_that_are_not_there_are_refused(device, dtype, num_gpus, built, message, remedy, monkeypatch):
    """Design principle 6: before any work, with the way out."""
    with_gpus(monkeypatch, num_gpus, built=built)
    with pytest.raises(UserError, match=message) as caught:
        load_model("there/is-no-such-model", "none", EngineConfig(device=device, dtype=dtype), None, None)
    assert remedy in (caught.value.remedy or "")


@pytest.fixture(scope="module")
def hybrid_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with all kinds of layers."""
    folder = tmp_path_factory.mktemp("models") / "Tiny-Hybrid"
    save(make_qwen3_5_moe(vocab_size=260, eos_token_id=256), folder)
    return add_tokenizer(folder)


def load_elsewhere(monkeypatch: pytest.MonkeyPatch, folder: Path, drafter: str = "none", **config: Any) -> Any:
    monkeypatch.setattr("lampejo.loader.choose_place", lambda *_: META)
    return load_model(str(folder), drafter, EngineConfig(**config), None, None)


def test_everything_of_a_model_lies_on_its_device_in_its_precision(hybrid_folder, monkeypatch):
    """Faults: a cache left on the CPU; states in 16 bits, which forget; decays rounded; the mode not told."""
    loaded, _ = load_elsewhere(monkeypatch, hybrid_folder)
    runner = loaded.runner
    names = dict(runner.target.named_parameters())
    assert {p.device.type for p in names.values()} == {"meta"}
    in_fp32 = {name for name, p in names.items() if p.dtype == torch.float32}
    assert in_fp32 == {name for name in names if name.endswith(("A_log", "dt_bias"))} and in_fp32
    assert all(p.dtype == torch.bfloat16 for name, p in names.items() if name not in in_fp32)
    assert (runner.cache.k.dtype, runner.cache.k.device.type) == (torch.bfloat16, "meta")
    assert (runner.states.states.dtype, runner.states.windows.dtype) == (torch.float32, torch.float32)
    info = loaded.info
    assert (info["device"], info["ops"], info["dtype"]) == ("meta", "device", "bfloat16")
    assert (info["weights"], info["kv_dtype"], info["ops_reason"]) == ("bf16", "bfloat16", None)
    assert info["kv_bytes_per_token"] == 2 * 1 * 3 * 16 * 2  # keys and values, a layer, three heads of 16, two bytes
    assert drafting_mode(info) == "plain decoding, meta in bf16"


def test_a_drafter_goes_along(tmp_path, monkeypatch):
    """Fault: a drafter in fp32 on the CPU beside its target on a GPU."""
    target = add_tokenizer(write_target(tmp_path / "Tiny-Chat", **SIZES, eos_token_id=256))
    drafter = write_drafter(tmp_path / "d", **SIZES, dflash_config=RULES)
    monkeypatch.setattr("lampejo.loader.trial", lambda *_: None)
    loaded, _ = load_elsewhere(monkeypatch, target, str(drafter))
    found = {(p.device.type, p.dtype) for p in loaded.runner.drafter.parameters()}
    assert found == {("meta", torch.bfloat16)}
    assert loaded.runner.context_cache.k.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "config", [{"ops": "cpu"}, {"ops": "reference"}, {"quantize": "q8"}, {"quantize": "q4"}], ids=str
)
def test_what_is_for_a_cpu_is_refused_elsewhere(config, hybrid_folder, monkeypatch):
    """Fault: a flag that is accepted and does nothing."""
    (name, value), *_ = config.items()
    with pytest.raises(UserError, match=f"--{name} {value} is for a CPU, but the model runs on meta") as caught:
        load_elsewhere(monkeypatch, hybrid_folder, **config)
    assert "--device cpu" in caught.value.remedy


def test_fp32_on_a_cpu_is_that_of_the_reference_operations(hybrid_folder):
    """Fault: --dtype fp32 accepted, and 8 bits computed."""
    loaded, _ = load_model(str(hybrid_folder), "none", EngineConfig(device="cpu", dtype="fp32"), None, None)
    assert (loaded.info["ops"], loaded.info["weights"], loaded.info["ops_reason"]) == ("reference", "fp32", None)
    with pytest.raises(UserError, match="quantize is q8, but dtype is fp32"):
        EngineConfig(dtype="fp32", quantize="q8")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_read_in_their_precision(hybrid_folder, dtype):
    """Fault: rows in another order or rounded twice, on the way to a device."""
    with open_checkpoint(str(hybrid_folder)) as checkpoint:
        exact, ours = load_target(checkpoint), load_target(checkpoint, place=Place(ON_CPU.device, dtype))
    for (name, expected), p in zip(exact.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(p, expected if name.endswith(("A_log", "dt_bias")) else expected.to(dtype)), name


def test_weights_that_a_gpu_cannot_hold_are_refused(hybrid_folder, monkeypatch):
    """Fault: a traceback from the allocator after minutes of loading."""
    monkeypatch.setattr("lampejo.loader.free_memory", lambda _: 200_000)
    with pytest.raises(UserError, match=r"The weights take 0\.0 GB in bf16; meta has 0\.0 GB free") as caught:
        load_elsewhere(monkeypatch, hybrid_folder)
    assert "--device cpu" in caught.value.remedy


def test_caches_that_a_gpu_cannot_hold_beside_the_weights_are_refused(tmp_path, monkeypatch):
    """Fault: the advised context does not fit either."""
    sizes = {**SIZES, "eos_token_id": 256, "max_position_embeddings": 2**30}
    folder = add_tokenizer(write_target(tmp_path / "Tiny-Long", **sizes))
    monkeypatch.setattr("lampejo.loader.free_memory", lambda _: 2**27)
    with pytest.raises(UserError, match=r"meta has 0\.1 GB left beside weights") as caught:
        load_elsewhere(monkeypatch, folder)
    context = int(caught.value.remedy.split("--context ")[1].split()[0])
    loaded, config = load_elsewhere(monkeypatch, folder, max_context=context)
    assert 2**25 < config.num_pages * config.page_size * loaded.info["kv_bytes_per_token"] < 0.9 * 2**27


def test_an_allocator_that_fails_after_all_is_told_in_words():
    """Fault: estimates were right, and another process was faster."""
    with (
        pytest.raises(UserError, match="meta ran out of memory while the model was loaded"),
        enough_memory(META.device),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory.")


def placed(request: Request, pages: list[int], num_computed: int, slot: int) -> Request:
    request.pages, request.num_computed, request.state = pages, num_computed, RowState(slot)
    return request


@pytest.mark.parametrize("architecture", TINY_TARGETS)
def test_no_step_asks_a_device_for_a_value(architecture, monkeypatch):
    """Faults: a loop that waits for the device in every layer; a tensor made on the CPU beside others on the device;
    types that do not go together in bf16. On "meta" each of them is an error."""
    monkeypatch.setattr(device_ops, "_has_grouped_products", lambda *_: True)
    config = TINY_TARGETS[architecture]
    with torch.device("meta"):
        target, drafter = targets.make_target(config).bfloat16(), DFlash(TINY_DRAFTER).bfloat16()
    runner = Runner(target, drafter, num_pages=9, page_size=32, num_state_slots=4)
    verified, prefilled = make_request(prompt_of(70)), make_request(prompt_of(40))
    rows = [
        ScheduledRow(placed(verified, [3, 1, 2], 69, 1), 1, 5),
        ScheduledRow(placed(prefilled, [5, 6], 0, 2), 40, 0),
    ]
    batch = make_batch(rows, [[1, 2, 3, 4, 5], []], 32, (1,), runner.device)
    out = runner.verify(batch)
    assert (out.logits.shape, out.logits.dtype, out.logits.device.type) == ((7, 97), torch.float32, "meta")
    assert (out.taps.shape, out.taps.dtype) == ((46, 96), torch.bfloat16)
    runner.commit(out, [3, 40], [[], []])
    runner.append_context(out.taps, batch.positions, batch.slots)
    chosen: list[torch.Tensor] = []
    choose = runner._choose_drafts

    def read_at_last(*args: Any) -> torch.Tensor:
        chosen.append(choose(*args))
        return torch.zeros(chosen[0].shape, dtype=torch.long)

    monkeypatch.setattr(runner, "_choose_drafts", read_at_last)
    assert [len(ids) for ids in runner.draft([verified, prefilled], [5, 3])] == [5, 3]
    assert chosen[0].device.type == "meta"


def test_a_value_that_is_asked_for_would_be_noticed():
    """The test above can fail: the reference operations ask."""
    with pytest.raises((NotImplementedError, RuntimeError)):
        ops.reference.experts(*(torch.empty(s, device="meta") for s in [(4, 8), (4, 3), (3, 6, 8), (3, 8, 3)]), 2, True)

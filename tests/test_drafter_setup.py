"""A drafter at start: the trial that finds those made for another model, what is told, and what a window bounds."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from makefiles import write_drafter, write_target
from safetensors.torch import load_file, save_file

from lampejo import ops
from lampejo.cache import BlockView, PagedCache
from lampejo.cli import main
from lampejo.config import EngineConfig
from lampejo.drafter_setup import LEAST_ACCEPTANCE, mismatch
from lampejo.errors import UserError
from lampejo.loader import load_model
from lampejo.ops.cpu import instruction_set
from lampejo.terminal import drafter_line, start_lines
from lampejo.weights import speculators
from published import as_speculators, write
from test_loader import RULES, SIZES, add_tokenizer
from tiny import TINY_DRAFTER, make_drafter


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tokenizer(write_target(tmp_path_factory.mktemp("models") / "Tiny-Chat", **SIZES, eos_token_id=256))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter of the right sizes with weights that have nothing to do with the target."""
    folder = write_drafter(tmp_path_factory.mktemp("drafters") / "stranger", **SIZES, dflash_config=RULES)
    weights = load_file(folder / "model.safetensors")
    save_file({name: -tensor for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def constant(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target that says the same token for ever, and a drafter that knows it: norms of zero make all logits equal."""
    folder = tmp_path_factory.mktemp("constant")
    target = add_tokenizer(write_target(folder / "Constant", **SIZES, eos_token_id=256))
    drafter = write_drafter(folder / "knows", **SIZES, dflash_config=RULES)
    for place, name in ((target, "model.norm.weight"), (drafter, "norm.weight")):
        weights = load_file(place / "model.safetensors")
        weights[name] = torch.zeros_like(weights[name])
        save_file(weights, place / "model.safetensors")
    return target, drafter


def info_of(target: Path, drafter: str | Path, **config: Any) -> dict[str, Any]:
    return load_model(str(target), str(drafter), EngineConfig(**config), None, None)[0].info


@pytest.mark.parametrize("ops_name", ["reference", "auto"])
def test_a_drafter_made_for_another_model_is_reported_at_start(target: Path, stranger: Path, ops_name: str):
    """C10: nothing else would show it, the output is right with any drafter."""
    info = info_of(target, stranger, ops=ops_name)
    length = info["dflash"]["trial_acceptance_length"]
    assert 1 <= length < LEAST_ACCEPTANCE
    assert info["warnings"] == [mismatch("stranger", length)] and "made for another model" in info["warnings"][0]


def test_a_drafter_that_fits_is_not_reported(constant: tuple[Path, Path]):
    """C10: with blocks of 4, three drafts and the bonus token are committed per step."""
    info = info_of(*constant)
    assert info["dflash"]["trial_acceptance_length"] > 3.5 and info["warnings"] == []


def test_the_trial_leaves_nothing_behind(constant: tuple[Path, Path]):
    """The pages of the trial are free again, and answers and statistics are those of a fresh engine."""
    import lampejo

    with lampejo.load(str(constant[0]), str(constant[1]), config=EngineConfig(width=3)) as llm:
        first = llm.generate("abc", max_tokens=8, ignore_eos=True)
        assert first.num_cached_tokens == 0 and len(first.ids) == 8
        llm.engine.pool.check_integrity()
        assert llm.engine.pool.usage == 0 and not llm.engine.has_work


@pytest.mark.parametrize("config", [{"width": 0}, {"max_context": 64}])
def test_no_trial_where_nothing_would_be_learned(target: Path, stranger: Path, config: dict[str, Any]):
    """Plain decoding needs none; a context too short for it has no room."""
    info = info_of(target, stranger, **config)
    assert info["dflash"]["trial_acceptance_length"] is None and info["warnings"] == []


def test_the_packaged_drafter_is_not_tried(monkeypatch: pytest.MonkeyPatch):
    """Load time: it came with its target."""
    monkeypatch.setattr("lampejo.loader.trial", lambda *_: pytest.fail("the packaged drafter was tried"))
    loaded, _ = load_model("smollm2", "auto", EngineConfig(max_context=64), None, None)
    facts = loaded.info["dflash"]
    assert (
        facts["is_packaged"]
        and "in the package" in (drafter_line(loaded.info) or "")
        and start_lines(loaded.info) == []
    )
    assert facts["memory"]["context_per_token"] > 0 and 1e6 < facts["memory"]["weights"] < 40e6


def test_damaged_weights_do_not_end_the_trial_in_a_traceback(target: Path, stranger: Path, tmp_path: Path):
    """C6: the first answer tells what is wrong, as it does without a drafter."""
    broken = add_tokenizer(write_target(tmp_path / "Broken", **SIZES, eos_token_id=256))
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][:] = float("nan")
    save_file(weights, broken / "model.safetensors")
    info = info_of(broken, stranger, ops="reference")
    assert info["dflash"]["trial_acceptance_length"] is None and info["warnings"] == []


def test_what_a_drafter_is_and_takes_is_told_at_start(
    target: Path, stranger: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """M8, C9: name, why it was chosen, blocks, memory of weights and context, the trial; and the warning."""
    code = main(["generate", "abc", "--model", str(target), "--drafter", str(stranger), "--max-tokens", "4"])
    lines = capsys.readouterr().err.splitlines()
    told = next(line for line in lines if line.startswith("lampejo: drafter stranger (given): blocks of 4, "))
    assert "MB and " in told and "bytes per token of context" in told and "tokens per step on a built-in" in told
    assert code == 0 and any(line.startswith("lampejo: warning: stranger commits 1.") for line in lines)


def test_memory_counts_weights_own_parts_and_the_rows_of_a_reduced_head(target: Path, tmp_path: Path):
    """M8: to the byte, on the reference operations."""
    folder = write_drafter(tmp_path / "d", **SIZES, dflash_config=RULES)
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    plain = info_of(target, folder, ops="reference", width=0)["dflash"]["memory"]
    num_weights = sum(tensor.numel() for tensor in weights.values())
    assert plain == {"weights": 4 * num_weights, "context_per_token": 4 * 2 * 1 * 2 * 8}
    saved = as_speculators(config, weights, draft_ids=[1, 5, 9], embedding=torch.ones(260, 32))
    reduced = info_of(target, write(tmp_path / "s", *saved), ops="reference", width=0)["dflash"]["memory"]
    # the embedding, three rows of the target's head, and their three ids in 32 bits
    assert reduced["weights"] == plain["weights"] + 4 * (260 * 32 + 3 * 32 + 3)


def test_a_drafter_named_after_another_model_is_warned_of(target: Path, tmp_path: Path):
    """C3: the user's choice counts, and is told what speaks against it."""
    folder = write_drafter(tmp_path / "Qwen3.5-9B-DFlash", **SIZES, dflash_config=RULES)
    info = info_of(target, folder, width=0)
    assert info["warnings"] == [f"{folder} is published for Qwen/Qwen3.5-9B; the model is Tiny-Chat"]


def test_a_model_of_a_known_target_s_sizes_gets_the_hint(target: Path, monkeypatch: pytest.MonkeyPatch):
    """Fault: a renamed copy decodes without its drafter, and nobody learns that there is one."""
    tiny = tuple(replace(known, sizes=(32, 2, 260)) for known in speculators.SPECULATORS[:1])
    monkeypatch.setattr(speculators, "SPECULATORS", tiny)
    info = info_of(target, "auto")
    assert info["dflash"] is None and "--drafter modal-labs/Qwen3.5-4B-DFlash" in info["warnings"][0]
    with pytest.raises(UserError, match=r"No DFlash drafter is known for Tiny-Chat; if it is .*modal-labs"):
        info_of(target, "dflash")


def test_a_drafter_given_as_a_model_names_its_target():
    """From drafter to target; before anything is fetched."""
    with pytest.raises(UserError, match=r"z-lab/Qwen3\.5-4B-DFlash is a drafter, for Qwen/Qwen3\.5-4B") as caught:
        load_model("z-lab/Qwen3.5-4B-DFlash", "auto", EngineConfig(), None, None)
    assert "--model Qwen/Qwen3.5-4B" in caught.value.remedy


def test_the_mode_that_a_drafter_was_trained_for_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """FORMATS 5: one trained without thinking is weak with it."""
    tiny = tuple(replace(known, sizes=(32, 2, 260)) for known in speculators.SPECULATORS)
    monkeypatch.setattr(speculators, "SPECULATORS", tiny)
    target = add_tokenizer(write_target(tmp_path / "Qwen3-4B", **SIZES, eos_token_id=256))
    write_drafter(tmp_path / "Qwen3-4B-DFlash-b16", **SIZES, dflash_config=RULES)
    info = info_of(target, "auto", width=0)
    assert info["drafter"] == "Qwen3-4B-DFlash-b16"
    assert info["dflash"]["reason"] == (
        "published for Qwen/Qwen3-4B, found beside the model, trained on answers without thinking"
    )


# Windows --------------------------------------------------------------------------------------------------------------


def test_a_window_bounds_what_the_drafter_reads():
    """M8: pages before the window are not read, or their poison would show; a full layer reads them."""
    context, page_size, block = 200, 8, TINY_DRAFTER.block_size
    segment = ops.Segment(0, block, context, list(range(26)))
    embedded, positions = torch.ones(block, TINY_DRAFTER.hidden_size), context + torch.arange(block)
    for window in (9, None):
        config = replace(TINY_DRAFTER, windows=(window, window), causal=(True, False))
        cache = PagedCache(2, 26, page_size, config.num_kv_heads, 8, torch.float32, torch.device("cpu"))
        for part in (cache.k, cache.v):
            part.zero_()[:, : (context - 9 + 1) // page_size] = torch.nan
        view = BlockView(cache, [segment], config.causal, config.windows)
        out = make_drafter(config)(embedded, positions, view)
        assert out.isfinite().all() == (window is not None)


KERNELS = """
import torch
from dataclasses import replace
from lampejo import ops
from lampejo.cache import BlockView, PagedCache
from tiny import TINY_DRAFTER, make_drafter
config = replace(TINY_DRAFTER, windows=(9, 9), causal=(True, False))
drafter = make_drafter(config, packed=True)
cache = PagedCache(2, 26, 32, config.num_kv_heads, 8, torch.float16, torch.device("cpu"))
cache.k.zero_(), cache.v.zero_()
pages = [2_000_000_000] * 24 + [24, 25]  # far pages lie nowhere: to read one is to crash
view = BlockView(cache, [ops.Segment(0, 6, 800, pages)], config.causal, config.windows)
out = drafter(torch.ones(6, 48), 800 + torch.arange(6), view)
print("finite" if out.isfinite().all() else out)
"""


@pytest.mark.skipif(instruction_set() is None, reason="the CPU kernels were not built")
def test_a_window_bounds_what_the_kernels_read():
    """M8: pages before the window are not even looked up."""
    done = subprocess.run([sys.executable, "-c", KERNELS], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "finite\n"), done.stderr

"""Where configurations come from: what can be read wins over what is known, and what cannot be had is told."""

import json

import pytest

from lampejo.errors import UserError
from lampejo.plan.published import TARGETS
from lampejo.plan.sources import find_drafter_for, find_target


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that holds ``files[repo]``, and remembers what was asked for."""
    files: dict[str, dict] = {}
    asked: list[str] = []

    def fetch(repo, revision):
        asked.append(repo if revision is None else f"{repo}@{revision}")
        if repo not in files:
            return None
        path = tmp_path / f"{repo.replace('/', '--')}.json"
        path.write_text(json.dumps(files[repo]))
        return path

    monkeypatch.setattr("lampejo.plan.sources.fetch_config", fetch)
    return files, asked


def small(name="Qwen/Qwen3-4B", **changes):
    return {**TARGETS[name].config, **changes}


def drafter_config(**changes):
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 8, "hidden_size": 2560,
        "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "vocab_size": 151936, "num_target_layers": 36,
        "max_position_embeddings": 40960, "dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 5]}, **changes,
    }  # fmt: skip


def test_a_configuration_of_the_hub_wins_over_the_known_one(hub):
    files, asked = hub
    assert find_target("Qwen/Qwen3-4B").config.num_layers == 36
    files["Qwen/Qwen3-4B"] = small(num_hidden_layers=7)
    found = find_target("Qwen/Qwen3-4B@main")
    assert found.config.num_layers == 7 and found.source == "config.json of Qwen/Qwen3-4B"
    assert asked == ["Qwen/Qwen3-4B", "Qwen/Qwen3-4B@main"]


def test_a_folder_needs_nothing_but_its_config(hub, tmp_path):
    """From the configuration alone; quantised checkpoints have the sizes of the others."""
    folder = tmp_path / "Qwen3-4B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(small(quantization_config={"quant_method": "fp8"})))
    found = find_target(str(folder))
    assert found.config.num_layers == 36 and found.name == "Qwen3-4B" and hub[1] == []
    assert find_drafter_for(found, "auto").name == "z-lab/Qwen3-4B-DFlash-b16"


@pytest.mark.parametrize("name", ["Qwen/Qwen3.5-122B-A10B-FP8", "qwen/qwen3.5-122b-a10b"])
def test_the_fp8_release_has_the_same_sizes(hub, name):
    assert find_target(name).config.num_layers == 48


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ("org/unknown", "not among the configurations that are known"),
        ("org/model:x.gguf", "stand in the file itself"),
        ("nonsense", "Unknown model"),
        ("./nowhere", "does not exist"),
    ],
)
def test_a_target_that_cannot_be_had_is_refused_with_a_remedy(hub, spec, part):
    with pytest.raises(UserError, match=part) as caught:
        find_target(spec)
    assert caught.value.remedy


def test_an_alias_that_was_not_pulled_is_not_fetched_for_a_plan(hub, monkeypatch, tmp_path):
    monkeypatch.setenv("LAMPEJO_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="not in the cache yet"):
        find_target("smollm2")


def test_an_empty_folder_is_refused(hub, tmp_path):
    with pytest.raises(UserError, match=r"has no config\.json"):
        find_target(str(tmp_path))


def test_drafters_come_from_a_folder_the_hub_or_the_table(hub, tmp_path):
    files, _ = hub
    target = find_target("Qwen/Qwen3-4B")
    assert find_drafter_for(target, "none") is None and find_drafter_for(target, "ngram") is None
    assert find_drafter_for(target, "auto").source == "known sizes"
    (tmp_path / "config.json").write_text(json.dumps(drafter_config()))
    assert find_drafter_for(target, str(tmp_path)).config.block_size == 8
    files["z-lab/Qwen3-4B-DFlash-b16"] = drafter_config(block_size=4)
    assert find_drafter_for(target, "auto").config.block_size == 4
    assert find_drafter_for(target, "z-lab/Qwen3-4B-DFlash-b16").config.block_size == 4


def test_a_drafter_that_cannot_be_had_is_refused(hub):
    target, other = find_target("Qwen/Qwen3-4B"), find_target("Qwen/Qwen3-30B-A3B")
    assert find_drafter_for(other, "auto") is None
    for spec, part in [("org/drafter", "not among the drafters"), ("nonsense", "Unknown drafter")]:
        with pytest.raises(UserError, match=part):
            find_drafter_for(target, spec)
    with pytest.raises(UserError, match="No DFlash drafter is known"):
        find_drafter_for(other, "dflash")
    for files in ({}, {"z-lab/Qwen3-4B-DFlash-b16": drafter_config()}):  # known by name, and by its file
        hub[0].update(files)
        with pytest.raises(UserError, match="for a model of other sizes than Qwen/Qwen3-8B"):
            find_drafter_for(find_target("Qwen/Qwen3-8B"), "z-lab/Qwen3-4B-DFlash-b16")

"""Which drafter ``auto`` takes: by the target's name, from where, and what happens where it cannot be had."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGUFValueType
from hub_stand_in import Hub, environment
from makefiles import write_drafter, write_gguf, write_target

from lampejo.errors import UserError
from lampejo.weights import drafters, speculators
from lampejo.weights.checkpoint import open_checkpoint
from lampejo.weights.describe import facts
from lampejo.weights.drafters import Choice, choose_drafter, doubts, look_alikes

TINY = (32, 2, 64)  # what write_target makes


@pytest.fixture(autouse=True)
def tiny_speculators(monkeypatch: pytest.MonkeyPatch) -> None:
    """The published drafters, as if their targets were tiny."""
    tiny = tuple(replace(known, sizes=TINY) for known in speculators.SPECULATORS)
    monkeypatch.setattr(speculators, "SPECULATORS", tiny)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of the hub, in order; it has everything, and nothing is cached."""
    found: list[str] = []

    def locate(spec: str) -> Path:
        found.append(spec)
        return Path("/hub") / spec

    monkeypatch.setattr(drafters, "locate", locate)
    monkeypatch.setattr(drafters.hub, "is_cached", lambda repo: False)
    return found


def choose(spec: Path) -> Choice | None:
    with open_checkpoint(spec) as checkpoint:
        return choose_drafter(checkpoint)


def test_a_folder_is_known_by_its_name_its_config_its_place_in_the_cache_or_its_metadata(
    tmp_path: Path, asked: list[str]
):
    """Fault: a local copy of a known model runs without its drafter."""
    named = write_target(tmp_path / "Qwen3.5-4B")
    recorded = write_target(tmp_path / "my-copy", _name_or_path="Qwen/Qwen3.5-9B")
    snapshots = tmp_path / "models--Qwen--Qwen3.6-35B-A3B" / "snapshots"
    snapshots.mkdir(parents=True)
    cached = write_target(snapshots / ("a" * 40))
    gguf = write_gguf(tmp_path / "model.gguf", general__name=("Qwen3.5 27B", GGUFValueType.STRING))
    for spec, name in (
        (named, "Qwen3.5-4B"), (recorded, "Qwen3.5-9B"), (cached, "Qwen3.6-35B-A3B"), (gguf, "Qwen3.5-27B")
    ):  # fmt: skip
        choice = choose(spec)
        assert choice is not None and choice.name == f"modal-labs/{name}-DFlash"
        assert choice.reason == f"published for Qwen/{name}" and not choice.is_packaged
    assert len(asked) == 4


def test_a_drafter_beside_the_model_or_in_the_cache_is_taken_before_the_network_is_asked(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
):
    """The order of preference: beside the target, then the cache, then Modal's repository, then Z Lab's."""
    target = write_target(tmp_path / "Qwen3.5-4B")
    monkeypatch.setattr(drafters.hub, "is_cached", lambda repo: repo.startswith("z-lab"))
    choice = choose(target)
    assert choice is not None and choice.name == "z-lab/Qwen3.5-4B-DFlash" and asked == ["z-lab/Qwen3.5-4B-DFlash"]
    folder = write_drafter(tmp_path / "Qwen3.5-4B-DFlash")
    choice = choose(target)
    assert choice is not None and choice.place == folder and "beside the model" in choice.reason
    assert len(asked) == 1


def test_the_next_publisher_is_asked_and_then_it_is_an_error_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """C9: never silently plain."""
    target = write_target(tmp_path / "Qwen3.5-4B")
    monkeypatch.setattr(drafters.hub, "is_cached", lambda repo: False)

    def locate(spec: str) -> Path:
        if spec.startswith("modal-labs"):
            raise UserError("No such repository.")
        return Path("/hub")

    monkeypatch.setattr(drafters, "locate", locate)
    choice = choose(target)
    assert choice is not None and choice.name == "z-lab/Qwen3.5-4B-DFlash"

    def refuse(spec: str) -> Path:
        raise UserError(f"Missing config.json of {spec}, and the hub cannot be reached.", "Check the network.")

    monkeypatch.setattr(drafters, "locate", refuse)
    with pytest.raises(UserError, match="modal-labs/Qwen3.5-4B-DFlash is the drafter published for Qwen/Qwen3.5-4B, and it cannot be had") as caught:  # fmt: skip  # noqa: E501, RUF043
        choose(target)
    assert "z-lab/Qwen3.5-4B-DFlash" in caught.value.message and "hub cannot be reached" in caught.value.message
    assert str(tmp_path / "Qwen3.5-4B-DFlash") in caught.value.remedy
    assert "--drafter ngram or --drafter none" in caught.value.remedy


def test_inspect_tells_the_published_drafters(tmp_path: Path):
    """What there is for a model is told without fetching any of it."""
    with open_checkpoint(write_target(tmp_path / "Qwen3.5-4B-FP8")) as checkpoint:
        told = facts(checkpoint, torch.float16)["matching_drafters"]
    assert told == ["modal-labs/Qwen3.5-4B-DFlash", "z-lab/Qwen3.5-4B-DFlash"]


def test_an_unknown_name_gets_none_and_the_hint_what_its_sizes_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A fine-tune may use the drafter of what it was made from, if its user says so."""
    with open_checkpoint(write_target(tmp_path / "My-Own-4B")) as checkpoint:
        assert choose_drafter(checkpoint) is None
        monkeypatch.setattr(speculators, "SPECULATORS", speculators.SPECULATORS[:2])
        hint = look_alikes(checkpoint)
        assert "--drafter modal-labs/Qwen3.5-4B-DFlash or modal-labs/Qwen3.5-9B-DFlash" in hint
        monkeypatch.setattr(speculators, "SPECULATORS", ())
        assert look_alikes(checkpoint) == ""


def test_a_drafter_named_after_another_model_raises_doubts(tmp_path: Path):
    """C3: its own files do not record the target; its name does."""
    with open_checkpoint(write_target(tmp_path / "Qwen3.5-4B")) as checkpoint:
        for right in ("z-lab/Qwen3.5-4B-DFlash", "/data/Qwen3.5-4B-DFlash", "my-drafter"):
            assert doubts(right, checkpoint) is None
        wrong = doubts("z-lab/Qwen3.5-9B-DFlash", checkpoint)
        assert wrong == "z-lab/Qwen3.5-9B-DFlash is published for Qwen/Qwen3.5-9B; the model is Qwen3.5-4B"


# Through the hub's API ------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
from dataclasses import replace
from lampejo.config import EngineConfig
from lampejo.errors import UserError
from lampejo.loader import load_model
from lampejo.weights import speculators
speculators.SPECULATORS = tuple(replace(known, sizes=(32, 2, 260)) for known in speculators.SPECULATORS)
for spec in sys.argv[1:]:
    model, _, drafter = spec.partition(",")
    try:
        info = load_model(model, drafter or "auto", EngineConfig(width=0), None, None)[0].info
        print("LOADED", info["drafter"], "|", info["dflash"] and info["dflash"]["reason"])
    except UserError as error:
        print("ERROR", error)
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """Targets with the names of released ones, and drafters of Modal's for one and of Z Lab's for another."""
    from test_loader import RULES, add_tokenizer

    sizes = {"vocab_size": 260, "hidden_size": 32}
    (tmp_path / "made").mkdir()
    target = add_tokenizer(write_target(tmp_path / "made" / "target", **sizes, eos_token_id=256))
    drafter = write_drafter(tmp_path / "made" / "drafter", **sizes, dflash_config=RULES)
    files = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in (target, drafter)]
    hub = Hub()
    hub.repos = {f"Qwen/{name}": files[0] for name in ("Qwen3.5-4B", "Qwen3.5-9B", "Qwen3.5-27B")}
    hub.repos |= {"modal-labs/Qwen3.5-4B-DFlash": files[1], "z-lab/Qwen3.5-4B-DFlash": files[1]}
    hub.repos |= {"z-lab/Qwen3.5-9B-DFlash": {**files[1], "dflash.py": b"raise SystemExit", "README.md": b""}}
    yield hub
    hub.close()


def ask(hub_url: str, home: Path, *specs: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *specs], env=environment(hub_url, home), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_drafter_of_a_hub_target_is_fetched_by_name_and_later_found_without_a_network(hub: Hub, tmp_path: Path):
    """C9: Modal's, else Z Lab's, else an error; no code of the repository is ever fetched."""
    home = tmp_path / "home"
    specs = ["Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-27B", "Qwen/Qwen3.5-27B,ngram"]
    first, second, third, plain = online = ask(hub.url, home, *specs)
    assert first == "LOADED modal-labs/Qwen3.5-4B-DFlash | published for Qwen/Qwen3.5-4B"
    assert second == "LOADED z-lab/Qwen3.5-9B-DFlash | published for Qwen/Qwen3.5-9B"
    assert third.startswith("ERROR modal-labs/Qwen3.5-27B-DFlash is the drafter published for Qwen/Qwen3.5-27B, and")
    assert "'z-lab/Qwen3.5-27B-DFlash' is neither" in third and "--drafter ngram" in third
    assert plain == "LOADED ngram | None"
    assert "z-lab/Qwen3.5-4B-DFlash" not in hub.repos_fetched and "dflash.py" not in hub.fetched
    offline = ask("http://127.0.0.1:9", home, *specs)
    assert [line.split(" is ")[0] for line in offline] == [line.split(" is ")[0] for line in online]
    assert "the hub cannot be reached" in offline[2]

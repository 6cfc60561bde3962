"""Repositories of the hub, fetched by huggingface_hub from a stand-in on this machine."""

import errno
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hub_stand_in import Hub, environment
from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from makefiles import HF_CONFIG, random_tensors, target_shapes, write_folder, write_gguf

from lampejo.errors import UserError
from lampejo.weights.hub import fetch

FILES = [SimpleNamespace(rfilename=name) for name in ("config.json", "model.safetensors")]


@pytest.fixture
def hub(tmp_path) -> Iterator[Hub]:
    hub = Hub()
    folder = write_folder(tmp_path / "made", random_tensors(target_shapes()), HF_CONFIG, shards=2)
    model = {path.name: path.read_bytes() for path in folder.iterdir()}
    gguf = write_gguf(tmp_path / "x.gguf").read_bytes()
    hub.repos["org/model"] = {
        **model, "tokenizer.json": b"{}", "pytorch_model.bin": b"\x80", "README.md": b"",
        "onnx/model.safetensors": b"x", "consolidated.safetensors": b"x", "modeling_x.py": b"raise SystemExit",
    }  # fmt: skip
    hub.repos["org/one"] = {"model-Q8_0.gguf": gguf, "README.md": b""}
    hub.repos["org/many"] = {"m-Q4_K_M.gguf": gguf, "m-Q8_0.gguf": gguf, "s-00001-of-00002.gguf": gguf}
    hub.repos["org/pickles"] = {"config.json": b"{}", "pytorch_model.bin": b"\x80"}
    yield hub
    hub.close()


def ask(hub_url: str, home: Path, *specs: str, code: str | None = None) -> list[str]:
    """What ``open_checkpoint`` (or other code) says for each spec, in a process that knows only this hub."""
    code = code or (
        "import sys\n"
        "from lampejo.errors import UserError\n"
        "from lampejo.weights.checkpoint import open_checkpoint\n"
        "for spec in sys.argv[1:]:\n"
        "    try:\n"
        "        with open_checkpoint(spec) as c: print('OPEN', c.name, c.format, len(c.tensor_names()), c.path)\n"
        "    except UserError as error: print('ERROR', error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *specs], env=environment(hub_url, home), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_repository_is_fetched_once_and_without_pickles_or_code(hub, tmp_path):
    """O4, and bad input: afterwards it opens without a network too."""
    home = tmp_path / "home"
    online = ask(hub.url, home, "org/model", "org/model@v2", "org/one", "org/many:m-Q8_0.gguf")
    assert online[0].startswith("OPEN org/model safetensors 20 ") and online[1].startswith("OPEN org/model safetensors")
    assert online[2].startswith("OPEN org/one gguf 20") and online[3].startswith("OPEN m-Q8_0 gguf 20")
    assert set(hub.fetched) == {
        "config.json", "tokenizer.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors", "model-Q8_0.gguf", "m-Q8_0.gguf",
    }  # fmt: skip
    hub.fetched.clear()
    assert ask(hub.url, home, "org/model")[0] == online[0] and hub.fetched == []
    offline = ask(
        "http://127.0.0.1:9", home, "org/model", "org/one", "org/many:m-Q8_0.gguf", "org/other", "org/x:y.gguf"
    )
    assert offline[:3] == [online[0], online[2], online[3]]
    assert "Missing config.json, tokenizer.json and *.safetensors of org/other" in offline[3]
    assert "hf download org/other --local-dir" in offline[3]
    assert "Missing y.gguf of org/x" in offline[4]


def test_what_a_repository_lacks_is_told_with_a_remedy(hub, tmp_path):
    """Bad input: unknown names, several GGUF files, parts of one, pickles only."""
    answers = ask(
        hub.url, tmp_path / "home", "org/nothing", "org/model@v9", "org/many", "org/many:no.gguf",
        "org/many:s-00001-of-00002.gguf", "org/pickles",
    )  # fmt: skip
    expected = [
        "'org/nothing' is neither a local path nor a repository", "no revision 'v9'",
        "org/many has 3 GGUF files. Name one: org/many:m-Q4_K_M.gguf", "has no file 'no.gguf'", "part of a split GGUF",
        "never loads pickles",
    ]  # fmt: skip
    assert all(answer.startswith("ERROR") for answer in answers)
    assert [text for text, answer in zip(expected, answers, strict=True) if text not in answer] == []
    assert hub.fetched == []


def test_a_configuration_is_fetched_without_its_weights(hub, tmp_path):
    """For plans: one file, kept for days without a network. Unknown names are told, a missing network is no error."""
    code = (
        "import sys\n"
        "from lampejo.errors import UserError\n"
        "from lampejo.weights.hub import fetch_config\n"
        "for spec in sys.argv[1:]:\n"
        "    repo, _, revision = spec.partition('@')\n"
        "    try: print(fetch_config(repo, revision or None))\n"
        "    except UserError as error: print('ERROR', error)\n"
    )
    home = tmp_path / "home"
    online = ask(hub.url, home, "org/model", "org/one", "org/nothing", "org/model@v9", code=code)
    assert online[0].endswith("config.json") and hub.fetched == ["config.json"]
    assert online[1] == "None"  # a repository of GGUF files has none
    assert "neither a local path nor a repository" in online[2] and "no revision 'v9'" in online[3]
    assert ask("http://127.0.0.1:9", home, "org/model", "org/other", code=code) == [online[0], "None"]


def test_a_full_disk_is_not_the_network(monkeypatch):
    """Fault: "the hub cannot be reached" when there was no room for what it sent."""

    def full_disk(**_: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: SimpleNamespace(siblings=FILES))
    monkeypatch.setattr("huggingface_hub.snapshot_download", full_disk)
    with pytest.raises(UserError, match="No space left on device for org/model") as caught:
        fetch("org/model", None, None, progress=False)
    assert "Make room" in caught.value.remedy


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_bars_are_for_terminals(monkeypatch, terminal):
    """Fault: a log full of bars."""
    shown = []

    def snapshot(**_: object) -> str:
        shown.append(not are_progress_bars_disabled())
        return "folder"

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: SimpleNamespace(siblings=FILES))
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    for progress in (False, True):
        fetch("org/model", None, None, progress)
    assert shown == [False, terminal]
    enable_progress_bars()

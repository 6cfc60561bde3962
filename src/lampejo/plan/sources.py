"""Where the configurations of a plan come from: a file, a folder, the hub, or the table of what is published."""

from dataclasses import dataclass, replace
from pathlib import Path

from lampejo.errors import UserError
from lampejo.models.config import DrafterConfig, ModelConfig
from lampejo.models.drafter_config import drafter_config_from_hf
from lampejo.models.hf_config import model_config_from_hf
from lampejo.plan.precision import Precision, stored_precision
from lampejo.plan.published import published_drafter, published_target
from lampejo.weights.aliases import ALIASES
from lampejo.weights.checkpoint import Checkpoint
from lampejo.weights.drafters import find_drafter
from lampejo.weights.files import read_json
from lampejo.weights.hub import fetch_config
from lampejo.weights.speculators import speculator_for, speculator_named
from lampejo.weights.store import find, model_name, repository, unknown_model


@dataclass(frozen=True)
class Target:
    """``stored``: how the CPU kernels would hold a GGUF; ``embedded``: the folder of a drafter in the package;
    ``source``: where the configuration was read; ``inferred``: what of it no source states."""

    name: str
    config: ModelConfig
    source: str
    inferred: tuple[str, ...] = ()
    stored: Precision | None = None
    embedded: Path | None = None


@dataclass(frozen=True)
class Drafter:
    name: str
    config: DrafterConfig
    source: str
    inferred: tuple[str, ...] = ()


def find_target(spec: str) -> Target:
    """The target that ``spec`` names; of a repository nothing but its ``config.json`` is fetched."""
    path = find(spec)
    if path is not None:
        return _local_target(spec, path)
    if spec in ALIASES:
        raise UserError(f"{spec} is not in the cache yet.", f"Run 'lampejo pull {spec}' first: it is small.")
    named = repository(spec)
    if named is None:
        raise unknown_model(spec)
    repo, revision, file = named
    if file is not None:
        raise UserError(
            f"The sizes of {file} stand in the file itself.", f"Run 'lampejo pull {spec}' first, or plan for {repo}."
        )
    found = fetch_config(repo, revision)
    if found is not None:
        return Target(repo, model_config_from_hf(read_json(found)), f"config.json of {repo}")
    known = published_target(repo)
    if known is None:
        raise UserError(
            f"The hub cannot be reached, and {repo} is not among the configurations that are known without it.",
            "Give a folder that holds its config.json.",
        )
    config = model_config_from_hf(known.config)
    return Target(repo, config, f"known sizes ({known.source})", known.inferred)


def _local_target(spec: str, path: Path) -> Target:
    if path.is_dir() and (path / "config.json").is_file():
        config = model_config_from_hf(read_json(path / "config.json"))
        return Target(model_name(spec, path), config, str(path / "config.json"))
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            raise UserError(f"{path} has no config.json.", "Give the folder of a model, or a .gguf file.")
        path = files[0]
    with Checkpoint(path, model_name(spec, path)) as checkpoint:
        stored = stored_precision(checkpoint, checkpoint.config)
        embedded = find_drafter(checkpoint)
        return Target(checkpoint.name, checkpoint.config, str(path), (), stored, embedded)


def find_drafter_for(target: Target, spec: str) -> Drafter | None:
    """``spec`` is auto, none, ngram, or names a drafter. None: no DFlash drafter takes part."""
    if spec in ("none", "ngram"):
        return None
    if spec not in ("auto", "dflash"):
        return _named_drafter(target, spec)
    if target.embedded is not None:
        return replace(
            _read_drafter(target, target.embedded.name, target.embedded / "config.json"), source="in the package"
        )
    known = speculator_for([target.name], _sizes(target))
    if known is None:
        if spec == "dflash":
            raise UserError(f"No DFlash drafter is known for {target.name}.", "Name one with --drafter.")
        return None
    return _published_or_hub(target, known.repos)


def _named_drafter(target: Target, spec: str) -> Drafter:
    path = find(spec)
    if path is not None:
        if not (path / "config.json").is_file():
            raise UserError(f"{path} has no config.json.", "Give the folder of a DFlash drafter.")
        return _read_drafter(target, path.resolve().name, path / "config.json")
    named = repository(spec)
    if named is None or named[2] is not None:
        raise UserError(
            f"Unknown drafter {spec!r}.", "Give auto, ngram, none, the folder of a DFlash drafter, or its repository."
        )
    return _published_or_hub(target, (named[0],), named[1])


def _published_or_hub(target: Target, repos: tuple[str, ...], revision: str | None = None) -> Drafter:
    for repo in repos:
        found = fetch_config(repo, revision)
        if found is not None:
            return _read_drafter(target, repo, found)
    for repo in repos:
        known, speculator = published_drafter(repo), speculator_named(repo)
        if known is not None and speculator is not None:
            if speculator.sizes != _sizes(target):
                raise _misfit(repo, target)
            return Drafter(repo, known.config(target.config), "known sizes", known.inferred)
    raise UserError(
        f"The hub cannot be reached, and {repos[0]} is not among the drafters that are known without it.",
        "Give a folder that holds its config.json, or --drafter none.",
    )


def _read_drafter(target: Target, name: str, path: Path) -> Drafter:
    config = drafter_config_from_hf(read_json(path))
    if config.tap_size != target.config.hidden_size:
        raise _misfit(name, target)
    return Drafter(name, config, str(path))


def _sizes(target: Target) -> tuple[int, int, int]:
    return target.config.hidden_size, target.config.num_layers, target.config.vocab_size


def _misfit(drafter: str, target: Target) -> UserError:
    return UserError(f"{drafter} was made for a model of other sizes than {target.name}.", "Name one made for it.")

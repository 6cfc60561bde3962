"""Which drafter belongs to a target, and whether one fits it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from lampejo.errors import UserError
from lampejo.models.config import DrafterConfig, ModelConfig
from lampejo.models.drafter_config import SUPPORTED
from lampejo.weights import hub
from lampejo.weights.checkpoint import Checkpoint
from lampejo.weights.drafter_files import read_drafter
from lampejo.weights.files import read_json
from lampejo.weights.speculators import Speculator, speculator_for, speculator_named, speculators_like
from lampejo.weights.store import UnknownModel, locate

# target's name -> folder in the package data, and the sizes (hidden, layers, vocabulary) that the target must have
_EMBEDDED = {"SmolLM2-135M-Instruct": ("smollm2-135m-dflash-proto", (576, 30, 49152))}


@dataclass(frozen=True)
class Choice:
    """A drafter for a target: where it lies, its name and why it was chosen, both for people."""

    place: str | Path
    name: str
    reason: str
    is_packaged: bool = False


def choose_drafter(checkpoint: Checkpoint) -> Choice | None:
    """The drafter that belongs to this target, fetched if need be; None if none is known.

    In order of preference: one in the package data; a folder of a known drafter's name beside the target's own; the
    repositories of the known drafter, those in the cache first. ``UserError`` if a known one cannot be had.
    """
    packaged = find_drafter(checkpoint)
    if packaged is not None:
        return Choice(packaged, packaged.name, "in the package", is_packaged=True)
    known = known_drafter(checkpoint)
    if known is None:
        return None
    reason = f"published for {known.targets[0]}"
    for repo in known.repos:
        beside = checkpoint.path.parent / repo.rpartition("/")[2]
        if (beside / "config.json").is_file():
            return Choice(beside, beside.name, f"{reason}, found beside the model")
    failures: list[str] = []
    for repo in sorted(known.repos, key=lambda repo: not hub.is_cached(repo)):
        try:
            return Choice(locate(repo), repo, reason)
        except UserError as error:
            failures.append(error.message.removesuffix("."))
    raise UserError(
        f"{known.repos[0]} is the drafter {reason}, and it cannot be had: {'; '.join(failures)}.",
        f"Check the network; or put its folder beside the model's, as {checkpoint.path.parent / _folder_name(known)}; "
        "or choose --drafter ngram or --drafter none: slower, with the same output.",
    )


def find_drafter(checkpoint: Checkpoint) -> Path | None:
    """The drafter in the package data that was made for this target, if there is one."""
    for name, (folder, sizes) in _EMBEDDED.items():
        if same_model(name, checkpoint.name) and sizes == _sizes(checkpoint):
            return Path(__file__).parents[1] / "data" / folder
    return None


def known_drafter(checkpoint: Checkpoint) -> Speculator | None:
    """The published drafter of the model that the checkpoint is, by its name or by what its files call it."""
    return speculator_for(_names(checkpoint), _sizes(checkpoint))


def look_alikes(checkpoint: Checkpoint) -> str:
    """For a target without a known drafter: those made for models of its sizes. Maybe it is only its name that is not
    known."""
    like = [known.repos[0] for known in speculators_like(_sizes(checkpoint))]
    return f"; if it is what they were made for, give --drafter {' or '.join(like)}" if like else ""


def doubts(spec: str | Path, checkpoint: Checkpoint) -> str | None:
    """What speaks against a drafter that the user named, if its name says that it belongs to another model."""
    named, known = speculator_named(str(spec)), known_drafter(checkpoint)
    if named is None or named is known:
        return None
    return f"{spec} is published for {named.targets[0]}; the model is {checkpoint.name}"


def _sizes(checkpoint: Checkpoint) -> tuple[int, int, int]:
    config = checkpoint.config
    return config.hidden_size, config.num_layers, config.vocab_size


def _names(checkpoint: Checkpoint) -> list[str]:
    """What the checkpoint is called: by the user, by the hub's cache, by its own files."""
    names: list[object] = [checkpoint.name]
    names += [part.replace("--", "/") for part in checkpoint.path.parts if part.startswith("models--")]
    if checkpoint.folder is not None:
        names.append(read_json(checkpoint.folder / "config.json").get("_name_or_path"))
    names.append(checkpoint.metadata.get("general.name"))
    return [name for name in names if isinstance(name, str)]


def _folder_name(known: Speculator) -> str:
    return known.repos[0].rpartition("/")[2]


def same_model(recorded: str, name: str) -> bool:
    """Whether ``name`` (a repository, folder or file name) is the model that a drafter recorded as its target."""

    def letters(text: str) -> str:
        return re.sub(r"[^a-z0-9]", "", text.lower())

    return letters(recorded.rpartition("/")[2]) in letters(name)


def open_drafter(
    spec: str | Path,
    target: ModelConfig,
    target_name: str,
    target_layer_ids: tuple[int, ...] | None = None,
    eos_ids: Sequence[int] = (),
) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Read a drafter for ``target``: its configuration, and its tensors by the names of ``models.dflash``.

    ``target_name`` (``Checkpoint.name``; empty if unknown) is held against the one that the drafter records, and the
    target's ``eos_ids`` against its mask token.
    ``UserError`` for every other family, for tensors too many, too few or misshapen, and for another target's drafter.
    """
    try:
        path = locate(spec)
    except UnknownModel:
        raise UserError(
            f"Unknown drafter {str(spec)!r}.",
            "Give auto, ngram, dflash or none, the folder or .gguf file of a DFlash drafter, or its repository "
            "(org/name).",
        ) from None

    def check(config: DrafterConfig) -> None:
        if config.mask_token_id in eos_ids:
            raise UserError(f"{path}: mask_token_id {config.mask_token_id} ends the target's answers.", SUPPORTED)
        _check_fits(config, target, target_name)

    return read_drafter(path, target.vocab_size, target_layer_ids, check)


def _check_fits(config: DrafterConfig, target: ModelConfig, target_name: str) -> None:
    num_layers = target.num_layers if config.num_target_layers is None else config.num_target_layers
    pairs = [
        ("hidden size", config.tap_size, target.hidden_size),
        ("number of target layers", num_layers, target.num_layers),
        ("vocabulary", config.vocab_size, target.vocab_size),
    ]
    name = target_name or "the model"
    for what, found, expected in pairs:
        if found != expected:
            raise UserError(
                f"The drafter does not fit {name}: its {what} is {found}, the model's is {expected}.",
                "Choose the drafter made for this model, or --drafter none.",
            )
    if max(config.target_layer_ids) >= target.num_layers:
        raise UserError(
            f"The drafter does not fit {name}: it taps layer {max(config.target_layer_ids)}, the model's layers are 0 "
            f"to {target.num_layers - 1}.",
            "Choose the drafter made for this model, or --drafter none.",
        )
    if config.hidden_size != target.hidden_size and not (config.own_embedding and config.own_head):
        raise UserError(
            f"The drafter's hidden size is {config.hidden_size}, and it has no embedding and head of its own, while "
            f"those of {name} are for {target.hidden_size}.",
            "Choose the drafter made for this model, or --drafter none.",
        )
    if config.target_name and target_name and not same_model(config.target_name, target_name):
        raise UserError(
            f"The drafter was made for {config.target_name}, the model is {target_name}.",
            "Choose the drafter made for this model; if it is that one, give its file or folder that name.",
        )

"""Finds and opens drafters: strict about their layout, and about the target that they are for."""

import re
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from lampejo.errors import UserError
from lampejo.models.config import DrafterConfig, ModelConfig
from lampejo.models.drafter_config import drafter_config_from_hf, refuse_other_drafters
from lampejo.weights.checkpoint import Checkpoint
from lampejo.weights.files import read_json
from lampejo.weights.layout import compare_tensors
from lampejo.weights.safetensors import SafetensorsFolder
from lampejo.weights.store import UnknownModel, locate

# target's name -> folder in the package data, and the sizes (hidden, layers, vocabulary) that the target must have
_EMBEDDED = {"SmolLM2-135M-Instruct": ("smollm2-135m-dflash-proto", (576, 30, 49152))}
_REMEDY = "Supported: DFlash v1 in z-lab layout, optionally with our draft vocabulary and Markov head."
# Tensors that give away a newer family: part of a name -> the family.
_FAMILIES = {
    "attention_conv": "DFlash2",
    "mlp_conv": "DFlash2",
    "candidate_selector": "DFlash2",
    "confidence_head": "DSpark",
    "layer_fusion": "DFly",
    "d2t": "speculators",
    "t2d": "speculators",
    "verifier_norm": "speculators",
}


def find_drafter(checkpoint: Checkpoint) -> Path | None:
    """The drafter in the package data that was made for this target, if there is one."""
    config = checkpoint.config
    for name, (folder, sizes) in _EMBEDDED.items():
        if same_model(name, checkpoint.name) and sizes == (config.hidden_size, config.num_layers, config.vocab_size):
            return Path(__file__).parents[1] / "data" / folder
    return None


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
    """Read a drafter for ``target``; tensors by their names in the file, in its own types.

    ``target_name`` (``Checkpoint.name``; empty if unknown) is held against the one that the drafter records, and the
    target's ``eos_ids`` against its mask token.
    ``UserError`` for every other family, for tensors too many, too few or misshapen, and for another target's drafter.
    """
    try:
        folder = locate(spec)
    except UnknownModel:
        raise UserError(
            f"Unknown drafter {str(spec)!r}.",
            "Give auto, ngram, dflash or none, the folder of a DFlash drafter, or its repository (org/name).",
        ) from None
    if not folder.is_dir():
        raise UserError(f"{folder} is not a drafter's folder.", _REMEDY)
    raw = read_json(folder / "config.json")
    refuse_other_drafters(raw)
    weights = SafetensorsFolder(folder)
    try:
        shapes = {name: entry.shape for name, entry in weights.tensors.items()}
        _refuse_families(folder, shapes)
        config = drafter_config_from_hf(raw, target_layer_ids)
        if config.mask_token_id in eos_ids:
            raise UserError(f"{folder}: mask_token_id {config.mask_token_id} ends the target's answers.", _REMEDY)
        _check_fits(config, target, target_name)
        compare_tensors(str(folder), "DFlash drafter", _REMEDY, shapes, drafter_shapes(config))
        for name in shapes:
            dtype = weights.tensors[name].type
            if dtype not in (("I32", "I64") if name == "draft_token_ids" else ("BF16", "F16", "F32")):
                raise UserError(f"{folder}: tensor {name!r} has type {dtype}, which is not supported.", _REMEDY)
        tensors = {name: weights.read(name) for name in shapes}
    finally:
        weights.close()
    _check_draft_ids(folder, config, tensors)
    return config, tensors


def drafter_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a drafter of this configuration has."""
    hidden, head = config.hidden_size, config.head_dim
    queries, keys = config.num_heads * head, config.num_kv_heads * head
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(config.num_layers):
        layer = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (head,),
            "self_attn.k_norm": (head,),
            "mlp.gate_proj": (config.intermediate_size, hidden),
            "mlp.up_proj": (config.intermediate_size, hidden),
            "mlp.down_proj": (hidden, config.intermediate_size),
        }
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    if config.draft_vocab_size is not None:
        shapes["draft_token_ids"] = (config.draft_vocab_size,)
        if config.markov_rank is not None:
            shapes["markov_head.predecessor.weight"] = (config.draft_vocab_size + 1, config.markov_rank)
            shapes["markov_head.successor.weight"] = (config.draft_vocab_size, config.markov_rank)
    return shapes


def _refuse_families(folder: Path, names: dict[str, tuple[int, ...]]) -> None:
    for name in names:
        for mark, family in _FAMILIES.items():
            if mark in name:
                raise UserError(f"{folder} is a drafter of the {family} family (tensor {name!r}).", _REMEDY)
        if "markov" in name and not name.startswith(("markov_head.predecessor.", "markov_head.successor.")):
            raise UserError(f"{folder} is a drafter of the DSpark family (tensor {name!r}).", _REMEDY)


def _check_fits(config: DrafterConfig, target: ModelConfig, target_name: str) -> None:
    pairs = [
        ("hidden size", config.hidden_size, target.hidden_size),
        ("number of target layers", config.num_target_layers, target.num_layers),
        ("vocabulary", config.vocab_size, target.vocab_size),
    ]
    for what, found, expected in pairs:
        if found != expected:
            name = target_name or "the model"
            raise UserError(
                f"The drafter does not fit {name}: its {what} is {found}, the model's is {expected}.",
                "Choose the drafter made for this model, or --drafter none.",
            )
    if config.target_name and target_name and not same_model(config.target_name, target_name):
        raise UserError(
            f"The drafter was made for {config.target_name}, the model is {target_name}.",
            "Choose the drafter made for this model; if it is that one, give its file or folder that name.",
        )


def _check_draft_ids(folder: Path, config: DrafterConfig, tensors: dict[str, Tensor]) -> None:
    if config.draft_vocab_size is None:
        return
    ids = tensors["draft_token_ids"]
    ascending = not ids.is_floating_point() and bool((ids[1:] > ids[:-1]).all())
    if not ascending or int(ids[0]) < 0 or int(ids[-1]) >= config.vocab_size:
        raise UserError(
            f"{folder}: draft_token_ids must be ascending ids below the vocabulary, {config.vocab_size}.",
            "The drafter is damaged: fetch it again.",
        )

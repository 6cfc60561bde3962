"""A drafter's files, whatever their layout: configuration, and tensors by the names of ``models.dflash``."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lampejo.errors import UserError
from lampejo.models.config import DrafterConfig
from lampejo.models.drafter_config import SUPPORTED, drafter_config_from_hf, refuse_other_drafters
from lampejo.models.gguf_drafter_config import drafter_config_from_gguf, drafter_tensor
from lampejo.weights.files import Entry, damaged, read_json
from lampejo.weights.gguf import SUPPORTED as GGUF_TYPES
from lampejo.weights.gguf import GgufFile, dequantised
from lampejo.weights.layout import compare_tensors
from lampejo.weights.safetensors import SafetensorsFolder

# Tensors that give away a newer family: part of a name -> the family.
_FAMILIES = {
    "attention_conv": "DFlash2",
    "mlp_conv": "DFlash2",
    "candidate_selector": "DFlash2",
    "confidence_head": "DSpark",
    "prefix_gru": "Domino",
    "layer_fusion": "DFly",
    "fusion_weights": "DFlare",
}
# What the ``speculators`` library keeps for training: copies of the target's last norm and head.
_FOR_TRAINING = ("verifier_norm.weight", "verifier_lm_head.weight")
_FLOATS, _WHOLE = ("BF16", "F16", "F32"), ("I32", "I64")


class _DrafterGguf(GgufFile):
    types = (*GGUF_TYPES, *_WHOLE)  # d2t holds ids


def read_drafter(
    path: Path, vocab_size: int, target_layer_ids: tuple[int, ...] | None, check: Callable[[DrafterConfig], None]
) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Configuration and tensors of the drafter in ``path``, a folder or a GGUF file.

    ``vocab_size`` is the target's, for files that do not tell; ``check`` sees the configuration before any tensor is
    read. ``UserError`` for every other family, and for tensors too many, too few or misshapen.
    """
    if path.is_dir() and not (path / "config.json").is_file() and len(files := list(path.glob("*.gguf"))) == 1:
        path = files[0]
    if path.is_dir():
        raw = read_json(path / "config.json")
        refuse_other_drafters(raw)
        folder = SafetensorsFolder(path)
        try:
            return _read_folder(path, folder, raw, target_layer_ids, check)
        finally:
            folder.close()
    if path.suffix != ".gguf":
        raise UserError(f"{path} is not a drafter's folder.", SUPPORTED)
    file = _DrafterGguf(path)
    try:
        if target_layer_ids is not None:
            raise UserError(f"{path} tells its target's layers itself.", "Leave out --target-layer-ids.")
        return _read_gguf(path, file, vocab_size, check)
    finally:
        file.close()


def _read_folder(
    path: Path,
    folder: SafetensorsFolder,
    raw: dict[str, object],
    target_layer_ids: tuple[int, ...] | None,
    check: Callable[[DrafterConfig], None],
) -> tuple[DrafterConfig, dict[str, Tensor]]:
    entries = dict(folder.tensors)
    _refuse_families(path, entries)
    config = drafter_config_from_hf(raw, target_layer_ids)
    in_speculators_layout = "speculators_model_type" in raw
    maps: dict[str, Entry] = {}
    if in_speculators_layout:
        config = _with_own_parts(config, entries)
        maps = {name: entries.pop(name) for name in ("d2t", "t2d") if name in entries}
        for name in _FOR_TRAINING:
            entries.pop(name, None)
    check(config)
    expected = drafter_shapes(config)
    if in_speculators_layout and config.draft_vocab_size is not None:
        del expected["draft_token_ids"]
        wanted = {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
        found = {name: entry.shape for name, entry in maps.items()}
        compare_tensors(str(path), "vocabulary of a speculators drafter", SUPPORTED, found, wanted)
    _compare(path, entries, expected)
    for name, entry in entries.items():
        if entry.type not in (_WHOLE if name == "draft_token_ids" else _FLOATS):
            raise UserError(f"{path}: tensor {name!r} has type {entry.type}, which is not supported.", SUPPORTED)
    tensors = {name: folder.read(name) for name in entries}
    if in_speculators_layout and config.draft_vocab_size is not None:
        tensors["draft_token_ids"] = _draft_ids(path, folder, maps)
    _check_draft_ids(path, config, tensors)
    return config, tensors


def _read_gguf(
    path: Path, file: GgufFile, vocab_size: int, check: Callable[[DrafterConfig], None]
) -> tuple[DrafterConfig, dict[str, Tensor]]:
    config = drafter_config_from_gguf(file.metadata, {n: e.shape for n, e in file.tensors.items()}, vocab_size)
    theirs = {drafter_tensor(name): name for name in file.tensors}
    if len(theirs) < len(file.tensors):
        raise damaged(path, "it has a tensor twice")
    entries = {ours: file.tensors[name] for ours, name in theirs.items()}
    config = _with_own_parts(config, entries)
    check(config)
    _compare(path, entries, drafter_shapes(config))
    tensors = {ours: _read_gguf_tensor(path, file, name) for ours, name in theirs.items()}
    _check_draft_ids(path, config, tensors)
    return config, tensors


def _read_gguf_tensor(path: Path, file: GgufFile, name: str) -> Tensor:
    entry = file.tensors[name]
    rows = file.read_rows(name, 0, entry.num_rows)
    whole = {"I32": torch.int32, "I64": torch.int64}.get(entry.type)
    if (whole is not None) != name.startswith("d2t"):
        raise UserError(f"{path}: tensor {name!r} has type {entry.type}, which is not supported.", SUPPORTED)
    return (rows.view(whole) if whole is not None else dequantised(entry.type, rows)).view(entry.shape)


def _with_own_parts(config: DrafterConfig, entries: dict[str, Entry]) -> DrafterConfig:
    return replace(config, own_embedding="embed_tokens.weight" in entries, own_head="lm_head.weight" in entries)


def _compare(path: Path, entries: dict[str, Entry], expected: dict[str, tuple[int, ...]]) -> None:
    compare_tensors(
        str(path), "DFlash drafter", SUPPORTED, {name: entry.shape for name, entry in entries.items()}, expected
    )


def drafter_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a drafter of this configuration has."""
    hidden, head = config.hidden_size, config.head_dim
    queries, keys = config.num_heads * head, config.num_kv_heads * head
    num_draft_ids = config.draft_vocab_size or config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * config.tap_size),
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
    if config.own_embedding:
        shapes["embed_tokens.weight"] = (config.vocab_size, hidden)
    if config.own_head:
        shapes["lm_head.weight"] = (num_draft_ids, hidden)
    if config.draft_vocab_size is not None:
        shapes["draft_token_ids"] = (config.draft_vocab_size,)
        if config.markov_rank is not None:
            shapes["markov_head.predecessor.weight"] = (config.draft_vocab_size + 1, config.markov_rank)
            shapes["markov_head.successor.weight"] = (config.draft_vocab_size, config.markov_rank)
    return shapes


def _refuse_families(path: Path, entries: dict[str, Entry]) -> None:
    for name in entries:
        for mark, family in _FAMILIES.items():
            if mark in name:
                raise UserError(f"{path} is a drafter of the {family} family (tensor {name!r}).", SUPPORTED)
        if "markov" in name and not name.startswith(("markov_head.predecessor.", "markov_head.successor.")):
            raise UserError(f"{path} is a drafter of the DSpark family (tensor {name!r}).", SUPPORTED)


def _draft_ids(path: Path, folder: SafetensorsFolder, maps: dict[str, Entry]) -> Tensor:
    """Target ids from the ``speculators`` library's maps: ``d2t`` [draft ids] holds target id minus draft id, ``t2d``
    [target ids] tells which target ids have a draft id."""
    for name, types in (("d2t", _WHOLE), ("t2d", ("BOOL", "U8", "I8", *_WHOLE))):
        if maps[name].type not in types:
            raise UserError(f"{path}: tensor {name!r} has type {maps[name].type}, which is not supported.", SUPPORTED)
    ids = folder.read("d2t").long() + torch.arange(maps["d2t"].shape[0])
    known = folder.read("t2d") if maps["t2d"].type in _WHOLE else folder.read_rows("t2d", 0, maps["t2d"].num_rows)
    if not torch.equal(known.flatten().nonzero().flatten(), ids):
        raise damaged(path, "its maps d2t and t2d contradict each other")
    return ids.int()


def _check_draft_ids(path: Path, config: DrafterConfig, tensors: dict[str, Tensor]) -> None:
    if config.draft_vocab_size is None:
        return
    ids = tensors["draft_token_ids"]
    ascending = not ids.is_floating_point() and bool((ids[1:] > ids[:-1]).all())
    if not ascending or int(ids[0]) < 0 or int(ids[-1]) >= config.vocab_size:
        raise UserError(
            f"{path}: draft_token_ids must be ascending ids below the vocabulary, {config.vocab_size}.",
            "The drafter is damaged: fetch it again.",
        )

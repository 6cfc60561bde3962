"""What a DFlash drafter's ``config.json`` says, read strictly.

A wrong guess here never breaks the output, it only lowers the acceptance, and nobody sees why.
"""

from collections.abc import Mapping
from typing import Any

from lampejo.errors import UserError
from lampejo.models.config import DrafterConfig, Keys, checked, rope_from_hf, shorten

NEWER_DRAFTERS = {"dflash2": "DFlash2", "dspark": "DSpark", "domino": "Domino", "dfly": "DFly"}


def drafter_config_from_hf(config: Mapping[str, Any], target_layer_ids: tuple[int, ...] | None = None) -> DrafterConfig:
    """Translate the ``config.json`` of a DFlash v1 drafter (z-lab layout, and our extension of it), strictly.

    ``target_layer_ids`` fills in for a file that does not record them. ``UserError`` names the key or the family.
    """
    refuse_other_drafters(config)
    inner = config.get("dflash_config") or {}
    if not isinstance(inner, Mapping):
        raise UserError("config.json: 'dflash_config' must be an object.", "The file is damaged.")
    for key in inner.keys() & config.keys():
        if inner[key] != config[key]:
            raise UserError(
                f"config.json: {key!r} is {shorten(config[key])} at top level, {shorten(inner[key])} in dflash_config.",
                "Ask its publisher which is right.",
            )
    keys = Keys({**config, **inner}, "The drafter's config.json")
    for key in ("attention_bias", "sample_from_anchor"):
        if keys.flag(key):
            raise keys.unsupported(key, "Choose a DFlash v1 drafter.")
    if keys.values.get("hidden_act", "silu") != "silu":
        raise keys.unsupported("hidden_act", "Choose a DFlash v1 drafter.")
    vocab_size, num_layers = keys.whole("vocab_size"), keys.whole("num_hidden_layers")
    windows = _windows(keys, num_layers)
    is_causal = keys.flag("is_causal") if keys.has("is_causal") else None
    draft_vocab_size = keys.whole("draft_vocab_size") if keys.has("draft_vocab_size") else None
    if draft_vocab_size is not None and draft_vocab_size > vocab_size:
        raise keys.bad("draft_vocab_size", draft_vocab_size, f"at most the vocabulary, {vocab_size}")
    markov_rank = keys.whole("markov_rank") if keys.has("markov_rank") else None
    if markov_rank is not None and draft_vocab_size is None:
        raise keys.unsupported("markov_rank", "It needs 'draft_vocab_size' beside it.")
    target_name = keys.values.get("target")
    if target_name is not None and not isinstance(target_name, str):
        raise keys.bad("target", target_name, "a model's name")
    num_target_layers = keys.whole("num_target_layers")
    return checked(
        DrafterConfig(
            block_size=keys.whole("block_size", least=2),
            mask_token_id=_mask_token_id(keys, vocab_size),
            target_layer_ids=_target_layer_ids(keys, num_target_layers, target_layer_ids),
            num_target_layers=num_target_layers,
            hidden_size=keys.whole("hidden_size"),
            intermediate_size=keys.whole("intermediate_size"),
            num_layers=num_layers,
            num_heads=keys.whole("num_attention_heads"),
            num_kv_heads=keys.whole("num_key_value_heads"),
            head_dim=keys.whole("head_dim"),
            rms_norm_eps=keys.number("rms_norm_eps"),
            rope=rope_from_hf(keys, keys.whole("max_position_embeddings"), None),
            vocab_size=vocab_size,
            windows=windows,
            causal=tuple(window is not None if is_causal is None else is_causal for window in windows),
            draft_vocab_size=draft_vocab_size,
            markov_rank=markov_rank,
            target_name=target_name,
        ),
        "The drafter's config.json",
    )


def refuse_other_drafters(config: Mapping[str, Any]) -> None:
    """``UserError`` naming the family, unless this is the configuration of a DFlash v1 drafter in z-lab layout."""
    remedy = "Supported: DFlash v1 in z-lab layout (architectures ['DFlashDraftModel'], model_type 'qwen3')."
    inner = config.get("dflash_config")
    merged = {**config, **(inner if isinstance(inner, Mapping) else {})}
    if "speculators_model_type" in config:
        kind = shorten(config["speculators_model_type"])
        raise UserError(f"This drafter is in the speculators layout (speculators_model_type {kind}).", remedy)
    architectures = config.get("architectures") or []
    names = [str(name) for name in architectures] if isinstance(architectures, list) else [str(architectures)]
    hints = " ".join([*names, str(config.get("model_type")), str(merged.get("projector_type"))]).lower()
    for mark, family in NEWER_DRAFTERS.items():
        if mark in hints:
            raise UserError(f"This drafter is of the {family} family.", remedy)
    for key, family in (("layer_fusion", "DFly"), ("candidate_selector", "DFlash2"), ("confidence_head", "DSpark")):
        if merged.get(key):
            raise UserError(f"This drafter is of the {family} family ({key!r} in its config.json).", remedy)
    if "DFlashDraftModel" not in names or config.get("model_type") != "qwen3":
        found = f"architectures {shorten(names)}, model_type {shorten(config.get('model_type'))}"
        raise UserError(f"This is not a DFlash drafter: {found}.", remedy)
    if merged.get("projector_type") not in (None, "dflash"):
        raise UserError(f"Projector type {shorten(merged['projector_type'])} of the drafter is not supported.", remedy)


def _windows(keys: Keys, num_layers: int) -> tuple[int | None, ...]:
    """Per layer: the window of its attention over the context, or None."""
    types = keys.values.get("layer_types")
    if types is None:
        if keys.flag("use_sliding_window"):
            raise UserError(f"{keys.where} has 'use_sliding_window' but lacks the key 'layer_types'.", "Add the key.")
        return (None,) * num_layers
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in known for kind in types):
        raise keys.bad("layer_types", types, f"a list of {num_layers} of {' and '.join(known)}")
    if known[1] not in types:
        return (None,) * num_layers
    if not keys.flag("use_sliding_window", True):
        raise UserError(
            f"{keys.where}: 'use_sliding_window' is false, yet 'layer_types' has sliding_attention.",
            "Ask its publisher which is right.",
        )
    window = keys.whole("sliding_window")
    return tuple(window if kind == known[1] else None for kind in types)


def _mask_token_id(keys: Keys, vocab_size: int) -> int:
    mask = keys.whole("mask_token_id", least=0)
    if mask >= vocab_size:
        raise keys.bad("mask_token_id", mask, f"below the vocabulary size, {vocab_size}")
    for key in ("eos_token_id", "pad_token_id"):
        if mask in keys.ids(key):
            raise keys.bad("mask_token_id", mask, f"another token than {key!r}")
    return mask


def _target_layer_ids(keys: Keys, num_layers: int, given: tuple[int, ...] | None) -> tuple[int, ...]:
    ids = keys.values.get("target_layer_ids")
    if ids is None and given is None:
        raise UserError(
            f"{keys.where} lacks the key 'target_layer_ids': which layers of the target feed the drafter.",
            "Give them with --target-layer-ids, as its publisher states them.",
        )
    if ids is not None and given is not None and list(given) != ids:
        raise UserError(
            f"{keys.where} has 'target_layer_ids' {ids}, but {list(given)} were given.", "Leave out --target-layer-ids."
        )
    ids = list(given) if ids is None and given is not None else ids
    if (
        not isinstance(ids, list)
        or not ids
        or any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < num_layers for i in ids)
        or len(set(ids)) != len(ids)
    ):
        raise keys.bad("target_layer_ids", ids, f"different layer ids from 0 to {num_layers - 1}")
    return tuple(ids)

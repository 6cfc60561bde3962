"""What a DFlash drafter's ``config.json`` says, read strictly: z-lab's layout with our extension of it, and that of the
``speculators`` library (llama.cpp's GGUF: ``gguf_drafter_config.py``).

A wrong guess here never breaks the output, it only lowers the acceptance, and nobody sees why.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lampejo.errors import UserError
from lampejo.models.config import DrafterConfig, Keys, checked, shorten
from lampejo.models.hf_config import rope_from_hf

SUPPORTED = (
    "Supported: DFlash v1 in z-lab layout (optionally with our draft vocabulary and Markov head), in that of the "
    "speculators library, and llama.cpp's GGUF of architecture 'dflash'."
)
NEWER_DRAFTERS = {"dflash2": "DFlash2", "dspark": "DSpark", "domino": "Domino", "dfly": "DFly", "dflare": "DFlare"}
# Keys that give a newer family away -> the family.
_FAMILY_KEYS = {
    "layer_fusion": "DFly", "candidate_selector": "DFlash2", "selector_rank": "DFlash2", "conv_kernel_size": "DFlash2",
    "confidence_head": "DSpark", "enable_confidence_head": "DSpark", "dspark_config": "DSpark",
}  # fmt: skip
# What would change the computation, and the values that do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_sink_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "use_swa": (False,),
    "is_neox_style": (True,),
    "shift_label": (False,),
    "input_embedding_scale": (1.0,),
    "output_multiplier": (1.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (1.0,),
}
FULL, SLIDING = "full_attention", "sliding_attention"


def drafter_config_from_hf(config: Mapping[str, Any], target_layer_ids: tuple[int, ...] | None = None) -> DrafterConfig:
    """Translate a drafter's ``config.json``, strictly.

    ``target_layer_ids`` (0-based) fills in for a file that does not record them. ``UserError`` names the key or the
    family. Whether the drafter has an embedding and a head of its own is for its tensors to say.
    """
    refuse_other_drafters(config)
    if "speculators_model_type" in config:
        return _read(_from_speculators(config), target_layer_ids)
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
    keys.whole("num_target_layers")
    markov_rank = keys.whole("markov_rank") if keys.has("markov_rank") else None
    if markov_rank is not None and not keys.has("draft_vocab_size"):
        raise keys.unsupported("markov_rank", "It needs 'draft_vocab_size' beside it.")
    return _read(keys, target_layer_ids)


def _from_speculators(config: Mapping[str, Any]) -> Keys:
    """The ``speculators`` library's words in z-lab's.

    Its layer ids count the embedding as layer 0. Its full layers are bidirectional in the block whatever it says of the
    sliding ones. (In training its windows begin at the anchor, so that later rows of a block see a few positions more
    than |q - k| < window gives them; engines that serve it do as we do.)
    """
    outer = Keys(config, "The drafter's config.json")
    layers = outer.need("transformer_layer_config")
    if not isinstance(layers, Mapping):
        raise outer.bad("transformer_layer_config", layers, "an object")
    for key in ("block_size", "mask_token_id"):
        outer.need(key)
    taps = outer.values.get("aux_hidden_state_layer_ids")
    if taps is not None:
        if not isinstance(taps, list) or not all(type(i) is int and i >= 1 for i in taps):
            raise outer.bad("aux_hidden_state_layer_ids", taps, "a list of layer ids, each the layer's plus one")
        taps = [i - 1 for i in taps]
    types = layers.get("layer_types")
    if isinstance(types, list) and SLIDING in types:
        outer.need("sliding_window_non_causal")
    draft_vocab_size = config.get("draft_vocab_size")
    names = ("block_size", "mask_token_id", "target_hidden_size", "sample_from_anchor", *_NEUTRAL)
    return Keys(
        {
            **layers,
            **{key: config[key] for key in names if key in config},
            "draft_vocab_size": None if draft_vocab_size == layers.get("vocab_size") else draft_vocab_size,
            "markov_rank": None,
            "num_target_layers": None,
            "target_layer_ids": taps,
            "is_causal": False if outer.flag("sliding_window_non_causal") else None,
            "target": _verifier(config),
        },
        outer.where,
    )


def _verifier(config: Mapping[str, Any]) -> str | None:
    """The repository that a ``speculators`` file says it was made for; a path of its trainer's disk says nothing."""
    about = config.get("speculators_config")
    verifier = about.get("verifier") if isinstance(about, Mapping) else None
    name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    return name if isinstance(name, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", name) else None


def _read(keys: Keys, given_layer_ids: tuple[int, ...] | None) -> DrafterConfig:
    """``keys`` in z-lab's words."""
    for key, neutral in _NEUTRAL.items():
        if keys.has(key) and keys.values[key] not in neutral:
            raise keys.unsupported(key, "Choose a DFlash v1 drafter without it.")
    vocab_size, num_layers = keys.whole("vocab_size"), keys.whole("num_hidden_layers")
    windows = windows_of(keys, num_layers)
    draft_vocab_size = keys.whole("draft_vocab_size") if keys.has("draft_vocab_size") else None
    if draft_vocab_size is not None and draft_vocab_size > vocab_size:
        raise keys.bad("draft_vocab_size", draft_vocab_size, f"at most the vocabulary, {vocab_size}")
    target_name = keys.values.get("target")
    if target_name is not None and not isinstance(target_name, str):
        raise keys.bad("target", target_name, "a model's name")
    num_target_layers = keys.whole("num_target_layers") if keys.has("num_target_layers") else None
    hidden_size = keys.whole("hidden_size")
    return checked(
        DrafterConfig(
            block_size=keys.whole("block_size", least=2),
            mask_token_id=checked_mask(keys, vocab_size),
            target_layer_ids=_target_layer_ids(keys, num_target_layers, given_layer_ids),
            num_target_layers=num_target_layers,
            hidden_size=hidden_size,
            intermediate_size=keys.whole("intermediate_size"),
            num_layers=num_layers,
            num_heads=keys.whole("num_attention_heads"),
            num_kv_heads=keys.whole("num_key_value_heads"),
            head_dim=keys.whole("head_dim"),
            rms_norm_eps=keys.number("rms_norm_eps"),
            rope=rope_from_hf(keys, keys.whole("max_position_embeddings"), None),
            vocab_size=vocab_size,
            windows=windows,
            causal=causality(windows, keys.flag("is_causal") if keys.has("is_causal") else None),
            draft_vocab_size=draft_vocab_size,
            markov_rank=keys.whole("markov_rank") if keys.has("markov_rank") else None,
            target_name=target_name,
            target_hidden_size=keys.whole("target_hidden_size", hidden_size),
            sample_from_anchor=keys.flag("sample_from_anchor"),
        ),
        keys.where,
    )


def refuse_other_drafters(config: Mapping[str, Any]) -> None:
    """``UserError`` naming the family, unless this is the configuration of a DFlash v1 drafter."""
    inner = config.get("dflash_config")
    merged = {**config, **(inner if isinstance(inner, Mapping) else {})}
    architectures = config.get("architectures") or []
    names = [str(name) for name in architectures] if isinstance(architectures, list) else [str(architectures)]
    hinting = ("model_type", "projector_type", "speculators_model_type")
    hints = " ".join([*names, *(str(merged.get(key)) for key in hinting)]).lower()
    for mark, family in NEWER_DRAFTERS.items():
        if mark in hints:
            raise UserError(f"This drafter is of the {family} family.", SUPPORTED)
    for key, family in _FAMILY_KEYS.items():
        if merged.get(key):
            raise UserError(f"This drafter is of the {family} family ({key!r} in its config.json).", SUPPORTED)
    if merged.get("projector_type") not in (None, "dflash"):
        raise UserError(
            f"Projector type {shorten(merged['projector_type'])} of the drafter is not supported.", SUPPORTED
        )
    if "speculators_model_type" in config:
        if config["speculators_model_type"] != "dflash":
            kind = shorten(config["speculators_model_type"])
            raise UserError(f"This drafter is not DFlash: its speculators_model_type is {kind}.", SUPPORTED)
    elif "DFlashDraftModel" not in names or config.get("model_type") != "qwen3":
        found = f"architectures {shorten(names)}, model_type {shorten(config.get('model_type'))}"
        raise UserError(f"This is not a DFlash drafter: {found}.", SUPPORTED)


def causality(windows: Sequence[int | None], is_causal: bool | None) -> tuple[bool, ...]:
    """Per layer, whether a block row sees earlier rows only: as the file says, else so for sliding layers."""
    return tuple(window is not None if is_causal is None else is_causal for window in windows)


def windows_of(keys: Keys, num_layers: int) -> tuple[int | None, ...]:
    """Per layer: the window of its attention over the context, or None."""
    types = keys.values.get("layer_types")
    if types is None:
        if keys.flag("use_sliding_window"):
            raise UserError(f"{keys.where} has 'use_sliding_window' but lacks the key 'layer_types'.", "Add the key.")
        return (None,) * num_layers
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in (FULL, SLIDING) for kind in types):
        raise keys.bad("layer_types", types, f"a list of {num_layers} of {FULL} and {SLIDING}")
    if SLIDING not in types:
        return (None,) * num_layers
    if not keys.flag("use_sliding_window", True):
        raise UserError(
            f"{keys.where}: 'use_sliding_window' is false, yet 'layer_types' has {SLIDING}.",
            "Ask its publisher which is right.",
        )
    window = keys.whole("sliding_window")
    return tuple(window if kind == SLIDING else None for kind in types)


def checked_mask(keys: Keys, vocab_size: int) -> int:
    mask = keys.whole("mask_token_id", least=0)
    if mask >= vocab_size:
        raise keys.bad("mask_token_id", mask, f"below the vocabulary size, {vocab_size}")
    for key in ("eos_token_id", "pad_token_id"):
        if mask in keys.ids(key):
            raise keys.bad("mask_token_id", mask, f"another token than {key!r}")
    return mask


def _target_layer_ids(keys: Keys, num_layers: int | None, given: tuple[int, ...] | None) -> tuple[int, ...]:
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
    return checked_taps(keys, "target_layer_ids", list(given) if ids is None and given is not None else ids, num_layers)


def checked_taps(keys: Keys, key: str, ids: Any, num_layers: int | None) -> tuple[int, ...]:
    """Different 0-based layer ids, below the number of the target's layers where the file tells it."""
    if (
        not isinstance(ids, list)
        or not ids
        or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids)
        or len(set(ids)) != len(ids)
        or (num_layers is not None and max(ids) >= num_layers)
    ):
        upper = "" if num_layers is None else f" to {num_layers - 1}"
        raise keys.bad(key, ids, f"different layer ids from 0{upper}")
    return tuple(ids)

"""llama.cpp's GGUF of a DFlash drafter (architecture ``dflash``): its metadata and tensor names in our words.

Its layers count one more than ours (tap l is the input of layer l + 1), its norms are plain, its heads are not
interleaved, and ``d2t`` holds target ids, where the ``speculators`` library has differences.
"""

from collections.abc import Mapping
from typing import Any

from lampejo.errors import UserError
from lampejo.models.config import DrafterConfig, Keys, checked, shorten
from lampejo.models.drafter_config import SUPPORTED, causality, checked_mask, checked_taps
from lampejo.models.gguf_config import rope_from_gguf

_TOP = {
    "fc": "fc",
    "enc.output_norm": "hidden_norm",
    "output_norm": "norm",
    "token_embd": "embed_tokens",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Parts of tensor names that give a newer family away.
_FAMILIES = {"markov": "DSpark", "conf_proj": "DSpark", "hc_": "DSpark", "selector": "DFlash2", "conv": "DFlash2"}


def drafter_tensor(gguf_name: str) -> str:
    """The name of a drafter's tensor in ``models.dflash``; one that we do not know stays as it is, to be refused."""
    stem, _, suffix = gguf_name.rpartition(".")
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[1].isdecimal() and parts[2] in _LAYER:
        return f"layers.{parts[1]}.{_LAYER[parts[2]]}.{suffix}"
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    return "draft_token_ids" if gguf_name in ("d2t", "d2t.weight") else gguf_name


def drafter_config_from_gguf(
    metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]], vocab_size: int
) -> DrafterConfig:
    """Translate GGUF metadata. ``tensors``: shapes (rows first) by GGUF name; ``vocab_size``: the target's, which these
    files do not tell. ``UserError`` names the key or the family."""
    arch = Keys(metadata, "The drafter's GGUF metadata").need("general.architecture")
    if arch != "dflash":
        raise UserError(f"This GGUF file is no DFlash drafter: its architecture is {shorten(arch)}.", SUPPORTED)
    for name in tensors:
        for mark, family in _FAMILIES.items():
            if mark in name:
                raise UserError(f"This drafter is of the {family} family (tensor {name!r}).", SUPPORTED)
    own = {key.removeprefix("dflash."): value for key, value in metadata.items() if key.startswith("dflash.")}
    for token in ("mask", "eos", "pad"):
        own.setdefault(f"{token}_token_id", metadata.get(f"tokenizer.ggml.{token}_token_id"))
    keys = Keys(own, "The drafter's GGUF metadata, dflash.*")
    num_layers, head_dim = keys.whole("block_count"), keys.whole("attention.key_length")
    for key in ("rope.dimension_count", "attention.value_length"):
        if keys.whole(key, head_dim) != head_dim:
            raise keys.unsupported(key, f"Only heads of one size, rotated in full, are (here {head_dim}).")
    layers = keys.need("target_layers")
    if not isinstance(layers, list) or not all(type(i) is int and i >= 1 for i in layers):
        raise keys.bad("target_layers", layers, "a list of layer ids, each the layer's plus one")
    keys.need("rope.freq_base")
    windows = _windows(keys, num_layers)
    rows = tensors.get("d2t", tensors.get("d2t.weight"))
    return checked(
        DrafterConfig(
            block_size=keys.whole("block_size", least=2),
            mask_token_id=checked_mask(keys, vocab_size),
            target_layer_ids=checked_taps(keys, "target_layers", [i - 1 for i in layers], None),
            num_target_layers=None,
            hidden_size=keys.whole("embedding_length"),
            intermediate_size=keys.whole("feed_forward_length"),
            num_layers=num_layers,
            num_heads=keys.whole("attention.head_count"),
            num_kv_heads=keys.whole("attention.head_count_kv"),
            head_dim=head_dim,
            rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
            rope=rope_from_gguf(keys, keys.whole("context_length"), None, head_dim),
            vocab_size=vocab_size,
            windows=windows,
            causal=causality(windows, keys.flag("attention.causal") if keys.has("attention.causal") else None),
            draft_vocab_size=None if rows is None else rows[0],
            sample_from_anchor=keys.flag("sample_from_anchor"),
        ),
        keys.where,
    )


def _windows(keys: Keys, num_layers: int) -> tuple[int | None, ...]:
    window = keys.whole("attention.sliding_window", 0, least=0)
    if not window:
        return (None,) * num_layers
    pattern = keys.need("attention.sliding_window_pattern")
    if (
        not isinstance(pattern, list)
        or len(pattern) != num_layers
        or any(type(slides) is not bool for slides in pattern)
    ):
        raise keys.bad("attention.sliding_window_pattern", pattern, f"a list of {num_layers} of true and false")
    return tuple(window if slides else None for slides in pattern)

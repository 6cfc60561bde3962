"""Configurations that are known without a network: the targets that have published drafters, and those drafters.

A configuration that can be read, from a folder or the hub, always wins over this table. Every entry says where its
values come from. What no source states and was inferred is named in ``inferred``, and ``lampejo plan`` tells it.

Sources, by the names used below:

- classes: defaults of the configuration classes of transformers 5, which are those of one named checkpoint each.
- torchtitan: ``torchtitan/models/qwen3_5/__init__.py`` of github.com/pytorch/torchtitan, one entry per Qwen3.5 model.
- slime: ``scripts/models/*.sh`` of github.com/THUDM/slime, checked against the real checkpoints by training on them.
- copies: ``config.json`` of copies of the model on huggingface.co; the copy is named.
- card: the model card.
- notes: this project's notes on the published drafters (names, tensors and sizes as read in their files or in issues).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lampejo.models.config import DrafterConfig, ModelConfig, RopeConfig


@dataclass(frozen=True)
class Published:
    """A ``config.json`` without what no plan needs."""

    config: Mapping[str, Any]
    source: str
    inferred: tuple[str, ...] = ()


def _qwen3(hidden: int, layers: int, mlp: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        **more,
    }


def _experts(num: int, active: int, size: int, shared: int = 0) -> dict[str, Any]:
    found = {"num_experts": num, "num_experts_per_tok": active, "moe_intermediate_size": size, "norm_topk_prob": True}
    return {**found, "decoder_sparse_step": 1, "mlp_only_layers": []} | (
        {"shared_expert_intermediate_size": shared} if shared else {}
    )


def _hybrid(hidden: int, layers: int, heads: int, kv_heads: int, value_heads: int) -> dict[str, Any]:
    """Three layers of Gated DeltaNet, then one of attention, and so on."""
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "layer_types": [("linear_attention", "full_attention")[i % 4 == 3] for i in range(layers)],
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
    }


def _qwen3_5(text: dict[str, Any], tied: bool = False, **more: Any) -> dict[str, Any]:
    kind = "qwen3_5_moe" if "num_experts" in more else "qwen3_5"
    rope = {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25}
    rope |= {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    text = {**text, **more, "vocab_size": 248320, "rope_parameters": rope, "tie_word_embeddings": tied}
    return {
        "model_type": kind,
        "text_config": {"model_type": f"{kind}_text", "attn_output_gate": True, **text},
        "tie_word_embeddings": tied,
    }


_QWEN35_35B = Published(_qwen3_5(_hybrid(2048, 40, 16, 2, 32), **_experts(256, 8, 512, 512)), "classes, torchtitan")
_QWEN35_27B = Published(
    _qwen3_5(_hybrid(5120, 64, 24, 4, 48), intermediate_size=17408),
    "card, slime; value heads: docs.modular.com, Qwen3_5Config",
)

TARGETS: dict[str, Published] = {
    "Qwen/Qwen3-4B": Published(
        _qwen3(2560, 36, 9728, 32, 8, tie_word_embeddings=True), "copies: MultiRL/qwen3_4b_instruct_sft"
    ),
    "Qwen/Qwen3-8B": Published(_qwen3(4096, 36, 12288, 32, 8), "copies: thejaminator/qwen-hook-layer-9"),
    "Qwen/Qwen3-30B-A3B": Published(
        _qwen3(2048, 48, 6144, 32, 4, **_experts(128, 8, 768), model_type="qwen3_moe"), "slime"
    ),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": Published(
        _qwen3(
            2048,
            48,
            5472,
            32,
            4,
            **_experts(128, 8, 768),
            model_type="qwen3_moe",
            rope_theta=10_000_000.0,
            max_position_embeddings=262144,
        ),
        "copies: shailesh83/Qwen3-Coder-int8",
    ),
    "Qwen/Qwen3-Coder-Next": Published(
        {
            **_hybrid(2048, 48, 16, 2, 32),
            **_experts(512, 10, 512, 512),
            "model_type": "qwen3_next",
            "vocab_size": 151936,
            "intermediate_size": 5120,
            "rope_theta": 5_000_000.0,
            "partial_rotary_factor": 0.25,
            "tie_word_embeddings": False,
        },
        "copies: amd/Qwen3-Coder-Next-MXFP4",
    ),
    "Qwen/Qwen3.5-4B": Published(
        _qwen3_5(_hybrid(2560, 32, 16, 4, 32), tied=True, intermediate_size=9216),
        "torchtitan; tied head: slime",
    ),
    "Qwen/Qwen3.5-9B": Published(
        _qwen3_5(_hybrid(4096, 32, 16, 4, 32), intermediate_size=12288), "classes, torchtitan; copies: OmniCoder-9B"
    ),
    "Qwen/Qwen3.5-27B": _QWEN35_27B,
    "Qwen/Qwen3.6-27B": Published(_QWEN35_27B.config, "that of Qwen3.5-27B", ("all sizes, from Qwen3.5-27B",)),
    "Qwen/Qwen3.5-35B-A3B": _QWEN35_35B,
    "Qwen/Qwen3.6-35B-A3B": Published(_QWEN35_35B.config, "slime: the topology of Qwen3.5-35B-A3B"),
    "Qwen/Qwen3.5-122B-A10B": Published(
        _qwen3_5(_hybrid(3072, 48, 32, 2, 64), **_experts(256, 8, 1024, 1024)), "torchtitan, slime, card"
    ),
    "meta-llama/Llama-3.1-8B-Instruct": Published(
        {
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
        },
        "copies of its config.json",
    ),
}


@dataclass(frozen=True)
class PublishedDrafter:
    """The sizes of a drafter; everything that its target decides is taken from there."""

    layers: int
    mlp: int
    heads: int
    kv_heads: int
    taps: int
    windows: tuple[int | None, ...]
    inferred: tuple[str, ...] = ()
    block: int = 16
    head_dim: int = 128

    def config(self, target: ModelConfig) -> DrafterConfig:
        """As if read from its file, but for the ids, which no cost depends on."""
        return DrafterConfig(
            block_size=self.block,
            mask_token_id=0,
            target_layer_ids=tuple(range(self.taps)),
            num_target_layers=target.num_layers,
            hidden_size=target.hidden_size,
            intermediate_size=self.mlp,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=1e-6,
            rope=RopeConfig(theta=target.rope.theta),
            vocab_size=target.vocab_size,
            windows=self.windows,
            causal=(False,) * self.layers,
        )


def _full(layers: int) -> tuple[int | None, ...]:
    return (None,) * layers


# By the last part of the repository's name. Where a repository changed (June 2026), the newer file counts.
DRAFTERS: dict[str, PublishedDrafter] = {
    "Qwen3-4B-DFlash-b16": PublishedDrafter(5, 9728, 32, 8, 5, _full(5)),
    "Qwen3-8B-DFlash-b16": PublishedDrafter(5, 12288, 32, 8, 5, _full(5)),
    "Qwen3-Coder-30B-A3B-DFlash": PublishedDrafter(8, 6144, 32, 4, 5, _full(8), ("MLP size",)),
    "Qwen3-Coder-Next-DFlash": PublishedDrafter(
        8, 6144, 32, 4, 5, _full(8), ("MLP size, heads, taps and block, from the drafter of Qwen3-Coder-30B-A3B",)
    ),
    "Qwen3.5-4B-DFlash": PublishedDrafter(5, 9728, 32, 8, 5, _full(5)),
    "Qwen3.5-9B-DFlash": PublishedDrafter(5, 12288, 32, 8, 5, _full(5), ("MLP size, heads and attention",)),
    "Qwen3.5-27B-DFlash": PublishedDrafter(6, 17408, 32, 8, 5, (*[4096] * 5, None), ("number of taps",)),
    "Qwen3.5-35B-A3B-DFlash": PublishedDrafter(8, 6144, 32, 4, 5, _full(8)),
    "Qwen3.6-35B-A3B-DFlash": PublishedDrafter(6, 6144, 32, 8, 8, (*[4096] * 5, None)),
    "Qwen3.6-27B-DFlash": PublishedDrafter(5, 17408, 32, 8, 5, (*[2048] * 4, None)),
    "Qwen3.5-122B-A10B-DFlash": PublishedDrafter(6, 9216, 32, 8, 8, (4096,) * 6),
    "LLaMA3.1-8B-Instruct-DFlash-UltraChat": PublishedDrafter(
        5, 14336, 32, 8, 5, _full(5), ("all sizes, from its target and the other drafters", "block of 16")
    ),
}


def published_target(name: str) -> Published | None:
    """The entry of a target; ``name`` is a repository, whose FP8 release has the same sizes."""
    wanted = name.lower().partition("@")[0].removesuffix("-fp8")
    return next((found for known, found in TARGETS.items() if known.lower() == wanted), None)


def published_drafter(repo: str) -> PublishedDrafter | None:
    """The entry of a drafter by its repository's name."""
    wanted = repo.rpartition("/")[2].lower()
    return next((found for known, found in DRAFTERS.items() if known.lower() == wanted), None)

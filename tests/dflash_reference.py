"""A second implementation of the DFlash drafter, for the tests: one text at a time, no pages, no batches, no caches.

Written from the description of the formats and sharing no code with ours: it reads a folder by itself, in z-lab's
layout or that of the speculators library, and takes its RoPE from `transformers`.

Shape legend: C tokens of context, B block, H hidden, Q query heads, G key/value heads, D head size, V vocabulary.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

Noise = Callable[[int], torch.Tensor]  # absolute position -> one number for each token of the vocabulary


class ReferenceDrafter:
    """``embedding`` and ``head`` [V, H] are the target's. ``taps`` are 0-based."""

    def __init__(self, folder: Path, embedding: torch.Tensor, head: torch.Tensor) -> None:
        saved = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        self.weights = {name: t.float() if t.is_floating_point() else t.long() for name, t in tensors.items()}
        if "speculators_model_type" in saved:
            self._read_speculators(saved)
        else:
            self._read_zlab(saved)
        self.num_layers = self.config["num_hidden_layers"]
        types = self.config.get("layer_types") or ["full_attention"] * self.num_layers
        self.slides = [kind == "sliding_attention" for kind in types]
        self.embedding = self.weights.get("embed_tokens.weight", embedding)
        self.head = self.weights["lm_head.weight"] if "lm_head.weight" in self.weights else head[self.known]
        scaling = self.config.get("rope_parameters") or {
            "rope_type": "default", "rope_theta": self.config["rope_theta"]
        }  # fmt: skip
        names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")
        sizes = {name: self.config[name] for name in names}
        self.rotary = Qwen3RotaryEmbedding(Qwen3Config(**sizes, rope_parameters=dict(scaling)))

    def _read_zlab(self, saved: dict[str, Any]) -> None:
        rules = {**saved, **saved["dflash_config"]}
        self.config = saved
        self.taps, self.block_size, self.mask = rules["target_layer_ids"], rules["block_size"], rules["mask_token_id"]
        self.first_row = 0 if rules.get("sample_from_anchor") else 1
        self.known = self.weights.get("draft_token_ids", torch.arange(saved["vocab_size"]))
        causal = saved.get("is_causal")
        self.is_causal: Callable[[int], bool] = lambda i: self.slides[i] if causal is None else causal

    def _read_speculators(self, saved: dict[str, Any]) -> None:
        self.config = saved["transformer_layer_config"]
        self.taps = [layer - 1 for layer in saved["aux_hidden_state_layer_ids"]]
        self.block_size, self.mask = saved["block_size"], saved["mask_token_id"]
        self.first_row = 0 if saved["sample_from_anchor"] else 1
        self.known = torch.arange(self.config["vocab_size"])
        if "d2t" in self.weights:
            self.known = torch.arange(len(self.weights["d2t"])) + self.weights["d2t"]
        self.is_causal = lambda i: self.slides[i] and not saved["sliding_window_non_causal"]

    @property
    def num_drafts(self) -> int:
        """Most that a block gives."""
        return self.block_size - self.first_row

    @torch.inference_mode()
    def context(self, taps: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """taps [C, num_taps * H] of positions 0 .. C-1 -> per layer keys and values [C, G, D]."""
        ctx = self._norm(taps @ self.weights["fc.weight"].T, "hidden_norm")
        return [self._key_value(i, ctx, 0) for i in range(self.num_layers)]

    @torch.inference_mode()
    def block(self, context: list[tuple[torch.Tensor, torch.Tensor]], anchor_id: int, anchor: int) -> torch.Tensor:
        """Hidden states [B, H] of the block that starts with ``anchor_id`` at position ``anchor``."""
        x = self.embedding[[anchor_id] + [self.mask] * (self.block_size - 1)]
        for i in range(self.num_layers):
            x = x + self._attention(i, self._norm(x, f"layers.{i}.input_layernorm"), context[i], anchor)
            y = self._norm(x, f"layers.{i}.post_attention_layernorm")
            gate, up = self._project(y, i, "mlp.gate_proj"), self._project(y, i, "mlp.up_proj")
            x = x + self._project(torch.nn.functional.silu(gate) * up, i, "mlp.down_proj")
        return self._norm(x, "norm")

    @torch.inference_mode()
    def draft(
        self, hidden: torch.Tensor, anchor_id: int, anchor: int, temperature: float = 0.0, noise: Noise | None = None
    ) -> tuple[list[int], list[float]]:
        """One token for each position after the anchor, and by how much its score beats the second best."""
        draft_id = {int(token_id): i for i, token_id in enumerate(self.known)}
        ids, gaps = [anchor_id], []
        for position, row in enumerate(range(self.first_row, self.block_size), anchor + 1):
            scores = self.head @ hidden[row]
            if "markov_head.successor.weight" in self.weights:
                predecessor = self.weights["markov_head.predecessor.weight"][draft_id.get(ids[-1], len(self.known))]
                scores = scores + self.weights["markov_head.successor.weight"] @ predecessor
            if temperature > 0:
                assert noise is not None
                scores = scores / temperature + noise(position)[self.known]
            best = scores.topk(2)
            ids.append(int(self.known[best.indices[0]]))
            gaps.append(float(best.values[0] - best.values[1]))
        return ids[1:], gaps

    def _attention(
        self, i: int, x: torch.Tensor, context: tuple[torch.Tensor, torch.Tensor], anchor: int
    ) -> torch.Tensor:
        head_dim, group = self.config["head_dim"], self.config["num_attention_heads"]
        group //= self.config["num_key_value_heads"]
        q = self._project(x, i, "self_attn.q_proj").view(len(x), -1, head_dim)
        q = self._rotate(self._norm(q, f"layers.{i}.self_attn.q_norm"), anchor)
        k, v = self._key_value(i, x, anchor)
        k = torch.cat([context[0][:anchor], k]).repeat_interleave(group, dim=1)  # [anchor + B, Q, D]
        v = torch.cat([context[1][:anchor], v]).repeat_interleave(group, dim=1)
        scores = torch.einsum("bqd,kqd->qbk", q, k) / head_dim**0.5
        of_query = anchor + torch.arange(len(x))[:, None]
        of_key = torch.arange(len(k))[None]
        if self.is_causal(i):
            scores = scores.masked_fill(of_key > of_query, -torch.inf)
        if self.slides[i]:
            scores = scores.masked_fill((of_query - of_key).abs() >= self.config["sliding_window"], -torch.inf)
        out = torch.einsum("qbk,kqd->bqd", scores.softmax(-1), v)
        return self._project(out.flatten(1), i, "self_attn.o_proj")

    def _key_value(self, i: int, x: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, H] at positions ``first`` and on -> k, v [T, G, D]."""
        head_dim = self.config["head_dim"]
        k = self._project(x, i, "self_attn.k_proj").view(len(x), -1, head_dim)
        v = self._project(x, i, "self_attn.v_proj").view(len(x), -1, head_dim)
        return self._rotate(self._norm(k, f"layers.{i}.self_attn.k_norm"), first), v

    def _project(self, x: torch.Tensor, i: int, name: str) -> torch.Tensor:
        return x @ self.weights[f"layers.{i}.{name}.weight"].T

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
        return x / scale * self.weights[f"{name}.weight"]

    def _rotate(self, x: torch.Tensor, first: int) -> torch.Tensor:
        """x [T, heads, D] at positions ``first`` and on."""
        cos, sin = self.rotary(x, torch.arange(first, first + len(x))[None])  # [1, T, D]
        left, right = x.chunk(2, dim=-1)
        return x * cos[0][:, None] + torch.cat([-right, left], dim=-1) * sin[0][:, None]

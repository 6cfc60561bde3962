"""A second implementation of the DFlash drafter, for the tests: one text at a time, no pages, no batches, no caches.

Written from the description of the format and sharing no code with ours: it reads a folder by itself and takes
its RoPE from `transformers`.

Shape legend: C tokens of context, B block, H hidden, Q query heads, G key/value heads, D head size, V vocabulary.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

Noise = Callable[[int], torch.Tensor]  # absolute position -> one number for each token of the vocabulary


class ReferenceDrafter:
    """``embedding`` and ``head`` [V, H] are the target's."""

    def __init__(self, folder: Path, embedding: torch.Tensor, head: torch.Tensor) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.rules = {**self.config, **self.config["dflash_config"]}
        tensors = load_file(folder / "model.safetensors")
        self.weights = {name: t.float() if t.is_floating_point() else t.long() for name, t in tensors.items()}
        self.embedding, self.head = embedding, head
        scaling = self.config.get("rope_parameters") or {
            "rope_type": "default", "rope_theta": self.config["rope_theta"]
        }  # fmt: skip
        names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")
        sizes = {name: self.config[name] for name in names}
        self.rotary = Qwen3RotaryEmbedding(Qwen3Config(**sizes, rope_parameters=dict(scaling)))

    @torch.inference_mode()
    def context(self, taps: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """taps [C, num_taps * H] of positions 0 .. C-1 -> per layer keys and values [C, G, D]."""
        ctx = self._norm(taps @ self.weights["fc.weight"].T, "hidden_norm")
        return [self._key_value(i, ctx, 0) for i in range(self.config["num_hidden_layers"])]

    @torch.inference_mode()
    def block(self, context: list[tuple[torch.Tensor, torch.Tensor]], anchor_id: int, anchor: int) -> torch.Tensor:
        """Hidden states [B, H] of the block that starts with ``anchor_id`` at position ``anchor``."""
        size = self.rules["block_size"]
        x = self.embedding[[anchor_id] + [self.rules["mask_token_id"]] * (size - 1)]
        for i in range(self.config["num_hidden_layers"]):
            x = x + self._attention(i, self._norm(x, f"layers.{i}.input_layernorm"), context[i], anchor)
            y = self._norm(x, f"layers.{i}.post_attention_layernorm")
            gate, up = self._project(y, i, "mlp.gate_proj"), self._project(y, i, "mlp.up_proj")
            x = x + self._project(torch.nn.functional.silu(gate) * up, i, "mlp.down_proj")
        return self._norm(x, "norm")

    @torch.inference_mode()
    def draft(
        self, hidden: torch.Tensor, anchor_id: int, anchor: int, temperature: float = 0.0, noise: Noise | None = None
    ) -> tuple[list[int], list[float]]:
        """One token for each slot after the anchor, and by how much its score beats the second best."""
        known = self.weights.get("draft_token_ids", torch.arange(len(self.head)))
        draft_id = {int(token_id): i for i, token_id in enumerate(known)}
        ids, gaps = [anchor_id], []
        for row in range(1, len(hidden)):
            scores = self.head[known] @ hidden[row]
            if "markov_head.successor.weight" in self.weights:
                predecessor = self.weights["markov_head.predecessor.weight"][draft_id.get(ids[-1], len(known))]
                scores = scores + self.weights["markov_head.successor.weight"] @ predecessor
            if temperature > 0:
                assert noise is not None
                scores = scores / temperature + noise(anchor + row)[known]
            best = scores.topk(2)
            ids.append(int(known[best.indices[0]]))
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
        sliding = self.config.get("layer_types", {i: ""})[i] == "sliding_attention"
        if self.config["is_causal"] if self.config.get("is_causal") is not None else sliding:
            scores = scores.masked_fill(of_key > of_query, -torch.inf)
        if sliding:
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

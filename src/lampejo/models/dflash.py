"""DFlash v1 drafter (arXiv 2602.06036): one forward, used by serving and training; attention is handed in.

    ctx = hidden_norm(fc(taps))              once per committed token, shared by all drafter layers
    x   = embed([anchor, MASK, ..., MASK])   the target's own embedding
    layers: keys and values from [ctx ; block] with the same projections
    logits = head(norm(x))[1:]               the target's own head; row i predicts the token at row i

Some files of the ``speculators`` library bring an embedding and a head of their own, or are trained to predict from the
anchor's row on (``sample_from_anchor``: row i predicts the token after row i, and no row is left out).

Two optional extensions of ours: a draft vocabulary (logits over ``draft_token_ids`` only) and a Markov head (a low-rank
bias from the token before the slot, so that drafting goes through the slots in order).

Shape legend: T tokens, R rows, B block length, H hidden, Q query heads, G key/value heads, D head size, V draft ids.
"""

from typing import Protocol, cast

import torch
from torch import nn

from lampejo.models import layers
from lampejo.models.config import DrafterConfig
from lampejo.models.layers import Attend, Embedding, Linear, RMSNorm, Rope, Rotation


class ContextStore(Protocol):
    """Where the context's keys and values go: pages when serving, a list when training."""

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None: ...


class Layer(layers.Layer):
    def store_context(self, ctx: torch.Tensor, rotation: Rotation, layer: int, view: ContextStore) -> None:
        assert self.self_attn is not None
        view.store(layer, *self.self_attn.key_value(ctx, rotation))


class MarkovHead(nn.Module):
    """Low-rank bias on a slot's logits from the draft id of the token before it; the last row is "any other token"."""

    def __init__(self, num_draft_ids: int, rank: int) -> None:
        super().__init__()
        self.predecessor = Embedding(num_draft_ids + 1, rank)
        self.successor = Linear(rank, num_draft_ids)

    def forward(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """draft_ids [R] -> [R, V]."""
        return self.successor(self.predecessor(draft_ids))


class DFlash(nn.Module):
    draft_token_ids: torch.Tensor  # [draft_vocab_size], only with a draft vocabulary

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        num_taps = len(config.target_layer_ids)
        self.fc = Linear(num_taps * config.tap_size, config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rope = Rope(config.rope, config.head_dim)
        num_draft_ids = config.draft_vocab_size or config.vocab_size
        self.markov_head = MarkovHead(num_draft_ids, config.markov_rank) if config.markov_rank else None
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size) if config.own_embedding else None
        self.lm_head = Linear(config.hidden_size, num_draft_ids) if config.own_head else None
        if config.draft_vocab_size:
            self.register_buffer("draft_token_ids", torch.empty(config.draft_vocab_size, dtype=torch.int32))

    def context(self, taps: torch.Tensor) -> torch.Tensor:
        """taps [T, num_taps * H of the target] -> ctx [T, H], the part that all layers share."""
        return self.hidden_norm(self.fc(taps))

    def store_context(self, ctx: torch.Tensor, positions: torch.Tensor, view: ContextStore) -> None:
        """Hands each layer's keys and values of ctx [T, H], at its true positions [T], to ``view.store``."""
        rotation = self.rope(positions)
        for i, layer in enumerate(self.layers):
            cast(Layer, layer).store_context(ctx, rotation, i, view)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Embedded blocks, flat. x [R * B, H], positions [R * B] -> normed hidden states [R * B, H]."""
        rotation = self.rope(positions)
        for i, layer in enumerate(self.layers):
            x = layer(x, rotation, i, attend)
        return self.norm(x)

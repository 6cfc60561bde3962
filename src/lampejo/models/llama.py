"""Llama-like decoders (arXiv 2302.13971), Qwen2 with its q/k/v biases (arXiv 2407.10671) included.

Parameters are named as in the checkpoint. Shape legend: T tokens, H hidden, Q query heads, G key/value heads, D head
size, V vocabulary.
"""

import torch
from torch import nn

from lampejo import ops
from lampejo.models.config import ModelConfig
from lampejo.models.layers import MLP, Attend, Linear, RMSNorm, Rope, Rotation


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, q_size, bias=config.qkv_bias)
        self.k_proj = Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = Linear(q_size, config.hidden_size)

    def forward(self, x: torch.Tensor, rotation: Rotation, layer: int, attend: Attend) -> torch.Tensor:
        num_tokens = x.shape[0]
        q = ops.rope(self.q_proj(x).view(num_tokens, -1, self.head_dim), *rotation)
        k = ops.rope(self.k_proj(x).view(num_tokens, -1, self.head_dim), *rotation)
        v = self.v_proj(x).view(num_tokens, -1, self.head_dim)
        return self.o_proj(attend(layer, q, k, v).reshape(num_tokens, -1))


class Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: torch.Tensor, rotation: Rotation, layer: int, attend: Attend) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, layer, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Llama(nn.Module):
    """The target: ids in, normed hidden states and taps out; ``logits`` applies the head where they are wanted."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.rope = Rope(config.rope, config.head_dim)

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend, tap_layers: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """ids, positions [T] -> hidden after the last norm [T, H], taps [T, len(tap_layers) * H].

        Tap l is the residual stream after layer l, 0-based.
        """
        x = self.embed(ids)  # [T, H]
        rotation = self.rope(positions)
        taps = {}
        for i, layer in enumerate(self.model.layers):
            x = layer(x, rotation, i, attend)
            if i in tap_layers:
                taps[i] = x.clone()  # fused layers change x in place
        joined = torch.cat([taps[i] for i in tap_layers], dim=-1) if tap_layers else x.new_empty(len(ids), 0)
        return self.model.norm(x), joined

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [T] -> [T, H]; the drafter reads the same embedding."""
        return self.model.embed_tokens(ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [T, H] -> [T, V], fp32."""
        return self.lm_head(hidden).float()

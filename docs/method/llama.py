"""Llama as a gpt_neox.Model: RMSNorm, SwiGLU, rotary embeddings of the whole head, grouped queries.

Shapes: n rows of a pass, S slots that it reads, H heads, K heads of keys and values, D head size.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt_neox import Config, KVCache, finite, rotary_table, rotate


@dataclass(frozen=True)
class LlamaConfig(Config):
    rotary_pct: float = 1.0
    num_key_value_heads: int = 8  # K


class Attention(nn.Module):
    def __init__(self, c: LlamaConfig):
        super().__init__()
        self.n_heads, self.n_kv = c.num_attention_heads, c.num_key_value_heads
        self.q_proj = nn.Linear(c.hidden_size, self.n_heads * c.head_size, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, self.n_kv * c.head_size, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, self.n_kv * c.head_size, bias=False)
        self.o_proj = nn.Linear(self.n_heads * c.head_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
        n, n_slots = mask.shape
        q = rotate(self.q_proj(x).unflatten(-1, (self.n_heads, -1)).transpose(0, 1), rotary)
        k = rotate(self.k_proj(x).unflatten(-1, (self.n_kv, -1)).transpose(0, 1), rotary)
        v = self.v_proj(x).unflatten(-1, (self.n_kv, -1)).transpose(0, 1)  # [K, n, D]
        kv[:, :, n_slots - n : n_slots] = torch.stack((k, v))
        k, v = kv[:, :, :n_slots].repeat_interleave(self.n_heads // self.n_kv, dim=1)
        attended = F.scaled_dot_product_attention(q, k, v, mask)
        return self.o_proj(attended.transpose(0, 1).flatten(1))


class MLP(nn.Module):
    def __init__(self, c: LlamaConfig):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c: LlamaConfig):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c.hidden_size, c.layer_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, c.layer_norm_eps)
        self.self_attn, self.mlp = Attention(c), MLP(c)

    def forward(self, x: Tensor, rotary: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, kv, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, c: LlamaConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = nn.RMSNorm(c.hidden_size, c.layer_norm_eps)


class Llama(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config, self.model = config, Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    def new_cache(self, capacity: int) -> KVCache:
        c, weight = self.config, self.lm_head.weight
        shape = (2, c.num_hidden_layers, c.num_key_value_heads, capacity, c.head_size)
        kv = torch.zeros(shape, device=weight.device, dtype=weight.dtype)
        return KVCache(kv, rotary_table(c, capacity, weight.device), capacity)

    def hidden(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | None = None
    ) -> Tensor:
        n = len(tokens)
        if mask is None:
            mask = torch.ones(n, n, dtype=torch.bool).tril()
        mask = F.pad(mask, (cache.length + n - mask.shape[1], 0), value=True).to(self.device)
        x = self.model.embed_tokens(tokens.to(self.device))
        rotary = cache.rotary[positions.to(self.device)]
        for i, layer in enumerate(self.model.layers):
            x = layer(x, rotary, cache.kv[:, i], mask)
        return x

    def forward(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | None = None
    ) -> Tensor:
        return self.logits(self.hidden(tokens, positions, cache, mask))

    def logits(self, hidden: Tensor) -> Tensor:
        return finite(self.lm_head(self.model.norm(hidden)).float())

    def prefill(self, tokens: list[int], cache: KVCache) -> Tensor:
        positions = torch.arange(cache.length, cache.length + len(tokens))
        x = self.hidden(torch.tensor(tokens), positions, cache)
        cache.commit(range(len(tokens)))
        return self.logits(x[-1:])

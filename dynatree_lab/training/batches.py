"""Batches of sequences on the layers of gpt_neox.py, for training.

gpt_neox.Layer runs one sequence over a cache. `run_layer` runs a batch of sequences, whose
attention can be replaced, for example by dynatree_lab.training.own_text.CachedAttention.

    rotary = rotary_table(model.config, rows.shape[1], model.device)  # of gpt_neox.py
    logits = model.logits(run_layers(model, rows, rotary))  # [B, T, V] of rows [B, T]

Shapes: B sequences of T tokens, H attention heads, D head size, R rotary dimensions.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from dynatree_lab.pair import has_instructions
from gpt_neox import GPTNeoX, Layer, rotate

# attend(q, k, v) -> [B, H, T, D], of queries, keys and values [B, H, T, D] of a layer's input
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
attend_causally: Attend = partial(F.scaled_dot_product_attention, is_causal=True)


def draw_rows(text: Tensor, n_rows: int, n_tokens: int, seed: int) -> Tensor:
    """Return sequences [n_rows, n_tokens] from random places of the text [n]."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - n_tokens + 1, (n_rows, 1), generator=generator)
    return text[starts + torch.arange(n_tokens)]


def autocast_for(device: torch.device) -> torch.autocast:
    """Return a context in which products are in bfloat16, if the device has instructions for it."""
    is_fast = bool(has_instructions(torch.bfloat16, device))
    return torch.autocast(device.type, torch.bfloat16, enabled=is_fast)


def run_layer(layer: Layer, x: Tensor, rotary: Tensor, attend: Attend) -> Tensor:
    """Run a layer on x [B, T, hidden] and return its output. rotary: [T, R / 2], of T positions."""
    attention = layer.attention
    qkv = attention.query_key_value(layer.input_layernorm(x))
    qkv = qkv.unflatten(-1, (attention.n_heads, 3, -1)).transpose(1, 2)  # [B, H, T, 3, D]
    q, k, v = qkv.unbind(3)
    attended = attend(rotate(q, rotary), rotate(k, rotary), v)
    attended = attention.dense(attended.transpose(1, 2).flatten(2))
    if layer.use_parallel_residual:
        return x + attended + layer.mlp(layer.post_attention_layernorm(x))
    x = x + attended
    return x + layer.mlp(layer.post_attention_layernorm(x))


def run_layers(
    model: GPTNeoX, rows: Tensor, rotary: Tensor, attentions: Sequence[Attend] | None = None
) -> Tensor:
    """Run sequences [B, T] and return the last hidden states [B, T, hidden], before the final norm.

    attentions: one for each layer; None: causal.
    """
    layers = model.gpt_neox.layers
    attentions = attentions or [attend_causally] * len(layers)
    x = model.gpt_neox.embed_in(rows)
    for layer, attend in zip(layers, attentions, strict=True):
        x = run_layer(layer, x, rotary, attend)
    return x

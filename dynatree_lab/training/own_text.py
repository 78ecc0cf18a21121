"""Batches of sequences that a target writes itself, to train an EAGLE head on.

    rows = generate_batch(target, prompts, 257, temperature=0.7, seed=0)  # [B, 257]

Shapes: B sequences, H attention heads, D head size, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from dynatree_lab.training.batches import draw_rows, run_layers
from gpt_neox import GPTNeoX, rotary_table

N_SEQUENCES = 3072  # generated before training
MAX_BATCH = 96  # sequences that are generated at once
MAX_KV_BYTES = 2**32  # of their keys and values, which may reduce the batch
TEMPERATURES = (0.0, 0.0, 0.7, 0.3)  # batch i has entry i modulo 4; 0 is greedy
N_PROMPT = 32  # tokens of a file that begin a sequence


class CachedAttention:
    """Causal attention of one layer with a KV cache. The first call gets the prompts, and each
    later call one token of each sequence."""

    def __init__(self, n_slots: int):
        """n_slots: maximum number of tokens of a sequence."""
        self.n_slots, self.length = n_slots, 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n_rows, n_heads, n, size = k.shape
        if not self.length:
            self.kv = k.new_empty(2, n_rows, n_heads, self.n_slots, size)  # [2, B, H, n_slots, D]
        start, self.length = self.length, self.length + n
        self.kv[:, :, :, start : self.length] = torch.stack((k, v))
        keys, values = self.kv[:, :, :, : self.length]
        # A single token attends to all slots. Several tokens are the first call, so no slot is
        # older than they are
        return F.scaled_dot_product_attention(q, keys, values, is_causal=n > 1)


@torch.inference_mode()
def generate_batch(
    target: GPTNeoX, prompts: Tensor, n_tokens: int, temperature: float, seed: int
) -> Tensor:
    """Return sequences [B, n_tokens] that begin with prompts [B, n]."""
    generator = torch.Generator(target.device).manual_seed(seed)
    rotary = rotary_table(target.config, n_tokens, target.device)
    attentions = [CachedAttention(n_tokens) for _ in target.gpt_neox.layers]
    rows = new = prompts  # new: the tokens to run next, at first [B, n], then [B, 1]
    while rows.shape[1] < n_tokens:
        end = rows.shape[1]
        x = run_layers(target, new, rotary[end - new.shape[1] : end], attentions)
        logits = target.logits(x[:, -1])  # [B, V]
        if temperature:
            probs = (logits / temperature).softmax(-1)
            new = torch.multinomial(probs, 1, generator=generator)
        else:
            new = logits.argmax(-1, keepdim=True)
        rows = torch.cat([rows, new], dim=1)
    return rows


def write_own_text(target: GPTNeoX, text: Tensor, n_tokens: int) -> Tensor:
    """Return sequences [N_SEQUENCES, n_tokens] on the CPU. Each begins with N_PROMPT ids, or fewer
    if n_tokens is less, from a random place of the text [n]. The target continues them."""
    config, batches = target.config, []
    kv_bytes = 8 * config.num_hidden_layers * config.hidden_size * n_tokens  # float32, a sequence
    size = max(min(MAX_BATCH, MAX_KV_BYTES // kv_bytes), 1)
    starts = range(0, N_SEQUENCES, size)
    for i, start in enumerate(tqdm(starts, unit="batch", desc="own text", disable=None)):
        n_rows = min(size, N_SEQUENCES - start)
        prompts = draw_rows(text, n_rows, min(N_PROMPT, n_tokens), seed=i).to(target.device)
        temperature = TEMPERATURES[i % len(TEMPERATURES)]
        batches.append(generate_batch(target, prompts, n_tokens, temperature, seed=i).cpu())
    return torch.cat(batches)

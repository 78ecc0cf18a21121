"""Texts of one length through a plain GPTNeoX at once: read, as in training, or written.

dynatree.py writes one text fast; distilling wants many and does not mind when each is done.

    model = GPTNeoX.from_pretrained("models/tiny/target", fuse=False)
    logits = read_texts(model, tokens)  # [B, T, V]
    texts = write_texts(model, prompts, 100, temperatures, chance, n_ids=4096)  # [B, T + 100]

Shapes: B texts, T tokens of each, L layers, H heads, S cache slots, D head size, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.passes import causal_bias
from gpt_neox import GPTNeoX, rotary_table

TINY = torch.finfo(torch.float32).tiny


def read_texts(model: GPTNeoX, tokens: Tensor) -> Tensor:
    """Logits [B, T, V] of what follows each of tokens [B, T] int64."""
    turns = rotary_table(model.config, tokens.shape[1], model.device)
    return model.embed_out(model.gpt_neox(tokens, turns))


@torch.inference_mode()
def write_texts(
    model: GPTNeoX,
    prompts: Tensor,
    n_tokens: int,
    temperatures: Tensor,
    chance: torch.Generator,
    n_ids: int,
) -> Tensor:
    """Prompts [B, T] int64, each continued by n_tokens at its temperature [B], 0 for greedy, with
    the first n_ids alone."""
    n_texts, n_prompt = prompts.shape
    texts = F.pad(prompts, (0, n_tokens))  # [B, S]
    kv, turns = model.make_memory(texts.shape[1])
    kv = kv[:, :, None].repeat(1, 1, n_texts, 1, 1, 1)  # [2, L, B, H, S, D]
    start = 0
    for end in range(n_prompt, texts.shape[1]):
        bias = causal_bias(end - start, start, like=kv)
        x = model.gpt_neox(texts[:, start:end], turns[start:end], kv, start, bias)
        logits = model.embed_out(x[:, -1])[:, :n_ids].float()  # [B, n_ids]
        texts[:, end] = draw(logits, temperatures, chance)
        start = end
    return texts


def draw(logits: Tensor, temperatures: Tensor, chance: torch.Generator) -> Tensor:
    """An id [B] of each: the best after noise of Gumbel's distribution is a draw."""
    # Not divided by the temperature, which may be 0; and from TINY on, as 0 x inf would be nan
    noise = torch.empty_like(logits).uniform_(TINY, 1, generator=chance)
    noise = noise.log_().neg_().log_().neg_()
    return (logits + temperatures[:, None] * noise).argmax(-1)

"""Step 1: one token per pass of the target.

The last token of the text is pending: the target has chosen it, but not yet run it. A pass runs it
and gives the next token. All older tokens are in the KV cache, so they are not run again.

    python docs/steps/1_ar.py
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer

from gpt_neox import GPTNeoX

TINY = Path(__file__).parents[2] / "models" / "tiny"
PROMPT, N_NEW = "She opened the door of the house and looked", 48


@torch.inference_mode()
def generate(
    target: GPTNeoX, prompt: list[int], max_new_tokens: int
) -> tuple[list[int], list[int]]:
    """Return the new tokens of a greedy text, and the number of rows of each pass."""
    capacity = len(prompt) + max_new_tokens
    cache = target.new_cache(capacity)
    text, n_rows = [*prompt, int(target.prefill(prompt, cache).argmax())], []
    while len(text) < len(prompt) + max_new_tokens:
        # The target's cache holds text[:-1]
        # 2 position: the pending token comes after the cached ones
        positions = torch.tensor([cache.length])
        # 3 one pass of the target over one row: a logit for each of the V tokens of the vocabulary
        logits = target.forward(torch.tensor(text[-1:]), positions, cache)  # [1, V]
        # 4 the target's best token
        tokens = logits.argmax(dim=-1).tolist()
        # 5 commit: the cache keeps row 0
        cache.commit([0])
        text += tokens
        n_rows.append(1)
    return text[len(prompt) :], n_rows


if __name__ == "__main__":
    target = GPTNeoX.from_pretrained(TINY / "target")
    tokenizer = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))
    ids, n_rows = generate(target, tokenizer.encode(PROMPT).ids, N_NEW)
    print(PROMPT + tokenizer.decode(ids))
    n = len(n_rows)  # passes; the prefill, which gave the first token, does not count
    print(f"{n} passes, {(N_NEW - 1) / n:.2f} tokens and {sum(n_rows) / n:.1f} rows per pass")

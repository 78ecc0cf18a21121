"""Step 2: a draft model proposes a chain of tokens, and one pass of the target verifies it.

Row 0 of the pass is the pending token. The other rows are candidates: the draft's own greedy text.
The pass gives the target's best token after every row. If the next row holds this token, the target
has run it already, so the best token after that row is valid, too. The last valid one is the bonus
token.

    python docs/steps/2_chain.py
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from gpt_neox import GPTNeoX, KVCache

TINY = Path(__file__).parents[2] / "models" / "tiny"
PROMPT, N_NEW = "She opened the door of the house and looked", 48
D0 = 5  # candidates of a chain


@torch.inference_mode()
def generate(
    target: GPTNeoX, draft: GPTNeoX, prompt: list[int], max_new_tokens: int
) -> tuple[list[int], list[int]]:
    """Return the new tokens of a greedy text, and the number of rows of each pass."""
    capacity = len(prompt) + max_new_tokens
    cache, draft_cache = target.new_cache(capacity), draft.new_cache(capacity)
    text, n_rows = [*prompt, int(target.prefill(prompt, cache).argmax())], []
    while n_left := len(prompt) + max_new_tokens - len(text):
        # The target's cache holds text[:-1], the draft's holds text[: draft_cache.length]
        # 1 draft: a chain after the last token, of at most n_left - 1 candidates, because the bonus
        # token comes after them
        chain = grow(draft, text, draft_cache, min(D0, n_left - 1))
        # 2 positions: the rows come after the cached tokens; each attends to the rows before it
        positions = torch.arange(len(chain)) + cache.length
        # 3 verify: one pass of the target over the whole chain
        logits = target.forward(torch.tensor(chain), positions, cache)  # [N, V]
        # 4 accept: the first rows of the chain, then one token of the target's own, the bonus token
        path, tokens = accept_greedy(chain, logits)
        # 5 commit: both caches keep the accepted rows and discard the others
        cache.commit(path)
        draft_cache.rewind(min(draft_cache.length, cache.length))
        text += tokens
        n_rows.append(len(chain))
    return text[len(prompt) :], n_rows


def grow(draft: GPTNeoX, text: list[int], cache: KVCache, max_depth: int) -> list[int]:
    """Return the last token and max_depth candidates after it. The draft runs all but the last."""
    chain, uncached = [text[-1]], text[cache.length :]
    for _ in range(max_depth):
        logits = draft.prefill(uncached, cache)  # [1, V]
        uncached = [int(logits.argmax())]
        chain += uncached
    return chain


def accept_greedy(chain: list[int], logits: Tensor) -> tuple[list[int], list[int]]:
    """Return the rows that hold the target's best tokens, and the token after each of them."""
    best = logits.argmax(dim=-1).tolist()
    path = [0]
    for row in range(1, len(chain)):
        if row - 1 == path[-1] and chain[row] == best[path[-1]]:
            path.append(row)
    return path, [best[row] for row in path]


if __name__ == "__main__":
    target, draft = (GPTNeoX.from_pretrained(TINY / name) for name in ("target", "draft"))
    tokenizer = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))
    ids, n_rows = generate(target, draft, tokenizer.encode(PROMPT).ids, N_NEW)
    print(PROMPT + tokenizer.decode(ids))
    n = len(n_rows)  # passes; the prefill, which gave the first token, does not count
    print(f"{n} passes, {(N_NEW - 1) / n:.2f} tokens and {sum(n_rows) / n:.1f} rows per pass")

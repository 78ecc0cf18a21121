"""Step 3: a tree of candidates, so a wrong candidate has alternatives.

mask        a row attends to its ancestors and itself, and not to other branches
positions   a row's depth gives its position, so siblings have one position
acceptance  from the root, go to the child that holds the target's best token, while there is one
cache       the accepted rows need not be the first ones, so `commit` moves them

    python docs/steps/3_tree.py
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from gpt_neox import GPTNeoX, KVCache

TINY = Path(__file__).parents[2] / "models" / "tiny"
PROMPT, N_NEW = "She opened the door of the house and looked", 48
D0, B_mid = 5, 2  # levels of candidates; children of a row


@dataclass
class Tree:
    tokens: list[int]  # one entry per row; siblings have distinct tokens
    parents: list[int]  # rows, in a chain row - 1; -1 for the root, the pending token


@torch.inference_mode()
def generate(
    target: GPTNeoX, draft: GPTNeoX, prompt: list[int], max_new_tokens: int
) -> tuple[list[int], list[Tree]]:
    """Return the new tokens of a greedy text, and the tree of each pass."""
    capacity = len(prompt) + max_new_tokens + sum(B_mid**depth for depth in range(D0 + 1))
    cache, draft_cache = target.new_cache(capacity), draft.new_cache(capacity)
    text, trees = [*prompt, int(target.prefill(prompt, cache).argmax())], []
    while n_left := len(prompt) + max_new_tokens - len(text):
        # The target's cache holds text[:-1], the draft's holds text[: draft_cache.length]
        # 1 draft: a tree below the last token
        tree = grow(draft, text, draft_cache, min(D0, n_left - 1))
        # 2 mask and positions: a row attends to its ancestors; its depth gives its position
        tree_tokens, positions, mask = tree_inputs(tree, cache.length)
        # 3 verify: one pass of the target over the whole tree
        logits = target.forward(tree_tokens, positions, cache, mask)  # [N, V]
        # 4 accept: a path of the tree, then one token of the target's own, the bonus token
        path, tokens = accept_greedy(tree, logits)
        # 5 commit: both caches keep the accepted rows and discard the others
        n_run = draft_cache.length - cache.length  # rows that the draft ran: not the last level
        draft_cache.rewind(cache.length)
        draft_cache.commit([row for row in path if row < n_run])
        cache.commit(path)
        text += tokens
        trees.append(tree)
    return text[len(prompt) :], trees


def grow(draft: GPTNeoX, text: list[int], cache: KVCache, max_depth: int) -> Tree:
    """Return a tree of max_depth levels below the last token. The draft runs all but the last."""
    tree, level = Tree([text[-1]], [-1]), range(1)
    logits = draft.prefill(text[cache.length :], cache)  # [1, V]
    for depth in range(max_depth):
        if depth > 0:
            tokens, positions, mask = (x[level.start :] for x in tree_inputs(tree, len(text) - 1))
            logits = draft.forward(tokens, positions, cache, mask)  # [n, V]
            cache.length += len(level)
        tree.tokens += logits.topk(B_mid).indices.flatten().tolist()
        tree.parents += [row for row in level for _ in range(B_mid)]
        level = range(level.stop, len(tree.tokens))
    return tree


def tree_inputs(tree: Tree, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens [N], positions [N] and mask [N, N] of a tree after `length` cached tokens."""
    mask = torch.eye(len(tree.tokens), dtype=torch.bool)
    for row, parent in enumerate(tree.parents[1:], start=1):
        mask[row] |= mask[parent]
    depths = mask.sum(dim=1) - 1  # the number of ancestors
    return torch.tensor(tree.tokens), depths + length, mask


def accept_greedy(tree: Tree, logits: Tensor) -> tuple[list[int], list[int]]:
    """Return the rows that hold the target's best tokens, and the token after each of them."""
    best = logits.argmax(dim=-1).tolist()
    path = [0]
    for row in range(1, len(tree.tokens)):
        if tree.parents[row] == path[-1] and tree.tokens[row] == best[path[-1]]:
            path.append(row)
    return path, [best[row] for row in path]


if __name__ == "__main__":
    target, draft = (GPTNeoX.from_pretrained(TINY / name) for name in ("target", "draft"))
    tokenizer = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))
    ids, trees = generate(target, draft, tokenizer.encode(PROMPT).ids, N_NEW)
    print(PROMPT + tokenizer.decode(ids))
    n, n_rows = len(trees), sum(len(tree.tokens) for tree in trees)
    print(f"{n} passes, {(N_NEW - 1) / n:.2f} tokens and {n_rows / n:.1f} rows per pass")

"""Step 4: the draft's confidence decides the tree's shape. This is DynaTree's rule without history.

c(u)  the probability of the draft's best token after node u: the higher, the fewer children
p(u)  the product of the probabilities on the path to u, which should be the probability that u is
      accepted: a node needs some to be added, and more to get children

What step 3 explained comes from the core. Its ModelDrafter runs only the rows that get children,
and divides the draft's logits by a temperature.

    python docs/steps/4_confidence.py
"""

import math
from pathlib import Path

import torch
from tokenizers import Tokenizer

from draft_tree import Draft, Tree
from dynatree import ModelDrafter
from gpt_neox import GPTNeoX
from verify import accept_greedy, tree_inputs

TINY = Path(__file__).parents[2] / "models" / "tiny"
PROMPT, N_NEW = "She opened the door of the house and looked", 48
B_min, B_mid, B_max, tau_l, tau_h = 1, 2, 3, 0.4, 0.9  # children of a node, and limits of c(u)
D0, D_max, rho_stop, rho_deep = 5, 8, 0.1, 0.5  # depths, and p(u) needed for children
tau, N_max = 0.05, 64  # p(u) needed to be added; rows of a full tree


@torch.inference_mode()
def generate(
    target: GPTNeoX, drafter: ModelDrafter, prompt: list[int], max_new_tokens: int
) -> tuple[list[int], list[Tree]]:
    """Return the new tokens of a greedy text, and the tree of each pass."""
    capacity = len(prompt) + max_new_tokens + N_max
    cache = target.new_cache(capacity)
    text, trees = [*prompt, int(target.prefill(prompt, cache).argmax())], []
    drafter.start(text, capacity, target.config.vocab_size)
    while n_left := len(prompt) + max_new_tokens - len(text):
        # The target's cache holds text[:-1], the draft's holds text[: drafter.n_cached]
        # 1 draft: a tree below the last token
        tree = grow(drafter.draft, text[-1], min(D_max, n_left - 1))
        # 2 mask and positions: a row attends to its ancestors; its depth gives its position
        tree_tokens, positions, mask = tree_inputs(tree, cache.length)
        # 3 verify: one pass of the target over the whole tree
        logits = target.forward(tree_tokens, positions, cache, mask)  # [N, V]
        # 4 accept: a path of the tree, then one token of the target's own, the bonus token
        path, tokens = accept_greedy(tree, logits)
        # 5 commit: both caches keep the accepted rows and discard the others
        cache.commit(path)
        drafter.commit(tree, path, tokens)
        text += tokens
        trees.append(tree)
    return text[len(prompt) :], trees


def grow(draft: Draft, root_token: int, max_depth: int) -> Tree:
    """Return a tree of at most max_depth levels. `draft` runs the rows that get children."""
    tree, level = Tree.from_root(root_token), [0]
    while rows := [u for u in level if is_expanded(tree, u, max_depth)]:
        level, found = [], draft(tree, rows, B_max)  # B_max candidates below each row
        for i, u in enumerate(rows):
            tree.draft_slots[u] = max(tree.draft_slots) + 1  # where the draft's cache has u
            level += add_children(tree, u, found.tokens[i].tolist(), found.logprobs[i].tolist())
    return tree


def is_expanded(tree: Tree, u: int, max_depth: int) -> bool:
    """Whether a node u gets children: at depth D0 and below it needs a likelier path."""
    threshold = rho_stop if tree.depths[u] < D0 else rho_deep
    has_room = tree.depths[u] < max_depth and len(tree) < N_max
    return has_room and tree.path_logprobs[u] >= math.log(threshold)


def add_children(tree: Tree, u: int, tokens: list[int], logprobs: list[float]) -> list[int]:
    """Add the first B(u) candidates below a node u, but no unlikely ones, and return their rows."""
    c, rows = math.exp(logprobs[0]), []
    breadth = B_min if c >= tau_h else B_max if c < tau_l else B_mid
    for token, logprob in zip(tokens[:breadth], logprobs[:breadth], strict=True):
        path_logprob = tree.path_logprobs[u] + logprob
        if path_logprob >= math.log(tau) and len(tree) < N_max:
            rows.append(tree.add(token, u, path_logprob))
    return rows


if __name__ == "__main__":
    target, draft = (GPTNeoX.from_pretrained(TINY / name) for name in ("target", "draft"))
    tokenizer = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))
    for temperature in (1.0, 0.5, 0.1):
        drafter = ModelDrafter(draft, temperature)
        ids, trees = generate(target, drafter, tokenizer.encode(PROMPT).ids, N_NEW)
        n, n_rows = len(trees), sum(len(tree) for tree in trees)
        said = sum(math.exp(logprob) for tree in trees for logprob in tree.path_logprobs[1:])
        accepted = N_NEW - 1 - n  # the passes' other tokens are bonus tokens
        shares = f"mean p(u) {said / (n_rows - n):.2f}, accepted {accepted / (n_rows - n):.2f}"
        line = f"{n} passes, {(N_NEW - 1) / n:.2f} tokens and {n_rows / n:.1f} rows per pass"
        print(f"draft temperature {temperature}: {shares}; {line}")
    print(PROMPT + tokenizer.decode(ids))

"""Logits processors: a caller's function that changes the target's logits before they are used.

    def forbid_repetition(logits, texts):  # [n, V], n texts
        for row, text in enumerate(texts):
            logits[row, text[-1]] = -torch.inf
        return logits

    generate(target, draft, prompt, config, 64, process=forbid_repetition)

The text is exact: it is what the target writes without a draft if its logits are processed in the
same way. For this, the new logits of a row may depend on its logits and its text only.

Shapes: n rows of a pass, V vocabulary.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from draft_tree import Tree

# process(logits [n, V] float32, texts) -> logits [n, V]; texts[i] is the list of all ids up to and
# with row i, the prompt included. -inf forbids a token
Process = Callable[[Tensor, Sequence[list[int]]], Tensor]


class RowTexts(Sequence[list[int]]):
    """The text that ends in each row of a tree. It is built only when it is asked for."""

    def __init__(self, committed: list[int], tree: Tree):
        self.committed, self.n_committed, self.tree = committed, len(committed), tree

    def __len__(self) -> int:
        return len(self.tree)

    def __getitem__(self, row: int | slice) -> list:
        if isinstance(row, slice):
            return [self[i] for i in range(len(self))[row]]
        path, above = [], range(len(self.tree))[row]  # raises IndexError
        while above >= 0:
            path.append(self.tree.tokens[above])
            above = self.tree.parents[above]
        return self.committed[: self.n_committed] + path[::-1]


def processed(
    process: Process, logits: Tensor, is_finite: list[bool], committed: list[int], tree: Tree
) -> tuple[Tensor, list[bool]]:
    """Return the processed logits [n, V] and which of the rows then have a best token.

    Args:
        is_finite: methods.overflow.finite_rows of the logits.
        committed: the ids of the text before the root.

    Raises ValueError if the result is not usable, or leaves the root without a best token.
    """
    found = process(logits.clone(), RowTexts(committed, tree))
    is_tensor = isinstance(found, Tensor)
    if not is_tensor or found.shape != logits.shape or not found.is_floating_point():
        given = f"{found.dtype} {list(found.shape)}" if is_tensor else type(found).__name__
        raise ValueError(f"process gave {given}, it must give logits {list(logits.shape)}")
    found = found.float()
    has_best = found.amax(dim=-1).isfinite().tolist()  # nan if any is nan
    if not has_best[0]:
        raise ValueError("process left no finite logit for the next token, or made one nan or inf")
    return found, [a and b for a, b in zip(is_finite, has_best, strict=True)]

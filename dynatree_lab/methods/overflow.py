"""Rows that overflow: an engine model's text goes on without them.

The core ends a text when any row of a pass overflows (gpt_neox.finite). In float16 that may be a
row that no path goes through, or only the draft. So the engine keeps such a row to itself: its
logits are nan, and the other rows are what they are without it (engine/layers.py). Rows below it
look finite, but are wrong. Nobody reads them: a draft's nan adds no candidate (draft_tree.checked),
and a path ends before a row that overflowed.

Shapes: N tree rows.
"""

from collections.abc import Sequence

from torch import Tensor

from gpt_neox import finite


def finite_rows(highest: Tensor) -> list[bool]:
    """Return which rows have a best token, by their highest logits [N]: those for which it is
    finite. It is nan or +inf in a row that overflowed. -inf only forbids a token, but a row may
    forbid all of them.

    Raises NonFiniteLogits if row 0 overflowed, and ValueError if it forbids every token.
    """
    is_finite = highest.isfinite().tolist()
    if not is_finite[0]:
        finite(highest[:1])
        raise ValueError("the target's logits are -inf for every token, so none can follow")
    return is_finite


def cut_path(
    path: list[int], tokens: list[int], is_finite: Sequence[bool]
) -> tuple[list[int], list[int]]:
    """Return an accepted path and its tokens up to the first row that is not finite. This row's own
    token is then the bonus token, and as the root of the next pass it raises."""
    n = next((n for n, row in enumerate(path) if not is_finite[row]), len(path))
    return path[:n], tokens[:n]

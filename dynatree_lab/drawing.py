"""An iteration's tree, drawn as text.

print(draw_tree(step, tokenizer))
"""

import math

from tokenizers import Tokenizer

from draft_tree import Tree
from dynatree_lab.engine.generate import Step
from dynatree_lab.methods.rules import are_retrieved

LEGEND = "every iteration's tree, a line per node: its token, p(path); * accepted, + retrieved"
ACCEPTED, REJECTED, PLAIN = "\033[1;32m", "\033[2m", "\033[0m"


def draw_tree(step: Step, tokenizer: Tokenizer, is_colored: bool = False) -> str:
    """Draw an iteration's tree, a line per node: token, p(path), * if accepted, + if retrieved."""
    if not hasattr(step, "bonus") or not isinstance(tokenizer, Tokenizer):
        raise ValueError("draw_tree takes a step of a result, and the pair's tokenizer")
    tree, path = step.tree, step.path
    children: list[list[int]] = [[] for _ in tree.parents]
    for row in range(1, len(tree)):
        children[tree.parents[row]].append(row)
    lines: list[str] = []

    def visit(row: int, lead: str, branch: str, below: str) -> None:
        label = describe_node(tree, row, row in path, tokenizer)
        if is_colored:
            label = f"{ACCEPTED if row in path else REJECTED}{label}{PLAIN}"
        lines.append(lead + branch + label)
        for child in children[row]:
            if child == children[row][-1]:
                visit(child, lead + below, "`-- ", "    ")
            else:
                visit(child, lead + below, "|-- ", "|   ")

    visit(0, "", "", "")
    lines.append(f"bonus: {quoted(tokenizer, step.bonus)}")
    return "\n".join(lines)


def describe_node(tree: Tree, row: int, is_accepted: bool, tokenizer: Tokenizer) -> str:
    """Return a node's token, p(path) and marks."""
    label = f"{quoted(tokenizer, tree.tokens[row])} {math.exp(tree.path_logprobs[row]):.2f}"
    if is_accepted:
        label += " *"
    if are_retrieved(tree)[row]:
        label += " +"
    return label


def quoted(tokenizer: Tokenizer, token: int) -> str:
    """Return a token as a quoted string on one line."""
    return repr(tokenizer.decode([token], skip_special_tokens=False))

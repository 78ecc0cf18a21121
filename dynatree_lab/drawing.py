"""An iteration's tree, drawn as text.

print(draw_tree(step, tokenizer))
"""

import math

from tokenizers import Tokenizer

from draft_tree import Tree, draw
from dynatree_lab.generation.step import Step
from dynatree_lab.methods.rules import are_retrieved

LEGEND = "every iteration's tree, a line per node: its token, p(path); * accepted, + retrieved"
ACCEPTED, REJECTED, PLAIN = "\033[1;32m", "\033[2m", "\033[0m"


def draw_tree(step: Step, tokenizer: Tokenizer, is_colored: bool = False) -> str:
    """Draw an iteration's tree, a line per node: token, p(path), * if accepted, + if retrieved."""
    if not hasattr(step, "bonus") or not isinstance(tokenizer, Tokenizer):
        raise ValueError("draw_tree takes a step of a result, and the pair's tokenizer")

    def label(row: int) -> str:
        described = describe_node(step.tree, row, row in step.path, tokenizer)
        if not is_colored:
            return described
        return f"{ACCEPTED if row in step.path else REJECTED}{described}{PLAIN}"

    return f"{draw(step.tree, label)}\nbonus: {quoted(tokenizer, step.bonus)}"


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

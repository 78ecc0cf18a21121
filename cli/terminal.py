"""What the command line shows: text that a terminal does not obey, drawn trees, every setting.

print(draw_tree(step.tree, step.path, step.bonus, tokenizer, is_colored=False))
"""

import dataclasses
import math
import os
import re
import textwrap
from collections.abc import Sequence
from typing import TextIO

from tokenizers import Tokenizer

from cli.errors import shown
from cli.tokens import decode
from draft_tree import Tree

LEGEND = "every iteration's tree, a line per node: its token, p(path); * accepted, + retrieved"
ACCEPTED, REJECTED, PLAIN = "\033[1;32m", "\033[2m", "\033[0m"
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline


def harmless(text: str) -> str:
    """The model's own text for a terminal: escapes in it are shown, not obeyed."""
    return CONTROLS.sub(lambda found: shown(found[0]), text)


def has_color(stream: TextIO) -> bool:
    """Whether a stream is a terminal whose user has not declined colours (no-color.org)."""
    is_declined = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not is_declined


def draw_tree(
    tree: Tree, path: Sequence[int], bonus: int, tokenizer: Tokenizer, is_colored: bool
) -> str:
    """One iteration's tree, a line per node: token, p(path), * if accepted, + if retrieved."""
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
    lines.append(f"bonus: {quoted(tokenizer, bonus)}")
    return "\n".join(lines)


def describe_node(tree: Tree, row: int, is_accepted: bool, tokenizer: Tokenizer) -> str:
    """A node's token, p(path) and marks."""
    label = f"{quoted(tokenizer, tree.tokens[row])} {math.exp(tree.path_logprobs[row]):.2f}"
    if is_accepted:
        label += " *"
    if tree.are_retrieved[row]:
        label += " +"
    return label


def quoted(tokenizer: Tokenizer, token: int) -> str:
    """A token as a quoted string on one line."""
    return repr(decode([token], tokenizer, has_special=True))


def describe(methods: dict[str, type]) -> str:
    """The methods with their settings, symbols, defaults and ranges, for --help."""
    lines = ["methods and their settings (--set NAME=VALUE):"]
    shared: dict[str, list[str]] = {}  # what is said of a setting -> the methods that share it
    for name, settings in methods.items():
        title = (settings.__doc__ or "").splitlines()[0].removeprefix(f"{name}: ")
        lines.append(textwrap.fill(f"  {name}: {title}", 80, subsequent_indent=" " * 4))
        for f in dataclasses.fields(settings):
            if f.kw_only:
                shared.setdefault(describe_setting(f), []).append(name)
            else:
                lines.append(describe_setting(f))
    for names in dict.fromkeys(map(tuple, shared.values())):
        lines.append(textwrap.fill(f"  also of {', '.join(names)}:", 80, subsequent_indent=" " * 4))
        lines += [said for said, sharing in shared.items() if tuple(sharing) == names]
    return "\n".join(lines)


def describe_setting(f: dataclasses.Field) -> str:
    """Its symbol, default, meaning and range."""
    value = f"{f.name}={f.type(f.default)}"
    line = f"    {value:<13} {f.metadata['meaning']}"
    if f.type is str:
        line += f" (as {', '.join(f.metadata['examples'])})"
    elif f.type is not bool:
        line += f" ({f.metadata['low']:g} to {f.metadata['high']:g})"
    return textwrap.fill(line, 80, subsequent_indent=" " * 18)

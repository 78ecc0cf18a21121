"""What the command line shows: streamed text, drawn trees, the help of every setting.

stream = TextStream(tokenizer)
print(stream.push(step.tokens), end="")
"""

import dataclasses
import math
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import TextIO

from tokenizers import Tokenizer

from cli.errors import shown
from draft_tree import Tree

INCOMPLETE = "\ufffd"  # what a tokenizer prints for bytes that are not a whole character (yet)
ACCEPTED, REJECTED, PLAIN = "\033[1;32m", "\033[2m", "\033[0m"
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline


class TextStream:
    """Ids in, text out as soon as it is final: half a character is held back, not shown as junk."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.recent: list[int] = []  # enough past ids to decode the next ones in context
        self.shown = 0  # characters of their text already out
        self.is_mid_line = False  # what came last is out and ends no line

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete; all pushes and `finish` add up to decode(all ids)."""
        self.recent += ids
        text = self.tokenizer.decode(self.recent)
        final = text.rstrip(INCOMPLETE)
        new = final[self.shown :]
        if new:
            self.is_mid_line = not new.endswith("\n")
        self.shown = max(self.shown, len(final))
        if final == text:  # nothing is pending: later text depends on no earlier id but the last
            self.recent = self.recent[-1:]
            self.shown = len(self.tokenizer.decode(self.recent))
        return new

    def finish(self) -> str:
        """What was held back and never completed."""
        rest = self.tokenizer.decode(self.recent)[self.shown :]
        self.recent = []
        self.shown = 0
        return rest


def harmless(text: str) -> str:
    """The model's own text for a terminal: escapes in it are shown, not obeyed."""
    return CONTROLS.sub(show_control, text)


def show_control(found: re.Match) -> str:
    return shown(found[0])


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
    return repr(tokenizer.decode([token], skip_special_tokens=False))


def describe_range(metadata: Mapping) -> str:
    if "options" in metadata:
        return ", ".join(metadata["options"])
    if "parse" in metadata:
        return "such as " + ", ".join(metadata["examples"])
    return f"{metadata['low']:g} to {metadata['high']:g}"


def describe(methods: dict[str, type]) -> str:
    """The methods with their settings, symbols, defaults and ranges, for --help."""
    lines = ["methods and their settings (--set NAME=VALUE):"]
    for name, settings in methods.items():
        title = (settings.__doc__ or "").splitlines()[0].removeprefix(f"{name}: ")
        lines.append(textwrap.fill(f"  {name}: {title}", 80, subsequent_indent=" " * 4))
        for f in dataclasses.fields(settings):
            value = f"{f.name}={f.type(f.default)}"
            line = f"    {value:<13} {f.metadata['meaning']}"
            if f.type is not bool:
                line += f" ({describe_range(f.metadata)})"
            lines.append(textwrap.fill(line, 80, subsequent_indent=" " * 18))
    return "\n".join(lines)

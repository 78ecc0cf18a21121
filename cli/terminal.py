"""What the command line shows: streamed text, drawn trees, the help of every setting.

stream = TextStream(tokenizer)
print(stream.push(step.tokens), end="")
"""

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer

from draft_tree import Tree

INCOMPLETE = "\ufffd"  # what a tokenizer prints for bytes that are not a whole character (yet)
ACCEPTED, REJECTED, PLAIN = "\033[1;32m", "\033[2m", "\033[0m"


class TextStream:
    """Ids in, text out as soon as it is final: half a character is held back, not shown as junk."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.window: list[int] = []  # enough past ids to decode the next ones in context
        self.shown = 0  # characters of the window's text already out

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete; all pushes and `finish` add up to decode(all ids)."""
        self.window += ids
        text = self.tokenizer.decode(self.window)
        final = text.rstrip(INCOMPLETE)
        new, self.shown = final[self.shown :], max(self.shown, len(final))
        if final == text:  # nothing is pending: later text depends on no earlier id but the last
            self.window = self.window[-1:]
            self.shown = len(self.tokenizer.decode(self.window))
        return new

    def finish(self) -> str:
        """What was held back and never completed."""
        rest = self.tokenizer.decode(self.window)[self.shown :]
        self.window, self.shown = [], 0
        return rest


def draw_tree(
    tree: Tree, path: Sequence[int], bonus: int, tokenizer: Tokenizer, has_color: bool
) -> str:
    """One iteration's tree, a line per node: token, p(path), * if accepted, + if retrieved."""
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    probabilities = tree.logprobs.exp().tolist()
    children: list[list[int]] = [[] for _ in tokens]
    for row, parent in enumerate(parents[1:], start=1):
        children[parent].append(row)
    lines: list[str] = []

    def paint(text: str, row: int) -> str:
        if not has_color:
            return text
        return f"{ACCEPTED if row in path else REJECTED}{text}{PLAIN}"

    def visit(row: int, lead: str, branch: str, below: str) -> None:
        mark = " *" if row in path else ""
        mark += " +" if tree.is_retrieved is not None and tree.is_retrieved[row] else ""
        label = f"{shown(tokenizer, tokens[row])} {probabilities[row]:.2f}{mark}"
        lines.append(lead + branch + paint(label, row))
        for child in children[row]:
            is_last = child == children[row][-1]
            sides = ("`-- ", "    ") if is_last else ("|-- ", "|   ")
            visit(child, lead + below, *sides)

    visit(0, "", "", "")
    return "\n".join([*lines, f"bonus: {shown(tokenizer, bonus)}"])


def shown(tokenizer: Tokenizer, token: int) -> str:
    """A token as a quoted string on one line."""
    return repr(tokenizer.decode([token], skip_special_tokens=False))


def describe_range(metadata: Mapping) -> str:
    if "options" in metadata:
        return ", ".join(metadata["options"]())
    return f"{metadata['low']:g} to {metadata['high']:g}"


def describe(methods: dict[str, type]) -> str:
    """The methods with their settings, symbols, defaults and ranges, for --help."""
    lines = ["methods and their settings (--set NAME=VALUE):"]
    for name, settings in methods.items():
        title = (settings.__doc__ or "").splitlines()[0].removeprefix(f"{name}: ")
        lines.append(textwrap.fill(f"  {name}: {title}", 80, subsequent_indent=" " * 4))
        for f in dataclasses.fields(settings):
            span = "" if isinstance(f.default, bool) else f" ({describe_range(f.metadata)})"
            value = f"{f.name}={f.default}"
            line = f"    {value:<13} {f.metadata['meaning']}{span}"
            lines.append(textwrap.fill(line, 80, subsequent_indent=" " * 18))
    return "\n".join(lines)

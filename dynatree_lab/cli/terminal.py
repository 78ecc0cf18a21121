"""Terminal output: the progress of slow passes, and the list of methods.

print(describe({"lookup": METHODS["lookup"]}))
"""

import dataclasses
import sys
import textwrap
import time

from dynatree_lab.generation.config import METHOD_OPTIONS
from dynatree_lab.methods.method import Method

SLOW_PASS = 2.0  # seconds after which a pass shows its progress
# Of a terminal: save the cursor and do not wrap the line, clear what follows, undo the first
SAVE, CLEAR, RESTORE = "\0337\033[?7l", "\033[K", "\0338\033[?7h"


class LayerProgress:
    """Shows on stderr, after the text, which layer of a slow pass runs; clears it before the last
    layer."""

    def __init__(self, n_layers: int):
        self.n_layers, self.began = n_layers, 0.0

    def __call__(self, i: int) -> None:
        """Called before layer i runs."""
        now = time.perf_counter()
        if i == 0:
            self.began = now
        if now - self.began > SLOW_PASS:
            label = f" layer {i + 1} of {self.n_layers}" if i + 1 < self.n_layers else ""
            print(SAVE + label + CLEAR + RESTORE, end="", file=sys.stderr, flush=True)


def describe(methods: dict[str, type]) -> str:
    """Return the methods with their settings, symbols, defaults and ranges, for --list-methods."""
    lines = ["methods and their settings (--set NAME=VALUE):"]
    for name, settings in methods.items():
        title = (settings.__doc__ or "").splitlines()[0].removeprefix(f"{name}: ")
        lines.append(textwrap.fill(f"  {name}: {title}", 80, subsequent_indent=" " * 4))
        method = Method(settings())
        if method.needs_draft and not method.can_draw:
            lines.append("    (its candidates are not drawn in sampled text: docs/method.md)")
        lines += map(describe_setting, dataclasses.fields(settings))
    lines.append("  also for methods that draft by the draft's probabilities:")
    for name, meaning in METHOD_OPTIONS.items():
        line = f"    {name}=off".ljust(18) + meaning
        lines.append(textwrap.fill(line, 80, subsequent_indent=" " * 18))
    scale = "top-k candidates have the draft's probabilities at temperature (1 + T) / 2, T that of "
    scale += "the text; confident and graft at 1. DynaTree's papers have --draft-temperature 1"
    lines.append(textwrap.fill(f"  {scale}", 80, subsequent_indent="  "))
    return "\n".join(lines)


def describe_setting(f: dataclasses.Field) -> str:
    """Return a setting's symbol, default, meaning and range."""
    default = f.type(f.default)
    if f.type is bool:
        default = "on" if default else "off"
    value = f"{f.name}={default}"
    line = f"    {value:<13} {f.metadata['meaning']}"
    if f.type is str:
        line += f" (e.g. {', '.join(f.metadata['examples'])})"
    elif f.type is not bool:
        line += f" ({f.metadata['low']:g} to {f.metadata['high']:g})"
    return textwrap.fill(line, 80, subsequent_indent=" " * 18)

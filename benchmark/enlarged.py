"""The embedded pair at the cost of Pythia-410M and Pythia-70M, for --table enlarged; made once.

The embedded pair is so small that calls cost more than what they compute, so its figures say little
of a real model. Enlarged it writes the same text, and a pass reads as many weights as one of the
published pair (tools/enlarge.py). It lies in models/enlarged, which git ignores, and may be
deleted.

    target, draft = enlarged_pair()
"""

import os
import subprocess
import sys

from benchmark.machine import ROOT
from cli.errors import UsageError, say
from engine.ranks import is_launched

FOLDER = ROOT / "models" / "enlarged"
SHAPES = {"target": (960, 28), "draft": (512, 6)}  # hidden size, layers
VOCABULARY = 50304
SIZE = "1 GB"  # of both, on disk


def enlarged_pair() -> list[str]:
    """The folders of target and draft, as one would name them. Raises UsageError if they are not
    there and cannot be made."""
    lacking = [role for role in SHAPES if not (FOLDER / role / "config.json").exists()]
    if lacking and is_launched():
        raise UsageError("make the enlarged pair first: python bench.py --table enlarged")
    if lacking:
        say(f"making the enlarged pair in {os.path.relpath(FOLDER)}, once: {SIZE}")
    for role in lacking:
        enlarge(role)
    return [os.path.relpath(FOLDER / role) for role in SHAPES]


def enlarge(role: str) -> None:
    """Make one of them; the tool says itself what stands in its way."""
    hidden, layers = SHAPES[role]
    folder = os.path.relpath(FOLDER / role)
    sizes = ["--hidden", str(hidden), "--layers", str(layers), "--vocab", str(VOCABULARY)]
    source = str(ROOT / "models" / "tiny" / role)
    command = [sys.executable, str(ROOT / "tools" / "enlarge.py"), source, folder, *sizes]
    if subprocess.run(command).returncode:
        raise UsageError(f"{folder} could not be made; the line above says why")

"""The embedded pair at the cost of Pythia-410M and Pythia-70M, for --table enlarged; made once.

The embedded pair is so small that calls take longer than their computation, so its speeds say
little about real models. The enlarged pair generates the same text, and its passes read as many
weights as those of the published pair (tools/enlarge.py). The pair is in models/enlarged, which git
ignores, and may be deleted.

    target, draft = enlarged_pair()
"""

import os
import subprocess
import sys

from benchmark.machine import ROOT
from cli.errors import UsageError, print_line
from engine.ranks import world_size

PROGRAM = ROOT / "tools" / "enlarge.py"
FOLDER = ROOT / "models" / "enlarged"
SHAPES = {"target": (960, 28), "draft": (512, 6)}  # hidden size, layers
VOCABULARY = 50304
SIZE = "1 GB"  # on disk, both models


def enlarged_pair() -> list[str]:
    """Return the folders of target and draft, relative to the working folder, and make the models
    if they are missing. Raises UsageError if that fails."""
    missing = [role for role in SHAPES if not (FOLDER / role / "config.json").exists()]
    if missing and world_size() > 1:
        raise UsageError("make the enlarged pair first: python bench.py --table enlarged")
    if missing:
        print_line(f"making the enlarged pair in {os.path.relpath(FOLDER)}, once: {SIZE}")
    for role in missing:
        hidden, layers = SHAPES[role]
        words = f"--hidden {hidden} --layers {layers} --vocab {VOCABULARY}".split()
        source = ROOT / "models" / "tiny" / role
        if subprocess.run([sys.executable, PROGRAM, source, FOLDER / role, *words]).returncode:
            raise UsageError(f"{FOLDER / role} could not be made; see the line above")
    return [os.path.relpath(FOLDER / role) for role in SHAPES]

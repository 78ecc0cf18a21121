"""Test that docs/tour.ipynb runs, and that its stored outputs are those of one run.

python -m pytest tests/lab/test_tour.py
"""

import json
import os
import subprocess
import sys

import pytest
from small import ROOT


def test_the_cells_run_in_order() -> None:
    """Compare what the cells print that is the same on every processor: whether ids are equal."""
    pytest.importorskip("matplotlib")
    notebook = json.loads((ROOT / "docs" / "tour.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    sources = ["".join(cell["source"]) for cell in cells]
    program = f"names = {{}}\nfor source in {sources!r}:\n    exec(source, names)"
    environment = os.environ | {"MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    stored = json.dumps([cell["outputs"] for cell in cells])
    assert ran.stdout.count("True\n") == stored.count("True\\n") == 2
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert "image/png" in stored

"""Test of the project as an installed package, away from the clone.

Slow, 40 s: it builds a wheel, and starts five processes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small import ROOT

LEFT_OUT = ("build", "models/enlarged*", "*.egg-info", ".*", "__pycache__", "tests", "results")


def run(folder: Path, *command: str | Path, **environment: str) -> str:
    """Run a command in a folder and return its output; fail with its errors."""
    rest = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    rest |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(command, cwd=folder, env=rest, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_an_installed_project_runs_without_the_clone(tmp_path: Path) -> None:
    """Run the commands and the import, in a folder of their own. Nothing is written beside the
    installed files."""
    source, site, there = (tmp_path / name for name in ("source", "site", "there"))
    for folder in (source, there):
        folder.mkdir()
    pack = ["tar", "--create", *[f"--exclude=./{name}" for name in LEFT_OUT], "."]
    with subprocess.Popen(pack, cwd=ROOT, stdout=subprocess.PIPE) as packed:
        subprocess.run(["tar", "--extract", "-C", source], stdin=packed.stdout, check=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    run(tmp_path, *pip, "--target", site, source)
    before = sorted(site.rglob("*"))
    words = ["--prompt", "The ship sailed at dawn", "--max-new-tokens", "24"]
    path = {"PYTHONPATH": str(site)}
    lab = [site / "bin" / "dynatree-lab", *words, "--threads", "1"]
    installed = run(there, *lab, "--html", "run.html", **path)
    assert installed == run(ROOT, sys.executable, "-m", "dynatree_lab", *lab[1:])
    assert (there / "run.html").exists()
    assert run(there, site / "bin" / "dynatree", *words, **path) == installed
    sizes = "--n-prompts 1 --prompt-tokens 12 --max-new-tokens 12 --threads 1".split()
    bench = [site / "bin" / "dynatree-bench", "--methods", "ar,dynatree", *sizes]
    assert "1/1" in run(there, *bench, **path)
    assert len(list((there / "results").glob("run_*.jsonl"))) == 1
    code = "import dynatree_lab as lab, json, sys\n"
    code += "result = lab.write_text(lab.load_pair(), sys.argv[1], max_new_tokens=24)\n"
    code += "print(json.dumps([result.text, lab.__file__]))"
    text, file = json.loads(run(there, sys.executable, "-c", code, words[1], **path))
    assert text == installed.removesuffix("\n") and Path(file).is_relative_to(site)
    assert sorted(site.rglob("*")) == before

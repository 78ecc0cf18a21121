"""Tests of docs/exercises.md: each solution applies to the six files. In the slow tests, the page's
command runs in a patched copy and gives what the page says.

python -m pytest -m "slow or not slow" tests/lab/test_exercises.py
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small import ROOT

PAGE = (ROOT / "docs" / "exercises.md").read_text(encoding="utf-8")
EXERCISES = {part[0]: part for part in PAGE.split("\n## ")[1:]}  # by number
SOLUTIONS = {n: re.search(r"exercises/.*\.patch", part)[0] for n, part in EXERCISES.items()}


def read_table(text: str) -> list[dict[str, str]]:
    """Return the rows of a Markdown table, each with its cells by column."""
    lines = re.findall(r"^\| (.*) \|$", text, re.MULTILINE)
    head, _, *rows = [re.split(r" +\| ", line.strip()) for line in lines] or [[], []]
    return [dict(zip(head, row, strict=True)) for row in rows]


def is_exact(row: dict[str, str]) -> bool:
    n_exact, n_texts = row["exact"].split(" of ")
    return n_exact == n_texts


needs_git = pytest.mark.skipif(not shutil.which("git"), reason="needs git")


@needs_git
@pytest.mark.parametrize("number", EXERCISES)
def test_a_solution_applies(number: str) -> None:
    subprocess.run(["git", "apply", "--check", f"docs/{SOLUTIONS[number]}"], cwd=ROOT, check=True)


def run_solution(number: str, folder: Path, old: str = "", new: str = "") -> list[str]:
    """Run an exercise's command in a copy with its solution, in which `old` is replaced. Return its
    differences from the page.

    `exact` is compared by whether all texts are, because another processor may change a count.
    """
    for file in ROOT.glob("*.py"):
        shutil.copy(file, folder)
    (folder / "models").symlink_to(ROOT / "models")
    patch = ROOT / "docs" / SOLUTIONS[number]
    subprocess.run(["git", "apply", patch], cwd=folder, check=True)
    changed = folder / re.search(r"^\+\+\+ b/(.*)$", patch.read_text("utf-8"), re.MULTILINE)[1]
    text = changed.read_text("utf-8")
    assert old in text
    changed.write_text(text.replace(old, new) if old else text, "utf-8")
    (command,) = re.findall(r"```bash\npython (.*)\n```", EXERCISES[number])
    program = [sys.executable, *shlex.split(command)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True)
    promised, found = read_table(EXERCISES[number]), read_table(ran.stdout)
    assert ran.returncode == (0 if all(map(is_exact, promised)) else 1), ran.stderr
    differences = []
    for expected, row in zip(promised, found, strict=True):
        assert (row["row"], is_exact(row)) == (expected["row"], is_exact(expected))
        for column in ("tokens/iter", "rows/tree"):
            if float(row[column]) != pytest.approx(float(expected[column]), rel=0.1):
                differences.append(f"{row['row']}: {row[column]} {column}")
    for printed in re.findall(r"\n\n```\n(.*?)```", EXERCISES[number], re.DOTALL):
        assert printed in ran.stderr
    return differences


@needs_git
@pytest.mark.slow
@pytest.mark.parametrize("number", EXERCISES)
def test_a_solution_does_what_the_page_says(number: str, tmp_path: Path) -> None:
    assert run_solution(number, tmp_path) == []


WRONG = [  # an exercise, a text of its solution, and one that makes it wrong
    ("4", "if logits[parent, token] >= half[parent]:", "if True:"),
    ("4", "- math.log(2)", "- 2"),
    (
        "5",
        "values, ids = logprobs.sort(descending=True, stable=True)",
        "ids = torch.where(logprobs.isfinite(), -logprobs, -torch.inf).sort(descending=True)[1]\n"
        "        values = logprobs.gather(1, ids)",
    ),
]


@needs_git
@pytest.mark.slow
@pytest.mark.parametrize(("number", "old", "new"), WRONG)
def test_a_wrong_answer_prints_other_numbers(
    number: str, old: str, new: str, tmp_path: Path
) -> None:
    """Check every child accepted, another ratio, and the least frequent tokens first."""
    assert run_solution(number, tmp_path, old, new)


def test_the_solutions_are_short_and_all_on_the_page() -> None:
    files = sorted((ROOT / "docs" / "exercises").iterdir())
    assert [f"exercises/{file.name}" for file in files] == list(SOLUTIONS.values())
    for file in files:
        added = re.findall(r"^\+(?!\+\+ ).*\S", file.read_text(encoding="utf-8"), re.MULTILINE)
        assert 1 <= len(added) <= 15, file.name

"""The figures that README.md and docs/results.md show, made of results files between two marks.

    python bench.py --docs results/main_cpu.json results/enlarged_cpu.json results/steps_cpu.json

README.md shows a few columns of the first file, and of one of table `enlarged` if there is one, as
the embedded pair is bound by calls; docs/results.md shows everything of all of them.
What stands outside the marks is written by hand.
"""

from collections.abc import Sequence
from pathlib import Path

from benchmark.report import machine_text, markdown_report, markdown_table, prompts_text, run_cells
from benchmark.results import Results, write
from cli.errors import UsageError, shown
from engine.foreign import ForeignFile, read_text

START = "<!-- results: made by bench.py --docs -->"
END = "<!-- end of results -->"
README_COLUMNS = ["throughput", "speedup", "tokens_per_iter", "exact"]


def write_documents(root: Path, files: Sequence[str]) -> None:
    """Write both documents' made parts anew, or neither. Raises UsageError."""
    readme, page = root / "README.md", root / "docs" / "results.md"
    texts = {readme: replaced(readme, readme_part(files))}
    texts[page] = replaced(page, results_part(files))
    for document, text in texts.items():
        write(document, text)


def replaced(document: Path, part: str) -> str:
    """A document's text with this made part, the marks included. Raises UsageError."""
    try:
        text = read_text(document)
    except ForeignFile as error:
        raise UsageError(str(error)) from error
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    if text.count(START) != 1 or text.count(END) != 1 or END in before:
        raise UsageError(f"{document} lacks the lines that mark its results, one before the other")
    return before + part + after


def results_part(files: Sequence[str]) -> str:
    """Of docs/results.md: every file's whole table, in this order."""
    tables = [f"From `{shown(file)}`. {markdown_report(Results.load(file))}" for file in files]
    return "\n\n".join([START, *tables, END])


def readme_part(files: Sequence[str]) -> str:
    """Of README.md: how the methods compare, in a table with a sentence on the machine."""
    parts = [START]
    for file in files:
        results = Results.load(file)
        if file == files[0] or results.table == "enlarged":
            if not results.runs:
                raise UsageError(f"{file} has no methods for README's table: name it later")
            header, body = run_cells(results, README_COLUMNS)
            machine = machine_text(results.machine)
            sentence = shown(f"{prompts_text(results)}; {machine}, from `{file}`.")
            parts += [markdown_table(header, body), sentence]
    return "\n\n".join([*parts, END])

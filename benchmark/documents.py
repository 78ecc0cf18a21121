"""The figures that README.md and docs/results.md show, made of results files between two marks.

    python bench.py --docs results/main_cpu.json results/enlarged_cpu.json results/steps_cpu.json

README.md shows a few columns of the first file, and of one of table `enlarged` if there is one, as
the embedded pair is bound by calls; docs/results.md shows everything of all of them.
What stands outside the marks is written by hand.
"""

from collections.abc import Sequence
from pathlib import Path

from benchmark.report import machine_text, markdown_report, markdown_table, prompts_text, run_cells
from benchmark.results import Results
from cli.errors import UsageError, shown
from engine.files import write_whole
from engine.foreign import ForeignFile, read_bytes

START = "<!-- results: made by bench.py --docs -->"
END = "<!-- end of results -->"
README_COLUMNS = ["throughput", "speedup", "tokens_per_iter", "exact"]


def write_documents(root: Path, files: Sequence[str]) -> None:
    """Write both documents' made parts anew, or neither. Raises UsageError."""
    texts = {
        root / "README.md": readme_part(files),
        root / "docs" / "results.md": results_part(files),
    }
    for document, part in texts.items():
        texts[document] = replaced(document, part)
    for document, text in texts.items():
        try:
            write_whole(document, text)
        except OSError as error:
            raise UsageError(f"{document} cannot be written: {error.strerror}") from error


def replaced(document: Path, part: str) -> str:
    """A document's text with this made part, the marks included. Raises UsageError."""
    try:
        text = read_bytes(document).decode("utf-8")
    except ForeignFile as error:
        raise UsageError(str(error)) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{document} is not UTF-8: {error}") from error
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    if text.count(START) != 1 or text.count(END) != 1 or END in before:
        raise UsageError(f"{document} lacks the lines that mark its results, one before the other")
    return before + part + after


def results_part(files: Sequence[str]) -> str:
    """Of docs/results.md: every file's whole table, in this order."""
    parts = [START]
    for file in files:
        parts.append(f"From `{shown(file)}`. {markdown_report(Results.load(file))}")
    parts.append(END)
    return "\n\n".join(parts)


def readme_part(files: Sequence[str]) -> str:
    """Of README.md: how the methods compare, in a table with a sentence on the machine."""
    loaded = {file: Results.load(file) for file in files}
    if not loaded[files[0]].runs:
        raise UsageError(f"{files[0]} has no methods for README's table: name another file first")
    parts = [START]
    for file, results in loaded.items():
        if file == files[0] or results.table == "enlarged":
            header, body = run_cells(results, README_COLUMNS)
            machine = machine_text(results.machine)
            sentence = shown(f"{prompts_text(results)}; {machine}, from `{file}`.")
            parts += [markdown_table(header, body), sentence]
    return "\n\n".join(parts + [END])

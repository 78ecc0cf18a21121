"""The report of tools/gpu_check.sh: one screen, and all results in one JSON file.

It names what failed, passes that are slower than estimated with the kernels that take their time,
and the tables. The estimates were calculated from the sizes of the default pair for an H100, not
measured. They are scaled by the measured speed of a copy.

    python tools/gpu_report.py results/run_gpu
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs as a file, from anywhere

if __name__ == "__main__":
    from cli.start import run_program

    run_program("tools.gpu_report")

import json
import re
from argparse import Namespace
from collections.abc import Mapping, Sequence

from benchmark.report import table_cells, text_table
from benchmark.results import load
from cli.errors import Parser, UsageError, run_command_line, writing
from cli.files import write_whole
from tools.random_models import PYTHIA, describe_shapes

ESTIMATES_MS = {  # of captured passes, by model, slots and rows
    ("target", 512, 2): 2.95,
    ("target", 512, 32): 3.0,
    ("target", 512, 64): 3.3,
    ("target", 512, 256): 4.2,
    ("target", 2304, 32): 4.0,
    ("draft", 512, 8): 0.32,
}
TOO_SLOW = 1.5  # times the estimate
N_KERNELS = 6  # named of a slow pass
NAME_LENGTH = 50  # characters of a kernel's name
JSON_FILES = ("versions", "first_pass", "facts", "profile", "workspace")
TABLES = ("pair", "main", "memory")
PRINTED = ("pair",)
COPY_GB_S = 3000  # gigabytes per second that the estimates assume of a copy

Record = Mapping[str, object]
Results = dict[str, object]


def read_results(folder: Path) -> Results:
    """Return the results that a folder has, by the names of their files. Raises UsageError for a
    file that is no JSON."""
    found: Results = {}
    for name in JSON_FILES:
        file = folder / f"{name}.json"
        if file.exists():
            try:
                found[name] = json.loads(file.read_text("utf-8"))
            except ValueError as error:
                raise UsageError(f"{file} is no JSON: {error}") from error
    for name in TABLES:
        file = folder / f"{name}.jsonl"
        if file.exists():
            found[name] = read_table(file)
    return found


def read_table(file: Path) -> Results:
    """Return the models and cells of a table of bench.py, or only an error if the file is invalid:
    a process that was killed may leave such a file."""
    try:
        loaded = load(file)
        header, rows = table_cells(loaded)
    except UsageError as error:
        return {"error": str(error)}
    models = {role: loaded.head.machine.get(role) for role in ("target", "draft")}
    return models | {"columns": header, "rows": rows}


def merge_facts(results: Results) -> dict[str, object]:
    """Return the sections of tools/gpu_facts.py, which ran in two processes."""
    merged: dict[str, object] = {}
    for name in ("facts", "profile"):
        merged |= results.get(name, {})
    return merged


def find_failures(results: Results) -> list[str]:
    """Return a line for each failed step of the first pass, failed measurement and invalid
    table."""
    sections = {"first pass": results.get("first_pass", [])}
    sections |= {k: v for k, v in merge_facts(results).items() if isinstance(v, list)}
    sections |= {f"table {name}": [results[name]] for name in TABLES if name in results}
    lines = []
    for section, records in sections.items():
        for record in records:
            if "error" in record:
                words = [str(v) for k, v in record.items() if k not in ("error", "ms")]
                lines.append(f"{' '.join([section, *words])}: {record['error']}")
    return lines


def estimates_of(facts: Mapping[str, list[Record]]) -> dict[tuple, float]:
    """Return the estimates by model, slots and rows, scaled by the measured speed of a copy. They
    are empty for models of other shapes."""
    if facts.get("shapes") != describe_shapes(PYTHIA):
        return {}
    measured = [record["copy_gb_s"] for record in facts.get("passes", []) if "copy_gb_s" in record]
    scale = COPY_GB_S / measured[0] if measured else 1.0
    return {place: round(ms * scale, 2) for place, ms in ESTIMATES_MS.items()}


def find_slow_passes(facts: Mapping[str, list[Record]]) -> list[str]:
    """Return a line for each pass that takes more than TOO_SLOW times its estimate, with the
    kernels that take most of its time."""
    lines, estimates = [], estimates_of(facts)
    for record in facts.get("passes", []):
        place = tuple(record.get(name) for name in ("model", "slots", "rows"))
        estimate = estimates.get(place)
        if estimate and record["device_ms"] > TOO_SLOW * estimate:
            role, n_slots, n_rows = place
            lines.append(
                f"{role}, {n_rows} rows, {n_slots} slots: {record['device_ms']:.2f} ms, estimated "
                f"{estimate}; {kernels_of(facts.get('profile', []), place)}"
            )
    return lines


def kernels_of(profile: Sequence[Record], place: tuple) -> str:
    """Return the longest kernels of a pass in words, or that it was not profiled."""
    names = ("model", "slots", "rows")
    rows = [r for r in profile if tuple(r.get(name) for name in names) == place]
    total = next((r for r in rows if r["kernel"] == "all"), None)
    if total is None:
        return "not profiled"
    named = [r for r in rows if r["kernel"] != "all"][:N_KERNELS]
    kernels = (f"{r['us'] / 1e3:.2f} ms in {r['count']} of {short(r['kernel'])}" for r in named)
    return f"its {total['count']} kernels take {total['us'] / 1e3:.2f} ms: {', '.join(kernels)}"


def short(kernel: str) -> str:
    """Return the beginning of a kernel's name, without its return type and torch's namespace."""
    return kernel.removeprefix("void ").replace("at::native::", "")[:NAME_LENGTH]


def pass_cells(facts: Mapping[str, list[Record]]) -> list[list[str]]:
    """Return the cells of the table of captured passes."""
    rows, estimates = [], estimates_of(facts)
    for r in facts.get("passes", []):
        if "device_ms" in r:
            estimate = estimates.get((r["model"], r["slots"], r["rows"]), "")
            times = f"{r['device_ms']:.3f}", f"{r['spread']:.0%}", f"{r['floor_ms']:.3f}"
            rows.append([r["model"], str(r["slots"]), str(r["rows"]), *times, str(estimate)])
    return rows


def print_report(results: Results) -> None:
    """Print the times of passes, the tables of the default pair, and what is wrong."""
    versions, facts = results.get("versions", {}), merge_facts(results)
    print(f"{versions.get('device', 'no device')}, torch {versions.get('torch', '?')}")
    header = ["model", "slots", "rows", "ms", "spread", "floor ms", "estimated ms"]
    if passes := pass_cells(facts):
        print(text_table(header, passes, 80))
    for name in PRINTED:
        found = results.get(name, {})
        if "rows" in found:
            print(f"\n{name}: {found['target']} and {found['draft']}")
            print(text_table(found["columns"], found["rows"], 80))
    for line in find_failures(results):
        print(f"failed: {line}")
    for line in find_slow_passes(facts):
        print(f"slow: {line}")


def execute(args: Namespace) -> int:
    folder = Path(args.folder)
    results = read_results(folder)
    if not results:
        raise UsageError(f"{folder} has no results of tools/gpu_check.sh")
    device = str(results.get("versions", {}).get("device", "unknown"))
    name = "_".join(re.findall(r"\w+", device.removeprefix("NVIDIA "))).lower()
    file = folder / f"gpu_{name}.json"
    with writing(file):
        write_whole(file, json.dumps(results, indent=1) + "\n")
    print_report(results)
    print(f"\nall results: {file}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    summary = __doc__ and __doc__.splitlines()[0]
    parser = Parser(prog="tools/gpu_report.py", description=summary)
    parser.add_argument("folder", help="folder of the results")
    return run_command_line(execute, parser, arguments)

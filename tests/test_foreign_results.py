"""Results and prompt files that somebody else wrote, mutated at random: shown, or one line."""

import copy
import json
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from bench import main
from benchmark.plot import drawings
from benchmark.prompts import load_prompts
from benchmark.results import Results, Run
from cli.errors import UsageError

Captured = pytest.CaptureFixture[str]
MACHINE = {"target": "T", "draft": "D", "dtype": "float32", "processor": "P", "threads": 2}
MACHINE |= {"torch": "2.13.0", "python": "3.11", "commit": "abc", "transformers": "5.0"}
METRICS = {"throughput": 50.0, "tokens_per_iter": 2.0, "path_length": 1.0, "iterations": 5}
METRICS |= {"acceptance": 0.5, "draft_nodes": 2.0, "new_tokens": 11, "draft_passes": 3.0}
METRICS |= {"draft_ms": 1.0, "verify_ms": 4.0, "other_ms": 0.5, "peak_mb": 300.0, "floor_mb": 9}
TIMES = {"context": 200, "rows": [1, 2, 4], "target_ms": [4.0, 5.0, 6.0]}
TIMES |= {"draft_ms": [1.0, 1.0, 2.0], "copy_gb_s": 20.0, "target_bytes": 10, "draft_bytes": 5}
COLUMNS = ["throughput", "speedup", "spread", "predicted", "speedup_mean", "code_acceptance"]
COLUMNS += ["setup", "draft_passes", "more_memory", "exact"]
LABELS = ("ar", "fixed D=3", "fixed D=4", "dynatree tau_h=0.8", "fixed D=4 B=2", "hf-ar")
STRANGE = (None, True, False, -1, 0, 2.5, 10**400, 1e300, 1e-300, "", "x", [], {})
STRANGE += ("\x1b[2J\n\ud800", "ar", "a$b$ \\frac", "../..")


def whole(table: str) -> dict:
    """A results file with everything that one can have, at two lengths."""
    sizes = {"prompt_tokens": [5], "new_tokens": [10, 20], "temperature": [0.0]}
    prompts = {"dataset": "builtin", "n": 2, "sha256": "0"}
    found = Results(table, COLUMNS, {"repeats": 1}, MACHINE, prompts, sizes, [], step_times=TIMES)
    for n in sizes["new_tokens"]:
        for label in LABELS:
            method, *settings = label.split()
            run = Run(f"{label} T={n}", method, tuple(settings), "keep", 5, n, 0.0, f"ar T={n}")
            found.runs.append(run)
            found.setup_s[run.label] = 0.5
            found.records.append(record_of(run))
    found.runs[1].published["throughput"] = "119.4"
    return json.loads(json.dumps(asdict(found)))


def record_of(run: Run) -> dict:
    record = {"run": run.label, "prompt": 0, "repeat": 0, "metrics": METRICS, "token_ids": [1, 2]}
    record["predicted_ms"] = 10.0
    record["depths"] = {"drafted": [40, 30], "tried": [40, 30], "accepted": [30, 10]}
    record["calibration"] = {"drafted": [100, 40], "matching": [10, 20]}
    if run.method == "fixed":
        record["token_ids"] = [1, 3]
        record["difference"] = {"at": 1, "gap": None, "is_tie": False}
    return record


def places(value: object) -> list[tuple[object, object]]:
    """Every (list or object, index or key) in a JSON value."""
    found = []
    if isinstance(value, dict):
        found = [(value, key) for key in value]
    elif isinstance(value, list):
        found = [(value, i) for i in range(len(value))]
    for holder, key in list(found):
        found += places(holder[key])
    return found


def mutate_value(value: object, rng: random.Random) -> None:
    """Drop a part of it, change its type or size, put another in its place, or repeat it."""
    holder, key = rng.choice(places(value))
    kind = rng.randrange(4)
    if kind == 0:
        del holder[key]
    elif kind == 1:
        holder[key] = rng.choice(STRANGE)
    elif kind == 2:
        other, place = rng.choice(places(value))
        holder[key] = copy.deepcopy(other[place])
    else:
        holder[key] = [holder[key]]


def mutate_text(text: bytes, rng: random.Random) -> bytes:
    """Cut it short, flip a byte, or nest something deep."""
    at = rng.randrange(len(text))
    kind = rng.randrange(4)
    if kind == 0:
        return text[:at]
    if kind == 1:
        return text[:at] + bytes([rng.randrange(256)]) + text[at + 1 :]
    if kind == 2:
        return text[:at] + b"[" * 100_000 + text[at:]
    return text[:at] + b"9" * 5000 + text[at:]


def mutated(content: object, rng: random.Random, write: Callable[[object], str]) -> bytes:
    """A file's bytes, of this content mutated once or several times."""
    content = copy.deepcopy(content)
    if rng.random() < 0.2:
        return mutate_text(write(content).encode(), rng)
    for _ in range(rng.choice((1, 1, 2, 4))):
        mutate_value(content, rng)
    return write(content).encode()


def outcome(file: Path, kind: str, capsys: Captured) -> int:
    """What --show ends in; whatever it says of a mistake is one line."""
    status = main(["--show", str(file), "--format", kind])
    captured = capsys.readouterr()
    if status == 0:
        assert captured.out and captured.err == ""
    else:
        assert captured.out == "" and captured.err.startswith("error: ")
        assert captured.err.count("\n") == 1 and "Traceback" not in captured.err
    assert "\x1b" not in captured.out + captured.err
    return status


@pytest.mark.parametrize("table", ["main", "steps"])
def test_a_mutated_results_file_is_shown_or_refused(
    table: str, capsys: Captured, tmp_path: Path
) -> None:
    rng = random.Random(17)
    content = whole(table)
    file = tmp_path / "r.json"
    statuses = set()
    for _ in range(200):
        file.write_bytes(mutated(content, rng, json.dumps))
        status = outcome(file, rng.choice(("text", "markdown")), capsys)
        statuses.add(status)
        try:
            drawings(Results.load(file))
        except UsageError as error:
            assert status == 2 or "\n" not in str(error)
    assert statuses == {0, 2}


def test_a_mutated_prompt_file_is_read_or_refused(tmp_path: Path) -> None:
    rng = random.Random(17)
    lines = [{"prompt": f"Text {n}.", "id": n} for n in range(4)]
    n_read = 0
    for i in range(300):
        file = tmp_path / f"{i}.jsonl"
        file.write_bytes(mutated(lines, rng, write_lines))
        try:
            texts = load_prompts("builtin", str(file))
        except UsageError:
            continue
        n_read += 1
        assert texts and all(text.encode() for text in texts)
    assert 0 < n_read < 300


def write_lines(lines: list) -> str:
    return "\n".join(json.dumps(line) for line in lines)

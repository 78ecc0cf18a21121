"""Results files that somebody else wrote, changed anywhere: shown, or one line."""

import copy
import json
import random
from pathlib import Path

import pytest

from bench import main

Captured = pytest.CaptureFixture[str]
RESULTS = Path(__file__).parent.parent / "results"
COLUMNS = ["throughput", "speedup", "spread", "predicted", "speedup_mean", "code_acceptance"]
COLUMNS += ["setup", "draft_passes", "more_memory", "exact", "end_to_end_speedup", "wall_speedup"]
COLUMNS += ["tokens_pooled", "iterations_mean"]
STRANGE = (None, True, False, -1, 0, 2.5, 10**400, 1e300, 1e-300, "", "x", [], {})
STRANGE += ("\x1b[2J\n\ud800", "ar", "../..", [[[]]], {"ar": 1})


def whole(table: str) -> dict:
    """A results file with everything that one can have, at two lengths: a committed one's first
    rows, of one prompt and three ids each."""
    content = json.loads((RESULTS / "length_cpu.json").read_text())
    steps = json.loads((RESULTS / "steps_cpu.json").read_text())
    content |= {"table": table, "columns": COLUMNS, "step_times": steps["step_times"]}
    content["runs"] = [run for run in content["runs"] if run["new_tokens"] < 500]
    for run in content["runs"][1:4]:
        run["method"] = "fixed"
    labels = [run["label"] for run in content["runs"]]
    content["setup_s"] = dict.fromkeys(labels, 0.5)
    kept = [r for r in content["records"] if r["run"] in labels and not r["prompt"]]
    for i, record in enumerate(kept):
        record |= {"token_ids": record["token_ids"][:3], "predicted_ms": 10.0}
        record["metrics"] |= {"peak_mb": 300.0, "code_acceptance": 0.5, "wall_ms": 5.0}
        if i == 4:
            record |= {"token_ids": [1], "difference": {"at": 1, "gap": None, "is_tie": False}}
    content["runs"][1]["published"]["throughput"] = "119.4"
    content["options"]["baseline"] = "ar"
    return content | {"records": kept}


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


def changed(content: object, rng: random.Random) -> object:
    """This content with a part or several dropped, put in a list, or another in their place."""
    content = copy.deepcopy(content)
    for _ in range(rng.randint(1, 3)):
        holder, key = rng.choice(places(content))
        kind = rng.choice(["drop", "nest", "copy", "strange"])
        if kind == "drop":
            del holder[key]
        elif kind == "nest":
            holder[key] = [holder[key]]
        elif kind == "copy":
            other, place = rng.choice(places(content))
            holder[key] = copy.deepcopy(other[place])
        else:
            holder[key] = copy.deepcopy(rng.choice(STRANGE))
    return content


@pytest.mark.parametrize("kind", ["text", "markdown"])
@pytest.mark.parametrize("table", ["main", "steps"])
def test_a_results_file_is_shown_or_refused(
    table: str, kind: str, capsys: Captured, tmp_path: Path
) -> None:
    """Whatever is wrong is one line, and nothing in it is obeyed by a terminal."""
    file, rng = tmp_path / "r.json", random.Random(f"{table} {kind}")
    for _ in range(50):
        file.write_text(json.dumps(changed(whole(table), rng)))
        status = main(["--show", str(file), "--format", kind])
        captured = capsys.readouterr()
        if status == 0:
            assert captured.out and captured.err == ""
        else:
            assert status == 2 and captured.out == "" and captured.err.startswith("error: ")
            assert captured.err.count("\n") == 1
        assert "\x1b" not in captured.out + captured.err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "truncated"),
        (b"[]", "Expected `object`"),
        (b'{"format": 1}', "not a results file of format 3: "),
        (json.dumps(whole("main")).replace('"format": 3, ', "").encode(), "field `format`"),
        (b'{"x": ' + b"[" * 100_000, ""),
        (json.dumps(whole("main")).replace("300.0", "1e999").encode(), "Number out of range"),
        (json.dumps(whole("main")).replace("300.0", "9" * 5000).encode(), "out of range"),
        (json.dumps(whole("main")).replace("300.0", "NaN").encode(), "malformed"),
        (
            json.dumps(whole("main")).replace('"fixed"', '"other"').encode(),
            "unknown method 'other'",
        ),
        (json.dumps(whole("main")).replace("linear T", "fixed T").encode(), "of one label"),
    ],
)
def test_what_is_no_results_file(
    content: bytes, said: str, capsys: Captured, tmp_path: Path
) -> None:
    file = tmp_path / "r.json"
    file.write_bytes(content)
    assert main(["--show", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "r.json" in line and said in line

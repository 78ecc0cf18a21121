"""Figures: every table's is drawn, from the right numbers; the drawing needs matplotlib."""

import math
import struct
from itertools import product
from pathlib import Path

import pytest

from benchmark.plot import COLOURS, KINDS, acceptance_by_depth, grid, main, setting
from benchmark.results import Results, Run
from benchmark.tables import TABLES

MACHINE = {"target": "T", "draft": "D", "dtype": "float32", "processor": "P", "threads": 2}
MACHINE |= {"torch": "2.13.0", "python": "3.11", "commit": "abc"}
TIMES = {"context": 200, "rows": [1, 2, 4], "target_ms": [4.0, 5.0, 6.0]}
TIMES |= {"draft_ms": [1.0, 1.0, 2.0], "copy_gb_s": 20.0, "target_bytes": 10, "draft_bytes": 5}


NAMES = ["ar", "linear", "fixed D=3 B=2 tau=0.1", "dynatree tau_h=0.9 tau_l=0.4"]
NAMES += ["fixed D=4 B=2 tau=0.1", "fixed D=3 B=3 tau=0.1"]


def made_up(table: str) -> Results:
    """A few runs on two prompts, at two sizes where the table varies them."""
    sizes = [10]
    if table in ("length", "prompt"):
        sizes = [10, 20]
    runs = []
    for name, size in product(NAMES, sizes):
        words = name.split()
        settings = tuple(words[1:])
        label = f"{name} T={size}"
        runs.append(Run(label, words[0], settings, "keep", size, size, 0.0, f"ar T={size}"))
    found = Results(table, [], {"repeats": 1}, MACHINE, {}, {}, runs, step_times=TIMES)
    for i, (run, prompt) in enumerate(product(runs, range(2))):
        record = {"run": run.label, "prompt": prompt, "repeat": 0, "token_ids": []}
        record["metrics"] = {"throughput": 50.0 + i, "tokens_per_iter": 50.0 + i}
        if i > 3:
            record["depths"] = {"drafted": [40, 20, 20, 9], "accepted": [30, 10 * prompt, 0, 9]}
        found.records.append(record)
    return found


def png_size(file: Path) -> tuple[int, int]:
    head = file.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


def test_a_figure_belongs_to_a_table() -> None:
    assert set(TABLES) - set(KINDS) == {"memory"}


@pytest.mark.parametrize("table", KINDS)
def test_figures_are_written(
    table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    made_up(table).save(tmp_path / "r.json")
    assert main([str(tmp_path / "r.json"), "--output", str(tmp_path / "made")]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == [str(tmp_path / "made" / f"r{ending}.png") for ending in KINDS[table]]
    for file in printed:
        assert png_size(Path(file)) == (1200, 675)


def test_acceptance_by_depth_is_summed_over_prompts() -> None:
    """As deep as enough trees went; at depth 4 there are 18."""
    ar, linear, fixed, *_ = made_up("main").rows()
    assert acceptance_by_depth(ar) == acceptance_by_depth(linear) == []
    assert acceptance_by_depth(fixed) == [0.75, 0.25, 0.0]
    fixed.records[1, 0]["depths"] = {"drafted": [40], "accepted": [30]}
    assert acceptance_by_depth(fixed) == [0.75, 0.0, 0.0]


def test_every_method_has_a_colour_of_its_own() -> None:
    assert len(set(COLOURS)) == len(COLOURS)


def test_a_grid_puts_each_run_at_its_settings() -> None:
    _, _, first, _, deeper, wider = made_up("sweep").rows()
    xs, ys, values = grid([first, deeper, wider], "B", "D")
    assert (xs, ys) == ([2, 3], [3, 4])
    assert values[0] == [first.speedup, wider.speedup]
    assert values[1][0] == deeper.speedup and math.isnan(values[1][1])
    assert setting(first, "N_max") == 64  # not named, so the method's default


def test_mistakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def error_of(*arguments: str) -> str:
        assert main(arguments) == 2
        return capsys.readouterr().err

    file = str(tmp_path / "r.json")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert "cannot be read: No such file" in error_of(file)
    made_up("other").save(Path(file))
    assert "no figure for table 'other'; there are main, " in error_of(file)
    empty = made_up("main")
    empty.records = []
    empty.save(Path(file))
    assert "has no records yet" in error_of(file)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert error_of(file) == "error: figures need matplotlib: pip install matplotlib==3.11.2\n"


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    made_up("steps").save(tmp_path / "r.json")
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "r.json"), "--output", str(tmp_path / "file")]) == 2
    assert "cannot be written" in capsys.readouterr().err

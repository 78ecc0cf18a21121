"""Figures: which ones a file gives, and that each shows the file's numbers; drawing needs
matplotlib."""

import json
import math
import struct
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmark import plot_lines, plot_sweeps
from benchmark.columns import COLUMNS
from benchmark.plot import CROWD, LONGEST, drawings, main, save
from benchmark.plot_bars import place_bars
from benchmark.plot_canvas import COLOURS
from benchmark.plot_lines import shares, summed
from benchmark.plot_sweeps import grid, grid_panels, group, setting, setting_panels
from benchmark.report import name_of, text_report
from benchmark.results import Results, Run
from benchmark.rows import choose_runs
from benchmark.tables import PRESETS, SYMBOLS, TABLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MACHINE = {"target": "T", "draft": "D", "dtype": "float32", "processor": "P", "threads": 2}
MACHINE |= {"torch": "2.13.0", "python": "3.11", "commit": "abc"}
TIMES = {"context": 200, "rows": [1, 2, 4], "target_ms": [4.0, 5.0, 6.0]}
TIMES |= {"draft_ms": [1.0, 1.0, 2.0], "copy_gb_s": 20.0, "target_bytes": 10, "draft_bytes": 5}
FIELDS = {symbol: name for name, symbol in SYMBOLS.items()}  # of Run

METHODS = ("ar", "linear", "dynatree", "hf-ar")
GRID = ("ar", "fixed D=3 B=2", "fixed D=3 B=3", "fixed B=2 D=4", "fixed D=4 B=3", "fixed D=3")
GRID += ("dynatree tau_h=0.8 tau_l=0.3", "dynatree tau_h=0.8", "dynatree tau_l=0.3", "dynatree")
OF_GRID = {"_grid", "_settings", "_passes"}
OF_TREES = {"_depth", "_position", "_calibration"}


def run_of(name: str, place: str) -> Run:
    """A row there, as "linear K=3" at "on pg19 T=10"."""
    method, *words = name.split()
    settings = tuple(word for word in words if "=" in word)
    sizes = {"prompt_tokens": 5, "new_tokens": 10, "temperature": 0.0}
    for word in place.split():
        symbol, _, value = word.partition("=")
        if value:
            sizes[FIELDS[symbol]] = json.loads(value)
    label = f"{name} {place}".strip()
    return Run(label, method, settings, "keep", **sizes, baseline=f"ar {place}".strip())


def made_up(
    names: Sequence[str] = METHODS, places: Sequence[str] = ("",), table: str = "main"
) -> Results:
    """These rows at these places on two prompts; the throughputs are 50, 51, 52, ..."""
    return results_of([run_of(name, place) for place, name in product(places, names)], table)


def results_of(runs: Sequence[Run], table: str) -> Results:
    sizes: dict[str, list[float]] = {}
    for field in SYMBOLS:
        sizes[field] = sorted({getattr(run, field) for run in runs})
    prompts = {"dataset": "builtin", "n": 2}
    found = Results(table, [], {"repeats": 1}, MACHINE, prompts, sizes, runs, step_times=TIMES)
    for i, (run, prompt) in enumerate(product(runs, range(2))):
        record = {"run": run.label, "prompt": prompt, "repeat": 0, "token_ids": []}
        metrics = {"throughput": 50.0 + i, "tokens_per_iter": 2.0, "path_length": 1.0}
        metrics |= {"acceptance": 0.5, "draft_nodes": 2.0, "new_tokens": 11, "iterations": 5}
        metrics |= {"draft_ms": 1.0, "verify_ms": 4.0, "other_ms": 0.5, "draft_passes": 3.0}
        if run.method not in ("ar", "hf-ar"):
            tried = [40, 30, 20, 9]
            record["depths"] = {"drafted": [40, 30, 30, 9], "tried": tried}
            record["depths"]["accepted"] = [30, 10 * prompt, 0, 9]
            record["calibration"] = {"drafted": [100, 40, 4], "matching": [10, 20, 4]}
        found.records.append(record | {"metrics": metrics})
    return found


def of_memory(runs: Sequence[Run]) -> Results:
    results = results_of(runs, "memory")
    for i, record in enumerate(results.records):
        record["metrics"] = {"peak_mb": 300.0 + i, "floor_mb": 100.0}
    return results


def steps() -> Results:
    return made_up((), table="steps")


LENGTHS = ("T=10", "T=20")
DATASETS = ("on pg19", "on wikitext2")
BARS = {"", "_latency"} | OF_TREES
LINES = {"", "_progress"} | OF_TREES
MANY = ("ar",) + tuple(f"fixed D={d} B={b} tau=0.1" for d in range(3, 9) for b in (2, 3, 4, 5))
CASES = {
    "main": (made_up(), BARS),
    "two datasets": (made_up(places=DATASETS), BARS),
    "another name": (made_up(table="v9-1"), BARS),
    "ablation": (made_up(("ar", "dynatree adapt_depth=off", "dynatree")), BARS),
    "ar alone": (made_up(("ar",)), {"", "_latency"}),
    "lengths": (made_up(places=LENGTHS), LINES),
    "prompts": (made_up(places=("L=4", "L=8", "L=9")), LINES),
    "temperatures": (made_up(places=("t=0.0", "t=0.6")), LINES),
    "sampled": (made_up(places=("t=0.6", "t=1.0")), LINES - {"_calibration"}),
    "lengths of two datasets": (made_up(places=("on a T=1", "on a T=2", "on b")), LINES),
    "two sizes": (
        made_up(places=("L=4 T=1", "L=4 T=2", "L=5 T=1", "L=5 T=2")),
        {"_L", "_L_progress", "_T", "_T_progress"} | OF_TREES,
    ),
    "grid": (made_up(GRID), BARS | OF_GRID),
    "crowd": (made_up(MANY), OF_GRID),
    "lengths of a crowd": (
        made_up(MANY, LENGTHS),
        {"_optimum"} | {f"{ending}_{place}" for ending in OF_GRID for place in LENGTHS},
    ),
    "depths": (
        made_up(("ar", "linear K=2", "linear K=3", "linear K=4", "linear", "linear K=9")),
        BARS | {"_settings", "_passes"},
    ),
    "memory": (of_memory(made_up(METHODS[:3]).runs), {""}),
    "memory on two datasets": (of_memory(made_up(METHODS[:3], DATASETS).runs), {""}),
    "steps": (steps(), {""}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_drawn_follows_from_what_is_there(case: str) -> None:
    """And not from the table's name, which may be any paper's."""
    results, endings = CASES[case]
    assert set(drawings(results)) == endings


@pytest.mark.parametrize("table", TABLES | PRESETS)
def test_every_table_has_figures(table: str) -> None:
    """All of its rows are in one of them at least."""
    shown = (TABLES | PRESETS)[table]
    runs = choose_runs(shown)
    results = results_of(runs, table)
    if shown.is_memory:
        results = of_memory(runs)
    endings = set(drawings(results))
    names = {name_of(row) for row in results.rows()}
    if len(names) > CROWD:
        kinds = {ending.split("_")[1] for ending in endings}
        assert "settings" in kinds and kinds & {"grid", "passes"}
    else:
        assert "" in endings
    assert ("_optimum" in endings) == (table == "v1-4")


def png_size(file: Path) -> tuple[int, int]:
    head = file.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


@pytest.mark.parametrize("case", CASES)
def test_every_figure_is_drawn(case: str) -> None:
    pytest.importorskip("matplotlib")
    results, _ = CASES[case]
    for draw in drawings(results).values():
        figure = draw(results)
        assert any(axis.lines or axis.patches or axis.images for axis in figure.axes)


@pytest.mark.parametrize("case", ["main", "lengths", "lengths of a crowd", "memory", "steps"])
def test_figures_are_written(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    results, endings = CASES[case]
    results.save(tmp_path / "r.json")
    assert main([str(tmp_path / "r.json"), "--output", str(tmp_path / "made")]) == 0
    captured = capsys.readouterr()
    printed = captured.out.splitlines()
    assert sorted(printed) == sorted(str(tmp_path / "made" / f"r{end}.png") for end in endings)
    assert captured.err == ""
    for file in printed:
        width, height = png_size(Path(file))
        assert width >= 1200 and height >= 675


def drawn(results: Results, ending: str = "") -> "Figure":
    pytest.importorskip("matplotlib")
    return drawings(results)[ending](results)


def line_points(axis: "Axes") -> dict[str, list]:
    """Of the lines that have a name: their points."""
    return {line.get_label(): line.get_xydata().tolist() for line in axis.lines}


def test_bars_are_the_medians_and_each_dataset_has_its_own() -> None:
    results = made_up(places=DATASETS)
    (axis,) = drawn(results).axes
    heights = [patch.get_height() for patch in axis.patches]
    assert heights == [50.5 + 2 * i for i in range(8)]
    texts = [text.get_text() for text in axis.texts]
    assert texts[0] == texts[4] == "1x" and texts[1] == f"{results.rows()[1].speedup:.2f}x"
    bars = place_bars(results.rows())
    assert len({bar.x for bar in bars}) == 8, "none stands behind another"
    assert [bar.x + bar.width for bar in bars[:4]] == pytest.approx([bar.x for bar in bars[4:]])
    assert {bar.colour for bar in bars[:4]} != {bar.colour for bar in bars[4:]}
    assert len({bar.colour for bar in place_bars(made_up().rows())}) == 4


def test_latency_adds_up_to_the_time_per_token() -> None:
    (axis,) = drawn(made_up(), "_latency").axes
    first = axis.patches[:3]
    assert [patch.get_height() for patch in first] == [0.5, 2.0, 0.25]  # 5 iterations, 10 tokens
    assert [patch.get_y() for patch in first] == [0.0, 0.5, 2.5]
    assert len(axis.patches) == 3 * 3, "a peer does not tell"


def test_memory_beside_ar() -> None:
    (axis,) = drawn(of_memory(made_up(METHODS[:3]).runs)).axes
    heights = [patch.get_height() for patch in axis.patches]
    assert heights == [300.5, 100.0, 302.5, 100.0, 304.5, 100.0]
    assert [text.get_text() for text in axis.texts] == ["", "+0.7%", "+1.3%"]


def test_lines_by_length_keep_other_sizes_apart() -> None:
    figure = drawn(made_up(places=("on a T=10", "on a T=20", "on b T=10", "on b T=20")))
    left, right = figure.axes
    points = line_points(left)
    assert len(points) == 8 and points["ar on a"] == [[10.0, 50.5], [20.0, 58.5]]
    assert points["ar on b"] == [[10.0, 66.5], [20.0, 74.5]]
    assert line_points(right)["ar on b"] == [[10.0, 1.0], [20.0, 1.0]]
    panels = drawn(made_up(places=LENGTHS), "_progress").axes
    titles = ["tokens / iteration", "accepted / iteration", "accepted / drafted"]
    assert [axis.get_ylabel() for axis in panels] == titles


def test_counts_are_summed_over_prompts() -> None:
    """As deep as any; and of few a share is none."""
    ar, linear, dynatree, peer = made_up().rows()
    assert summed([ar, peer], "depths", "drafted") == []
    assert summed([linear], "depths", "accepted") == [60, 10, 0, 18]
    assert summed([linear, dynatree], "depths", "accepted") == [120, 20, 0, 36]
    linear.records[1, 0]["depths"] = {"accepted": [30]}
    assert summed([linear], "depths", "accepted") == [60, 0, 0, 9]
    assert shares([60, 10, 0, 18], [80, 60, 60, 18]) == [0.75, 1 / 6, 0.0, None]


def test_depth_is_of_the_trees_and_position_of_the_paths() -> None:
    results = made_up()
    (axis,) = drawn(results, "_depth").axes
    points = line_points(axis)
    assert set(points) == {"linear", "dynatree"}
    assert points["linear"] == [[1, 0.75], [2, 10 / 60], [3, 0.0]]
    (axis,) = drawn(results, "_position").axes
    assert line_points(axis)["linear"] == [[1, 0.75], [2, 10 / 60], [3, 0.0]]
    for record in results.records:
        if "depths" in record:
            record["depths"]["tried"] = [40, 20, 5, 9]
    (axis,) = drawn(results, "_position").axes
    assert line_points(axis)["linear"] == [[1, 0.75], [2, 0.25]]


def test_calibration_is_by_the_middle_of_each_bin() -> None:
    results = made_up()
    left, right = drawn(results, "_calibration").axes
    matched = left.lines[1].get_xydata().tolist()  # after the dotted one
    assert matched == [[1 / 6, 0.1], [0.5, 0.5]], "eight nodes say nothing"
    shares_of_all = [y for _, y in line_points(right)["linear"]]
    assert shares_of_all == [200 / 288, 80 / 288, 8 / 288]


def test_sampled_runs_say_nothing_of_calibration() -> None:
    results = made_up(places=("t=0.0", "t=0.6"))
    for record in results.records:
        if "calibration" in record and record["run"].endswith("t=0.6"):
            record["calibration"] = {"drafted": [999, 0, 0], "matching": [0, 0, 0]}
    left, _ = drawn(results, "_calibration").axes
    assert left.lines[1].get_xydata().tolist()[0] == [1 / 6, 0.1]


def test_files_from_before_there_were_such_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They have fewer figures, and a line says why."""
    pytest.importorskip("matplotlib")
    results = made_up()
    for record in results.records:
        record.pop("calibration", None)
        record.get("depths", {}).pop("tried", None)
        del record["metrics"]["draft_passes"]
    assert set(drawings(results)) == {"", "_latency", "_depth"}
    results.save(tmp_path / "r.json")
    assert main([str(tmp_path / "r.json")]) == 0
    assert "has no counts for the figures _position and _calibration" in capsys.readouterr().err


def test_every_method_has_a_colour_of_its_own() -> None:
    assert len(set(COLOURS)) == len(COLOURS)


def test_a_grid_puts_each_run_at_its_settings() -> None:
    """Also those that a label leaves to the defaults, and nothing else in the same cell."""
    names = GRID + ("fixed D=5", "fixed D=4 B=3 tau=0.1")
    names += ("dynatree adapt_breadth=off", "dynatree W=20")
    rows = made_up(names).rows()
    by_label = {row.run.label: row for row in rows}
    fixed, dynatree = grid_panels(rows)
    assert (fixed.title, fixed.x, fixed.y) == ("fixed ", "B", "D")
    xs, ys, values = grid(fixed.rows, "B", "D")
    assert (xs, ys) == ([2, 3], [3, 4, 5])
    assert values[0][1] == by_label["fixed D=3 B=3"].speedup
    assert values[1] == [by_label["fixed B=2 D=4"].speedup, by_label["fixed D=4 B=3"].speedup]
    assert values[2][0] == by_label["fixed D=5"].speedup and math.isnan(values[2][1])
    assert setting(by_label["fixed D=5"], "N_max") == 64  # not named, so the method's default
    xs, ys, values = grid(dynatree.rows, "tau_h", "tau_l")
    assert (xs, ys) == ([0.8, 0.9], [0.3, 0.4])
    assert values[1] == [by_label["dynatree tau_h=0.8"].speedup, by_label["dynatree"].speedup]
    assert len(dynatree.rows) == 4, "parts switched off, another window: not on this grid"


def test_no_length_takes_anothers_place_on_a_grid() -> None:
    """Each has its own figure, of its own speedups."""
    results = made_up(GRID, LENGTHS)
    shown = []
    for place in LENGTHS:
        figure = drawn(results, f"_grid_{place}")
        assert place in figure.get_suptitle()
        shown.append(figure.axes[0].images[0].get_array().tolist())
    rows = {row.run.label: row for row in results.rows()}
    for i, place in enumerate(LENGTHS):
        assert shown[i][1][1] == rows[f"fixed D=4 B=3 {place}"].speedup
    assert shown[0] != shown[1]


def test_a_line_joins_rows_that_differ_in_one_setting() -> None:
    rows = made_up(GRID + ("dynatree tau_h=0.7 rebuild",)).rows()
    panels = {(panel.title, panel.x): panel for panel in setting_panels(rows)}
    expected = {("fixed", "D"), ("fixed", "B"), ("dynatree", "tau_h"), ("dynatree", "tau_l")}
    assert set(panels) == expected
    labels = {}
    for label, alike in group(panels["dynatree", "tau_h"].rows, ("tau_h",)).items():
        labels[label] = [row.run.label for row in alike]
    assert labels == {
        "tau_l=0.3": ["dynatree tau_h=0.8 tau_l=0.3", "dynatree tau_l=0.3"],
        "": ["dynatree tau_h=0.8", "dynatree"],
        "rebuild": ["dynatree tau_h=0.7 rebuild"],
    }


def test_many_lines_are_shown_by_their_mean() -> None:
    names = ["ar"]
    for b, tau, d in product((2, 3, 4), (0.1, 0.2, 0.3), (3, 4)):
        names.append(f"fixed D={d} B={b} tau={tau}")
    results = made_up(names)
    figure = drawn(results, "_settings")
    points = line_points(figure.axes[0])
    deep = [row.speedup for row in results.rows()[1:] if setting(row, "D") == 4]
    assert points["mean"][1] == [4.0, pytest.approx(sum(deep) / 9)]


def test_draft_passes_are_of_a_whole_text() -> None:
    results, _ = CASES["depths"]
    (axis,) = drawn(results, "_passes").axes
    assert list(line_points(axis).values()) == [[[k, 15.0] for k in (2, 3, 4, 5, 9)]]


def test_the_optimum_of_each_length() -> None:
    """Figure 6 of v1: ar, and the row with the highest speedup, which is named."""
    results = made_up(("ar", "fixed D=3", "fixed D=4", "fixed D=5"), ("T=10", "T=20"))
    for record in results.records:
        if record["run"] == "fixed D=3 T=20":
            record["metrics"]["throughput"] = 900.0
    (axis,) = drawn(results, "_optimum").axes
    points = line_points(axis)
    assert points["ar"] == [[10.0, 50.5], [20.0, 58.5]]
    assert points["the fastest"] == [[10.0, 56.5], [20.0, 900.0]]
    names = [text.get_text().splitlines()[0] for text in axis.texts]
    assert axis.get_title() == "fixed" and names == ["D=5", "D=3"]


def test_rows_without_their_ar_are_no_trouble() -> None:
    """An interrupted sweep had no speedup to put on the grid, and ended in a traceback; so did one
    of other methods."""
    pytest.importorskip("matplotlib")
    results = made_up(GRID)
    results.records = [record for record in results.records if record["run"] != "ar"]
    assert set(drawings(results)) == BARS
    results.table = "sweep"
    for draw in drawings(results).values():
        draw(results)


def of_one_token(results: Results) -> Results:
    """What a bench of one new token leaves: nothing was timed after the first."""
    for record in results.records:
        record["metrics"] = dict.fromkeys(record["metrics"], 0.0) | {"new_tokens": 1}
        record["predicted_ms"] = 0.0
        for kind in ("depths", "calibration"):
            if kind in record:
                record[kind] = {name: [0 for _ in counts] for name, counts in record[kind].items()}
    return results


@pytest.mark.parametrize("names", [("ar",), METHODS, GRID])
@pytest.mark.parametrize("places", [("",), LENGTHS])
def test_texts_of_one_token(
    names: Sequence[str], places: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are shown and drawn, with no word of an axis that has no height."""
    results = of_one_token(made_up(names, places))
    results.columns = list(COLUMNS)
    results.save(tmp_path / "r.json")
    assert text_report(Results.load(tmp_path / "r.json"), 80)
    pytest.importorskip("matplotlib")
    assert main([str(tmp_path / "r.json")]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("n_left", [1, 3, 5])
def test_a_run_that_was_stopped_early(n_left: int) -> None:
    """Some rows have no text yet, some no text beside ar's."""
    switched_off = ("ar", "dynatree adapt_depth=off")
    for names, places in ((METHODS, ("",)), (GRID, LENGTHS), (switched_off, ("",))):
        results = made_up(names, places)
        results.records = results.records[:n_left]
        assert drawings(results)
        results.records = made_up(names, places).records[-n_left:]
        assert drawings(results)


def test_figures_of_metrics_that_are_not_there() -> None:
    results = made_up(("ar", "fixed", "dynatree adapt_depth=off"))
    assert set(drawings(results)) == BARS
    for record in results.records:
        del record["metrics"]["throughput"], record["metrics"]["iterations"]
    assert set(drawings(results)) == OF_TREES


def test_a_name_with_dollars_is_no_formula(tmp_path: Path) -> None:
    """It was, and a wrong one ended in a traceback."""
    pytest.importorskip("matplotlib")
    results = made_up(places=("on a$\\frac$", "on b"))
    results.save(tmp_path / "r.json")
    assert main([str(tmp_path / "r.json")]) == 0


def test_no_label_leads_to_another_folder(tmp_path: Path) -> None:
    assert all("/" not in ending for ending in drawings(made_up(GRID, ("on ../../x", "on y"))))


def test_places_of_alike_names_have_figures_of_their_own() -> None:
    """The last one's took the place of the others."""
    endings = set(drawings(made_up(GRID, ("on a/b", "on a b", "on a$b"))))
    for kind in OF_GRID:
        assert {f"{kind}_a_b", f"{kind}_a_b_", f"{kind}_a_b__"} <= endings


def test_a_figure_has_so_many_grids_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as a file has made one of gigabytes."""
    monkeypatch.setattr(plot_sweeps, "MOST", 1)
    figure = drawn(made_up(GRID), "_grid")
    assert figure.get_suptitle().endswith(": 1 grids of 2") and len(figure.axes) == 2  # its colours


def test_bins_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with 100,000 of them took hours: all were added up for each."""
    n_bins = 3000
    sums = []

    def count(numbers: Sequence[int]) -> int:
        sums.append(numbers)
        return sum(numbers)

    monkeypatch.setattr(plot_lines, "sum", count, raising=False)
    results = made_up()
    for record in results.records:
        if "calibration" in record:
            record["calibration"] = {"drafted": [40] * n_bins, "matching": [20] * n_bins}
    drawn(results, "_calibration")
    assert len(sums) < 10


def test_a_figure_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    steps().save(tmp_path / "r.json")
    (tmp_path / "r.png").write_bytes(b"old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    assert main([str(tmp_path / "r.json")]) == 2
    assert (tmp_path / "r.png").read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 2


def test_mistakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def error_of(*arguments: str) -> str:
        assert main(arguments) == 2
        return capsys.readouterr().err

    file = str(tmp_path / "r.json")
    assert "r.json is not there" in error_of(file)
    empty = made_up()
    empty.records = []
    empty.save(Path(file))
    assert "has no records yet" in error_of(file)
    steps().save(Path(file))
    assert error_of(file, "--output", "") == (
        "error: argument --output: is empty (--help lists everything)\n"
    )
    for module in ("matplotlib", "matplotlib.style"):
        monkeypatch.setitem(sys.modules, module, None)
    assert error_of(file) == "error: figures need matplotlib: pip install matplotlib==3.11.2\n"


def test_a_matplotlib_that_does_not_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that does not fit numpy, or MPLBACKEND is none."""

    def fail(name: str) -> None:
        raise ValueError("Key backend: 'foo'\nis not a valid value")

    monkeypatch.setattr("importlib.import_module", fail)
    steps().save(tmp_path / "r.json")
    assert main([str(tmp_path / "r.json")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "does not start (Key backend: 'foo')" in line and "MPLBACKEND" in line


def test_figures_are_the_same_whatever_the_user_has_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With text.usetex in a matplotlibrc, and no LaTeX, there was none."""
    matplotlib = pytest.importorskip("matplotlib")
    steps().save(tmp_path / "r.json")
    assert main([str(tmp_path / "r.json")]) == 0
    before = (tmp_path / "r.png").read_bytes()
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 30.0)
    monkeypatch.setitem(matplotlib.rcParams, "axes.facecolor", "red")
    assert main([str(tmp_path / "r.json")]) == 0
    assert (tmp_path / "r.png").read_bytes() == before


def test_a_name_that_no_font_has_is_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """matplotlib warned of each character, with an escape as it is."""
    pytest.importorskip("matplotlib")
    results = steps()
    results.machine = MACHINE | {"processor": "\x1b漢字"}
    results.save(tmp_path / "r.json")
    assert main([str(tmp_path / "r.json")]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"note: {tmp_path}/r.png: Glyph 27 (\\x1b) missing")


def test_a_text_without_end_is_cut(tmp_path: Path) -> None:
    """One of 200,000 characters took a minute."""
    pytest.importorskip("matplotlib")
    results = steps()
    results.machine = MACHINE | {"processor": "x" * 5000}
    figure = drawn(results)
    save(figure, tmp_path / "r.png")
    assert len(figure.get_supxlabel()) == LONGEST


@pytest.mark.parametrize(
    ("files", "output"),
    [
        (["a/x.json", "b/x.json"], "made"),
        (["a/x.json", "link/x.json"], None),
        (["a/x.json", "a/x.txt"], None),
        (["a/x.json", "a/x_depth.json"], None),
        (["b/x.json", "a/x.json", "a/x.json"], "b"),
        (["a/x.png"], None),
    ],
)
def test_no_figure_overwrites_another_or_its_results(
    files: list[str],
    output: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two files of one name the second's figures took the place of the first's."""
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        Path(folder).mkdir()
    Path("link").symlink_to("a")
    for name in files:
        made_up().save(Path(name))
    before = sorted(tmp_path.rglob("*"))
    arguments = list(files)
    if output:
        arguments += ["--output", output]
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert " is to be a figure of " in line and line.endswith(" another folder (--output)")
    assert sorted(tmp_path.rglob("*")) == before and Results.load(files[0]).records


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    steps().save(tmp_path / "r.json")
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "r.json"), "--output", str(tmp_path / "file")]) == 2
    assert "cannot be written" in capsys.readouterr().err

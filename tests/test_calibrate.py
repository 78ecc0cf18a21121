"""calibrate.py of tools/, on the CPU."""

import math
from collections import Counter
from types import SimpleNamespace

import pytest
from conftest import TINY, Captured, error_line

from benchmark.step_times import StepTimes
from cli.errors import UsageError
from cli.options import parse_settings
from draft_tree import lone
from dynatree import Step
from methods.retrieval import Graft
from methods.sequoia import Sequoia
from tools import calibrate

PAIR = ["--target", str(TINY / "target"), "--draft", str(TINY / "draft")]


def times_of(target_ms: list[float], draft_ms: list[float]) -> StepTimes:
    """Of passes of 1, 8 and 128 rows."""
    return StepTimes(200, [1, 8, 128], target_ms, draft_ms, 1, 1, 1.0)


def test_ranks_are_counted_by_the_row_that_was_accepted() -> None:
    """A step without a level, prefill's or the last one's, says nothing."""
    tree = SimpleNamespace(depth=1)
    steps = [
        Step([5]),
        Step([1, 2], tree, path=[0, 1]),
        Step([1, 2], tree, path=[0, 3]),
        Step([1], tree, path=[0]),
        Step([1], tree, path=[0, 3]),
        Step([1], lone(4), path=[0]),
    ]
    counts = calibrate.count_ranks(steps)
    assert counts == {0: 1, 2: 2, calibrate.N_RANKS: 1}
    assert calibrate.chances_of(counts) == (0.25, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0)
    with pytest.raises(UsageError, match="no tree of one level"):
        calibrate.chances_of(Counter())


def drafted(best: list[float], n_accepted: int) -> Step:
    """Of a tree whose best path has these probabilities, beside less likely rows."""
    tree = lone(1)
    for depth, p in enumerate(best):
        tree.add(2, 2 * depth - 1 if depth else 0, math.log(p))
        tree.add(3, tree.parents[-1], math.log(p / 2))
    return Step([1], tree, path=list(range(1 + n_accepted)))


def test_trees_are_looked_at_where_drafting_might_have_stopped() -> None:
    """Not at their last level: nothing was drafted below it."""
    steps = [Step([5]), drafted([0.5, 0.2, 0.1], 2), drafted([0.9, 0.4], 1), drafted([0.3], 1)]
    found = calibrate.look_deeper(steps)
    assert {depth: [seen[1] for seen in found[depth]] for depth in found} == {
        1: [True, False],
        2: [False],
    }
    assert [seen[0] for seen in found[1] + found[2]] == pytest.approx([0.5, 0.9, 0.2])


def test_checkpoints_are_where_confidence_tells_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """At depth 2 a threshold parts good trees from bad ones, at 1 it does so half, at 3 not at all;
    too few reach 4."""
    monkeypatch.setattr(calibrate, "MIN_TREES", 4)
    parted = [(0.1, False), (0.2, False), (0.5, True), (0.9, True)]
    half = [(0.1, False), (0.6, False), (0.5, True), (0.9, True)]
    assert calibrate.best_threshold(parted) == (1.0, 0.21)
    assert calibrate.best_threshold(half) == (0.5, 0.11)
    none = [(p, True) for p, _ in parted]
    assert calibrate.best_threshold(none) == (0.0, 0.0)
    found = {1: half, 2: parted, 3: none, 4: parted[:3]}
    assert calibrate.choose_checkpoints(found) == "1@0.11:2@0.21"
    assert calibrate.choose_checkpoints({3: none}) == "off"
    monkeypatch.setattr(calibrate, "N_CHECKPOINTS", 1)
    assert calibrate.choose_checkpoints(found) == "2@0.21"


def test_chances_of_successors_fall() -> None:
    assert calibrate.falling((0.5, 0.1, 0.2, 0.05, 0.0, 0.01)) == (0.5, 0.1, 0.1, 0.05)
    with pytest.raises(UsageError, match="no likeliest successor was accepted"):
        calibrate.falling((0.0, 0.5))


@pytest.mark.parametrize("base", ["dynatree", "beam:k=2"])
def test_a_calibration_of_graft(
    base: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends with settings to use; what it counts are the table's trees of one level."""
    monkeypatch.setattr(calibrate, "MIN_TREES", 2)
    short = ["--n-prompts", "2", "--prompt-tokens", "60", "--new-tokens", "30", "--method", "graft"]
    assert calibrate.main(short + PAIR + ["--base", base]) == 0
    lines = capsys.readouterr().out.splitlines()
    settings = parse_settings(Graft, lines[-1].split("--set ")[1:])
    assert settings.base == base and "@" in settings.checkpoints
    assert lines[0].startswith("chances of ") and lines[0].endswith(f" trees: {settings.p}")


def test_the_tree_that_promises_most_tokens_for_its_time() -> None:
    """Free rows and levels: the largest. Dear rows: a chain. A dear draft: ar."""
    chances = (0.5, 0.2)
    best, alone = calibrate.choose_tree(chances, times_of([10.0] * 3, [0.0] * 3))
    assert (best.n_rows, alone.tokens, alone.ms) == (128, 1.0, 10.0)
    best, _ = calibrate.choose_tree(chances, times_of([10.0, 17.0, 137.0], [0.1] * 3))
    assert (best.n_rows, best.depth) == (4, 2)  # 1.95 tokens in 13.2 ms; one row more: 2.075, 14.3
    best, alone = calibrate.choose_tree(chances, times_of([10.0] * 3, [9.0] * 3))
    assert best == alone


def test_a_calibration_ends_with_the_settings_to_use(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "MAX_DEPTH", 4)
    short = ["--n-prompts", "2", "--prompt-tokens", "30", "--new-tokens", "20"]
    assert calibrate.main(short + PAIR + ["--temperature", "0.6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    settings = parse_settings(Sequoia, lines[-1].split("--set ")[1:])
    assert lines[0].startswith("chances of ") and lines[0].endswith(f" trees: {settings.p}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--new-tokens", "2"], "--new-tokens 3"),
        (["--n-prompts", "0"], "--n-prompts and --prompt-tokens are at least 1"),
        (["--prompts", "none.txt"], "none.txt is not there"),
        (["--seed", "1"], "--seed needs a --temperature"),
        (["--draft-temperature", "0.6"], "shapes the trees of a calibration"),
        (["--base", "beam"], "--base is of --method graft"),
        (["--base", "none", "--method", "graft"], "no drafting method is called 'none'"),
    ],
)
def test_a_calibration_that_cannot_be_made(
    arguments: list[str], message: str, capsys: Captured
) -> None:
    assert message in error_line(capsys, calibrate.main, PAIR + arguments)

"""calibrate.py of tools/, on the CPU."""

from collections import Counter
from types import SimpleNamespace

import pytest
from conftest import TINY, Captured, error_line

from benchmark.step_times import StepTimes
from cli.errors import UsageError
from cli.options import parse_settings
from draft_tree import lone
from dynatree import Step
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
    with pytest.raises(UsageError, match="not finite"):
        calibrate.chances_of(Counter())


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
    ],
)
def test_a_calibration_that_cannot_be_made(
    arguments: list[str], message: str, capsys: Captured
) -> None:
    assert message in error_line(capsys, calibrate.main, PAIR + arguments)

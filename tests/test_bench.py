"""Tests of bench.py: a table end to end, what makes it fair, exactness, and errors of one line."""

import itertools
import json
import os
import random
import re
import shlex
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from small import TINY, Captured, error_line, random_model, run

import bench
from bench import ROWS, Row, Text, find_difference, main, make_table
from draft_tree import DynaTree
from dynatree import Metrics, measure
from sampling import Sampler, distance_to_interval
from verify import accept_greedy

DRAFT = str(TINY / "draft")
QUICK = ["--target", DRAFT, "--draft", DRAFT, "--max-new-tokens", "6"]
ONE = [*QUICK, "--prompt", "The ship sailed"]


@pytest.fixture(autouse=True)
def sigterm_as_before() -> Iterator[None]:
    """Undo that bench.py handles SIGTERM, so that it still ends the tests."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def cells(table: str) -> list[list[str]]:
    """Return the cells of a Markdown table, without the line below its head."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]


def test_a_table_has_every_row(capsys: Captured, tmp_path: Path) -> None:
    """Check the table, the progress and the lines of --json. A row may be one's own."""
    own, file = "tau=0.02 N_max=8", tmp_path / "texts.jsonl"
    options = ["--rows", "chain", "--row", own, "--rounds", "2", "--json", str(file)]
    assert main([*ONE, *options]) == 0
    captured = capsys.readouterr()
    head, ar, *others = cells(captured.out)
    assert head[3:] == ["tokens/iter", "rows/tree", "draft passes", "exact"]
    assert (ar[0], *ar[2:]) == ("ar", "1.00 (1.00 to 1.00)", "1.00", "1.0", "0.0", "2 of 2")
    assert [row[0] for row in others] == ["chain", own]
    assert all(row[-1] == "2 of 2" and float(row[3]) > 1 for row in others)
    assert "rounds" not in captured.out, "a note on rows that did not run"
    assert "prompt 1, ar: 6 tokens, " in captured.err and "\n6/6 prompt 1, " in captured.err
    texts = [json.loads(line) for line in file.read_text().splitlines()]
    assert [text["row"] for text in texts] == ["ar", "chain", own, "chain", own, "ar"]
    assert [text["round"] for text in texts] == [0] * 3 + [1] * 3
    assert len({tuple(text["metrics"]["ids"]) for text in texts}) == 1
    names = {"ids", "rate", "tokens_per_iter", "rows_per_tree", "draft_passes"}
    assert texts[0]["metrics"].keys() == names


def test_a_median_and_its_quartiles_are_those_of_the_pairs() -> None:
    """Check that each text is compared with ar on the same prompt in the same round."""
    rates = {"ar": [100, 200, 50, 10], "tree": [150, 200, 100, 30]}

    def is_wrong(row: str, i: int) -> bool:
        return row == "tree" and i == 3

    texts = [
        Text(row, i % 2, i // 2, Metrics([7, i + is_wrong(row, i)], rate, 2.0 + i, 9.0, 4.0))
        for row, values in rates.items()
        for i, rate in enumerate(values)
    ]
    _, ar, tree = cells(make_table(texts))
    assert ar == ["ar", "75.0", "1.00 (1.00 to 1.00)", "3.50", "9.0", "4.0", "4 of 4"]
    assert tree == ["tree", "125.0", "1.75 (1.38 to 2.25)", "3.50", "9.0", "4.0", "3 of 4"]


def test_rows_take_turns_with_a_seed_for_each_prompt_and_round(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Captured
) -> None:
    """Check the order, which the docstring of bench.py promises, and that the warm-up is first."""
    (tmp_path / "prompts").write_text("One text\n\nAnother text\n")
    calls: list[tuple[str, int, int, int]] = []
    real = bench.Bench.measure

    def note(self: bench.Bench, row: str, prompt: int, seed: int, max_new_tokens: int) -> Metrics:
        calls.append((row, prompt, seed, max_new_tokens))
        return real(self, row, prompt, seed, max_new_tokens)

    monkeypatch.setattr(bench.Bench, "measure", note)
    words = f"--prompts {tmp_path}/prompts --rows tree,+prune --rounds 2 --temperature 1 --seed 7"
    assert main([*QUICK, *words.split()]) == 0
    rows = ["ar", "tree", "+prune"]
    assert calls[:3] == [(row, 0, 0, 8) for row in rows]
    for turn, prompt in enumerate([0, 1, 0, 1]):
        first = turn % 3
        expected = [(row, prompt, 7 + turn, 6) for row in rows[first:] + rows[:first]]
        assert calls[3 + 3 * turn :][:3] == expected
    assert {row[-1] for row in cells(capsys.readouterr().out)[1:]} == {"4 of 4"}


def test_each_row_has_one_part_more() -> None:
    """Check the rows from tree to dynatree, which differ in nothing else."""
    names = ["tree", "+prune", "+breadth", "+depth", "dynatree"]
    parts = ["prune", "adapt_breadth", "adapt_depth", "history"]
    for above, below, part in zip(names[:-1], names[1:], parts, strict=True):
        above, below = ROWS[above].settings, ROWS[below].settings
        assert getattr(below, part) and replace(below, **{part: False}) == above
    assert ROWS["dynatree"] == Row(DynaTree()) and ROWS["unscaled"] == Row(DynaTree(), 1.0)


def test_a_row_may_have_a_draft_temperature(capsys: Captured) -> None:
    """Check that it replaces that of the options, and that notes belong to rows."""
    rows = ["--rows", "dynatree,unscaled", "--max-new-tokens", "32"]
    pair = ["--target", str(TINY / "target"), "--draft", DRAFT, *rows, "--prompt", "The ship"]
    assert main(pair) == 0
    head, _, scaled, plain = cells(out := capsys.readouterr().out)
    assert scaled[head.index("rows/tree")] != plain[head.index("rows/tree")]
    assert "unscaled is dynatree at draft temperature 1" in out and "one part of" not in out
    assert main([*pair, "--draft-temperature", "2"]) == 0
    given, own = (row[3:] for row in cells(capsys.readouterr().out)[2:])
    assert own == plain[3:] and given not in (plain[3:], scaled[3:])


def spoil(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change an id of every text of more than one token per iteration."""

    def measure_wrong(*arguments: object) -> Metrics:
        found = measure(*arguments)
        if found.rows_per_tree > 1:
            found.ids[2] += 1
        return found

    monkeypatch.setattr(bench, "measure", measure_wrong)


EXACTNESS = [  # options, the gap that is pretended (None: the target's own), the exit status
    ([], None, 1),
    ([], 2e-4, 1),
    ([], 5e-5, 0),
    (["--dtype", "bfloat16"], 1.0, 0),
    (["--temperature", "1"], None, 1),
    (["--temperature", "1"], 5e-5, 0),
]


@pytest.mark.parametrize(("options", "gap", "status"), EXACTNESS)
def test_a_wrong_text_is_status_1_but_a_near_tie_is_not(
    options: list[str],
    gap: float | None,
    status: int,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoil(monkeypatch)
    if gap is not None:
        monkeypatch.setattr(bench, "find_difference", lambda *arguments: (2, gap))
    assert main([*ONE, "--rows", "tree", *options]) == status
    captured = capsys.readouterr()
    assert cells(captured.out)[2][-1] == "0 of 1"
    what = "random number's distance" if "--temperature" in options else "top-2 gap"
    where = f"prompt 1, tree: the ids differ from token 2 on, where the {what} is "
    assert re.search(f"^{where}[\\d.e-]+$", captured.err, re.MULTILINE)


def draws(seed: int) -> Iterator[float]:
    """Yield the random numbers of a seed."""
    numbers = random.Random(seed)
    while True:
        yield numbers.random()


def test_a_difference_is_found_with_its_gap() -> None:
    """Check the logits of greedy text, and random number 2 of sampled text."""
    model = random_model(3)
    logits = run(model, [1, 2, 7, 8])[-1]
    best, second = logits.sort(descending=True).values[:2].tolist()
    texts = [1, 2], [7, 8, 9, 5], [7, 8, 6, 5]
    found = find_difference(model, *texts, accept_greedy)
    assert found == (2, pytest.approx(best - second, abs=1e-4))
    probs, number = logits.softmax(dim=-1), [*itertools.islice(draws(4), 3)][-1]
    distances = [distance_to_interval(probs, token, number) for token in (9, 6)]
    found = find_difference(model, *texts, Sampler(1.0, seed=4))
    assert found == (2, pytest.approx(max(distances), abs=1e-6)) and min(distances) < found[1]


FILES = [  # the text of a file, its prompts
    ('\ufeff{"prompt": "A text,\\u2028\\"quoted\\"", "id": 3}\r\n  \n', ['A text,\u2028"quoted"']),
    ('{"turns": ["One.", "Two."]}\n', ["One."]),
    ('"One."\n"Two\\nlines."\n', ["One.", "Two\nlines."]),
    ('One {text}\n{"prompt": "x"}\n', ["One {text}", '{"prompt": "x"}']),
    ("Two\nlines.\n \n\nOne.\n", ["Two\nlines.", "One."]),
]


@pytest.mark.parametrize(("text", "prompts"), FILES)
def test_prompts_may_be_text_or_json(text: str, prompts: list[str], tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_bytes(text.encode())
    assert bench.choose_prompts(bench.parse_arguments(["--prompts", str(file)])) == prompts
    assert bench.choose_prompts(bench.parse_arguments(["--prompt", "x"])) == ["x"]
    assert len(bench.choose_prompts(bench.parse_arguments([]))) == 8


MISTAKES = [  # options, the text of a file named `prompts`, words of the error line
    ("--rows none", "a", "--rows none: a row must be one of ar, chain, tree, "),
    ("--row tau=x", "a", "tau=x: tau must be of type float"),
    ("--row 'N_max=8 W=0'", "a", "W is 0, it must be from 1 to 1000"),
    ("--prompts nowhere", "a", "nowhere"),
    ("--prompts prompts", " \n", "prompts has no prompt"),
    ("--prompts prompts", '{"text": "a"}', "prompts, line 1 has no text as `prompt`"),
    ("--prompts prompts", '{"prompt": "a"}\n\n{"prompt": 5}', "prompts, line 3 has no text"),
    ("--prompts prompts", '{"prompt": "a"}\nnull', "prompts, line 2 has no text"),
    ("--prompts prompts", "{", "prompts, line 1 is not JSON: "),
    ("--prompts prompts", '[{"prompt": "a"}]', "prompts is a JSON array; use one JSON object per"),
    ("--prompts prompts", " = Title = \n", "prompts is raw WikiText; use one JSON object per line"),
    ("--prompts prompts", "\udce9", "prompts is not UTF-8: "),
    ("--prompt ''", "a", "error: --prompt is empty"),
    ("--prompts ''", "a", "error: --prompts is empty"),
    ("--row tau=0.1 --row ''", "a", "error: --row is empty"),
    ("--json ''", "a", "error: --json is empty"),
    ("--max-new-tokens 0", "a", "error: --max-new-tokens is 0, it must be at least 1"),
    ("--rounds 0", "a", "error: --rounds is 0, it must be at least 1"),
    ("--temperature -1", "a", "temperature is -1.0, it must be above 0"),
    ("--json no/such/folder/x", "a", "no/such/folder/x"),
    ("--target x", "a", "--target needs a --draft"),
]


@pytest.mark.parametrize(("options", "text", "words"), MISTAKES)
def test_a_mistake_is_one_line(
    options: str,
    text: str,
    words: str,
    capsys: Captured,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts").write_bytes(text.encode(errors="surrogateescape"))
    models = [] if "--target" in options else QUICK
    assert words in error_line(capsys, main, [*models, *shlex.split(options)])


@pytest.fixture
def signals() -> Iterator[None]:
    """Let Ctrl-C interrupt, which a shell ignores in what it starts in the background. Restore the
    handlers afterwards."""
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for each, handler in handlers.items():
        signal.signal(each, handler)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_keeps_its_texts(
    number: signal.Signals,
    status: int,
    signals: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: Captured,
) -> None:
    """Interrupt the second turn, in which chain comes before ar. Check the lines of --json when the
    signal comes, and the table, which compares with ar's text on the same prompt."""
    file, found = tmp_path / "texts.jsonl", []
    real = bench.Bench.measure

    def stop(self: bench.Bench, row: str, prompt: int, seed: int, max_new_tokens: int) -> Metrics:
        if max_new_tokens == 6 and seed == 1 and row == "ar":
            found.extend(json.loads(line)["row"] for line in file.read_text().splitlines())
            os.kill(os.getpid(), number)
        return real(self, row, prompt, seed, max_new_tokens)

    monkeypatch.setattr(bench.Bench, "measure", stop)
    options = ["--rows", "chain", "--rounds", "2", "--json", str(file)]
    try:
        assert main([*ONE, *options]) == status
    except SystemExit as end:
        assert end.code == status
    assert found == ["ar", "chain", "chain"]
    assert [(row[0], row[-1]) for row in cells(capsys.readouterr().out)[1:]] == [
        ("ar", "1 of 1"),
        ("chain", "1 of 1"),
    ]
    before = file.read_text()
    assert f"--json: {file} exists; use another name" in error_line(capsys, main, [*ONE, *options])
    assert file.read_text() == before


def test_a_later_near_tie_hides_no_wrong_text(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch)
    gaps = iter([2e-4, 5e-5])
    monkeypatch.setattr(bench, "find_difference", lambda *arguments: (2, next(gaps)))
    assert main([*ONE, "--rows", "tree,+prune"]) == 1

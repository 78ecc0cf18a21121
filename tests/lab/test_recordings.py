"""Tests of --record, --replay and --candidates: their texts, their tables, and refused files."""

import io
import json
import os
import re
import shutil
from collections.abc import Callable
from hashlib import sha256
from itertools import product
from pathlib import Path
from statistics import mean, median

import numpy
import pytest
import torch
from small import ROOT, TINY, Captured, error_line, run
from test_measure import run_bench
from test_replay import make_text
from test_results import rows_of
from test_tuning import settings_of

import bench
from dynatree_lab.benchmark.measure import main
from dynatree_lab.benchmark.prompts import BUILTIN, cut_prompts, encode_valid, load_prompts
from dynatree_lab.benchmark.replaying import REPLAYED_METRICS, replayed_line
from dynatree_lab.benchmark.report import text_frame
from dynatree_lab.benchmark.results import Line, Results, load
from dynatree_lab.benchmark.tuning import search
from dynatree_lab.generation.generate import generate
from dynatree_lab.pair import load_pair
from dynatree_lab.replay.candidates import DTYPES
from dynatree_lab.replay.models import RecordedTarget
from dynatree_lab.replay.texts import read_replay, read_texts, weights_name
from dynatree_lab.tokens import encode_prompt, load_tokenizer

DRAFT = ["--draft", str(TINY / "draft")]
CPU = ["--device", "cpu", "--threads", "1"]
PAIR = ["--target", str(TINY / "target"), *DRAFT, *CPU]
SIZES = ["--n-prompts", "2", "--prompt-tokens", "12", "--max-new-tokens", "12"]
ROWS = ["ar", "dynatree calibrate=on", "lookup"]
Change = Callable[[bytes], bytes]  # of a file
NO_TIMES = "Replayed texts have the trees and rows of real runs, and no times."


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Return files of two texts of the embedded pair and of their candidates."""
    folder = tmp_path_factory.mktemp("recorded")
    texts, candidates = (str(folder / name) for name in ("texts.jsonl", "c.npz"))
    assert main(["--record", texts, "--candidates", candidates, *SIZES, *PAIR]) == 0
    return texts, candidates


def common_lines(results: Results) -> dict[tuple[str, int], Line]:
    """Return what a replay has in common with a measured run, by row and prompt."""
    names = ("target_rows", "draft_rows", *REPLAYED_METRICS)
    return {
        (text["row"], text["prompt"]): {name: text[name] for name in names}
        for text in results.texts.values()
    }


def test_a_replay_has_the_rows_of_a_measured_run(recorded: tuple[str, str], tmp_path: Path) -> None:
    """Check that --record writes the texts of ar, and that their replay has the passes and metrics
    of a measured run. A file of candidates that is not there is recorded, and replaces the draft,
    which repeats the texts of beam, for which the candidates are too few."""
    own, every = tmp_path / "own.npz", [*ROWS, "beam k=8"]
    measured, _ = run_bench(tmp_path / "m.jsonl", ["--methods", ",".join(every), *SIZES, *PAIR])
    texts = measured.texts.values()
    of_ar = [measured.ids[text["ids_digest"]] for text in texts if text["row"] == "ar"]
    assert [text.ids for text in read_texts(recorded[0])] == of_ar
    for rows, options in ((every, DRAFT), (ROWS, [])):
        words = ["--replay", recorded[0], "--candidates", str(own), "--methods", ",".join(rows)]
        file = tmp_path / f"{len(rows)}.jsonl"
        results, printed = run_bench(file, [*words, *CPU, *options])
        expected = {key: line for key, line in common_lines(measured).items() if key[0] in rows}
        assert common_lines(results) == expected
        assert not any(text["incomplete"] for text in results.texts.values())
        assert NO_TIMES in printed and "throughput" not in file.read_text()
    assert own.read_bytes() == Path(recorded[1]).read_bytes()


def test_rows_without_numbers(recorded: tuple[str, str], capsys: Captured, tmp_path: Path) -> None:
    """Check a row whose trees ask for more than is recorded, the note on rows that no replay can
    have, and that a replay is not resumed."""
    file, words = tmp_path / "r.jsonl", ["--replay", recorded[0], "--candidates", recorded[1]]
    words += ["--table", "ablation", "--add", "dyspec N=64,recycle", *CPU]
    results, printed = run_bench(file, words)
    left_out = (
        "note: a replay leaves out fixed rebuild, dynatree rebuild, recycle, because they need"
    )
    assert left_out in capsys.readouterr().err
    cells = {row[0]: row[1:] for row in rows_of(results, "rows", "draft_passes", "incomplete")[1:]}
    texts = [text for text in results.texts.values() if text["row"] == "dyspec N=64"]
    n, n_trees = (sum(text[name] for text in texts) for name in ("incomplete", "iterations"))
    assert n > 0.02 * n_trees and cells["dyspec N=64"] == ["", "", f"{n} of {n_trees} trees"]
    assert all(cells[row][0] and not cells[row][2] for row in cells if row != "dyspec N=64")
    assert "Rows without numbers: 1, because more than 2%" in " ".join(printed.split())
    line = error_line(capsys, main, ["--resume", str(file)])
    assert "r.jsonl is a replay, which takes seconds: use --replay again" in line


PEOPLE = ["--replay", str(ROOT / "LICENSE"), *CPU]
PEOPLE += ["--prompt-tokens", "5", "--max-new-tokens", "12", "--n-prompts", "5"]


def test_a_text_of_people(tmp_path: Path) -> None:
    """Check its pieces, and that the caption says what they are."""
    results, printed = run_bench(tmp_path / "r.jsonl", PEOPLE, "--methods", "lookup")
    assert re.search("as if .*LICENSE|LICENSE.*as if", " ".join(printed.split("\n\n")[0].split()))
    keys = {(text["row"], text["prompt"]) for text in results.texts.values()}
    assert keys == set(product(["ar", "lookup"], range(5)))
    tokenizer = load_tokenizer(TINY / "draft")
    ids = tokenizer.encode((ROOT / "LICENSE").read_text()).ids
    pieces = read_replay(ROOT / "LICENSE", tokenizer, 4096, (2, 5, 9))
    starts = [ids[start : start + 14] for start in (0, len(ids) // 2)]
    assert [text.prompt + text.ids for text in pieces] == starts


def test_the_search_of_table_tune(tmp_path: Path) -> None:
    """Compare the best settings, and their scores on the texts that did not choose them, with those
    that are computed from the lines of the results file."""
    rows = ["linear", "linear K=1", "linear K=3", "dynatree", "dynatree tau=0.3", "lookup n=2"]
    words = [*PEOPLE, "--table", "tune", "--prices", "0.9:0.1:0.3", "--methods", ",".join(rows)]
    results, printed = run_bench(tmp_path / "r.jsonl", words)
    speeds: dict[str, list[float]] = {}  # by row, in the order of texts
    for text in results.texts.values():
        n, passes = sum(text["target_rows"].values()), sum(text["draft_rows"].values())
        n_rows = sum(int(rows) * count for rows, count in text["target_rows"].items())
        speed = (text["new_tokens"] - 1) / (0.9 * n + 0.1 * n_rows + 0.3 * passes)
        speeds.setdefault(text["row"], [0.0] * 5)[text["prompt"]] = speed
    found, medians = search(text_frame(results)), {}
    for method in ("linear", "dynatree", "lookup"):
        own, held_out = [row for row in rows if row.startswith(method)], [0.0] * 5
        for half in (0, 1):
            best = max(own, key=lambda row: mean(speeds[row][1 - half :: 2]))
            held_out[half::2] = speeds[best][half::2]
        best = max(own, key=lambda row: mean(speeds[row]))
        assert found[method].row == best and list(found) == ["linear", "dynatree", "lookup"]
        assert sorted(found[method].held_out) == pytest.approx(sorted(held_out))
        assert found[method].default.tolist() == pytest.approx(
            speeds[method] if method in own else []
        )
        medians[median(held_out)] = best
    ((heading, _),) = settings_of(printed).items()
    assert heading == f"Options for {medians[max(medians)]}"


def change(**fields: object) -> Change:
    """Return a function that changes fields of a file's first text; None removes one."""

    def changed(content: bytes) -> bytes:
        first, *others = content.splitlines()
        text = {**json.loads(first), **fields}
        text = {name: value for name, value in text.items() if value is not None}
        return b"\n".join([json.dumps(text).encode(), *others])

    return changed


def save(head: str, column: object = 0) -> bytes:
    """Return an archive with this head, and with a column in place of all of a CandidateTree's."""
    stream = io.BytesIO()
    numpy.savez(stream, head=head, **dict.fromkeys(("temperatures", *DTYPES), column))
    return stream.getvalue()


def flip(content: bytes) -> bytes:
    """Change a bit in the middle."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


OF_TEXTS, OF_BOTH = "--replay t.jsonl", "--replay t.jsonl --candidates c.npz"
HEAD = '{"format": 1, "texts": ""}'
IS_CUT = "c.npz is cut or has no recorded candidates"
MISTAKES: list[tuple[str, Change | None, str]] = [  # the file that was named last is changed
    (OF_TEXTS, lambda old: old[:-99], "line 2: it is cut or no JSON, so it is no recorded text"),
    (OF_TEXTS, lambda old: b"Once upon a time", "t.jsonl, line 1: it is cut or no JSON"),
    (OF_TEXTS, lambda old: b"[1]", "line 1: it is no recorded text, because it has no format"),
    (OF_TEXTS, lambda old: b"", "t.jsonl has no texts"),
    (OF_TEXTS, lambda old: old + old, "line 3: an earlier line has this prompt"),
    (OF_TEXTS, change(format=2), "line 1: format is 2, it must be 1"),
    (OF_TEXTS, change(ids=None, dtype=None), "line 1: the text has no ids, dtype"),
    (OF_TEXTS, change(ids=[1, 4096]), "ids must have at least one id, and all from 0 to 4095"),
    (OF_TEXTS, change(eos_ids=["a"]), "line 1: eos_ids is ['a'], it must have only ids"),
    (OF_TEXTS, change(seed="a"), "line 1: seed is 'a', it must be of type int"),
    (OF_TEXTS, change(temperature=-1), "temperature is -1, it must be 0 or more and finite"),
    (OF_TEXTS, change(temperature=0.5), "t.jsonl has texts of several temperatures, it must have"),
    (OF_TEXTS, change(tokenizer="a"), "text 1, of models/tiny/target, is of another tokenizer"),
    (OF_BOTH, lambda old: old[:-9], IS_CUT),
    (OF_BOTH, flip, IS_CUT),
    (OF_BOTH, lambda old: b"", IS_CUT),
    (OF_BOTH, lambda old: save("[]"), IS_CUT),
    (OF_BOTH, lambda old: save(HEAD, [0] * 9999).replace(b"(9999,)", b"(9999,("), IS_CUT),
    (OF_BOTH, lambda old: save('{"format": 2, "texts": ""}'), "format 2, it must be 1"),
    (OF_BOTH, lambda old: save(HEAD), "c.npz has the candidates of other texts; remove it to"),
    (OF_BOTH + "2", None, "c.npz2 cannot be read: No such file"),
    (f"--draft {TINY / 'target'} {OF_BOTH}", None, "were recorded with another draft; use that"),
    ("--replay c.npz", None, "c.npz is no text in UTF-8; recorded texts end in .jsonl"),
    (OF_TEXTS + " --max-new-tokens 13", None, "13, but t.jsonl has a text of 12 tokens"),
    (OF_TEXTS + " --methods recycle", None, "recycle: a replay cannot have a method with"),
    (OF_TEXTS + " --table tune", None, "--table tune --replay needs --prices; --measure-prices"),
    (OF_TEXTS + " --target a", None, "--target: no effect with --replay, which has the texts"),
    ("--candidates c.npz", None, "--candidates has no effect without --replay or --record"),
    ("--record t.jsonl", None, "t.jsonl exists already; use another name"),
    ("--record new --candidates c.npz", None, "c.npz exists already; use another name"),
    (OF_TEXTS + " --repeats 2", None, "--repeats: no effect with --replay, whose rounds are equal"),
    ("--record new --repeats 2", None, "--repeats: no effect with --record"),
    ("--table rules --prompts t.jsonl", None, "--prompts: no effect with --table rules, which has"),
    ("--record new --methods ar", None, "--methods: no effect with --record"),
    ("--record new --max-new-tokens 8,9", None, "table main has several sizes; choose one by"),
]


@pytest.mark.parametrize(("arguments", "damage", "message"), MISTAKES)
def test_a_mistake_is_one_line(
    arguments: str,
    damage: Change | None,
    message: str,
    recorded: tuple[str, str],
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Check also that no file is made."""
    monkeypatch.chdir(tmp_path)
    for name, file in zip(("t.jsonl", "c.npz"), recorded, strict=True):
        shutil.copy(file, name)
    if damage:
        file = Path(arguments.split()[-1])
        file.write_bytes(damage(file.read_bytes()))
    assert message in error_line(capsys, main, arguments.split())
    assert sorted(os.listdir()) == ["c.npz", "t.jsonl"]


def test_the_committed_rows_of_the_embedded_pair(pytestconfig: pytest.Config) -> None:
    """Replay the texts of ar in results/regimes_embedded_cpu.jsonl, and compare the passes of every
    row that a replay can have. It takes a minute: these are 160 texts of 128 tokens."""
    if not (file := pytestconfig.getoption("--prompts")):
        pytest.skip("needs --prompts FILE, WikiText-2's test text")
    results, pair = load(ROOT / "results" / "regimes_embedded_cpu.jsonl"), load_pair(device="cpu")
    n_ids = pair.target.config.vocab_size
    prompts = cut_prompts(encode_valid(load_prompts("", file), pair.tokenizer, n_ids), 150, 8)
    assert sha256(repr(prompts).encode()).hexdigest() == results.head["prompts_sha256"]
    ar, *cases = (
        case
        for case in results.cases
        if not (case.is_hf or case.generation_config().method.facts.target_top_k)
    )
    texts = [
        make_text(prompt, results.ids[results.texts[*ar.key, i, 0]["ids_digest"]], vocab_size=n_ids)
        for i, prompt in enumerate(prompts)
    ]
    target, n_equal = RecordedTarget(texts, pair.draft.config), 0
    for case in (ar, *cases):
        config = case.generation_config()
        for i, text in enumerate(texts):
            steps = list(generate(target, pair.draft, text.prompt, config, len(text.ids)))
            found, line = replayed_line(steps, config), results.texts[*case.key, i, 0]
            names = ("target_rows", "draft_rows", "iterations")
            assert [found[name] for name in names] == [line[name] for name in names], (case.row, i)
            n_equal += 1
    assert n_equal == 20 * 8


def test_the_committed_texts() -> None:
    """Check the prompts, and that each token is the target's best one up to a near-tie."""
    texts = read_texts(ROOT / "dynatree_lab" / "benchmark" / "texts.jsonl")
    pair = load_pair(device="cpu")
    own = [encode_prompt(prompt, pair.tokenizer, 4096) for prompt in (*bench.PROMPTS, *BUILTIN[:8])]
    assert [text.prompt for text in texts] == own
    for text in texts:
        logits = run(pair.target, text.prompt + text.ids)[len(text.prompt) - 1 : -1]  # [128, V]
        ids = torch.tensor(text.ids).unsqueeze(1)
        assert (logits.amax(dim=1) - logits.gather(1, ids)[:, 0]).max() < 1e-4
        assert len(text.ids) == 128 and text.weights == weights_name(TINY / "target")

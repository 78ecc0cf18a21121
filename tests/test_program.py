"""Tests of the command line of dynatree.py: text, trees, options, metrics, and mistakes."""

import io
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small import TINY, Captured, error_line
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from trees import make_tree

import dynatree
from draft_tree import Autoregressive, DynaTree, Tree
from dynatree import Step, generate, main, measure, parse_settings
from gpt_neox import GPTNeoX

PROMPT = "The ship sailed at dawn"
TARGET = str(TINY / "target")
DRAFT = str(TINY / "draft")
QUICK = ["--target", DRAFT, "--draft", DRAFT]  # for tests that do not look at the text
WORDS = ["--prompt", PROMPT, "--max-new-tokens", "20"]
TOKENIZER = Tokenizer.from_file(f"{TARGET}/tokenizer.json")
ROW = r"(\|   |    )*(\|--|`--) '.*' [01]\.\d\d( \*)?"  # a line of a drawn tree, below the root's


def greedy_ids(folder: str, n: int, prompt: list[int] | None = None) -> list[int]:
    """Return n tokens of a checkpoint's own text after PROMPT or other ids."""
    model, ids = GPTNeoX.from_pretrained(folder), prompt or TOKENIZER.encode(PROMPT).ids
    steps = generate(model, None, ids, Autoregressive().make_rule(), n)
    return [token for step in steps for token in step.tokens]


def printed(capsys: Captured, options: list[str]) -> str:
    """Return the text that the program prints. Fails unless it succeeds."""
    status = main(options)
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return captured.out


def test_the_text_is_the_targets_and_the_metrics_follow(capsys: Captured) -> None:
    """Check the models and the method that are the defaults."""
    assert main(WORDS) == 0
    captured = capsys.readouterr()
    assert captured.out == TOKENIZER.decode(greedy_ids(TARGET, 20)) + "\n"
    metrics = r"20 tokens, [\d.]+ tokens/s, ([\d.]+) tokens/iter, ([\d.]+) rows/tree\n"
    per_iter, rows = re.fullmatch(metrics, captured.err).groups()
    assert 1 < float(per_iter) < float(rows)


def test_ar_needs_no_draft(capsys: Captured) -> None:
    text = printed(capsys, [*WORDS, "--method", "ar", "--target", DRAFT])
    assert text == printed(capsys, [*WORDS, *QUICK])
    assert text == printed(capsys, [*WORDS, "--method", "ar", "--target", DRAFT, "--draft", "no"])


def test_options_reach_the_method(capsys: Captured) -> None:
    """Check settings, sampling, a type of 16 bits, and a draft temperature at which a tree is a
    chain of D_max tokens. Two such trees and a root give 19 tokens."""
    assert main([*WORDS, *QUICK, "--set", "N_max=1", "--set", "history=off"]) == 0
    assert "1.00 tokens/iter, 1.0 rows/tree" in capsys.readouterr().err
    assert main([*WORDS, *QUICK, "--draft-temperature", "1e-9"]) == 0
    assert "6.33 tokens/iter, 6.3 rows/tree" in capsys.readouterr().err
    hot = [*WORDS, *QUICK, "--temperature", "1", "--top-p", "0.9"]
    one, again, other = (printed(capsys, [*hot, "--seed", seed]) for seed in "112")
    assert one == again != other
    assert main([*WORDS, *QUICK, "--dtype", "bfloat16"]) == 0
    note = "note: in bfloat16 rounding may decide between two tokens that are nearly equal, so"
    assert capsys.readouterr().err.splitlines()[0].startswith(note)


def test_trees_are_drawn_and_the_text_follows(capsys: Captured) -> None:
    text = printed(capsys, [*WORDS, *QUICK])
    assert main([*WORDS, *QUICK, "--show-tree"]) == 0
    captured = capsys.readouterr()
    assert captured.out == text
    *trees, metrics = re.split(r"^(?=tree \d+$|20 tokens)", captured.err, flags=re.MULTILINE)[1:]
    n_rows = n_accepted = 0
    for number, tree in enumerate(trees, start=1):
        heading, root, *rows = tree.splitlines()
        assert heading == f"tree {number}" and re.fullmatch(r"'.*' 1\.00 \*", root)
        assert all(
            re.fullmatch(r"(\|   |    )*(\|--|`--) '.*' [01]\.\d\d( \*)?", row) for row in rows
        )
        n_rows += 1 + len(rows)
        n_accepted += 1 + sum(row.endswith("*") for row in rows)
    n = len(trees)
    assert f"{n_accepted / n:.2f} tokens/iter, {n_rows / n:.1f} rows/tree" in metrics and n_rows > n


def test_a_drawn_tree_marks_the_accepted_path(capsys: Captured) -> None:
    """Check a path that skips a row."""
    tree = make_tree(TOKENIZER.encode(" the at door her").ids, [-1, 0, 0, 2])
    steps = iter([Step([1], Tree.from_root(0), [0]), Step([1, 2], tree, [0, 2, 3])])
    assert len(list(dynatree.show_trees(steps, TOKENIZER))) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "tree 1" and [line[-1] for line in lines[1:]] == ["*", "0", "*", "*"]


def test_eos_ends_the_text_and_is_not_printed(capsys: Captured, tmp_path: Path) -> None:
    free = greedy_ids(DRAFT, 20)
    shutil.copytree(DRAFT, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": free[6]}))
    models = ["--target", str(tmp_path), "--draft", DRAFT]
    expected = TOKENIZER.decode(free[: free.index(free[6])]) + "\n"
    assert printed(capsys, [*WORDS, *models]) == expected
    assert printed(capsys, [*WORDS, *models, "--show-tree"]) == expected


@pytest.mark.parametrize("is_at_end", [False, True])
def test_an_incomplete_character_waits_for_its_end(is_at_end: bool, capsys: Captured) -> None:
    """Print a text id by id. An emoji has several ids, and each alone is decoded as U+FFFD."""
    text = "naïve 🚢 日本"
    parts = []
    ids = [*TOKENIZER.encode(text).ids, TOKENIZER.encode("🚢").ids[0]]  # the last one stays
    steps = (Step([token], Tree.from_root(0), [0]) for token in ids)
    for _ in dynatree.write(steps, TOKENIZER, eos_ids=(), is_at_end=is_at_end):
        parts.append(capsys.readouterr().out)
    assert "".join(parts) == ("" if is_at_end else text)
    assert "".join(parts) + capsys.readouterr().out == TOKENIZER.decode(ids) + "\n"
    assert is_at_end or len(set(parts)) > 5


def test_a_character_that_stdout_lacks_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print to a terminal of ASCII. The whole text was once lost."""
    buffer = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(buffer, "ascii"))
    monkeypatch.setattr("tokenizers.Tokenizer.decode", lambda *ids, **options: "naïve")
    assert main([*WORDS, *QUICK]) == 0
    assert buffer.getvalue() == b"na?ve\n"


def write_first_token(folder: Path) -> Path:
    """Write the embedded draft with a tokenizer that begins a sequence with token 7. It also has
    what training code may leave in a file: a longest and a shortest length."""
    shutil.copytree(DRAFT, folder)
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    first = tokenizer.id_to_token(7)
    tokenizer.post_processor = TemplateProcessing(f"{first} $A", special_tokens=[(first, 7)])
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    tokenizer.save(file)
    return folder


def test_a_prompt_is_encoded_as_the_post_processor_says(capsys: Captured, tmp_path: Path) -> None:
    """Check also that a prompt of only the added token is empty."""
    folder = str(write_first_token(tmp_path / "model"))
    expected = greedy_ids(folder, 9, [7, *TOKENIZER.encode(PROMPT).ids])
    options = ["--max-new-tokens", "9", "--method", "ar", "--target", folder, "--prompt"]
    assert printed(capsys, [*options, PROMPT]) == TOKENIZER.decode(expected) + "\n"
    assert expected != greedy_ids(DRAFT, 9)
    with pytest.raises(ValueError, match="the prompt is empty: it has no tokens"):
        dynatree.encode_prompt("", dynatree.load_tokenizer(folder))


def test_metrics_worked_out_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a prefill, then 3 of 4 drafted tokens accepted, 0 of 1, and 2 of 4 but cut to one."""
    monkeypatch.setattr("time.perf_counter", iter([10.0, 12.0] * 2).__next__)
    chain = make_tree([0] * 5, [-1, 0, 1, 2, 3])
    chain.draft_slots[:4] = range(4)
    steps = [
        Step([5], Tree.from_root(9), [0]),
        Step([1, 2, 3, 4], chain, [0, 1, 2, 3]),
        Step([1], make_tree([0, 0], [-1, 0]), [0]),
        Step([2], chain, [0, 1, 2]),
    ]
    found = measure(iter(steps))
    assert found.ids == [5, 1, 2, 3, 4, 1, 2] and found.rate == 6 / 2
    assert (found.tokens_per_iter, found.rows_per_tree) == ((4 + 1 + 3) / 3, (5 + 2 + 5) / 3)
    assert found.draft_passes == (4 + 0 + 4) / 3
    assert str(found) == "7 tokens, 3.0 tokens/s, 2.67 tokens/iter, 4.0 rows/tree"
    assert str(measure(iter(steps[:1]))) == "1 token"


def test_settings_are_read_by_their_types() -> None:
    found = parse_settings(DynaTree, ["tau=0.02", "N_max=32", "history=off", "D0=4", "D0=3"])
    assert found == DynaTree(tau=0.02, N_max=32, history=False, D0=3)
    assert parse_settings(DynaTree, []) == DynaTree()


OWN = """from __future__ import annotations
from dataclasses import dataclass
from draft_tree import DynaTree, setting

@dataclass(frozen=True)
class Own(DynaTree):
    width: int = setting(2, 1, 9, "children")
    is_wide: bool = setting(False, False, True, "more children")
"""


def test_types_may_be_strings() -> None:
    """Check settings in a file in which every annotation is a string."""
    names: dict = {"__name__": __name__}
    exec(OWN, names)
    found = parse_settings(names["Own"], ["width=3", "is_wide=on", "tau=0.5"])
    assert found == names["Own"](width=3, is_wide=True, tau=0.5)
    with pytest.raises(ValueError, match="width is 2.5, it must be of type int"):
        names["Own"](width=2.5)


# Mistakes.


def plant_nan(file: Path) -> None:
    tensors = load_file(file)
    tensors["embed_out.weight"][7, 7] = float("nan")
    save_file(tensors, file)


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:9000])


MODELS = f"--target model --draft {DRAFT}"  # model/ is a copy of the embedded draft
MISTAKES = [  # options besides --prompt, a file of model/ and its damage, words of the error line
    ("--max-new-tokens 0", None, "error: --max-new-tokens is 0, it must be at least 1"),
    ("--method ar --target ''", None, "error: --target is empty"),
    ("--method ar --draft-temperature 1", None, "--draft-temperature has no effect, because ar"),
    ("--draft ''", None, "error: --draft is empty"),
    ("--device ''", None, "error: --device is empty"),
    ("--prompt ''", None, "error: --prompt is empty"),
    ("--set N_max=3 --set ''", None, "error: --set is empty"),
    ("--temperature -1", None, "temperature is -1.0, it must be above 0 and finite"),
    ("--temperature 1 --top-p 0", None, "top_p is 0.0, it must be above 0 and at most 1"),
    ("--top-p 0.9", None, "--top-p needs a --temperature above 0"),
    (
        "--device cuda:0",
        None,
        "--device is cuda:0, it must be cpu, cuda or cuda:N, and torch finds",
    ),
    (
        "--device mps",
        None,
        "--device is mps, it must be cpu, cuda or cuda:N, and torch finds 0 CUDA",
    ),
    ("--device meta", None, "--device is meta, it must be cpu, cuda or cuda:N"),
    (f"--target {DRAFT}", None, "--target needs a --draft with its tokenizer, or only --method ar"),
    ("--set width=3", None, "width=3: the method's settings are B_min, B_mid, "),
    ("--set tau=x", None, "tau=x: tau must be of type float"),
    ("--set N_max=1.5", None, "N_max=1.5: N_max must be of type int"),
    ("--set prune=yes", None, "prune=yes: prune must be on or off"),
    ("--set N_max=0", None, "N_max is 0, it must be from 1 to 1024"),
    ("--set tau_l=0.95", None, "must have B_min <= B_mid <= B_max, D0 <= D_max, tau_l < tau_h"),
    ("--method ar --set tau=1", None, "tau=1: the method's settings are none"),
    (MODELS, ("config.json", "{"), "model/config.json is not JSON: "),
    (MODELS, ("config.json", '{"model_type": "llama"}'), "model: model_type is 'llama', it must"),
    (MODELS, ("tokenizer.json", "{"), "model/tokenizer.json is not a tokenizer: "),
    (MODELS, ("tokenizer.json", Path.unlink), "No such file or directory: 'model/tokenizer.json'"),
    (MODELS, ("model.safetensors", cut_short), "error: model/model.safetensors: "),
    (MODELS, ("model.safetensors", plant_nan), "the logits are nan or inf: the model overflows"),
]


@pytest.mark.parametrize(("options", "damage", "words"), MISTAKES, ids=[row[2] for row in MISTAKES])
def test_a_mistake_is_one_line(
    options: str,
    damage: tuple | None,
    words: str,
    capsys: Captured,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if damage:
        shutil.copytree(DRAFT, "model")
        file = Path("model", damage[0])
        damage[1](file) if callable(damage[1]) else file.write_text(damage[1])
    assert words in error_line(capsys, main, ["--prompt", "a", *shlex.split(options)])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--html x", "unrecognized arguments: --html x"),
        ("--method auto", "argument --method: invalid choice: 'auto' (choose from "),
        ("--max 3", "unrecognized arguments: --max 3"),  # no abbreviations
        ("--dtype int8", "argument --dtype: invalid choice: 'int8'"),
    ],
)
def test_a_missing_option_is_one_of_the_full_program(
    options: str, words: str, capsys: Captured
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--prompt", "a", *options.split()])
    lines = capsys.readouterr().err.splitlines()
    assert f" error: {words}" in lines[-1]
    assert "(python -m dynatree_lab has more methods and options)" in lines


def test_the_default_device_is_cuda_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dynatree.parse_arguments(["--prompt", "a"]).device == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert dynatree.parse_arguments(["--prompt", "a"]).device == "cuda"


def test_ctrl_c_keeps_the_text_so_far(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(capsys, [*WORDS, *QUICK])

    def interrupted(*args: object, **options: object) -> Iterator[Step]:
        steps = generate(*args, **options)
        for _ in range(4):
            yield next(steps)
        raise KeyboardInterrupt

    monkeypatch.setattr(dynatree, "generate", interrupted)
    assert main([*WORDS, *QUICK]) == 130
    captured = capsys.readouterr()
    assert len(captured.out) > 9 and text.startswith(captured.out[:-1]) and captured.err == ""

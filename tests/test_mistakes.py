"""The command line's mistakes: one line that names the cause, status 2, and nothing else.

Also the checkpoints that are unusual but right, which must pass.
"""

import json
import os
import re
import runpy
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import (
    ROOT,
    TINY,
    Captured,
    error_line,
    pretend_one_gpu,
    random_config,
    random_tensors,
    write_checkpoint,
)
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from cli.errors import say
from cli.main import main
from cli.models import encode, load_tokenizer
from draft_tree import Tree
from methods.static import StaticRule

PROMPT = "The ship sailed at dawn"
TARGET = str(TINY / "target")
DRAFT = str(TINY / "draft")


def test_foreign_text_is_shown_and_not_obeyed(capsys: Captured) -> None:
    """An escape in a file's name turned the terminal red, a newline made two lines of one."""
    for text, line in (
        ("naïve 日本 'a b' \\n", "naïve 日本 'a b' \\n"),
        ("a\x1b[31mb\udcff", "a\\x1b[31mb\\udcff"),
        ("two\nlines\r\u2028or more", "two\\nlines\\r\\u2028or more"),
    ):
        say(text)
        assert capsys.readouterr().err == f"{line}\n"


A = "--prompt a"
MISTAKES = [  # arguments, as a shell splits them -> a word of the line
    ("", "--prompt"),
    (A + " --prompt-file b", "--prompt"),
    (A + " --device=", "--device: is empty"),
    ("--prompt=", "--prompt: is empty"),
    ("--prompt \udcff", "UTF-8"),
    ("--prompt-file no/such/file", "no/such/file"),
    ("--prompt-file /dev/zero", "/dev/zero is longer than a prompt"),
    ("--prompt-file .", "cannot be read"),
    (A + " --max-new-tokens 0", "--max-new-tokens 0"),
    (A + " --max-new-tokens 99999999999999999999", "these lower it: a 16-bit"),
    (A + " --method magic", "dynatree"),
    (A + " --set width=3", "tau_h"),
    (A + " --device tpu", "cuda:N"),
    (A + " --device cuda", "--device cpu"),
    (A + " --device cpu --no-graphs", "only cuda has graphs"),
    (A + " --plain --strict", "--plain has no strict passes"),
    (A + " --dtype int8", "--dtype int8: there are float32, "),
    (A + " --method ar --draft-dtype int8", "--draft-dtype int8: there are float32, "),
    (A + " --temperature -1", "--temperature -1.0 is not a positive"),
    (A + " --temperature 1 --top-p 0", "--top-p 0.0 is not a positive number"),
    (A + " --seed 1", "--seed needs a --temperature above 0"),
    (A + " --draft-temperature 0", "--draft-temperature 0.0 is not a positive"),
    (A + " --draft-temperature 1 --method linear", "shapes the trees of linear"),
    (A + " --draft-temperature 1 --top-p .9", "--top-p needs a --temperature"),
    (A + " --accept token", "--accept token needs a --temperature above 0"),
    ("--prompt a --method ar --temperature 1 --accept token", "token has no effect: "),
    (A + " --window 817", "window=817: 64 to 816"),
    (A + " --sinks 4", "sinks=4 needs a window"),
    (A + " --threads 0", "--threads 0"),
    (A + " --fast", "--fast"),
    (A + " --target ./none --draft ./gone", "'./none' is not a folder, and no hub name; './gone"),
    (A + " --target a/b/c --method ar", "a/b/c"),
    (A + " --target x --method ar", "'x' is a file, not a folder"),
    (A + f" --target {TARGET}", "--target also needs --draft: the method drafts; --method lookup"),
    (A + " --target . --method ar", "json"),
]


@pytest.mark.parametrize(("arguments", "hint"), MISTAKES)
def test_a_mistake_is_one_line(
    arguments: str, hint: str, capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x").write_text("a")
    assert hint in error_line(capsys, main, arguments.split(" "))
    assert Path("x").read_text() == "a" and os.listdir() == ["x"]


ENDS = [  # what ends a run, its status, and a word of the line
    (KeyError("two\nlines"), 70, "KeyError: .*--debug shows where"),
    (MemoryError(), 2, "; these lower it: a 16-bit --dtype"),
    (torch.OutOfMemoryError("no room"), 2, "no room; these lower it"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes."), 2, "9 bytes.; these"),
    (RuntimeError("std::bad_alloc"), 2, "these lower it"),
]


@pytest.mark.parametrize(("error", "status", "told"), ENDS)
def test_what_ends_a_run_is_one_line(
    error: Exception, status: int, told: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a traceback for those who ask for it."""

    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr("cli.main.prepare", fail)
    assert main(["--prompt", "a"]) == status
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ") and re.search(told, line) and captured.out == ""
    assert main(["--prompt", "a", "--debug"]) == status
    said = capsys.readouterr().err
    assert said.startswith("Traceback") and said.endswith(f"\n{line}\n")


def test_a_full_cache_is_no_lack_of_memory(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule that grows larger trees than it said got the advice of a 16-bit dtype."""

    def add_more(rule: StaticRule, tree: Tree) -> Tree:
        for token in range(300):
            tree.add(token, 0, -9.0)
        return tree

    monkeypatch.setattr(StaticRule, "finish_tree", add_more)
    sets = [word for value in ("N_max=4", "tau=0") for word in ("--set", value)]
    for more in ([], ["--plain"]):
        arguments = ["--prompt", "a", "--method", "fixed", "--max-new-tokens", "8", *sets, *more]
        assert main(arguments) == 70
        line = capsys.readouterr().err.splitlines()[-1]
        assert re.match(r"error: IndexError: the cache has \d+ slots, \d+ are needed; ", line)
        assert "dtype" not in line


@pytest.mark.parametrize("name", ["numpy", "huggingface_hub", "engine.typo", "torch.typo", "typo"])
def test_only_what_is_required_is_said_to_be_missing(
    name: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A typo in a fork's own file is an exception, with its traceback."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    start = runpy.run_path(str(ROOT / "cli" / "start.py"))
    error = ModuleNotFoundError(f"No module named {name!r}", name=name)
    if "typo" in name:
        start["explain"](type(error), error, None)
        assert capsys.readouterr().err == f"ModuleNotFoundError: {error}\n"
        return
    with pytest.raises(SystemExit) as ended:
        start["explain"](type(error), error, None)
    assert ended.value.code == 2
    line = "pip install -r requirements.txt brings all"
    assert capsys.readouterr().err == f"error: {error}; {line}\n"


def test_what_a_gpu_has_not(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_one_gpu(monkeypatch, capability=(7, 5))
    for option, value, told in (
        ("--device", "cuda:1", "cuda:0"),
        ("--dtype", "bfloat16", "--dtype bfloat16: Pretended GPU has none"),
        ("--draft-dtype", "bfloat16", "--draft-dtype bfloat16: Pretended GPU has none"),
    ):
        assert told in error_line(capsys, main, ["--prompt", "a", option, value])


def plant_nan(file: Path) -> None:
    tensors = load_file(file)
    tensors["embed_out.weight"][7, 7] = float("nan")
    save_file(tensors, file)


def double(file: Path) -> None:
    """A text forty times, which took all memory and heeded no signal."""
    step = {"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}
    steps = {"type": "Sequence", "normalizers": [step] * 40}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": steps}))


def repeat(file: Path) -> None:
    """The prompt 400,000 times, which ended in SIGABRT where memory is limited."""
    single = [{"Sequence": {"id": "A", "type_id": 0}}] * 400_000
    template = {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": template}))


DAMAGE = [  # how which file is damaged, and what the line names; more in test_checkpoint.py
    (plant_nan, "model.safetensors", "embed_out.weight"),
    (lambda file: file.write_text('{"model_type": "llama"}'), "config.json", "llama"),
    (Path.unlink, "tokenizer.json", "tokenizer.json"),
    (double, "tokenizer.json", "its normalizer may make a text 4,096"),
    (repeat, "tokenizer.json", "its post_processor may make a text 4,096"),
]


@pytest.mark.parametrize(("damage", "file", "hint"), DAMAGE)
def test_a_damaged_file_is_one_line(
    damage: Callable[[Path], None], file: str, hint: str, capsys: Captured, tmp_path: Path
) -> None:
    """Of a target, and if a draft has that file of its own, of a draft."""
    shutil.copytree(TARGET, tmp_path, dirs_exist_ok=True)
    damage(tmp_path / file)
    for target, draft in ((str(tmp_path), DRAFT), (TARGET, str(tmp_path))):
        arguments = ["--prompt", "a", "--target", target, "--draft", draft]
        assert hint in error_line(capsys, main, arguments)


def test_a_folder_of_other_weights_is_named(capsys: Captured, tmp_path: Path) -> None:
    """Before a tokenizer.json is asked for, which it has not either."""
    (tmp_path / "pythia.Q4_K_M.gguf").write_bytes(b"GGUF")
    for target in (tmp_path, tmp_path / "pythia.Q4_K_M.gguf"):
        line = error_line(
            capsys, main, ["--prompt", "a", "--method", "ar", "--target", str(target)]
        )
        assert "pythia.Q4_K_M.gguf is GGUF, for llama.cpp" in line


@pytest.mark.filterwarnings("default")
def test_a_head_that_is_kept_is_told_in_one_note(capsys: Captured, tmp_path: Path) -> None:
    shutil.copytree(DRAFT, tmp_path, dirs_exist_ok=True)
    raw = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    texts = []
    for target in (DRAFT, str(tmp_path)):
        assert main(["--prompt", PROMPT, "--method", "ar", "--target", target]) == 0
        captured = capsys.readouterr()
        texts.append(captured.out)
    assert texts[0] == texts[1]
    notes = [line for line in captured.err.splitlines() if "embed_out.weight" in line]
    assert len(notes) == 1 and notes[0].startswith("note: tie_word_embeddings is true, but")


def test_tokenizers_that_differ_are_refused(capsys: Captured, tmp_path: Path) -> None:
    """But not for a length and padding that training code has left in a file."""
    shutil.copytree(DRAFT, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(file))
    assert len(encode(PROMPT, load_tokenizer(tmp_path), 4096)) == 7
    arguments = ["--prompt", PROMPT, "--max-new-tokens", "4"]
    arguments += ["--target", TARGET, "--draft", str(tmp_path)]
    assert main(arguments) == 0
    capsys.readouterr()
    content = json.loads(file.read_text())
    model = content["model"]
    for changes, part in (
        ({"normalizer": {"type": "NFC"}}, "normalizer"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "pre_tokenizer"),
        ({"model": model | {"merges": model["merges"][:-1]}}, "merges"),
        ({"model": model | {"vocab": model["vocab"] | {"zzzz": 4096}}}, "vocabulary"),
    ):
        file.write_text(json.dumps(content | changes))
        line = error_line(capsys, main, arguments)
        assert line.endswith(f"tokenizers differ: {part}")


def test_a_draft_may_lack_what_was_added_to_the_target(capsys: Captured, tmp_path: Path) -> None:
    """As Pythia's the tokens that Dolly added; the text is the target's own."""
    pair = [str(tmp_path / "target"), str(tmp_path / "draft")]
    for folder, source in zip(pair, (TARGET, DRAFT), strict=True):
        shutil.copytree(source, folder)
    arguments = ["--prompt", PROMPT, "--max-new-tokens", "9", "--target", pair[0], "--draft"]
    assert main([*arguments, pair[1]]) == 0
    expected = capsys.readouterr().out
    file = Path(pair[0], "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens(["### End"])
    tokenizer.add_tokens(["zzzz"])
    tokenizer.save(str(file))
    assert main([*arguments, pair[1]]) == 0
    assert capsys.readouterr().out == expected
    other = Tokenizer.from_file(f"{DRAFT}/tokenizer.json")
    other.add_special_tokens(["### Other"])  # of the draft, with an id of the target's own token
    other.save(f"{pair[1]}/tokenizer.json")
    assert error_line(capsys, main, [*arguments, pair[1]]).endswith("tokenizers differ: vocabulary")


def test_non_finite_target_names_the_way_out(capsys: Captured, tmp_path: Path) -> None:
    """Weights that are finite, but whose products overflow in float16."""
    shutil.copytree(TARGET, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["gpt_neox.layers.0.attention.query_key_value.weight"] *= 30000
    save_file(tensors, file)
    arguments = ["--prompt", "a", "--max-new-tokens", "3", "--target", str(tmp_path)]
    arguments += ["--draft", DRAFT]
    assert "use bfloat16 or float32" in error_line(capsys, main, arguments + ["--dtype", "float16"])
    assert main(arguments) == 0


def test_prompt_id_past_the_vocabulary(capsys: Captured, tmp_path: Path) -> None:
    """A tokenizer with more entries than the model has embeddings."""
    config = random_config(vocab_size=20)
    write_checkpoint(tmp_path, config, random_tensors(config, 0))
    shutil.copy(f"{TARGET}/tokenizer.json", tmp_path)
    arguments = ["--prompt", PROMPT, "--method", "ar", "--target", str(tmp_path)]
    assert "knows 20 ids" in error_line(capsys, main, arguments)

"""Tests that a user's mistake ends in status 2 and one line that names the cause, and nothing else.

An error in the code ends in a traceback. Checkpoints that are unusual but valid must work.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fast import pretend_one_gpu
from safetensors.torch import load_file, save_file
from small import TINY, Captured, error_line
from tokenizers import Tokenizer

from dynatree_lab.cli.main import main

PROMPT = "The ship sailed at dawn"
TARGET = str(TINY / "target")
DRAFT = str(TINY / "draft")
Files = dict[str, str | Callable[[Path], None]]  # file name -> its text, or a function to change it


def plant_nan(file: Path) -> None:
    tensors = load_file(file)
    tensors["embed_out.weight"][7, 7] = float("nan")
    save_file(tensors, file)


def scale(file: Path) -> None:
    """Scale weights so that they are finite, but their products overflow in float16."""
    tensors = load_file(file)
    tensors["gpt_neox.layers.0.attention.query_key_value.weight"] *= 30000
    save_file(tensors, file)


def change(**parts: object) -> Callable[[Path], None]:
    """Return a function that changes parts of a JSON file. A part is the new value, or a function
    of the old one."""

    def write(file: Path) -> None:
        content = json.loads(file.read_text())
        for name, part in parts.items():
            content[name] = part(content[name]) if callable(part) else part
        file.write_text(json.dumps(content))

    return write


A = "--prompt a"
TARGET_AND_DRAFT = (f"{A} --target model --draft {DRAFT}", f"{A} --target {TARGET} --draft model")
AS_TARGET, AS_DRAFT = TARGET_AND_DRAFT
MISSING_TARGET = f"{A} --target no-such-folder"  # output files are checked before models are loaded
# Arguments as on a command line; files in the working folder, where model/ is a copy of the
# embedded draft; words that the error line must contain
MISTAKES = [
    ("", {}, "--prompt"),
    (A + " --prompt-file b", {}, "--prompt"),
    (A + " --prompts b", {}, "--prompts: not allowed with argument --prompt"),
    ("--prompts b --html c", {"b": "a"}, "--html, --trace and --playground show one run; use"),
    ("--prompts b --json", {"b": '{"prompt": 3}'}, "b, line 1 has no text as `prompt`"),
    (A + " --prompt b", {}, "--prompt is given 2 times, it takes one value"),
    (A + " --seed 1 --temperature 1 --seed=1", {}, "--seed is given 2 times, it takes one"),
    (A + " --max-new 4", {}, "unrecognized arguments: --max-new 4"),
    (A + " --device=", {}, "--device: is empty"),
    ("--prompt=", {}, "--prompt: is empty"),
    ("--prompt-file no/such/file", {}, "no/such/file"),
    ("--prompt-file .", {}, "cannot be read"),
    ("--prompt-file x", {"x": "\udce9"}, "x is not UTF-8"),
    ("--prompt-file -", {}, "the prompt is empty"),
    (A + " --max-new-tokens 0", {}, "--max-new-tokens is 0"),
    (A + " --max-new-tokens 99999999999999999999", {}, "these lower it: a 16-bit"),
    (A + " --method magic", {}, "dynatree"),
    (A + " --set width=3", {}, "tau_h"),
    (A + " --device tpu", {}, "cuda:N"),
    (A + " --device cuda", {}, "--device cpu"),
    (A + " --list-methods none", {}, "invalid choice: 'none' (choose from "),
    (A + " --dtype int8", {}, "--dtype is int8, it must be one of float32, "),
    (A + " --method ar --draft-dtype int8", {}, "--draft-dtype is int8, it must be one of"),
    (A + " --temperature -1", {}, "temperature is -1.0, it must be above 0 and finite"),
    (A + " --temperature 1 --top-p 0", {}, "top_p is 0.0, it must be"),
    (A + " --top-k 5", {}, "top_k needs a temperature above 0"),
    (A + " --min-p .1 --seed 1", {}, "min_p needs a temperature above 0"),
    (A + " --seed -1", {}, "seed is -1, it must be from 0"),
    (A + " --threads 0", {}, "--threads is 0, it must be from 1 to 1024"),
    (A + " --threads 9999999999", {}, "--threads is 9999999999, it must be"),
    (A + " --draft-temperature 0", {}, "draft_temperature is 0.0, it must be above 0"),
    (A + " --draft-temperature 1 --method linear", {}, "trees do not depend on"),
    (A + " --draft-temperature 1 --top-p .9", {}, "top_p needs a temperature"),
    (A + " --accept token", {}, "--accept token needs a --temperature above 0"),
    (A + " --method ar --temperature 1 --accept token", {}, "token has no effect: "),
    (A + " --window 817", {}, "window is 817, it must be from 64 to 816"),
    (A + " --sinks 4", {}, "sinks=4 needs a window"),
    (A + " --debug", {}, "unrecognized arguments: --debug"),
    (A + " --target ./none --draft ./gone", {}, "'./gone' is neither a folder nor a hub name"),
    (A + " --target a/b/c --method ar", {}, "a/b/c"),
    (A + " --target x --method ar", {"x": "a"}, "'x' is neither a folder nor a hub name"),
    (A + f" --target {TARGET}", {}, "--target also needs --draft; without a draft model use"),
    (A + " --target . --method ar", {"x": "a"}, "json"),
    (MISSING_TARGET + " --html no/such/folder/x", {}, "no such folder"),
    (MISSING_TARGET + " --trace .", {}, ". cannot be written: it is a folder"),
    (MISSING_TARGET + " --playground .", {}, ". cannot be written: it is a folder"),
    (A + " --playground x --temperature 1", {}, "greedy text; leave out --temperature"),
    (A + " --playground x --method lookup", {}, "and --method lookup has none; leave out"),
    (A + " --playground x --window 80", {}, "plain passes; leave out --window and --strict"),
    (A + f" --playground x --target {TARGET} --draft {TINY / 'eagle'}", {}, "an EAGLE head"),
    (AS_TARGET + " --dtype float16", {"model/model.safetensors": scale}, "use bfloat16 or float32"),
]
DAMAGE = [  # a file, how it is damaged, words of the error line; more in test_checkpoint.py
    ("model.safetensors", plant_nan, "embed_out.weight"),
    ("config.json", '{"model_type": "llama"}', "llama"),
    ("tokenizer.json", Path.unlink, "tokenizer.json"),
]
for name, damage, words in DAMAGE:
    MISTAKES += [(pair, {f"model/{name}": damage}, words) for pair in TARGET_AND_DRAFT]
DIFFERING = {
    "the normalizer is None and {'type': 'NFC'}": change(normalizer={"type": "NFC"}),
    "the pre_tokenizer is": change(pre_tokenizer={"type": "Whitespace"}),
    "merge 3838 is": change(model=lambda model: model | {"merges": model["merges"][:-1]}),
    "id 4096 is None and 'zzzz'": change(
        model=lambda model: model | {"vocab": model["vocab"] | {"zzzz": 4096}}
    ),
}
for words, damage in DIFFERING.items():
    MISTAKES.append((AS_DRAFT, {"model/tokenizer.json": damage}, f"tokenizers differ: {words}"))


@pytest.mark.parametrize(("arguments", "files", "words"), MISTAKES)
def test_a_mistake_is_one_line(
    arguments: str, files: Files, words: str, capsys: Captured, folder: Path
) -> None:
    """Check also that no file is created or changed."""
    put_files(folder, files)
    before = read_all(folder)
    assert words in error_line(capsys, main, arguments.split(" "))
    assert read_all(folder) == before


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a working folder, and make standard input empty."""
    monkeypatch.chdir(tmp_path)
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        yield tmp_path


def put_files(folder: Path, files: Files) -> None:
    """Write files to a folder, or change those of a copied model."""
    for name, content in files.items():
        if name.startswith("model/") and not (folder / "model").exists():
            shutil.copytree(DRAFT, folder / "model")
        if callable(content):
            content(folder / name)
        else:
            (folder / name).write_text(content, errors="surrogateescape")


def read_all(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


MEMORY_ERRORS = [  # an exception that means a lack of memory, and words of the error line
    (MemoryError(), "; these lower it: a 16-bit --dtype"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes."), "9 bytes.; these"),
]


def fail_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every run raise an error."""

    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr("dynatree_lab.cli.main.prepare", fail)


@pytest.mark.parametrize(("error", "words"), MEMORY_ERRORS)
def test_a_lack_of_memory_is_one_line(
    error: Exception, words: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(error, monkeypatch)
    assert words in error_line(capsys, main, ["--prompt", "a"])


@pytest.mark.parametrize("error", [ValueError("x"), FileNotFoundError(2, "x")])
def test_a_mistake_in_code_has_its_traceback(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Include FileNotFoundError for a file that the user did not name."""
    fail_with(error, monkeypatch)
    with pytest.raises(type(error), match="x"):
        main(["--prompt", "a"])


def test_a_gpu_that_is_not_there(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_one_gpu(monkeypatch)
    assert "the first is cuda:0" in error_line(capsys, main, [*A.split(), "--device", "cuda:1"])


def test_one_model_may_have_added_tokens(capsys: Captured, tmp_path: Path) -> None:
    """Check tokens that were added to the target only, as Dolly added some to Pythia's, or to the
    draft only."""
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
    swapped = ["--prompt", PROMPT, "--max-new-tokens", "9", "--target", TARGET, "--draft", pair[0]]
    assert main(swapped) == 0
    assert capsys.readouterr().out == expected
    other = Tokenizer.from_file(f"{DRAFT}/tokenizer.json")
    other.add_special_tokens(["### Other"])  # a draft token whose id is another token in the target
    other.save(f"{pair[1]}/tokenizer.json")
    assert error_line(capsys, main, [*arguments, pair[1]]).endswith(
        "differ: id 4096 is '### End' and '### Other'"
    )


def test_what_overflows_in_float16_runs_in_float32(tmp_path: Path) -> None:
    put_files(tmp_path, {"model/model.safetensors": scale})
    arguments = ["--prompt", "a", "--max-new-tokens", "3", "--target", str(tmp_path / "model")]
    assert main([*arguments, "--draft", DRAFT]) == 0

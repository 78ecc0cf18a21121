"""The command line's mistakes: one line that names the cause, status 2, and nothing else.

Also the checkpoints that are unusual but right, which must pass.
"""

import copy
import errno
import json
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from conftest import TINY, pretend_one_gpu, random_config, random_tensors
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from cli import options
from cli.errors import UsageError, say, shown
from cli.main import main
from cli.models import encode, load_tokenizer, require_same_tokenizer
from engine import memory
from engine.checkpoint import CheckpointError
from engine.memory import OutOfMemory
from engine.settings import check_settings, read_values, require_order, setting

PROMPT = "The ship sailed at dawn"
TARGET = str(TINY / "target")
DRAFT = str(TINY / "draft")
HOT = ["--prompt", "a", "--temperature", "1"]
Captured = pytest.CaptureFixture[str]


def error_line(capsys: Captured, arguments: list[str]) -> str:
    """The message of a run that must fail as every mistake does."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    lines = captured.err.splitlines()
    assert lines[-1].startswith("error: "), captured.err
    assert captured.err.count("error: ") == 1, captured.err
    return lines[-1]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("naïve 日本 'a b' \\n", "naïve 日本 'a b' \\n"),
        ("a\x1b[31mb\x07", "a\\x1b[31mb\\x07"),
        ("two\nlines\r\x85and\u2028more", "two\\nlines\\r\\x85and\\u2028more"),
        ("txt\u202eexe", "txt\\u202eexe"),
        ("\udcff", "\\udcff"),
    ],
)
def test_foreign_text_is_shown_and_not_obeyed(text: str, line: str, capsys: Captured) -> None:
    """An escape in a file's name turned the terminal red, a newline made two lines of one."""
    assert shown(text) == line
    say(text)
    assert capsys.readouterr().err == f"{line}\n"


MISTAKES = {
    "no prompt": ([], "--prompt"),
    "null in a name": (["--prompt-file", "a\0b"], "--prompt-file: has a null character"),
    "no prompt's name": (["--prompt-file", ""], "--prompt-file: is empty"),
    "no target's name": (["--prompt", "a", "--target", ""], "--target: is empty"),
    "no draft's name": (["--prompt", "a", "--draft="], "--draft: is empty"),
    "no device's name": (["--prompt", "a", "--device", ""], "--device: is empty"),
    "no dtype's name": (["--prompt", "a", "--draft-dtype", ""], "--draft-dtype: is empty"),
    "two prompts": (["--prompt", "a", "--prompt-file", "b"], "--prompt"),
    "empty prompt": (["--prompt", ""], "empty"),
    "prompt not UTF-8": (["--prompt", "\udcff"], "UTF-8"),
    "no such prompt file": (["--prompt-file", "no/such/file"], "no/such/file"),
    "prompt without an end": (["--prompt-file", "/dev/zero"], "/dev/zero is longer than a prompt"),
    "prompt file is a folder": (["--prompt-file", "."], "cannot be read"),
    "limit of 0": (["--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens 0"),
    "limit below 0": (["--prompt", "a", "--max-new-tokens", "-5"], "--max-new-tokens -5"),
    "limit not a number": (["--prompt", "a", "--max-new-tokens", "ten"], "ten"),
    "limit past memory": (
        ["--prompt", "a", "--max-new-tokens", "9" * 20],
        "these lower it: a 16-bit",
    ),
    "unknown method": (["--prompt", "a", "--method", "magic"], "dynatree"),
    "unknown setting": (["--prompt", "a", "--set", "width=3"], "tau_h"),
    "setting of another method": (["--prompt", "a", "--method", "ar", "--set", "K=3"], "rows"),
    "setting without value": (["--prompt", "a", "--set", "tau"], "tau"),
    "setting not a number": (["--prompt", "a", "--set", "D0=deep"], "int"),
    "setting not a switch": (["--prompt", "a", "--set", "history=maybe"], "on or off"),
    "setting given twice": (
        ["--prompt", "a", "--set", "tau=0.1", "--set", "tau = 0.1"],
        "tau = 0.1: tau is set twice",
    ),
    "setting out of range": (["--prompt", "a", "--set", "N_max=256"], "N_max=256"),
    "setting not finite": (["--prompt", "a", "--set", "tau=nan"], "tau=nan"),
    "settings out of order": (["--prompt", "a", "--set", "tau_h=0.3"], "tau_l < tau_h"),
    "unknown device": (["--prompt", "a", "--device", "tpu"], "cuda:N"),
    "odd device": (["--prompt", "a", "--device", "cuda:x"], "cuda:N"),
    "graphs on cpu": (["--prompt", "a", "--device", "cpu", "--no-graphs"], "only cuda has graphs"),
    "unknown dtype": (["--prompt", "a", "--dtype", "int8"], "--dtype int8: there are float32, "),
    "unknown draft dtype": (
        ["--prompt", "a", "--method", "ar", "--draft-dtype", "int8"],
        "--draft-dtype int8: there are float32, ",
    ),
    "cold": (["--prompt", "a", "--temperature", "-1"], "--temperature -1.0 is not a positive"),
    "top-p": (["--prompt", "a", "--temperature", "1", "--top-p", "0"], "outside (0, 1]"),
    "seed": (["--prompt", "a", "--temperature", "1", "--seed", "-1"], "--seed -1 is outside 0"),
    "greedy seed": (["--prompt", "a", "--seed", "1"], "--seed needs a --temperature above 0"),
    "greedy draft": (["--prompt", "a", "--draft-temperature", "1"], "needs a --temperature above"),
    "ranked guesses": (HOT + ["--draft-temperature", "1"], "no guess of dynatree is drawn; those"),
    "cold draft": (HOT + ["--method", "linear", "--draft-temperature", "0"], "not a positive"),
    "small window": (["--prompt", "a", "--window", "63"], "--window 63: 64 to 1635"),
    "wide window": (["--prompt", "a", "--window", "1636"], "--window 1636: 64 to 1635"),
    "many sinks": (["--prompt", "a", "--window", "64", "--sinks", "2000"], "--sinks 2000 leaves"),
    "sinks below 0": (["--prompt", "a", "--window", "64", "--sinks", "-1"], "--sinks -1"),
    "sinks alone": (["--prompt", "a", "--sinks", "4"], "--sinks needs a --window"),
    "no thread": (["--prompt", "a", "--threads", "0"], "--threads 0"),
    "many threads": (["--prompt", "a", "--threads", "100000"], "--threads 100000"),
    "unknown flag": (["--prompt", "a", "--fast"], "--fast"),
    "unknown commit": (["--prompt", "a", "--commit", "never"], "rebuild"),
    "unknown folder": (["--prompt", "a", "--target", "./none", "--draft", DRAFT], "./none"),
    "a file as model": (["--prompt", "a", "--target", __file__, "--draft", DRAFT], "not a folder"),
    "not a hub name": (["--prompt", "a", "--target", "a/b/c", "--method", "ar"], "a/b/c"),
    "target without draft": (["--prompt", "a", "--target", TARGET], "--draft"),
    "folder without config": (["--prompt", "a", "--target", ".", "--method", "ar"], "json"),
}


@pytest.mark.parametrize(("arguments", "hint"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_line(
    capsys: Captured,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    hint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert hint in error_line(capsys, arguments)


@dataclass(frozen=True)
class Given:
    """Settings of each type that has a range."""

    p: float = setting(1, 0, 1, "a share")
    least: float = setting(0.25, 0.0, 1.0, "a smaller one")
    n: int = setting(3, 0, 9, "a number")
    is_on: bool = setting(True, False, True, "a switch")

    def __post_init__(self) -> None:
        check_settings(self)
        require_order(self, "least < p")
        require_order(self, "least <= n <= is_on" if self.n < 2 else "least <= n")


def test_a_setting_is_of_the_type_that_is_annotated() -> None:
    """Whatever its default was written as; a whole number where a float is due becomes one."""
    for given in (Given(), Given(p=1), Given(**read_values(Given, ["p=1"]))):
        assert given == Given(p=1.0) and type(given.p) is float
    assert type(Given(least=0).least) is float and type(Given(n=5).n) is int
    for wrong in ({"p": True}, {"p": "1"}, {"n": 1.0}, {"n": True}, {"is_on": 1}, {"least": None}):
        with pytest.raises(ValueError, match=" is not of type "):
            Given(**wrong)
    for wrong in ({"p": 2}, {"p": -1}, {"n": 10}, {"p": math.nan}):
        with pytest.raises(ValueError, match=" is outside 0"):
            Given(**wrong)
    with pytest.raises(ValueError, match="n=1.0: n takes a value of type int"):
        read_values(Given, ["n=1.0"])


def test_settings_out_of_order_are_named() -> None:
    """Each pair of them; of a pair with <= both may be the same."""
    assert Given(least=0.0, n=0, is_on=False).n == 0
    for wrong, told in (
        ({"least": 0.5, "p": 0.5}, "least=0.5 and p=0.5 break least < p"),
        ({"least": 0.5, "n": 0}, "least=0.5 and n=0 break least <= n"),
        ({"least": 0.0, "n": 1, "is_on": False}, "n=1 and is_on=False break n <= is_on"),
    ):
        with pytest.raises(ValueError, match=f"^{told}$"):
            Given(**wrong)


def test_an_escape_in_a_name_is_shown(capsys: Captured) -> None:
    arguments = ["--prompt", "a", "--target", "./no\x1b[31mne\nerror: x", "--method", "ar"]
    assert main(arguments) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "./no\\x1b[31mne\\nerror: x" in line and "\x1b" not in line


def test_a_prompt_of_the_largest_size_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "MAX_PROMPT_BYTES", 10)
    file = tmp_path / "prompt"
    file.write_bytes(b"0123456789")
    assert options.read_prompt(None, str(file)) == "0123456789"
    file.write_bytes(b"0123456789a")
    with pytest.raises(UsageError, match="is longer than a prompt may be"):
        options.read_prompt(None, str(file))


def test_standard_input_that_is_closed(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert "standard input is closed" in error_line(capsys, ["--prompt-file", "-"])


@pytest.mark.parametrize("is_debugging", [False, True])
def test_what_nobody_foresaw_is_one_line(
    is_debugging: bool, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 70, the exception's name, and a traceback for those who ask for it."""

    def fail(*arguments: object) -> None:
        raise KeyError("two\nlines")

    monkeypatch.setattr("cli.main.prepare", fail)
    assert main(["--prompt", "a"] + ["--debug"] * is_debugging) == 70
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert lines[-1].startswith("error: KeyError: ") and "--debug shows where" in lines[-1]
    assert ("Traceback" in captured.err) is is_debugging
    assert is_debugging or len(lines) == 1
    assert captured.out == ""


REFUSALS = [
    MemoryError(),
    torch.OutOfMemoryError("no room"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    RuntimeError("std::bad_alloc"),
]


@pytest.mark.parametrize("error", REFUSALS)
def test_out_of_memory_names_what_lowers_it(
    error: Exception, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr("cli.main.prepare", fail)
    assert "; these lower it: a 16-bit --dtype" in error_line(capsys, ["--prompt", "a"])


def test_a_prompt_for_whose_tokens_there_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library took none for an answer by ending the process."""
    monkeypatch.setattr(memory, "free_memory", lambda device: 50_000_000)
    tokenizer = load_tokenizer(Path(TARGET))
    assert len(encode("a b " * 20_000, tokenizer, 4096)) > 20_000
    with pytest.raises(OutOfMemory, match="tokenizing the prompt would take 60.0 MB on cpu, 50"):
        encode("a b " * 50_000, tokenizer, 4096)


@pytest.mark.parametrize("kind", [OSError, RuntimeError])
def test_too_many_open_files(
    kind: type[Exception], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system says so, and torch says that the system does; a pipe to a process needs some."""

    def fail(*arguments: object) -> None:
        raise kind(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("cli.main.prepare", fail)
    assert "ulimit -n lets more be open" in error_line(capsys, ["--prompt", "a"])


def test_cuda_asked_for_and_absent(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--device cpu" in error_line(capsys, ["--prompt", "a", "--device", "cuda"])
    pretend_one_gpu(monkeypatch)
    assert "cuda:0" in error_line(capsys, ["--prompt", "a", "--device", "cuda:1"])


def test_a_gpu_without_bfloat16(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_one_gpu(monkeypatch, capability=(7, 5))
    for option in ("--dtype", "--draft-dtype"):
        line = error_line(capsys, ["--prompt", "a", option, "bfloat16"])
        why = "Pretended GPU, compute capability 7.5, has none"
        assert line == f"error: {option} bfloat16: {why}; use {option} float16"


def copy_target(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(TARGET, folder)
    return folder


def as_target(folder: Path) -> list[str]:
    """The options that run this folder with the embedded draft."""
    return ["--target", str(folder), "--draft", DRAFT]


def edit_json(file: Path, changes: dict[str, object]) -> None:
    """Set the keys given; None removes one."""
    content = json.loads(file.read_text())
    for name, value in changes.items():
        if value is None:
            del content[name]
        else:
            content[name] = value
    file.write_text(json.dumps(content))


def halve(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def write_other_json(file: Path) -> None:
    file.write_text('{"a": 1}')


def drop_rows(file: Path) -> None:
    tensors = load_file(file)
    tensors["embed_out.weight"] = tensors["embed_out.weight"][:100].clone()
    save_file(tensors, file)


def plant_nan(file: Path) -> None:
    tensors = load_file(file)
    tensors["embed_out.weight"][7, 7] = float("nan")
    save_file(tensors, file)


DAMAGE = {  # how which file is damaged -> what the line names
    "truncated weights": (halve, "model.safetensors", "model.safetensors"),
    "empty weights": (empty, "model.safetensors", "model.safetensors"),
    "no weights": (Path.unlink, "model.safetensors", "safetensors"),
    "weights not finite": (plant_nan, "model.safetensors", "embed_out.weight"),
    "wrong shape": (drop_rows, "model.safetensors", "embed_out.weight"),
    "broken config": (halve, "config.json", "config.json"),
    "no tokenizer": (Path.unlink, "tokenizer.json", "tokenizer.json"),
    "broken tokenizer": (halve, "tokenizer.json", "tokenizer.json"),
    "not a tokenizer": (write_other_json, "tokenizer.json", "tokenizer"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_one_line(capsys: Captured, tmp_path: Path, name: str) -> None:
    damage, file, hint = DAMAGE[name]
    folder = copy_target(tmp_path)
    damage(folder / file)
    assert hint in error_line(capsys, ["--prompt", "a"] + as_target(folder))


EDITS = {  # the file and its keys to change -> what the line names
    "missing field": ("config.json", {"num_hidden_layers": None}, "num_hidden"),
    "other family": ("config.json", {"model_type": "llama"}, "llama"),
    "other normaliser": ("tokenizer.json", {"normalizer": {"type": "Lowercase"}}, "normaliser"),
    "other pre-tokeniser": (
        "tokenizer.json",
        {"pre_tokenizer": {"type": "Whitespace"}},
        "pre-tokeniser",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_file_is_one_line(capsys: Captured, tmp_path: Path, name: str) -> None:
    file, changes, hint = EDITS[name]
    folder = copy_target(tmp_path)
    edit_json(folder / file, changes)
    assert hint in error_line(capsys, ["--prompt", "a"] + as_target(folder))


def test_other_vocabulary_and_merges(capsys: Captured, tmp_path: Path) -> None:
    raw = json.loads(Path(TARGET, "tokenizer.json").read_text())
    longer = copy.deepcopy(raw)
    longer["model"]["vocab"]["zzzz"] = 4096
    reversed_merges = copy.deepcopy(raw)
    reversed_merges["model"]["merges"].reverse()
    for part, changed in {"vocabulary": longer, "merges": reversed_merges}.items():
        folder = copy_target(tmp_path / part)
        (folder / "tokenizer.json").write_text(json.dumps(changed))
        line = error_line(capsys, ["--prompt", "a"] + as_target(folder))
        assert "differ" in line and part in line


def test_an_id_that_no_vocabulary_has() -> None:
    """The library counts up to it to say what it is: minutes, gigabytes, and no Ctrl-C."""
    small = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    large = Tokenizer(WordLevel({"a": 2**31}, unk_token="a"))
    for target, draft in ((small, large), (large, small)):
        with pytest.raises(CheckpointError, match="tokenizer.json has id 2147483648, as no"):
            require_same_tokenizer(target, draft)


def test_merges_may_be_written_either_way(tmp_path: Path) -> None:
    """ "a b" in older files, ["a", "b"] in newer ones: the same tokenizer."""
    folder = copy_target(tmp_path)
    raw = json.loads((folder / "tokenizer.json").read_text())
    pairs = []
    for merge in raw["model"]["merges"]:
        if isinstance(merge, str):
            merge = merge.split(" ", 1)
        pairs.append(merge)
    joined = [" ".join(pair) for pair in pairs]
    draft = load_tokenizer(Path(DRAFT))
    for merges in (pairs, joined):
        raw["model"]["merges"] = merges
        (folder / "tokenizer.json").write_text(json.dumps(raw))
        require_same_tokenizer(load_tokenizer(folder), draft)


def test_a_tokenizer_that_truncates_does_not_cut_the_prompt(tmp_path: Path) -> None:
    """Files saved by training code may carry a length limit and padding."""
    folder = copy_target(tmp_path)
    tokenizer = Tokenizer.from_file(f"{TARGET}/tokenizer.json")
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = encode(PROMPT, load_tokenizer(folder), 4096)
    assert ids == Tokenizer.from_file(f"{TARGET}/tokenizer.json").encode(PROMPT).ids
    assert len(ids) == 7


@pytest.mark.parametrize("content", ['{"model": "x"}', '{"added_tokens": [{}]}', "[]"])
def test_a_broken_draft_tokenizer_is_one_line(
    capsys: Captured, tmp_path: Path, content: str
) -> None:
    folder = copy_target(tmp_path)
    (folder / "tokenizer.json").write_text(content)
    arguments = ["--prompt", "a", "--target", TARGET, "--draft", str(folder)]
    assert "tokenizer.json" in error_line(capsys, arguments)


def test_non_finite_target_names_the_way_out(capsys: Captured, tmp_path: Path) -> None:
    """Weights that are finite, but whose products overflow in float16."""
    folder = copy_target(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["gpt_neox.layers.0.attention.query_key_value.weight"] *= 30000
    save_file(tensors, folder / "model.safetensors")
    arguments = ["--prompt", "a", "--max-new-tokens", "3"] + as_target(folder)
    assert "--dtype bfloat16" in error_line(capsys, arguments + ["--dtype", "float16"])
    assert main(arguments) == 0


def test_past_the_trained_positions_is_a_warning(capsys: Captured, tmp_path: Path) -> None:
    folder = copy_target(tmp_path)
    edit_json(folder / "config.json", {"max_position_embeddings": 16})
    arguments = ["--prompt", PROMPT, "--max-new-tokens", "20"] + as_target(folder)
    assert main(arguments) == 0
    assert "warning: 7 prompt and 20 new tokens exceed the 16 positions" in capsys.readouterr().err


def test_prompt_id_past_the_vocabulary(capsys: Captured, tmp_path: Path) -> None:
    """A tokenizer with more entries than the model has embeddings."""
    config = random_config(vocab_size=20)
    save_file(random_tensors(config, 0), tmp_path / "model.safetensors")
    shutil.copy(f"{TARGET}/tokenizer.json", tmp_path)
    raw = json.loads((TINY / "target" / "config.json").read_text())
    sizes = {"vocab_size": 20, "hidden_size": 32, "num_hidden_layers": 2, "rotary_pct": 0.5}
    sizes |= {"num_attention_heads": 2, "intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(raw | sizes))
    arguments = ["--prompt", PROMPT, "--method", "ar", "--target", str(tmp_path)]
    line = error_line(capsys, arguments)
    assert "knows 20 ids" in line

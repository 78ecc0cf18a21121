"""The command line's mistakes: one line that names the cause, status 2, and nothing else.

Also the checkpoints that are unusual but right, which must pass.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import TINY, random_config, random_tensors
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from cli.main import main
from cli.models import encode, load_tokenizer, require_same_tokenizer

PROMPT = "The ship sailed at dawn"
TARGET = str(TINY / "target")
DRAFT = str(TINY / "draft")
Captured = pytest.CaptureFixture[str]


def error_line(capsys: Captured, *arguments: str) -> str:
    """The message of a run that must fail as every mistake does."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    *before, last = captured.err.splitlines()
    assert last.startswith("error: ") and "error: " not in "".join(before), captured.err
    return last


MISTAKES = {
    "no prompt": ([], "--prompt"),
    "two prompts": (["--prompt", "a", "--prompt-file", "b"], "--prompt"),
    "empty prompt": (["--prompt", ""], "empty"),
    "prompt not UTF-8": (["--prompt", "\udcff"], "UTF-8"),
    "no such prompt file": (["--prompt-file", "no/such/file"], "no/such/file"),
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
    "setting out of range": (["--prompt", "a", "--set", "N_max=256"], "N_max=256"),
    "setting not finite": (["--prompt", "a", "--set", "tau=nan"], "tau=nan"),
    "settings out of order": (["--prompt", "a", "--set", "tau_h=0.3"], "tau_l < tau_h"),
    "unknown device": (["--prompt", "a", "--device", "tpu"], "cuda:N"),
    "odd device": (["--prompt", "a", "--device", "cuda:x"], "cuda:N"),
    "graphs on cpu": (["--prompt", "a", "--device", "cpu", "--no-graphs"], "only cuda has graphs"),
    "unknown dtype": (["--prompt", "a", "--dtype", "int8"], "bfloat16"),
    "cold": (["--prompt", "a", "--temperature", "-1"], "--temperature -1.0 is not a positive"),
    "top-p": (["--prompt", "a", "--temperature", "1", "--top-p", "0"], "outside (0, 1]"),
    "seed": (["--prompt", "a", "--temperature", "1", "--seed", "-1"], "--seed -1 is outside 0"),
    "greedy seed": (["--prompt", "a", "--seed", "1"], "need a --temperature above 0"),
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
    assert hint in error_line(capsys, *arguments)


def test_cuda_asked_for_and_absent(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--device cpu" in error_line(capsys, "--prompt", "a", "--device", "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "cuda:0" in error_line(capsys, "--prompt", "a", "--device", "cuda:1")


def test_a_gpu_without_bfloat16(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old GPU")
    line = error_line(capsys, "--prompt", "a", "--dtype", "bfloat16")
    assert "Old GPU, compute capability 7.5, has none; use --dtype float16" in line


def test_no_network(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub name without a network: the line holds the command that needs none."""
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    line = error_line(
        capsys, "--prompt", "a", "--method", "ar", "--target", "EleutherAI/pythia-70m"
    )
    assert "EleutherAI/pythia-70m" in line and "--target models/tiny/target" in line


def unreachable(*args: object, **kwargs: object) -> None:
    raise OSError("no route to host")


def copy_target(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(TARGET, folder)
    return folder


def edit_json(file: Path, **changes: object) -> None:
    """Set the keys given; None removes one."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def reshape_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["embed_out.weight"] = tensors["embed_out.weight"][:100].clone()
    save_file(tensors, folder / "model.safetensors")


def spoil_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["embed_out.weight"][7, 7] = float("nan")
    save_file(tensors, folder / "model.safetensors")


BREAKAGES = {
    "truncated weights": (lambda f: truncate(f / "model.safetensors"), "model.safetensors"),
    "empty weights": (lambda f: (f / "model.safetensors").write_bytes(b""), "model.safetensors"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "safetensors"),
    "weights not finite": (spoil_tensor, "embed_out.weight"),
    "wrong shape": (reshape_tensor, "embed_out.weight"),
    "missing field": (lambda f: edit_json(f / "config.json", num_hidden_layers=None), "num_hidden"),
    "other family": (lambda f: edit_json(f / "config.json", model_type="llama"), "llama"),
    "broken config": (lambda f: truncate(f / "config.json"), "config.json"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json"),
    "broken tokenizer": (lambda f: truncate(f / "tokenizer.json"), "tokenizer.json"),
    "not a tokenizer": (lambda f: (f / "tokenizer.json").write_text('{"a": 1}'), "tokenizer"),
    "other normaliser": (
        lambda f: edit_json(f / "tokenizer.json", normalizer={"type": "Lowercase"}),
        "normaliser",
    ),
    "other pre-tokeniser": (
        lambda f: edit_json(f / "tokenizer.json", pre_tokenizer={"type": "Whitespace"}),
        "pre-tokeniser",
    ),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_a_broken_checkpoint_is_one_line(capsys: Captured, tmp_path: Path, name: str) -> None:
    breakage, hint = BREAKAGES[name]
    folder = copy_target(tmp_path)
    breakage(folder)
    assert hint in error_line(capsys, "--prompt", "a", "--target", str(folder), "--draft", DRAFT)


def test_other_vocabulary_and_merges(capsys: Captured, tmp_path: Path) -> None:
    for part, change in (("vocabulary", "vocab"), ("merges", "merges")):
        folder = copy_target(tmp_path / part)
        raw = json.loads((folder / "tokenizer.json").read_text())
        if change == "vocab":
            raw["model"]["vocab"]["zzzz"] = 4096
        else:
            raw["model"]["merges"].reverse()
        (folder / "tokenizer.json").write_text(json.dumps(raw))
        line = error_line(capsys, "--prompt", "a", "--target", str(folder), "--draft", DRAFT)
        assert "differ" in line and part in line


def test_merges_may_be_written_either_way(tmp_path: Path) -> None:
    """ "a b" in older files, ["a", "b"] in newer ones: the same tokenizer."""
    folder = copy_target(tmp_path)
    raw = json.loads((folder / "tokenizer.json").read_text())
    pairs = [m.split(" ", 1) if isinstance(m, str) else m for m in raw["model"]["merges"]]
    draft = load_tokenizer(Path(DRAFT))
    for merges in (pairs, [" ".join(pair) for pair in pairs]):
        raw["model"]["merges"] = merges
        (folder / "tokenizer.json").write_text(json.dumps(raw))
        require_same_tokenizer(load_tokenizer(folder), draft)


def test_a_tokenizer_that_truncates_does_not_cut_the_prompt(tmp_path: Path) -> None:
    """Files saved by training code may carry a length limit and padding."""
    folder, tokenizer = copy_target(tmp_path), Tokenizer.from_file(f"{TARGET}/tokenizer.json")
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
    pair = ["--target", TARGET, "--draft", str(folder)]
    assert "tokenizer.json" in error_line(capsys, "--prompt", "a", *pair)


def test_non_finite_target_names_the_way_out(capsys: Captured, tmp_path: Path) -> None:
    """Weights that are finite, but whose products overflow in float16."""
    folder = copy_target(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["gpt_neox.layers.0.attention.query_key_value.weight"] *= 30000
    save_file(tensors, folder / "model.safetensors")
    pair = ["--prompt", "a", "--target", str(folder), "--draft", DRAFT, "--max-new-tokens", "3"]
    assert "--dtype bfloat16" in error_line(capsys, *pair, "--dtype", "float16")
    assert main(pair) == 0


def test_past_the_trained_positions_is_a_warning(capsys: Captured, tmp_path: Path) -> None:
    folder = copy_target(tmp_path)
    edit_json(folder / "config.json", max_position_embeddings=16)
    arguments = ["--prompt", PROMPT, "--target", str(folder), "--draft", DRAFT]
    assert main([*arguments, "--max-new-tokens", "20"]) == 0
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
    line = error_line(capsys, "--prompt", PROMPT, "--method", "ar", "--target", str(tmp_path))
    assert "knows 20 ids" in line

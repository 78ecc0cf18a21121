"""Tests that an untrusted file, mutated at random, is either read correctly or refused.

A run may end in two ways: with status 0, if everything in the file was read correctly, or with
status 2 and a one-line error.
"""

import errno
import json
import os
import random
import resource
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO

import pytest
from conftest import (
    ROOT,
    Captured,
    error_line,
    published_json,
    random_config,
    random_tensors,
    write_checkpoint,
    write_shards,
)
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

import bench
from benchmark.results import KEY_COLUMNS, digest_of, load
from cli.main import main
from engine.checkpoint import INDEX, SINGLE, InvalidFile, read_config, read_text
from gpt_neox import Config

# JSON text that no Python value is written as; it replaces its mark in the file
RAW_VALUES = {"@inf": "1e999", "@nan": "NaN", "@long": "9" * 5000, "@deep": "[" * 10**5}
RAW_VALUES |= {"@nested": '{"a":' * 10**5, "@half": '"\\ud800"', "@control": '"\\u001b[31m\\n"'}
ODD = (10**8, 10**9, 10**20, -(10**30), 2**63, 1e300, 1e-300, -1, 0, 1, 7, 2.5, *RAW_VALUES)
ODD += (None, True, False, "", "false", "9", "ar", "../x", [], {}, [[]], {"a": 1}, ["x"])


def random_place(value: list | dict, rng: random.Random) -> tuple[list | dict, int | str]:
    """Return a list or object inside `value`, and an index or key of it, at a random depth."""
    found = []
    while isinstance(value, list | dict) and value:
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        found.append((value, key))
        value = value[key]
    return rng.choice(found)


def mutate(text: bytes, rng: random.Random) -> bytes:
    """Return a JSON file with one error: it is cut short, or a byte or a value is changed."""
    how = rng.choice(["odd", "odd", "odd", "drop", "nest", "move", "cut", "flip"])
    at = rng.randrange(len(text))
    if how == "cut":
        return text[:at]
    if how == "flip":
        return text[:at] + rng.randbytes(1) + text[at + 1 :]
    content = json.loads(text)
    holder, key = random_place(content, rng)
    if how == "drop":
        del holder[key]
    elif how == "nest":
        holder[key] = [holder[key]]
    elif how == "move":
        other, at = random_place(content, rng)
        holder[key] = deepcopy(other[at])
    else:
        holder[key] = rng.choice(ODD)
    changed = json.dumps(content)
    for mark, raw in RAW_VALUES.items():
        changed = changed.replace(f'"{mark}"', raw)
    return changed.encode()


def mutate_header(content: bytes, rng: random.Random) -> bytes:
    """Return a safetensors file with an error in its JSON header or in the header's length, which
    is stored in the first 8 bytes."""
    n = int.from_bytes(content[:8], "little")
    header = mutate(content[8 : 8 + n], rng)
    n_claimed = rng.choice([len(header)] * 9 + [0, 1, len(content), 2**31, 2**40, 2**63])
    return n_claimed.to_bytes(8, "little") + header + content[8 + n :]


VOCABULARY = {word: i for i, word in enumerate(("<|endoftext|>", "<unk>", "the", "ship", "sailed"))}


def write(folder: Path) -> None:
    """Write a small model with a tokenizer. Notes make the header of the weights larger."""
    write_checkpoint(folder, random_config(eos_ids=(0,)), {})
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    notes = {f"note {i}": "that nothing reads" for i in range(99)}
    save_file(random_tensors(random_config(), 0), folder / SINGLE, metadata=notes)


def run(folder: Path, capsys: Captured) -> list[int] | None:
    """Run ar with the model and return the ids, or None if it ends in a one-line error."""
    limits = ["--max-new-tokens", "3", "--method", "ar", "--json"]
    status = main(["--prompt", "the ship", "--target", str(folder), *limits])
    printed = capsys.readouterr()
    if status == 0:
        return json.loads(printed.out)["token_ids"]
    assert status == 2 and printed.out == ""
    lines = printed.err.splitlines()
    assert lines[-1].startswith("error: ") and "Traceback" not in printed.err, printed.err
    assert sum(line.startswith("error: ") for line in lines) == 1 and len(lines) <= 3, printed.err
    return None


def assert_read_correctly(raw: dict, config: Config) -> None:
    """Assert that a Config has the values of config.json, which this oracle reads by itself."""
    rope = raw.pop("rope_parameters", None) or {}
    for key, name in (("rotary_pct", "partial_rotary_factor"), ("rotary_emb_base", "rope_theta")):
        if name in rope:
            raw[key] = rope[name]
    for key, value in published_json(config).items():
        said = raw.get(key)
        if key == "eos_token_id" and isinstance(said, int):
            said = [said]
        taken = json.dumps(value, allow_nan=False)
        assert said is None or json.dumps(said) == taken  # 1 is not true


ROPE = {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 10000.0}
KINDS = {  # the file, keys that are added to it, how it is mutated
    "published": ("config.json", {}, mutate),
    "newer": ("config.json", {"rope_parameters": ROPE}, mutate),
    "index": (INDEX, {}, mutate),
    "header": (SINGLE, {}, mutate_header),
}


@pytest.mark.filterwarnings("default:tie_word_embeddings")
@pytest.mark.parametrize("kind", KINDS)
def test_a_mutated_file_is_read_right_or_refused(
    kind: str, tmp_path: Path, capsys: Captured
) -> None:
    """Check also that no claimed size makes the process allocate gigabytes."""
    name, more, change = KINDS[kind]
    write(tmp_path)
    if kind == "index":
        write_shards(tmp_path, random_config(eos_ids=(0,)), random_tensors(random_config(), 0))
    valid = (tmp_path / name).read_bytes()
    if more:
        valid = json.dumps(json.loads(valid) | more).encode()
    config = read_config(tmp_path)
    expected = run(tmp_path, capsys)
    outcomes = set()
    rng = random.Random(kind)
    for _ in range(200):
        (tmp_path / name).write_bytes(change(valid, rng))
        ids = run(tmp_path, capsys)
        outcomes.add(ids is not None)
        if ids is None:
            continue
        found = read_config(tmp_path)
        assert_read_correctly(json.loads((tmp_path / "config.json").read_text()), found)
        if found == config:
            assert ids == expected
    assert outcomes == {True, False}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 * 2**20  # KB


def results_lines(table: str) -> list[dict]:
    """Return the lines of a results file with every kind of line, and two texts of three ids."""
    found = load(ROOT / "results" / "enlarged_cpu.jsonl")
    steps = load(ROOT / "results" / "steps_cpu.jsonl").step_times
    columns = [*found.head.columns, "predicted", "setup", "speedup_mean", "end_to_end_speedup"]
    texts = list(found.texts.values())[:2]
    for text, ids in zip(texts, ([1, 2, 3], [1, 3, 2]), strict=True):
        text |= {"ids": ids, "ids_digest": digest_of(ids), "predicted_ms": 10.0}
    lines = [{"head": asdict(replace(found.head, table=table, columns=columns))}]
    difference = {name: texts[1][name] for name in KEY_COLUMNS} | {"at": 1, "gap": None}
    return [*lines, {"step_times": asdict(steps)}, *texts, {"difference": difference}]


def show_or_refuse(content: bytes, kind: str, file: Path, capsys: Captured) -> str:
    """Show a results file and return the error line; empty if the file was not refused."""
    file.write_bytes(content)
    status = bench.main(["--show", str(file), "--format", kind])
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
    if status == 0:
        assert captured.out and captured.err == ""
        return ""
    assert status == 2 and captured.out == "" and captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize("kind", ["text", "markdown"])
@pytest.mark.parametrize("table", ["main", "steps"])
def test_a_mutated_results_file_is_shown_or_refused(
    table: str, kind: str, capsys: Captured, tmp_path: Path
) -> None:
    """Check that a file with any error is refused in one line, without control characters."""
    rng = random.Random(f"{table} {kind}")
    valid = [json.dumps(line).encode() for line in results_lines(table)]
    outcomes = set()
    for _ in range(200):
        at = rng.randrange(len(valid))
        lines = [*valid[:at], mutate(valid[at], rng), *valid[at + 1 :]]
        line = show_or_refuse(b"\n".join(lines) + b"\n", kind, tmp_path / "r.jsonl", capsys)
        outcomes.add(line == "")
    assert outcomes == {True, False}


INVALID_TEXT_FILES: dict[str, Callable[[Path], object]] = {  # error message -> how to make the file
    "is a folder": Path.mkdir,
    "is a link to nothing": lambda file: file.symlink_to("nothing"),
    "does not exist": lambda file: None,
    "utf-8": lambda file: file.write_bytes(b"\xe9"),
    "larger than": lambda file: file.write_bytes(b" " * 1001),
}


@pytest.mark.parametrize("said", INVALID_TEXT_FILES)
def test_an_invalid_text_file_is_named(said: str, tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    INVALID_TEXT_FILES[said](file)
    with pytest.raises(InvalidFile, match=said) as caught:
        read_text(file, max_bytes=1000)
    assert str(caught.value).startswith(str(file))


def test_a_file_without_permission_is_not_called_absent(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the message, because the library that opens weights reports "No such file". Root may
    read every file, so for root the refusal is simulated."""
    write(tmp_path)
    (tmp_path / SINGLE).chmod(0)

    def refuse(file: Path, mode: str) -> IO[bytes]:
        if file.stat().st_mode & 0o400:
            return open(file, mode)
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))

    if os.geteuid() == 0:
        monkeypatch.setattr("engine.checkpoint.open", refuse, raising=False)
    line = error_line(
        capsys, main, ["--prompt", "the", "--method", "ar", "--target", str(tmp_path)]
    )
    assert line.endswith(f"{SINGLE} cannot be read: Permission denied")

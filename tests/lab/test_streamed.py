"""Tests of a target whose layers stay in their files: it computes what the model in memory does,
its buffers hold the right layers, and a file that cannot be read ends in one line."""

import os
import shutil
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path

import pytest
import torch
from fast import generate
from safetensors.torch import load_file, save_file
from small import GOLDEN, TINY, Captured, assert_close, error_line, prefilled, run, run_tree
from torch import Tensor
from trees import make_tree

from dynatree_lab.cli import terminal
from dynatree_lab.cli.main import main
from dynatree_lab.engine import streamed
from dynatree_lab.engine.checkpoint import CheckpointError
from dynatree_lab.engine.layers import FusedLayer
from dynatree_lab.engine.model import FastGPTNeoX
from dynatree_lab.engine.streamed import Budget, FileLayers, StreamedGPTNeoX, load_streamed
from dynatree_lab.methods import METHODS
from dynatree_lab.methods.static import Fixed, PaddedAutoregressive
from dynatree_lab.metrics import token_ids

SMALL = 30_000_000  # bytes for the embedded target: embedding, head and buffers take 22 MB
TARGET = TINY / "target"
PROMPT = [510, 1453, 4, 99, 260, 7]
WORDS = ["--prompt", "The ship sailed at dawn", "--max-new-tokens", "30"]
MEMORY = ["--target-memory", "30MB"]


def load(folder: Path = TARGET, budget: int = SMALL, **options: object) -> StreamedGPTNeoX:
    return load_streamed(folder, torch.device("cpu"), torch.float32, budget)


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda folder: folder.name)
def test_golden_logits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check shards, tied heads, both kinds of residual and files of every dtype. No layer stays."""
    monkeypatch.setattr(Budget, "n_resident", lambda *_: 0)
    model, data = load(folder), load_file(folder / "golden.safetensors")
    prompt = data["input_ids"].tolist()
    assert_close(run(model, prompt), data["logits"])
    tree = make_tree(data["tree_tokens"].tolist(), data["tree_parents"].tolist())
    assert_close(run_tree(model, prefilled(model, prompt, 60), tree), data["tree_logits"])


@pytest.fixture(scope="module")
def models() -> tuple[StreamedGPTNeoX, FastGPTNeoX, FastGPTNeoX]:
    """Return the embedded target, streamed and in memory, and the draft."""
    return load(), *(FastGPTNeoX.from_pretrained(TINY / role) for role in ("target", "draft"))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_writes_the_text_of_the_model_in_memory(
    method: str, models: tuple[FastGPTNeoX, ...]
) -> None:
    target, in_memory, draft = models
    texts = [
        token_ids(generate(each, draft, PROMPT, METHODS[method](), 24))
        for each in (target, in_memory)
    ]
    assert texts[0] == texts[1] and target.layers.n_resident == 0


@pytest.mark.parametrize("options", [{"strict": True}, {"commit": "rebuild"}])
def test_options_of_the_engine_work(options: dict, models: tuple[FastGPTNeoX, ...]) -> None:
    """Compare with ar under the same options; strict logits are compared bit for bit."""
    target, _, draft = models
    logits: list[list[Tensor]] = [[], []]
    settings = Fixed(D=3, B=2, tau=0.0), PaddedAutoregressive(rows=16)
    texts = [
        token_ids(generate(target, draft, PROMPT, each, 24, inspect=found.append, **options))
        for each, found in zip(settings, logits, strict=True)
    ]
    assert texts[0] == texts[1]
    if "strict" in options:
        assert torch.equal(*(torch.cat(found) for found in logits))


def test_the_budget_decides_which_layers_stay() -> None:
    """Check that they are spread evenly, that all stay if buffers would not save memory, and the
    least size."""
    with pytest.raises(
        CheckpointError, match="is 9MB, it must be larger: the target's embedding"
    ) as e:
        load(budget=9_000_000)
    least = int(str(e.value).rpartition(" ")[2].removesuffix("MB")) * 10**6
    layers = load(budget=least).layers
    layer, caches = layers.files.layer_bytes(0), 1024 * load().bytes_per_token
    resident = {0: [], 1: [5], 2: [2, 5], 3: [1, 3, 5], 4: [0, 1, 2, 3, 4, 5]}
    for n, expected in resident.items():
        layers = load(budget=least + caches + n * layer).layers
        assert list(layers.resident) == expected and layers.n_resident == len(expected)
        assert layers.bytes_per_pass == (6 - len(expected)) * layer
        assert len(layers.buffers) == (0 if n == 4 else 2)


def test_a_layer_is_read_while_the_one_before_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the order, and that a second pass finds its first layer begun."""
    model, events = load(), []
    begin, fill = FileLayers.begin, FileLayers.fill

    def record(self: FileLayers, i: int, buffer: int) -> object:
        events.append(f"read {i}")
        return begin(self, i, buffer)

    def check(self: FileLayers, weights: object, i: int) -> None:
        assert threading.current_thread().name.startswith("layer reader")
        fill(self, weights, i)

    monkeypatch.setattr(FileLayers, "begin", record)
    monkeypatch.setattr(FileLayers, "fill", check)
    for _ in range(2):
        with model.layers.lock:
            for i, _ in enumerate(model.layers):
                events.append(f"run {i}")
    once = [event for i in range(6) for event in (f"read {(i + 1) % 6}", f"run {i}")]
    assert events == ["read 0", *once, *once]


class Broken(Exception):
    pass


@pytest.mark.parametrize(
    ("owner", "name", "n_calls"), [(FusedLayer, "forward", 6), (FileLayers, "fill", 5)]
)
def test_a_pass_that_ended_early_spoils_no_later_one(
    owner: type, name: str, n_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let each layer of a pass fail, and each read that a pass waits for."""
    model = load()
    expected, method = run(model, PROMPT), getattr(owner, name)
    for n in range(n_calls):
        left = iter(range(n))

        def fail(*arguments: object, left: Iterator = left) -> object:
            result = method(*arguments)  # a buffer is overwritten before its read fails
            if next(left, None) is None:
                raise Broken
            return result

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(Broken):
                run(model, PROMPT + [3])
        assert torch.equal(run(model, PROMPT), expected)


def test_texts_may_share_a_streamed_target(models: tuple[FastGPTNeoX, ...]) -> None:
    """Write two texts in two threads."""
    target, _, draft = models
    prompts = [PROMPT, [9, 260, 1453]]

    def write(prompt: list[int]) -> list[int]:
        torch.set_num_threads(1)
        return token_ids(generate(target, draft, prompt, Fixed(D=2, B=2), 24))

    alone = list(map(write, prompts))
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(write, prompts)) == alone


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    shutil.copytree(TARGET, tmp_path / "target")
    return tmp_path / "target" / "model.safetensors"


def shorten(file: Path) -> None:
    os.truncate(file, 30_000)


def replace(file: Path) -> None:
    """Put another file in its place. The run goes on reading the first one."""
    other = file.with_name("other")
    other.write_bytes(b"other")
    other.rename(file)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shorten, "cannot be read: it is truncated"),
        (replace, None),
    ],
)
def test_a_file_that_changes_ends_the_text_in_one_line(
    damage: object, message: str | None, copied: Path, capsys: Captured, monkeypatch: object
) -> None:
    """Check that what was written stays."""
    assert main(WORDS + MEMORY) == 0
    text = capsys.readouterr().out
    fill, n_left = FileLayers.fill, iter(range(40))

    def damage_then_fill(self: FileLayers, weights: object, i: int) -> None:
        if next(n_left, None) is None:
            damage(copied)
            monkeypatch.undo()
        fill(self, weights, i)

    monkeypatch.setattr(FileLayers, "fill", damage_then_fill)
    models = ["--target", str(copied.parent), "--draft", str(TINY / "draft")]
    status = main(WORDS + MEMORY + models)
    out, err = capsys.readouterr()
    if message is None:
        assert status == 0 and out == text
        return
    assert status == 2 and f"error: {copied} {message}" in err and "Traceback" not in err
    assert len(out) > 5 and text.startswith(out.rstrip("\n"))


def test_a_disk_error_is_one_line(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(streamed, "read_at", fail)
    line = error_line(capsys, main, WORDS + MEMORY)
    assert line.endswith("model.safetensors cannot be read: Input/output error")


def test_a_short_read_goes_on(tmp_path: Path) -> None:
    class ShortReads(FileIO):
        def readinto(self, view: memoryview) -> int:
            return super().readinto(view[:3])

    (tmp_path / "file").write_bytes(bytes(range(20)))
    view = memoryview(bytearray(10))
    with ShortReads(tmp_path / "file") as file:
        streamed.read_at(file, view, 5)
    assert bytes(view) == bytes(range(5, 15))


def test_a_system_without_posix_fadvise_reads_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(load(), PROMPT)
    monkeypatch.delattr(os, "posix_fadvise")
    assert torch.equal(run(load(), PROMPT), expected)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.full((960,), torch.nan), "layer 4: attention.query_key_value.bias is not finite"),
        (torch.zeros(960, dtype=torch.int8), "query_key_value.bias is I8; only floating types"),
    ],
)
def test_a_wrong_weight_of_a_layer_is_named(
    tensor: Tensor, message: str, copied: Path, capsys: Captured
) -> None:
    tensors = load_file(copied)
    tensors["gpt_neox.layers.4.attention.query_key_value.bias"] = tensor
    save_file(tensors, copied)
    models = ["--target", str(copied.parent), "--method", "ar"]
    assert main(WORDS + MEMORY + models) == 2
    assert message in capsys.readouterr().err


F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
FINITE = [  # an element, its dtype, the dtype in which it is computed, whether it is finite there
    *[(x, F16, BF16, False) for x in (torch.nan, torch.inf, -torch.inf)],
    *[(-torch.inf, F32, F32, False), (-9e4, BF16, F16, False), (1e39, F64, F32, False)],
    *[(65519, F32, F16, True), (65520, F32, F16, False), (3e38, BF16, F32, True)],
]


@pytest.mark.parametrize(("element", "stored", "dtype", "expected"), FINITE)
def test_one_element_that_is_not_finite_is_found(
    element: float, stored: torch.dtype, dtype: torch.dtype, expected: bool
) -> None:
    """Check the last element of several blocks, and limits that rounding decides."""
    weight = torch.randn(3, 2**18 + 1).to(stored)
    assert streamed.is_finite_in(dtype, weight)
    weight[-1, -1] = element
    assert streamed.is_finite_in(dtype, weight) == expected


def test_layers_of_several_dtypes_are_those_of_float32(copied: Path) -> None:
    """Check a layer that float16 cannot hold, between layers in float16 and bfloat16."""
    tensors = load_file(copied)
    for name in tensors:
        if ".layers.2." in name:
            tensors[name] = tensors[name].float() + 1e-6
        elif ".layers.4." in name:
            tensors[name] = tensors[name].bfloat16()
    save_file(tensors, copied)
    found = run(load(copied.parent), PROMPT)
    save_file({name: tensor.float() for name, tensor in tensors.items()}, copied)
    assert torch.equal(run(load(copied.parent), PROMPT), found)


def test_float64_files_stream_as_well(copied: Path) -> None:
    tensors = load_file(copied)
    save_file({name: tensor.double() for name, tensor in tensors.items()}, copied)
    assert torch.equal(run(load(copied.parent), PROMPT), run(load(), PROMPT))


MISTAKES = [
    ([f"--target-memory={size}"], f"--target-memory is '{size}', it must be like 2GB, 800M")
    for size in ("0", "2", "GB", "-1GB", "1.2.3GB", "2PB", "2iB")
]
MISTAKES += [
    (
        ["--target-memory", "0GB"],
        "--target-memory is 0MB, it must be larger: the target's embedding",
    ),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_mistakes(words: list[str], message: str, capsys: Captured) -> None:
    assert message in error_line(capsys, main, WORDS + words)


def test_a_slow_pass_shows_its_progress(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a terminal shows it and that it is cleared, and that a log has nothing."""
    monkeypatch.setattr(terminal, "SLOW_PASS", 0.0)
    assert main(WORDS + MEMORY) == 0
    text, err = capsys.readouterr()
    assert " layer " not in err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(WORDS + MEMORY) == 0
    shown = capsys.readouterr()
    parts = shown.err.split(terminal.SAVE)[1:]
    assert shown.out == text and parts[:2] == [
        f" layer {n} of 6{terminal.CLEAR}{terminal.RESTORE}" for n in (2, 3)
    ]
    assert parts[-1].startswith(terminal.CLEAR)


def test_the_command_line_tells_what_is_streamed(capsys: Captured) -> None:
    """Check also --compare, and a size in which all layers fit."""
    assert main(WORDS + ["--compare", "--target-memory", "30 mb"]) == 0
    err = capsys.readouterr().err
    assert "note: 0 of the target's 6 layers stay in memory, and each pass reads 0.0148 GB" in err
    assert "the ids are equal" in err
    assert main(WORDS + ["--target-memory", "0.1GB"]) == 0
    assert "note: all layers of the target fit into --target-memory" in capsys.readouterr().err

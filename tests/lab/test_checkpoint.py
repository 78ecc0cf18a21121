"""Tests of the engine's reading of checkpoints: weights on disk, and errors that name the cause."""

import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fast import write_shards
from small import (
    TINY,
    Captured,
    error_line,
    random_config,
    random_tensors,
    run,
    write_checkpoint,
)
from test_loading import (
    FLOATS,
    HEAD_NAMES,
    HEADS,
    INVALID,
    PUBLISHED,
    QKV,
    check_floating_type,
    check_invalid_config,
    check_newer_head_name,
    check_no_attention_bias,
    check_tied_embeddings,
    check_which_files,
)
from torch import Tensor

from dynatree_lab.cli.main import main
from dynatree_lab.engine.checkpoint import (
    INDEX,
    SINGLE,
    Checkpoint,
    CheckpointError,
    unused_settings,
)
from dynatree_lab.engine.model import FastGPTNeoX
from gpt_neox import EMBEDDING, OUTPUT_HEAD, Config

Write = Callable[[Path, Config, dict[str, Tensor]], object]


@pytest.mark.parametrize("content", INVALID)
def test_an_invalid_config_is_named_once(content: str | None, tmp_path: Path) -> None:
    check_invalid_config(lambda folder: Checkpoint(folder).config, content, tmp_path)


SETTINGS = [  # a generation_config.json, the names of its settings that change transformers' text
    ({"eos_token_id": 0, "pad_token_id": 0, "max_length": 20, "use_cache": False}, []),
    ({"do_sample": False, "temperature": 0.7, "top_p": 0.9, "length_penalty": 2.0}, []),
    ({"do_sample": True, "temperature": 1.0, "top_k": 50, "top_p": 0.9}, ["do_sample", "top_p"]),
    ({"num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": None}, []),
    ({"num_beams": 4, "length_penalty": 2.0}, ["num_beams", "length_penalty"]),
    ({"repetition_penalty": 1.2, "min_new_tokens": 5}, ["repetition_penalty", "min_new_tokens"]),
    ({"suppress_tokens": [], "bad_words_ids": [[7]]}, ["bad_words_ids"]),
    ({"forced_eos_token_id": 0, "min_length": 0}, ["forced_eos_token_id"]),
]


@pytest.mark.parametrize(("settings", "names"), SETTINGS)
def test_settings_of_generation_that_are_not_used(
    settings: dict[str, object], names: list[str], tmp_path: Path
) -> None:
    """Check that exactly the settings are named whose values change the text of transformers 5.24:
    its text with and without each of these settings was compared."""
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    assert unused_settings(tmp_path) == names


def test_unused_settings_of_the_target_are_one_note(tmp_path: Path, capsys: Captured) -> None:
    shutil.copytree(TINY / "draft", tmp_path, dirs_exist_ok=True)
    settings = {"do_sample": True, "repetition_penalty": 1.3}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    arguments = ["--prompt", "the ship", "--max-new-tokens", "3"]
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # as in a process of its own
        assert main([*arguments, "--method", "ar", "--target", str(tmp_path)]) == 0
        lines = capsys.readouterr().err.splitlines()
        assert main([*arguments, "--draft", str(tmp_path)]) == 0
    note = "note: generation_config.json sets do_sample, repetition_penalty, which DynaTree"
    assert [line.startswith(note) for line in lines] == [False, True, False]
    assert "note:" not in capsys.readouterr().err


def test_the_newer_name_of_the_output_head(tmp_path: Path) -> None:
    check_newer_head_name(FastGPTNeoX, tmp_path)


def test_which_files_are_the_checkpoint(tmp_path: Path) -> None:
    check_which_files(FastGPTNeoX, tmp_path)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", HEAD_NAMES)
def test_tied_embeddings(
    name: str, head: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    check_tied_embeddings(FastGPTNeoX, name, head, tmp_path, recwarn)


def test_no_attention_bias_is_a_zero_bias(tmp_path: Path) -> None:
    check_no_attention_bias(FastGPTNeoX, tmp_path)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_floating_type_loads(dtype: torch.dtype, tmp_path: Path) -> None:
    check_floating_type(FastGPTNeoX, dtype, tmp_path)


TENSORS = [  # the error, the tensor's name, what is in its place (None: nothing)
    (f"has no tensor {QKV}.weight", f"{QKV}.weight", None),
    (f"has no tensor {OUTPUT_HEAD}", OUTPUT_HEAD, None),
    (f"{QKV}.bias is .*config", f"{QKV}.bias", torch.zeros(95)),
    (f"{OUTPUT_HEAD} is .*config", OUTPUT_HEAD, torch.zeros(32, 96)),
    (f"{OUTPUT_HEAD} is stored a second time", "lm_head.weight", torch.zeros(96, 32)),
    (f"{EMBEDDING} is torch.int8; only floating", EMBEDDING, torch.zeros(96, 32).to(torch.int8)),
    (f"{EMBEDDING} is not finite", EMBEDDING, torch.full((96, 32), torch.nan)),
]


@pytest.mark.parametrize(("cause", "name", "tensor"), TENSORS, ids=[case[0] for case in TENSORS])
@pytest.mark.parametrize("write", [write_checkpoint, write_shards])
def test_an_invalid_tensor_is_named(
    cause: str, name: str, tensor: Tensor | None, write: Write, tmp_path: Path
) -> None:
    """Check the errors that are easy to miss: a transpose has the right number of elements.
    Integers were once cast to float, so a quantised checkpoint wrote nonsense."""
    tensors = random_tensors(random_config(), 14)
    tensors.pop(name, None)
    write(tmp_path, random_config(), tensors | ({} if tensor is None else {name: tensor}))
    with pytest.raises(CheckpointError, match=cause) as caught:
        FastGPTNeoX.from_pretrained(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


BUFFERS = ["gpt_neox.rotary_emb.inv_freq", "rotary_emb.cos_cached"]
BUFFERS += [
    f"gpt_neox.layers.1.attention.{name}"
    for name in ("bias", "masked_bias", "rotary_emb.inv_freq", "rotary_emb.sin_cached")
]
UNUSED = {  # of a value head, a deeper model, an optimiser
    "v_head.summary.weight": torch.zeros(1, 32),
    "gpt_neox.layers.2.mlp.dense_h_to_4h.bias": torch.zeros(64),
    "step": torch.tensor(7),
}


@pytest.mark.parametrize("write", [write_checkpoint, write_shards])
def test_tensors_that_nothing_uses_are_one_note(write: Write, tmp_path: Path) -> None:
    """Check that buffers are no note. The other tensors were once an error."""
    tensors = random_tensors(random_config(), 14)
    expected = run(FastGPTNeoX.from_tensors(random_config(), tensors), list(range(40, 50)))
    write(tmp_path, random_config(), tensors | {name: torch.zeros(4) for name in BUFFERS})
    assert torch.equal(run(FastGPTNeoX.from_pretrained(tmp_path), list(range(40, 50))), expected)
    write(tmp_path, random_config(), tensors | UNUSED)
    with pytest.warns(UserWarning, match="tensors that nothing uses") as notes:
        model = FastGPTNeoX.from_pretrained(tmp_path)
    assert torch.equal(run(model, list(range(40, 50))), expected) and len(notes) == 1
    _, _, names = str(notes[0].message).partition("uses: ")
    assert set(names.split(", ")) == set(UNUSED)


SHARD = "model-1.safetensors"
DAMAGE = {  # file, its first bytes that are left or its new text (None: no file), error
    "tail": (SINGLE, 9000, "model.safetensors: .* incomplete or a Git LFS pointer; fetch it again"),
    "pointer": (SINGLE, "version https://git-lfs.github.com/spec/v1\noid sha256:1", "LFS pointer"),
    "config": ("config.json", None, "No such file or directory: .*config.json"),
    "generation": ("generation_config.json", "{", "generation_config.json is not JSON"),
    "shard": (SHARD, None, "No such file.*model-1.safetensors"),
    "index": (INDEX, 40, "json is not JSON: Unterminated string"),
    "no map": (INDEX, "{}", "index.json has no weight_map"),
    "wrong map": (INDEX, '{"weight_map": {"a": 1}}', "index.json has no weight_map"),
}


@pytest.mark.parametrize("name, content, cause", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_folder_is_one_clear_line(
    name: str, content: int | str | None, cause: str, tmp_path: Path
) -> None:
    write = write_shards if name in (INDEX, SHARD) else write_checkpoint
    write(tmp_path, random_config(), random_tensors(random_config(), 15))
    file = tmp_path / name
    if content is None:
        file.unlink()
    else:
        is_cut = isinstance(content, int)
        file.write_bytes(file.read_bytes()[:content] if is_cut else content.encode())
    with pytest.raises(CheckpointError, match=cause) as caught:
        FastGPTNeoX.from_pretrained(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


OTHERS = [  # config.json of a head or model of another kind, the error
    ({"model_type": "llama", "num_hidden_layers": 1}, "model_type is 'llama'"),
    (PUBLISHED, "has no safetensors, but only config.json, pytorch_model.bin"),
]


@pytest.mark.parametrize(("config", "message"), OTHERS)
def test_what_is_no_checkpoint_is_named(
    config: dict[str, object], message: str, tmp_path: Path, capsys: Captured
) -> None:
    """Check that config.json is read first. It was once asked for a tokenizer or safetensors."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "pytorch_model.bin").touch()
    for options in (["--draft", str(tmp_path)], ["--target", str(tmp_path), "--method", "ar"]):
        target = ["--target", str(TINY / "draft")] if options[0] == "--draft" else []
        line = error_line(capsys, main, ["--prompt", "a", *target, *options])
        assert re.match(f"error: {tmp_path}.* {message}", line)


def test_an_eagle_head_is_no_target(capsys: Captured) -> None:
    head = str(TINY / "eagle")
    for draft in (["--method", "ar"], ["--draft", head]):
        line = error_line(capsys, main, ["--prompt", "a", "--target", head, *draft])
        assert line == f"error: {head} is an EAGLE head: use it as --draft"

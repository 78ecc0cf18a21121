"""Tests of reading checkpoints: config, weights on disk, and errors that name the cause."""

import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import (
    TINY,
    Captured,
    assert_close,
    error_line,
    random_config,
    random_tensors,
    run,
    write_checkpoint,
    write_shards,
)
from torch import Tensor

import gpt_neox
from dynatree_lab.cli.main import main
from dynatree_lab.engine.checkpoint import (
    INDEX,
    SINGLE,
    CheckpointError,
    read_config,
    unused_settings,
)
from dynatree_lab.engine.model import FastGPTNeoX
from gpt_neox import EMBEDDING, OUTPUT_HEAD, Config, GPTNeoX

PREFIX = list(range(40, 50))
Write = Callable[[Path, Config, dict[str, Tensor]], object]
SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"model_type": "gpt_neox", "intermediate_size": 64, "max_position_embeddings": 128}
ROPE = {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 10000.0}
PUBLISHED = SIZES | {"rotary_pct": 0.5, "rotary_emb_base": 10000, "torch_dtype": "float16"}
NEWER = SIZES | {"rope_parameters": ROPE, "dtype": "float16"}
BOTH = NEWER | {"rotary_pct": 0.25, "rotary_emb_base": 500, "rope_scaling": None}


@pytest.mark.parametrize("raw", [PUBLISHED, NEWER, BOTH])
def test_both_styles_of_config(raw: dict[str, object]) -> None:
    """Check older and newer configs. In a config with the keys of both, the newer keys count."""
    found = Config.from_json(raw | {"eos_token_id": None}, {})
    assert found == random_config()
    assert (found.hidden_act, found.layer_norm_eps, found.eos_ids) == ("gelu", 1e-5, ())
    assert found.use_parallel_residual and not found.tie_word_embeddings and found.attention_bias
    optional = {"hidden_act": "gelu_fast", "layer_norm_eps": 1e-3, "use_parallel_residual": False}
    optional |= {"tie_word_embeddings": True, "attention_bias": False}
    expected = random_config(**optional)
    assert Config.from_json(raw | optional | {"eos_token_id": None}, {}) == expected


EOS = [(0, None, (0,)), ([2, 5], None, (2, 5)), (None, None, ()), (0, 7, (0, 7))]
EOS += [(None, [3, 4], (3, 4)), ([0, 1], [1, 9], (0, 1, 9))]


@pytest.mark.parametrize(("eos", "generation", "ids"), EOS)
def test_eos_ids_of_both_files_are_joined(
    eos: int | list[int] | None, generation: int | list[int] | None, ids: tuple[int, ...]
) -> None:
    """Check EOS ids from config.json and generation_config.json.

    Pythia's EOS id is 0, which must not count as missing. Fine-tunes such as Dolly have EOS ids
    only in generation_config.json. They were once ignored, so texts went on to the limit.
    """
    raw, more = PUBLISHED | {"eos_token_id": eos}, {"eos_token_id": generation}
    assert Config.from_json(raw, more).eos_ids == ids


def test_what_is_missing_has_the_defaults_of_transformers() -> None:
    """Check a rotary embedding of which only one part is given."""
    assert Config.from_json({"model_type": "gpt_neox"}, {}) == Config()
    some = {"rope_parameters": {"rope_theta": 500.0}}
    assert Config.from_json(SIZES | some, {}).rotary_pct == 0.25
    assert Config.from_json(SIZES | some | {"rotary_pct": 0.5}, {}).rotary_pct == 0.5
    assert Config.from_json(SIZES | some, {}).rotary_emb_base == 500.0


UNSUPPORTED = [  # the error, the changes that cause it
    ("llama", {"model_type": "llama", "hidden_act": "silu"}),
    ("rope.* not supported: .*yarn", {"rope_parameters": ROPE | {"rope_type": "yarn"}}),
    ("rope.* not supported: .*linear", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("rope_parameters or rope_scaling is 5", {"rope_parameters": 5}),
    ("eos_ids is .*'x'", {"eos_token_id": "x"}),
    (r"eos_ids is .*\[1\]", {"eos_token_id": [[1]]}),
    ("quantised", {"quantization_config": {"quant_method": "gptq"}}),
    ("relu", {"hidden_act": "relu"}),
    (r"1\.5", {"rotary_pct": 1.5}),
    ("32.* 5 heads", {"num_attention_heads": 5}),
    ("gives 3 rotary dimensions", {"rotary_pct": 0.2}),
    ("2 heads: the size of a head must be", {"hidden_size": 30, "rotary_pct": 0.55}),
    ("use_parallel_residual is 'false'", {"use_parallel_residual": "false"}),
]


@pytest.mark.parametrize("cause, changes", UNSUPPORTED)
def test_an_unsupported_value_is_named(cause: str, changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=cause):
        Config.from_json(PUBLISHED | changes, {})


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": "llama"}', None])
@pytest.mark.parametrize("read", [read_config, gpt_neox.read_config], ids=["engine", "core"])
def test_an_invalid_config_is_named_once(
    read: Callable[[Path], Config], content: str | None, tmp_path: Path
) -> None:
    """Check both readers. The core's once put the folder before a line that had its name."""
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises((OSError, ValueError)) as caught:
        read(tmp_path)
    assert str(caught.value).count(str(tmp_path)) == 1


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


@pytest.mark.parametrize("kind", [FastGPTNeoX, GPTNeoX], ids=["fast", "plain"])
def test_the_newer_name_of_the_output_head(kind: type[GPTNeoX], tmp_path: Path) -> None:
    """Check the name of transformers since 5.14. The golden files are shards, have the older name,
    and unused buffers of old saves."""
    tensors = random_tensors(random_config(), 10)
    expected = run(kind.from_tensors(random_config(), tensors), PREFIX)
    tensors["lm_head.weight"] = tensors.pop(OUTPUT_HEAD)
    write_checkpoint(tmp_path, random_config(), tensors)
    assert torch.equal(run(kind.from_pretrained(tmp_path), PREFIX), expected)


@pytest.mark.parametrize("kind", [FastGPTNeoX, GPTNeoX], ids=["fast", "plain"])
@pytest.mark.parametrize("head", ["absent", "equal", "other"])
@pytest.mark.parametrize("name", [OUTPUT_HEAD, "lm_head.weight"])
def test_tied_embeddings(
    name: str, head: str, kind: type[GPTNeoX], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Check that a stored head that differs from the embedding is used, with one warning.

    transformers does so, too. The head was once dropped. It may have either name.
    """
    config = random_config(tie_word_embeddings=True)
    tensors = random_tensors(config, 12)
    heads = {"equal": tensors[EMBEDDING], "other": 0.1 * torch.randn(96, 32)}
    stored = {name: heads[head].clone()} if head != "absent" else {}
    write_checkpoint(tmp_path, config, tensors | stored)
    untied = tensors | {OUTPUT_HEAD: heads.get(head, tensors[EMBEDDING])}
    expected = run(GPTNeoX.from_tensors(random_config(), untied), PREFIX)
    assert_close(run(kind.from_pretrained(tmp_path), PREFIX), expected)
    published = {OUTPUT_HEAD: stored[name]} if stored else {}
    assert_close(run(kind.from_tensors(config, tensors | published), PREFIX), expected)
    notes = {str(warning.message) for warning in recwarn}
    note = (
        "tie_word_embeddings is true, but embed_out.weight is stored and differs from the "
        "embedding, so it is kept"
    )
    assert notes == ({note} if head == "other" else set())


def test_no_attention_bias_is_a_zero_bias(tmp_path: Path) -> None:
    """Check attention_bias=False: only qkv and the attention's output have no bias."""
    tensors = random_tensors(random_config(), 13)
    kept = dict(tensors)
    for name, tensor in tensors.items():
        if "attention." in name and name.endswith("bias"):
            del kept[name]
            tensors[name] = torch.zeros_like(tensor)
    assert len(tensors) - len(kept) == 4
    write_checkpoint(tmp_path, random_config(attention_bias=False), kept)
    expected = run(FastGPTNeoX.from_tensors(random_config(), tensors), PREFIX)
    assert_close(run(FastGPTNeoX.from_pretrained(tmp_path), PREFIX), expected)


FLOATS = [torch.float64, torch.half, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_floating_type_loads(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {name: t.to(dtype) for name, t in random_tensors(random_config(), 15).items()}
    write_checkpoint(tmp_path, random_config(), tensors)
    floats = {name: t.float() for name, t in tensors.items()}
    expected = run(FastGPTNeoX.from_tensors(random_config(), floats), PREFIX)
    model = FastGPTNeoX.from_pretrained(tmp_path, dtype="float32")
    assert model.dtype == model.new_cache(1).kv.dtype == torch.float32
    assert torch.equal(run(model, PREFIX), expected)


QKV = "gpt_neox.layers.1.attention.query_key_value"
EXTRA = "gpt_neox.layers.2.mlp.dense_h_to_4h.bias"  # a tensor of a deeper model
TENSORS = [  # the error, the tensor's name, what is in its place (None: nothing)
    (f"has no tensor {QKV}.weight", f"{QKV}.weight", None),
    (f"has no tensor {OUTPUT_HEAD}", OUTPUT_HEAD, None),
    (f"{QKV}.bias is .*config", f"{QKV}.bias", torch.zeros(95)),
    (f"{OUTPUT_HEAD} is .*config", OUTPUT_HEAD, torch.zeros(32, 96)),
    (f"has the tensor {EXTRA}", EXTRA, torch.zeros(64)),
    (f"{OUTPUT_HEAD} is stored a second time", "lm_head.weight", torch.zeros(96, 32)),
    (f"{EMBEDDING} is torch.int8; only floating", EMBEDDING, torch.zeros(96, 32).to(torch.int8)),
    (f"{EMBEDDING} is not finite", EMBEDDING, torch.full((96, 32), torch.nan)),
]


@pytest.mark.parametrize(("cause", "name", "tensor"), TENSORS, ids=[case[0] for case in TENSORS])
@pytest.mark.parametrize("write", [write_checkpoint, write_shards])
def test_an_invalid_tensor_is_named(
    cause: str, name: str, tensor: Tensor | None, write: Write, tmp_path: Path
) -> None:
    """Check the errors that are easy to miss: a transpose has the right number of elements, and a
    deeper model has all tensors of a shallower one. Integers were once cast to float, so a
    quantised checkpoint wrote nonsense."""
    tensors = random_tensors(random_config(), 14)
    tensors.pop(name, None)
    write(tmp_path, random_config(), tensors | ({} if tensor is None else {name: tensor}))
    with pytest.raises(CheckpointError, match=cause) as caught:
        FastGPTNeoX.from_pretrained(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


SHARD = "model-1.safetensors"
DAMAGE = {  # file, its first bytes that are left or its new text (None: no file), error
    "tail": (SINGLE, 9000, "model.safetensors: "),
    "config": ("config.json", None, "No such file or directory: .*config.json"),
    "generation": ("generation_config.json", "{", "generation_config.json is not JSON"),
    "shard": (SHARD, None, "No such file.*model-1.safetensors"),
    "index": (INDEX, 40, "json is not JSON: Unterminated string"),
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
    (PUBLISHED, "has neither .* nor .*, but only config.json, pytorch_model.bin"),
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

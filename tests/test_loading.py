"""Tests of loading a model: config.json, weights on disk, and errors that name the cause."""

import json
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file
from small import TINY, assert_close, random_config, random_tensors, run, write_checkpoint
from torch import Tensor

from gpt_neox import (
    EMBEDDING,
    INDEX,
    OUTPUT_HEAD,
    SINGLE,
    Config,
    GPTNeoX,
    find_checkpoint,
    read_config,
)

PREFIX = list(range(40, 50))
SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"model_type": "gpt_neox", "intermediate_size": 64, "max_position_embeddings": 128}
ROPE = {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 10000.0}
PUBLISHED = SIZES | {"rotary_pct": 0.5, "rotary_emb_base": 10000, "torch_dtype": "float16"}
NEWER = SIZES | {"rope_parameters": ROPE, "dtype": "float16"}
BOTH = NEWER | {"rotary_pct": 0.25, "rotary_emb_base": 500, "rope_scaling": None}


@pytest.mark.parametrize("raw", [PUBLISHED, NEWER, BOTH])
def test_both_styles_of_config(raw: dict[str, object]) -> None:
    """Check older and newer configs. In a config with the keys of both, the newer keys count."""
    found = Config.from_json(raw | {"eos_token_id": None})
    assert found == random_config()
    assert (found.hidden_act, found.layer_norm_eps, found.eos_ids) == ("gelu", 1e-5, ())
    assert found.use_parallel_residual and not found.tie_word_embeddings and found.attention_bias
    optional = {"hidden_act": "gelu_fast", "layer_norm_eps": 1e-3, "use_parallel_residual": False}
    optional |= {"tie_word_embeddings": True, "attention_bias": False}
    expected = random_config(**optional)
    assert Config.from_json(raw | optional | {"eos_token_id": None}) == expected


EOS = [  # eos_token_id in config.json and in generation_config.json; the EOS ids
    *[({"eos_token_id": 0}, None, (0,)), ({"eos_token_id": [2, 5]}, None, (2, 5))],
    *[({"eos_token_id": None}, None, ()), ({}, None, (2,))],
    *[({"eos_token_id": 0}, {"eos_token_id": 7}, (7,)), ({}, {"eos_token_id": [3, 4]}, (3, 4))],
    *[({"eos_token_id": 5}, {"eos_token_id": None}, ()), ({"eos_token_id": 5}, {}, ())],
]


@pytest.mark.parametrize(("eos", "generation", "ids"), EOS)
def test_generation_config_alone_decides_on_eos_ids(
    eos: dict[str, object], generation: dict | None, ids: tuple[int, ...], tmp_path: Path
) -> None:
    """Check what transformers does with both files, and without generation_config.json.

    Pythia's EOS id is 0, which must not count as missing. Fine-tunes such as Dolly have EOS ids
    only in generation_config.json. The ids of both files were once joined.
    """
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED | eos))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_config(tmp_path).eos_ids == ids


def test_what_is_missing_has_the_defaults_of_transformers() -> None:
    """Check a rotary embedding of which only one part is given."""
    assert Config.from_json({"model_type": "gpt_neox"}) == Config()
    some = {"rope_parameters": {"rope_theta": 500.0}}
    assert Config.from_json(SIZES | some).rotary_pct == 0.25
    assert Config.from_json(SIZES | some | {"rotary_pct": 0.5}).rotary_pct == 0.5
    assert Config.from_json(SIZES | some).rotary_emb_base == 500.0


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
        Config.from_json(PUBLISHED | changes)


INVALID = ["{", "[]", '{"model_type": "llama"}', None]  # the text of config.json, None: no file


@pytest.mark.parametrize("content", INVALID)
def test_an_invalid_config_is_named_once(content: str | None, tmp_path: Path) -> None:
    check_invalid_config(read_config, content, tmp_path)


def check_invalid_config(read: Callable[[Path], Config], content: str | None, folder: Path) -> None:
    """Check that the error names the folder. It was once put before a line that had its name."""
    if content is not None:
        (folder / "config.json").write_text(content)
    with pytest.raises((OSError, ValueError)) as caught:
        read(folder)
    assert str(caught.value).count(str(folder)) == 1


def test_the_newer_name_of_the_output_head(tmp_path: Path) -> None:
    check_newer_head_name(GPTNeoX, tmp_path)


def check_newer_head_name(kind: type[GPTNeoX], folder: Path) -> None:
    """Check the name of transformers since 5.14. The golden files are shards, have the older name,
    and unused buffers of old saves."""
    tensors = random_tensors(random_config(), 10)
    expected = run(kind.from_tensors(random_config(), tensors), PREFIX)
    tensors["lm_head.weight"] = tensors.pop(OUTPUT_HEAD)
    write_checkpoint(folder, random_config(), tensors)
    assert torch.equal(run(kind.from_pretrained(folder), PREFIX), expected)


HEADS = ["absent", "equal", "other"]  # the stored head of a checkpoint whose config ties it
HEAD_NAMES = [OUTPUT_HEAD, "lm_head.weight"]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", HEAD_NAMES)
def test_tied_embeddings(
    name: str, head: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    check_tied_embeddings(GPTNeoX, name, head, tmp_path, recwarn)


def check_tied_embeddings(
    kind: type[GPTNeoX], name: str, head: str, folder: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Check that a stored head that differs from the embedding is used, with one warning.

    transformers does so, too. The head was once dropped. It may have either name.
    """
    config = random_config(tie_word_embeddings=True)
    tensors = random_tensors(config, 12)
    heads = {"equal": tensors[EMBEDDING], "other": 0.1 * torch.randn(96, 32)}
    stored = {name: heads[head].clone()} if head != "absent" else {}
    write_checkpoint(folder, config, tensors | stored)
    untied = tensors | {OUTPUT_HEAD: heads.get(head, tensors[EMBEDDING])}
    expected = run(GPTNeoX.from_tensors(random_config(), untied), PREFIX)
    assert_close(run(kind.from_pretrained(folder), PREFIX), expected)
    published = {OUTPUT_HEAD: stored[name]} if stored else {}
    assert_close(run(kind.from_tensors(config, tensors | published), PREFIX), expected)
    notes = {str(warning.message) for warning in recwarn}
    note = (
        "tie_word_embeddings is true, but embed_out.weight is stored and differs from the "
        "embedding, so it is kept"
    )
    assert notes == ({note} if head == "other" else set())


def test_no_attention_bias_is_a_zero_bias(tmp_path: Path) -> None:
    check_no_attention_bias(GPTNeoX, tmp_path)


def check_no_attention_bias(kind: type[GPTNeoX], folder: Path) -> None:
    """Check attention_bias=False: only qkv and the attention's output have no bias."""
    tensors = random_tensors(random_config(), 13)
    kept = dict(tensors)
    for name, tensor in tensors.items():
        if "attention." in name and name.endswith("bias"):
            del kept[name]
            tensors[name] = torch.zeros_like(tensor)
    assert len(tensors) - len(kept) == 4
    write_checkpoint(folder, random_config(attention_bias=False), kept)
    expected = run(kind.from_tensors(random_config(), tensors), PREFIX)
    assert_close(run(kind.from_pretrained(folder), PREFIX), expected)


FLOATS = [torch.float64, torch.half, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_floating_type_loads(dtype: torch.dtype, tmp_path: Path) -> None:
    check_floating_type(GPTNeoX, dtype, tmp_path)


def check_floating_type(kind: type[GPTNeoX], dtype: torch.dtype, folder: Path) -> None:
    tensors = {name: t.to(dtype) for name, t in random_tensors(random_config(), 15).items()}
    write_checkpoint(folder, random_config(), tensors)
    floats = {name: t.float() for name, t in tensors.items()}
    expected = run(kind.from_tensors(random_config(), floats), PREFIX)
    model = kind.from_pretrained(folder, dtype=torch.float32)
    assert model.dtype == model.new_cache(1).kv.dtype == torch.float32
    assert torch.equal(run(model, PREFIX), expected)


QKV = "gpt_neox.layers.1.attention.query_key_value"
TENSORS = [  # the error, the tensor's name, what is in its place (None: nothing)
    (f"{QKV}.weight is missing, it must be (96, 32)", f"{QKV}.weight", None),
    (f"{OUTPUT_HEAD} is missing, it must be (96, 32)", OUTPUT_HEAD, None),
    (f"{QKV}.bias is (95,), it must be (96,)", f"{QKV}.bias", torch.zeros(95)),
    (f"{OUTPUT_HEAD} is (32, 96), it must be (96, 32)", OUTPUT_HEAD, torch.zeros(32, 96)),
    (f"{EMBEDDING} is torch.int8, only floating", EMBEDDING, torch.zeros(96, 32).to(torch.int8)),
]


@pytest.mark.parametrize(("cause", "name", "tensor"), TENSORS, ids=[case[0] for case in TENSORS])
def test_an_invalid_tensor_is_named(
    cause: str, name: str, tensor: Tensor | None, tmp_path: Path
) -> None:
    """Check the errors that are easy to miss: a transpose has the right number of elements, and
    integers were once cast to float, so a quantised checkpoint wrote nonsense."""
    tensors = random_tensors(random_config(), 14)
    tensors.pop(name, None)
    stored = tensors | ({} if tensor is None else {name: tensor})
    write_checkpoint(tmp_path, random_config(), stored)
    with pytest.raises(ValueError) as caught:
        GPTNeoX.from_pretrained(tmp_path)
    assert str(caught.value).startswith(cause)


@pytest.mark.parametrize(
    "content", [9000, b"", b"version https://git-lfs.github.com", b"<html>" * 9]
)
def test_an_incomplete_file_is_named(content: int | bytes, tmp_path: Path) -> None:
    """Check a file that is cut to some bytes, or has other content."""
    write_checkpoint(tmp_path, random_config(), random_tensors(random_config(), 15))
    file = tmp_path / "model.safetensors"
    file.write_bytes(content if isinstance(content, bytes) else file.read_bytes()[:content])
    with pytest.raises(ValueError, match=f"^{file}: .*: the file is incomplete or a Git LFS poin"):
        GPTNeoX.from_pretrained(tmp_path)


def test_which_files_are_the_checkpoint(tmp_path: Path) -> None:
    check_which_files(GPTNeoX, tmp_path)


def check_which_files(kind: type[GPTNeoX], folder: Path) -> None:
    """Check shards without an index, with one beside a backup, and beside model.safetensors. All
    files were once read, and the last one won."""
    old, new = (random_tensors(random_config(), seed) for seed in (10, 11))
    old_run, new_run = (run(kind.from_tensors(random_config(), t), PREFIX) for t in (old, new))
    write_checkpoint(folder, random_config(), {})
    (folder / SINGLE).unlink()
    names = sorted(new)
    shards = {"1.safetensors": names[:9], "2.safetensors": names[9:]}
    for shard, held in shards.items():
        save_file({name: new[name] for name in held}, folder / shard)
    assert torch.equal(run(kind.from_pretrained(folder), PREFIX), new_run)
    backup = folder / "z.safetensors"
    save_file(old, backup)
    with pytest.raises(ValueError, match="1.safetensors.*") as caught:
        kind.from_pretrained(folder)
    assert str(backup) in str(caught.value)
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(run(kind.from_pretrained(folder), PREFIX), new_run)
    save_file(old, folder / SINGLE)
    assert torch.equal(run(kind.from_pretrained(folder), PREFIX), old_run)


INDEXES = ["{", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "1.safetensors"}}', None]


@pytest.mark.parametrize("index", INDEXES)
def test_what_has_no_weights_is_named(index: str | None, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, random_config(), {})
    (tmp_path / SINGLE).unlink()
    if index is not None:
        (tmp_path / INDEX).write_text(index)
    with pytest.raises(
        (OSError, ValueError),
        match=f"{tmp_path}(/1.safe.*| has no safetensors, but"
        " only config.json|/model.safetensors.index.json (is not JSON|has no weight_map))",
    ):
        GPTNeoX.from_pretrained(tmp_path)


def test_a_name_that_is_no_folder_is_a_hub_repositorys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check which files are asked for, and the error of a name that the hub does not have."""
    asked: list[object] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        if name != "org/name":
            raise ValueError("no such repository\nsee https://example.org")
        return str(TINY / "draft")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find_checkpoint(tmp_path) == find_checkpoint(str(tmp_path)) == tmp_path
    assert not asked and find_checkpoint("org/name") == TINY / "draft"
    assert asked == [("org/name", ["*.json", "*.safetensors"])]
    assert GPTNeoX.from_pretrained("org/name").config == read_config(TINY / "draft")
    with pytest.raises(OSError) as caught:
        find_checkpoint("org/nam")
    reason = "no such repository"
    assert str(caught.value) == f"org/nam is no folder, and cannot be downloaded: {reason}"

"""Tests of reading checkpoints: config, weights on disk, and errors that name the cause."""

import copy
import json
import os
import pickle
import random
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from conftest import (
    TINY,
    Captured,
    assert_close,
    error_line,
    random_config,
    random_model,
    random_tensors,
    run,
    write_checkpoint,
    write_shards,
)
from safetensors import SafetensorError
from test_untrusted import mutate, mutate_header
from torch import Tensor

import gpt_neox
from cli.main import main
from engine.checkpoint import (
    EMBEDDING,
    INDEX,
    OUTPUT_HEAD,
    SINGLE,
    CheckpointError,
    parse_config,
    read_config,
    unused_settings,
)
from engine.memory import OutOfMemory
from engine.model import FastGPTNeoX, load_reference, open_checkpoint
from gpt_neox import Config, GPTNeoX

PREFIX = list(range(40, 50))
Load = Callable[[Path], GPTNeoX]
LOADERS = FastGPTNeoX.from_pretrained, load_reference
EACH_LOADER = pytest.mark.parametrize("load", LOADERS, ids=["fast", "plain"])
Write = Callable[[Path, dict[str, Tensor]], None]
Damage = Callable[[Path], object]
SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"model_type": "gpt_neox", "intermediate_size": 64, "max_position_embeddings": 128}
ROPE = {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 10000}
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
    changes = dict(hidden_act="gelu_fast", layer_norm_eps=1e-3, use_parallel_residual=False)
    expected = random_config(tie_word_embeddings=True, attention_bias=False, **changes)
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
    """Check the defaults of GPTNeoXConfig 5.24, for example a rotary_pct of 0.25."""
    defaults = Config.from_json({"model_type": "gpt_neox"}, {})
    assert asdict(defaults) == {
        "vocab_size": 50432,
        "hidden_size": 6144,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "intermediate_size": 24576,
        "max_position_embeddings": 2048,
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000.0,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": True,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "eos_ids": (2,),
    }
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
    ("num_hidden_layers is 1001", {"num_hidden_layers": 1001}),
    ("num_hidden_layers is 10+,", {"num_hidden_layers": 10**8}),
    ("use_parallel_residual is 'false'", {"use_parallel_residual": "false"}),
]


@pytest.mark.parametrize("cause, changes", UNSUPPORTED)
def test_an_unsupported_value_is_named(cause: str, changes: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=cause):
        parse_config(PUBLISHED | changes)


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": "llama"}'])
@pytest.mark.parametrize("read", [read_config, gpt_neox.read_config], ids=["engine", "core"])
def test_an_invalid_config_is_named_once(
    read: Callable[[Path], Config], content: str, tmp_path: Path
) -> None:
    """Check both readers. The core's once put the folder before a line that had its name."""
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError) as caught:
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


QKV = "gpt_neox.layers.1.attention.query_key_value"


def write_single(folder: Path, tensors: dict[str, Tensor], **changes: object) -> None:
    write_checkpoint(folder, random_config(**changes), tensors)


def write_several(folder: Path, tensors: dict[str, Tensor]) -> None:
    write_shards(folder, random_config(), tensors)


def write_legacy(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write a checkpoint with the buffers that old saves have in addition to the weights."""
    attention = "gpt_neox.layers.0.attention"
    buffers = {
        f"{attention}.bias": torch.ones(1, 1, 8, 8),
        f"{attention}.masked_bias": torch.tensor(-1e9),
        f"{attention}.rotary_emb.inv_freq": torch.ones(4),
    }
    write_single(folder, tensors | buffers)


@pytest.mark.parametrize("write", [write_single, write_several, write_legacy])
def test_every_layout_on_disk_is_the_same_model(write: Write, tmp_path: Path) -> None:
    tensors = random_tensors(random_config(), 10)
    write(tmp_path, tensors)
    expected = run(FastGPTNeoX.from_tensors(random_config(), tensors), PREFIX)
    assert torch.equal(run(FastGPTNeoX.from_pretrained(tmp_path), PREFIX), expected)


@pytest.mark.parametrize("kind", [FastGPTNeoX, GPTNeoX], ids=["fast", "plain"])
@pytest.mark.parametrize("head", ["absent", "equal", "other"])
@pytest.mark.parametrize("name", [OUTPUT_HEAD, "lm_head.weight"])
def test_tied_embeddings(
    name: str, head: str, kind: type[GPTNeoX], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Check that a stored head that differs from the embedding is used, with one warning.

    transformers does so, too. The head was once dropped. It may have either name.
    """
    tensors = random_tensors(random_config(tie_word_embeddings=True), 12)
    heads = {"equal": tensors[EMBEDDING], "other": 0.1 * torch.randn(96, 32)}
    stored = {name: heads[head].clone()} if head != "absent" else {}
    write_single(tmp_path, tensors | stored, tie_word_embeddings=True)
    untied = tensors | {OUTPUT_HEAD: heads.get(head, tensors[EMBEDDING])}
    expected = run(GPTNeoX.from_tensors(random_config(), untied), PREFIX)
    assert_close(run(kind.from_pretrained(tmp_path), PREFIX), expected)
    opened = open_checkpoint(tmp_path, "cpu", torch.float32)
    assert_close(run(kind.from_tensors(*opened), PREFIX), expected)
    notes = {str(warning.message) for warning in recwarn}
    note = (
        "tie_word_embeddings is true, but embed_out.weight is stored and differs from the "
        "embedding, so it is kept"
    )
    assert notes == ({note} if head == "other" else set())


@pytest.mark.parametrize("kind", [FastGPTNeoX, GPTNeoX], ids=["fast", "plain"])
def test_the_head_may_have_its_newer_name(kind: type[GPTNeoX], tmp_path: Path) -> None:
    """Check the name that transformers uses since 5.14."""
    tensors = random_tensors(random_config(), 12)
    expected = run(GPTNeoX.from_tensors(random_config(), tensors), PREFIX)
    write_single(tmp_path, tensors | {"lm_head.weight": tensors.pop(OUTPUT_HEAD)})
    assert_close(run(kind.from_pretrained(tmp_path), PREFIX), expected)


@EACH_LOADER
def test_a_head_of_both_names_is_refused(load: Load, tmp_path: Path) -> None:
    tensors = random_tensors(random_config(), 12)
    write_single(tmp_path, tensors | {"lm_head.weight": tensors[OUTPUT_HEAD] + 1})
    with pytest.raises(CheckpointError, match=f"{OUTPUT_HEAD} is stored a second time"):
        load(tmp_path)


@EACH_LOADER
def test_a_name_in_an_error_is_one_line(load: Load, tmp_path: Path) -> None:
    """Check a name with control characters. They once reached the terminal unchanged."""
    write_single(tmp_path, random_tensors(random_config(), 14) | {"a\x1b[31m\nb": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"has the tensor a\\x1b\[31m\\nb"):
        load(tmp_path)


def test_no_attention_bias_is_a_zero_bias(tmp_path: Path) -> None:
    """Check attention_bias=False: only qkv and the attention's output have no bias."""
    tensors = random_tensors(random_config(), 13)
    kept = dict(tensors)
    for name, tensor in tensors.items():
        if "attention." in name and name.endswith("bias"):
            del kept[name]
            tensors[name] = torch.zeros_like(tensor)
    assert len(tensors) - len(kept) == 4
    write_single(tmp_path, kept, attention_bias=False)
    expected = run(FastGPTNeoX.from_tensors(random_config(), tensors), PREFIX)
    assert_close(run(FastGPTNeoX.from_pretrained(tmp_path), PREFIX), expected)


EXTRA = "gpt_neox.layers.2.mlp.dense_h_to_4h.bias"  # a tensor of a deeper model
TENSORS: dict[str, Callable[[dict[str, Tensor]], object]] = {  # error: change
    f"has no tensor .*{QKV}.weight": lambda tensors: tensors.pop(f"{QKV}.weight"),
    f"has no tensor .*{OUTPUT_HEAD}": lambda tensors: tensors.pop(OUTPUT_HEAD),
    f"{QKV}.bias is .*config": lambda tensors: tensors.update({f"{QKV}.bias": torch.zeros(95)}),
    f"{OUTPUT_HEAD} is .*config": lambda found: found.update({OUTPUT_HEAD: torch.zeros(32, 96)}),
    f"has the tensor {EXTRA}": lambda tensors: tensors.update({EXTRA: torch.zeros(64)}),
}


@pytest.mark.parametrize("cause", TENSORS)
@pytest.mark.parametrize("write", [write_single, write_several])
def test_missing_misshapen_and_extra_tensors_are_named(
    cause: str, write: Write, tmp_path: Path
) -> None:
    """Check the tensors that are easy to miss: a transpose has the right number of elements, and a
    deeper model has all tensors of a shallower one."""
    tensors = random_tensors(random_config(), 14)
    TENSORS[cause](tensors)
    write(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=cause):
        FastGPTNeoX.from_pretrained(tmp_path)


def cut_at(end: int) -> Damage:
    """Return a function that keeps the first `end` bytes of a file; negative: all but the last."""
    return lambda file: file.write_bytes(file.read_bytes()[:end])


def write_content(content: str) -> Damage:
    return lambda file: file.write_text(content)


def make_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def link_to(target: str) -> Damage:
    def replace(file: Path) -> None:
        file.unlink()
        file.symlink_to(target)

    return replace


SHARD = "model-1.safetensors"
DAMAGE = {  # file, damage, error
    "tail": (SINGLE, cut_at(-7), "model.safetensors cannot be read"),
    "header": (SINGLE, cut_at(100), "model.safetensors cannot be read"),
    "empty": (SINGLE, cut_at(0), "model.safetensors cannot be read"),
    "weights": (SINGLE, Path.unlink, "has neither model.safetensors nor"),
    "config": ("config.json", Path.unlink, "config.json does not exist"),
    "pipe": ("config.json", make_pipe, "config.json is a device or a pipe, not a file"),
    "zeros": ("config.json", link_to("/dev/zero"), "config.json is a device or a pipe"),
    "weights' pipe": (SINGLE, make_pipe, "model.safetensors is a device or a pipe"),
    "generation": (
        "generation_config.json",
        write_content("{"),
        "generation_config.json is not JSON",
    ),
    "config's type": ("config.json", write_content("[]"), "config.json is not a JSON object"),
    "shard": (SHARD, Path.unlink, "model-1.safetensors does not exist"),
    "index": (INDEX, cut_at(40), "json is not JSON: Unterminated string"),
    "no map": (INDEX, write_content('{"metadata": {}}'), "weight_map"),
    "below": (
        INDEX,
        write_content('{"weight_map": {"a": "../x.safetensors"}}'),
        "not a safetensors file in its",
    ),
    "pickle": (INDEX, write_content('{"weight_map": {"a": "x.bin"}}'), "not a safetensors file in"),
}


@pytest.mark.parametrize("name, damage, cause", DAMAGE.values(), ids=DAMAGE)
def test_damaged_folder_is_one_clear_line(
    name: str, damage: Damage, cause: str, tmp_path: Path
) -> None:
    write = write_several if name in (INDEX, SHARD) else write_single
    write(tmp_path, random_tensors(random_config(), 15))
    damage(tmp_path / name)
    with pytest.raises(CheckpointError, match=cause) as caught:
        FastGPTNeoX.from_pretrained(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX, SHARD])
def test_a_mutated_folder_is_loaded_or_refused_by_both(name: str, tmp_path: Path) -> None:
    """Check that both loaders agree, and that the only error is a CheckpointError (or OutOfMemory),
    never a TypeError."""
    write_several(tmp_path, random_tensors(random_config(eos_ids=(0,)), 15))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 5], "bos_token_id": 0}')
    valid = (tmp_path / name).read_bytes()
    change = mutate_header if name == SHARD else mutate
    rng, outcomes = random.Random(name), set()
    for _ in range(50):
        (tmp_path / name).write_bytes(change(valid, rng))
        ends = []
        for load in LOADERS:
            try:
                ends.append(load(tmp_path).config)
            except (CheckpointError, OutOfMemory) as error:
                ends.append(str(error))
        assert ends[0] == ends[1]
        with suppress(OSError, ValueError, SafetensorError):  # errors of the core's own loader
            GPTNeoX.from_pretrained(tmp_path)
        outcomes.add(isinstance(ends[0], str))
    assert True in outcomes and len(outcomes) == 1 + (name != SHARD)


OTHER_FILES = ["pythia.Q4_K_M.gguf", "adapter_model.safetensors", "pytorch_model.bin"]


@pytest.mark.parametrize("name", OTHER_FILES)
def test_other_weights_are_named(name: str, tmp_path: Path) -> None:
    """Check that no advice is given that does not help: an adapter was once to be renamed."""
    write_single(tmp_path, {})
    (tmp_path / SINGLE).rename(tmp_path / name)
    message = f"has neither .* nor .*; it has {name}; use a whole model's float safetensors"
    for load in LOADERS:
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path)
    with pytest.raises(CheckpointError, match="is a file, not a folder"):
        FastGPTNeoX.from_pretrained(tmp_path / name)


MEDUSA = {"medusa_num_heads": 2, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
EAGLE = {"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]}
OTHER_HEADS = [  # config.json of a head of another project, the error
    (MEDUSA, "is a head of another format; only this project's EAGLE heads load"),
    (EAGLE, "is a head of another format; only this project's EAGLE heads load"),
    ({"model_type": "llama", "num_hidden_layers": 1}, "model_type is 'llama'"),
]


@pytest.mark.parametrize(("config", "message"), OTHER_HEADS)
def test_a_head_of_another_project_is_named(
    config: dict[str, object], message: str, tmp_path: Path, capsys: Captured
) -> None:
    """Check that config.json is read first. It was once asked for a tokenizer or safetensors."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "pytorch_model.bin").touch()
    for options in (["--draft", str(tmp_path)], ["--target", str(tmp_path), "--method", "ar"]):
        target = ["--target", str(TINY / "draft")] if options[0] == "--draft" else []
        line = error_line(capsys, main, ["--prompt", "a", *target, *options])
        assert line.startswith(f"error: {tmp_path}") and message in line


def test_an_eagle_head_is_no_target(capsys: Captured) -> None:
    head = str(TINY / "eagle")
    for draft in (["--method", "ar"], ["--draft", head]):
        line = error_line(capsys, main, ["--prompt", "a", "--target", head, *draft])
        assert line == f"error: {head} is an EAGLE head: use it as --draft"


def test_the_folder_of_the_hub_s_cache_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "models--org--name"
    (folder / "snapshots").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="is the cache folder of org/name; use org/name"):
        FastGPTNeoX.from_pretrained(folder)


@pytest.mark.parametrize(("name", "dtype"), [("I8", torch.int8), ("U8", torch.uint8)])
def test_only_floating_types_load(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Refuse integers. They were once cast to float, so a quantised checkpoint wrote nonsense."""
    tensors = random_tensors(random_config(), 15)
    write_single(tmp_path, tensors | {EMBEDDING: torch.zeros(96, 32, dtype=dtype)})
    with pytest.raises(CheckpointError, match=f"{EMBEDDING} is {name}; only floating types load"):
        FastGPTNeoX.from_pretrained(tmp_path)


FLOATS = [torch.float64, torch.half, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_floating_type_loads(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {name: t.to(dtype) for name, t in random_tensors(random_config(), 15).items()}
    write_single(tmp_path, tensors)
    floats = {name: t.float() for name, t in tensors.items()}
    expected = run(FastGPTNeoX.from_tensors(random_config(), floats), PREFIX)
    model = FastGPTNeoX.from_pretrained(tmp_path, dtype=torch.float32)
    assert model.dtype == model.new_cache(1).kv.dtype == torch.float32
    assert torch.equal(run(model, PREFIX), expected)


def test_a_model_of_many_positions_takes_memory_for_those_in_use() -> None:
    """Check the size of the rotary table. It was once made for all positions, so a model of 10^9
    positions ended in a RuntimeError of the allocator."""
    model = random_model(15, max_position_embeddings=10**7)
    assert len(model.new_cache(40).rotary) == 40
    assert torch.equal(run(model, PREFIX), run(random_model(15), PREFIX))


REFUSALS = [  # function that gets no memory, its error
    ("engine.checkpoint.safe_open", OSError(12, "Cannot allocate memory")),
    ("engine.checkpoint.safe_open", SafetensorError("Cannot allocate memory (os error 12)")),
    ("engine.checkpoint.safe_open", RuntimeError("unable to mmap: Cannot allocate memory (12)")),
    ("torch.Tensor.to", RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to")),
    ("engine.linear.OneDnnLinear", MemoryError()),
]


@pytest.mark.parametrize(("place", "error"), REFUSALS)
def test_memory_that_is_refused_is_named(
    place: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check each error of an allocation. A process may be allowed less memory than the machine has,
    which shows only when it allocates. If packing a matrix fails, no other kind is tried."""

    def refuse(*_: object, **__: object) -> None:
        raise error

    write_single(tmp_path, random_tensors(random_config(), 15))
    model = random_model(0)
    with monkeypatch.context() as patch:
        patch.setattr("engine.linear.is_exact_in_half", lambda _: False)
        patch.setattr("engine.linear.MIN_ONEDNN_BYTES", 0)
        patch.setattr(place, refuse)
        with pytest.raises(OutOfMemory, match=f"out of memory for the weights of {tmp_path}"):
            FastGPTNeoX.from_pretrained(tmp_path)
    monkeypatch.setattr("torch.zeros", refuse)
    with pytest.raises(OutOfMemory, match="out of memory for a cache of 20 tokens, 0.0 MB"):
        model.new_cache(20)


def test_absurd_sizes_are_refused_before_allocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check sizes: keys and values x 2 layers x 32 x 4 bytes x 1e12 tokens are 512,000 GB."""
    with pytest.raises(OutOfMemory, match="1000000000000 tokens .* 512,000.0 GB"):
        random_model(0).new_cache(10**12)
    write_single(tmp_path, random_tensors(random_config(), 1))
    monkeypatch.setattr("engine.memory.free_host_memory", lambda: 10**3)
    with pytest.raises(OutOfMemory, match="weights of .* MB"):
        FastGPTNeoX.from_pretrained(tmp_path)


def test_the_dtype_may_be_named(tmp_path: Path) -> None:
    write_single(tmp_path, random_tensors(random_config(), 0))
    assert FastGPTNeoX.from_pretrained(tmp_path, dtype="bfloat16").dtype == torch.bfloat16
    for wrong in ("float99", None):
        with pytest.raises(ValueError, match=f"dtype is {wrong!r}, it must be"):
            FastGPTNeoX.from_pretrained(tmp_path, dtype=wrong)


def test_a_fast_model_says_that_it_cannot_be_copied() -> None:
    """Check the error of copies: a library owns a fast model's packed matrices. A reference model
    can be copied."""
    reference = random_model(0, kind=GPTNeoX)
    for duplicate in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(duplicate(reference), PREFIX), run(reference, PREFIX))
        with pytest.raises(TypeError, match="cannot be copied or pickled; load it again"):
            duplicate(random_model(0))

"""Reading checkpoints: config, weights on disk, and errors that name the cause."""

import copy
import json
import os
import pickle
import random
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import (
    assert_close,
    random_config,
    random_model,
    random_tensors,
    run,
    write_checkpoint,
    write_shards,
)
from safetensors import SafetensorError
from test_foreign import mutated, mutated_header
from torch import Tensor

from engine.checkpoint import CheckpointError
from engine.memory import OutOfMemory
from engine.model import FastGPTNeoX
from gpt_neox import EMBED_IN, EMBED_OUT, INDEX, LM_HEAD, SINGLE, Config, GPTNeoX

PREFIX = list(range(40, 50))
Write = Callable[[Path, dict[str, Tensor]], None]
Damage = Callable[[Path], object]
EACH_MODEL = pytest.mark.parametrize("kind", [FastGPTNeoX, GPTNeoX], ids=["fast", "plain"])
SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"model_type": "gpt_neox", "intermediate_size": 64, "max_position_embeddings": 128}
ROPE = {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 10000}
PUBLISHED = SIZES | {"rotary_pct": 0.5, "rotary_emb_base": 10000, "torch_dtype": "float16"}
NEWER = SIZES | {"rope_parameters": ROPE, "dtype": "float16"}
BOTH = NEWER | {"rotary_pct": 0.25, "rotary_emb_base": 500, "rope_scaling": None}


@pytest.mark.parametrize("raw", [PUBLISHED, NEWER, BOTH])
def test_both_styles_of_config(raw: dict[str, object]) -> None:
    """Where both stand the newer one is meant."""
    found = Config.from_json(raw)
    assert found == random_config()
    assert (found.activation, found.norm_eps, found.eos_ids) == ("gelu", 1e-5, ())
    assert found.is_parallel and not found.is_tied and found.has_attention_bias
    optional = {"hidden_act": "gelu_fast", "layer_norm_eps": 1e-3, "use_parallel_residual": False}
    optional |= {"tie_word_embeddings": True, "attention_bias": False}
    changes = dict(activation="gelu_fast", norm_eps=1e-3, is_parallel=False)
    expected = random_config(is_tied=True, has_attention_bias=False, **changes)
    assert Config.from_json(raw | optional) == expected


@pytest.mark.parametrize("eos, ids", [(0, (0,)), ([2, 5], (2, 5)), (None, ())])
def test_eos_styles(eos: int | list[int] | None, ids: tuple[int, ...]) -> None:
    """An id of 0, Pythia's own, is an EOS, not an absent one."""
    assert Config.from_json(PUBLISHED | {"eos_token_id": eos}).eos_ids == ids


@pytest.mark.parametrize(
    "stored, ids",
    [(5, (2, 5)), ([5, 2, 6], (2, 5, 6)), (None, (2,)), ("absent", (2,)), ("no file", (2,))],
)
def test_eos_ids_of_both_files_count(stored: object, ids: tuple[int, ...], tmp_path: Path) -> None:
    """Dolly and other fine-tunes have theirs in generation_config.json alone."""
    write_single(tmp_path, random_tensors(random_config(), 10), eos_ids=(2,))
    if stored != "no file":
        said = {} if stored == "absent" else {"eos_token_id": stored}
        (tmp_path / "generation_config.json").write_text(json.dumps(said))
    for kind in (GPTNeoX, FastGPTNeoX):
        assert kind.from_pretrained(tmp_path).config.eos_ids == ids


def test_missing_keys_are_what_transformers_takes() -> None:
    """As GPTNeoXConfig() of transformers 5.24 prints them; but without a key it has no EOS id."""
    sizes = dict(vocab_size=50432, hidden_size=6144, n_layers=44, n_heads=64)
    sizes |= dict(intermediate_size=24576, max_positions=2048)
    rotary = dict(rotary_fraction=0.25, rotary_base=10000.0)
    rest = dict(activation="gelu", norm_eps=1e-5, is_parallel=True, is_tied=False)
    expected = Config(**sizes, **rotary, **rest, has_attention_bias=True, eos_ids=())
    assert Config.from_json({"model_type": "gpt_neox"}) == Config() == expected


ROTARY = [  # what config.json says -> share of a head and base, as transformers takes them
    ({"rope_parameters": {"rope_theta": 500.0}}, (0.25, 500.0)),
    ({"rope_parameters": {"rope_theta": 500.0}, "rotary_pct": 0.5}, (0.5, 500.0)),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}, "rotary_emb_base": 300}, (0.5, 300)),
    ({"rope_parameters": {}}, (0.25, 10000.0)),
    ({"rope_parameters": {"type": "default", "rope_theta": 7.0}}, (0.25, 7.0)),
    ({"rope_parameters": ROPE, "rope_scaling": {"rope_theta": 77.0}}, (0.25, 77.0)),
    ({"rotary_emb_base": 300}, (0.25, 300)),
]


@pytest.mark.parametrize("said, expected", ROTARY)
def test_rotary_settings(said: dict[str, object], expected: tuple[float, float]) -> None:
    config = Config.from_json(SIZES | said)
    assert (config.rotary_fraction, config.rotary_base) == expected


FOREIGN = [  # what is said -> of what
    ("llama", {"model_type": "llama", "hidden_act": "silu"}),
    ("rope_type is 'yarn'", {"rope_parameters": ROPE | {"rope_type": "yarn"}}),
    ("rope_type is 'linear'", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("quantised", {"quantization_config": {"quant_method": "gptq"}}),
    ("relu", {"hidden_act": "relu"}),
    (r"1\.5", {"rotary_pct": 1.5}),
    ("32.* 5 heads", {"num_attention_heads": 5}),
    ("3 rotary dims", {"rotary_pct": 0.2}),
    ("8 rotary dims of 15", {"hidden_size": 30, "rotary_pct": 0.55}),
    ("num_hidden_layers.* at most 1000", {"num_hidden_layers": 10**8}),
    ("hidden_size .* 2.29", {"hidden_size": 10**18}),
    ("use_parallel_residual is 'false'", {"use_parallel_residual": "false"}),
    ("layer_norm_eps is nan", {"layer_norm_eps": float("nan")}),
    ("eos_token_id", {"eos_token_id": [0, True]}),
]


@pytest.mark.parametrize("cause, changes", FOREIGN)
def test_foreign_value_is_named(cause: str, changes: dict[str, object], tmp_path: Path) -> None:
    """By both models: the plain one ignored a scaled rotary embedding."""
    write_single(tmp_path, {})
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED | changes))
    for kind in (GPTNeoX, FastGPTNeoX):
        with pytest.raises(CheckpointError, match=cause):
            kind.from_pretrained(tmp_path)


QKV = "gpt_neox.layers.1.attention.query_key_value"


def write_single(folder: Path, tensors: dict[str, Tensor], **changes: object) -> None:
    write_checkpoint(folder, random_config(**changes), tensors)


def write_several(folder: Path, tensors: dict[str, Tensor]) -> None:
    write_shards(folder, random_config(), tensors)


def write_legacy(folder: Path, tensors: dict[str, Tensor]) -> None:
    """With the buffers that old saves carry beside the weights."""
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


@EACH_MODEL
@pytest.mark.parametrize("name", [EMBED_OUT, LM_HEAD])
def test_the_head_has_two_names(name: str, kind: type[GPTNeoX], tmp_path: Path) -> None:
    """Transformers calls it lm_head since 5.14, where a model's state dict is saved as it is."""
    tensors = random_tensors(random_config(), 10)
    expected = run(kind.from_tensors(random_config(), tensors), PREFIX)
    tensors[name] = tensors.pop(EMBED_OUT)
    write_single(tmp_path, tensors)
    assert torch.equal(run(kind.from_pretrained(tmp_path), PREFIX), expected)
    write_single(tmp_path, tensors | {LM_HEAD: tensors[name], EMBED_OUT: tensors[name] + 1})
    with pytest.raises(CheckpointError, match=f"{EMBED_OUT} a second time"):
        kind.from_pretrained(tmp_path)


@EACH_MODEL
@pytest.mark.parametrize("stored", ["nothing", "a copy", "another"])
def test_tied_embeddings(stored: str, kind: type[GPTNeoX], tmp_path: Path) -> None:
    """An output matrix that is stored and differs is kept, as transformers keeps it; it was
    dropped in silence. There is one warning."""
    tensors = random_tensors(random_config(is_tied=True), 12)
    head = tensors[EMBED_IN] * (2 if stored == "another" else 1)
    more = {} if stored == "nothing" else {EMBED_OUT: head.clone()}
    write_single(tmp_path, tensors | more, is_tied=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = kind.from_pretrained(tmp_path)
    assert [str(each.message) for each in told] == [
        "tie_word_embeddings is true, but embed_out.weight is stored and differs from the "
        "embedding, so it is kept"
    ] * (stored == "another")
    assert model.config.is_tied == (stored != "another")
    untied = kind.from_tensors(random_config(), tensors | {EMBED_OUT: head})
    assert_close(run(model, PREFIX), run(untied, PREFIX))


def test_no_attention_bias_is_a_zero_bias(tmp_path: Path) -> None:
    """Only qkv and the attention's output lose their bias; the MLP keeps its own."""
    tensors = random_tensors(random_config(), 13)
    kept = dict(tensors)
    for name, tensor in tensors.items():
        if "attention." in name and name.endswith("bias"):
            del kept[name]
            tensors[name] = torch.zeros_like(tensor)
    assert len(tensors) - len(kept) == 4
    write_single(tmp_path, kept, has_attention_bias=False)
    expected = run(FastGPTNeoX.from_tensors(random_config(), tensors), PREFIX)
    assert_close(run(FastGPTNeoX.from_pretrained(tmp_path), PREFIX), expected)


EXTRA = "gpt_neox.layers.2.mlp.dense_h_to_4h.bias"  # of a deeper model
TENSORS: dict[str, Callable[[dict[str, Tensor]], object]] = {  # what is said -> of what change
    f"lacks .*{QKV}.weight": lambda tensors: tensors.pop(f"{QKV}.weight"),
    f"lacks .*{EMBED_OUT}": lambda tensors: tensors.pop(EMBED_OUT),
    f"{QKV}.bias is .*config": lambda tensors: tensors.update({f"{QKV}.bias": torch.zeros(95)}),
    f"{EMBED_OUT} is .*config": lambda tensors: tensors.update({EMBED_OUT: torch.zeros(32, 96)}),
    f"does not: {EXTRA}": lambda tensors: tensors.update({EXTRA: torch.zeros(64)}),
}


@EACH_MODEL
@pytest.mark.parametrize("cause", TENSORS)
@pytest.mark.parametrize("write", [write_single, write_several])
def test_missing_misshapen_and_extra_tensors_are_named(
    cause: str, write: Write, kind: type[GPTNeoX], tmp_path: Path
) -> None:
    """A transpose has the right number of elements; a deeper model holds all of a shallower one."""
    tensors = random_tensors(random_config(), 14)
    TENSORS[cause](tensors)
    write(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=cause):
        kind.from_pretrained(tmp_path)


@EACH_MODEL
def test_a_name_in_an_error_is_one_line(kind: type[GPTNeoX], tmp_path: Path) -> None:
    """A tensor's name with an escape and a newline reached a caller's terminal as it was."""
    write_single(tmp_path, random_tensors(random_config(), 14) | {"a\x1b[31m\nb": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"does not: a\\x1b\[31m\\nb"):
        kind.from_pretrained(tmp_path)


def cut_at(at: int) -> Damage:
    """Leave the first so many bytes of a file, or all but so many."""
    return lambda file: file.write_bytes(file.read_bytes()[:at])


def say(content: str) -> Damage:
    return lambda file: file.write_text(content)


def make_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def link_to(place: str) -> Damage:
    def replace(file: Path) -> None:
        file.unlink()
        file.symlink_to(place)

    return replace


SHARD = "model-1.safetensors"
DAMAGE = {  # which file is damaged, and how -> cause
    "tail": (SINGLE, cut_at(-7), "model.safetensors cannot be read"),
    "header": (SINGLE, cut_at(100), "model.safetensors cannot be read"),
    "empty": (SINGLE, cut_at(0), "model.safetensors cannot be read"),
    "weights": (SINGLE, Path.unlink, "holds neither model.safetensors nor"),
    "config": ("config.json", Path.unlink, "config.json is not there"),
    "config's type": ("config.json", say("[]"), "config.json does not hold a JSON object"),
    "pipe": ("config.json", make_pipe, "config.json is not there, or not a file"),
    "zeros": ("config.json", link_to("/dev/zero"), "config.json is not there, or not a file"),
    "weights' pipe": (SINGLE, make_pipe, "model.safetensors is not there, or not a file"),
    "generation": ("generation_config.json", say("{"), "generation_config.json is not JSON"),
    "shard": (SHARD, Path.unlink, "model-1.safetensors is not there"),
    "index": (INDEX, cut_at(40), "index.json is not JSON"),
    "no map": (INDEX, say('{"metadata": {}}'), "weight_map"),
    "below": (
        INDEX,
        say('{"weight_map": {"a": "../x.safetensors"}}'),
        "no safetensors file in its",
    ),
    "pickle": (INDEX, say('{"weight_map": {"a": "x.bin"}}'), "no safetensors file in"),
}


@EACH_MODEL
@pytest.mark.parametrize("name, damage, cause", DAMAGE.values(), ids=DAMAGE)
def test_damaged_folder_is_one_clear_line(
    name: str, damage: Damage, cause: str, kind: type[GPTNeoX], tmp_path: Path
) -> None:
    """And at once: a pipe or a device would never end."""
    write = write_several if name in (INDEX, SHARD) else write_single
    write(tmp_path, random_tensors(random_config(), 15))
    damage(tmp_path / name)
    with pytest.raises(CheckpointError, match=cause) as caught:
        kind.from_pretrained(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX, SHARD])
def test_a_mutated_folder_is_loaded_or_refused_by_both(name: str, tmp_path: Path) -> None:
    """With nothing but a CheckpointError; an untrusted folder is no reason for a TypeError."""
    write_several(tmp_path, random_tensors(random_config(eos_ids=(0,)), 15))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 5], "bos_token_id": 0}')
    valid = (tmp_path / name).read_bytes()
    change = mutated_header if name == SHARD else mutated
    rng, outcomes = random.Random(name), set()
    for _ in range(50):
        (tmp_path / name).write_bytes(change(valid, rng))
        ends = []
        for kind in (GPTNeoX, FastGPTNeoX):
            try:
                ends.append(kind.from_pretrained(tmp_path).config)
            except (CheckpointError, OutOfMemory) as error:
                ends.append(str(error))
        assert ends[0] == ends[1]
        outcomes.add(isinstance(ends[0], str))
    assert True in outcomes and len(outcomes) == 1 + (name != SHARD)


OTHERS = {  # what a folder or a path holds instead -> what is said of it
    "gptq_model-4bit-128g.safetensors": "gptq_model.* is quantised: use the float weights",
    "model-00001-of-00002.safetensors": "is one of several: the index is needed too",
    "pythia.Q4_K_M.gguf": "is GGUF, for llama.cpp",
    "adapter.safetensors": "is named otherwise",
    "pytorch_model.bin": "has to be converted to safetensors",
    "README.md": "holds neither model.safetensors nor model.safetensors.index.json$",
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_holds_other_weights_is_named(name: str, tmp_path: Path) -> None:
    write_single(tmp_path, {})
    (tmp_path / SINGLE).rename(tmp_path / name)
    for kind in (GPTNeoX, FastGPTNeoX):
        with pytest.raises(CheckpointError, match=OTHERS[name]):
            kind.from_pretrained(tmp_path)
    said = "" if name == "README.md" else OTHERS[name]
    with pytest.raises(CheckpointError, match=f"is a file, not a folder.*{said}"):
        FastGPTNeoX.from_pretrained(tmp_path / name)


def test_the_folder_of_the_hub_s_cache_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "models--org--name"
    (folder / "snapshots").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="keeps org/name; name org/name"):
        FastGPTNeoX.from_pretrained(folder)


@EACH_MODEL
@pytest.mark.parametrize(("name", "dtype"), [("I8", torch.int8), ("U8", torch.uint8)])
def test_only_floating_types_load(
    name: str, dtype: torch.dtype, kind: type[GPTNeoX], tmp_path: Path
) -> None:
    """Whole numbers were cast to float in silence: a quantised checkpoint then wrote nonsense."""
    tensors = random_tensors(random_config(), 15)
    write_single(tmp_path, tensors | {EMBED_IN: torch.zeros(96, 32, dtype=dtype)})
    with pytest.raises(CheckpointError, match=f"{EMBED_IN} is {name}; only floating types load"):
        kind.from_pretrained(tmp_path)


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
    """The rotary table was made for all of them: 10^9 ended in a RuntimeError of the allocator."""
    model = random_model(15, max_positions=2**29)
    assert len(model.new_cache(40).turns) == 40
    assert torch.equal(run(model, PREFIX), run(random_model(15), PREFIX))


REFUSALS = [  # of memory, and where
    ("gpt_neox.safe_open", OSError(12, "Cannot allocate memory")),
    ("gpt_neox.safe_open", SafetensorError("Cannot allocate memory (os error 12)")),
    ("gpt_neox.safe_open", RuntimeError("unable to mmap: Cannot allocate memory (12)")),
    ("torch.Tensor.to", RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to")),
    ("engine.products.PackedProduct", MemoryError()),
]


@pytest.mark.parametrize(("place", "error"), REFUSALS)
def test_memory_that_is_refused_is_named(
    place: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may have less than the machine, and only learns it when it asks. Where a matrix is
    packed, it is no reason to try another kind."""

    def refuse(*_: object, **__: object) -> None:
        raise error

    write_single(tmp_path, random_tensors(random_config(), 15))
    model = random_model(0)
    with monkeypatch.context() as patch:
        patch.setattr("engine.products.is_exact_in_half", lambda _: False)
        patch.setattr("engine.products.WORTH_PACKING", 0)
        patch.setattr(place, refuse)
        with pytest.raises(OutOfMemory, match=f"no memory for the weights of {tmp_path}"):
            FastGPTNeoX.from_pretrained(tmp_path)
    monkeypatch.setattr("torch.zeros", refuse)
    with pytest.raises(OutOfMemory, match="no memory for a cache of 20 tokens, 0.0 MB"):
        model.new_cache(20)


def test_absurd_sizes_are_refused_before_allocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 x 2 layers x 32 wide x 4 bytes x 1e12 tokens is 512,000 GB."""
    with pytest.raises(OutOfMemory, match="1000000000000 tokens .* 512,000.0 GB"):
        random_model(0).new_cache(10**12)
    write_single(tmp_path, random_tensors(random_config(), 0))
    monkeypatch.setattr("engine.memory.free_memory", lambda _: 1000)
    with pytest.raises(OutOfMemory, match="weights of .* would take 0.1 MB"):
        FastGPTNeoX.from_pretrained(tmp_path)


def test_the_dtype_may_be_named(tmp_path: Path) -> None:
    write_single(tmp_path, random_tensors(random_config(), 0))
    assert FastGPTNeoX.from_pretrained(tmp_path, dtype="bfloat16").dtype == torch.bfloat16
    for wrong in ("float99", None):
        with pytest.raises(ValueError, match=f"dtype is {wrong!r}, it must be"):
            FastGPTNeoX.from_pretrained(tmp_path, dtype=wrong)


def test_a_fast_model_says_that_it_cannot_be_copied() -> None:
    """Its packed matrices are memory of a library's own; a plain model can be."""
    plain = random_model(0, kind=GPTNeoX)
    for duplicate in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(duplicate(plain), PREFIX), run(plain, PREFIX))
        with pytest.raises(TypeError, match="cannot be copied or pickled; load it again"):
            duplicate(random_model(0))

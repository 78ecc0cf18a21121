"""Reading checkpoints: config, weights on disk, and errors that name the cause."""

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
from torch import Tensor

from engine.checkpoint import EMBED_IN, EMBED_OUT, INDEX, SINGLE, CheckpointError, parse_config
from engine.memory import OutOfMemory
from engine.model import FastGPTNeoX
from gpt_neox import Config

PREFIX = list(range(40, 50))
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


@pytest.mark.parametrize("field", sorted(PUBLISHED.keys() - {"torch_dtype"}))
def test_missing_field_is_named(field: str) -> None:
    raw = dict(PUBLISHED)
    del raw[field]
    with pytest.raises(CheckpointError, match=field):
        parse_config(raw)


FOREIGN = [  # what is said -> of what
    ("llama", {"model_type": "llama", "hidden_act": "silu"}),
    ("partial_rotary_factor", {"rope_parameters": {"rope_theta": 10000}}),
    ("rope_theta", {"rope_parameters": {"partial_rotary_factor": 0.5}}),
    ("rope_type", {"rope_parameters": ROPE | {"rope_type": "yarn"}}),
    ("rope_scaling", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("relu", {"hidden_act": "relu"}),
    (r"1\.5", {"rotary_pct": 1.5}),
    ("32.* 5 heads", {"num_attention_heads": 5}),
    ("3 rotary dims", {"rotary_pct": 0.2}),
    ("8 rotary dims of 15", {"hidden_size": 30, "rotary_pct": 0.55}),
    ("1000 .*num_hidden_layers", {"num_hidden_layers": 10**8}),
    ("bool.*use_parallel_residual", {"use_parallel_residual": "false"}),
]


@pytest.mark.parametrize("cause, changes", FOREIGN)
def test_foreign_value_is_named(cause: str, changes: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=cause):
        parse_config(PUBLISHED | changes)


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


@pytest.mark.parametrize("stray", [{}, {EMBED_OUT: torch.zeros(96, 32)}], ids=["absent", "stray"])
def test_tied_embeddings(stray: dict[str, Tensor], tmp_path: Path) -> None:
    """Tied means the embedding is used, also where a save still carries an output matrix."""
    tensors = random_tensors(random_config(is_tied=True), 12)
    write_single(tmp_path, tensors | stray, is_tied=True)
    untied = FastGPTNeoX.from_tensors(random_config(), tensors | {EMBED_OUT: tensors[EMBED_IN]})
    assert_close(run(FastGPTNeoX.from_pretrained(tmp_path), PREFIX), run(untied, PREFIX))


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


@pytest.mark.parametrize("cause", TENSORS)
@pytest.mark.parametrize("write", [write_single, write_several])
def test_missing_misshapen_and_extra_tensors_are_named(
    cause: str, write: Write, tmp_path: Path
) -> None:
    """A transpose has the right number of elements; a deeper model holds all of a shallower one."""
    tensors = random_tensors(random_config(), 14)
    TENSORS[cause](tensors)
    write(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=cause):
        FastGPTNeoX.from_pretrained(tmp_path)


def cut_at(at: int) -> Damage:
    """Leave the first so many bytes of a file, or all but so many."""
    return lambda file: file.write_bytes(file.read_bytes()[:at])


def say(content: str) -> Damage:
    return lambda file: file.write_text(content)


SHARD = "model-1.safetensors"
DAMAGE = {  # which file is damaged, and how -> cause
    "tail": (SINGLE, cut_at(-7), "model.safetensors cannot be read"),
    "header": (SINGLE, cut_at(100), "model.safetensors cannot be read"),
    "empty": (SINGLE, cut_at(0), "model.safetensors cannot be read"),
    "weights": (SINGLE, Path.unlink, "no safetensors; .bin weights"),
    "config": ("config.json", Path.unlink, "config.json is not there"),
    "config's type": ("config.json", say("[]"), "config.json: Expected `object`"),
    "shard": (SHARD, Path.unlink, "model-1.safetensors is not there"),
    "index": (INDEX, cut_at(40), "truncated"),
    "no map": (INDEX, say('{"metadata": {}}'), "weight_map"),
    "below": (
        INDEX,
        say('{"weight_map": {"a": "../x.safetensors"}}'),
        "no safetensors file in its",
    ),
    "pickle": (INDEX, say('{"weight_map": {"a": "x.bin"}}'), "no safetensors file in"),
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


@pytest.mark.parametrize(("name", "dtype"), [("I8", torch.int8), ("U8", torch.uint8)])
def test_only_floating_types_load(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Whole numbers were cast to float in silence: a quantised checkpoint then wrote nonsense."""
    tensors = random_tensors(random_config(), 15)
    write_single(tmp_path, tensors | {EMBED_IN: torch.zeros(96, 32, dtype=dtype)})
    with pytest.raises(CheckpointError, match=f"{EMBED_IN} is {name}; only floating types load"):
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
    """The rotary table was made for all of them: 10^9 ended in a RuntimeError of the allocator."""
    model = random_model(15, max_positions=10**15)
    assert len(model.new_cache(40).turns) == 40
    assert torch.equal(run(model, PREFIX), run(random_model(15), PREFIX))


REFUSALS = [  # of memory, and where
    ("engine.checkpoint.safe_open", OSError(12, "Cannot allocate memory")),
    ("engine.checkpoint.safe_open", SafetensorError("Cannot allocate memory (os error 12)")),
    ("engine.checkpoint.safe_open", RuntimeError("unable to mmap: Cannot allocate memory (12)")),
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


def test_absurd_sizes_are_refused_before_allocation(tmp_path: Path) -> None:
    """2 x 2 layers x 32 wide x 4 bytes x 1e12 tokens is 512,000 GB."""
    with pytest.raises(OutOfMemory, match="1000000000000 tokens .* 512,000.0 GB"):
        random_model(0).new_cache(10**12)
    write_single(tmp_path, {}, vocab_size=10**12)
    with pytest.raises(OutOfMemory, match="weights of .* 256,000.0 GB"):
        FastGPTNeoX.from_pretrained(tmp_path)

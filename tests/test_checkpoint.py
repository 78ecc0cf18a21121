"""Reading checkpoints: config, weights on disk, and errors that name the cause."""

import copy
import os
import pickle
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
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

from engine.checkpoint import EMBEDDING, HEAD, INDEX, SINGLE, CheckpointError, parse_config
from engine.memory import OutOfMemory
from engine.model import FastGPTNeoX, load_plain, open_checkpoint
from gpt_neox import Config, GPTNeoX

PREFIX = list(range(40, 50))
Load = Callable[[Path], GPTNeoX]
LOADERS = FastGPTNeoX.from_pretrained, load_plain
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
    """Where both stand the newer one is meant."""
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
    """An id of 0, Pythia's own, is an EOS, not an absent one. Fine-tunes as Dolly have theirs in
    generation_config.json alone, and wrote on to the limit."""
    raw, more = PUBLISHED | {"eos_token_id": eos}, {"eos_token_id": generation}
    assert Config.from_json(raw, more).eos_ids == ids


def test_what_is_missing_has_the_defaults_of_transformers() -> None:
    """Those of its GPTNeoXConfig 5.24, a quarter of each head rotated among them."""
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


FOREIGN = [  # what is said -> of what
    ("llama", {"model_type": "llama", "hidden_act": "silu"}),
    ("rope.* not supported: .*yarn", {"rope_parameters": ROPE | {"rope_type": "yarn"}}),
    ("rope.* not supported: .*linear", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("rope.* not supported: 5", {"rope_parameters": 5}),
    ("eos_ids is .*'x'", {"eos_token_id": "x"}),
    (r"eos_ids is .*\[1\]", {"eos_token_id": [[1]]}),
    ("quantised", {"quantization_config": {"quant_method": "gptq"}}),
    ("relu", {"hidden_act": "relu"}),
    (r"1\.5", {"rotary_pct": 1.5}),
    ("32.* 5 heads", {"num_attention_heads": 5}),
    ("rotates 3 dimensions of a head", {"rotary_pct": 0.2}),
    ("2 heads: no GPT-NeoX can have heads of this size", {"hidden_size": 30, "rotary_pct": 0.55}),
    ("num_hidden_layers is 1001", {"num_hidden_layers": 1001}),
    ("num_hidden_layers is 10+,", {"num_hidden_layers": 10**8}),
    ("use_parallel_residual is 'false'", {"use_parallel_residual": "false"}),
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


@pytest.mark.parametrize("kind", [FastGPTNeoX, GPTNeoX], ids=["fast", "plain"])
@pytest.mark.parametrize("head", ["absent", "equal", "other"])
@pytest.mark.parametrize("name", [HEAD, "lm_head.weight"])
def test_tied_embeddings(
    name: str, head: str, kind: type[GPTNeoX], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """A head that a save carries, and that is not the embedding, is used as transformers does, with
    one note; it was dropped. Under either name."""
    tensors = random_tensors(random_config(tie_word_embeddings=True), 12)
    heads = {"equal": tensors[EMBEDDING], "other": 0.1 * torch.randn(96, 32)}
    stored = {name: heads[head].clone()} if head != "absent" else {}
    write_single(tmp_path, tensors | stored, tie_word_embeddings=True)
    untied = tensors | {HEAD: heads.get(head, tensors[EMBEDDING])}
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
    """That of transformers since 5.14."""
    tensors = random_tensors(random_config(), 12)
    expected = run(GPTNeoX.from_tensors(random_config(), tensors), PREFIX)
    write_single(tmp_path, tensors | {"lm_head.weight": tensors.pop(HEAD)})
    assert_close(run(kind.from_pretrained(tmp_path), PREFIX), expected)


@EACH_LOADER
def test_a_head_of_both_names_is_refused(load: Load, tmp_path: Path) -> None:
    tensors = random_tensors(random_config(), 12)
    write_single(tmp_path, tensors | {"lm_head.weight": tensors[HEAD] + 1})
    with pytest.raises(CheckpointError, match=f"{HEAD} a second time"):
        load(tmp_path)


@EACH_LOADER
def test_a_name_in_an_error_is_one_line(load: Load, tmp_path: Path) -> None:
    """A tensor's name with an escape and a newline reached a caller's terminal as it was."""
    write_single(tmp_path, random_tensors(random_config(), 14) | {"a\x1b[31m\nb": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"does not: a\\x1b\[31m\\nb"):
        load(tmp_path)


def test_no_attention_bias_is_a_zero_bias(tmp_path: Path) -> None:
    """Only qkv and the attention's output lose their bias; the MLP keeps its own."""
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


EXTRA = "gpt_neox.layers.2.mlp.dense_h_to_4h.bias"  # of a deeper model
TENSORS: dict[str, Callable[[dict[str, Tensor]], object]] = {  # what is said -> of what change
    f"lacks .*{QKV}.weight": lambda tensors: tensors.pop(f"{QKV}.weight"),
    f"lacks .*{HEAD}": lambda tensors: tensors.pop(HEAD),
    f"{QKV}.bias is .*config": lambda tensors: tensors.update({f"{QKV}.bias": torch.zeros(95)}),
    f"{HEAD} is .*config": lambda tensors: tensors.update({HEAD: torch.zeros(32, 96)}),
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
    "pipe": ("config.json", make_pipe, "config.json is a device or a pipe, not a file"),
    "zeros": ("config.json", link_to("/dev/zero"), "config.json is a device or a pipe"),
    "weights' pipe": (SINGLE, make_pipe, "model.safetensors is a device or a pipe"),
    "generation": ("generation_config.json", say("{"), "generation_config.json is not JSON"),
    "config's type": ("config.json", say("[]"), "config.json is not a JSON object"),
    "shard": (SHARD, Path.unlink, "model-1.safetensors is not there"),
    "index": (INDEX, cut_at(40), "json is not JSON: Unterminated string"),
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
        for load in LOADERS:
            try:
                ends.append(load(tmp_path).config)
            except (CheckpointError, OutOfMemory) as error:
                ends.append(str(error))
        assert ends[0] == ends[1]
        with suppress(OSError, ValueError, SafetensorError):  # of the core's own loading
            GPTNeoX.from_pretrained(tmp_path)
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
    for load in LOADERS:
        with pytest.raises(CheckpointError, match=OTHERS[name]):
            load(tmp_path)
    said = "" if name == "README.md" else OTHERS[name]
    with pytest.raises(CheckpointError, match=f"is a file, not a folder.*{said}"):
        FastGPTNeoX.from_pretrained(tmp_path / name)


def test_the_folder_of_the_hub_s_cache_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "models--org--name"
    (folder / "snapshots").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="keeps org/name; name org/name"):
        FastGPTNeoX.from_pretrained(folder)


@pytest.mark.parametrize(("name", "dtype"), [("I8", torch.int8), ("U8", torch.uint8)])
def test_only_floating_types_load(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Whole numbers were cast to float in silence: a quantised checkpoint then wrote nonsense."""
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
    """The rotary table was made for all of them: 10^9 ended in a RuntimeError of the allocator."""
    model = random_model(15, max_position_embeddings=10**7)
    assert len(model.new_cache(40).rotary) == 40
    assert torch.equal(run(model, PREFIX), run(random_model(15), PREFIX))


REFUSALS = [  # of memory, and where
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
    """A process may have less than the machine, and only learns it when it asks. Where a matrix is
    packed, it is no reason to try another kind."""

    def refuse(*_: object, **__: object) -> None:
        raise error

    write_single(tmp_path, random_tensors(random_config(), 15))
    model = random_model(0)
    with monkeypatch.context() as patch:
        patch.setattr("engine.linear.is_exact_in_half", lambda _: False)
        patch.setattr("engine.linear.MIN_ONEDNN_BYTES", 0)
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
    """Its packed matrices are memory of a library's own; a plain model can be."""
    plain = random_model(0, kind=GPTNeoX)
    for duplicate in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(duplicate(plain), PREFIX), run(plain, PREFIX))
        with pytest.raises(TypeError, match="cannot be copied or pickled; load it again"):
            duplicate(random_model(0))

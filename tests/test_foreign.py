"""Files that somebody else wrote or cut short, mutated at random: what they say, or one line.

Each kind is mutated by the hundred and run as a user would, in one process. A run may end in two
ways: status 0, and then nothing of the file was taken for what it is not; or status 2 and one line.
"""

import json
import math
import os
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import random_config, random_tensors
from safetensors.torch import save_file

from cli.main import main
from engine import foreign
from engine.checkpoint import CheckpointError, read_config, weight_files
from engine.foreign import (
    Either,
    ForeignFile,
    List,
    Map,
    Number,
    Object,
    Optional,
    Switch,
    Word,
    checked,
    parse_json,
    read_bytes,
    read_json,
)

Captured = pytest.CaptureFixture[str]
N_RUNS = 150  # of each kind
WORDS = ("the", "ship", "sailed", "at", "dawn")
RAW = {"model_type": "gpt_neox", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2}
RAW |= {"num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 128}
RAW |= {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "use_parallel_residual": True}
RAW |= {"tie_word_embeddings": False, "attention_bias": True, "eos_token_id": [0]}
PUBLISHED = RAW | {"rotary_pct": 0.5, "rotary_emb_base": 10000}
ROPE = {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 10000.0}
NEWER = RAW | {"rope_parameters": ROPE}
ADDED = {"id": 0, "content": "<|endoftext|>", "special": True, "single_word": False}
ADDED |= {"lstrip": False, "rstrip": False, "normalized": False}
WORD_LEVEL = {"type": "WordLevel", "unk_token": "<unk>"}
WORD_LEVEL |= {"vocab": {word: i for i, word in enumerate(("<|endoftext|>", "<unk>", *WORDS))}}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
TOKENIZER = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [ADDED]}
TOKENIZER |= {"normalizer": {"type": "Lowercase"}, "pre_tokenizer": {"type": "Whitespace"}}
TOKENIZER |= {"post_processor": None, "decoder": BYTE_LEVEL, "model": WORD_LEVEL}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

# A mark's text takes its place in the JSON, as no value of Python's can
RAW_TEXTS = {"@inf": "1e999", "@nan": "NaN", "@long": "9" * 5000, "@deep": "[" * 10**5}
RAW_TEXTS |= {"@nested": '{"a":' * 10**5, "@half": '"\\ud800"', "@control": '"\\u001b[31m\\n"'}
HUGE = (10**8, 10**9, 10**20, -(10**30), 2**63, 1e300, 1e-300, -1, 0, *RAW_TEXTS)
TYPES = (None, True, False, "", "false", "9", [], {}, 2.5, [[]], {"a": 1}, ["x"], "../x", 7)


class Place(NamedTuple):
    """Where a value stands: in a list or an object, at an index or a key."""

    of: list | dict
    at: int | str


def places(content: object) -> list[Place]:
    """Of every value in a parsed file."""
    found = []
    keys = ()
    if isinstance(content, dict):
        keys = list(content)
    elif isinstance(content, list):
        keys = range(len(content))
    for key in keys:
        found.append(Place(content, key))
        found += places(content[key])
    return found


def mutate(text: bytes, rng: random.Random) -> bytes:
    """One thing wrong with a JSON file, or two."""
    how = rng.choice(("drop", "type", "huge", "huge", "type", "cut", "flip"))
    if how == "cut":
        return text[: rng.randrange(len(text))]
    if how == "flip":
        content = bytearray(text)
        for _ in range(rng.randint(1, 3)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        return bytes(content)
    parsed = json.loads(text)
    place = rng.choice(places(parsed))
    if how == "drop":
        del place.of[place.at]
    else:
        place.of[place.at] = rng.choice(HUGE if how == "huge" else TYPES)
    changed = json.dumps(parsed)
    for mark, raw in RAW_TEXTS.items():
        changed = changed.replace(f'"{mark}"', raw)
    return changed.encode()


def mutate_header(content: bytes, rng: random.Random) -> bytes:
    """The same of what begins a safetensors file, whose length comes before it in 8 bytes."""
    n = int.from_bytes(content[:8], "little")
    header = mutate(content[8 : 8 + n], rng)
    if rng.random() < 0.1:
        n = rng.choice([0, 1, len(content), 2**31, 2**63])
    else:
        n = len(header)
    return n.to_bytes(8, "little") + header + content[8 + n :]


def write_checkpoint(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(PUBLISHED))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    notes = {f"note {i}": "that nothing reads" for i in range(99)}
    save_file(random_tensors(random_config(), 0), folder / SINGLE, metadata=notes)


def write_index(folder: Path) -> None:
    """Two shards for the one file."""
    tensors = random_tensors(random_config(), 0)
    (folder / SINGLE).unlink(missing_ok=True)
    weight_map = {}
    for i in range(2):
        shard = dict(list(tensors.items())[i::2])
        save_file(shard, folder / f"model-{i}.safetensors")
        weight_map |= dict.fromkeys(shard, f"model-{i}.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def run(folder: Path, capsys: Captured) -> list[int] | None:
    """The ids of a run that goes well; None of one that ends in one line."""
    limits = ["--max-new-tokens", "3", "--method", "ar", "--device", "cpu", "--json"]
    start = time.perf_counter()
    status = main(["--prompt", "the ship", "--target", str(folder), *limits])
    assert time.perf_counter() - start < 10
    printed = capsys.readouterr()
    if status == 0:
        return json.loads(printed.out)["token_ids"]
    assert status == 2 and printed.out == ""
    lines = printed.err.splitlines()
    assert lines[-1].startswith("error: ") and "Traceback" not in printed.err, printed.err
    assert printed.err.count("error: ") == 1 and len(lines) <= 3, printed.err
    return None


SIZES = [key for key, value in RAW.items() if type(value) is int]
SWITCHES = [key for key, value in RAW.items() if type(value) is bool]
NUMBERS = ["rotary_pct", "rotary_emb_base", "layer_norm_eps"]


def require_meant(folder: Path) -> None:
    """Assert that config.json says what was taken from it, by rules of this test's own."""
    raw = json.loads((folder / "config.json").read_text())
    numbers = {key: raw[key] for key in NUMBERS if raw.get(key) is not None}
    if raw.get("rope_parameters"):
        numbers = {key: raw["rope_parameters"][key] for key in list(ROPE)[1:]}
    for key in SIZES:
        assert type(raw[key]) is int
    for key in SWITCHES:
        assert isinstance(raw.get(key), bool | None)
    for key, value in numbers.items():
        assert type(value) in (int, float) and math.isfinite(value), key


Mutation = Callable[[bytes, random.Random], bytes]
KINDS: dict[str, tuple[str, dict | None, Mutation]] = {  # the file, its content if not as written
    "published": ("config.json", PUBLISHED, mutate),
    "newer": ("config.json", NEWER, mutate),
    "index": (INDEX, None, mutate),
    "tokenizer": ("tokenizer.json", TOKENIZER, mutate),
    "header": (SINGLE, None, mutate_header),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_mutated_file_is_read_right_or_refused(
    kind: str, tmp_path: Path, capsys: Captured
) -> None:
    name, content, change = KINDS[kind]
    write_checkpoint(tmp_path)
    if kind == "index":
        write_index(tmp_path)
    if content:
        (tmp_path / name).write_text(json.dumps(content))
    valid = (tmp_path / name).read_bytes()
    config = read_config(tmp_path)
    expected = run(tmp_path, capsys)
    assert expected is not None and len(expected) == 3
    rng = random.Random(kind)
    n_read = 0
    for _ in range(N_RUNS):
        (tmp_path / name).write_bytes(change(valid, rng))
        ids = run(tmp_path, capsys)
        if ids is None:
            continue
        n_read += 1
        require_meant(tmp_path)
        if kind != "tokenizer" and read_config(tmp_path) == config:
            assert ids == expected
    assert 0 < n_read < N_RUNS
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    assert gigabytes < 2


def test_a_tokenizer_without_an_unknown_token_is_one_line(tmp_path: Path, capsys: Captured) -> None:
    """It raises where it is asked to encode a word that it does not have."""
    write_checkpoint(tmp_path)
    changed = TOKENIZER | {"model": WORD_LEVEL | {"unk_token": "absent"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
    arguments = ["--method", "ar", "--target", str(tmp_path), "--prompt"]
    assert main([*arguments, "the whale"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: the tokenizer cannot encode the prompt (Missing [UNK]")
    assert main([*arguments, "the ship"]) == 0


BACKTRACKING = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated"}
PAIRS = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
STRIP = {"type": "Strip", "content": "x", "start": 0, "stop": 100}
ONLY_X = {"type": "WordLevel", "unk_token": "x", "vocab": {"x" * (i + 1): i for i in range(96)}}
PANICS = {  # where tokenizers gives up -> what of its file is odd, what is said
    "when loaded": ({"model": PAIRS | {"continuing_subword_prefix": "##"}}, "is not a tokenizer"),
    "when encoding": (
        {"pre_tokenizer": BACKTRACKING | {"invert": False}},
        "the tokenizer cannot encode the prompt",
    ),
    "when decoding": ({"model": ONLY_X, "decoder": STRIP}, "the tokenizer's library gave up"),
}


@pytest.mark.parametrize("where", PANICS)
def test_a_library_in_rust_that_panics_is_one_line(
    where: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It raises what is no Exception, and has said so on several lines before."""
    odd, said = PANICS[where]
    write_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER | odd))
    limits = ["--method", "ar", "--max-new-tokens", "3", "--target", str(tmp_path)]
    assert main(["--prompt", "x" * 40, *limits]) == 2
    err = capfd.readouterr().err
    assert said in err.splitlines()[-1] and "Traceback" not in err
    assert where == "when decoding" or "panicked" not in err


SCHEMA = {
    "size": Number(int, 1, 100),
    "rate": Number(float),
    "is_on": Switch(),
    "kind": Word(("a", "b")),
    "ids": Either(List(Number(int)), Number(int)),
    "map": Map(Word()),
    "inner": Object({"depth": Number(float, 0)}),
    "more": Optional(Word(), "none"),
}
VALID = {"size": 3, "rate": 2, "is_on": False, "kind": "a", "ids": 7, "map": {"k": "v"}}
VALID |= {"inner": {"depth": 0.5}, "unknown": [None]}
WRONG = [  # key, value -> what is said of it
    ("size", True, "size is true, not a whole number from 1 to 100"),
    ("size", 2.5, "size is 2.5, not a whole"),
    ("size", "3", "size is '3', not"),
    ("size", 0, "size is 0, not"),
    ("size", 10**20, "size is 100000000000000000000, not"),
    ("rate", math.inf, "rate is inf, not a number"),
    ("rate", math.nan, "rate is nan, not a number"),
    ("rate", 10**4000, "rate is 1000000000"),
    ("rate", False, "rate is false, not a number"),
    ("rate", None, "rate is null, not a number"),
    ("is_on", "false", "is_on is 'false', not true or false"),
    ("is_on", 0, "is_on is 0, not true or false"),
    ("kind", "c", "kind is 'c', not one of a, b"),
    ("kind", ["a"], "kind is ['a'], not one of a, b"),
    ("ids", ["last"], "ids is ['last'], not a whole number"),
    ("ids", [True], "ids is [True], not a whole number"),
    ("map", ["k"], "map is ['k'], not an object"),
    ("map", {"k": 1}, "map.k is 1, not a text"),
    ("inner", {"depth": -1}, "inner.depth is -1, not a number of at least 0"),
    ("inner", {}, "f.json: inner has no depth"),
    ("inner", 3, "inner is 3, not an object"),
    ("more", 3, "more is 3, not a text"),
]


def test_a_schema_fills_in_what_may_be_absent_and_leaves_what_it_does_not_know() -> None:
    assert checked(VALID, SCHEMA, "f.json") == VALID | {"more": "none"}
    assert checked(VALID | {"more": None}, SCHEMA, "f.json")["more"] == "none"
    assert checked(VALID | {"more": "x"}, SCHEMA, "f.json")["more"] == "x"
    assert checked(VALID | {"ids": [1, 2]}, SCHEMA, "f.json")["ids"] == [1, 2]


@pytest.mark.parametrize(("key", "value", "said"), WRONG)
def test_a_schema_names_the_key_and_what_it_may_be(key: str, value: object, said: str) -> None:
    with pytest.raises(ForeignFile) as caught:
        checked(VALID | {key: value}, SCHEMA, "f.json")
    line = str(caught.value)
    assert said in line and line.startswith("f.json: ") and len(line) < 150
    with pytest.raises(ForeignFile, match="f.json is not a JSON object"):
        checked([VALID], SCHEMA, "f.json")


NOT_JSON = {
    "deep list": ("[" * 10**5, "nested too deep"),
    "deep object": ('{"a":' * 10**5, "nested too deep"),
    "not a number": ("[NaN]", "is not JSON"),
    "too many digits": ("9" * 5000, "out of range"),
    "cut short": ('{"a": ', "is not JSON: Input data was truncated"),
    "empty": ("", "is not JSON"),
}


@pytest.mark.parametrize(("text", "said"), NOT_JSON.values(), ids=NOT_JSON)
def test_a_text_that_is_no_json_of_use(text: str, said: str) -> None:
    with pytest.raises(ForeignFile, match=said):
        parse_json(text, "f.json")


def test_a_text_of_more_parts_than_any_file_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MB of brackets took 27 s and 3 GB, before anything of it was checked."""
    monkeypatch.setattr(foreign, "MAX_PARTS", 3)
    assert parse_json('[[1], {"a": 2}]', "f.json") == [[1], {"a": 2}]
    with pytest.raises(ForeignFile, match="f.json .* has too many lists and objects"):
        parse_json("[[], [], {}]", "f.json")


def link_to_nothing(file: Path) -> None:
    file.symlink_to("nothing")


def link_to_itself(file: Path) -> None:
    file.symlink_to(file.name)


def write_latin(file: Path) -> None:
    file.write_bytes('{"a": "é"}'.encode("latin-1"))


NO_FILES = {  # what makes it -> what is said of it
    "fifo": (os.mkfifo, "is a pipe, not a file"),
    "folder": (os.mkdir, "is a folder, not a file"),
    "broken link": (link_to_nothing, "is a link to nothing, which is not there"),
    "link to itself": (link_to_itself, "is a link that leads back to itself"),
    "nothing": (lambda file: None, "is not there"),
    "no UTF-8": (write_latin, "is not JSON: 'utf-8' codec"),
}


@pytest.mark.parametrize(("make", "said"), NO_FILES.values(), ids=NO_FILES)
def test_what_is_no_file_is_named_and_never_waited_for(
    make: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    file = tmp_path / "f.json"
    make(file)
    with pytest.raises(ForeignFile, match=said) as caught:
        read_json(file)
    assert str(caught.value).startswith(str(file))


@pytest.mark.parametrize("name", ["a" * 300, "a" * 5000, "null\0", "half\ud800"])
def test_a_name_that_no_file_can_have(name: str, tmp_path: Path) -> None:
    with pytest.raises(ForeignFile) as caught:
        read_bytes(tmp_path / name)
    assert len(str(caught.value)) < 200


def test_a_file_larger_than_its_kind_may_be(tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    file.write_bytes(b" " * 1000)
    assert len(read_bytes(file, 1000)) == 1000
    with pytest.raises(ForeignFile, match="larger than"):
        read_bytes(file, 999)


def test_a_folder_and_a_file_that_may_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever runs the tests may be allowed to read everything, so the system's no is pretended."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    write_checkpoint(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", refuse)
        with pytest.raises(ForeignFile, match="config.json cannot be read: Permission denied"):
            read_json(tmp_path / "config.json")
    with monkeypatch.context() as patch:  # a folder in which one may not look for a file
        patch.setattr("os.stat", refuse)
        with pytest.raises(CheckpointError, match="config.json cannot be read: Permission denied"):
            read_config(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda *_: False)
        with pytest.raises(CheckpointError, match=f"{SINGLE} cannot be read: Permission denied"):
            weight_files(tmp_path)
    monkeypatch.setattr("os.listdir", refuse)
    with pytest.raises(CheckpointError, match=f"{tmp_path} cannot be read: Permission denied"):
        weight_files(tmp_path)

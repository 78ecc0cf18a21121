"""Files that somebody else wrote or cut short, mutated at random: what they say, or one line.

A run may end in two ways: status 0, and then nothing of the file was taken for what it is not; or
status 2 and one line.
"""

import json
import math
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import (
    Captured,
    published_json,
    random_config,
    random_tensors,
    write_checkpoint,
    write_shards,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from cli.main import main
from cli.tokens import LONGEST_GROWTH, growth
from engine.checkpoint import INDEX, SINGLE, CheckpointError, Index, parse_config, read_config
from engine.foreign import ForeignFile, parse_json, read_bytes, read_text
from gpt_neox import Config

WORDS = ("the", "ship", "sailed", "at", "dawn")
PUBLISHED = published_json(random_config(eos_ids=(0,)))
ROPE = {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 10000.0}
NEWER = PUBLISHED | {"rope_parameters": ROPE}
del NEWER["rotary_pct"], NEWER["rotary_emb_base"]
STYLES = {"published": PUBLISHED, "newer": NEWER}
ADDED = {"id": 0, "content": "<|endoftext|>", "special": True, "single_word": False}
ADDED |= {"lstrip": False, "rstrip": False, "normalized": False}
WORD_LEVEL = {"type": "WordLevel", "unk_token": "<unk>"}
WORD_LEVEL |= {"vocab": {word: i for i, word in enumerate(("<|endoftext|>", "<unk>", *WORDS))}}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
TOKENIZER = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [ADDED]}
TOKENIZER |= {"normalizer": {"type": "Lowercase"}, "pre_tokenizer": {"type": "Whitespace"}}
TOKENIZER |= {"post_processor": None, "decoder": BYTE_LEVEL, "model": WORD_LEVEL}

# A mark's text takes its place in the JSON, as no value of Python's can
MARKS = {"@inf": "1e999", "@nan": "NaN", "@long": "9" * 5000, "@deep": "[" * 10**5}
MARKS |= {"@nested": '{"a":' * 10**5, "@half": '"\\ud800"', "@control": '"\\u001b[31m\\n"'}
ODD = (10**8, 10**9, 10**20, -(10**30), 2**63, 1e300, 1e-300, -1, 0, *MARKS)
ODD += (None, True, False, "", "false", "9", [], {}, 2.5, [[]], {"a": 1}, ["x"], "../x", 7)
SCALARS = st.sampled_from(ODD) | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    SCALARS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
reproducibly = settings(
    derandomize=True,
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def places(content: object) -> list[tuple[list | dict, int | str]]:
    """Where every value in a parsed file stands: in a list or an object, at an index or a key."""
    if not isinstance(content, list | dict):
        return []
    keys = list(content) if isinstance(content, dict) else range(len(content))
    return [(content, key) for key in keys] + [p for key in keys for p in places(content[key])]


@st.composite
def mutated(draw: st.DrawFn, text: bytes) -> bytes:
    """A JSON file with one thing wrong: cut short, a byte, a value that is another or lacks."""
    how = draw(st.sampled_from(["put", "put", "put", "drop", "cut", "flip"]))
    if how in ("cut", "flip"):
        at = draw(st.integers(0, len(text) - 1))
        rest = b"" if how == "cut" else bytes([draw(st.integers(0, 255))]) + text[at + 1 :]
        return text[:at] + rest
    parsed = json.loads(text)
    found = places(parsed)
    holder, key = found[draw(st.integers(0, len(found) - 1))]
    if how == "drop":
        del holder[key]
    else:
        holder[key] = draw(VALUES)
    changed = json.dumps(parsed)
    for mark, raw in MARKS.items():
        changed = changed.replace(f'"{mark}"', raw)
    return changed.encode()


@st.composite
def mutated_header(draw: st.DrawFn, content: bytes) -> bytes:
    """The same of what begins a safetensors file, whose length comes before it in 8 bytes."""
    n = int.from_bytes(content[:8], "little")
    header = draw(mutated(content[8 : 8 + n]))
    lengths = [len(header)] * 9 + [0, 1, len(content), 2**31, 2**40, 2**63]
    n_told = draw(st.sampled_from(lengths))
    return n_told.to_bytes(8, "little") + header + content[8 + n :]


def write(folder: Path) -> None:
    """A model that is small, and whose header is not."""
    write_checkpoint(folder, random_config(eos_ids=(0,)), {})
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    notes = {f"note {i}": "that nothing reads" for i in range(99)}
    save_file(random_tensors(random_config(), 0), folder / SINGLE, metadata=notes)


def run(folder: Path, capsys: Captured) -> list[int] | None:
    """The ids of a run that goes well; None of one that ends in one line."""
    limits = ["--max-new-tokens", "3", "--method", "ar", "--device", "cpu", "--json"]
    start = time.process_time()
    status = main(["--prompt", "the ship", "--target", str(folder), *limits])
    assert time.process_time() - start < 10
    printed = capsys.readouterr()
    if status == 0:
        return json.loads(printed.out)["token_ids"]
    assert status == 2 and printed.out == ""
    lines = printed.err.splitlines()
    assert lines[-1].startswith("error: ") and "Traceback" not in printed.err, printed.err
    assert sum(line.startswith("error: ") for line in lines) == 1 and len(lines) <= 3, printed.err
    return None


def require_meant(raw: dict, config: Config) -> None:
    """Assert that config.json says what was taken from it, by rules of this test's own."""
    rope = raw.get("rope_parameters") or raw
    numbers = {"rotary_fraction": rope.get("partial_rotary_factor", rope.get("rotary_pct"))}
    numbers |= {"rotary_base": rope.get("rope_theta", rope.get("rotary_emb_base"))}
    numbers |= {"norm_eps": raw.get("layer_norm_eps")}
    for name, value in numbers.items():
        assert value is None or type(value) in (int, float) and getattr(config, name) == value
        assert math.isfinite(getattr(config, name))
    for key, value in published_json(config).items():
        said = raw.get(key)
        if key not in ("rotary_pct", "rotary_emb_base", "layer_norm_eps") and said is not None:
            said = said if key != "eos_token_id" or isinstance(said, list) else [said]
            assert json.dumps(said) == json.dumps(value)  # 1 is not true, nor 1.0


KINDS = {  # the file, its content if not as written, how it is mutated
    "published": ("config.json", STYLES["published"], mutated),
    "newer": ("config.json", STYLES["newer"], mutated),
    "index": (INDEX, None, mutated),
    "tokenizer": ("tokenizer.json", TOKENIZER, mutated),
    "header": (SINGLE, None, mutated_header),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_mutated_file_is_read_right_or_refused(
    kind: str, tmp_path: Path, capsys: Captured
) -> None:
    name, content, change = KINDS[kind]
    write(tmp_path)
    if kind == "index":
        write_shards(tmp_path, random_config(eos_ids=(0,)), random_tensors(random_config(), 0))
    if content:
        (tmp_path / name).write_text(json.dumps(content))
    valid = (tmp_path / name).read_bytes()
    config = read_config(tmp_path)
    expected = run(tmp_path, capsys)
    assert expected is not None and len(expected) == 3
    outcomes = []

    @reproducibly
    @given(change(valid))
    def check(text: bytes) -> None:
        (tmp_path / name).write_bytes(text)
        ids = run(tmp_path, capsys)
        outcomes.append(ids is not None)
        if ids is None:
            return
        found = read_config(tmp_path)
        require_meant(json.loads((tmp_path / "config.json").read_text()), found)
        if kind != "tokenizer" and found == config:
            assert ids == expected

    check()
    assert True in outcomes and False in outcomes
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    assert gigabytes < 2


@pytest.mark.parametrize("style", STYLES)
def test_a_mutated_config_says_what_is_taken_from_it(style: str) -> None:
    """And what is written of it is read again."""
    outcomes = set()

    @settings(reproducibly, max_examples=500)
    @given(mutated(json.dumps(STYLES[style]).encode()))
    def check(text: bytes) -> None:
        try:
            raw = parse_json(text, "config.json", dict)
            config = parse_config(raw)
        except CheckpointError as error:
            assert "\n" not in str(error) and len(str(error)) < 400
            outcomes.add("refused")
            return
        require_meant(raw, config)
        assert parse_config(json.loads(json.dumps(published_json(config)))) == config
        outcomes.add("read")

    check()
    assert outcomes == {"refused", "read"}


def test_a_tokenizer_without_an_unknown_token_is_one_line(tmp_path: Path, capsys: Captured) -> None:
    """It raises where it is asked to encode a word that it does not have."""
    write(tmp_path)
    changed = TOKENIZER | {"model": WORD_LEVEL | {"unk_token": "absent"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
    arguments = ["--method", "ar", "--target", str(tmp_path), "--prompt"]
    assert main([*arguments, "the whale"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "cannot encode the prompt: WordLevel error: Missing [UNK]" in line
    assert main([*arguments, "the ship"]) == 0


def replacing(old: dict[str, str], new: str) -> dict:
    return {"type": "Replace", "pattern": old, "content": new}


STEPS = {  # twenty of which a tokenizer has -> whether a text may grow without bound
    "longer": (replacing({"String": "e"}, "ee"), True),
    "nothing by something": (replacing({"String": ""}, "e"), True),
    "what may be nothing": (replacing({"Regex": "e*"}, "e"), True),
    "as long": (replacing({"String": "e"}, "f"), False),
    "shorter": (replacing({"String": "ee"}, "f"), False),
}


@pytest.mark.parametrize(("step", "grows"), STEPS.values(), ids=STEPS)
def test_a_text_that_grows_with_every_step(step: dict, grows: bool) -> None:
    steps = {"type": "Sequence", "normalizers": [step] * 20}
    assert (growth(steps) > LONGEST_GROWTH) == grows


BACKTRACKING = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated"}
PAIRS = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
PANICS = {  # where tokenizers gives up -> what of its file is odd, what is said; the command
    # line's own test has one when decoding
    "when loaded": ({"model": PAIRS | {"continuing_subword_prefix": "##"}}, "is not a tokenizer"),
    "when encoding": (
        {"pre_tokenizer": BACKTRACKING | {"invert": False}},
        "the tokenizer cannot encode the prompt",
    ),
}


@pytest.mark.parametrize("where", PANICS)
def test_a_library_in_rust_that_panics_ends_in_one_line(
    where: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It raises what is no Exception, and has said so itself before."""
    odd, said = PANICS[where]
    write(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER | odd))
    limits = ["--method", "ar", "--max-new-tokens", "3", "--target", str(tmp_path)]
    assert main(["--prompt", "x" * 40, *limits]) == 2
    err = capfd.readouterr().err
    assert said in err.splitlines()[-1] and "Traceback" not in err


TEXTS = {  # of an index -> what is said of it; None: it is read
    "right": ('{"weight_map": {"a": "x"}, "more": [1]}', None),
    "a key twice": ('{"weight_map": {"b": "y"}, "weight_map": {"a": "x"}}', None),
    "cut short": ('{"weight_map": ', "truncated"),
    "empty": ("", "truncated"),
    "deep in a key that nobody asks for": ('{"x":' + "[" * 10**5, "depth"),
    "half a character": ('{"weight_map": {"a": "\\ud800"}}', "f.json"),
    "not UTF-8": (b'{"weight_map": {"a": "\xe9"}}', "utf-8"),
    "a list": ("[]", "object"),
    "nothing of it": ("{}", "weight_map"),
}


@pytest.mark.parametrize(("text", "said"), TEXTS.values(), ids=TEXTS)
def test_a_text_is_read_as_its_type_or_refused(text: str | bytes, said: str | None) -> None:
    if said is None:
        assert parse_json(text, "f.json", Index) == Index({"a": "x"})
        return
    with pytest.raises(ForeignFile) as caught:
        parse_json(text, "f.json", Index)
    line = str(caught.value)
    assert line.startswith("f.json") and said in line and len(line) < 400 and "\n" not in line


NO_FILES: dict[str, tuple[Callable[[Path], object], str]] = {  # what makes it -> what is said
    "fifo": (os.mkfifo, "not a file"),
    "folder": (os.mkdir, "is a folder"),
    "broken link": (lambda file: file.symlink_to("nothing"), "is a link to nothing"),
    "link to itself": (lambda file: file.symlink_to(file.name), "cannot be read"),
    "nothing": (lambda file: None, "is not there"),
    "no UTF-8": (lambda file: file.write_bytes(b"\xe9"), "utf-8"),
    "too large": (lambda file: file.write_bytes(b" " * 1001), "larger than"),
}


@pytest.mark.parametrize(("make", "said"), NO_FILES.values(), ids=NO_FILES)
def test_what_is_no_file_is_named_and_never_waited_for(
    make: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    file = tmp_path / "f.json"
    make(file)
    with pytest.raises(ForeignFile, match=said) as caught:
        read_text(file, limit=1000)
    assert str(caught.value).startswith(str(file))


@pytest.mark.parametrize("name", ["a" * 300, "null\0", "half\ud800"])
def test_a_name_that_no_file_can_have(name: str, tmp_path: Path) -> None:
    with pytest.raises(ForeignFile, match="cannot be"):
        read_bytes(tmp_path / name)

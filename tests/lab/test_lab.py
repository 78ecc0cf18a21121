"""Tests of the package from Python: the examples of docs/python.md, and the arguments of a text."""

import dataclasses
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch
from fast import Only
from small import ROOT, Captured
from torch import Tensor

import dynatree_lab as lab
from draft_tree import DynaTree, DynaTreeRule
from dynatree import ModelDrafter
from dynatree_lab.cli.main import main
from dynatree_lab.methods.static import Chain
from dynatree_lab.metrics import token_ids
from dynatree_lab.pair import Pair, parse_size
from gpt_neox import GPTNeoX
from sampling import Sampler

PROMPT = "The ship sailed at dawn"


@pytest.fixture(scope="module")
def pair() -> Pair:
    return lab.load_pair()


def test_the_import_waits_for_a_name() -> None:
    """Check in a new process that torch is not imported, and that every name is there."""
    code = "import sys, dynatree_lab as lab; assert 'torch' not in sys.modules, 'torch'\n"
    code += "assert set(dir(lab)) == set(lab.__all__); [getattr(lab, name) for name in dir(lab)]"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    with pytest.raises(AttributeError, match="has no 'typo'; it has load_pair, stream_text"):
        lab.typo  # noqa: B018


@pytest.mark.slow
def test_the_examples_run(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run all Python of docs/python.md, one block after the other. It takes 4 s: eight texts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(lab.METHODS, "entropy", None)  # the page's method is gone after the test
    del lab.METHODS["entropy"]
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    names: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        exec(block, names)
    assert len(capsys.readouterr().out) > 200
    assert (tmp_path / "run.html").stat().st_size > 50_000
    tokenizer, prompt = names["pair"].tokenizer, names["prompt"]
    ar = lab.stream_text(names["pair"], tokenizer.decode(prompt), "ar", max_new_tokens=64)
    assert "".join(ar) == tokenizer.decode(names["ids"])


def test_a_streamed_target_writes_the_same_text(pair: Pair) -> None:
    streamed = lab.load_pair(target_memory=30_000_000)
    result = lab.write_text(streamed, PROMPT, max_new_tokens=16)
    assert result.ids == lab.write_text(pair, PROMPT, max_new_tokens=16).ids
    assert "30.0MB" in result.data["command"]


def test_a_result_is_shown_as_its_text(pair: Pair) -> None:
    result = lab.write_text(pair, PROMPT, max_new_tokens=24)
    streamed = "".join(lab.stream_text(pair, PROMPT, max_new_tokens=24))
    assert result.text == streamed and repr(result).startswith(f"{streamed}\n24 tokens, ")
    step = result.steps[1]
    assert re.fullmatch(r"\d of \d+ accepted, depth \d, [\d.]+ ms: \[[\d, ]+\]", repr(step))
    assert pair.tokenizer.decode(step.tokens) in streamed
    assert result.finish_reason == "length" and result.metrics.new_tokens == 24


RUNS = [  # words, sampling, other arguments
    ("dyspec N=12 calibrate=on strict", {"temperature": 0.8, "seed": 3, "top_p": 0.9}, {}),
    ("dynatree window=64 sinks=2", {"draft_temperature": 2.0}, {"eos_ids": ()}),
    ("linear token", {"temperature": 0.8, "seed": 3}, {"stop": ["ship", "qq"]}),
    ("dyspec min_p=0.1", {"temperature": 0.8, "seed": 3, "top_k": 7}, {}),
    (lab.GenerationConfig(DynaTree(tau=0.02, prune=True)), {}, {}),
]


@pytest.mark.parametrize(("words", "sampling", "others"), RUNS)
def test_a_page_is_that_of_the_command_line(
    words: str, sampling: dict, others: dict, pair: Pair, tmp_path: Path
) -> None:
    """Run the page's command, which must write the same text, trees and keys."""
    result = lab.write_text(pair, PROMPT, words, max_new_tokens=24, **sampling, **others)
    lab.save_page(result, tmp_path / "run.html")
    with pytest.MonkeyPatch.context() as patch:
        written: list[dict] = []
        patch.setattr("dynatree_lab.cli.main.save_trace", lambda data, *_: written.append(data))
        assert main([*result.data["command"][3:], "--html", str(tmp_path / "other.html")]) == 0
    found = written[0]
    assert found.keys() == result.data.keys()
    assert found["settings"].keys() >= result.data["settings"].keys() - {"prune"}
    assert found["token_ids"] == result.ids and found["text"] == result.text
    assert [i.get("tree") for i in found["iterations"]] == [
        i.get("tree") for i in result.data["iterations"]
    ]


def test_a_run_that_no_command_repeats_has_a_page(pair: Pair, tmp_path: Path) -> None:
    """Check models of the caller, a method of the caller, a rebuilt cache and other EOS ids."""
    own = dataclasses.make_dataclass("Own", [], bases=(Chain,), frozen=True)
    plain = (GPTNeoX.from_pretrained(each) for each in (pair.target_folder, pair.draft_folder))
    target, draft = map(Only, plain)
    bare = dataclasses.replace(pair, target=target, draft=draft)
    for given, config, others in [
        (bare, "dynatree", {}),
        (pair, lab.GenerationConfig(own()), {}),
        (pair, "dynatree rebuild", {}),
        (pair, "dynatree", {"eos_ids": [7]}),
    ]:
        result = lab.write_text(given, PROMPT, config, max_new_tokens=9, **others)
        assert result.data["command"] == [] and result.text
        lab.save_page(result, tmp_path / "run.html")


SAMPLED = lab.GenerationConfig(Chain(), sampling=lab.Sampling(0.8))
INVALID = [  # arguments besides the pair, the ValueError
    ({"prompt": ["a", "b"]}, r"prompt is \['a', 'b'\], it must be a str"),
    ({"config": DynaTree()}, "it must be words or a GenerationConfig"),
    ({"config": "dynatree temperature=0.8", "temperature": 0.8}, "temperature is given twice"),
    ({"config": "dynatree seed=1 seed=2"}, "seed is given twice"),
    ({"config": SAMPLED, "seed": 1}, "seed: config.sampling is given as well"),
    ({"config": "dynatree temperature=hot"}, "temperature=hot: it must be of type float"),
    ({"config": "dynatree width=3"}, "this method has no 'width'"),
    ({"config": "dynatre"}, "method is 'dynatre', it must be one of"),
    ({"prompt": None}, "prompt is None, it must be a str"),
    ({"eos_ids": 0}, "eos_ids is 0, it must be a sequence of token ids"),
    ({"eos_ids": ["a"]}, r"eos_ids is \['a'\], it must be a sequence"),
    ({"config": "dynatree window=8"}, "window is 8, it must be from 64 to"),
    ({"config": "linear", "draft_temperature": 2.0}, "draft_temperature has no effect, because"),
    ({"top_k": 3}, "top_k needs a temperature above 0"),
    ({"seed": -3}, "seed is -3, it must be from 0"),
    ({"seed": True}, "seed is True, it must be of type int"),
    ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5, it must be of type int"),
    ({"config": "dynatree top_p=0.5"}, "top_p needs a temperature above 0"),
    ({"stop": ""}, "stop is '', it must be a text or several, none of them empty"),
    ({"stop": [1]}, r"stop is \[1\], it must be a text"),
    ({"stop": None}, "stop is None, it must be a text"),
    ({"prompt": ""}, "the prompt is empty"),
    ({"tau": 0.01}, 'tau is no argument; .* words, such as "dynatree tau=0.01 strict"'),
    ({"topp": 0.5}, "topp is no argument; the keywords are max_new_tokens, eos_ids, stop"),
    ({"logprobs": 3}, "logprobs has no effect on a stream; use write_text"),
    ({"temperature": -1}, "temperature is -1"),
    ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ({"pair": "models/tiny/target"}, "pair is 'models/tiny/target', it must be a Pair"),
]


@pytest.mark.parametrize(("changes", "message"), INVALID)
def test_mistakes_in_arguments_are_one_error(
    changes: dict[str, object], message: str, pair: Pair
) -> None:
    given = {"pair": pair, "prompt": PROMPT} | changes
    with pytest.raises(ValueError, match=message):
        list(lab.stream_text(**given))


def test_no_logprobs_may_be_named_on_a_stream(pair: Pair) -> None:
    """Check the default, which a caller may pass on."""
    texts = [list(lab.stream_text(pair, PROMPT, "ar", 3, **o)) for o in ({}, {"logprobs": None})]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["rule", "drafter", "accept", "process", "inspect"])
def test_texts_take_the_objects_of_generate(name: str, pair: Pair, tmp_path: Path) -> None:
    """Check that each writes the text of `generate` with it, in a stream, a result and both calls
    of a session, and that the page names it."""

    def make() -> object:
        return {
            "rule": DynaTreeRule(DynaTree(B_mid=1, tau=0.3)),
            "drafter": ModelDrafter(pair.draft),
            "accept": Sampler(0.8, seed=3),
            "process": lambda logits, texts: -logits,
            "inspect": seen.append,
        }[name]

    seen: list[Tensor] = []
    ids, config = pair.tokenizer.encode(PROMPT).ids, lab.GenerationConfig.parse("dynatree")
    draft = None if name == "drafter" else pair.draft
    steps = list(lab.generate(pair.target, draft, ids, config, 16, **{name: make()}))
    result = lab.write_text(pair, PROMPT, max_new_tokens=16, **{name: make()})
    assert result.ids == token_ids(steps)
    assert [step.tree for step in result.steps] == [step.tree for step in steps]
    objects = result.data["settings"]["objects"]
    kind = {"process": "<lambda>", "inspect": "append"}.get(name, type(make()).__name__)
    assert objects == {name: kind} and result.data["command"] == []
    lab.save_page(result, tmp_path / "run.html")
    for write in (partial(lab.stream_text, pair), lab.Session(pair).stream):
        assert "".join(write(PROMPT, max_new_tokens=16, **{name: make()})) == result.text
    session = lab.Session(pair)
    assert session.write(PROMPT, max_new_tokens=16, **{name: make()}).ids == result.ids
    assert not seen or len(torch.cat(seen)) == 5 * 16


def test_numbers_of_numpy_are_numbers(pair: Pair) -> None:
    """Check each place that takes a number, and that a report of them can be written as JSON."""
    numbers = {"temperature": numpy.float32(0.8), "seed": numpy.int64(3), "top_k": numpy.uint8(7)}
    numbers |= {"logprobs": numpy.int32(1), "max_new_tokens": numpy.int64(9)}
    settings = lab.METHODS["dyspec"](N=numpy.int64(12))
    config = lab.GenerationConfig(settings, calibrate=True)
    result = lab.write_text(pair, PROMPT, config, **numbers)
    plain = {name: value.item() for name, value in numbers.items()}
    assert result.ids == lab.write_text(pair, PROMPT, "dyspec N=12 calibrate=on", **plain).ids
    assert json.loads(json.dumps(result.data))["settings"]["N"] == 12
    for tau in numpy.linspace(0.01, 0.1, 3):
        assert type(DynaTree(tau=tau).tau) is float and lab.Sampling(tau).temperature == tau
    assert Sampler(numpy.float64(0.8), seed=numpy.int64(1)).draw(torch.ones(3)) in range(3)


def test_mistakes_with_models_are_one_error(pair: Pair, tmp_path: Path) -> None:
    step = lab.write_text(pair, PROMPT, max_new_tokens=9).steps[1]
    alone = lab.load_pair("models/tiny/target") if Path("models/tiny").exists() else None
    calls = [
        (lambda: lab.load_pair("./embedded"), "is neither a folder nor a hub name"),
        (lambda: lab.load_pair(5), "target is 5, it must be a folder or a hub name"),
        (lambda: lab.load_pair(device="tpu"), "--device is 'tpu'"),
        (lambda: lab.load_pair(target_memory=-1), "--target-memory is -1, it must be like 2GB"),
        (lambda: lab.write_text(alone, PROMPT), "the pair has no draft: load one, or use ar"),
        (lambda: lab.save_page("text", "run.html"), "it must be a Result of write_text"),
        (lambda: lab.draw_tree(step, pair), "draw_tree takes a step of a result"),
        (lambda: lab.GenerationConfig("dynatree"), "settings is 'dynatree' and window"),
        (lambda: lab.GenerationConfig.parse(["dynatree"]), "method is .*, it must be one of"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()


def test_neutral_values_suit_every_temperature(pair: Pair, capsys: Captured) -> None:
    """Check that a greedy text may have the neutral values of sampling, and any seed."""
    neutral = {"temperature": 0, "seed": 1, "top_p": 1, "top_k": 0, "min_p": 0}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in neutral.items()]
    plain = lab.write_text(pair, PROMPT, max_new_tokens=12)
    found = lab.write_text(pair, PROMPT, max_new_tokens=12, **neutral)
    assert found.text == plain.text and found.request.config == plain.request.config
    assert main(["--prompt", PROMPT, "--max-new-tokens", "12", *options]) == 0
    assert capsys.readouterr().out == plain.text + "\n"
    words = [f"{name}={value}" for name, value in neutral.items()]
    assert lab.GenerationConfig.parse("dynatree", *words) == plain.request.config


def test_numbers_in_a_command_are_words(capsys: Captured) -> None:
    words = ["--prompt", PROMPT, "--max-new-tokens", 3, "--method", "ar", "--json"]
    assert lab.run(words) == 0
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) == 3


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "seed"])
def test_none_is_the_default(name: str, pair: Pair) -> None:
    """Check a text, also where the config has the sampling, and a Sampling and a config alone."""
    default = getattr(lab.Sampling(), name)
    assert getattr(lab.Sampling(**{name: None}), name) == default
    assert lab.GenerationConfig.parse("linear", **{name: None}).sampling == lab.Sampling()
    for config in ("linear", "linear temperature=0.8", SAMPLED):
        options = {name: None, "draft_temperature": None}
        plain = "".join(lab.stream_text(pair, PROMPT, config, 6))
        stream = lab.stream_text(pair, PROMPT, config, 6, logprobs=None, **options)
        assert "".join(stream) == plain


SIZES = [("2G", 2e9), ("500m", 5e8), ("1.5 GiB", 1.5 * 2**30), ("1TB", 1e12), ("4kib", 4096)]


@pytest.mark.parametrize(("size", "n_bytes"), [*SIZES, (30_000_000, 3e7)])
def test_sizes_have_units_and_numbers_are_bytes(size: int | str, n_bytes: float) -> None:
    assert parse_size(size) == n_bytes


def test_the_embedded_pair_has_a_name(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the name works in any folder, and that one's own folder of this name wins."""
    monkeypatch.chdir(tmp_path)
    found = lab.load_pair("embedded")
    assert [found.target_folder, found.draft_folder] == [pair.target_folder, pair.draft_folder]
    (tmp_path / "embedded").mkdir()
    with pytest.raises(ValueError, match="embedded"):
        lab.load_pair("embedded")


def test_words_and_keywords_are_one_sampling(pair: Pair) -> None:
    texts = [
        "".join(lab.stream_text(pair, PROMPT, words, max_new_tokens=20, **sampling))
        for words, sampling in [
            ("dyspec temperature=0.8 seed=4", {}),
            ("dyspec", {"temperature": 0.8, "seed": 4}),
            ("dyspec temperature=0.8", {"seed": 4}),
        ]
    ]
    assert len(set(texts)) == 1 and texts[0] != "".join(
        lab.stream_text(pair, PROMPT, "dyspec", max_new_tokens=20)
    )

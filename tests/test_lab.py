"""Tests of the package from Python: the examples of docs/python.md, and the arguments of a text."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Captured

import dynatree_lab as lab
from draft_tree import DynaTree
from dynatree_lab.cli.models import Pair
from dynatree_lab.methods.static import Chain

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


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_the_examples_run(
    page: str, capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run all Python of a page, one block after the other. It takes 2 to 4 s: eight texts."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / page).read_text(encoding="utf-8")
    names: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        exec(block, names)
    assert PROMPT in text and len(capsys.readouterr().out) > 200
    if page == "docs/python.md":
        assert (tmp_path / "run.html").stat().st_size > 50_000
        expected = "".join(lab.stream_text(names["pair"], "The ship", "ar", max_new_tokens=64))
        assert len(names["logprobs"]) == 64 and (names["logprobs"] <= 0).all()
        assert names["result"].text != expected and len(names["result"].ids) == 64
        texts = ["".join(lab.stream_text(names["pair"], PROMPT, "ar", max_new_tokens=64))]
        texts.append(names["pair"].tokenizer.decode(names["ids"]))
        assert texts[0] == texts[1]


def test_a_result_is_shown_as_its_text(pair: Pair) -> None:
    result = lab.write_text(pair, PROMPT, max_new_tokens=24)
    streamed = "".join(lab.stream_text(pair, PROMPT, max_new_tokens=24))
    assert result.text == streamed and repr(result).startswith(f"{streamed}\n24 tokens, ")
    step = result.steps[1]
    assert re.fullmatch(r"\d of \d+ accepted, depth \d, [\d.]+ ms: \[[\d, ]+\]", repr(step))
    assert pair.tokenizer.decode(step.tokens) in streamed
    assert result.finish_reason == "length" and result.metrics.new_tokens == 24


def test_a_page_is_that_of_the_command_line(pair: Pair) -> None:
    """Check that the data have the keys of --trace, and a command that writes the same text."""
    from dynatree_lab.cli.main import main

    words = "dyspec N=12 calibrate=on strict"
    result = lab.write_text(pair, PROMPT, words, max_new_tokens=24, temperature=0.8, seed=3)
    command = result.data["command"]
    assert command[0] == "dynatree.py" and {"--seed", "3", "--strict"} <= set(command)
    assert json.dumps(result.data)
    with pytest.MonkeyPatch.context() as patch:
        written: list[dict] = []
        patch.setattr("dynatree_lab.cli.main.save_trace", lambda data, *_: written.append(data))
        assert main([*command[1:], "--html", "run.html"]) == 0
    assert written[0].keys() == result.data.keys()
    assert written[0]["settings"].keys() == result.data["settings"].keys()
    assert written[0]["token_ids"] == result.ids
    assert [i["tree"] for i in written[0]["iterations"][1:]] == [
        i["tree"] for i in result.data["iterations"][1:]
    ]


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
    ({"topp": 0.5}, "topp is no argument; those of sampling are temperature, top_p, seed"),
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

"""Tests of a method's settings: values from Python and as text, and errors for wrong ones."""

import math
from dataclasses import asdict, dataclass, fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_tree import setting
from dynatree_lab.methods import METHODS
from dynatree_lab.methods.settings import MethodSettings, choice, needs_of, read_values, text


@dataclass(frozen=True)
class Given(MethodSettings):
    """Settings with a field of each kind."""

    p: float = setting(1, 0, 1, "a share")
    least: float = setting(0.25, 0.0, 1.0, "a smaller one")
    n: int = setting(3, 0, 9, "a number")
    is_on: bool = setting(True, False, True, "a switch")
    at: str = choice("root", ("root", "tail"), "a word")
    chance: str = text("0.5", float, "a text")


WRONG = [  # values from Python, error
    ({"p": "1"}, "p is '1', it must be of type"),
    ({"at": None}, "at is None, it must be of type"),
    ({"p": True}, "p is True, it must be of type float"),
    ({"n": 1.0}, "n is 1.0, it must be of type int"),
    ({"is_on": 1}, "is_on is 1, it must be of type bool"),
    ({"p": 2}, "p is 2.0, it must be from 0 to 1"),
    ({"p": math.nan}, "p is nan, it must be from 0 to 1"),
    ({"n": -1}, "n is -1, it must be from 0 to 9"),
    ({"at": "top"}, "at=top: it must be one of root, tail"),
    ({"chance": "x"}, "chance=x: could not convert"),
]


@pytest.mark.parametrize(("values", "message"), WRONG)
def test_what_is_wrong_in_python_is_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Given(**values)
    assert message in str(caught.value)


WRONG_TOGETHER = [  # method, values, error
    ("dynatree", {"D0": 7, "D_max": 6}, "must have B_min <= B_mid"),
    ("specinfer", {"widths": "1024"}, "1025 rows, it must have at most 1024"),
    ("specinfer", {"widths": ":".join(["1"] * 512)}, "512 levels, it must have at most 511"),
    *(("specinfer", {"widths": word}, "whole numbers") for word in ("", "3:0:1", "3:1.5")),
    *(("recycle", {"p": word}, "from 0 to 1") for word in ("", "1.5")),
    *(("graft", {"p": word}, "at most the one before") for word in ("0.5:0.6", "0.5:0.0")),
    ("graft", {"p": ":".join(["0.01"] * 33)}, "33 successors, it must have at most 32"),
    *(("sequoia", {"p": word}, "from 0 to 1") for word in ("", "0.6:", "1.5", "-0.1", "nan")),
    ("deagle", {"votes": 3, "length": "off"}, "could never stop"),
    ("deagle", {"low": False, "momentum": False}, "could never stop"),
    ("graft", {"checkpoints": "1"}, "'1' must have the form DEPTH@P"),
    ("graft", {"checkpoints": "0@0.5"}, "at least 1"),
    ("graft", {"checkpoints": "1@1.5"}, "from 0 to 1"),
    ("graft", {"base": "recycle"}, "the base is 'recycle', it must be one of"),
    ("graft", {"base": "linear:K"}, "the base is 'linear:K', it must be one of"),
    ("graft", {"base": "linear:K=x"}, "base=linear:K=x: K=x: K takes"),
    ("graft", {"base": "linear:B=2"}, "B=2: this method has no 'B'"),
    ("graft", {"base": "dynatree:prune=off:tau=0.2"}, "tau has no effect with prune=off"),
    ("graft", {"base": "linear:K=5000"}, "K is 5000, it must be from 0 to 511"),
]


@pytest.mark.parametrize(("method", "values", "message"), WRONG_TOGETHER)
def test_what_a_method_cannot_be_set_to(
    method: str, values: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        METHODS[method](**values)
    line = str(caught.value)
    assert message in line
    if message.startswith("must have"):
        assert all(f"{name}={value}" in line for name, value in values.items())


def test_a_setting_is_of_the_type_that_is_annotated() -> None:
    """Check that a whole number, also as a default, becomes a float if the annotation is float."""
    for found in (Given(), Given(p=1), Given(**read_values(Given, ["p=1"]))):
        assert found == Given(p=1.0) and type(found.p) is float
    assert type(Given(least=0).least) is float and type(Given(n=5).n) is int
    assert Given(least=0.0, n=0, is_on=False).n == 0


ASSIGNED = [  # words; their values, or the error
    (["p = 0.8", "n=0"], {"p": 0.8, "n": 0}),
    (["is_on=off"], {"is_on": False}),
    (["is_on=TRUE"], {"is_on": True}),
    (["at=a=b"], {"at": "a=b"}),
    (["n=1.0"], "n=1.0: n takes a value of type int"),
    (["p=much"], "p=much: p takes a value of type float"),
    (["n=" + "9" * 5000], "n takes a value of type int"),
    (["is_on=maybe"], "is_on=maybe: is_on takes on or off"),
    (["n"], "n: n takes a value of type int"),
    (["width=3"], "width=3: this method has no 'width'; it has p, least, n, is_on"),
    (["n=1", " n = 2"], " n = 2: n is set twice"),
]


@pytest.mark.parametrize(("words", "expected"), ASSIGNED)
def test_assignments(words: list[str], expected: dict[str, object] | str) -> None:
    if isinstance(expected, dict):
        assert read_values(Given, words) == expected
        return
    with pytest.raises(ValueError) as caught:
        read_values(Given, words)
    assert expected in str(caught.value)


def test_a_setting_without_effect_is_refused() -> None:
    """Check each setting that dynatree has for a part that is off, and the others."""
    kind = METHODS["dynatree"]
    for name, (switch, _) in needs_of(kind).items():
        value = getattr(kind(), name)
        assert read_values(kind, [f"{name}={value}", f"{switch}=on"])[name] == value
        with pytest.raises(ValueError, match=f"{name} has no effect with {switch}=off"):
            read_values(kind, [f"{switch}=off", f"{name}={value}"])
    switches = [f"{switch}=off" for switch, _ in set(needs_of(kind).values())]
    assert len(read_values(kind, [*switches, "B_mid=3", "D0=2", "D_max=3"])) == 7
    with pytest.raises(ValueError, match="t has no effect with exact=on"):
        read_values(METHODS["dyspec"], ["t=0.1"])
    assert read_values(METHODS["dyspec"], ["t=0.1", "exact=off"])["t"] == 0.1


WORDS = st.integers().map(str) | st.floats().map(str) | st.text(max_size=9)
WORDS |= st.integers(-1, 130).map(str) | st.floats(-0.1, 1.1).map(str)
WORDS |= st.sampled_from(["on", "off", "True", "root", "linear:K=3", "4:2:1", "1@0.5", ""])


@pytest.mark.parametrize("method", METHODS)
@settings(derandomize=True, deadline=None, max_examples=60)
@given(data=st.data())
def test_a_word_is_a_value_in_its_range_or_one_line(method: str, data: st.DataObject) -> None:
    kind = METHODS[method]
    f = data.draw(st.sampled_from(fields(kind)))
    word = data.draw(WORDS)
    try:
        found = kind(**read_values(kind, [f"{f.name}={word}"]))
    except ValueError as error:
        assert f.name in str(error)
        return
    value = getattr(found, f.name)
    assert type(value) is f.type
    assert found == replace(kind(), **{f.name: value}) and asdict(found)[f.name] == value

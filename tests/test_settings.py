"""A method's settings: what may be set, from Python and as text, and the one line that says so."""

import math
from dataclasses import Field, asdict, dataclass, fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.settings import check_settings, choice, read_values, require_order, setting, text
from methods import METHODS


@dataclass(frozen=True)
class Given:
    """Settings of each kind."""

    p: float = setting(1, 0, 1, "a share")
    least: float = setting(0.25, 0.0, 1.0, "a smaller one")
    n: int = setting(3, 0, 9, "a number")
    is_on: bool = setting(True, False, True, "a switch")
    at: str = choice("root", ("root", "tail"), "a word")
    chance: str = text("0.5", float, "a text")

    def __post_init__(self) -> None:
        check_settings(self)
        require_order(self, "least < p")
        require_order(self, "least <= n <= is_on" if self.n < 2 else "least <= n")


WRONG = [  # values, from Python -> what is said
    *[({name: "1"}, f"{name}=1 is not of type") for name in ("p", "n", "is_on")],
    *[({name: None}, f"{name}=None is not of type") for name in ("p", "n", "is_on", "at")],
    ({"p": True}, "p=True is not of type float"),
    ({"n": True}, "n=True is not of type int"),
    ({"n": 1.0}, "n=1.0 is not of type int"),
    ({"is_on": 1}, "is_on=1 is not of type bool"),
    ({"p": 2}, "p=2.0 is outside 0 to 1"),
    ({"p": math.nan}, "p=nan is outside 0 to 1"),
    ({"n": 10}, "n=10 is outside 0 to 9"),
    ({"n": -1}, "n=-1 is outside 0 to 9"),
    ({"at": "top"}, "at=top: there are root, tail"),
    ({"chance": "x"}, "chance=x: could not convert"),
    ({"least": 0.5, "p": 0.5}, "least=0.5 and p=0.5 break least < p"),
    ({"least": 0.5, "n": 0}, "least=0.5 and n=0 break least <= n"),
    ({"least": 0.0, "n": 1, "is_on": False}, "n=1 and is_on=False break n <= is_on"),
]


@pytest.mark.parametrize(("values", "said"), WRONG)
def test_what_is_wrong_in_python_is_named(values: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        Given(**values)
    assert said in str(caught.value)


def test_a_setting_is_of_the_type_that_is_annotated() -> None:
    """Whatever its default was written as; a whole number where a float is due becomes one."""
    for found in (Given(), Given(p=1), Given(**read_values(Given, ["p=1"]))):
        assert found == Given(p=1.0) and type(found.p) is float
    assert type(Given(least=0).least) is float and type(Given(n=5).n) is int
    assert Given(least=0.0, n=0, is_on=False).n == 0


ASSIGNED = [  # words -> the values that they give, or what is said
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


def is_right(value: object, f: Field) -> bool:
    """Whether a field says that it may have this value."""
    if "low" in f.metadata:
        return f.metadata["low"] <= value <= f.metadata["high"]
    try:
        f.metadata["parse"](value)
    except ValueError:
        return False
    return True


WORDS = st.integers().map(str) | st.floats().map(str) | st.text(max_size=9)
WORDS |= st.integers(-1, 130).map(str) | st.floats(-0.1, 1.1).map(str)
WORDS |= st.sampled_from(["on", "off", "True", "root", "linear:K=3", "4:2:1", "1@0.5", ""])


@pytest.mark.parametrize("method", METHODS)
@settings(derandomize=True, deadline=None, max_examples=200)
@given(data=st.data())
def test_a_word_is_a_value_in_its_range_or_one_line(method: str, data: st.DataObject) -> None:
    kind = METHODS[method]
    f = data.draw(st.sampled_from(fields(kind)))
    word = data.draw(WORDS)
    try:
        found = kind(**read_values(kind, [f"{f.name}={word}"]))
    except ValueError as error:
        line = str(error)
        assert f.name in line
        assert " takes " in line or " break " in line or not is_right_word(word, f)
        return
    value = getattr(found, f.name)
    assert type(value) is f.type and is_right(value, f)
    assert found == replace(kind(), **{f.name: value}) and asdict(found)[f.name] == value


def is_right_word(word: str, f: Field) -> bool:
    """The same of what is written, once it is of the field's type."""
    return is_right(f.type(word.strip()) if f.type is not bool else True, f)

"""A method's settings: what a field of them may be, said once for checks, --help and tests.

@dataclass(frozen=True)
class Chain:
    K: int = setting(5, 0, 127, "tokens drafted per iteration")

    def __post_init__(self) -> None:
        check_settings(self)

    Chain(**read_values(Chain, ["K=8"]))
"""

from collections.abc import Callable, Sequence
from dataclasses import field, fields
from functools import cache
from typing import get_type_hints

SWITCH = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}
Words = Callable[[], Sequence[str]]  # told when they are asked for, not before


def setting(default: float, low: float, high: float, meaning: str) -> float:
    """A dataclass field for one setting, with its range (both ends allowed) and its meaning. Its
    type is the annotation's: `p: float = setting(1, 0, 1, ...)` is 1.0."""
    return field(default=default, metadata={"low": low, "high": high, "meaning": meaning})


def choice(default: str, options: Words, meaning: str) -> str:
    """A dataclass field for a setting that is one of several words."""
    return field(default=default, metadata={"options": options, "meaning": meaning})


def text(
    default: str, parse: Callable[[str], object], meaning: str, examples: Words | None = None
) -> str:
    """A dataclass field for a setting written as a word, such as 4:2:1; parse: its reader, which
    raises ValueError saying what is wrong with it. examples: other words that it can read."""

    def only_default() -> Sequence[str]:
        return (default,)

    metadata = {"parse": parse, "meaning": meaning, "examples": examples or only_default}
    return field(default=default, metadata=metadata)


@cache
def types_of(kind: type) -> dict[str, type]:
    """Of each field of a settings dataclass, as it is annotated."""
    return get_type_hints(kind)


def check_settings(settings: object) -> None:
    """Raise ValueError for a setting of the wrong type or outside its range; a whole number where
    a float is due becomes one."""
    types = types_of(type(settings))
    for f in fields(settings):
        value = getattr(settings, f.name)
        if types[f.name] is float and type(value) is int:
            value = float(value)
            object.__setattr__(settings, f.name, value)  # it is frozen for everyone else
        if type(value) is not types[f.name]:
            raise ValueError(f"{f.name}={value} is not of type {types[f.name].__name__}")
        if "options" in f.metadata:
            known = f.metadata["options"]()
            if value not in known:
                known = ", ".join(known)
                raise ValueError(f"{f.name}={value} is not one of {known}")
            continue
        if "parse" in f.metadata:
            try:
                f.metadata["parse"](value)
            except ValueError as error:
                raise ValueError(f"{f.name}={value}: {error}") from error
            continue
        low = f.metadata["low"]
        high = f.metadata["high"]
        if not low <= value <= high:
            raise ValueError(f"{f.name}={value} is outside {low} to {high}")


def require_order(settings: object, order: str) -> None:
    """Raise ValueError unless settings stand in this order, as "D0 <= D_max", each pair of them."""
    words = order.split()
    for low, sign, high in zip(words[::2], words[1::2], words[2::2], strict=False):
        a, b = getattr(settings, low), getattr(settings, high)
        if not (a < b or (sign == "<=" and a == b)):
            raise ValueError(f"{low}={a} and {high}={b} break {low} {sign} {high}")


def read_values(kind: type, assignments: Sequence[str]) -> dict[str, object]:
    """What NAME=VALUE assignments give the fields of a settings dataclass, ranges not checked.

    Raises ValueError naming the assignment that is wrong.
    """
    types = types_of(kind)
    values = {}
    for assignment in assignments:
        name, _, word = assignment.partition("=")
        name = name.strip()
        if name not in types:
            known = ", ".join(types)
            raise ValueError(f"{assignment}: this method has no {name!r}; it has {known}")
        if name in values:
            raise ValueError(f"{assignment}: {name} is set twice")
        try:
            values[name] = read_value(types[name], word.strip())
        except ValueError as error:
            raise ValueError(f"{assignment}: {name} takes {error}") from error
    return values


def read_value(kind: type, word: str) -> object:
    """A word as a value of this type. Raises ValueError naming what it should be."""
    if kind is bool:
        if word.lower() not in SWITCH:
            raise ValueError("on or off")
        return SWITCH[word.lower()]
    try:
        return kind(word)
    except ValueError as error:
        raise ValueError(f"a value of type {kind.__name__}") from error

"""A method's settings: what a field of them may be, said once for checks, --help and tests.

@dataclass(frozen=True)
class Chain(Settings):  # draft_tree.Settings checks what is made
    K: int = setting(5, 0, 127, "tokens drafted per iteration")

    Chain(**read_values(Chain, ["K=8"]))
"""

from collections.abc import Callable, Sequence
from dataclasses import field, fields

SWITCH = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}


def setting(default: float, low: float, high: float, meaning: str) -> float:
    """A dataclass field for one setting, with its range (both ends allowed) and its meaning. Its
    type is the annotation's: `p: float = setting(1, 0, 1, ...)` is 1.0."""
    return field(default=default, metadata={"low": low, "high": high, "meaning": meaning})


def choice(default: str, options: Sequence[str], meaning: str) -> str:
    """A dataclass field for a setting that is one of several words."""

    def parse(word: str) -> None:
        if word not in options:
            raise ValueError(f"there are {', '.join(options)}")

    return text(default, parse, meaning, options)


def text(
    default: str, parse: Callable[[str], object], meaning: str, examples: Sequence[str] = ()
) -> str:
    """A dataclass field for a setting written as a word, such as 4:2:1; parse: its reader, which
    raises ValueError saying what is wrong with it. examples: other words that it can read."""
    metadata = {"parse": parse, "meaning": meaning, "examples": examples or (default,)}
    return field(default=default, metadata=metadata)


def check_settings(settings: object) -> None:
    """Raise ValueError, naming the setting and what it may be, for one of the wrong type or outside
    its range; a whole number where a float is due becomes one."""
    for f in fields(settings):
        value = getattr(settings, f.name)
        if f.type is float and type(value) is int:
            value = float(value)
            object.__setattr__(settings, f.name, value)  # it is frozen for everyone else
        if type(value) is not f.type:
            raise ValueError(f"{f.name}={value} is not of type {f.type.__name__}")
        if "low" in f.metadata:
            low, high = f.metadata["low"], f.metadata["high"]
            if not low <= value <= high:
                raise ValueError(f"{f.name}={value} is outside {low} to {high}")
        else:
            try:
                f.metadata["parse"](value)
            except ValueError as error:
                raise ValueError(f"{f.name}={value}: {error}") from error


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
    types = {f.name: f.type for f in fields(kind)}
    values = {}
    for assignment in assignments:
        name, _, word = assignment.partition("=")
        name = name.strip()
        if name not in types:
            known = ", ".join(types)
            raise ValueError(f"{assignment}: this method has no {name!r}; it has {known}")
        if name in values:
            raise ValueError(f"{assignment}: {name} is set twice")
        kind, word = types[name], word.strip()
        try:
            values[name] = SWITCH[word.lower()] if kind is bool else kind(word)
        except (KeyError, ValueError) as error:
            expected = "on or off" if kind is bool else f"a value of type {kind.__name__}"
            raise ValueError(f"{assignment}: {name} takes {expected}") from error
    return values

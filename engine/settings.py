"""A method's settings: what a field of them may be, said once for checks, --help and tests.

@dataclass(frozen=True)
class Chain:
    K: int = setting(5, 0, 127, "tokens drafted per iteration")

    def __post_init__(self) -> None:
        check_settings(self)
"""

from collections.abc import Callable, Sequence
from dataclasses import field, fields


def setting(default: float, low: float, high: float, meaning: str) -> float:
    """A dataclass field for one setting, with its range (both ends allowed) and its meaning."""
    return field(default=default, metadata={"low": low, "high": high, "meaning": meaning})


def choice(default: str, options: Callable[[], Sequence[str]], meaning: str) -> str:
    """A dataclass field for a setting that is one of several words, told when it is asked."""
    return field(default=default, metadata={"options": options, "meaning": meaning})


def text(default: str, parse: Callable[[str], object], meaning: str) -> str:
    """A dataclass field for a setting written as a word, such as 4:2:1; parse: its reader, which
    raises ValueError saying what is wrong with it."""
    return field(default=default, metadata={"parse": parse, "meaning": meaning})


def check_settings(settings: object) -> None:
    """Raise ValueError for a setting of the wrong type or outside its range."""
    for f in fields(settings):
        value = getattr(settings, f.name)
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
        kind = type(f.default)
        if kind is not float and type(value) is not kind:
            raise ValueError(f"{f.name}={value} is not of type {kind.__name__}")
        low = f.metadata["low"]
        high = f.metadata["high"]
        if not low <= value <= high:
            raise ValueError(f"{f.name}={value} is outside {low} to {high}")

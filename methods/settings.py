"""Settings that are words, and settings read from words; numbers are in draft_tree.py.

@dataclass(frozen=True)
class Sequoia(MethodSettings):  # which checks what is made
    p: str = text("0.8:0.1", parse_chances, "chance of acceptance by rank")

settings = Sequoia(**read_values(Sequoia, ["p=0.7:0.2"]))
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields

from draft_tree import Settings

RENAMED = {  # a setting's old name: what replaces it
    "chances": "calibrate=on or off",
    "stop": "costs=off, learned, or tree:row:drafting:level",
}
SWITCH = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}


class MethodSettings(Settings):
    """Settings of which some are words, each with its parser."""

    def check(self, name: str, value: object, kind: type, metadata: Mapping) -> None:
        if "parse" not in metadata:
            super().check(name, value, kind, metadata)
            if kind is float:
                object.__setattr__(self, name, float(value))
            return
        if type(value) is not kind:
            raise ValueError(f"{name} is {value!r}, it must be of type {kind.__name__}")
        try:
            metadata["parse"](value)
        except ValueError as error:
            raise ValueError(f"{name}={value}: {error}") from error


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


def read_values(kind: type, assignments: Sequence[str]) -> dict[str, object]:
    """What NAME=VALUE assignments give the fields of a settings dataclass, ranges not checked.

    Raises ValueError naming the assignment that is wrong.
    """
    types = {f.name: f.type for f in fields(kind)}
    values = {}
    for assignment in assignments:
        name, _, word = assignment.partition("=")
        name = name.strip()
        if name not in types and name in RENAMED:
            raise ValueError(f"{assignment}: {name} is now {RENAMED[name]}")
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

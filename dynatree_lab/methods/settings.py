"""Settings whose values are words, and the parsing of NAME=VALUE; draft_tree.py has numbers.

@dataclass(frozen=True)
class Sequoia(MethodSettings):  # the constructor checks all values
    p: str = text("0.8:0.1", parse_rank_probs, "acceptance probability by rank")

settings = Sequoia(**read_values(Sequoia, ["p=0.7:0.2"]))
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, field, fields
from typing import ClassVar

from draft_tree import DynaTree, Settings

BOOL_WORDS = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}


# Of the core's settings: a setting -> another one, and the only value of it with which the first
# has an effect
NEEDS_OF_DYNATREE = {
    **dict.fromkeys(("B_min", "B_max", "tau_h", "tau_l"), ("adapt_breadth", True)),
    **dict.fromkeys(("rho_stop", "rho_deep"), ("adapt_depth", True)),
    "tau": ("prune", True),
    "W": ("history", True),
}


class MethodSettings(Settings):
    """Settings of which some are words; each of these has a parser."""

    needs: ClassVar[dict[str, tuple[str, bool]]] = {}

    def check(self, name: str, value: object, kind: type, metadata: Mapping) -> None:
        if "parse" not in metadata:
            super().check(name, value, kind, metadata)
            return
        if type(value) is not kind:
            raise ValueError(f"{name} is {value!r}, it must be of type {kind.__name__}")
        try:
            metadata["parse"](value)
        except ValueError as error:
            raise ValueError(f"{name}={value}: {error}") from error


def choice(default: str, options: Sequence[str], meaning: str) -> Field:
    """Return the dataclass field of a setting that is one of several words."""

    def parse(word: str) -> None:
        if word not in options:
            raise ValueError(f"it must be one of {', '.join(options)}")

    return text(default, parse, meaning, options)


def text(
    default: str, parse: Callable[[str], object], meaning: str, examples: Sequence[str] = ()
) -> Field:
    """Return the dataclass field of a setting that is written as a word, such as 4:2:1.

    Args:
        parse: parses the word. Raises ValueError with the reason if the word is invalid.
        examples: valid words, for --list-methods and for random settings in tests.
    """
    metadata = {"parse": parse, "meaning": meaning, "examples": examples or (default,)}
    return field(default=default, metadata=metadata)


def needs_of(kind: type) -> dict[str, tuple[str, bool]]:
    """Return which settings of a method have an effect only with a value of another one."""
    return getattr(kind, "needs", NEEDS_OF_DYNATREE if issubclass(kind, DynaTree) else {})


def read_values(kind: type, assignments: Sequence[str]) -> dict[str, object]:
    """Parse NAME=VALUE assignments to fields of the settings dataclass `kind`.

    Ranges are not checked. Raises ValueError naming an assignment that is invalid or has no effect.
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
        field_type, word = types[name], word.strip()
        try:
            values[name] = BOOL_WORDS[word.lower()] if field_type is bool else field_type(word)
        except (KeyError, ValueError) as error:
            is_bool = field_type is bool
            expected = "on or off" if is_bool else f"a value of type {field_type.__name__}"
            raise ValueError(f"{assignment}: {name} takes {expected}") from error
    for name, (switch, needed) in needs_of(kind).items():
        if name in values and values.get(switch, getattr(kind, switch)) != needed:
            word = "off" if needed else "on"
            raise ValueError(f"{name} has no effect with {switch}={word}")
    return values

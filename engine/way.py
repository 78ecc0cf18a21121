"""How a text is written, decided once: the method and its settings, sampling, window and the rest.

A row of bench.py says it in words, and so do the options of the command line:

    read_way("dynatree", "tau=0.02", "strict", "window=512", "sinks=4")
    Way(DynaTree(tau=0.02), strict=True, window=Window(512, 4))  # the same
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace

from draft_tree import Settings
from engine.streaming import DEFAULT_SINKS, WHOLE_TEXT, Window
from gpt_neox import Config
from methods import METHODS
from methods.acceptances import ACCEPTANCES, choose_acceptance
from methods.rules import MethodRule, make_rule
from methods.sampler import GREEDY, Sampling
from methods.settings import read_values

COMMITS = ("keep", "rebuild")
# What a way may be told beside its method's settings, as fields of Way
WORDS = {"strict": {"strict": True}} | {name: {"commit": name} for name in COMMITS}
WORDS |= {name: {"acceptance": name} for name in ACCEPTANCES}
SIZED_WORDS = ("window", "sinks")  # the same, with a number: window=512


@dataclass(frozen=True)
class Way:
    """How a text is written. Raises ValueError for an acceptance that its method cannot have."""

    settings: Settings  # the method's
    _: KW_ONLY
    sampling: Sampling = GREEDY
    acceptance: str | None = None  # of sampled text; None: the rule's own, or as its trees want it
    commit: str = "keep"  # "keep" moves accepted rows in the cache, "rebuild" runs them again (3.5)
    window: Window = WHOLE_TEXT  # what of the text the caches keep
    strict: bool = False  # the target's logits are ar's bit for bit (engine/strict.py)
    graphs: bool = True  # on CUDA, passes are captured

    def __post_init__(self) -> None:
        if self.commit not in COMMITS:
            raise ValueError(f"commit {self.commit}: there are {', '.join(COMMITS)}")
        if self.acceptance:
            rule = self.rule()
            if rule.max_verified == 1:
                raise ValueError(f"{self.acceptance} has no effect: the method proposes no token")
            choose_acceptance(rule, self.acceptance)

    def rule(self) -> MethodRule:
        """Return a new rule of the method."""
        return make_rule(self.settings)

    @property
    def is_plain(self) -> bool:
        """Whether gpt_neox.py's own model can go it."""
        only_fast = {"commit": "keep", "window": WHOLE_TEXT, "strict": False, "graphs": True}
        return replace(self, **only_fast) == self

    def require_fit(self, models: Sequence[Config]) -> None:
        """Raise ValueError if the window is too little for the method's trees, or more than these
        models were trained for."""
        if self.window == WHOLE_TEXT:
            return
        n_rows = self.rule().max_verified
        longest = min(config.max_position_embeddings for config in models)
        size, sinks = self.window.size, self.window.sinks
        most = (longest - sinks) * 4 // 5  # size + size // 4 tokens beside the sinks
        why = f"the method's tree has {n_rows} rows, the models {longest} positions"
        if most < n_rows:
            raise ValueError(f"sinks={sinks} leaves no window: {why}")
        if not n_rows <= size <= most:
            raise ValueError(f"window={size}: {n_rows} to {most} ({why})")


def read_way(method: str = "", *words: str) -> Way:
    """Of greedy text. words: NAME=VALUE, strict, rebuild, an acceptance, window=N, sinks=S. Raises
    ValueError naming what is wrong with them."""
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; there are {', '.join(METHODS)}")
    told, assignments = {}, []
    for word in words:
        found = read_word(word)
        if told.keys() & found.keys():
            raise ValueError(f"{word}: that is said twice")
        told |= found
        if not found:
            assignments.append(word)
    size, sinks = (told.pop(name, None) for name in SIZED_WORDS)
    if size is not None:
        told["window"] = Window(size, DEFAULT_SINKS if sinks is None else sinks)
    elif sinks is not None:
        raise ValueError(f"sinks={sinks} needs a window=N")
    kind = METHODS[method]
    return Way(kind(**read_values(kind, assignments)), **told)


def read_word(word: str) -> dict[str, object]:
    """What a word says of its Way, by field, or by name if it has a number; nothing if it is one of
    the method's settings. Raises ValueError."""
    name, _, value = word.partition("=")
    if name not in SIZED_WORDS:
        return WORDS.get(word, {})
    try:
        return {name: int(value)}
    except ValueError as error:
        raise ValueError(f"{word}: {name} takes a whole number") from error

"""How a text is generated: method, settings, sampling, window and the rest, in one object.

A row of bench.py and the options of the command line give it in words:

    GenerationConfig.parse("dynatree", "tau=0.02", "strict", "window=512", "sinks=4")
    GenerationConfig(DynaTree(tau=0.02), strict=True, window=Window(512, 4))  # the same
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace

from draft_tree import Settings
from engine.passes import WHOLE_TEXT, Window
from gpt_neox import Config
from methods import METHODS
from methods.acceptances import ACCEPTANCES, choose_acceptance
from methods.rules import MethodRule, make_rule
from methods.sampler import GREEDY, Sampling
from methods.settings import read_values

DEFAULT_SINKS = 4  # StreamingLLM's number
COMMITS = ("keep", "rebuild")
# Words beside a method's settings: the fields that they set
FLAGS = {"strict": {"strict": True}} | {name: {"commit": name} for name in COMMITS}
FLAGS |= {name: {"acceptance": name} for name in ACCEPTANCES}
NUMBER_OPTIONS = ("window", "sinks")  # window=512


@dataclass(frozen=True)
class GenerationConfig:
    """How a text is generated. Raises ValueError for an acceptance that the method cannot have."""

    settings: Settings  # of the method
    _: KW_ONLY
    sampling: Sampling = GREEDY
    acceptance: str | None = None  # of sampled text; None: the method's default
    commit: str = "keep"  # "keep" moves accepted rows in the cache, "rebuild" runs them again (3.5)
    window: Window = WHOLE_TEXT  # which tokens the caches keep
    strict: bool = False  # the target's logits are ar's bit for bit (engine/strict.py)
    graphs: bool = True  # on CUDA, capture the passes

    def __post_init__(self) -> None:
        if self.commit not in COMMITS:
            raise ValueError(f"commit {self.commit}: there are {', '.join(COMMITS)}")
        if self.acceptance:
            rule = self.make_rule()
            if rule.max_verified == 1:
                raise ValueError(f"{self.acceptance} has no effect: the method proposes no token")
            choose_acceptance(rule, self.acceptance)

    @classmethod
    def parse(cls, method: str = "", *words: str) -> "GenerationConfig":
        """Return the config of greedy text that these words give.

        words: NAME=VALUE, strict, rebuild, an acceptance, window=N, sinks=S. Raises ValueError
        naming what is wrong.
        """
        if method not in METHODS:
            raise ValueError(f"unknown method {method!r}; there are {', '.join(METHODS)}")
        fields, assignments = {}, []
        for word in words:
            found = parse_word(word)
            if fields.keys() & found.keys():
                raise ValueError(f"{word}: given twice, give it once")
            fields |= found
            if not found:
                assignments.append(word)
        size, sinks = (fields.pop(name, None) for name in NUMBER_OPTIONS)
        if size is not None:
            fields["window"] = Window(size, DEFAULT_SINKS if sinks is None else sinks)
        elif sinks is not None:
            raise ValueError(f"sinks={sinks} needs a window=N")
        kind = METHODS[method]
        return cls(kind(**read_values(kind, assignments)), **fields)

    def make_rule(self) -> MethodRule:
        """Return a new rule of the method."""
        return make_rule(self.settings)

    @property
    def works_on_plain_model(self) -> bool:
        """Whether gpt_neox.py's own model can generate so."""
        only_fast = {"commit": "keep", "window": WHOLE_TEXT, "strict": False, "graphs": True}
        return replace(self, **only_fast) == self

    def require_fit(self, models: Sequence[Config]) -> None:
        """Raise ValueError if the window has no room for the method's trees, or has more tokens
        than these models were trained for."""
        if self.window == WHOLE_TEXT:
            return
        n_rows = self.make_rule().max_verified
        longest = min(config.max_position_embeddings for config in models)
        size, sinks = self.window.size, self.window.sinks
        most = (longest - sinks) * 4 // 5  # size + size // 4 tokens beside the sinks
        why = f"the method's tree has {n_rows} rows, the models {longest} positions"
        if most < n_rows:
            raise ValueError(f"sinks={sinks} leaves no window: {why}")
        if not n_rows <= size <= most:
            raise ValueError(f"window={size}: {n_rows} to {most} ({why})")


def parse_word(word: str) -> dict[str, object]:
    """Return the fields that a word sets, window and sinks by their names; empty if the word is a
    setting of the method. Raises ValueError."""
    name, _, value = word.partition("=")
    if name not in NUMBER_OPTIONS:
        return FLAGS.get(word, {})
    try:
        return {name: int(value)}
    except ValueError as error:
        raise ValueError(f"{word}: {name} takes a whole number") from error

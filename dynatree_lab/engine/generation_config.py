"""The generation config: method, settings, sampling, window and other options in one object.

It can be parsed from words, as rows of the benchmark and the command line have them:

    GenerationConfig.parse("dynatree tau=0.02 strict window=512 temperature=0.8")
    GenerationConfig.parse("dynatree", "tau=0.02", "strict", "window=512", temperature=0.8)
    GenerationConfig(  # the same
        DynaTree(tau=0.02), strict=True, window=Window(512, 4), sampling=Sampling(0.8)
    )
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace

from draft_tree import Rule, Settings
from dynatree_lab.engine.passes import FULL_ATTENTION, Window
from dynatree_lab.engine.strict import MAX_STRICT_ROWS
from dynatree_lab.methods import METHODS
from dynatree_lab.methods.acceptances import ACCEPTANCES, choose_acceptance
from dynatree_lab.methods.rules import MethodRule, make_rule
from dynatree_lab.methods.sampler import GREEDY, Sampling
from dynatree_lab.methods.settings import read_values
from gpt_neox import Config

DEFAULT_SINKS = 4  # StreamingLLM's number
COMMIT_MODES = ("keep", "rebuild")
# The fields that each word sets, apart from settings of methods and NUMBERS
FLAGS = {"strict": {"strict": True}} | {name: {"commit": name} for name in COMMIT_MODES}
FLAGS |= {name: {"acceptance": name} for name in ACCEPTANCES}
SAMPLING = {f.name: int if f.type is int else float for f in fields(Sampling)}
SAMPLING.pop("draws_greedy")  # for tests and tables
NUMBERS = {"window": int, "sinks": int, **SAMPLING}  # window=512
# The values that greedy text may have; its seed has no effect
NEUTRAL = {"top_p": 1, "top_k": 0, "min_p": 0}


@dataclass(frozen=True)
class GenerationConfig:
    """All options of a generation. Raises ValueError for an acceptance that the method refuses, and
    for strict passes over too many rows."""

    settings: Settings  # the method and its settings
    _: KW_ONLY
    sampling: Sampling = GREEDY
    acceptance: str | None = None  # for sampled text; None: the method's default
    commit: str = "keep"  # "keep" moves accepted rows in the cache, "rebuild" runs them again (3.5)
    window: Window = FULL_ATTENTION  # the tokens that the caches keep
    strict: bool = False  # the target's logits equal ar's bit for bit (engine/strict.py)
    graphs: bool = True  # on CUDA, capture the passes as graphs

    def __post_init__(self) -> None:
        is_settings = hasattr(self.settings, "make_rule") and not isinstance(self.settings, type)
        if not is_settings or not isinstance(self.window, Window):
            found = f"settings is {self.settings!r:.80} and window {self.window!r:.80}"
            what = "they must be a method's settings and a Window"
            raise ValueError(f"{found}, {what}; GenerationConfig.parse makes a config of words")
        if self.commit not in COMMIT_MODES:
            raise ValueError(
                f"commit is {self.commit}, it must be one of {', '.join(COMMIT_MODES)}"
            )
        self.require_supported(self.make_rule())

    def require_supported(self, rule: MethodRule) -> None:
        """Raise ValueError if the options do not suit a rule."""
        if self.acceptance:
            if rule.max_verified == 1:
                raise ValueError(f"{self.acceptance} has no effect: the method drafts no tokens")
            choose_acceptance(rule, self.acceptance)
        has_greedy_acceptance = hasattr(self.settings, "make_accept")
        if has_greedy_acceptance and not self.sampling.is_greedy and not rule.acceptance:
            why = "the method's acceptance is for greedy text; use temperature 0"
            raise ValueError(f"temperature is {self.sampling.temperature}, {why}")
        n_rows = max(rule.max_verified, rule.min_rows)
        if self.strict and n_rows > MAX_STRICT_ROWS:
            why = f"it must have at most {MAX_STRICT_ROWS}; use a smaller tree"
            raise ValueError(f"strict: a pass of this method has up to {n_rows} rows, {why}")

    @classmethod
    def parse(cls, method: str = "", *words: str, **sampling: float) -> "GenerationConfig":
        """Return the config with the options that the words name.

        Args:
            method: its name, after which there may be words.
            words: NAME=VALUE, strict, rebuild, an acceptance, window=N, sinks=S, and sampling.
            sampling: temperature, top_k, top_p, min_p, seed and draft_temperature, which the words
                may have instead.

        Raises ValueError with the invalid word.
        """
        if isinstance(method, str):
            method, *first = method.split() or [method]
        if not isinstance(method, str) or method not in METHODS:
            raise ValueError(f"method is {method!r}, it must be one of {', '.join(METHODS)}")
        found, assignments = dict(sampling), []
        for word in (*first, *words):
            options = parse_word(word)
            if twice := found.keys() & options.keys():
                raise ValueError(f"{', '.join(twice)} is given twice, it must be given once")
            found |= options
            if not options:
                assignments.append(word)
        kind = METHODS[method]
        settings = kind(**read_values(kind, assignments))
        size, sinks = found.pop("window", None), found.pop("sinks", None)
        if size is not None:
            found["window"] = Window(size, DEFAULT_SINKS if sinks is None else sinks)
        elif sinks is not None:
            raise ValueError(f"sinks={sinks} needs a window=N")
        options = {f.name: found.pop(f.name) for f in fields(cls) if f.name in found}
        return cls(settings, **options).with_sampling(**found)

    def with_sampling(self, **given: float) -> "GenerationConfig":
        """Return the config with these fields of Sampling. Raises ValueError, also for a field
        that has no effect."""
        if not given:
            return self
        if self.sampling != GREEDY:
            raise ValueError(f"{', '.join(given)}: config.sampling is given as well; use one")
        sampling = Sampling(**given)
        if sampling.is_greedy:
            for name, neutral in NEUTRAL.items():
                if getattr(sampling, name) != neutral:
                    raise ValueError(f"{name} needs a temperature above 0")
            sampling = replace(sampling, seed=GREEDY.seed)  # so that equal texts have equal configs
        if sampling.draft_temperature and not self.has_temperature(sampling.draws_candidates):
            why = "the method's trees do not depend on the draft's probabilities"
            raise ValueError(f"draft_temperature has no effect, because {why}")
        return replace(self, sampling=sampling)

    def make_rule(self) -> MethodRule:
        """Return a new rule of the method."""
        return make_rule(self.settings)

    def needs_draft(self, rule: Rule | None = None) -> bool:
        """Whether the method, or this rule in place of its own, runs a draft model."""
        rule = rule or self.make_rule()
        return rule.max_depth > 0 and getattr(self.settings, "needs_draft", True)

    def has_temperature(self, draws: bool) -> bool:
        """Whether the temperature of the draft changes the method's trees. draws: whether
        candidates are drawn if the rule supports it."""
        rule = self.make_rule()
        if not rule.max_depth or hasattr(self.settings, "make_drafter"):
            return False
        return (draws and rule.draws_candidates) or rule.depends_on_probs

    @property
    def works_on_any_model(self) -> bool:
        """Whether every gpt_neox.Model supports all of these options."""
        only_fast = {"commit": "keep", "window": FULL_ATTENTION, "strict": False}
        return replace(self, **only_fast) == self

    def require_fit(self, models: Sequence[Config]) -> None:
        """Raise ValueError if the window has no room for the method's trees, or more tokens than
        these models were trained for."""
        if self.window == FULL_ATTENTION:
            return
        n_rows = self.make_rule().max_verified
        n_positions = min(config.max_position_embeddings for config in models)
        size, sinks = self.window.size, self.window.sinks
        max_size = (n_positions - sinks) * 4 // 5  # the cache has sinks + size + size // 4 tokens
        why = f"the method's tree has {n_rows} rows, the models {n_positions} positions"
        if max_size < n_rows:
            raise ValueError(f"sinks={sinks} leaves no window: {why}")
        if not n_rows <= size <= max_size:
            raise ValueError(f"window is {size}, it must be from {n_rows} to {max_size} ({why})")


def parse_word(word: str) -> dict[str, object]:
    """Return the option that a word sets. A setting of the method gives an empty dict. Raises
    ValueError."""
    name, _, value = word.partition("=")
    if name not in NUMBERS:
        return FLAGS.get(word, {})
    try:
        return {name: NUMBERS[name](value)}
    except ValueError as error:
        raise ValueError(f"{word}: it must be of type {NUMBERS[name].__name__}") from error

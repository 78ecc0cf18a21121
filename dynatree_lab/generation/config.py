"""The generation config: method, settings, sampling, window and other options in one object.

It can be parsed from words, as rows of the benchmark and the command line have them:

    GenerationConfig.parse("dynatree tau=0.02 strict window=512 temperature=0.8")
    GenerationConfig.parse("dynatree", "tau=0.02", "strict", "window=512", temperature=0.8)
    GenerationConfig(  # the same
        DynaTree(tau=0.02), strict=True, window=Window(512, 4), sampling=Sampling(0.8)
    )
"""

from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace

from draft_tree import Rule, Settings
from dynatree_lab.engine.passes import FULL_ATTENTION, Window
from dynatree_lab.engine.strict import MAX_STRICT_ROWS
from dynatree_lab.methods import METHODS
from dynatree_lab.methods.acceptances import ACCEPTANCES, choose_acceptance
from dynatree_lab.methods.method import Method
from dynatree_lab.methods.sampler import GREEDY, Sampling
from dynatree_lab.methods.settings import BOOL_WORDS, read_values
from gpt_neox import Config

# Options of the generation that --set takes beside the method's settings, and their meanings
METHOD_OPTIONS = {
    "calibrate": "replace the draft's probabilities by learned acceptance probabilities",
    "costs": "off, learned or tree:row:drafting:level: draft and verify only what pays",
}
DEFAULT_SINKS = 4  # StreamingLLM's number
COMMIT_MODES = ("keep", "rebuild")
# The fields that each word sets, apart from settings of methods and VALUES
FLAGS = {"strict": {"strict": True}} | {name: {"commit": name} for name in COMMIT_MODES}
FLAGS |= {name: {"acceptance": name} for name in ACCEPTANCES}
SAMPLING = {f.name: int if f.type is int else float for f in fields(Sampling)}
SAMPLING.pop("draws_greedy")  # for tests and tables
VALUES = {"window": int, "sinks": int, "calibrate": bool, "costs": str, **SAMPLING}  # window=512
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
    calibrate: bool = False  # learn acceptance probabilities from the text (methods/method.py)
    costs: str = "off"  # off, learned or tree:row:drafting:level: draft and verify only what pays
    graphs: bool = True  # on CUDA, capture the passes as graphs
    # The method with its options. A copy of a config keeps it, because it asks a rule for its facts
    method: Method | None = field(default=None, repr=False, compare=False)

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
        if not self.method or self.method.options != (self.settings, self.calibrate, self.costs):
            method = Method(self.settings, calibrate=self.calibrate, costs=self.costs)
            object.__setattr__(self, "method", method)  # the dataclass is frozen
        self.require_supported(self.method)

    def method_with(self, rule: Rule) -> Method:
        """Return the method with this rule in place of its own. Raises ValueError if the config
        does not suit the rule, and for settings in place of a rule."""
        if hasattr(rule, "make_rule"):
            raise ValueError(f"rule is {rule!r:.80}, the settings of one; use .make_rule()")
        method = Method(self.settings, rule, calibrate=self.calibrate, costs=self.costs)
        self.require_supported(method)
        return method

    def require_supported(self, method: Method) -> None:
        """Raise ValueError if the options do not suit a method."""
        facts = method.facts
        if self.acceptance:
            choose_acceptance(facts, self.acceptance, method.can_draw)
        if method.make_accept and not self.sampling.is_greedy and not facts.acceptance:
            why = "the method's acceptance is for greedy text; use temperature 0"
            raise ValueError(f"temperature is {self.sampling.temperature}, {why}")
        if self.strict and method.n_verified > MAX_STRICT_ROWS:
            why = f"it must have at most {MAX_STRICT_ROWS}; use a smaller tree"
            rows = f"a pass of this method has up to {method.n_verified} rows"
            raise ValueError(f"strict: {rows}, {why}")

    @classmethod
    def parse(cls, method: str = "", *words: str, **sampling: float) -> "GenerationConfig":
        """Return the config with the options that the words name.

        Args:
            method: its name, after which there may be words.
            words: NAME=VALUE, strict, rebuild, an acceptance, window=N, sinks=S, calibrate=on,
                costs=COSTS, and sampling.
            sampling: temperature, top_k, top_p, min_p, seed and draft_temperature, which the words
                may have instead.

        Raises ValueError with the invalid word.
        """
        if isinstance(method, str):
            method, *first = method.split() or [method]
        if not isinstance(method, str) or method not in METHODS:
            raise ValueError(f"method is {method!r}, it must be one of {', '.join(METHODS)}")
        kind, found, assignments = METHODS[method], dict(sampling), []
        own = {f.name for f in fields(kind)}
        for word in (*first, *words):
            options = parse_word(word, own)
            if twice := found.keys() & options.keys():
                raise ValueError(f"{', '.join(twice)} is given twice, it must be given once")
            found |= options
            if not options:
                assignments.append(word)
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
        draws = sampling.draws_candidates
        if not draws:
            sampling = replace(sampling, seed=GREEDY.seed)  # so that equal texts have equal configs
        if sampling.draft_temperature and not self.method.has_temperature(draws):
            why = "the method's trees do not depend on the draft's probabilities"
            raise ValueError(f"draft_temperature has no effect, because {why}")
        return replace(self, sampling=sampling)

    @property
    def method_options(self) -> dict[str, bool | str]:
        """The METHOD_OPTIONS that are not off."""
        given = {name: getattr(self, name) for name in METHOD_OPTIONS}
        return {name: value for name, value in given.items() if value not in (False, "off")}

    @property
    def works_on_any_model(self) -> bool:
        """Whether every gpt_neox.Model supports all of these options."""
        return self.commit == "keep" and self.window == FULL_ATTENTION and not self.strict

    def require_fit(self, models: Sequence[Config]) -> None:
        """Raise ValueError if the window has no room for the method's trees, or more tokens than
        these models were trained for."""
        if self.window == FULL_ATTENTION:
            return
        n_rows = self.method.facts.max_verified
        n_positions = min(config.max_position_embeddings for config in models)
        size, sinks = self.window.size, self.window.sinks
        max_size = (n_positions - sinks) * 4 // 5  # the cache has sinks + size + size // 4 tokens
        why = f"the method's tree has {n_rows} rows, the models {n_positions} positions"
        if max_size < n_rows:
            raise ValueError(f"sinks={sinks} leaves no window: {why}")
        if not n_rows <= size <= max_size:
            raise ValueError(f"window is {size}, it must be from {n_rows} to {max_size} ({why})")


def parse_word(word: str, own: Collection[str]) -> dict[str, object]:
    """Return the option that a word sets; own: the method's settings, which give an empty dict.
    Raises ValueError."""
    name, _, value = word.partition("=")
    if name in own or name not in VALUES:
        return FLAGS.get(word, {})
    kind = VALUES[name]
    try:
        return {name: BOOL_WORDS[value.lower()] if kind is bool else kind(value)}
    except (KeyError, ValueError) as error:
        expected = "on or off" if kind is bool else f"of type {kind.__name__}"
        raise ValueError(f"{word}: it must be {expected}") from error

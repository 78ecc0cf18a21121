"""The distribution of sampled text, computed by enumerating all random choices.

    lab.distribution_difference(lab.METHODS["dyspec"](N=3), lab.Sampling(0.8))  # below 1e-6

A trial makes its random choices by `Choices.choose`. `every_outcome` runs it once for each
combination of choices and returns each result with its probability. So the probability of every
text can be added up, and compared with the target's own:

    found = text_distribution(write)  # write(choices) returns a text
    assert difference(found, model_distribution(target, n_tokens, warp)) < 1e-6

The number of combinations grows fast, so a vocabulary must be a few ids, and a text a few tokens.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TypeVar

import torch
from torch import Tensor

from draft_tree import Settings
from dynatree_lab.generation.config import GenerationConfig
from dynatree_lab.generation.generate import generate
from dynatree_lab.generation.process import Process
from dynatree_lab.methods.sampler import DrawingSampler, Sampling
from gpt_neox import Config, GPTNeoX, KVCache, Model

CPU = torch.device("cpu")
Text = tuple[int, ...]
Distribution = dict[Text, float]
Result = TypeVar("Result")


@torch.inference_mode()
def distribution_difference(
    settings: Settings,
    sampling: Sampling,
    n_tokens: int = 3,
    *,
    models: tuple[Model, Model] | None = None,
    process: Process | None = None,
    **options: object,
) -> float:
    """Return how far a method's sampled text is from the target's own: the total variation distance
    of the distributions of texts, 0 to 1. Rounding makes it up to 1e-6, a lossy acceptance more.

    Args:
        settings: the method. Its acceptance must make all random choices by the sampler that it
            gets, and nothing may depend on time.
        n_tokens: of the texts. A tree is at most n_tokens - 2 deep. With 4, only small trees end
            within a minute.
        models: target and draft of a few ids; None for random ones of three ids.
        process: changes the target's logits, also those that the text is compared with.
        options: other fields of GenerationConfig, such as acceptance.

    Raises ValueError for what GenerationConfig refuses.
    """
    target, draft = models or (tiny_model(9, n_ids=3), tiny_model(10, n_ids=3))

    def write(choices: Choices) -> Text:
        given = given_sampler(sampling, Scripted(sampling, choices))
        config = GenerationConfig(settings, sampling=given, **options)
        steps = generate(target, draft, [0], config, n_tokens, process=process)
        return tuple(token for step in steps for token in step.tokens)

    own = Processed(target, process) if process else target
    warp = sampling.sampler(CPU).target_distribution
    return difference(text_distribution(write), model_distribution(own, n_tokens, warp))


class Choices:
    """A source of scripted choices, which records the probability of each."""

    def __init__(self, script: list[int]):
        """script: the option that each choice takes, an index among the possible ones."""
        self.script = script
        self.n_options: list[int] = []
        self.probabilities: list[float] = []

    def choose(self, probabilities: list[float]) -> int:
        """Return the option that the script says, or the first possible one after its end."""
        possible = [i for i, probability in enumerate(probabilities) if probability > 0]
        place = len(self.n_options)
        self.n_options.append(len(possible))
        chosen = possible[self.script[place] if place < len(self.script) else 0]
        self.probabilities.append(probabilities[chosen])
        return chosen


class ScriptedUniform:
    """A number u, uniform on [0, 1), that can be compared only once, as u < p."""

    def __init__(self, choose: Callable[[list[float]], int]):
        self.choose = choose
        self.is_known = False

    def __lt__(self, probability: float) -> bool:
        assert not self.is_known, "two rows share one uniform number"
        self.is_known = True
        probability = min(max(0.0, float(probability)), 1.0)  # nan becomes 0, as x < nan is False
        return self.choose([probability, 1 - probability]) == 0


class Scripted(DrawingSampler):
    """A sampler whose random choices are all scripted."""

    def __init__(self, sampling: Sampling, choices: Choices):
        super().__init__(sampling, CPU)
        self.choose = choices.choose

    def draw_several(self, probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
        ids = torch.tensor([self.draw_row(row, k) for row in probs.tolist()])
        return ids, probs.gather(1, ids)

    def draw_row(self, probs: list[float], k: int) -> list[int]:
        """Draw k ids without replacement; impossible ids follow when no possible one is left."""
        drawn: list[int] = []
        for _ in range(k):
            left = [0.0 if i in drawn else p for i, p in enumerate(probs)]
            total = sum(left)
            if total > 0:
                drawn.append(self.choose([p / total for p in left]))
            else:
                drawn.append(next(i for i in range(len(probs)) if i not in drawn))
        return drawn

    def draw(self, probs: Tensor) -> int:
        return self.draw_row(probs.tolist(), 1)[0]

    def uniform(self) -> ScriptedUniform:
        return ScriptedUniform(self.choose)


def given_sampler(sampling: Sampling, sampler: DrawingSampler) -> SimpleNamespace:
    """Return an object that can replace a Sampling that is not greedy; its sampler is given."""
    names = "temperature", "draft_temperature"
    found = {name: getattr(sampling, name) for name in names}
    found |= {"is_greedy": False, "draws_candidates": True, "sampler": lambda _: sampler}
    return SimpleNamespace(**found)


def every_outcome(trial: Callable[[Choices], Result]) -> Iterator[tuple[Result, float]]:
    """Yield each result of `trial` and its probability, for all combinations of choices."""
    script: list[int] | None = []
    while script is not None:
        choices = Choices(script)
        result = trial(choices)
        yield result, math.prod(choices.probabilities)
        n_unscripted = len(choices.n_options) - len(script)
        script = next_script(script + [0] * n_unscripted, choices.n_options)


def next_script(taken: list[int], n_options: list[int]) -> list[int] | None:
    """Return the next combination, counting up from the last choice; None after the last one."""
    for i in reversed(range(len(taken))):
        if taken[i] + 1 < n_options[i]:
            return taken[:i] + [taken[i] + 1]
    return None


def text_distribution(write: Callable[[Choices], Text]) -> Distribution:
    """Return the probability of each text that `write` may return."""
    found: Distribution = defaultdict(float)
    for text, probability in every_outcome(write):
        found[text] += probability
    return found


def model_distribution(
    model: Model, n_tokens: int, warp: Callable[[Tensor], Tensor]
) -> Distribution:
    """Return the probability of each text of n_tokens that a model writes after token 0. warp:
    maps logits [1, V] to the probabilities of the next token."""
    found: Distribution = {(): 1.0}
    for _ in range(n_tokens):
        longer = {}
        for text, probability in found.items():
            tokens = [0, *text]
            logits = model.prefill(tokens, model.new_cache(len(tokens)))
            probs = warp(logits)[0]
            for token, p in enumerate(probs.tolist()):
                longer[*text, token] = probability * p
        found = longer
    return found


def difference(one: Distribution, other: Distribution) -> float:
    """Return the total variation distance: 0 if the distributions are equal, 1 if they have no
    text in common."""
    return sum(abs(one.get(text, 0.0) - other.get(text, 0.0)) for text in one | other) / 2


def tiny_model(seed: int, n_ids: int) -> GPTNeoX:
    """Return a float64 model of one layer and two heads, whose random weights are large enough for
    some texts to be much likelier than others."""
    torch.manual_seed(seed)
    model = GPTNeoX(Config(n_ids, 8, 1, 2, 16, 16, 1.0, 10000.0))
    for weight in model.parameters():
        torch.nn.init.normal_(weight)
    return model.double().requires_grad_(False)


class Processed:
    """A model whose logits are processed, for model_distribution."""

    def __init__(self, model: Model, process: Process):
        self.model, self.process, self.new_cache = model, process, model.new_cache

    def prefill(self, tokens: list[int], cache: KVCache) -> Tensor:
        return self.process(self.model.prefill(tokens, cache), [tokens])

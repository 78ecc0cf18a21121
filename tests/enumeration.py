"""The distribution of sampled text, computed by enumerating all random choices.

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
from typing import TypeVar

import torch
from torch import Tensor

from gpt_neox import Config, GPTNeoX, Model

Text = tuple[int, ...]
Distribution = dict[Text, float]
Result = TypeVar("Result")


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

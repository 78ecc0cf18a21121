"""Tests of what a caller may give to generate: a logits processor, a rule, a drafter, an
acceptance, and models of their own."""

import math
import random
from collections.abc import Sequence

import numpy
import pytest
import torch
from fast import Only, fix_shapes, noisy_pair, pretend_capture, random_model
from growing import random_settings
from numpy import ndarray
from small import run
from torch import Tensor

import dynatree
from draft_tree import DynaTree, DynaTreeRule, Gates, Level, Tree
from dynatree import ModelDrafter
from dynatree_lab.engine.model import FastGPTNeoX
from dynatree_lab.enumeration import distribution_difference
from dynatree_lab.generation.config import GenerationConfig
from dynatree_lab.generation.generate import generate
from dynatree_lab.generation.process import Process, RowTexts, processed
from dynatree_lab.methods import METHODS
from dynatree_lab.methods.dyspec import DySpec
from dynatree_lab.methods.rules import MethodRule
from dynatree_lab.methods.sampler import Sampling
from gpt_neox import GPTNeoX
from sampling import Sampler
from verify import accept_greedy

PROMPT = [3, 14, 15, 92, 65]
KINDS = pytest.mark.parametrize("kind", [GPTNeoX, FastGPTNeoX], ids=["core", "engine"])
GREEDY_CONFIG = GenerationConfig(DynaTree(tau=0.001, rho_stop=0.002, N_max=32))


def penalised(logits: Tensor, texts: Sequence[list[int]]) -> Tensor:
    """Divide by 2, or multiply, the logits of ids that a text has, and forbid its latest id."""
    for row, text in enumerate(texts):
        ids = torch.tensor(sorted(set(text)))
        x = logits[row, ids]
        logits[row, ids] = torch.where(x > 0, x / 2, x * 2)
        logits[row, text[-1]] = -torch.inf
    return logits


def own_text(target: GPTNeoX, process: Process, n_tokens: int) -> list[int]:
    """Return the greedy text of a target whose logits are processed, token by token."""
    text = list(PROMPT)
    for _ in range(n_tokens):
        logits = run(target, text)[-1:].clone()
        text.append(process(logits, [text]).argmax().item())
    return text[len(PROMPT) :]


def written(steps: Sequence[dynatree.Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


@KINDS
@pytest.mark.parametrize("method", ["dynatree", "graft base=dyspec:N=12", "auto", "ar"])
def test_processed_greedy_text_is_the_targets(
    kind: type[GPTNeoX], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_capture(monkeypatch)
    target, draft = noisy_pair(5, kind=kind)
    if kind is FastGPTNeoX:
        fix_shapes(target)
    config = GenerationConfig.parse(*method.split())
    inspected: list[Tensor] = []
    options = {"process": penalised, "inspect": inspected.append}
    steps = list(generate(target, draft, PROMPT, config, 40, **options))
    text = written(steps)
    assert text == own_text(random_model(5, kind=GPTNeoX), penalised, 40)
    assert text != written(list(generate(target, draft, PROMPT, config, 40)))
    # `inspect` gets the target's own logits
    own = run(random_model(5, kind=GPTNeoX), PROMPT + text[:-1])[-40:]
    torch.testing.assert_close(torch.cat(inspected), own, atol=1e-3, rtol=0)


@pytest.mark.parametrize("words", ["dyspec N=4", "linear K=2 traversal", "dynatree tau=0"])
@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7, 0.8)], ids=["plain", "top-p"])
def test_processed_sampled_text_is_exact(words: str, sampling: Sampling) -> None:
    """Enumerate all random choices."""
    config = GenerationConfig.parse(*words.split())
    options = {"process": penalised, "acceptance": config.acceptance}
    assert distribution_difference(config.settings, sampling, **options) < 1e-6


def test_texts_are_those_of_the_rows() -> None:
    tree = Tree.from_root(7)
    for token, parent in [(1, 0), (2, 0), (3, 1), (4, 2)]:
        tree.add(token, parent, 0.0)
    texts = RowTexts([5, 6], tree)
    expected = [[5, 6, 7], [5, 6, 7, 1], [5, 6, 7, 2], [5, 6, 7, 1, 3], [5, 6, 7, 2, 4]]
    assert list(texts) == expected and len(texts) == 5 and texts[-1] == expected[-1]
    assert texts[1:3] == expected[1:3]
    texts.committed.append(9)  # as the text goes on
    assert texts[0] == expected[0]
    with pytest.raises(IndexError):
        texts[5]


def test_a_row_that_overflowed_stays_rejected() -> None:
    """Let the process make all logits finite, also those of a row that had none."""
    tree, logits = Tree.from_root(7), torch.zeros(2, 3)
    _, is_finite = processed(lambda logits, texts: logits, logits, [True, False], [], tree)
    assert is_finite == [True, False]


@KINDS
def test_a_row_without_a_possible_token_is_an_error_of_process(kind: type[GPTNeoX]) -> None:
    """Let the process forbid every token after the tenth. The ten are written."""
    target, draft = noisy_pair(5, kind=kind)

    def ends(logits: Tensor, texts: Sequence[list[int]]) -> Tensor:
        for row, text in enumerate(texts):
            if len(text) >= len(PROMPT) + 10:
                logits[row] = -torch.inf
        return logits

    tokens: list[int] = []
    with pytest.raises(ValueError, match="process left no finite logit"):
        for step in generate(target, draft, PROMPT, GREEDY_CONFIG, 40, process=ends):
            tokens += step.tokens
    assert tokens == written(list(generate(target, draft, PROMPT, GREEDY_CONFIG, 10)))


@pytest.mark.parametrize(
    ("process", "message"),
    [
        (lambda logits, texts: logits[:, 1:], "process gave torch.float32"),
        (lambda logits, texts: None, "process gave NoneType, it must give logits"),
        (lambda logits, texts: logits * math.nan, "or made one nan or inf"),
        (lambda logits, texts: logits.double() * 1e300, "or made one nan or inf"),
    ],
)
def test_a_wrong_process_is_named(process: Process, message: str) -> None:
    target, draft = noisy_pair(5)
    with pytest.raises(ValueError, match=message):
        list(generate(target, draft, PROMPT, GREEDY_CONFIG, 9, process=process))


@KINDS
def test_a_rule_a_drafter_and_an_acceptance_may_be_given(kind: type[GPTNeoX]) -> None:
    """The core's own parts write the same trees and texts as in the core's loop, sampled too."""
    target, draft = noisy_pair(5, kind=kind)
    reference, other = noisy_pair(5, kind=GPTNeoX)
    for make in (lambda: accept_greedy, lambda: Sampler(3.0, 0.9, seed=1)):
        settings = DynaTree(tau=0.001, rho_stop=0.002)
        given = {"rule": settings.make_rule(), "accept": make(), "drafter": ModelDrafter(draft)}
        found = list(generate(target, None, PROMPT, GenerationConfig(DySpec()), 40, **given))
        parts = ModelDrafter(other), PROMPT, settings.make_rule(), 40
        expected = list(dynatree.generate(reference, *parts, accept=make()))
        assert [step.tokens for step in found] == [step.tokens for step in expected]
        assert [step.tree.parents for step in found] == [step.tree.parents for step in expected]


def test_slots_that_contradict_are_refused() -> None:
    target, draft = noisy_pair(5)
    used = DynaTree().make_rule()
    list(generate(target, draft, PROMPT, GREEDY_CONFIG, 9, rule=used))
    wide = MethodRule(4, 4, 300)
    strict = GenerationConfig(DynaTree(), strict=True)
    for options, config, message in [
        ({"drafter": ModelDrafter(draft)}, GREEDY_CONFIG, "drafter replaces the draft"),
        ({"accept": accept_greedy}, GenerationConfig(DynaTree(), sampling=Sampling(1.0)), "greedy"),
        ({"rule": used}, GREEDY_CONFIG, "this DynaTreeRule has served another text; make a new"),
        ({"rule": wide}, strict, "a pass of this method has up to 300 rows"),
    ]:
        with pytest.raises(ValueError, match=message):
            list(generate(target, draft, PROMPT, config, 9, **options))


@pytest.mark.parametrize("method", METHODS)
def test_a_model_needs_what_the_interface_has(method: str) -> None:
    settings = random_settings(method, random.Random(3))
    target, draft = noisy_pair(5, kind=GPTNeoX)
    for sampling in (Sampling(), Sampling(2.0, seed=1)):
        config = GenerationConfig(settings, sampling=sampling)
        models = [(target, draft), (Only(target), Only(draft))]
        texts = [written(generate(*pair, PROMPT, config, 20)) for pair in models]
        if "learned" not in str(settings) and method != "auto" or sampling.is_greedy:
            assert texts[0] == texts[1]


def test_what_only_an_engine_model_has_is_refused() -> None:
    target, draft = noisy_pair(5, kind=GPTNeoX)
    with pytest.raises(ValueError, match="Only has no strict passes, window or rebuilt commit"):
        config = GenerationConfig(DynaTree(), strict=True)
        list(generate(Only(target), draft, PROMPT, config, 9))


# What a rule sees.


class CompleteRule(MethodRule):
    """A rule whose rows have every id as a candidate, so that a level has whole distributions."""

    reads_entropy = True

    def __init__(self, draws: bool):
        super().__init__(96, 3, 40)
        self.draws_candidates = draws
        self.levels: list[Level] = []

    def add_gates(self, level: Level) -> Gates:
        self.levels.append(level)
        return {"rank": numpy.arange(96) < numpy.full((len(level.tokens), 1), 2)}


@KINDS
@pytest.mark.parametrize("draws", [False, True], ids=["top-k", "drawn"])
@pytest.mark.parametrize("is_shaped", [False, True], ids=["tight", "fixed"])
def test_a_rule_may_read_the_entropy(
    kind: type[GPTNeoX], draws: bool, is_shaped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_capture(monkeypatch)
    target, draft = noisy_pair(5, kind=kind)
    if is_shaped and kind is FastGPTNeoX:
        fix_shapes(target)
        fix_shapes(draft)
    sampling = Sampling(1.5, seed=2) if draws else Sampling(draft_temperature=1.5)
    rule = CompleteRule(draws)
    config = GenerationConfig(DynaTree(), sampling=sampling)
    list(generate(target, draft, PROMPT, config, 20, rule=rule))
    assert len(rule.levels) > 10
    for level in rule.levels:
        probs = numpy.exp(level.logprobs.astype(float))
        assert probs.sum(axis=1) == pytest.approx(1, abs=1e-4)
        expected = -(probs * numpy.log(probs)).sum(axis=1)
        assert level.entropy == pytest.approx(expected, abs=1e-3)


class EntropyRule(DynaTreeRule):
    reads_entropy = True

    def breadth(self, level: Level) -> ndarray:
        return numpy.exp(level.entropy).round().clip(1, 3)


def test_a_variant_of_dynatree_replaces_its_breadth() -> None:
    target, draft = noisy_pair(5)
    settings = DynaTree(tau=0.0, rho_stop=0.0, rho_deep=0.001, D0=2, D_max=3)
    variant = EntropyRule(settings)
    found = list(generate(target, draft, PROMPT, GREEDY_CONFIG, 40, rule=variant))
    plain = list(generate(target, draft, PROMPT, GREEDY_CONFIG, 40, rule=settings.make_rule()))
    assert written(found) == written(plain)
    assert [step.tree.parents for step in found] != [step.tree.parents for step in plain]
    assert not hasattr(variant, "max_verified"), "the caller's rule got an attribute"

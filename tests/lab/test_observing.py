"""Tests that every kind of pass shows the same hidden states, and of the order of wrappers."""

from inspect import isroutine, signature

import numpy
import pytest
import torch
from fast import fix_shapes, generate, noisy_pair, pretend_capture, random_model
from torch import Tensor

from draft_tree import Candidates, DynaTree, Rule, Settings, Tree
from dynatree_lab.engine.passes import Window
from dynatree_lab.generation.compose import compose
from dynatree_lab.generation.run import ModelRun
from dynatree_lab.methods import METHODS
from dynatree_lab.methods.auto import Auto
from dynatree_lab.methods.calibration import CalibratedDrafter
from dynatree_lab.methods.cost_gates import CostGates
from dynatree_lab.methods.drawn import DrawnDrafter, DrawnRule
from dynatree_lab.methods.dyspec import DySpec
from dynatree_lab.methods.eagle import HiddenDrafter
from dynatree_lab.methods.method import Method
from dynatree_lab.methods.retrieval import Graft, GraftRule
from dynatree_lab.methods.rules import MethodRule, RuleWrapper, facts_of, hooked
from dynatree_lab.methods.sampler import Sampling
from dynatree_lab.methods.static import Chain, Fixed
from gpt_neox import GPTNeoX

PROMPT = [3, 14, 15, 92, 65]


class Watching(HiddenDrafter):
    """A drafter that proposes the next ids and records the state of every committed token."""

    def start(self, prompt: list[int], capacity: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.seen: list[Tensor] = []
        self.committed: list[Tensor] = []

    def observe_hidden(self, hidden: Tensor) -> None:
        self.seen.append(hidden.clone())

    def draft(self, tree: Tree, rows: list[int], k: int) -> Candidates:
        tokens = numpy.array([tree.tokens[row] for row in rows])
        ids = (tokens[:, None] + numpy.arange(k)) % self.vocab_size
        return Candidates(ids, numpy.full(ids.shape, -1.0, numpy.float32))

    def commit(self, tree: Tree, path: list[int], tokens: list[int]) -> None:
        states, self.seen = torch.cat(self.seen), []
        self.committed.append(states[path] if len(states) == len(tree) else states)


def states_of(target: GPTNeoX, settings: Settings, **options: object) -> tuple[list[int], Tensor]:
    """Return a text without its last token, and the target's state [n, hidden] of each token."""
    drafter, text = Watching(), list(PROMPT)
    for step in generate(target, None, PROMPT, settings, 24, drafter=drafter, **options):
        text += step.tokens
    return text[:-1], torch.cat(drafter.committed)[: len(text) - 1]


def own_states(model: GPTNeoX, text: list[int]) -> Tensor:
    """Return the states [n, hidden] of a text by one pass of a reference model."""
    positions = torch.arange(len(text))
    return model.hidden(torch.tensor(text), positions, model.new_cache(len(text)))


@pytest.mark.parametrize("is_shaped", [False, True], ids=["tight", "fixed"])
@pytest.mark.parametrize("options", [{}, {"strict": True}, {"commit": "rebuild"}])
@pytest.mark.parametrize("settings", [Fixed(D=2, B=3, tau=0.0), Graft(base="linear")])
def test_hidden_states_are_shown_by_every_pass(
    settings: Settings, options: dict, is_shaped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check padded, captured, strict and rebuilt passes, and a rule that reads the target's ids."""
    pretend_capture(monkeypatch)
    target, reference = random_model(5), random_model(5, kind=GPTNeoX)
    if is_shaped:
        fix_shapes(target)
    text, states = states_of(target, settings, **options)
    torch.testing.assert_close(states, own_states(reference, text), atol=1e-4, rtol=0)
    assert states_of(reference, settings)[0] == text


def test_a_window_shows_each_token_once() -> None:
    """Check that all states are shown, although the cache has dropped some tokens."""
    text, states = states_of(random_model(5), Chain(K=3), window=Window(16, 2))
    assert len(states) == len(text) and states.isfinite().all()


@pytest.mark.parametrize("settings", [*(kind() for kind in METHODS.values()), DynaTree()], ids=str)
def test_a_wrapped_rule_is_like_the_rule(settings: Settings) -> None:
    """Check all hooks and the facts."""
    rule = hooked(settings.make_rule())
    wrapped = RuleWrapper(RuleWrapper(rule))
    assert wrapped.facts == facts_of(rule)
    hooks = [name for name, value in vars(MethodRule).items() if isroutine(value)]
    hooks += [name for name, value in vars(Rule).items() if isroutine(value)]
    hooks = [name for name in dict.fromkeys(hooks) if name[0] != "_"]
    for name in hooks:
        given = tuple(range(len(signature(getattr(wrapped, name)).parameters)))
        calls = []
        setattr(rule, name, lambda *given, name=name, calls=calls: calls.append(given) or name)
        has_result = name not in ("adapt", "start", "observe_target")
        assert getattr(wrapped, name)(*given) == (name if has_result else None)
        assert calls == [given]


def test_the_parts_of_a_method_are_wrapped_in_one_order() -> None:
    """Check the order of the wrappers. Cost gates must get drawn values and calibrated
    probabilities. The acceptance must read the distributions of the drafter below the
    calibration."""
    target, draft = (ModelRun(model, 39) for model in noisy_pair(3, kind=GPTNeoX))
    method = Method(Graft(base="dyspec:N=6"), calibrate=True, costs="learned")
    parts = compose(target, draft, method, Sampling(1.0))
    assert len(target.on_pass) == 1 and not draft.on_pass
    calibrated, rule = parts.drafter, parts.rule
    assert isinstance(calibrated, CalibratedDrafter)
    assert isinstance(calibrated.drafter, DrawnDrafter)
    assert parts.accept is calibrated.drafter.sampler and rule.drafter is calibrated.drafter
    assert isinstance(rule, DrawnRule) and rule.calibrated is calibrated
    assert isinstance(rule.rule, CostGates) and isinstance(rule.rule.rule, GraftRule)
    head = Watching()
    for method in (Method(DySpec(N=4), calibrate=True), Method(Auto())):
        parts = compose(target, head, method, Sampling(1.0))
        found = parts.drafter
        assert (found.drafter if isinstance(found, CalibratedDrafter) else found) is head

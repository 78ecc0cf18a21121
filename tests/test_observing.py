"""What a target shows: the same hidden states on every kind of pass; and wrappers in one order."""

from pathlib import Path

import numpy
import pytest
import torch
from conftest import fix_shapes, generate, noisy_pair, pretend_capture, random_model
from numpy import ndarray
from test_tensor_parallel import small, with_ranks
from torch import Tensor

from draft_tree import Candidates, Settings, Tree
from engine.model import FastGPTNeoX
from engine.passes import Window
from gpt_neox import GPTNeoX
from methods.auto import Auto
from methods.calibration import CalibratedDrafter
from methods.compose import compose
from methods.compose import generate as compose_generate
from methods.cost_gates import CostGates
from methods.drawn import DrawnDrafter, DrawnRule
from methods.dyspec import DySpec
from methods.observing import HiddenDrafter, ObservedModel
from methods.retrieval import Graft, GraftRule
from methods.sampler import Sampling
from methods.static import Chain, Fixed

PROMPT = [3, 14, 15, 92, 65]


class Watching(HiddenDrafter):
    """Proposes the next ids, and keeps the state of every committed token."""

    def start(self, prompt: list[int], capacity: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.seen: list[Tensor] = []
        self.committed: list[Tensor] = []

    def observe_hidden(self, hidden: Tensor) -> None:
        self.seen.append(hidden.clone())

    def draft(self, tokens: list[int], parents: list[int] | None, k: int) -> Candidates:
        ids = (numpy.array(tokens)[:, None] + numpy.arange(k)) % self.vocab_size
        return Candidates(ids, numpy.full(ids.shape, -1.0, numpy.float32))

    def commit(self, tree: Tree, path: list[int], tokens: list[int]) -> None:
        states, self.seen = torch.cat(self.seen), []
        self.committed.append(states[path] if len(states) == len(tree) else states)


def states_of(target: GPTNeoX, settings: Settings, **way: object) -> tuple[list[int], Tensor]:
    """A text, and the target's state of each of its tokens but the last one."""
    drafter, text = Watching(), list(PROMPT)
    for step in generate(target, drafter, PROMPT, settings, 24, **way):
        text += step.tokens
    return text[:-1], torch.cat(drafter.committed)[: len(text) - 1]


def own_states(model: GPTNeoX, text: list[int]) -> Tensor:
    """The same by one pass of a plain model."""
    positions = torch.arange(len(text))
    return model.hidden(torch.tensor(text), positions, model.new_cache(len(text)))


@pytest.mark.parametrize("is_shaped", [False, True], ids=["tight", "fixed"])
@pytest.mark.parametrize("way", [{}, {"strict": True}, {"commit": "rebuild"}])
@pytest.mark.parametrize("settings", [Chain(K=3), Fixed(D=2, B=3, tau=0.0), Graft(base="linear")])
def test_hidden_states_are_shown_by_every_pass(
    settings: Settings, way: dict, is_shaped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded, captured, strict and rebuilt ones; also below a rule that reads the target."""
    pretend_capture(monkeypatch)
    target, plain = random_model(5), random_model(5, kind=GPTNeoX)
    if is_shaped:
        fix_shapes(target)
    text, states = states_of(target, settings, **way)
    torch.testing.assert_close(states, own_states(plain, text), atol=1e-4, rtol=0)
    assert states_of(plain, settings)[0] == text


def test_hidden_states_are_shown_by_a_fast_model_in_the_cores_loop() -> None:
    """Without engine.generate, by FastGPTNeoX.hidden."""
    target, drafter, text = random_model(5), Watching(), list(PROMPT)
    for step in compose_generate(target, drafter, PROMPT, Chain(K=3), 24):
        text += step.tokens
    states = torch.cat(drafter.committed)[: len(text) - 1]
    expected = own_states(random_model(5, kind=GPTNeoX), text[:-1])
    torch.testing.assert_close(states, expected, atol=1e-4, rtol=0)


def test_a_window_shows_what_was_read() -> None:
    """Of each token once, though the cache has dropped some."""
    text, states = states_of(random_model(5), Chain(K=3), window=Window(16, 2))
    assert len(states) == len(text) and states.isfinite().all()


def text_and_states(target: FastGPTNeoX, folder: Path) -> tuple[list[int], ndarray]:
    text, states = states_of(target, Fixed(D=2, B=2, tau=0.0))
    return text, states.numpy()


def test_hidden_states_are_shown_by_ranks(tmp_path: Path) -> None:
    """Each rank has all of a state, and rank 0 shows it."""
    folder = small(tmp_path)
    text, states = with_ranks(2, folder, text_and_states)
    expected = own_states(GPTNeoX.from_pretrained(folder), text)
    torch.testing.assert_close(torch.from_numpy(states), expected, atol=1e-4, rtol=0)


def test_the_parts_of_a_method_are_wrapped_in_one_order() -> None:
    """Gates of cost see drawn values and calibrated probabilities, and the acceptance reads what
    the drafter below the calibration drew from."""
    target, draft = noisy_pair(3, kind=GPTNeoX)
    base = "dyspec:N=6:calibrate=on:costs=learned"
    parts = compose(target, draft, Graft(base=base), Sampling(1.0))
    assert isinstance(parts.target, ObservedModel)
    calibrated, rule = parts.drafter, parts.rule
    assert isinstance(calibrated, CalibratedDrafter)
    assert isinstance(calibrated.drafter, DrawnDrafter)
    assert parts.accept.drafter is calibrated.drafter is rule.drafter
    assert isinstance(rule, DrawnRule) and rule.calibrated is calibrated
    assert isinstance(rule.rule, CostGates) and isinstance(rule.rule.rule, GraftRule)
    head = Watching()
    for settings in (DySpec(N=4, calibrate=True), Auto()):
        parts = compose(target, head, settings, Sampling(1.0))
        found = parts.drafter
        assert (found.drafter if isinstance(found, CalibratedDrafter) else found) is head

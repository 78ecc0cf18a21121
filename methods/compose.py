"""Assembly of a method's parts, in the order in which they must wrap each other.

    for step in generate(target, draft, prompt, DySpec(), 64, sampling=Sampling(0.8)):
        print(step.tokens)

From the inside out:

    drafter  gives drawn or top-k candidates; over an EAGLE head (eagle.py), gets the target's
             hidden states; then calibrated (calibration.py), so that all readers of its
             candidates get acceptance probabilities
    rule     the method's own, which may have cost gates; then traced (cli/trace.py), so that the
             trace gets the same levels as the rule; then given drawn levels (drawn.py)
    target   observed by a drafter that reads hidden states, and by a rule that reads the target's
             best tokens (observing.py)
    accept   greedy, or the acceptance of sampled text, which reads the distributions that the
             drafter drew from
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import dynatree
from draft_tree import Rule, Settings
from dynatree import Drafter, Step
from gpt_neox import Model
from methods.acceptances import Accept, choose_acceptance
from methods.calibration import CalibratedDrafter
from methods.drawn import DrawnDrafter, DrawnRule
from methods.eagle import EagleDrafter, head_of, require_size
from methods.observing import HiddenDrafter, HiddenModel, ObservedModel
from methods.rules import make_rule
from methods.sampler import GREEDY, Sampling, TemperedDrafter
from verify import Acceptance, accept_greedy


class Kit(NamedTuple):
    """The classes of the parts. The engine has faster ones."""

    drafter: Callable[..., Drafter] = TemperedDrafter
    observed: Callable[..., Model] = ObservedModel
    hidden: Callable[..., Model] = HiddenModel
    accept: Callable[..., Acceptance] = Accept
    accept_greedy: Acceptance = accept_greedy


DEFAULT_KIT = Kit()


class Parts(NamedTuple):
    """The four arguments of dynatree.generate that a method wraps."""

    target: Model
    drafter: Drafter | None
    rule: Rule
    accept: Acceptance


def compose(
    target: Model,
    draft: Model | Drafter | None,
    settings: Settings,
    sampling: Sampling = GREEDY,
    acceptance: str | None = None,
    kit: Kit = DEFAULT_KIT,
    trace: Callable[[Rule, CalibratedDrafter | None], Rule] | None = None,
) -> Parts:
    """Return the parts of a method.

    Args:
        draft: a model, which may be an EAGLE head; or a Drafter, whose own candidates are used
            even if text is sampled.
        acceptance: a name of methods.acceptances.ACCEPTANCES; None for the method's default.
        kit: the classes to use.
        trace: trace(rule, calibrated) returns the rule, traced. calibrated: the drafter that
            calibrates its candidates, or None.

    Raises ValueError if the method does not support the acceptance, and for a head of a target of
    another size.
    """
    rule = make_rule(settings)
    sampler = sampling.sampler(target.device)
    proposing = calibrated = None  # `proposing` chooses the candidates
    if rule.max_depth and draft is not None:
        if isinstance(draft, Drafter):
            proposing = draft
        elif rule.draws_candidates and sampling.draws_candidates:
            proposing = DrawnDrafter(draft, sampler, rule.n_drawn)
        else:
            proposing = kit.drafter(draft, sampling.top_k_temperature)
    drafter = proposing
    if drafter and not isinstance(drafter, HiddenDrafter) and (head := head_of(draft)):
        require_size(head, target)
        drafter = EagleDrafter(drafter, head)
    if isinstance(drafter, HiddenDrafter):
        target = kit.hidden(target, drafter)
    if drafter and rule.is_calibrated:
        drafter = calibrated = CalibratedDrafter(drafter, isinstance(proposing, DrawnDrafter))
    if rule.target_top_k or rule.reads_prompt:
        target = kit.observed(target, rule)
    if trace:
        rule = trace(rule, calibrated)
    if isinstance(proposing, DrawnDrafter):
        rule = DrawnRule(rule, proposing, calibrated)
    if acceptance and sampling.is_greedy:
        raise ValueError(f"{acceptance} is for sampled text, and this is greedy")
    accept = kit.accept_greedy
    if not sampling.is_greedy:
        accept = kit.accept(choose_acceptance(rule, acceptance), sampler, proposing)
    return Parts(target, drafter, rule, accept)


def generate(
    target: Model,
    draft: Model | Drafter | None,
    prompt: Sequence[int],
    settings: Settings,
    max_new_tokens: int,
    *,
    eos_ids: Sequence[int] = (),
    sampling: Sampling = GREEDY,
    acceptance: str | None = None,
) -> Iterator[Step]:
    """Decode with any method on models of gpt_neox.py; the loop is dynatree.generate."""
    target, drafter, rule, accept = compose(target, draft, settings, sampling, acceptance)
    return dynatree.generate(
        target, drafter, prompt, rule, max_new_tokens, eos_ids=eos_ids, accept=accept
    )

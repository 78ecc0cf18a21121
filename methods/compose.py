"""The parts of a method, wrapped in the one right order around the core's loop.

    for step in generate(target, draft, prompt, DySpec(), 64, sampling=Sampling(0.8)):
        print(step.tokens)

From the inside out:

    drafter  draws or ranks candidates; calibrated (calibration.py), so that whoever reads its
             candidates reads acceptance probabilities
    rule     the method's, in gates of cost if it has them; traced (cli/trace.py), which must see
             what the rule sees; shown its levels as drawn ones (drawn.py)
    target   observed for a drafter that reads hidden states, and for a rule that reads the best
             tokens (observing.py)
    accept   greedy, or the acceptance of sampled text, which reads what the drafter drew from
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
from methods.observing import HiddenDrafter, HiddenModel, ObservedModel
from methods.rules import make_rule
from methods.sampler import GREEDY, Sampling, TemperedDrafter
from verify import Acceptance, accept_greedy


class Kit(NamedTuple):
    """The classes that the parts are made of. The engine has faster ones."""

    drafter: Callable[..., Drafter] = TemperedDrafter
    observed: Callable[..., Model] = ObservedModel
    hidden: Callable[..., Model] = HiddenModel
    accept: Callable[..., Acceptance] = Accept
    accept_greedy: Acceptance = accept_greedy


PLAIN = Kit()


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
    kit: Kit = PLAIN,
    trace: Callable[[Rule, CalibratedDrafter | None], Rule] | None = None,
) -> Parts:
    """Return the parts of a method.

    Args:
        draft: a Drafter proposes its own candidates, so nothing is drawn from it.
        acceptance: a name of methods.acceptances.ACCEPTANCES; None for the method's default.
        kit: the classes to use.
        trace: wraps the rule, given it and the drafter that calibrates its candidates, if any.

    Raises ValueError for an acceptance that the method cannot have.
    """
    rule = make_rule(settings)
    sampler = sampling.sampler(target.device)
    drafter = calibrated = None
    if rule.max_depth and draft is not None:
        if isinstance(draft, Drafter):
            drafter = draft
            if isinstance(draft, HiddenDrafter):
                target = kit.hidden(target, draft)
        elif rule.draws_candidates and sampling.draws_candidates:
            drafter = DrawnDrafter(draft, sampler, rule.n_drawn)
        else:
            drafter = kit.drafter(draft, sampling.top_k_temperature)
    proposing = drafter
    if drafter and rule.is_calibrated:
        drafter = calibrated = CalibratedDrafter(drafter, isinstance(drafter, DrawnDrafter))
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
    """Decode with any method on plain models: dynatree.generate around `compose`."""
    target, drafter, rule, accept = compose(target, draft, settings, sampling, acceptance)
    return dynatree.generate(
        target, drafter, prompt, rule, max_new_tokens, eos_ids=eos_ids, accept=accept
    )

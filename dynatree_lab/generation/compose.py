"""Assembly of a method's parts, in the order in which they must wrap each other.

    parts = compose(target, draft, Method(DySpec()), Sampling(0.8))

dynatree.generate runs the parts. From the inside out:

    drafter  chooses drawn or top-k candidates; over an EAGLE head (methods/eagle.py), gets the
             target's hidden states; then calibrated (methods/calibration.py), so that all readers
             of its candidates get acceptance probabilities
    rule     the method's own, which may have cost gates; then recorded (record.py), so that the
             record gets the same levels as the rule; then given drawn levels (methods/drawn.py)
    target   shows its hidden states to a drafter that reads them, and its best tokens to a rule
             that reads those
    accept   for sampled text; reads the distributions from which the drafter drew, if it did
"""

from typing import NamedTuple

from torch import Tensor

from draft_tree import Candidates, Rule
from dynatree import Drafter, ModelDrafter
from dynatree_lab.engine.scores import Ranking
from dynatree_lab.generation.record import RecordedRule
from dynatree_lab.generation.run import ModelRun
from dynatree_lab.methods.acceptances import choose_acceptance
from dynatree_lab.methods.calibration import CalibratedDrafter
from dynatree_lab.methods.drawn import DrawnDrafter, DrawnRule
from dynatree_lab.methods.eagle import (
    EagleDrafter,
    EagleHead,
    HiddenDrafter,
    head_of,
    require_size,
)
from dynatree_lab.methods.method import Method
from dynatree_lab.methods.sampler import GREEDY, DrawingSampler, Sampling
from dynatree_lab.replay.draft import RecordedDraft, RecordedDrafter
from dynatree_lab.replay.texts import ReplayError


class Parts(NamedTuple):
    """The arguments of dynatree.generate that a method decides."""

    drafter: Drafter | None
    rule: Rule
    accept: DrawingSampler | None  # None for greedy text
    recorded: RecordedRule | None = None


class RankedDrafter(ModelDrafter):
    """A draft model whose passes rank the candidates, so that `choose` reads no logits."""

    def __init__(self, model: ModelRun, ranking: Ranking):
        super().__init__(model)
        self.ranking = ranking

    def choose(self, logits: Tensor, k: int) -> Candidates:
        return self.model.scores.top_candidates(self.ranking._replace(k=k), self.vocab_size)


def draft_ranking(method: Method, sampling: Sampling) -> Ranking:
    """Return the Ranking of the draft's logits: the top k, or none if the device draws the
    candidates."""
    if method.can_draw and sampling.draws_candidates:
        return Ranking(is_read=False)
    temperature = method.draft_temperature(sampling)
    return Ranking(method.max_branches, True, True, temperature, method.facts.reads_entropy)


def source_of_candidates(
    draft: ModelRun | Drafter | None, method: Method, sampling: Sampling, sampler: DrawingSampler
) -> Drafter | None:
    """Return the drafter that chooses the candidates; None for a method that does not draft."""
    if not method.max_depth:
        return None
    if isinstance(draft, Drafter):
        return draft
    is_recorded = isinstance(getattr(draft, "model", None), RecordedDraft)
    if is_recorded and (method.make_drafter or method.facts.reads_entropy):
        raise ReplayError("the method reads more of a draft than its candidates; add the draft")
    if method.make_drafter:
        return method.make_drafter(draft)
    if draft is None:
        return None
    ranking = draft_ranking(method, sampling)
    if is_recorded:
        return RecordedDrafter(draft, ranking.temperature, reads_all=method.is_calibrated)
    if ranking.is_read:
        return RankedDrafter(draft, ranking)
    return DrawnDrafter(draft, sampler, method.facts.n_drawn, method.facts.reads_entropy)


def require_hidden(target: ModelRun) -> None:
    """Raise ValueError for a target whose passes do not give hidden states."""
    if not all(hasattr(target.model, name) for name in ("hidden", "logits")):
        name = type(target.model).__name__
        raise ValueError(f"{name} has no hidden and logits as GPTNeoX has, this drafter needs them")


def with_states(
    drafter: Drafter | None, head: EagleHead | None, target: ModelRun
) -> Drafter | None:
    """Return the drafter; over an EAGLE head, one that gives the head the target's hidden states.
    The target shows them to every drafter that reads them. Raises ValueError."""
    if drafter and head and not isinstance(drafter, HiddenDrafter):
        require_size(head, target)
        drafter = EagleDrafter(drafter, head)
    if isinstance(drafter, HiddenDrafter):
        require_hidden(target)
        target.show_hidden(drafter.observe_hidden)
    return drafter


def compose(
    target: ModelRun,
    draft: ModelRun | Drafter | None,
    method: Method,
    sampling: Sampling = GREEDY,
    acceptance: str | None = None,
    is_recorded: bool = False,
) -> Parts:
    """Return the parts of a method, which has a new rule.

    Args:
        draft: a model, which may be an EAGLE head; or a Drafter, whose own candidates are used
            even if text is sampled.
        acceptance: a name of methods.acceptances.ACCEPTANCES; None for the method's default.
        is_recorded: give the parts a rule that keeps the record of its latest tree.

    Raises ValueError if the method does not support the acceptance, and for a head of a target of
    another size.
    """
    rule, sampler = method.make_rule(), sampling.sampler(target.device)
    drafter = source_of_candidates(draft, method, sampling, sampler)
    drawn = drafter if isinstance(drafter, DrawnDrafter) else None
    if not sampling.is_greedy:
        sampler.accept = choose_acceptance(method.facts, acceptance, is_drawn=drawn is not None)
    elif acceptance:
        raise ValueError(f"{acceptance} is for sampled text, and this is greedy")
    drafter = with_states(drafter, head_of(drafter), target)
    calibrated = recorded = None
    if drafter and method.is_calibrated:
        drafter = calibrated = CalibratedDrafter(drafter, is_drawn=drawn is not None)
    if k := method.facts.target_top_k:
        target.show_top_ids(k, rule.observe_target)
    if is_recorded:
        rule = recorded = RecordedRule(rule, calibrated)
        sampler.on_trial = recorded.add_trial
    if drawn:
        rule = DrawnRule(rule, drawn, calibrated)
    return Parts(drafter, rule, None if sampling.is_greedy else sampler, recorded)

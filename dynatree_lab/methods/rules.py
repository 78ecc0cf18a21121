"""Parts that rules share: facts, a wrapper, drawn levels, and trees with retrieved rows.

Shapes: N tree rows, n rows of a level, k candidates per row.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from heapq import heappop, heappush
from typing import NamedTuple

from numpy import ndarray

from draft_tree import MAX_ROWS, DynaTreeRule, Gates, Level, Rule, Tree, passing

# The hooks that decide which candidates become rows. A rule with one of its own gets drawn
# candidates only if it says so (docs/method.md, "Sampled text")
ADDING = ("add_gates", "breadth", "finish_tree")


class MethodRule(Rule):
    """A rule with more hooks. It may have attributes with the names of Facts."""

    is_chain = False

    def __init__(
        self, max_branches: int, max_depth: int, max_rows: int, max_verified: int | None = None
    ):
        """
        Args:
            max_rows: rows at which a tree stops growing.
            max_verified: rows of the tree that finish_tree returns; None: max_rows.
        """
        super().__init__(max_branches, max_depth, max_rows)
        self.max_verified = max_rows if max_verified is None else max_verified
        if self.max_verified > MAX_ROWS:
            raise ValueError(f"max_verified is {self.max_verified}, it must be at most {MAX_ROWS}")
        self.n_drawn = max_branches  # candidates per row if they are drawn

    def start(self, prompt: list[int]) -> None:
        """Begin a text with this prompt."""

    def observe_target(self, tokens: list[int], top_ids: ndarray) -> None:
        """Observe the target's best ids [n, target_top_k] after n tokens of a prompt or tree."""

    def finish_tree(self, tree: Tree) -> Tree:
        return best_rows(tree, self.max_verified)

    def state(self) -> dict[str, float | str]:
        """Return the rule's current parameters, for traces: those that change between trees."""
        return {}


class RuleWrapper(Rule):
    """A rule that passes every hook on to another one. Subclasses change some of them."""

    def __init__(self, rule: Rule):
        super().__init__(rule.max_branches, rule.max_depth, rule.max_rows)  # grow reads them often
        self.rule = rule
        self.facts = facts_of(rule)

    def start(self, prompt: list[int]) -> None:
        self.rule.start(prompt)

    def observe_target(self, tokens: list[int], top_ids: ndarray) -> None:
        self.rule.observe_target(tokens, top_ids)

    def state(self) -> dict[str, float | str]:
        return self.rule.state()

    def begin_tree(self, root_token: int, max_depth: int) -> int:
        return self.rule.begin_tree(root_token, max_depth)

    def add_gates(self, level: Level) -> Gates:
        return self.rule.add_gates(level)

    def expand_gates(self, level: Level) -> Gates:
        return self.rule.expand_gates(level)

    def finish_tree(self, tree: Tree) -> Tree:
        return self.rule.finish_tree(tree)

    def adapt(self, tree: Tree, path: list[int]) -> None:
        self.rule.adapt(tree, path)


class CoreRule(RuleWrapper):
    """A rule of the core, or of a fork, with the hooks of a MethodRule."""

    def start(self, prompt: list[int]) -> None:
        """Do nothing: the core has no such hook."""

    def state(self) -> dict[str, float | str]:
        """Return the current thresholds of DynaTree, and the mean of a_r by which history moves
        them."""
        if not isinstance(self.rule, DynaTreeRule):
            return {}
        s, ratios = self.rule.current, self.rule.depth_ratios
        found = {"D0": s.D0, "tau_h": s.tau_h, "rho_deep": s.rho_deep}
        return found | ({"depth_ratio": self.rule.mean_depth_ratio()} if ratios else {})


def hooked(rule: Rule) -> MethodRule | RuleWrapper:
    """Return the rule; one that lacks the hooks of a MethodRule is wrapped."""
    return rule if isinstance(rule, MethodRule | RuleWrapper) else CoreRule(rule)


@dataclass(frozen=True)
class Facts:
    """What the engine asks of a rule before it runs. A rule has attributes of these names, or the
    default holds."""

    max_verified: int  # rows of the largest tree that finish_tree returns
    n_drawn: int  # candidates per row if they are drawn
    draws_candidates: bool  # its candidates may be drawn (drawn.py)
    depends_on_probs: bool  # False: the log-probabilities do not change which nodes it adds
    is_chain: bool  # no row of its trees has two children
    is_calibrated: bool = False  # its logprobs are always calibrated (calibration.py)
    can_be_gated: bool = True  # another rule may refuse rows and levels that it wants
    min_rows: int = 1  # the engine pads a pass to at least these rows
    reads_entropy: bool = False  # its levels have the entropy of the draft's distributions
    target_top_k: int = 0  # the target's best ids per row that observe_target gets; 0: no call
    acceptance: Callable | None = None  # its own acceptances.DrawnAcceptance of sampled text
    # Of the draft's probabilities of top-k candidates, for methods that lose by the default
    draft_temperature: float | None = None


def facts_of(rule: Rule) -> Facts:
    """Return the facts of a rule, of the core or not."""
    if isinstance(rule, RuleWrapper):
        return rule.facts
    found = {
        "max_verified": rule.max_rows,
        "n_drawn": rule.max_branches,
        # The core's classes compare Level.values with thresholds, so their candidates may be drawn
        "draws_candidates": is_of_core(rule, ADDING),
        "depends_on_probs": not has_fixed_shape(rule),
        "is_chain": rule.max_branches == 1,
    }
    given = {f.name: getattr(rule, f.name) for f in fields(Facts) if hasattr(rule, f.name)}
    return Facts(**found | given)


def is_of_core(rule: Rule, hooks: Sequence[str]) -> bool:
    """Whether these hooks of a rule are those of the core's two classes, not a subclass's own."""
    core = DynaTreeRule if isinstance(rule, DynaTreeRule) else Rule
    return all(getattr(type(rule), hook, None) is getattr(core, hook, None) for hook in hooks)


def has_fixed_shape(rule: Rule) -> bool:
    """Whether the log-probabilities do not change which nodes a rule of the core adds."""
    if not is_of_core(rule, [*ADDING, "expand_gates"]):
        return False
    s = rule.current if isinstance(rule, DynaTreeRule) else None
    return not (s and (s.adapt_breadth or s.adapt_depth or s.prune))


@dataclass(frozen=True, kw_only=True)
class DrawnLevel(Level):
    """A level whose candidates are in draw order (drawn.py)."""

    drawn_values: ndarray  # [n, k] float32, log values, known before the draw (drawn.drawn_values)
    find_confidence: Callable[[], ndarray]  # waits for the device, so it is called only if needed

    @cached_property
    def confidence(self) -> ndarray:
        """c(u) [n]: the probability of the likeliest token after each row, drawn or not."""
        return self.find_confidence()

    @property
    def values(self) -> ndarray:
        return self.drawn_values


def added_mask(level: Level, gates: Gates) -> ndarray:
    """Return which candidates [n, k] pass the gates and can be drawn. The budget may drop some."""
    return passing(level, gates) & (level.values > -math.inf)


@dataclass(slots=True)
class MixedTree(Tree):
    """A tree with the value of each row, and with rows that may be retrieved, not drafted."""

    values: list[float] = field(default_factory=list)  # log values, as Level.values
    are_retrieved: list[bool] = field(default_factory=list)

    @classmethod
    def from_tree(cls, tree: Tree, values: list[float] | None = None) -> "MixedTree":
        """Return a mixed tree of drafted rows; a mixed tree stays. values: None for log p(u)."""
        if isinstance(tree, MixedTree):
            return tree
        columns = [getattr(tree, f.name) for f in fields(Tree)]
        values = list(tree.path_logprobs) if values is None else values
        return cls(*columns, values, [False] * len(tree))

    def add_retrieved(self, token: int, parent: int, path_logprob: float) -> int:
        """Add a retrieved row and return its number."""
        row = Tree.add(self, token, parent, path_logprob)
        self.values.append(path_logprob)
        self.are_retrieved.append(True)
        return row


def are_retrieved(tree: Tree) -> list[bool]:
    """Return which rows of a tree are retrieved, not drafted."""
    return tree.are_retrieved if isinstance(tree, MixedTree) else [False] * len(tree)


class Proposal(NamedTuple):
    """A row that may be retrieved. The likeliest sorts first."""

    cost: float  # minus its log p(u)
    parent: int
    rank: int  # orders equally likely siblings
    token: int


def add_likeliest(
    tree: MixedTree,
    n_rows: int,
    starts: dict[int, float],
    propose: Callable[[int, float], Iterator[Proposal]],
) -> None:
    """Add proposed rows to a tree, the likeliest first, until it has n_rows rows.

    Args:
        starts: log p(u) of the rows below which the first ones are proposed.
        propose: called once with each of these and of the added rows, and its log p(u). Returns the
            proposals below it, the likeliest first. A row that the tree has already may be among
            them.
    """
    rows = {edge: row for row, edge in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    heap: list[tuple[Proposal, Iterator[Proposal]]] = []

    def push(proposals: Iterator[Proposal]) -> None:
        if likeliest := next(proposals, None):
            heappush(heap, (likeliest, proposals))

    for row, path_logprob in starts.items():
        push(propose(row, path_logprob))
    while heap and len(tree) < n_rows:
        found, others = heappop(heap)
        row = rows.get((found.parent, found.token))
        if row is None:
            row = tree.add_retrieved(found.token, found.parent, -found.cost)
        push(others)
        if row not in starts:
            push(propose(row, -found.cost))


def select(tree: Tree, rows: list[int]) -> Tree:
    """Return the tree of these rows in this order: the root first, parents before children."""
    new_rows = {row: i for i, row in enumerate(rows)}
    columns = {}
    for f in fields(tree):
        column = getattr(tree, f.name)
        columns[f.name] = [column[row] for row in rows]
    columns["parents"] = [new_rows.get(parent, -1) for parent in columns["parents"]]
    return type(tree)(**columns)


def breadth_first(tree: Tree) -> Tree:
    """Return the tree in breadth-first order; rows of one depth keep their order."""
    return select(tree, sorted(range(len(tree)), key=tree.depths.__getitem__))


def best_rows(tree: Tree, n: int) -> Tree:
    """Return the tree of the n rows with the highest values; of equal values the earlier ones stay.

    The result is a tree, because no row's value exceeds its parent's. Among siblings the first ones
    stay, because no value exceeds an earlier sibling's.
    """
    if len(tree) <= n:
        return tree
    values = tree.values if isinstance(tree, MixedTree) else tree.path_logprobs
    best = sorted(range(len(tree)), key=values.__getitem__, reverse=True)
    return select(tree, sorted(best[:n]))

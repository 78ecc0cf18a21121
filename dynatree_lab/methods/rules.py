"""Parts that rules share: attributes, a wrapper, drawn levels, and trees with retrieved rows.

Shapes: N tree rows, n rows of a level, k candidates per row.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from heapq import heappop, heappush

from numpy import ndarray

from draft_tree import MAX_ROWS, Gates, Level, Rule, Settings, Tree, passing


class MethodRule(Rule):
    """A rule with the attributes that the engine and the acceptances read. These are defaults."""

    draws_candidates = False  # its candidates may be drawn (drawn.py)
    depends_on_probs = True  # False: the log-probabilities do not change which nodes it adds
    is_chain = False  # no row of its trees has two children
    is_calibrated = False  # logprobs are calibrated acceptance probabilities (calibration.py)
    min_rows = 1  # the engine pads a pass to at least these rows
    reads_entropy = False  # its levels have the entropy of the draft's distributions
    target_top_k = 0  # number of the target's best ids per row that observe_target gets; 0: no call
    acceptance: Callable | None = None  # its own acceptances.DrawnAcceptance of sampled text

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
    """A rule that passes every hook on to another one, and has all of its attributes. Subclasses
    change some of them."""

    def __init__(self, rule: Rule, defaults: MethodRule | None = None):
        """defaults: has the attributes that a rule of the core lacks."""
        super().__init__(rule.max_branches, rule.max_depth, rule.max_rows)  # grow reads them often
        self.rule, self.defaults = rule, defaults

    def __getattr__(self, name: str) -> object:
        """Return an attribute that this rule has not set itself."""
        is_missing = self.defaults and not hasattr(self.rule, name)
        return getattr(self.defaults if is_missing else self.rule, name)

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


def make_rule(settings: Settings) -> Rule:
    """Return a new rule of a method, as with_attributes returns it."""
    return with_attributes(settings.make_rule())


def with_attributes(rule: Rule) -> Rule:
    """Return the rule; a rule of the core in a wrapper that has the attributes of a MethodRule."""
    if isinstance(rule, MethodRule | RuleWrapper):
        return rule
    return RuleWrapper(rule, MethodRule(rule.max_branches, rule.max_depth, rule.max_rows))


@dataclass(frozen=True, kw_only=True)
class DrawnLevel(Level):
    """A level whose candidates are in draw order (drawn.py)."""

    values: ndarray  # [n, k] float32, log values, known before the draw (drawn.drawn_values)
    find_confidence: Callable[[], ndarray]  # waits for the device, so it is called only if needed

    @cached_property
    def confidence(self) -> ndarray:
        """c(u) [n]: the probability of the likeliest token after each row, drawn or not."""
        return self.find_confidence()


def values_of(level: Level) -> ndarray:
    """Return the log values [n, k] that may decide which candidates are added.

    They are known before the draw if the candidates are drawn, and log p(u) if they are the top k.
    """
    return level.values if isinstance(level, DrawnLevel) else level.path_logprobs


def added_mask(level: Level, gates: Gates) -> ndarray:
    """Return which candidates [n, k] pass the gates and can be drawn. The budget may drop some."""
    return passing(level, gates) & (values_of(level) > -math.inf)


@dataclass(slots=True)
class MixedTree(Tree):
    """A tree with the value of each row, and with rows that may be retrieved, not drafted."""

    values: list[float] = field(default_factory=list)  # log values, as values_of returns them
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


# A row that may be retrieved: minus its p(u) or log p(u), its parent, a number that orders equally
# likely ones, its token, its log p(u), and a note for `propose`
Proposal = tuple[float, int, int, int, float, int]


def add_likeliest(
    tree: MixedTree,
    n_rows: int,
    starts: list[tuple[int, float, int]],
    propose: Callable[[int, float, int], Iterator[Proposal]],
) -> None:
    """Add proposed rows to a tree, the likeliest first, until it has n_rows rows.

    Args:
        starts: the arguments of `propose` for the first rows.
        propose: called with a row of the tree, its log p(u) and its note. Returns the proposals
            below it, the likeliest first. A row that the tree has already may be among them.
    """
    rows = {edge: row for row, edge in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    heap: list[tuple[Proposal, Iterator[Proposal]]] = []

    def push(proposals: Iterator[Proposal]) -> None:
        if likeliest := next(proposals, None):
            heappush(heap, (likeliest, proposals))

    for start in starts:
        push(propose(*start))
    while heap and len(tree) < n_rows:
        (_, parent, _, token, path_logprob, note), others = heappop(heap)
        row = rows.get((parent, token))
        if row is None:
            row = tree.add_retrieved(token, parent, path_logprob)
        push(others)
        push(propose(row, path_logprob, note))


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

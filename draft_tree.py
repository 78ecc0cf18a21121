r"""The draft tree, how it grows level by level, and DynaTree's rule, which decides its shape.

The root is the pending token: it ends the text so far, and neither model has run it. The nodes
below it are candidates from a drafter (Drafter, in dynatree.py), usually a draft model. Nodes are
numbered in breadth-first order, so a parent comes before its children. A node's number is its row,
because node r is row r of the target's pass. The example of the README:

    row  token  parent  depth  p(u)            the
     0   the      -1      0    1.00           /   \
     1   cat       0      1    0.60         cat   dog
     2   dog       0      1    0.30        /   \     \
     3   sat       1      2    0.30      sat   ran   ran
     4   ran       1      2    0.18
     5   ran       2      2    0.24

    rule = DynaTree(tau=0.1).make_rule()  # settings never change, a rule learns from its text
    tree = grow(rule, root_token, drafter.draft, max_depth=2, vocab_size=4096)

p(u) is the product of the draft's probabilities along the path from the root to node u.

Shapes: n rows of a level that the draft runs, k candidates of each row.
Paper: DynaTree v2, section 3.3 and Algorithm 1. The settings have the names of its symbols.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from inspect import get_annotations
from numbers import Integral, Real
from typing import NamedTuple

import numpy
from numpy import ndarray

MAX_ROWS = 1024  # rows of the largest tree that a setting may ask for
MAX_LEVELS = 511  # of the deepest tree; acceptances may recurse, and Python allows 1,000 calls
# History: above GOOD_RATIO of accepted depth trees get deeper, below POOR_RATIO less deep
GOOD_RATIO, POOR_RATIO = 0.8, 0.6
HISTORY_STEP = 0.05  # by which tau_h and rho_deep then move
# Bounds of history, from the authors' code (the paper gives none). D0 also stays below D_max
D0_MIN, TAU_H_BOUNDS, RHO_DEEP_BOUNDS = 2, (0.5, 0.95), (0.3, 0.8)


@dataclass(slots=True)
class Tree:
    """A token tree, one list entry per row; row 0 is the root."""

    tokens: list[int]  # siblings have distinct tokens
    parents: list[int]  # rows; -1 for the root
    depths: list[int]  # edges from the root
    path_logprobs: list[float]  # log p(u)
    # Each row's slot in the draft's cache, counted from the root's; -1: the draft has not run it
    draft_slots: list[int]

    @classmethod
    def from_root(cls, token: int) -> "Tree":
        """Return a tree that is only its root."""
        return cls([token], [-1], [0], [0.0], [-1])

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, token: int, parent: int, path_logprob: float) -> int:
        """Add a row below `parent` and return its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.path_logprobs.append(path_logprob)
        self.draft_slots.append(-1)
        return len(self.tokens) - 1


def draw(tree: Tree, label: Callable[[int], str]) -> str:
    """Draw a tree with a line per row, each child below its parent. `label` describes a row."""
    lines = []
    stack = [(0, "", "")]  # a row, what stands before it, and what before the rows below it
    while stack:
        row, before, below = stack.pop()
        lines.append(before + label(row))
        children = [child for child, parent in enumerate(tree.parents) if parent == row]
        for child in reversed(children):  # the stack gives back the last one first
            if child == children[-1]:
                stack.append((child, below + "`-- ", below + "    "))
            else:
                stack.append((child, below + "|-- ", below + "|   "))
    return "\n".join(lines)


class Candidates(NamedTuple):
    """The tokens that a drafter proposes below each of n rows: k of them, the likeliest first."""

    tokens: ndarray  # [n, k] int64, distinct in a row
    # [n, k] float32, log-probability of each token given its path. It is -inf where a row has fewer
    # than k candidates and nan where the draft overflowed; neither becomes a row
    logprobs: ndarray
    entropy: ndarray | None = None  # [n] float32, of each row's distribution, for rules of your own


@dataclass(frozen=True, slots=True)
class Level:
    """The input of a rule: the candidates below the n rows that the draft has just run."""

    row_depth: int  # depth of the rows; that of their candidates is one more
    tokens: ndarray  # [n, k] int64, of the candidates, as Candidates has them
    logprobs: ndarray  # [n, k] float32, of each candidate given its path
    path_logprobs: ndarray  # [n, k] float32, log p(v) of each candidate v
    entropy: ndarray | None = None  # [n] float32, as Candidates has it

    @property
    def confidence(self) -> ndarray:
        """c(u) [n]: the probability of the likeliest token after each row u."""
        return numpy.exp(self.logprobs[:, 0])

    @property
    def values(self) -> ndarray:
        """The log values [n, k] by which a rule adds candidates: log p(v) of the top k."""
        return self.path_logprobs


# draft(tree, rows, k) runs these rows of the tree, which are one level, and returns k candidates
# below each of them. The first call for a tree runs the root: its rows are [0]
Draft = Callable[[Tree, list[int], int], Candidates]

# Conditions by name: each is bool [n, k], or one bool for all. A candidate must meet all of them.
Gates = Mapping[str, ndarray | bool]


def grow(rule: "Rule", root_token: int, draft: Draft, max_depth: int, vocab_size: int) -> Tree:
    """Grow a tree of at most max_depth levels below a root, with one draft call per level.

    Candidates become rows in breadth-first order until the tree has rule.max_rows rows. The rest is
    dropped, however likely. Raises ValueError for candidates or gates not as defined above.
    """
    tree = Tree.from_root(root_token)
    frontier = [0]  # the rows to run next
    next_slot = 0
    n_levels = rule.begin_tree(root_token, max_depth)
    for depth in range(n_levels):
        if not frontier or len(tree) >= rule.max_rows:
            break
        found = draft(tree, frontier, rule.max_branches)
        tokens, logprobs, entropy = checked(found, len(frontier), vocab_size)
        for row in frontier:
            tree.draft_slots[row] = next_slot
            next_slot += 1
        parent_logprobs = [[tree.path_logprobs[row]] for row in frontier]  # [n, 1]
        path_logprobs = numpy.array(parent_logprobs, numpy.float32) + logprobs
        level = Level(depth, tokens, logprobs, path_logprobs, entropy)
        is_added = passing(level, rule.add_gates(level))
        is_expanded = passing(level, rule.expand_gates(level))  # counts only for added candidates
        parents, frontier = frontier, []
        # i is an index into `parents`, rank a column. The order is breadth-first: parent by parent
        for i, rank in numpy.argwhere(is_added).tolist():
            if len(tree) >= rule.max_rows:
                break
            logprob = path_logprobs.item(i, rank)
            row = tree.add(tokens.item(i, rank), parents[i], logprob)
            if is_expanded[i, rank]:
                frontier.append(row)
    return rule.finish_tree(tree)


def checked(found: Candidates, n: int, vocab_size: int) -> Candidates:
    """Check a drafter's candidates below n rows and return them.

    A log-probability above 0, from rounding, becomes 0. nan, from an overflow, becomes -inf. Raises
    ValueError if tokens and log-probabilities are not [n, k], or a token is no id below vocab_size.
    """
    tokens, logprobs, entropy = require_arrays(found)
    if tokens.shape != logprobs.shape or tokens.ndim != 2 or len(tokens) != n or not tokens.size:
        given = f"tokens {list(tokens.shape)} and logprobs {list(logprobs.shape)}"
        raise ValueError(f"a drafter gave {given}, both must be [{n}, k]")
    if not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise ValueError(f"a drafter gave a token outside the target's ids, 0 to {vocab_size - 1}")
    logprobs = numpy.where(numpy.isnan(logprobs), -math.inf, numpy.minimum(logprobs, 0))
    return Candidates(tokens, logprobs.astype(numpy.float32, copy=False), entropy)


def require_arrays(found: Candidates) -> Candidates:
    """Return what a drafter gave. Raises ValueError if it is not Candidates of arrays."""
    arrays = found[:2] if isinstance(found, Candidates) else ()
    if not arrays or not all(isinstance(each, ndarray) for each in arrays):
        given = " and ".join(type(each).__name__ for each in arrays or [found])
        raise ValueError(f"a drafter gave {given}, it must return Candidates of numpy arrays")
    return found


def passing(level: Level, gates: Gates) -> ndarray:
    """Return which candidates [n, k] have a probability above 0 and meet all conditions.

    Raises ValueError naming a gate that is neither a bool nor bool [n, k].
    """
    passes = level.path_logprobs > -math.inf
    for name, gate in gates.items():
        gate = numpy.asarray(gate)
        if gate.dtype != bool or gate.shape not in ((), passes.shape):
            found = f"{gate.dtype} {list(gate.shape)}"
            raise ValueError(f"gate {name!r} is {found}, it must be a bool or bool {passes.shape}")
        passes = passes & gate
    return passes


class Rule:
    """Decides which candidates become rows. One rule serves one text, because it may learn.

    hook          called                           by default
    begin_tree    before a tree grows              the tree may have max_depth levels
    add_gates     after the draft has run a level  all candidates become rows
    expand_gates  after add_gates                  all new rows get candidates of their own
    finish_tree   after the last level             the tree stays as it is
    adapt         after a tree was verified        the rule learns nothing
    """

    is_used = False  # `generate` sets it, and refuses a rule that has served another text

    def __init__(self, max_branches: int, max_depth: int, max_rows: int):
        """
        Args:
            max_branches: k, candidates of each row.
            max_depth: levels that are drafted at most; 0 for a rule that never drafts.
            max_rows: rows at which a tree stops growing, the root included.
        """
        self.max_branches = max_branches
        self.max_depth = max_depth
        self.max_rows = max_rows

    def begin_tree(self, root_token: int, max_depth: int) -> int:
        """Begin a tree and return how many levels to draft. max_depth: levels for which the rest
        of the text has room."""
        return min(max_depth, self.max_depth)

    def add_gates(self, level: Level) -> Gates:
        """Return the conditions under which candidates become rows."""
        return {}

    def expand_gates(self, level: Level) -> Gates:
        """Return the conditions under which the new rows get candidates of their own."""
        return {}

    def finish_tree(self, tree: Tree) -> Tree:
        """Return the tree to verify, in breadth-first order."""
        return tree

    def adapt(self, tree: Tree, path: list[int]) -> None:
        """Learn from a verified tree. path: the accepted rows, the root first."""


def setting(default: float, low: float, high: float, meaning: str) -> Field:
    """Return the dataclass field of a setting: an int, float or bool from low to high."""
    return field(default=default, metadata={"low": low, "high": high, "meaning": meaning})


def number(name: str, value: object, kind: type[float]) -> float:
    """Return a number as an int or float, because JSON has none of numpy's. Raises ValueError if it
    is no number of this kind; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, Integral if kind is int else Real):
        raise ValueError(f"{name} is {value!r}, it must be of type {kind.__name__}")
    return kind(value)


class Settings:
    """The settings of a method: a base for frozen dataclasses whose fields are made by `setting`.

    Raises ValueError naming a setting that has another type or is outside its range.
    """

    def __init_subclass__(cls) -> None:
        # Types, also where `from __future__ import annotations` makes strings of them
        cls.__annotations__ = get_annotations(cls, eval_str=True)

    def __post_init__(self) -> None:
        for f in fields(self):
            self.check(f.name, getattr(self, f.name), f.type, f.metadata)

    def check(self, name: str, value: object, kind: type, metadata: Mapping) -> None:
        """Check a setting, and make it a number of Python's. Raises ValueError if it must not have
        this value. Subclasses extend it."""
        if kind is not bool:
            value = number(name, value, kind)
            object.__setattr__(self, name, value)  # the dataclass is frozen
        elif type(value) is not bool:
            raise ValueError(f"{name} is {value!r}, it must be of type bool")
        low, high = metadata["low"], metadata["high"]
        if not low <= value <= high:
            raise ValueError(f"{name} is {value}, it must be from {low} to {high}")

    def make_rule(self) -> Rule:
        """Return a new rule, for one text."""
        raise NotImplementedError(f"{type(self).__name__} has no make_rule")


@dataclass(frozen=True)
class Autoregressive(Settings):
    """ar: the target alone; every tree is only its root."""

    def make_rule(self) -> Rule:
        return Rule(max_branches=0, max_depth=0, max_rows=1)


@dataclass(frozen=True)
class DynaTree(Settings):
    """dynatree: breadth by confidence, depth by path probability, thresholds by history (3.3)."""

    B_min: int = setting(1, 1, 32, "children of a confident node, c(u) >= tau_h")
    B_mid: int = setting(2, 1, 32, "children of a node in between")
    B_max: int = setting(3, 1, 32, "children of an unsure node, c(u) < tau_l")
    tau_h: float = setting(0.9, 0.0, 1.0, "confidence from which B_min is enough")
    tau_l: float = setting(0.4, 0.0, 1.0, "confidence below which B_max is needed")
    D0: int = setting(5, 1, MAX_LEVELS, "base depth; deeper only where p(u) >= rho_deep")
    D_max: int = setting(8, 1, MAX_LEVELS, "hard limit of depth")
    rho_stop: float = setting(0.1, 0.0, 1.0, "p(u) needed to expand a node of depth < D0")
    rho_deep: float = setting(0.5, 0.0, 1.0, "p(u) needed to expand a node of depth >= D0")
    tau: float = setting(0.05, 0.0, 1.0, "a child with p(u) below tau is not added")
    N_max: int = setting(64, 1, MAX_ROWS, "rows per tree, root included (paper: 256)")
    W: int = setting(10, 1, 1000, "trees in the history window")
    adapt_breadth: bool = setting(True, False, True, "choose B(u) by c(u); off: B_mid everywhere")
    adapt_depth: bool = setting(True, False, True, "expand by p(u); off: expand while depth < D0")
    prune: bool = setting(True, False, True, "prune below tau; off: tau has no effect")
    history: bool = setting(True, False, True, "move D0, tau_h and rho_deep by acceptance")

    def __post_init__(self) -> None:
        super().__post_init__()
        is_ordered = not self.adapt_breadth or self.B_min <= self.B_mid <= self.B_max
        is_ordered = is_ordered and self.D0 <= self.D_max
        if not (is_ordered and self.tau_l < self.tau_h and self.rho_stop < self.rho_deep):
            order = "B_min <= B_mid <= B_max, D0 <= D_max, tau_l < tau_h, rho_stop < rho_deep"
            raise ValueError(f"{self} must have {order}")

    def make_rule(self) -> "DynaTreeRule":
        return DynaTreeRule(self)


class DynaTreeRule(Rule):
    """DynaTree in one text: the settings, and how history has moved them so far."""

    def __init__(self, settings: DynaTree):
        s = settings
        max_branches = s.B_max if s.adapt_breadth else s.B_mid
        super().__init__(max_branches, max_depth=s.D_max, max_rows=s.N_max)
        self.initial = self.current = settings
        # a_r = accepted candidates / depth of the tree, for the last W trees
        self.depth_ratios: deque[float] = deque(maxlen=s.W)

    def add_gates(self, level: Level) -> Gates:
        """Add B(u) children of each node, but no unlikely ones (Algorithm 1, lines 17 to 26)."""
        s = self.current
        ranks = numpy.broadcast_to(numpy.arange(level.tokens.shape[1]), level.tokens.shape)
        breadth = self.breadth(level)[:, None] if s.adapt_breadth else s.B_mid
        gates = {"confidence": ranks < breadth}  # the first B(u) children of each node
        if s.prune:
            gates["tau"] = level.values >= log_threshold(s.tau)
        return gates

    def breadth(self, level: Level) -> ndarray:
        """Return B(u) [n] of each row u: few children where the draft is confident, more where it
        is not."""
        s, c = self.current, level.confidence.astype(float)
        return numpy.where(c >= s.tau_h, s.B_min, numpy.where(c < s.tau_l, s.B_max, s.B_mid))

    def expand_gates(self, level: Level) -> Gates:
        """Expand only nodes on likely paths (Algorithm 1, lines 27 to 30)."""
        s, is_base = self.current, level.row_depth + 1 < self.current.D0
        if not s.adapt_depth:
            return {"D0": is_base}
        name, threshold = ("rho_stop", s.rho_stop) if is_base else ("rho_deep", s.rho_deep)
        return {name: level.path_logprobs >= log_threshold(threshold)}

    def adapt(self, tree: Tree, path: list[int]) -> None:
        """Record a_r = accepted candidates / depth of the tree. If its mean over the last W trees
        is high, draft deeper; if it is low, draft less deep. Once there are W trees, every tree
        may move the thresholds by a step."""
        if len(tree) == 1:  # it has depth 0, so there is no ratio
            return
        self.depth_ratios.append((len(path) - 1) / max(tree.depths))
        if not self.current.history or len(self.depth_ratios) < self.current.W:
            return
        mean = self.mean_depth_ratio()
        if mean > GOOD_RATIO:
            self.move_thresholds(1)
        elif mean < POOR_RATIO:
            self.move_thresholds(-1)

    def mean_depth_ratio(self) -> float:
        """Return the mean of the recorded ratios."""
        mean = sum(self.depth_ratios) / len(self.depth_ratios)
        return round(mean, 9)  # without rounding, ten ratios of 3 / 5 have a mean below 0.6

    def move_thresholds(self, direction: int) -> None:
        """Move thresholds by a step within their bounds.

        Direction 1 makes trees deeper, and narrower: with a lower tau_h more nodes get only B_min
        children. -1 is the reverse. tau_l < tau_h and rho_stop < rho_deep stay true.
        """
        s, initial = self.current, self.initial
        step = HISTORY_STEP * direction
        # Below D_max, otherwise rho_deep would never apply
        d0 = clamped(s.D0 + direction, initial.D0, D0_MIN, s.D_max - 1)
        tau_h = clamped(s.tau_h - step, initial.tau_h, *TAU_H_BOUNDS)
        rho_deep = clamped(s.rho_deep - step, initial.rho_deep, *RHO_DEEP_BOUNDS)
        tau_h = tau_h if tau_h > s.tau_l else s.tau_h
        rho_deep = rho_deep if rho_deep > s.rho_stop else s.rho_deep
        self.current = replace(s, D0=d0, tau_h=tau_h, rho_deep=rho_deep)


def clamped(value: float, initial: float, low: float, high: float) -> float:
    """Return the value within [low, high]. The range is widened to contain the initial value, which
    a user may choose outside it."""
    low, high = min(low, initial), max(high, initial)
    return min(max(value, low), high)


def log_threshold(probability: float) -> float:
    """Return the logarithm of a threshold on a probability. 0 passes all."""
    return math.log(probability) if probability > 0 else -math.inf

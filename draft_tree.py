"""The draft tree, grown level by level, and DynaTree, the rule that shapes it.

The root is the pending token: the target's own last prediction, committed but not yet run, so no
iteration can waste its tree on a wrong root. Everything below the root is the draft's guess. Rows
are breadth-first, so a parent always precedes its children. The example of the README:

    row  token  parent  depth  p(path)          the
     0   the      -1      0     1.00           /   \\
     1   cat       0      1     0.60         cat   dog
     2   dog       0      1     0.30        /   \\     \\
     3   sat       1      2     0.30      sat   ran   ran
     4   ran       1      2     0.18
     5   ran       2      2     0.24

    tree = grow(DynaTree().rule(), root, draft, max_depth=8)

Three ways to count, when the draft has run cat and dog of the example:

    tree row     the 0, cat 1, dog 2, sat 3, ...   breadth-first
    level row    cat 0, dog 1                      the n rows that the draft ran at once
    draft slot   the 0, cat 1, dog 2               in the order in which it ran them

A tree is plain lists on the host, wherever the models are, and a level's candidates, which a rule
compares all at once, are numpy arrays; only what was drawn from stays where the draft is.

This file first grows trees, then says what a rule is, and ends with DynaTree's own.

Shapes: n rows of a level, k candidates per row, V vocabulary.
Paper: DynaTree v2, section 3.3 and Algorithm 1; its symbols name the settings.
"""

import math
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import NamedTuple, Protocol

import numpy
from numpy import ndarray
from torch import Tensor

MAX_ROWS = 128  # the widest verify pass any setting may ask for
MAX_ROUNDING = 0.01  # a log-probability above 0 by no more is taken for 0; bfloat16 gives 0.0078


@dataclass(slots=True)
class Tree:
    """A token tree, row by row; row 0 is the root. Depths fall only while a rule extends it."""

    tokens: list[int]  # siblings carry distinct ones
    parents: list[int]  # earlier rows; the root has -1
    depths: list[int]  # edges from the root
    path_logprobs: list[float]  # log p(u): the draft's log-probability of the path, root 0
    draft_slots: list[int]  # slot in the draft's cache from the root's on; -1 = never run
    are_retrieved: list[bool]  # not from the draft
    drawn_from: list[Tensor] = field(default_factory=list)  # [V] by draft slot, of its children
    has_overflowed: bool = False  # the draft ran, and no candidate it gave was finite

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depth(self) -> int:
        """Of the deepest row."""
        return max(self.depths)

    def add(self, token: int, parent: int, path_logprob: float, is_retrieved: bool = False) -> int:
        """Add a row below `parent`; returns which one it is."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.path_logprobs.append(path_logprob)
        self.draft_slots.append(-1)
        self.are_retrieved.append(is_retrieved)
        return len(self.tokens) - 1

    def take(self, rows: list[int]) -> "Tree":
        """The tree of these rows in this order: the root first, each other after its parent."""
        places = {row: place for place, row in enumerate(rows)}
        return replace(
            self,
            tokens=[self.tokens[row] for row in rows],
            parents=[places.get(self.parents[row], -1) for row in rows],
            depths=[self.depths[row] for row in rows],
            path_logprobs=[self.path_logprobs[row] for row in rows],
            draft_slots=[self.draft_slots[row] for row in rows],
            are_retrieved=[self.are_retrieved[row] for row in rows],
        )

    def by_depth(self) -> "Tree":
        """The same in breadth-first order; of rows at one depth those added first stay first."""
        if self.depths == sorted(self.depths):
            return self
        return self.take(sorted(range(len(self)), key=self.depths.__getitem__))


def lone(root: int) -> Tree:
    """A tree of only its root."""
    return Tree([root], [-1], [0], [0.0], [-1], [False])


class Candidates(NamedTuple):
    """What a draft proposes below each of n rows: k of each, whatever a rule looks at. Where there
    are fewer in a row, others of log-probability -inf stand behind them, whatever their tokens."""

    tokens: ndarray  # [n, k] int64, distinct in a row: the likeliest first, or in draw order
    logprobs: ndarray  # [n, k] float32, of each given its path
    # [n, V], what they were drawn from, on the draft's device; None: they are ranked, as they may
    # be in sampled text, too. In a tree all are drawn or none is
    drawn_from: Tensor | None = None


# draft(tokens, parents) -> candidates: run one level of n nodes. parents index the rows of the
# previous call; None is the root.
Draft = Callable[[list[int], list[int] | None], Candidates]

# By the name of a setting, which candidates it lets pass: [n, k] bool, or one bool for all
Gates = Mapping[str, ndarray | bool]


def grow(
    rule: "Rule",
    root: int,
    draft: Draft | None,
    max_depth: int,
    watcher: "Watcher | None" = None,
    n_ids: int = sys.maxsize,
) -> Tree:
    """Grow one tree, one draft call per level, and let the rule extend it.

    root: the pending token. draft: None for a rule of depth 0, which never asks it. max_depth: the
    caller's own limit, beside the rule's. n_ids: size of the target's vocabulary.

    Three limits: of levels, `rule.levels` and max_depth, whichever is less; of rows drafted,
    `rule.max_drafted`; of rows kept, `rule.max_kept`. In the example max_drafted 5 would end the
    tree with the first "ran": of a level that does not fit, the first in breadth-first order stay.
    With max_kept 3 all six are drafted, and the three of the highest values stay: the, cat, and
    dog, of two equals the earlier. Raises ValueError for a draft that answers something else than
    was asked, for a rule whose tree has more than its own max_rows, and for one that cuts a drawn
    candidate and not the later ones of its row.
    """
    tree = lone(root)
    values = [0.0]  # of each row, by which the best are kept
    n_levels = min(max_depth, rule.levels(root))
    most = rule.max_drafted if rule.max_rows > 1 else 1  # a root alone needs no draft
    if watcher:
        watcher.begin(rule.state(), n_levels, max_depth)
    running = [0]  # tree rows of the level that the draft runs next
    parents = None  # the level rows of their parents
    n_slots = 0
    has_overflowed = False
    for depth in range(n_levels):
        if not running or len(tree) >= most:
            break
        candidates = draft([tree.tokens[row] for row in running], parents)
        require_answer(candidates, len(running), bool(tree.drawn_from) if depth else None, n_ids)
        for row in running:
            tree.draft_slots[row] = n_slots
            n_slots += 1
        if candidates.drawn_from is not None:
            tree.drawn_from.extend(candidates.drawn_from)
        known = [[tree.path_logprobs[row], values[row]] for row in running]
        level = look(depth, candidates, rule, known)
        to_add, to_grow = rule.expand(level)
        is_added, may_grow = all_open(rule, to_add, level), all_open(rule, to_grow, level)
        if level.is_drawn:
            require_suffix(rule, level, is_added)
        above, running, parents = running, [], []
        level_rows, ranks = is_added.nonzero()  # breadth-first
        for i, rank in zip(level_rows.tolist(), ranks.tolist(), strict=True):
            if len(tree) >= most:
                break
            row = tree.add(level.tokens.item(i, rank), above[i], level.path_logprobs.item(i, rank))
            values.append(level.values.item(i, rank))
            if may_grow.item(i, rank):
                running.append(row)
                parents.append(i)
        if depth == 0:
            has_overflowed = not level.is_possible.any()
        if watcher:
            watcher.level(level, to_add, to_grow, is_full=len(tree) >= most)
    if len(tree) > rule.max_kept:
        tree = tree.take(best_rows(values, rule.max_kept))
    tree = rule.extend(tree, max_depth).by_depth()
    if len(tree) > rule.max_rows:
        name = type(rule).__name__
        raise ValueError(f"{name}: a tree of {len(tree)} rows, and its max_rows is {rule.max_rows}")
    tree.has_overflowed = has_overflowed
    return tree


def require_answer(candidates: Candidates, n: int, were_drawn: bool | None, n_ids: int) -> None:
    """Raise ValueError unless these are candidates for n rows, drawn if earlier ones were.

    were_drawn: None if there are no earlier ones. n_ids: size of the target's vocabulary.
    """
    if not isinstance(candidates, Candidates):
        raise ValueError(f"a draft gave {type(candidates).__name__}, it must give Candidates")
    tokens, logprobs, drawn_from = candidates
    for name, array, kinds, kind in (
        ("tokens", tokens, "iu", "integers"),
        ("logprobs", logprobs, "f", "floats"),
    ):
        if not isinstance(array, ndarray) or array.dtype.kind not in kinds:
            found = f"{type(array).__name__} {getattr(array, 'dtype', '')}".strip()
            raise ValueError(f"a draft gave {name} as {found}, they must be an ndarray of {kind}")
    if tokens.shape != logprobs.shape or tokens.ndim != 2 or len(tokens) != n or not tokens.size:
        found = f"tokens {list(tokens.shape)} and logprobs {list(logprobs.shape)}"
        raise ValueError(f"a draft asked about {n} rows gave {found}, both must be [{n}, k]")
    is_tensor = isinstance(drawn_from, Tensor) and drawn_from.ndim == 2 and len(drawn_from) == n
    if drawn_from is not None and not is_tensor:
        raise ValueError(f"a draft gave a drawn_from that is no tensor [{n}, V]")
    if were_drawn not in (None, drawn_from is not None):
        raise ValueError("a draft gave drawn candidates in one level of a tree, ranked in another")
    if (logprobs > MAX_ROUNDING).any():
        found = numpy.nanmax(logprobs)
        raise ValueError(f"a draft gave the log-probability {found}, it must be at most 0")
    is_unknown = ((tokens < 0) | (tokens >= n_ids)) & (logprobs > -math.inf)
    if is_unknown.any():
        found = tokens[is_unknown][0]
        raise ValueError(f"a draft gave id {found}, but the target knows 0 to {n_ids - 1}")


def look(depth: int, candidates: Candidates, rule: "Rule", above: list[list[float]]) -> "Level":
    """What a rule sees of a level's candidates, as many of each row as it looks at. above: log p(u)
    and value of the rows."""
    tokens, believed, drawn_from = candidates
    k = rule.max_branches
    tokens, believed = tokens[:, :k], numpy.minimum(believed[:, :k], 0)
    logprobs = believed
    if rule.chances:
        logprobs = rule.chances.look(Candidates(tokens, believed, drawn_from))
    above = numpy.array(above, numpy.float32)  # [n, 2]
    with numpy.errstate(over="ignore"):  # of the smallest temperatures: -inf
        path_logprobs = above[:, :1] + logprobs
    values = path_logprobs
    if drawn_from is not None:
        values = value_draws(logprobs, above, is_counted=rule.chances is not None)
    seen = believed, logprobs, path_logprobs, values
    return Level(depth, tokens, *seen, values > -math.inf, drawn_from, rule.chances)


def all_open(rule: "Rule", gates: Gates, level: "Level") -> ndarray:
    """Which candidates [n, k] are possible and pass every gate. Raises TypeError for what is no
    gate, as an array of another shape would be stretched to this one."""
    are_open = level.is_possible
    for name, gate in gates.items():
        gate = gate if isinstance(gate, ndarray) else numpy.asarray(gate)
        if gate.dtype != bool or gate.shape not in (are_open.shape, ()):
            raise TypeError(
                f"{type(rule).__name__}.expand: gate {name!r} is {gate.dtype} {list(gate.shape)}, "
                f"not one bool, or bool {list(are_open.shape)} with one for each candidate"
            )
        are_open = are_open & gate
    return are_open


def require_suffix(rule: "Rule", level: "Level", is_added: ndarray) -> None:
    """Raise ValueError if a possible drawn candidate [n, k] is cut and a later sibling added.

    The later one was drawn from what the earlier one left, so its acceptance would be biased.
    """
    is_cut = level.is_possible & ~is_added
    if (is_cut[:, :-1] & is_added[:, 1:]).any():
        raise ValueError(
            f"{type(rule).__name__} cuts a drawn candidate and adds a later one of the same row; "
            "drawn candidates may be cut only as a suffix in draw order"
        )


def best_rows(values: list[float], n: int) -> list[int]:
    """The n rows of the highest values, of equals the earlier, as they stand in the tree.

    No row is worth more than its parent, so whatever is kept hangs together; of siblings the elder
    stay. A drawn row's value was known before it was drawn, so this takes no notice of the draw.
    """
    ranked = sorted(range(len(values)), key=values.__getitem__, reverse=True)
    return sorted(ranked[:n])


class Level(NamedTuple):
    """What a rule sees: the rows the draft has just run, and their k candidates, in order.

    Log-probabilities are of the distribution that candidates come from: the draft's own if they are
    ranked, or that at a temperature of its own; the warped one if they are drawn. Where a rule has
    chances of its own, `logprobs` and all that is made of them are those. What is impossible has
    -inf, or nan where the draft overflowed; it is never added.
    """

    depth: int  # of the rows; their children are one deeper
    tokens: ndarray  # [n, k] int64
    believed: ndarray  # [n, k] float32, the draft's, of each candidate given its path
    logprobs: ndarray  # [n, k] float32, the same, or the rule's log-chance that it is accepted
    path_logprobs: ndarray  # [n, k] float32, log p(child): the path's and the candidate's together
    values: ndarray  # [n, k] float32: path_logprobs; of drawn ones what is known before the draw
    is_possible: ndarray  # [n, k] bool, whether the value is anything at all
    drawn_from: Tensor | None  # [n, V], of candidates in draw order; None: they are ranked
    chances: "Chances | None" = None  # the rule's own

    @property
    def is_drawn(self) -> bool:
        return self.drawn_from is not None

    def confidence(self) -> ndarray:
        """Return c(u) [n, 1], the probability of the likeliest token after each row, drawn or not.
        It is 0 where the draft overflowed."""
        if self.drawn_from is None:
            found = numpy.exp(self.logprobs[:, :1])
        else:
            found = self.drawn_from.amax(dim=1, keepdim=True).cpu().numpy()
            if self.chances is not None:
                found = numpy.exp(self.chances.of_draws(numpy.log(found)))
        return numpy.fmax(found, 0)  # which ignores nan


class Chances(Protocol):
    """What a rule goes by instead of the draft's probabilities (methods/chances.py): log-chances of
    acceptance [n, k], for candidates, and for tokens that could be drawn, by what the draft says of
    them [n, k]. Of drawn candidates that of one must not depend on the others."""

    def look(self, candidates: Candidates) -> ndarray: ...

    def of_draws(self, logprobs: ndarray) -> ndarray: ...


class Rule:
    """Which nodes a tree gets; one object per generation, so that none learns from another.

    Candidates are the k likeliest tokens, best first. A rule that draws gets drawn ones instead
    when the text is sampled, or where that is asked for. Then, for the law of the text:

    - Drawn candidates may be cut only as a suffix in draw order, and by what is known before the
      draw alone: their `values` (DySpec, Eq. 11), `confidence()`. A gate `level.logprobs >=
      log_threshold(0.1)` breaks this: it tries a likely token where it was drawn, and spares an
      unlikely one its rejection.
    - Which are expanded may depend on anything if all that is drafted is kept. If the best by value
      are, only what could not have been among them may be left unexpanded.

    hook     when it is called                                     who needs it
    start    a text begins, its prompt not read yet                who looks at the text itself
    levels   a new tree begins                                     who remembers within a tree
    expand   the draft has run a level                             every rule that drafts
    extend   the draft is done                                     who has nodes from elsewhere
    read     the target has read a tree, or if asked the prompt    who keeps what the target likes
    adapt    an iteration has been committed                       who learns from what was accepted
    """

    min_rows = 1  # to which a pass is padded at least
    is_drawing = False
    goes_by_probs = True  # False: the same nodes whatever log-probabilities ranked candidates have
    is_chain = False  # no row of its trees has two children
    n_read = 0  # the target's candidates that `read` is told; if any, also after the prompt's
    chances: Chances | None = None  # None: what the draft says of its candidates is believed
    acceptance: Callable | None = None  # of sampled text (sampling.Acceptance), if it has its own

    def __init__(
        self,
        max_branches: int,
        max_depth: int,
        max_rows: int,
        max_drafted: int,
        max_kept: int | None = None,
    ):
        """max_branches: k, candidates looked at per row. max_depth: levels the draft may run at
        most, 0 for a rule without a draft. max_rows: verified, root included; at most MAX_ROWS, the
        widest pass there is. max_drafted: rows while growing, the first in breadth-first order.
        max_kept: of those, the ones of the highest values that are verified; max_rows if not given.
        """
        if max_rows > MAX_ROWS:
            raise ValueError(f"{max_rows} rows, {MAX_ROWS} is the most")
        self.max_branches = max_branches
        self.n_drawn = max_branches  # candidates per row, where they are drawn
        self.max_depth = max_depth
        self.max_rows = max_rows
        self.max_drafted = max_drafted
        self.max_kept = max_rows if max_kept is None else max_kept

    def start(self, prompt: list[int]) -> None:
        """A text begins, with these ids."""

    def levels(self, root: int) -> int:
        """A new tree begins below this token: how many levels the draft may run."""
        return self.max_depth

    def expand(self, level: Level) -> tuple[Gates, Gates]:
        """Which candidates are added, and which of them may have children in turn: those that pass
        every gate of the first kind, and every one of the second. Impossible ones never are."""
        raise NotImplementedError(f"{type(self).__name__} drafts and has no `expand`")

    def extend(self, tree: Tree, max_depth: int) -> Tree:
        """The drafted tree with nodes from elsewhere added, none deeper than max_depth."""
        return tree

    def read(self, tokens: list[int], candidates: ndarray) -> None:
        """See what the target likes after tokens of prompt or tree: [n, n_read] ids, best first."""

    def adapt(self, tree: Tree, path: list[int], ms: float) -> None:
        """Learn from one iteration: its tree, the rows accepted of it, and the time it took."""

    def state(self) -> dict[str, float | str]:
        """What it goes by in this tree, if that changes from one to the next; for who watches."""
        return {}


def value_draws(logprobs: ndarray, above: ndarray, is_counted: bool = False) -> ndarray:
    """Log values [n, k] of drawn candidates, each known before it is drawn (DySpec, Eq. 9 and 11).

    The chance that the path is accepted and every elder sibling is not: the path's, if the draft is
    right times what the elder siblings have left undrawn, if chances are counted times those that
    each is rejected. logprobs: [n, k], of each candidate, -inf if it cannot be drawn. above:
    [n, 2], log p(u) and value of the rows.
    """
    probs = numpy.exp(logprobs)
    left = numpy.ones_like(probs)  # by its elder siblings
    if is_counted:
        left[:, 1:] = (1 - probs[:, :-1]).cumprod(axis=1)
    else:
        left[:, 1:] = 1 - probs[:, :-1].cumsum(axis=1)  # without its own, even in rounding
    with numpy.errstate(divide="ignore"):
        values = above[:, :1] + numpy.log(left.clip(min=0))
    # What is left may round up: nothing is worth more than its parent or its elder sibling
    values = numpy.minimum.accumulate(numpy.minimum(values, above[:, 1:]), axis=1)
    return numpy.where(probs > 0, values, -math.inf)


class Watcher(Protocol):
    """Told how each tree grows and is tried; --page shows it (cli/trace.py)."""

    def begin(self, state: Mapping[str, float | str], n_levels: int, max_depth: int) -> None:
        """A tree begins, of so many levels at most; state: Rule.state. max_depth: the caller's."""

    def level(self, level: Level, to_add: Gates, to_grow: Gates, is_full: bool) -> None:
        """A level has been added, by these gates of its rule; is_full: the budget is used up."""

    def tried(self, row: int, chance: float, coin: float, left: float) -> None:
        """A child's turn, if text is sampled: accepted if coin < chance, and if not, so much of the
        target's distribution is left."""


def setting(default: float, low: float, high: float, meaning: str) -> float:
    """A dataclass field for one setting, with its range (both ends allowed) and its meaning. Its
    type is the annotation's: `p: float = setting(1, 0, 1, ...)` is 1.0."""
    return field(default=default, metadata={"low": low, "high": high, "meaning": meaning})


class Settings:
    """A method's settings: a frozen dataclass whose fields are made by `setting`, or as words by
    methods/settings.py. Raises ValueError naming the one that is of another type or out of range.
    """

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type is float and type(value) is int:
                value = float(value)
                object.__setattr__(self, f.name, value)  # it is frozen for everyone else
            require_setting(f, value)

    def rule(self) -> Rule:
        """A fresh rule, for one generation."""
        raise NotImplementedError(f"{type(self).__name__} has no `rule`")


def require_setting(f: Field, value: object) -> None:
    """Raise ValueError, naming the setting and what it may be, for one that it may not be."""
    if type(value) is not f.type:
        raise ValueError(f"{f.name}={value!r} is not of type {f.type.__name__}")
    if "parse" in f.metadata:  # a word, and what reads it
        try:
            f.metadata["parse"](value)
        except ValueError as error:
            raise ValueError(f"{f.name}={value}: {error}") from error
    elif not f.metadata["low"] <= value <= f.metadata["high"]:
        low, high = f.metadata["low"], f.metadata["high"]
        raise ValueError(f"{f.name}={value} is outside {low} to {high}")


def require_order(settings: Settings, order: str) -> None:
    """Raise ValueError unless settings stand in this order, as "D0 <= D_max", each pair of them."""
    words = order.split()
    for low, sign, high in zip(words[::2], words[1::2], words[2::2], strict=False):
        a, b = getattr(settings, low), getattr(settings, high)
        if not (a < b or (sign == "<=" and a == b)):
            raise ValueError(f"{low}={a} and {high}={b} break {low} {sign} {high}")


def log_threshold(probability: float) -> float:
    """log of a threshold on a probability, which may be 0."""
    return math.log(probability) if probability > 0 else -math.inf


@dataclass(frozen=True)
class DynaTree(Settings):
    """dynatree: breadth by confidence, depth by path probability, thresholds by history (3.3)."""

    B_min: int = setting(1, 1, 32, "children of a confident node, c(u) >= tau_h")
    B_mid: int = setting(2, 1, 32, "children of a node in between")
    B_max: int = setting(3, 1, 32, "children of an unsure node, c(u) < tau_l")
    tau_h: float = setting(0.9, 0.0, 1.0, "confidence from which B_min is enough")
    tau_l: float = setting(0.4, 0.0, 1.0, "confidence below which B_max is needed")
    D0: int = setting(5, 1, MAX_ROWS - 1, "base depth; deeper only where p(u) >= rho_deep")
    D_max: int = setting(8, 1, MAX_ROWS - 1, "hard limit of depth, and of D0's way up")
    rho_stop: float = setting(0.1, 0.0, 1.0, "a node with p(u) below it is never expanded")
    rho_deep: float = setting(0.5, 0.0, 1.0, "p(u) needed to expand from depth D0 on")
    tau: float = setting(0.05, 0.0, 1.0, "a child with p(path) below tau is not added")
    N_max: int = setting(64, 1, MAX_ROWS, "rows per tree, root included (paper: 256)")
    W: int = setting(10, 1, 1000, "iterations in the history window")
    adapt_breadth: bool = setting(True, False, True, "by c(u); off: B_mid everywhere")
    adapt_depth: bool = setting(True, False, True, "by p(u); off: every node down to D0")
    prune: bool = setting(True, False, True, "prune below tau; off: tau has no effect")
    history: bool = setting(True, False, True, "move D0, tau_h and rho_deep by acceptance")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_order(self, "B_min <= B_mid <= B_max")
        require_order(self, "tau_l < tau_h")
        require_order(self, "D0 <= D_max")
        require_order(self, "rho_stop < rho_deep")

    def rule(self) -> "DynaTreeRule":
        return DynaTreeRule(self)


class DynaTreeRule(Rule):
    """One generation of DynaTree: its settings as history has moved them so far."""

    is_drawing = True

    def __init__(self, settings: DynaTree):
        s = settings
        max_branches = s.B_max if s.adapt_breadth else s.B_mid
        super().__init__(max_branches, s.D_max, max_rows=s.N_max, max_drafted=s.N_max)
        self.is_chain = max_branches == 1
        self.goes_by_probs = s.adapt_breadth or s.adapt_depth or s.prune
        self.settings = settings
        self.now = settings
        self.reaches: deque[float] = deque(maxlen=s.W)  # of the last W trees

    def expand(self, level: Level) -> tuple[Gates, Gates]:
        """Lines 17 to 30 of Algorithm 1 for a whole level; `grow` counts up to N_max."""
        s = self.now
        breadth = [[s.B_mid]] * len(level.tokens)  # B(u)
        if s.adapt_breadth:
            breadth = [[self.branching_factor(c)] for (c,) in level.confidence().tolist()]
        to_add = {"confidence": numpy.arange(level.tokens.shape[1]) < breadth}
        if s.prune:
            to_add["tau"] = level.values >= log_threshold(s.tau)  # of ranked ones p(path)
        name, least = self.depth_gate(level.depth + 1)
        return to_add, {name: level.path_logprobs >= log_threshold(least)}

    def branching_factor(self, confidence: float) -> int:
        """B(u) of c(u): few children where the draft is sure, more where it is not."""
        s = self.now
        if confidence >= s.tau_h:
            return s.B_min
        if confidence < s.tau_l:
            return s.B_max
        return s.B_mid

    def depth_gate(self, depth: int) -> tuple[str, float]:
        """The least p(u) of a node at this depth that may have children in turn; before it, the
        name of the setting that says so."""
        s = self.now
        if not s.adapt_depth:
            return "D0", 0.0 if depth < s.D0 else math.inf
        if depth >= s.D_max:
            return "D_max", math.inf
        if depth >= s.D0:
            return "rho_deep", s.rho_deep  # which lies above rho_stop
        return "rho_stop", s.rho_stop

    def state(self) -> dict[str, float | str]:
        """The thresholds as history has moved them, and the mean of a_r that moves them."""
        found = {"D0": self.now.D0, "tau_h": self.now.tau_h, "rho_deep": self.now.rho_deep}
        if self.reaches:
            found["reach"] = self.mean_reach()
        return found

    def adapt(self, tree: Tree, path: list[int], ms: float) -> None:
        """Historical adjustment; a tree without drafted nodes tells nothing."""
        if tree.depth:
            self.observe((len(path) - 1) / tree.depth)

    def observe(self, reach: float) -> None:
        """a_r of one tree, accepted tokens / deepest level: the mean over the last W trees moves
        D0, tau_h and rho_deep."""
        self.reaches.append(reach)
        if not self.settings.history or len(self.reaches) < self.settings.W:
            return
        mean = self.mean_reach()
        if mean > 0.8:  # more aggressive
            self.move(1, -0.05, -0.05)
        elif mean < 0.6:  # more careful
            self.move(-1, 0.05, 0.05)

    def mean_reach(self) -> float:
        """a_r over the last trees, W of them or as many as there are."""
        mean = sum(self.reaches) / len(self.reaches)
        return round(mean, 9)  # ten times 3 / 5 is not 6 in floats

    def move(self, d0: int, tau_h: float, rho_deep: float) -> None:
        """Step the three thresholds, each within its bounds and over the one below it."""
        s = self.now
        start = self.settings
        d0 = nudge(s.D0, d0, start.D0, 2, start.D_max - 1)
        tau_h = nudge(s.tau_h, tau_h, start.tau_h, 0.5, 0.95, above=s.tau_l)
        rho_deep = nudge(s.rho_deep, rho_deep, start.rho_deep, 0.3, 0.8, above=s.rho_stop)
        if (d0, tau_h, rho_deep) != (s.D0, s.tau_h, s.rho_deep):  # else at every bound
            self.now = replace(s, D0=d0, tau_h=tau_h, rho_deep=rho_deep)


def nudge(
    value: float, by: float, start: float, low: float, high: float, above: float = -math.inf
) -> float:
    """value + by within [low, high] and over `above`; a start beyond a bound widens it."""
    moved = max(value + by, min(low, start))
    moved = min(moved, max(high, start))
    return moved if moved > above else value

"""The draft tree: flat tensors, grown level by level, and DynaTree, the rule that shapes it.

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

    tree = grow(Fixed(D=2, B=2, tau=0.15).rule(), root, draft, max_depth=8)  # methods/static.py

All of a tree is on the host, wherever the models are: each level reads its few candidates once, and
small operations cost no launches.

Shapes: N tree rows, W rows of one level, k candidates per row, V vocabulary.
Paper: DynaTree v2, section 3.3 and Algorithm 1; its symbols name the settings.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.passes import ROW_COUNTS
from engine.sampling import Sampler
from engine.scores import Scores, to_host
from engine.settings import check_settings, setting

MAX_ROWS = ROW_COUNTS[-1]  # the widest verify pass any setting may ask for
LOWEST = torch.finfo(torch.float32).min  # the log-probability of whatever is possible at all
# A root's columns, made once and never written to: every tree begins with them, ar's ends there
ROOT_ROW = torch.tensor([0])
NO_ROW = torch.tensor([-1])
CERTAIN = torch.tensor([0.0])
ITSELF = torch.tensor([[True]])

# draft(tokens [W], parents [W] | None) -> scores of W rows: run one level of nodes. parents index
# the rows of the previous call; None is the root.
Draft = Callable[[Tensor, Tensor | None], Scores]

# By the name of a setting, which candidates it lets pass: [W, k] bool, or what broadcasts to that
Gates = Mapping[str, Tensor | bool]


@dataclass(frozen=True, slots=True)
class Tree:
    """A token tree in breadth-first order, on the host; row 0 is the root."""

    tokens: Tensor  # [N] int64; siblings carry distinct tokens
    parents: Tensor  # [N] int64; parents[i] < i, the root has -1
    depths: Tensor  # [N] int64, edges from the root
    logprobs: Tensor  # [N] float32, log p(u): the draft's log-probability of the path, root 0
    ancestors: Tensor  # [N, N] bool; row i marks the path from the root to i, both included
    draft_slots: Tensor  # [N] int64, slot in the draft's cache from the root's on; -1 = never run
    depth: int  # the deepest level
    # [run, V], by draft_slots, on the draft's device: what children were drawn from
    draft_probs: Tensor | None = None
    is_retrieved: Tensor | None = None  # [N] bool, not from the draft; None: no node is
    has_overflowed: bool = False  # the draft ran, and no candidate it gave was finite

    def __len__(self) -> int:
        return self.tokens.shape[0]


@dataclass(frozen=True, slots=True)
class Level:
    """What a rule sees: the rows the draft has just run, and their k candidates, in order.

    Log-probabilities are of the distribution that candidates come from: the draft's own if they are
    ranked, the warped one if they are drawn.
    """

    depth: int  # of the rows; their children are one deeper
    logprobs: Tensor  # [W, k] of each candidate given its path; -inf if it cannot be drawn
    path_logprobs: Tensor  # [W, k] log p(child): the path's and the candidate's together
    values: Tensor  # [W, k] log of the chance to be reached and accepted, as far as it is known
    is_drawn: bool  # the candidates, in draw order; else they are ranked


class Watcher(Protocol):
    """Told how each tree grows, by whoever decides it; --page shows it (cli/trace.py)."""

    def begin(self, standing: Mapping[str, float | str], n_levels: int, max_depth: int) -> None:
        """A tree begins, of so many levels at most; max_depth is the caller's limit."""

    def gates(self, dropping: Gates, stopping: Gates) -> None:
        """What a rule asks of a level's candidates: to be added, and to grow further."""

    def level(self, level: "Level", candidates: Tensor, is_full: bool) -> None:
        """A level [W, k] has been added; is_full: the budget is used up."""


class Rule:
    """Which nodes a tree gets; one object per generation, so that none learns from another.

    Candidates are the k likeliest tokens, best first. A rule that draws gets drawn ones instead
    when the text is sampled. Which of these it adds must not depend on what they are, nor on what
    follows them: their values are known before they are drawn (DySpec, Eq. 11). Which of them it
    expands may, if all that is drafted is kept; else only where no value of what follows could
    have displaced a node.

    hook     when it is called                                     who needs it
    start    a text begins, its prompt not read yet                who looks at the text itself
    begin    a new tree begins                                     who remembers within a tree
    expand   the draft has run a level                             every rule that drafts
    extend   the draft is done                                     who has nodes from elsewhere
    read     the target has read a tree, or if asked the prompt    who keeps what the target likes
    adapt    an iteration has been committed                       who learns from what was accepted
    """

    min_rows = 1  # to which a pass is padded at least
    is_drawing = False
    n_read = 0  # candidates that `read` looks at; if any, also after the prompt's tokens
    watcher: Watcher | None = None

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
        assert max_rows <= MAX_ROWS, f"{max_rows} rows, {MAX_ROWS} is the most"
        self.max_branches = max_branches
        self.max_depth = max_depth
        self.max_rows = max_rows
        self.max_drafted = max_drafted
        self.max_kept = max_rows if max_kept is None else max_kept

    def start(self, prompt: list[int]) -> None:
        """A text begins, with these ids."""

    def begin(self, root: Tensor) -> int:
        """A new tree begins below this root [1]: how many levels the draft may run."""
        return self.max_depth

    def expand(self, level: Level) -> tuple[Tensor, Tensor]:
        """Masks [W, k] bool: candidates to add, and those the draft may run if added.

        To add none that is impossible, compare log-probabilities with LOWEST or more: neither -inf
        nor nan, the draft's overflow, is as high.
        """
        raise NotImplementedError(f"{type(self).__name__} drafts and has no `expand`")

    def extend(self, tree: Tree, max_depth: int) -> Tree:
        """The drafted tree with nodes from elsewhere added, none deeper than max_depth."""
        return tree

    def read(self, tokens: Tensor, scores: Scores) -> None:
        """See what the target says after prompt or tree tokens [n]."""

    def adapt(self, tree: Tree, path: list[int], ms: float) -> None:
        """Learn from one iteration: its tree, the rows accepted of it, and the time it took."""

    def tell(self, dropping: Gates, stopping: Gates) -> None:
        """Say in `expand` what decided, gate by gate; for whoever watches."""
        if self.watcher:
            self.watcher.gates(dropping, stopping)

    def standing(self) -> dict[str, float | str]:
        """What it goes by in this tree, if that changes from one to the next; for who watches."""
        return {}


class Settings(Protocol):
    """A method's settings: a frozen dataclass whose fields are made by `setting`."""

    def rule(self) -> Rule:
        """A fresh rule, for one generation."""


def grow(
    rule: Rule,
    root: Tensor,
    draft: Draft | None,
    max_depth: int,
    sampler: Sampler | None = None,
) -> Tree:
    """Grow one tree, one draft call per level, and let the rule extend it.

    root: [1] int64, the pending token. draft: None for a rule of depth 0, which never asks it.
    max_depth: the caller's own limit, beside the rule's. sampler: for sampled text. When the
    budget cuts a level short, the first candidates in breadth-first order stay.

    Three ways to count, when the draft has run cat and dog of the example:

        tree row     the 0, cat 1, dog 2, sat 3, ...   breadth-first
        level row    cat 0, dog 1                      the W rows that the draft ran at once
        draft slot   the 0, cat 1, dog 2               in the order in which it ran them
    """
    n_levels = min(max_depth, rule.begin(root))
    watcher = rule.watcher
    if watcher:
        watcher.begin(rule.standing(), n_levels, max_depth)
    if n_levels < 1 or rule.max_rows < 2:
        return rule.extend(lone(root), max_depth)
    if not rule.is_drawing:
        sampler = None
    sapling = Sapling(int(root), rule.max_drafted)
    draft_probs = []  # [W, V] by level, if children are drawn
    rows = [0]  # tree rows of the level to run
    parents = None  # their parents' level rows
    for depth in range(n_levels):
        scores = draft(torch.tensor([sapling.tokens[row] for row in rows]), parents)  # of W rows
        above = torch.tensor([[sapling.logprobs[row], sapling.values[row]] for row in rows])
        level, candidates, probs = look(depth, scores, above, rule.max_branches, sampler)
        add, expand = rule.expand(level)  # [W, k] each
        if sampler:  # what cannot be drawn was not drawn, whatever the rule makes of it
            add = add & (level.logprobs > -torch.inf)
            draft_probs.append(probs)
        rows, parents = sapling.add_level(rows, level, candidates, add, expand)
        if watcher:
            watcher.level(level, candidates, sapling.is_full)
        if not rows:
            break
    tree = sapling.as_tree(draft_probs)
    has_overflowed = len(tree) == 1 and not level.logprobs.isfinite().any()
    if len(tree) > rule.max_kept:
        tree = best_of(tree, torch.tensor(sapling.values), rule.max_kept)
    tree = rule.extend(tree, max_depth)
    return replace(tree, has_overflowed=True) if has_overflowed else tree


class Sapling:
    """A tree while it grows: plain lists, as a tensor of a few numbers costs microseconds."""

    def __init__(self, root: int, budget: int):
        """budget: how many rows it may have."""
        self.budget = budget
        self.tokens = [root]
        self.parents = [-1]
        self.depths = [0]
        self.logprobs = [0.0]
        self.values = [0.0]
        self.draft_slots = [-1]
        self.n_run = 0

    @property
    def is_full(self) -> bool:
        return len(self.tokens) >= self.budget

    def add_level(
        self, rows: list[int], level: Level, candidates: Tensor, add: Tensor, expand: Tensor
    ) -> tuple[list[int], Tensor]:
        """Children of the rows [W] that have just been run: those candidates that `add` marks.

        candidates, add, expand: [W, k]. Returns the new rows that may have children in turn, none
        if the budget is used up, and their parents' level rows.
        """
        growing = []
        parents = []
        ids = candidates.tolist()
        logprobs = level.path_logprobs.tolist()
        values = level.values.tolist()
        may_grow = expand.tolist()
        for i, is_added in enumerate(add.tolist()):
            self.draft_slots[rows[i]] = self.n_run + i
            for rank in range(len(is_added)):
                if is_added[rank] and not self.is_full:
                    if may_grow[i][rank]:
                        growing.append(len(self.tokens))
                        parents.append(i)
                    self.add(ids[i][rank], rows[i], logprobs[i][rank], values[i][rank])
        self.n_run += len(rows)
        if self.is_full:
            growing = []
        return growing, torch.tensor(parents)

    def add(self, token: int, parent: int, logprob: float, value: float) -> None:
        """One row, a level below its parent; logprob: of its path."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.logprobs.append(logprob)
        self.values.append(value)
        self.draft_slots.append(-1)

    def as_tree(self, draft_probs: list[Tensor]) -> Tree:
        """It has grown. draft_probs: [W, V] by level, none if nothing was drawn."""
        parents = torch.tensor(self.parents)
        depth = self.depths[-1]
        return Tree(
            tokens=torch.tensor(self.tokens),
            parents=parents,
            depths=torch.tensor(self.depths),
            logprobs=torch.tensor(self.logprobs),
            ancestors=mark_ancestors(parents, depth),
            draft_slots=torch.tensor(self.draft_slots),
            depth=depth,
            draft_probs=torch.cat(draft_probs) if draft_probs else None,
        )


def look(
    depth: int, scores: Scores, above: Tensor, max_branches: int, sampler: Sampler | None
) -> tuple[Level, Tensor, Tensor | None]:
    """What a rule sees of a level's scores, read once; its candidates [W, k]; and what they were
    drawn from [W, V], if they were.

    above: [W, 2], log p(u) and value of the rows.
    """
    if sampler is None:
        logprobs, candidates = scores.likeliest(max_branches)  # [W, k] each
        path_logprobs = above[:, :1] + logprobs
        return Level(depth, logprobs, path_logprobs, path_logprobs, False), candidates, None
    draft_probs = sampler.warp_draft(scores.logits)  # [W, V]
    drawn = sampler.draw(draft_probs, min(max_branches, draft_probs.shape[1]))
    probs, candidates = to_host(draft_probs.gather(1, drawn), drawn)  # [W, k] each
    logprobs = probs.log()
    values = value_draws(probs, above)
    return Level(depth, logprobs, above[:, :1] + logprobs, values, True), candidates, draft_probs


def value_draws(probs: Tensor, above: Tensor) -> Tensor:
    """Log values [W, k] of drawn candidates, each known before it is drawn (DySpec, Eq. 9 and 11).

    The chance that the path is accepted and every elder sibling is not, if the draft is right: the
    path's probability, times what the elder siblings have left undrawn. probs: [W, k], of each
    candidate, 0 if it cannot be drawn. above: as in `look`.
    """
    elder = F.pad(probs[:, :-1].cumsum(dim=1), (1, 0))  # without its own, even in rounding
    values = above[:, :1] + (1 - elder).clamp(min=0).log()
    # What is left may round up: nothing is worth more than its parent or its elder sibling
    values = torch.minimum(values, above[:, 1:]).cummin(dim=1).values
    return values.masked_fill(probs == 0, -torch.inf)


def lone(root: Tensor) -> Tree:
    """A tree of only its root [1]."""
    return Tree(root, NO_ROW, ROOT_ROW, CERTAIN, ITSELF, NO_ROW, 0)


def mark_ancestors(parents: Tensor, depth: int) -> Tensor:
    """Tree.ancestors of parents [N] in a tree of this depth."""
    ancestors = torch.eye(len(parents), dtype=torch.bool)
    above = parents.clamp(min=0)  # each node's ancestor `reach` above it, or the root
    reach = 1
    while reach <= depth:
        if reach > 1:
            above = above.take(above)
        ancestors |= ancestors.index_select(0, above)
        reach *= 2
    return ancestors


def best_of(tree: Tree, values: Tensor, n: int) -> Tree:
    """The tree of its n rows of the highest values [N]; of equals, the earlier.

    No row is worth more than its parent, so whatever is kept hangs together; of siblings the elder
    stay. A drawn row's value was known before it was drawn, so this takes no notice of the draw.
    """
    ranked = values.sort(descending=True, stable=True).indices
    kept = ranked[:n].sort().values
    new_rows = torch.empty_like(tree.tokens)
    new_rows[kept] = torch.arange(n)
    parents = new_rows[tree.parents[kept]]
    parents[0] = -1
    return replace(
        tree,
        tokens=tree.tokens[kept],
        parents=parents,
        depths=tree.depths[kept],
        logprobs=tree.logprobs[kept],
        ancestors=tree.ancestors[kept][:, kept],
        draft_slots=tree.draft_slots[kept],
        depth=int(tree.depths[kept[-1]]),
    )


def log_threshold(probability: float) -> float:
    """log of a threshold on a probability; LOWEST for 0, which all that is possible passes."""
    return math.log(probability) if probability > 0 else LOWEST


@dataclass(frozen=True)
class DynaTree:
    """dynatree: breadth by confidence, depth by path probability, thresholds by history (3.3)."""

    B_min: int = setting(1, 1, 32, "children of a confident node, c(u) >= tau_h")
    B_mid: int = setting(2, 1, 32, "children of a node in between")
    B_max: int = setting(3, 1, 32, "children of an unsure node, c(u) < tau_l")
    tau_h: float = setting(0.9, 0.0, 1.0, "confidence from which B_min is enough")
    tau_l: float = setting(0.4, 0.0, 1.0, "confidence below which B_max is needed")
    D0: int = setting(5, 1, MAX_ROWS - 1, "base depth; deeper only where p(u) >= rho_deep")
    D_max: int = setting(8, 1, MAX_ROWS - 1, "hard limit of depth")
    rho_stop: float = setting(0.1, 0.0, 1.0, "a node with p(u) below it is never expanded")
    rho_deep: float = setting(0.5, 0.0, 1.0, "p(u) needed to expand from depth D0 on")
    tau: float = setting(0.05, 0.0, 1.0, "a child with p(path) below tau is not added")
    N_max: int = setting(64, 1, MAX_ROWS, "rows per tree, root included (paper: 256)")
    W: int = setting(10, 1, 1000, "iterations in the history window")
    breadth: bool = setting(True, False, True, "adapt breadth; off: B_mid everywhere")
    depth: bool = setting(True, False, True, "adapt depth; off: every node down to D0")
    prune: bool = setting(True, False, True, "prune below tau; off: tau has no effect")
    history: bool = setting(True, False, True, "move D0, tau_h and rho_deep by acceptance")

    def __post_init__(self) -> None:
        check_settings(self)
        if self.B_min > self.B_mid:
            raise ValueError(f"B_min={self.B_min} and B_mid={self.B_mid} break B_min <= B_mid")
        if self.B_mid > self.B_max:
            raise ValueError(f"B_mid={self.B_mid} and B_max={self.B_max} break B_mid <= B_max")
        if self.tau_l >= self.tau_h:
            raise ValueError(f"tau_l={self.tau_l} and tau_h={self.tau_h} break tau_l < tau_h")
        if self.D0 > self.D_max:
            raise ValueError(f"D0={self.D0} and D_max={self.D_max} break D0 <= D_max")
        if self.rho_stop >= self.rho_deep:
            values = f"rho_stop={self.rho_stop} and rho_deep={self.rho_deep}"
            raise ValueError(f"{values} break rho_stop < rho_deep")

    def rule(self) -> "DynaTreeRule":
        return DynaTreeRule(self)


class DynaTreeRule(Rule):
    """One generation of DynaTree: its settings as history has moved them so far."""

    def __init__(self, settings: DynaTree):
        s = settings
        max_branches = s.B_max if s.breadth else s.B_mid
        super().__init__(max_branches, s.D_max, max_rows=s.N_max, max_drafted=s.N_max)
        self.settings = settings
        self.now = settings
        self.reaches: deque[float] = deque(maxlen=s.W)  # of the last W trees

    def expand(self, level: Level) -> tuple[Tensor, Tensor]:
        """Lines 17 to 30 of Algorithm 1 for a whole level; `grow` counts up to N_max."""
        s = self.now
        log_p = level.path_logprobs  # log p(u) of the children, [W, k]
        confidence = level.logprobs[:, 0].exp().tolist()  # c(u) [W], the best candidate's
        breadth = torch.tensor([self.branching_factor(c) for c in confidence])  # B(u) [W]
        rank = torch.arange(log_p.shape[1])
        is_wanted = rank < breadth.unsqueeze(1)  # the B(u) likeliest
        is_likely = log_p >= log_threshold(s.tau if s.prune else 0.0)
        name, least = self.depth_gate(level.depth + 1)
        expand = log_p >= log_threshold(least)
        self.tell({"confidence": is_wanted, "tau": is_likely}, {name: expand})
        return is_wanted & is_likely, expand

    def branching_factor(self, confidence: float) -> int:
        """B(u) of c(u): few children where the draft is sure, more where it is not."""
        s = self.now
        if not s.breadth:
            return s.B_mid
        if confidence >= s.tau_h:
            return s.B_min
        if confidence < s.tau_l:
            return s.B_max
        return s.B_mid

    def depth_gate(self, depth: int) -> tuple[str, float]:
        """The least p(u) of a node at this depth that may have children in turn, after the setting
        that says so."""
        s = self.now
        if not s.depth:
            return "D0", 0.0 if depth < s.D0 else math.inf
        if depth >= s.D_max:
            return "D_max", math.inf
        if depth >= s.D0:
            return "rho_deep", s.rho_deep  # which lies above rho_stop
        return "rho_stop", s.rho_stop

    def standing(self) -> dict[str, float | str]:
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
    """value + by within [low, high] and over `above`; a bound never lies beyond the start."""
    moved = max(value + by, min(low, start))
    moved = min(moved, max(high, start))
    return moved if moved > above else value

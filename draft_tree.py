"""The draft tree: flat tensors, grown level by level, and the rules that shape it.

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

    tree = grow(Fixed(D=2, B=2, tau=0.15).rule(), root, draft, max_depth=8)

All of a tree is on the host, wherever the models are: each level reads its few candidates once, and
small operations cost no launches.

Shapes: N tree rows, W rows of one level, k candidates per row, V vocabulary.
Paper: DynaTree v2, section 3.3 and Algorithm 1; its symbols name the settings.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Protocol

import torch
from torch import Tensor

from engine.sampling import Sampler

MAX_ROWS = 128  # the widest verify pass any setting may ask for, as in engine.cuda_graphs
LOWEST = torch.finfo(torch.float32).min  # the log-probability of whatever is possible at all
# A root's columns, made once and never written to: every tree begins with them, ar's ends there
ROOT_ROW, NO_ROW, CERTAIN = torch.tensor([0]), torch.tensor([-1]), torch.tensor([0.0])
ITSELF = torch.tensor([[True]])

# draft(tokens [W], parents [W] | None) -> logits [W, V], on the model's device: run one level of
# nodes. parents index the rows of the previous call; None is the root.
Draft = Callable[[Tensor, Tensor | None], Tensor]


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
    is_retrieved: Tensor | None = None  # [N] bool, not from the draft; None if all are

    def __len__(self) -> int:
        return self.tokens.shape[0]


@dataclass(frozen=True, slots=True)
class Level:
    """What a rule sees: the rows the draft has just run, and their best k candidates."""

    depth: int  # of the rows; their children are one deeper
    logprobs: Tensor  # [W, k] log-probability of each candidate given its path, in order
    path_logprobs: Tensor  # [W, k] log p(child): the path's and the candidate's together
    is_drawn: bool  # the candidates, in draw order; else they are ranked


class Rule(Protocol):
    """Which nodes a tree gets; one object per generation, so that none learns from another.

    Candidates are the k likeliest tokens, best first. A rule that draws gets drawn ones instead
    when the text is sampled; which of them it adds must not depend on what they are.
    """

    max_branches: int  # k, candidates looked at per row
    max_depth: int  # the draft runs no deeper level; 0 needs no draft
    max_rows: int  # N_max, verify rows of one tree, root included
    min_rows: int = 1  # to which a pass is padded at least
    is_drawing: bool = False
    is_reading: bool = False  # wants `read` to be called

    @property
    def max_drafted(self) -> int:
        """Rows while growing; of more than max_rows only the likeliest are verified."""
        return self.max_rows

    def levels(self, root: Tensor) -> int:
        """How many levels the draft may run below this root [1]; asked once per tree."""
        return self.max_depth

    def expand(self, level: Level) -> Tensor:
        """Masks [2, W, k] bool: candidates to add, and those the draft may run if added.

        To add none that is impossible, compare log-probabilities with LOWEST or more: neither -inf
        nor nan, the draft's overflow, is as high.
        """

    def extend(self, tree: Tree, max_depth: int) -> Tree:
        """The drafted tree with nodes from elsewhere added, none deeper than max_depth."""
        return tree

    def read(self, tokens: Tensor, logits: Tensor) -> None:
        """See what the target says after prompt or tree tokens [n]: logits [n, V]."""

    def adapt(self, n_accepted: int, depth: int) -> None:
        """Learn from one verified tree: accepted tokens, deepest level (0: only the root)."""

    def learn(self, tree: Tree, path: list[int], ms: float) -> None:
        """Learn from one iteration's tree, the rows accepted of it, and the time it took."""


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
    """
    n_levels = min(max_depth, rule.levels(root))
    if n_levels < 1 or rule.max_rows < 2:
        return rule.extend(lone(root), max_depth)
    sampler = sampler if rule.is_drawing else None
    most = rule.max_rows if sampler else rule.max_drafted  # what was drawn must be tried: no choice
    n_rows = 1
    tokens, logprobs = root, CERTAIN  # [W] of the level to run
    rows, parents = ROOT_ROW, None  # its tree rows; its parents in the level before
    levels = [(root, NO_ROW, CERTAIN)]
    run_rows = []  # tree rows in the order the draft ran them, which is the order of its slots
    draft_probs = []  # [W, V] of each level, if its children are drawn
    for depth in range(n_levels):
        if n_rows >= most or not len(rows):
            break
        draft_logits = draft(tokens, parents)  # [W, V]
        k = min(rule.max_branches, draft_logits.shape[1])
        if sampler:
            draft_probs.append(sampler.warp(draft_logits))
            candidates, values = _draw_candidates(draft_logits, draft_probs[-1], k, sampler)
        else:
            values, candidates = torch.log_softmax(draft_logits, dim=-1).topk(k)  # [W, k] each
        values, candidates = to_host(values, candidates)  # the level's one read
        run_rows += rows.tolist()
        level = Level(depth, values, logprobs.unsqueeze(1) + values, bool(sampler))
        masks = rule.expand(level).reshape(2, -1)
        if sampler:  # what cannot be drawn was not drawn, whatever the rule makes of it
            masks = masks & (values > -torch.inf).view(-1)
        add, expand = masks.unbind()
        added = add.nonzero().view(-1)  # [n], parent by parent: breadth-first order
        if len(added) > most - n_rows:
            added = added[: most - n_rows]
        if not len(added):
            break
        growing = expand.take(added).nonzero().view(-1)
        tokens, logprobs = candidates.take(added), level.path_logprobs.take(added)
        parents = added // k  # rows of the level just run
        levels.append((tokens, rows.take(parents), logprobs))
        rows = growing + n_rows
        n_rows += len(added)
        if len(growing) < len(added):
            tokens, logprobs, parents = (t.take(growing) for t in (tokens, logprobs, parents))
    tree = _assemble(levels, run_rows, torch.cat(draft_probs) if draft_probs else None)
    if n_rows > rule.max_rows:
        tree = likeliest(tree, rule.max_rows)
    return rule.extend(tree, max_depth)


def to_host(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors of one shape, float32 and int64, on the host after one read.

    The ids travel as float32 too, which is exact below 2^24.
    """
    if values.device.type == "cpu":
        return values, ids
    both = torch.stack((values, ids.float())).cpu()
    return both[0], both[1].long()


def _draw_candidates(
    draft_logits: Tensor, draft_probs: Tensor, k: int, sampler: Sampler
) -> tuple[Tensor, Tensor]:
    """k drawn tokens [W, k] and their unwarped log-probabilities, -inf if they cannot be drawn."""
    candidates = sampler.draw(draft_probs, k)
    values = torch.log_softmax(draft_logits, dim=-1).gather(1, candidates)
    return candidates, values.masked_fill(draft_probs.gather(1, candidates) == 0, -torch.inf)


def lone(root: Tensor) -> Tree:
    """A tree of only its root [1]."""
    return Tree(root, NO_ROW, ROOT_ROW, CERTAIN, ITSELF, NO_ROW, 0)


def _assemble(
    levels: list[tuple[Tensor, Tensor, Tensor]], run_rows: list[int], draft_probs: Tensor | None
) -> Tree:
    """Levels of (tokens, parents, logprobs), and the rows that were run, as one Tree."""
    tokens, parents, logprobs = map(torch.cat, zip(*levels, strict=True))
    depths = [depth for depth, (level, *_) in enumerate(levels) for _ in range(len(level))]
    draft_slots = [-1] * len(depths)
    for slot, row in enumerate(run_rows):
        draft_slots[row] = slot
    rest = mark_ancestors(parents, depths[-1]), torch.tensor(draft_slots), depths[-1], draft_probs
    return Tree(tokens, parents, torch.tensor(depths), logprobs, *rest)


def mark_ancestors(parents: Tensor, depth: int) -> Tensor:
    """Tree.ancestors of parents [N] in a tree of this depth."""
    ancestors = torch.eye(len(parents), dtype=torch.bool)
    above, reach = parents.clamp(min=0), 1  # each node's ancestor `reach` above it, or the root
    while reach <= depth:
        if reach > 1:
            above = above.take(above)
        ancestors |= ancestors.index_select(0, above)
        reach *= 2
    return ancestors


def likeliest(tree: Tree, n: int) -> Tree:
    """The tree of its n likeliest rows; of equals, the earlier.

    No path is likelier than its own beginning, so whatever is kept hangs together.
    """
    kept = tree.logprobs.sort(descending=True, stable=True).indices[:n].sort().values
    new_rows = torch.empty_like(tree.tokens)
    new_rows.index_copy_(0, kept, torch.arange(n))
    parents = new_rows.take(tree.parents.take(kept))
    parents[0] = -1
    return replace(
        tree,
        tokens=tree.tokens.take(kept),
        parents=parents,
        depths=tree.depths.take(kept),
        logprobs=tree.logprobs.take(kept),
        ancestors=tree.ancestors.index_select(0, kept).index_select(1, kept),
        draft_slots=tree.draft_slots.take(kept),
        depth=int(tree.depths[kept[-1]]),
    )


def setting(default: float, low: float, high: float, meaning: str) -> float:
    """A dataclass field for one setting, with its range (both ends allowed) and its meaning."""
    return field(default=default, metadata={"low": low, "high": high, "meaning": meaning})


def choice(default: str, options: tuple[str, ...], meaning: str) -> str:
    """A dataclass field for a setting that is one of several words."""
    return field(default=default, metadata={"options": options, "meaning": meaning})


def check_settings(settings: object, *ordered: str) -> None:
    """Raise ValueError for a setting of the wrong type or range, or ordered names that do not rise.

    `ordered` holds pairs such as "tau_l < tau_h" or "B_min <= B_mid".
    """
    for f in fields(settings):
        kind = type(f.default)
        if kind is str:
            if getattr(settings, f.name) not in f.metadata["options"]:
                known = ", ".join(f.metadata["options"])
                raise ValueError(f"{f.name}={getattr(settings, f.name)} is not one of {known}")
            continue
        if kind is not float and type(getattr(settings, f.name)) is not kind:
            raise ValueError(f"{f.name}={getattr(settings, f.name)} is not of type {kind.__name__}")
        value, low, high = getattr(settings, f.name), f.metadata["low"], f.metadata["high"]
        if not low <= value <= high:
            raise ValueError(f"{f.name}={value} is outside {low} to {high}")
    for pair in ordered:
        left, sign, right = pair.split()
        a, b = getattr(settings, left), getattr(settings, right)
        if a > b or (a == b and sign == "<"):
            raise ValueError(f"{left}={a} and {right}={b} break {pair}")


def log_threshold(probability: float) -> float:
    """log of a threshold on a probability; LOWEST for 0, which all that is possible passes."""
    return math.log(probability) if probability > 0 else LOWEST


@dataclass(frozen=True)
class Chain(Rule):
    """linear: a chain of K tokens, a tree with one branch (Leviathan et al. 2023)."""

    K: int = setting(5, 0, MAX_ROWS - 1, "tokens drafted per iteration")

    max_branches = 1
    is_drawing = True

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def max_depth(self) -> int:
        return self.K

    @property
    def max_rows(self) -> int:
        return self.K + 1

    def rule(self) -> Rule:
        return self

    def expand(self, level: Level) -> Tensor:
        return (level.path_logprobs >= LOWEST).expand(2, -1, -1)


@dataclass(frozen=True)
class Alone(Rule):
    """ar: the target alone; every tree is only its root."""

    rows: int = setting(1, 1, 64, "rows a pass is padded to: shows what rounding alone changes")

    max_branches, max_depth, max_rows = 1, 0, 1

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def min_rows(self) -> int:
        return self.rows

    def rule(self) -> Rule:
        return self


@dataclass(frozen=True)
class Fixed(Rule):
    """fixed: the static tree, B children for every node down to depth D (section 4.3)."""

    D: int = setting(5, 1, MAX_ROWS - 1, "depth of the tree")
    B: int = setting(2, 1, 32, "children per node")
    tau: float = setting(0.05, 0.0, 1.0, "a child with p(path) below tau is not added")
    N_max: int = setting(64, 1, MAX_ROWS, "rows per tree, root included")

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def max_branches(self) -> int:
        return self.B

    @property
    def max_depth(self) -> int:
        return self.D

    @property
    def max_rows(self) -> int:
        return self.N_max

    def rule(self) -> Rule:
        return self

    def expand(self, level: Level) -> Tensor:
        return (level.path_logprobs >= log_threshold(self.tau)).expand(2, -1, -1)


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
        order = ("B_min <= B_mid", "B_mid <= B_max", "tau_l < tau_h", "D0 <= D_max")
        check_settings(self, *order, "rho_stop < rho_deep")

    def rule(self) -> Rule:
        return DynaTreeRule(self)


class DynaTreeRule(Rule):
    """One generation of DynaTree: its settings as history has moved them so far."""

    def __init__(self, start: DynaTree):
        self.start = self.now = start
        self.window: deque[float] = deque(maxlen=start.W)
        self.max_branches = start.B_max if start.breadth else start.B_mid
        self.max_depth, self.max_rows = start.D_max, start.N_max
        self.bars: dict[bool, Tensor] = {}  # kept between levels: making them takes longer than
        self.limits: Tensor | None = None  # comparing with them

    def expand(self, level: Level) -> Tensor:
        is_deep = level.depth + 1 >= self.now.D0  # the children
        if is_deep not in self.bars:
            self.bars[is_deep] = level.path_logprobs.new_tensor(self._bars(is_deep)).view(2, 1, 1)
        masks = level.path_logprobs >= self.bars[is_deep]  # [2, W, k]
        if self.now.breadth:
            if self.limits is None:
                self.limits = level.logprobs.new_tensor(self._limits()[: level.logprobs.shape[1]])
            masks[0] &= level.logprobs[:, :1] < self.limits  # log c(u): the best candidate
        return masks

    def _bars(self, is_deep: bool) -> list[float]:
        """The least log p(u) of a child that is added, and of one that is expanded."""
        s = self.now
        add = log_threshold(s.tau if s.prune else 0.0)
        if not s.depth:
            return [add, math.inf if is_deep else -math.inf]
        return [add, log_threshold(max(s.rho_stop, s.rho_deep) if is_deep else s.rho_stop)]

    def _limits(self) -> list[float]:
        """B(u) by rank: the first B_min always, to B_mid below tau_h, to B_max below tau_l."""
        s = self.now
        limits = [math.inf] * s.B_min + [log_threshold(s.tau_h)] * (s.B_mid - s.B_min)
        return limits + [log_threshold(s.tau_l)] * (s.B_max - s.B_mid)

    def adapt(self, n_accepted: int, depth: int) -> None:
        """Historical adjustment: the window's mean acceptance moves D0, tau_h and rho_deep."""
        if not depth:
            return
        self.window.append(n_accepted / depth)
        if not self.start.history or len(self.window) < self.start.W:
            return
        mean = round(sum(self.window) / len(self.window), 9)  # ten times 3 / 5 is not 6 in floats
        if mean > 0.8:  # more aggressive
            self._move(1, -0.05, -0.05)
        elif mean < 0.6:  # more careful
            self._move(-1, 0.05, 0.05)

    def _move(self, d0: int, tau_h: float, rho_deep: float) -> None:
        s, start = self.now, self.start
        moved = {
            "D0": nudge(s.D0, d0, start.D0, 2, start.D_max - 1),
            "tau_h": nudge(s.tau_h, tau_h, start.tau_h, 0.5, 0.95, above=s.tau_l),
            "rho_deep": nudge(s.rho_deep, rho_deep, start.rho_deep, 0.3, 0.8, above=s.rho_stop),
        }
        if any(getattr(s, name) != value for name, value in moved.items()):  # else at every bound
            self.now, self.bars, self.limits = replace(s, **moved), {}, None


def nudge(
    value: float, by: float, start: float, low: float, high: float, above: float = -math.inf
) -> float:
    """value + by within [low, high] and over `above`; a bound never lies beyond the start."""
    moved = min(max(value + by, min(low, start)), max(high, start))
    return moved if moved > above else value

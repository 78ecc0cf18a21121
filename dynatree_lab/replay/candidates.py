"""Recorded candidates of a draft along recorded texts, in place of the draft.

At every position of a text a wide tree is drafted: all nodes that rules may ask for, at any of
several temperatures (WideRule). The candidates below each of these nodes are recorded. Below the
text's next token nothing is recorded, because the next position's tree has it. So the trees of a
text join into one, whose trunk is the text.

    record_candidates(draft, texts, Path("candidates.npz"))
    tree = load_candidates("candidates.npz", texts)
    tree.candidates([0], k=4, temperature=1)  # below the first text's first token

A temperature divides the draft's logits. Its probabilities need the sum of p^(1/T) over the whole
vocabulary, so the logarithms of these sums are recorded as well.

Shapes: n rows of a level, k candidates of each row, T temperatures, M nodes of a file, C candidates
of all nodes.
"""

import hashlib
import io
import json
import math
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from numpy import ndarray
from torch import Tensor

from draft_tree import Candidates, Gates, Level, Rule, Tree, grow
from dynatree import ModelDrafter, draft_temperature
from dynatree_lab.engine.scores import log_probabilities
from dynatree_lab.replay.texts import RecordedText, ReplayError
from gpt_neox import Model

FORMAT = 1  # version of the file format; files of other versions are refused
TEMPERATURES = (0.4, 0.5, 0.6, 0.7, 0.85, 1.0, 1.2)  # and the default one of the texts
MAX_ROWS = 4096  # of a wide tree
# What numpy, zipfile and json raise for a file that is no archive of these columns
INVALID = (ValueError, KeyError, TypeError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)
MAX_DIFFERENCE = 0.1  # of a draft's log-probabilities in two dtypes
MISSING = -1  # in place of a node that is not recorded
DTYPES = {  # of the columns of a CandidateTree in a file
    "tree_sizes": numpy.int32,
    "n_children": numpy.uint8,
    "n_candidates": numpy.uint8,
    "tokens": numpy.int32,
    "logprobs": numpy.float32,
    "log_sums": numpy.float32,
}


@dataclass(frozen=True)
class Width:
    """What a wide tree contains."""

    min_probability: float = 0.005  # nodes of this p(u), which thresholds from here on ask for
    n_best: int = 15  # the likeliest nodes, which dyspec asks for: N=16 counts the root
    max_depth: int = 16  # of all nodes, and of the chain of best candidates
    min_candidates: int = 4  # recorded below each node


DEFAULT_WIDTH = Width()


class Recorder(ModelDrafter):
    """A draft model that keeps what it says after each row of a tree."""

    def __init__(self, model: Model, temperatures: Sequence[float]):
        super().__init__(model)
        self.temperatures = temperatures
        self.levels: list[tuple[ndarray, ndarray, ndarray]] = []

    def commit(self, tree: Tree, path: list[int], tokens: list[int]) -> None:
        super().commit(tree, path, tokens)
        self.levels = []

    def choose(self, logits: Tensor, k: int) -> Candidates:
        logprobs = log_probabilities(logits.float(), 1.0)
        sums = [torch.logsumexp(logprobs / each, dim=-1) for each in self.temperatures]
        found = logprobs.topk(min(k, logprobs.shape[1]))
        candidates = Candidates(found.indices.cpu().numpy(), found.values.cpu().numpy())
        self.log_sums = torch.stack(sums, dim=-1).cpu().numpy()  # [n, T]
        self.levels.append((candidates.tokens, candidates.logprobs, self.log_sums))
        return candidates


class WideRule(Rule):
    """Adds the nodes of a Width at each temperature. The text's next token, below the root, gets no
    candidates, because the next tree has them."""

    def __init__(self, recorder: Recorder, width: Width, next_tokens: Iterable[int]):
        """next_tokens: the text's token after each root."""
        super().__init__(width.n_best, width.max_depth, MAX_ROWS)
        self.recorder, self.width, self.next_tokens = recorder, width, iter(next_tokens)
        self.temperatures = numpy.array(recorder.temperatures)

    def begin_tree(self, root_token: int, max_depth: int) -> int:
        n = len(self.temperatures)
        self.next_token = next(self.next_tokens)
        self.parents = numpy.zeros((1, n))  # log p(u) of the rows, [n, T]
        self.best = numpy.full((self.width.n_best, n), -numpy.inf)  # the highest values so far
        self.has_chain = True  # the level's first row ends the chain of best candidates
        return super().begin_tree(root_token, max_depth)

    def add_gates(self, level: Level) -> Gates:
        scaled = level.logprobs[:, :, None] / self.temperatures - self.recorder.log_sums[:, None]
        self.values = scaled + self.parents[:, None]  # log p(v), [n, k, T]
        best = numpy.concatenate([self.best, *self.values])
        self.best = -numpy.sort(-best, axis=0)[: self.width.n_best]
        lowest = numpy.minimum(self.best[-1], math.log(self.width.min_probability))
        self.is_added = (self.values >= lowest).any(axis=-1)
        self.is_added[0, 0] |= self.has_chain
        return {"wide": self.is_added}

    def expand_gates(self, level: Level) -> Gates:
        is_next = (level.row_depth == 0) & (level.tokens == self.next_token)
        self.has_chain &= not is_next[0, 0]
        self.parents = self.values[self.is_added & ~is_next]  # breadth-first, as they are run
        return {"not in the next tree": ~is_next}


@dataclass(frozen=True)
class CandidateTree:
    """The recorded nodes of several texts, one after another: of each text the wide trees, of each
    tree the nodes in breadth-first order, the root first. Candidates are in the order of nodes.
    Raises ValueError for columns of other lengths."""

    temperatures: ndarray  # [T], increasing
    tree_sizes: ndarray  # [trees], nodes of each tree
    n_children: ndarray  # [M], nodes below each node; they are its likeliest candidates
    n_candidates: ndarray  # [M], recorded below each node; 0 if it was not run
    tokens: ndarray  # [C] int32
    logprobs: ndarray  # [C] float32, given the path, at temperature 1
    log_sums: ndarray  # [nodes that were run, T] float32, log of the sum of p^(1/T)

    def __post_init__(self) -> None:
        n_run, n_candidates = numpy.count_nonzero(self.n_candidates), self.n_candidates.sum()
        lengths = len(self.n_children), len(self.n_candidates), len(self.tokens), len(self.logprobs)
        n_nodes = self.tree_sizes.sum()
        if lengths != (n_nodes, n_nodes, n_candidates, n_candidates):
            raise ValueError("the columns of recorded candidates have other lengths")
        if self.log_sums.shape != (n_run, len(self.temperatures)):
            raise ValueError("the log-sums of recorded candidates have another shape")
        places = {
            "roots": self.tree_sizes.cumsum() - self.tree_sizes,
            # A tree's children follow its root in the order of their parents
            "first_child": 1 + self.n_children.cumsum(dtype=int) - self.n_children
            + numpy.repeat(numpy.arange(len(self.tree_sizes)), self.tree_sizes),
            "first_candidate": self.n_candidates.cumsum(dtype=int) - self.n_candidates,
            "run_index": (self.n_candidates > 0).cumsum() - 1,
        }  # fmt: skip
        for name, column in places.items():
            object.__setattr__(self, name, column)  # the dataclass is frozen

    def child(self, node: int, token: int) -> int:
        """Return the node of a token below a node, or MISSING."""
        if node == MISSING:
            return MISSING
        first = self.first_candidate[node]
        found = numpy.flatnonzero(self.tokens[first : first + self.n_children[node]] == token)
        return int(self.first_child[node] + found[0]) if len(found) else MISSING

    def candidates(self, nodes: list[int], k: int, temperature: int) -> Candidates:
        """Return the k likeliest candidates below each of n nodes; -inf fills the log-probabilities
        where fewer are recorded. temperature: its index."""
        known = numpy.array(nodes).clip(min=0)  # MISSING gets no candidates
        n_known = numpy.where(numpy.array(nodes) == MISSING, 0, self.n_candidates[known])
        columns = numpy.arange(k)
        is_known = columns < n_known[:, None]  # [n, k]
        places = numpy.where(is_known, self.first_candidate[known][:, None] + columns, 0)
        sums = self.log_sums[self.run_index[known], temperature]
        logprobs = self.logprobs[places] / self.temperatures[temperature] - sums[:, None]
        logprobs = numpy.where(is_known, logprobs, -numpy.inf).astype(numpy.float32)
        return Candidates(self.tokens[places].astype(numpy.int64), logprobs)


class TreeRecorder:
    """Records the wide trees of texts, as the columns of a CandidateTree."""

    def __init__(self, draft: Model, temperatures: Sequence[float], width: Width):
        self.draft, self.temperatures, self.width = draft, temperatures, width
        self.n_columns = min(width.n_best, draft.config.vocab_size)
        self.trees: list[dict[str, ndarray]] = []

    @torch.inference_mode()
    def add(self, text: RecordedText) -> None:
        """Record the candidates at every position of a text but its last one."""
        drafter = Recorder(self.draft, self.temperatures)
        drafter.start(text.prompt, len(text.prompt) + len(text.ids) + MAX_ROWS, text.vocab_size)
        drafter.commit(Tree.from_root(text.prompt[-1]), [0], text.ids[:1])
        rule = WideRule(drafter, self.width, text.ids[1:])
        for i, next_token in enumerate(text.ids[1:], start=1):
            # The loop of dynatree.generate leaves room for the bonus token, too
            max_depth = len(text.ids) - i - 1
            tree = grow(rule, text.ids[i - 1], drafter.draft, max_depth, text.vocab_size)
            self.trees.append(self.columns_of(tree, drafter.levels))
            drafter.commit(tree, [0], [next_token])

    def columns_of(
        self, tree: Tree, levels: Sequence[tuple[ndarray, ndarray, ndarray]]
    ) -> dict[str, ndarray]:
        """Return the columns of a wide tree. levels: what the draft says after its rows."""
        is_run = numpy.array(tree.draft_slots) >= 0
        n_children = numpy.bincount(tree.parents[1:], minlength=len(tree))
        # One more than the children, because a tree that uses all recorded candidates of a row
        # counts as incomplete (RecordedDrafter.check_breadth)
        n_candidates = (n_children + 1).clip(min=self.width.min_candidates)
        n_candidates = numpy.where(is_run, n_candidates.clip(max=self.n_columns), 0)
        columns = {"tree_sizes": numpy.array([len(tree)]), "n_children": n_children}
        columns["n_candidates"] = n_candidates
        if levels:  # in the order of draft slots, which is that of rows
            tokens, logprobs, sums = map(numpy.concatenate, zip(*levels, strict=True))
            is_kept = numpy.arange(tokens.shape[1]) < n_candidates[is_run][:, None]
            columns |= {"tokens": tokens[is_kept], "logprobs": logprobs[is_kept], "log_sums": sums}
        return columns

    def finish(self) -> CandidateTree:
        """Return the recorded trees."""
        columns = {
            name: numpy.concatenate([tree[name] for tree in self.trees if name in tree])
            for name in DTYPES
        }
        return CandidateTree(numpy.array(self.temperatures), **columns)


def make_candidates(
    draft: Model,
    texts: Sequence[RecordedText],
    width: Width = DEFAULT_WIDTH,
    temperatures: Sequence[float] = TEMPERATURES,
) -> CandidateTree:
    """Return the draft's candidates along texts, at these temperatures and the default ones."""
    if all(len(text.ids) < 3 for text in texts):
        raise ReplayError("no text has 3 tokens, so there are no candidates to record")
    own = {draft_temperature(text.temperature) for text in texts}
    recorder = TreeRecorder(draft, sorted({*temperatures, *own}), width)
    for text in texts:
        recorder.add(text)
    return recorder.finish()


def record_candidates(
    draft: Model, texts: Sequence[RecordedText], file: Path, width: Width = DEFAULT_WIDTH
) -> None:
    """Write the draft's candidates along texts to a file."""
    candidates = make_candidates(draft, texts, width)
    columns = {name: getattr(candidates, name) for name in ("temperatures", *DTYPES)}
    columns |= {name: columns[name].astype(dtype) for name, dtype in DTYPES.items()}
    head = numpy.array(json.dumps({"format": FORMAT, "texts": digest_of(texts)}))
    content = io.BytesIO()
    numpy.savez_compressed(content, head=head, **columns)
    file.write_bytes(content.getvalue())  # at once, so that Ctrl-C leaves no part of a file


def load_candidates(file: str | Path, texts: Sequence[RecordedText]) -> CandidateTree:
    """Return the recorded candidates of these texts. Raises ReplayError."""
    try:
        # Opened here, because numpy leaves a file open that is no archive
        with open(file, "rb") as stream, numpy.load(stream, allow_pickle=False) as found:
            if found.zip.testzip():
                raise zipfile.BadZipFile
            head = json.loads(str(found["head"]))
            version, digest = head["format"], head["texts"]
            columns = {name: found[name] for name in ("temperatures", *DTYPES)}
    except OSError as error:
        raise ReplayError(f"{file} cannot be read: {error.strerror or error}") from error
    except INVALID as error:
        raise ReplayError(f"{file} is cut or has no recorded candidates") from error
    if version != FORMAT:
        raise ReplayError(f"{file} has format {version}, it must be {FORMAT}")
    if digest != digest_of(texts):
        raise ReplayError(f"{file} has the candidates of other texts; remove it to record these")
    try:
        return CandidateTree(**columns)
    except ValueError as error:
        raise ReplayError(f"{file}: {error}") from error


@torch.inference_mode()
def require_same_draft(tree: CandidateTree, texts: Sequence[RecordedText], draft: Model) -> None:
    """Raise ReplayError unless the first recorded candidates are this draft's."""
    place = next(i for i, text in enumerate(texts) if len(text.ids) > 2)  # with a tree that was run
    node = tree.roots[sum(len(text.ids) - 1 for text in texts[:place])]
    n, first, text = int(tree.n_candidates[node]), tree.first_candidate[node], texts[place]
    drafter, tokens = ModelDrafter(draft), [*text.prompt, text.ids[0]]
    drafter.start(tokens, len(tokens), text.vocab_size)
    found = drafter.draft(Tree.from_root(tokens[-1]), [0], n)
    if abs(found.logprobs[0] - tree.logprobs[first : first + n]).max() > MAX_DIFFERENCE:
        raise ReplayError("the candidates were recorded with another draft; use that one or none")


def digest_of(texts: Sequence[RecordedText]) -> str:
    """Return the sha256 of the ids of texts."""
    ids = [[text.prompt, text.ids] for text in texts]
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()

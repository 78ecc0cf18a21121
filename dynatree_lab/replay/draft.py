"""A draft that knows only recorded candidates (candidates.py), in place of a model.

    draft = RecordedDraft(load_candidates("candidates.npz", texts), texts, config)
    steps = generate(RecordedTarget(texts, config), draft, texts[0].prompt, generation_config, 64)

A rule may ask for a node that is not recorded. The real draft answers if it is at hand. If not, the
node has no candidates, and the step says that its tree may be incomplete.

Shapes: n rows of a level, k candidates of each row, V vocabulary.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor

from draft_tree import Candidates, Tree
from dynatree import ModelDrafter
from dynatree_lab.methods.method import Method
from dynatree_lab.replay.candidates import MISSING, CandidateTree
from dynatree_lab.replay.models import RecordedCache
from dynatree_lab.replay.texts import RecordedText, ReplayError
from gpt_neox import Config, Model

if TYPE_CHECKING:
    from dynatree_lab.generation.run import ModelRun


class RecordedDraft:
    """The recorded candidates of texts in place of a draft model. It is a gpt_neox.Model, so that a
    generation counts its passes, but it has no logits. RecordedDrafter reads its candidates."""

    device = torch.device("cpu")

    def __init__(
        self,
        tree: CandidateTree,
        texts: Sequence[RecordedText],
        config: Config,
        model: Model | None = None,
    ):
        """
        Args:
            config: the draft's.
            model: the draft, which answers where nothing is recorded. Where too few candidates of a
                node are, the step still says that its tree may be incomplete.
        """
        self.tree, self.config, self.model = tree, config, model
        roots = tree.roots.tolist()
        self.roots: dict[tuple[int, ...], list[int]] = {}  # of each text, by its prompt
        self.next_roots: dict[int, int] = {}  # of the child of a root that is the next root
        for text in texts:
            own = self.roots[tuple(text.prompt)] = roots[: len(text.ids) - 1]
            roots = roots[len(own) :]
            for root, token, next_root in zip(own, text.ids[1:], own[1:], strict=False):
                if (child := tree.child(root, token)) != MISSING:
                    self.next_roots[child] = next_root

    def suited(self, method: Method) -> Model:
        """Return these recorded candidates or, if a method reads more than they are, the draft
        itself, if it is at hand. Calibration reads all candidates of a row."""
        recorded = self.tree.n_candidates[self.tree.n_candidates > 0]
        n_recorded = recorded.min() if method.is_calibrated else recorded.max()
        is_enough = method.max_branches <= n_recorded and not method.facts.reads_entropy
        return self.model if self.model and not (is_enough and not method.make_drafter) else self

    def new_cache(self, capacity: int) -> RecordedCache:
        return RecordedCache()

    def prefill(self, tokens: list[int], cache: RecordedCache) -> Tensor:
        cache.length += len(tokens)
        return torch.empty(1, 0)

    def forward(
        self, tokens: Tensor, positions: Tensor, cache: RecordedCache, mask: Tensor | None = None
    ) -> Tensor:
        return torch.empty(len(tokens), 0)

    def child(self, node: int, token: int) -> int:
        """Return the node of a token below a node, or MISSING if nothing is recorded below it."""
        found = self.tree.child(node, token)
        found = self.next_roots.get(found, found)
        return MISSING if found == MISSING or not self.tree.n_candidates[found] else found

    def temperature_index(self, temperature: float) -> int:
        """Return the index of a recorded temperature. Raises ReplayError."""
        found = numpy.flatnonzero(numpy.isclose(self.tree.temperatures, temperature))
        if not len(found):
            recorded = ", ".join(f"{each:g}" for each in self.tree.temperatures)
            raise ReplayError(f"draft_temperature is {temperature}, recorded are {recorded}")
        return int(found[0])


class RecordedDrafter(ModelDrafter):
    """Drafts from recorded candidates. Its run counts the passes that the draft would make."""

    def __init__(self, run: "ModelRun", temperature: float, reads_all: bool = False):
        """
        Args:
            run: of a RecordedDraft.
            reads_all: all k candidates of a row are read, as calibration does, and not only those
                that may become rows.
        """
        super().__init__(run, temperature)
        self.reads_all = reads_all
        self.recorded: RecordedDraft = run.model
        self.temperature_index = self.recorded.temperature_index(temperature)

    def start(self, prompt: list[int], capacity: int, vocab_size: int) -> None:
        super().start(prompt, capacity, vocab_size)
        self.roots = self.recorded.roots[tuple(prompt)]
        self.n_before = len(prompt) + 1  # tokens up to the root of the first tree
        if self.recorded.model:
            self.own_cache = self.recorded.model.new_cache(capacity)

    def draft(self, tree: Tree, rows: list[int], k: int) -> Candidates:
        self.growing, self.rows = tree, rows
        if rows == [0]:
            # Of the rows that are run, by draft slot
            self.nodes = [self.roots[len(self.text) - self.n_before]]
        else:
            for row in rows:
                parent = self.nodes[tree.draft_slots[tree.parents[row]]]
                self.nodes.append(self.recorded.child(parent, tree.tokens[row]))
        return super().draft(tree, rows, k)

    def choose(self, logits: Tensor, k: int) -> Candidates:
        self.k, nodes = k, self.nodes[-len(self.rows) :]
        found = self.recorded.tree.candidates(nodes, k, self.temperature_index)
        n_needed = min(k, self.vocab_size) if self.reads_all else 1
        for i, row in enumerate(self.rows):
            if nodes[i] == MISSING or self.recorded.tree.n_candidates[nodes[i]] < n_needed:
                self.answer(row, found, i)
        return found

    def answer(self, row: int, found: Candidates, i: int) -> None:
        """Fill in the candidates of a row for which none are recorded, if the draft is at hand."""
        model = self.recorded.model
        if model is None:
            self.model.is_incomplete = True
            return
        path: list[int] = []
        while row:
            path.insert(0, self.growing.tokens[row])
            row = self.growing.parents[row]
        # The draft runs token 0 in place of a token that its vocabulary lacks
        ids = self.text[self.own_cache.length :] + path
        ids = [token if token < model.config.vocab_size else 0 for token in ids]
        logits = model.prefill(ids, self.own_cache)
        self.own_cache.rewind(len(self.text))
        own = super().choose(logits[:, : self.vocab_size], found.tokens.shape[1])
        n = own.tokens.shape[1]
        found.tokens[i, :n], found.logprobs[i, :n] = own.tokens[0], own.logprobs[0]

    def commit(self, tree: Tree, path: list[int], tokens: list[int]) -> None:
        if tree.draft_slots[0] >= 0:
            self.check_breadth(self.growing)  # as it was before the rule chose the best rows
        super().commit(tree, path, tokens)

    def check_breadth(self, tree: Tree) -> None:
        """Find out whether a row has all candidates that are recorded below it, but fewer than the
        rule asked for. The next one might have become a row, too. `answer` has filled in those of
        a row for which none are recorded."""
        n_recorded = self.recorded.tree.n_candidates
        for row, n_children in Counter(tree.parents[1:]).items():
            node = self.nodes[tree.draft_slots[row]]
            if node != MISSING and 0 < n_recorded[node] <= n_children < self.k:
                self.model.is_incomplete = True

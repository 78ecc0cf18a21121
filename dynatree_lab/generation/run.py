"""A model in one generation: it makes the cache, and shows the results of each pass.

The decoding loop calls it as it calls any gpt_neox.Model. A ModelRun takes every such model, a
FastRun those of model.py, so a method reads the scores of a pass in one way. A rule or drafter that
needs more than the scores of the latest pass observes all passes, those over the prompt included.

    target = FastRun(model, n_tokens=200, n_scratch=64, pass_config=PassConfig(max_rows=64))
    target.show_top_ids(4, lambda ids, top_ids: print(ids, top_ids))

Shapes: n rows of a pass, V vocabulary, k top ids of each row.
"""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from numpy import ndarray
from torch import Tensor

from dynatree_lab.engine.memory import OutOfMemory, require_memory
from dynatree_lab.engine.passes import PassConfig
from dynatree_lab.engine.scores import Scores
from dynatree_lab.generation.kept import KeptCache
from dynatree_lab.methods.eagle import EagleHead
from gpt_neox import PREFILL_CHUNK, KVCache, Model

OnPass = Callable[[list[int], Scores], None]  # gets the n tokens of a pass and their scores


class ModelRun:
    """A gpt_neox.Model that wraps another one for one generation. It makes one cache. A pass comes
    to it from the loop; it takes the time, keeps the scores and shows them to observers."""

    def __init__(self, model: Model, capacity: int):
        """capacity: of the cache; the loop's own ignores the window."""
        self.model, self.config, self.device = model, model.config, model.device
        self.capacity = capacity
        self.cache: KVCache | None = None
        self.scores: Scores | None = None  # of the latest pass
        self.on_pass: list[OnPass] = []
        self.shows_hidden = False
        self.ms, self.rows = 0.0, []  # of the passes since pop_stats

    max_commit = sys.maxsize  # number of tokens that one iteration may commit
    is_incomplete = False  # recorded candidates lacked some of this iteration's (replay/)

    def show_top_ids(self, k: int, observe: Callable[[list[int], ndarray], None]) -> None:
        """Call `observe` after each pass, with its tokens and the best ids [n, k] after each."""
        self.on_pass.append(lambda ids, scores: observe(ids, scores.top_ids(k)))

    def show_hidden(self, observe: Callable[[Tensor], None]) -> None:
        """Call `observe` after each pass, with its last hidden states [n, hidden]."""
        self.shows_hidden = True
        self.on_pass.append(lambda _, scores: observe(scores.hidden))

    def show(self, tokens: Tensor, scores: Scores) -> None:
        """Show observers the scores of a pass over tokens [n]."""
        for on_pass in self.on_pass:
            on_pass(tokens.tolist(), scores)

    def keep(self, kept: KeptCache, text: list[int], is_strict: bool) -> None:
        """Keep the cache of an engine model from one text to the next; other models keep none."""

    def capture(self, shortest: int) -> None:
        """Capture the passes for all lengths from `shortest` on, on CUDA."""

    def new_cache(self, capacity: int) -> KVCache:
        self.cache = self.model.new_cache(self.capacity)
        return self.cache

    def prefill(self, tokens: list[int], cache: KVCache) -> Tensor:
        """Run and commit the next tokens. Observers need the scores after every token."""
        if not self.on_pass:
            return self.timed(len(tokens), lambda: (None, self.model.prefill(tokens, cache)))
        for ids in torch.tensor(tokens).split(PREFILL_CHUNK):
            positions = torch.arange(cache.length, cache.length + len(ids))
            logits = self.forward(ids, positions, cache)
            cache.commit(range(len(ids)))
        self.scores = Scores(None, logits[-1:])
        return logits[-1:]

    def forward(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | None = None
    ) -> Tensor:
        """Run n rows as GPTNeoX.forward does, and show their scores."""
        logits = self.timed(len(tokens), lambda: self.run(tokens, positions, cache, mask))
        self.show(tokens, self.scores)
        return logits

    def run(self, *inputs: object) -> tuple[Tensor | None, Tensor]:
        """Return the hidden states, if they are shown, and the logits of a pass."""
        if not self.shows_hidden:
            return None, self.model.forward(*inputs)
        hidden = self.model.hidden(*inputs)
        return hidden, self.model.logits(hidden)

    def timed(self, n_rows: int, run: Callable[[], tuple[Tensor | None, Tensor]]) -> Tensor:
        """Run a pass, keep its scores, time and number of rows, and return its logits."""
        began = time.perf_counter()
        hidden, logits = run()
        self.scores = self.scores_of(hidden, logits)
        self.ms += (time.perf_counter() - began) * 1e3
        self.rows.append(n_rows)
        return logits

    def scores_of(self, hidden: Tensor | None, logits: Tensor) -> Scores:
        return Scores(hidden, logits)

    def pop_stats(self) -> tuple[float, list[int]]:
        """Return the milliseconds of passes since the last call, and the row count of each; a
        prefill counts as one pass."""
        stats = self.ms, self.rows
        self.ms, self.rows = 0.0, []
        return stats

    def end(self, is_whole: bool) -> None:
        """Release the cache. is_whole: the text ended without an error."""


class FastRun(ModelRun):
    """The run of a FastGPTNeoX: its cache keeps the scores, and may begin with an earlier text."""

    def __init__(self, model: Model, n_tokens: int, n_scratch: int, pass_config: PassConfig):
        super().__init__(model, min(n_tokens, pass_config.window.max_length) + n_scratch)
        self.pass_config = pass_config
        self.kept: KeptCache | None = None
        self.n_restored = 0  # tokens that the cache begins with, until `prefill` has skipped them

    def keep(self, kept: KeptCache, text: list[int], is_strict: bool) -> None:
        """Begin with what is kept of a text, and keep the cache if the text ends without an error.
        text: the committed ids, to which the caller appends."""
        self.kept, self.text, self.is_strict = kept, text, is_strict

    def new_cache(self, capacity: int) -> KVCache:
        self.cache = self.model.new_cache(self.capacity, self.pass_config)
        if self.on_pass:
            self.cache.states = []
        if self.kept:
            self.n_restored = self.kept.restore(self.cache, self.text, self.is_strict)
        return self.cache

    def prefill(self, tokens: list[int], cache: KVCache) -> Tensor:
        """Run and commit the next tokens, except for those that the cache begins with. Observers
        get all of them."""
        n, self.n_restored = self.n_restored, 0
        if n and isinstance(self.model, EagleHead):
            cache.next_states = cache.next_states[n:]
        logits = self.timed(len(tokens) - n, lambda: (None, self.model.prefill(tokens[n:], cache)))
        if self.on_pass:
            chunks = torch.cat(cache.states).split(PREFILL_CHUNK)
            for ids, x in zip(torch.tensor(tokens).split(PREFILL_CHUNK), chunks, strict=True):
                self.show(ids, self.model.score(x, cache.config))
            if not self.kept:
                cache.states = None
        return logits

    def run(self, *inputs: object) -> tuple[None, Tensor]:
        return None, self.model.forward(*inputs)

    def scores_of(self, hidden: None, logits: Tensor) -> Scores:
        return self.cache.scores

    @property
    def max_commit(self) -> int:
        return self.cache.max_commit

    def capture(self, shortest: int) -> None:
        self.model.capture(self.cache, shortest)

    def end(self, is_whole: bool) -> None:
        if self.cache:
            self.model.release(self.cache)
            if self.kept and is_whole:
                with suppress(OutOfMemory):  # the text is done; the next one runs everything again
                    self.kept.save(self.cache, self.text)


class Runs:
    """The runs of one text: the target's, and the draft's if the draft model is used."""

    def __init__(self, target: ModelRun, draft: ModelRun | None):
        """Raises OutOfMemory."""
        self.target, self.draft = target, draft
        self.all = [target, draft] if draft else [target]
        require_caches(self.all)

    def keep(self, kept: Sequence[KeptCache], text: list[int], is_strict: bool) -> None:
        """Keep the caches for the next text. kept: of the target and the draft, or empty."""
        for run, cache in zip(self.all, kept, strict=False):
            run.keep(cache, text, is_strict)

    def capture(self, shortest: int) -> None:
        for run in self.all:
            run.capture(shortest)

    def __enter__(self) -> "Runs":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        for run in self.all:
            run.end(is_whole=kind in (None, GeneratorExit))  # the caller may close the generator


def require_caches(runs: Sequence[ModelRun]) -> None:
    """Raise OutOfMemory unless the caches of these runs fit into memory together.

    On a CPU, the system provides memory only when it is first written. So each cache could be made,
    although all of them together do not fit.
    """
    fast, n_bytes = [run for run in runs if isinstance(run, FastRun)], 0
    for run in fast:
        if not run.model.find_reusable(run.capacity, run.pass_config):
            run.model.reusable.clear()
            n_bytes += run.model.cache_bytes(run.capacity, run.pass_config)
    if fast:
        sizes = " and ".join(str(run.capacity) for run in fast)
        require_memory(n_bytes, fast[0].device, f"caches of {sizes} tokens")

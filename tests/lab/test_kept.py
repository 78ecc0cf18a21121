"""Tests of caches that are kept from one text to the next: the text is that of a fresh run, and the
models do not run again what they have run.

The turns of a case go on where the last one ended, go on with new ids, and change ids in the middle
of what a tree has committed.
"""

import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from fast import count_rows, fix_shapes, make_head, noisy_pair, pretend_capture
from small import random_config, random_tensors
from torch import Tensor

import dynatree_lab as lab
from dynatree_lab.engine.model import FastGPTNeoX
from dynatree_lab.engine.passes import Window
from dynatree_lab.generation.config import GenerationConfig
from dynatree_lab.generation.kept import KeptCache
from dynatree_lab.methods import METHODS
from dynatree_lab.methods.sampler import Sampling
from dynatree_lab.metrics import token_ids
from gpt_neox import PREFILL_CHUNK, GPTNeoX

MODES = ("reference", "fixed", "rebuild", "window", "sampled", "head")
CASES = [(method, "tight") for method in METHODS]
CASES += [(method, MODES[i % len(MODES)]) for i, method in enumerate(METHODS)]
CASES += [("auto", mode) for mode in MODES]
WORDS = {"auto": "costs=0.1:0.01:0.001:0.001"}  # costs by a clock would change sampled text
LIMIT = 12
ModelPair = tuple[GPTNeoX, GPTNeoX]
Kept = Sequence[KeptCache]


def config_of(words: str, **options: object) -> GenerationConfig:
    """Return the config of a method and its settings, without the word for a head."""
    method, *others = words.removesuffix(" head").split()
    config = GenerationConfig.parse(method, *others, *WORDS.get(method, "").split())
    return replace(config, **options)


def make_pair(mode: str, dtype: torch.dtype = torch.float32) -> ModelPair:
    """Return a random target, and a noisy copy or a head as its draft."""
    kind = GPTNeoX if mode == "reference" else FastGPTNeoX
    target, draft = noisy_pair(5, dtype=dtype, kind=kind)
    if mode.endswith("head"):
        tensors = {n: t.to(dtype) for n, t in random_tensors(random_config(), 5).items()}
        draft = make_head(tensors, 1)
    if mode == "fixed":
        fix_shapes(target, draft)
    return target, draft


def random_ids(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(96) for _ in range(n)]


class Run:
    """A text, the logits from which its ids were chosen, and its trees."""

    def __init__(self, pair: ModelPair, ids: list[int], config: GenerationConfig, kept: Kept = ()):
        logits: list[Tensor] = []
        options = {"inspect": logits.append, "kept": kept}
        steps = list(lab.generate(*pair, ids, config, LIMIT, **options))
        self.ids, self.logits = token_ids(steps), torch.cat(logits)
        self.trees = [(step.tree.tokens, step.tree.parents, step.path) for step in steps]
        self.draft_rows = [n for step in steps for n in step.draft_rows]

    def is_sure(self) -> bool:
        """Whether rounding cannot change a greedy token."""
        first, second = self.logits.topk(2).values.unbind(1)
        return bool((first - second > 3e-5).all())


def turns(rng: random.Random) -> Iterator[list[int]]:
    """Yield the ids of each turn, and get the ids that it has written."""
    ids = random_ids(rng, 40)
    ids = ids + (yield ids)
    ids = ids + (yield ids)
    ids = ids + random_ids(rng, 5)
    ids = ids + (yield ids)
    n = len(ids) - rng.randint(2, LIMIT - 1)
    yield ids[:n] + [(ids[n] + 1) % 96] + ids[n + 1 :]


def count_equal(ids: list[int], others: list[int]) -> int:
    pairs = enumerate(zip(ids, others, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ids), len(others)))


@pytest.mark.parametrize(("method", "mode"), CASES)
def test_turns_are_fresh_runs(method: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare all ids, and count the rows of the target's first pass of each turn. Memory of fixed
    shapes is used by another text between two turns. Models of gpt_neox.py keep nothing."""
    pretend_capture(monkeypatch)
    n_rows = config_of(method).method.facts.max_verified
    config = config_of(
        method,
        sampling=Sampling(0.8, 0.95, seed=3) if mode == "sampled" else Sampling(),
        window=Window(max(n_rows, 24), 2) if mode == "window" else Window(),
        commit="rebuild" if mode == "rebuild" else "keep",
    )
    pair, kept, case = make_pair(mode), (KeptCache(), KeptCache()), turns(random.Random(method))
    rows, ids, n_kept = count_rows(pair[0]), next(case), 0
    for _ in range(4):
        expected = Run(pair, ids, config)
        if mode == "fixed":
            Run(pair, ids[::-1], config)
        assert mode == "sampled" or expected.is_sure()
        rows.clear()
        assert Run(pair, ids, config, kept).ids == expected.ids
        if mode != "window":
            assert rows[0] == len(ids) - n_kept
        with contextlib.suppress(StopIteration):
            ids = case.send(expected.ids)
        n_kept = count_equal(kept[0].ids, ids[:-1])
        assert n_kept > 40 or mode == "reference"


TREES = ["dynatree", "dynatree head", "recycle", "graft base=linear", "auto"]


@pytest.mark.parametrize("words", TREES)
def test_trees_are_those_of_fresh_runs(words: str) -> None:
    """Compare the trees, which show what the draft and the tables know of each turn. Count the rows
    of the draft's first pass: the pending id of the last turn, two new ids, and the first token."""
    pair, kept, config = make_pair(words), (KeptCache(), KeptCache()), config_of(words)
    rows, ids = count_rows(pair[1]), random_ids(random.Random(1), 150)
    for _ in range(3):
        n_kept = len(kept[1].ids)
        expected = Run(pair, ids, config)
        rows.clear()
        found = Run(pair, ids, config, kept)
        assert found.trees == expected.trees
        assert "dynatree" not in words or rows[0] == len(ids) + 1 - n_kept
        assert found.draft_rows == rows
        ids = [*ids, *found.ids, 7, 1]
    assert "dynatree" not in words or n_kept > 150


STRICT = ["dynatree", "dyspec N=8", "auto", "graft base=linear", "linear head"]


@pytest.mark.parametrize(("number", "words"), list(enumerate(STRICT)))
def test_strict_turns_have_the_bits_of_fresh_runs(number: int, words: str) -> None:
    """Compare all logits and trees in bfloat16, and count the rows that are not run again: the
    first chunk of the prompt. A draft whose prompt is little longer runs all of it. The third turn
    is not strict, and its chunks are no others' chunks. It takes 2 s: prompts of 1,200 ids."""
    config = config_of(words, strict=True, sampling=Sampling((0.8, 0.0)[number % 2]))
    pair, kept = make_pair(words, torch.bfloat16), (KeptCache(), KeptCache())
    rows, rng = [count_rows(model) for model in pair], random.Random(words)
    ids = random_ids(rng, 600)
    for n_target, n_draft in ((0, 0), (PREFILL_CHUNK, 0), (PREFILL_CHUNK, PREFILL_CHUNK)):
        expected = Run(pair, ids, config)
        n_rows = list(map(sum, rows))
        found = Run(pair, ids, config, kept)
        n_own = [sum(each) - n for each, n in zip(rows, n_rows, strict=True)]
        assert found.ids == expected.ids and found.trees == expected.trees
        assert torch.equal(found.logits, expected.logits)
        assert [n - own for n, own in zip(n_rows, n_own, strict=True)] == [n_target, n_draft]
        for each in rows:
            each.clear()
        ids = ids + found.ids
        if n_target:
            ids = ids + random_ids(rng, 600)
            Run(pair, ids, replace(config, strict=False), kept)
            for each in rows:
                each.clear()
            ids = [*ids[:1100], *random_ids(rng, 50)]


def test_a_window_reuses_what_it_has_not_dropped() -> None:
    """Count the rows of the target's first pass. A change before the last drop needs dropped ids,
    and another window other ones."""
    target, draft = make_pair("tight")
    rows = count_rows(target)
    ids = [3, 14, 15, 92, 65] * 30
    window, other = Window(64, 4), Window(60, 4)
    n_at_drop = 84 + 4 * 16  # the cache drops 16 ids when it has 84, the last time of 148
    changed = [*ids[:n_at_drop], 7, *ids[n_at_drop + 1 :]], [*ids[:147], 7, *ids[148:]]
    for again, window_again, n_kept in [
        (ids, window, 149), (changed[0], window, 148), (changed[1], window, 0), (ids, other, 0)
    ]:  # fmt: skip
        kept = KeptCache(), KeptCache()
        Run((target, draft), ids, config_of("dynatree", window=window), kept)
        rows.clear()
        Run((target, draft), again, config_of("dynatree", window=window_again), kept)
        n_run = len(ids) - n_kept
        assert rows[0] == (n_run if n_kept else window_again.max_length)


def test_strict_turns_reuse_nothing_after_a_drop() -> None:
    """Compare the bits of a second turn with a fresh run's. The window has dropped tokens in both,
    so the kept keys are those of other chunks."""
    pair, kept = make_pair("tight"), (KeptCache(), KeptCache())
    config, rng = config_of("dynatree strict window=64 sinks=4"), random.Random(1)
    ids = random_ids(rng, 158)
    ids = [*ids, *Run(pair, ids, config, kept).ids, *random_ids(rng, 4)]
    found, expected = Run(pair, ids, config, kept), Run(pair, ids, config)
    assert found.ids == expected.ids and torch.equal(found.logits, expected.logits)


def test_turns_may_have_any_config() -> None:
    """Check methods without a draft between others, and a window that comes and goes."""
    pair, kept = make_pair("tight"), (KeptCache(), KeptCache())
    ids = [3, 14, 15, 92, 65] * 8
    for words in [
        *("dynatree", "recycle", "dyspec N=16 window=64", "auto D_max=0", "dynatree window=64"),
        *("linear strict", "graft", "ar", "dynatree"),
    ]:
        expected = Run(pair, ids, config_of(words))
        assert Run(pair, ids, config_of(words), kept).ids == expected.ids, words
        ids = [*ids, *expected.ids, 5]


def test_a_turn_that_ends_early() -> None:
    """Check a generator that is closed, whose caches are kept, and one that raises, whose caches
    are not."""
    pair, kept, config = make_pair("tight"), (KeptCache(), KeptCache()), config_of("dynatree")
    ids = [3, 14, 15, 92, 65] * 8
    steps = lab.generate(*pair, ids, config, LIMIT, kept=kept)
    ids += next(steps).tokens + next(steps).tokens
    steps.close()
    assert kept[0].ids == ids[:-1] and 40 <= len(kept[1].ids) < len(ids)

    def interrupt(logits: Tensor) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(lab.generate(*pair, ids, config, LIMIT, kept=kept, inspect=interrupt))
    assert not kept[0].ids and not kept[1].ids
    assert Run(pair, ids, config, kept).ids == Run(pair, ids, config).ids

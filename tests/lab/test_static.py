"""Tests of the trees of confident and specinfer; test_draft_tree.py tests linear and fixed."""

from collections import Counter

import pytest
import torch
from growing import DrawnFakeDraft, grow
from trees import ROOT, VOCAB, FakeDraft, Path, paths

from dynatree_lab.methods.sampler import Sampling
from dynatree_lab.methods.static import ConfidentChain, SpecInfer

CPU = torch.device("cpu")


def confident_chain(draft: FakeDraft, settings: ConfidentChain) -> list[Path]:
    """Return the paths of the chain, which ends with the first token less likely than p_min."""
    path = (ROOT,)
    chain = [path]
    while len(chain) <= settings.K:
        probs = torch.softmax(draft.logits(path), -1)
        path += (int(probs.argmax()),)
        chain.append(path)
        if probs.max() < settings.p_min:
            break
    return chain


def test_a_confident_chain_ends_with_its_first_unsure_token() -> None:
    lengths: Counter[int] = Counter()
    for seed in range(60):
        draft = FakeDraft(seed)
        settings = ConfidentChain(K=4, p_min=(0.3, 0.6, 0.9)[seed % 3])
        tree = grow(settings.make_rule(), ROOT, draft, 127)
        assert paths(tree) == confident_chain(draft, settings)
        assert draft.n_calls == max(tree.depths), "a draft pass was not needed"
        lengths[max(tree.depths)] += 1
    assert set(lengths) == {1, 2, 3, 4}, lengths


def test_a_drawn_chain_ends_by_the_drawn_token() -> None:
    """Check that the drawn token's own probability decides, not the likeliest token's. The token is
    added in any case."""
    n_ended = 0
    for seed in range(40):
        sampler = Sampling(0.5, seed=seed).sampler(CPU)
        draft = DrawnFakeDraft(seed, sampler)
        tree = grow(ConfidentChain(K=4, p_min=0.4).make_rule(), ROOT, draft, 127)
        rows = paths(tree)
        confidences = []
        for path in rows[1:]:
            probs = sampler.draft_distribution(draft.logits(path[:-1])[None])[0]
            confidences.append(float(probs[path[-1]]))
        assert all(p >= 0.4 for p in confidences[:-1])
        assert max(tree.depths) == 4 or confidences[-1] < 0.4
        n_ended += max(tree.depths) < 4
    assert 5 < n_ended < 35


def widest_tree(draft: FakeDraft, widths: list[int]) -> list[Path]:
    """Return the paths of a tree, breadth first, with widths[depth] likeliest children per node."""
    level = [(ROOT,)]
    tree = list(level)
    for width in widths:
        below = []
        for path in level:
            for token in draft.logits(path).argsort(descending=True)[:width].tolist():
                below.append(path + (token,))
        tree += below
        level = below
    return tree


@pytest.mark.parametrize("widths", [[3, 2, 1, 1], [1, 1, 3, 1, 1], [2, 4, 3], [1], [1, 126]])
def test_specinfer_has_the_widths_of_its_setting(widths: list[int]) -> None:
    """Check also that max_rows is the exact number of rows, unless the vocabulary is too small."""
    word = ":".join([str(width) for width in widths])
    for seed in range(5):
        draft = FakeDraft(seed)
        rule = SpecInfer(word).make_rule()
        tree = grow(rule, ROOT, draft, 127)
        assert paths(tree) == widest_tree(draft, widths)
        assert len(tree) == rule.max_rows or max(widths) > VOCAB
        assert draft.n_calls == len(widths)

"""Tests of lookup: its copies against a plain search, and its index against the committed text."""

import math
import random
from collections import Counter

import pytest
from fast import generate, random_model
from growing import RuleRecorder, grow

from draft_tree import Tree
from dynatree_lab.engine.passes import FULL_ATTENTION, Window
from dynatree_lab.methods.lookup import COPY_PROBS, Lookup
from dynatree_lab.methods.rules import are_retrieved


def literal_copy(text: list[int], n: int, n_tokens: int) -> tuple[list[int], int, int]:
    """Search backwards for each suffix of a text, and copy token by token what followed it.

    text: the pending root last. Returns the copied tokens (none if no suffix occurred before), the
    length of that suffix, and the index at which the copy begins.
    """
    for length in range(min(n, len(text) - 1), 0, -1):
        for first in reversed(range(len(text) - length)):
            if text[first : first + length] == text[-length:]:
                whole = list(text)
                for i in range(n_tokens):
                    whole.append(whole[first + length + i])
                return whole[len(text) :], length, first + length
    return [], 0, 0


def assert_chain(tree: Tree, root: int, copied: list[int]) -> None:
    """Check that a tree is the root and the copied tokens in a chain, all marked as retrieved."""
    n_rows = 1 + len(copied)
    assert tree.tokens == [root] + copied
    assert tree.parents == list(range(-1, n_rows - 1))
    assert tree.depths == list(range(n_rows))
    assert tree.draft_slots == [-1] * n_rows
    assert are_retrieved(tree) == [False] + [True] * len(copied)


def test_a_copy_is_what_a_plain_search_finds() -> None:
    rng = random.Random(0)
    seen: Counter = Counter()
    for _ in range(600):
        n_ids = rng.randint(1, 6)
        text = [rng.randrange(n_ids) for _ in range(rng.choice([1, 2, 4, 12, 40]))]
        settings = Lookup(n=rng.randint(1, 6), K=rng.randint(1, 12))
        max_depth = rng.randint(0, 14)
        n_tokens = min(settings.K, max_depth)
        copied, length, place = literal_copy(text, settings.n, n_tokens)
        rule = settings.make_rule()
        rule.start(text[:-1])
        tree = grow(rule, text[-1], None, max_depth)
        assert_chain(tree, text[-1], copied)
        if copied:
            p = [1.0]
            for i in range(n_tokens):
                p.append(p[-1] * COPY_PROBS[min(length + i, 3) - 1])
            assert [math.exp(logprob) for logprob in tree.path_logprobs] == pytest.approx(p)
        seen[f"suffix of {length}"] += 1
        seen["copies itself"] += length > 0 and place + n_tokens > len(text)
        seen["no room"] += max_depth == 0
        seen["cut by depth"] += 0 < max_depth < settings.K and length > 0
        seen["shorter than n"] += len(text) <= settings.n
    wanted = [f"suffix of {length}" for length in range(7)]
    wanted += ["copies itself", "no room", "cut by depth", "shorter than n"]
    assert min(seen[what] for what in wanted) >= 5, seen


def test_trust_limits_a_copy_by_the_tokens_that_agree_before_it() -> None:
    """Check agreeing tokens beyond the n that are looked up, up to the start of the text."""
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    for n_agreeing in (1, 2, 5, 6):
        for trust in (0, 1, 2):
            end = text[6 - n_agreeing : 6]
            rule = Lookup(n=3, K=6, trust=trust).make_rule()
            rule.start([*text, 99, *end[:-1]])
            tree = grow(rule, end[-1], None, 99)
            n_copied = min(6, trust * n_agreeing or 6)
            assert tree.tokens == [6, *text[6 : 6 + n_copied]]


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6] * 2


@pytest.mark.parametrize("window", [FULL_ATTENTION, Window(24, 4)], ids=["whole", "window"])
@pytest.mark.parametrize("commit", ["keep", "rebuild"])
def test_the_text_is_followed_as_it_is_committed(window: Window, commit: str) -> None:
    """Check that the rule's text has bonus tokens and tokens outside the window, and all but the
    pending root."""
    settings = RuleRecorder(Lookup(n=3, K=6))
    text = list(PROMPT)
    n_full = n_partly = 0
    steps = generate(random_model(7), None, PROMPT, settings, 90, commit=commit, window=window)
    for step in steps:
        text += step.tokens
        if len(text) < len(PROMPT) + 90:  # the last step may be cut
            assert settings.rules[-1].text == text[:-1]
            n_full += max(step.tree.depths) == 6
            n_partly += 0 < len(step.path) - 1 < max(step.tree.depths)
    assert n_full > 2 and n_partly > 0

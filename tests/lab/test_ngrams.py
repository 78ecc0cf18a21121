"""Tests of the n-gram index of lookup and auto: what it finds, and which contexts it drops."""

import random

from dynatree_lab.methods.ngrams import NGrams


def test_the_oldest_contexts_are_dropped() -> None:
    """Check that a full index drops its oldest contexts. Writing one again makes it the newest."""
    ngrams: NGrams[int] = NGrams(max_n=1, max_contexts=3)
    for token in (1, 2, 3, 1, 4):
        ngrams.write((token,), token)
    known = [token for token in range(6) if ngrams.find_longest((token,))[0]]
    assert known == [1, 3, 4]


def test_an_index_is_a_search_from_the_end() -> None:
    """Compare the index with a search of random texts. The oracle looks for the longest end of the
    context that occurs in the text, at its last place, and returns the token after it."""
    rng = random.Random(0)
    for _ in range(100):
        longest = rng.randint(1, 4)
        text = [rng.randrange(3) for _ in range(30)]
        ngrams: NGrams[int] = NGrams(longest)
        context: tuple[int, ...] = ()
        for place, token in enumerate(text[:-1]):
            context = ngrams.extend_context(context, token)
            ngrams.write(context, text[place + 1])
        asked = tuple(rng.randrange(4) for _ in range(5))
        expected = (0, None)
        for n in range(1, longest + 1):
            for place in range(n, len(text)):
                if tuple(text[place - n : place]) == asked[-n:]:
                    expected = (n, text[place])
        assert ngrams.find_longest(asked) == expected

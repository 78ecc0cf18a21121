"""The index that lookup and auto ask: what it recalls, and what it forgets."""

import random

from methods.ngrams import NGrams


def test_the_oldest_contexts_are_forgotten() -> None:
    """To write one again makes it the newest."""
    ngrams: NGrams[int] = NGrams(longest=1, most=3)
    for token in (1, 2, 3, 1, 4):
        ngrams.write((token,), token)
    known = [token for token in range(6) if ngrams.recall((token,))[0]]
    assert known == [1, 3, 4]


def test_an_index_is_a_search_from_the_end() -> None:
    """For any text: what follows the latest place of the longest end."""
    rng = random.Random(0)
    for _ in range(100):
        longest = rng.randint(1, 4)
        text = [rng.randrange(3) for _ in range(30)]
        ngrams: NGrams[int] = NGrams(longest)
        context: tuple[int, ...] = ()
        for place, token in enumerate(text[:-1]):
            context = ngrams.continued(context, token)
            ngrams.write(context, text[place + 1])
        asked = tuple(rng.randrange(4) for _ in range(5))
        expected = (0, None)
        for n in range(1, longest + 1):
            for place in range(n, len(text)):
                if tuple(text[place - n : place]) == asked[-n:]:
                    expected = (n, text[place])
        assert ngrams.recall(asked) == expected

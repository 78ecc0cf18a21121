"""The index that recycle, graft, lookup and auto ask: what it recalls, and what it forgets."""

import random

from methods.ngrams import NGrams


def test_the_longest_end_that_is_known_wins() -> None:
    ngrams: NGrams[list[int]] = NGrams(longest=3)
    ngrams.write((1, 2, 3), [10, 11])
    ngrams.write((9, 2, 3), [20, 21])
    ngrams.write((7, 3), [30])
    assert ngrams.recall((1, 2, 3)) == (3, [10, 11])
    assert ngrams.recall((5, 2, 3)) == (2, [20, 21])
    assert ngrams.recall((5, 5, 3)) == (1, [30])
    assert ngrams.recall((1, 2, 4)) == (0, None)
    assert ngrams.recall(()) == (0, None)


def test_what_is_written_last_stays() -> None:
    ngrams: NGrams[str] = NGrams(longest=2)
    for after in ("first", "second", "last"):
        ngrams.write((4, 5), after)
    ngrams.write((6, 5), "of another")
    assert ngrams.recall((4, 5)) == (2, "last")
    assert ngrams.recall((5,)) == (1, "of another")


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

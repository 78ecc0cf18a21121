"""What came after a few tokens, the last time they did: recycle, graft, lookup and auto ask it.

ngrams = NGrams(longest=3)
ngrams.write((12, 7), [3, 9, 4, 1])  # after 12, 7; also after 7 alone
ngrams.recall((5, 12, 7))  # (2, [3, 9, 4, 1]): two tokens of this context are known
"""

import sys
from typing import Generic, TypeVar

After = TypeVar("After")
Context = tuple[int, ...]  # the text up to a token, as much of it as an n-gram has


class NGrams(Generic[After]):
    """An index of contexts of 1 to `longest` tokens."""

    def __init__(self, longest: int, most: int = sys.maxsize):
        """most: contexts that are kept; those written longest ago are forgotten."""
        self.longest, self.most = longest, most
        self.seen: dict[Context, After] = {}

    def write(self, context: Context, after: After) -> None:
        """What came after this context, and after each shorter end of it."""
        for n in range(1, min(len(context), self.longest) + 1):
            end = context[-n:]
            self.seen.pop(end, None)  # so that it goes to the end: the first is the oldest
            self.seen[end] = after
        while len(self.seen) > self.most:
            del self.seen[next(iter(self.seen))]

    def recall(self, context: Context) -> tuple[int, After | None]:
        """The length of the longest end that is known, and what came after it; 0 if none is."""
        for n in range(min(len(context), self.longest), 0, -1):
            after = self.seen.get(context[-n:])
            if after is not None:
                return n, after
        return 0, None

    def continued(self, context: Context, token: int) -> Context:
        """The context of the token that follows."""
        return (*context, token)[-self.longest :]

"""lookup: the text copies itself, no draft model (prompt lookup decoding, Saxena 2023).

The longest end of the text, of n tokens or fewer, that has occurred before is found again, and what
followed its latest earlier occurrence is proposed: a chain of K tokens, or with `trust` X no more
than X times as many as agree before it there, which are looked for beyond n, too. A copy that
reaches the end of the text goes on into what it has itself copied, as LZ77 does, so a short
repetition is continued for K tokens. In transformers this is `prompt_lookup_num_tokens`, in
llama.cpp its lookup example.

    python dynatree.py --method lookup --set n=2 --prompt "..."

Every n-gram of the text is indexed as it is committed, so a lookup is n looks into a dictionary,
however long the text.
"""

import math
from dataclasses import dataclass

from draft_tree import MAX_ROWS, Rule, Tree, setting
from methods.ngrams import NGrams
from methods.rules import MethodRule, MixedTree
from methods.settings import MethodSettings

# How often a copied token is right after one, two, or three and more tokens that agree with what is
# before it there, those copied before it among them: measured as retrieval.P_TINY was. It is what
# is said of a copy; no tree goes by it
COPY_PROBS = (0.33, 0.56, 0.91)


@dataclass(frozen=True)
class Lookup(MethodSettings):
    """lookup: what followed the text's own end the last time, no draft model (prompt lookup)."""

    n: int = setting(3, 1, 16, "longest n-gram looked up; then n - 1, ..., 1")
    K: int = setting(10, 1, MAX_ROWS - 1, "tokens copied per iteration")
    trust: int = setting(0, 0, 16, "tokens copied per token that agrees, K at most; 0: always K")

    def make_rule(self) -> Rule:
        return LookupRule(self)


class LookupRule(MethodRule):
    """One generation of lookup: its text so far, and where in it each n-gram was last."""

    is_chain = True
    reads_prompt = True

    def __init__(self, settings: Lookup):
        super().__init__(max_branches=1, max_depth=0, max_rows=1 + settings.K)
        self.settings = settings
        self.text: list[int] = []  # up to the pending root, which is not part of it
        self.places: NGrams[int] = NGrams(settings.n)  # where in it the next token stands

    def start(self, prompt: list[int]) -> None:
        for token in prompt:
            self.append(token)

    def append(self, token: int) -> None:
        """The text is longer by one token, and by the n-grams that end in it."""
        self.text.append(token)
        self.places.write(tuple(self.text[-self.settings.n :]), len(self.text))

    def begin_tree(self, root: int, max_depth: int) -> int:
        self.limit = max_depth
        return 0

    def finish_tree(self, tree: Tree) -> Tree:
        """The root with the chain that is copied below it."""
        tree = MixedTree.of(tree)
        root = tree.tokens[0]
        n_known, place = self.places.recall((*self.text[-self.settings.n :], root))
        if not n_known:
            return tree
        n_copied = min(self.settings.K, self.limit)
        if self.settings.trust:
            n_copied = min(n_copied, self.settings.trust * self.agreeing(place, root))
        source = self.text[place : place + n_copied] + [root]  # the root only if it comes so far
        path_logprob = 0.0
        for i in range(n_copied):
            n_agreeing = min(n_known + i, len(COPY_PROBS))
            path_logprob += math.log(COPY_PROBS[n_agreeing - 1])
            tree.add_retrieved(source[i % len(source)], i, path_logprob)
        return tree

    def agreeing(self, place: int, root: int) -> int:
        """How many tokens before this place are those at the end of the text, K at most."""
        end = [*self.text[-self.settings.K :], root]
        n = 1
        while n < min(self.settings.K, place) and self.text[place - 1 - n] == end[-1 - n]:
            n += 1
        return n

    def adapt(self, tree: Tree, path: list[int]) -> None:
        for row in path:
            self.append(tree.tokens[row])

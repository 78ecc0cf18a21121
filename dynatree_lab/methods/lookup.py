"""lookup: candidates copied from the text itself, no draft model (prompt lookup, Saxena 2023).

The rule finds the longest suffix of the text, of at most n tokens, that has occurred before. It
proposes what followed the latest earlier occurrence: a chain of K tokens. With `trust` X the chain
has at most X tokens for each token that matches before the copy; these are counted beyond n, too. A
copy that reaches the end of the text continues with the tokens it has just copied, as in LZ77. So a
short repetition is continued for K tokens. In transformers this is `prompt_lookup_num_tokens`, in
llama.cpp the lookup example.

    python -m dynatree_lab --method lookup --set n=2 --prompt "..."

Every n-gram of the text is indexed when it is committed, so a lookup is n dictionary accesses,
however long the text is.
"""

import math
from dataclasses import dataclass

from draft_tree import MAX_LEVELS, Rule, Tree, setting
from dynatree_lab.methods.ngrams import NGrams
from dynatree_lab.methods.rules import MethodRule, MixedTree
from dynatree_lab.methods.settings import MethodSettings

# Acceptance rate of a copied token after 1, 2, or at least 3 matching tokens; copied ones before it
# count as matching. Measured like retrieval.TINY_PAIR_SUCCESSOR_PROBS. These numbers become
# path_logprobs for observers; no tree depends on them
COPY_PROBS = (0.33, 0.56, 0.91)


@dataclass(frozen=True)
class Lookup(MethodSettings):
    """lookup: copies what followed the last tokens earlier in the text; no draft model."""

    n: int = setting(3, 1, 16, "length of the longest n-gram looked up; then n - 1, ..., 1")
    K: int = setting(10, 1, MAX_LEVELS, "tokens copied per iteration")
    trust: int = setting(0, 0, 16, "tokens copied per matching token, at most K; 0: always K")

    def make_rule(self) -> Rule:
        return LookupRule(self)


class LookupRule(MethodRule):
    """The rule of lookup: the text so far, and where each n-gram of it occurred last."""

    is_chain = True

    def __init__(self, settings: Lookup):
        super().__init__(max_branches=1, max_depth=0, max_rows=1 + settings.K)
        self.settings = settings
        self.text: list[int] = []  # without the pending root
        self.next_index: NGrams[int] = NGrams(settings.n)  # of the token after each n-gram

    def start(self, prompt: list[int]) -> None:
        for token in prompt:
            self.append(token)

    def append(self, token: int) -> None:
        """Append a token to the text, and index the n-grams that end in it."""
        self.text.append(token)
        self.next_index.write(tuple(self.text[-self.settings.n :]), len(self.text))

    def begin_tree(self, root_token: int, max_depth: int) -> int:
        self.limit = max_depth
        return 0

    def finish_tree(self, tree: Tree) -> Tree:
        """Return the root with the copied chain below it."""
        tree = MixedTree.from_tree(tree)
        root = tree.tokens[0]
        n_matching, index = self.next_index.find_longest((*self.text[-self.settings.n :], root))
        if not n_matching:
            return tree
        n_copied = min(self.settings.K, self.limit)
        if self.settings.trust:
            n_copied = min(n_copied, self.settings.trust * self.count_matching(index, root))
        # The root ends the text; only a copy that reaches this end has it
        source = self.text[index : index + n_copied] + [root]
        path_logprob = 0.0
        for i in range(n_copied):
            path_logprob += math.log(COPY_PROBS[min(n_matching + i, len(COPY_PROBS)) - 1])
            tree.add_retrieved(source[i % len(source)], i, path_logprob)
        return tree

    def count_matching(self, index: int, root: int) -> int:
        """Return how many tokens before an index match the end of the text, at most K."""
        end = [*self.text[-self.settings.K :], root]
        n = 1
        while n < min(self.settings.K, index) and self.text[index - 1 - n] == end[-1 - n]:
            n += 1
        return n

    def adapt(self, tree: Tree, path: list[int]) -> None:
        for row in path:
            self.append(tree.tokens[row])

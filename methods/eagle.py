"""EAGLE: a trained head over the target's hidden states drafts the tree (Li et al. 2024).

At token i, the head predicts the target's last hidden state. Its input is token i, and the state
at token i - 1:

    state[i] = layer(fc([embedding(token[i]), state[i - 1]]))   of size [hidden]

`fc` is one linear layer over both, and `layer` is one GPT-NeoX layer with a KV cache of its own.
The embedding, the final norm and the output matrix are the target's. The latter two turn a
predicted state into the probabilities of the next token, as they do with the target's own states.

A committed token is paired with the target's state at the token before it, which the target has
computed anyway. Below the root, a node is paired with the head's prediction at its parent. The
nodes of a level are run in one pass under the tree's mask (EAGLE-2). After acceptance, the head
runs the accepted tokens again with the target's states, so its errors do not accumulate.

So a head is a GPTNeoX of one layer with another embedding, and any ModelDrafter can run it. It
differs from EAGLE's in three points. The states are those before the target's final norm, while
EAGLE's code takes them after it. The layer has its input norm, which EAGLE's code leaves out. And
the first token of a sequence is paired with zeros, while EAGLE's head starts at the second token.

    folders = Path("models/tiny/eagle"), Path("models/tiny/target")
    head = load_head(*folders, torch.device("cpu"), torch.float32)  # engine/eagle_head.py
    for step in generate(target, head, prompt, Chain(K=4), 64):  # methods/compose.py
        print(step.tokens)

The text is exact whatever the head predicts, because the target verifies every token.

Shapes: n rows of a pass, hidden the target's hidden size.
"""

import torch
from torch import Tensor, nn

from draft_tree import MAX_ROWS, Candidates, Tree
from dynatree import ModelDrafter
from gpt_neox import PREFILL_CHUNK, GPTNeoX, KVCache
from methods.observing import HiddenDrafter


class StateEmbedding(nn.Module):
    """An embedding that also takes a state for each token: fc([embedding, state])."""

    def __init__(self, embedding: nn.Module, fc: nn.Linear):
        """fc: from 2 * hidden to hidden."""
        super().__init__()
        self.embedding, self.fc = embedding, fc
        # [n, hidden] with room for a chunk of prefill and for a level, filled by
        # EagleHead.take_states before each pass, which reads the first ones. It is a buffer because
        # a CUDA graph reads its inputs at fixed addresses
        n = max(PREFILL_CHUNK, MAX_ROWS)
        states = torch.zeros(n, fc.out_features, device=fc.weight.device)
        self.register_buffer("input_states", states.to(fc.weight.dtype), persistent=False)

    @property
    def weight(self) -> Tensor:
        """The embedding matrix [V, hidden], from which a GPTNeoX reads its device and dtype."""
        return self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the input [n, hidden] of the layer for tokens [n]."""
        states = self.input_states[: len(tokens)]
        return self.fc(torch.cat([self.embedding(tokens), states], dim=-1))


class EagleHead:
    """A mixin that adds the state input. List it before GPTNeoX or FastGPTNeoX in the bases.

    Before a pass, set `next_states` [m, hidden] to the states of the tokens that will be run, in
    their order. Each pass removes those that it uses.
    """

    def add_state_input(self, fc: nn.Linear) -> None:
        """Replace the embedding by a StateEmbedding. Call this once, after from_tensors."""
        self.gpt_neox.embed_in = StateEmbedding(self.gpt_neox.embed_in, fc)
        self.next_states = fc.weight.new_empty(0, fc.out_features)

    def take_states(self, n: int) -> None:
        """Move the first n of next_states to the embedding, for a pass of n rows."""
        states, self.next_states = self.next_states.split([n, len(self.next_states) - n])
        self.gpt_neox.embed_in.input_states[:n].copy_(states)

    def last_states(self, cache: KVCache, n: int) -> Tensor:
        """Return the predicted states [n, hidden] of the last n rows of the latest pass. A later
        pass may overwrite them."""
        raise NotImplementedError(f"{type(self).__name__} has no last_states")


class ReferenceHead(EagleHead, GPTNeoX):
    """A head on the model of gpt_neox.py, whose every pass is a call of `hidden`."""

    def hidden(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | None = None
    ) -> Tensor:
        self.take_states(len(tokens))
        self.predicted = super().hidden(tokens, positions, cache, mask)
        return self.predicted

    def last_states(self, cache: KVCache, n: int) -> Tensor:
        return self.predicted[-n:]


def head_of(draft: object) -> EagleHead | None:
    """Return draft, or draft.model, if it is an EagleHead; otherwise None."""
    model = getattr(draft, "model", draft)
    return model if isinstance(model, EagleHead) else None


class EagleDrafter(HiddenDrafter):
    """A ModelDrafter over a head, whose next_states are set before each pass."""

    def __init__(self, drafter: ModelDrafter, head: EagleHead):
        """drafter: runs the head and chooses the candidates."""
        self.drafter, self.head = drafter, head

    def start(self, prompt: list[int], capacity: int, vocab_size: int) -> None:
        self.drafter.start(prompt, capacity, vocab_size)
        weight = self.head.gpt_neox.embed_in.weight
        # One state for each uncached token (ModelDrafter.uncached), in tensors [n, hidden]. The
        # first token of the sequence has zeros
        self.states = [weight.new_zeros(1, weight.shape[1])]
        # The target's states [n, hidden] of each of its passes since the last commit
        self.observed: list[Tensor] = []

    def observe_hidden(self, hidden: Tensor) -> None:
        self.observed.append(hidden.to(self.head.dtype, copy=True))

    def draft(self, tokens: list[int], parents: list[int] | None, k: int) -> Candidates:
        if parents is None:  # the root: the pass runs all uncached tokens
            self.head.next_states, self.states = torch.cat(self.states), []
        else:
            self.head.next_states = self.level_states[parents]
        found = self.drafter.draft(tokens, parents, k)
        # [n, hidden], predicted at the nodes of this level
        self.level_states = self.head.last_states(self.drafter.cache, len(tokens))
        return found

    def commit(self, tree: Tree, path: list[int], tokens: list[int]) -> None:
        # With a path of the root alone, no drafted row stays in the cache, and all accepted tokens
        # are uncached. The drafted rows were run with predicted states
        self.drafter.commit(tree, path[:1], tokens)
        states, self.observed = torch.cat(self.observed), []
        if len(tree) > 1:  # otherwise they are those of the prompt, or of a root alone
            states = states[path]
        self.states.append(states)

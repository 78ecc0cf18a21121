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
    for step in generate(target, head, prompt, GenerationConfig(Chain(K=4)), 64):
        print(step.tokens)

The text is exact whatever the head predicts, because the target verifies every token.

Shapes: n rows of a pass, hidden the target's hidden size.
"""

import torch
from torch import Tensor, nn

from draft_tree import Candidates, Tree
from dynatree import Drafter, ModelDrafter
from gpt_neox import KVCache, Model


class StateTransformer(nn.Module):
    """A transformer of one layer whose input is fc([embedding, state]).

    A cache of a head has a second layer, which no attention reads. In place of keys it has the
    state before each slot's token, and in place of values the state that is predicted at the token.
    """

    def __init__(self, transformer: nn.Module, fc: nn.Linear):
        """fc: from 2 * hidden to hidden."""
        super().__init__()
        for name, module in transformer.named_children():  # a model finds them under these names
            setattr(self, name, module)
        transformer.embed_in = nn.Identity()  # `forward` passes the layer's input, not tokens
        self.transformer, self.fc = transformer, fc

    def forward(self, tokens: Tensor, rotary: Tensor, kv: Tensor, *others: object) -> Tensor:
        """Return the predicted states [n, hidden] of tokens [n]. kv: [2, 2, H, capacity, D].
        others: those of engine.layers.FusedTransformer."""
        slots = self.written_slots(len(tokens), *others)
        before, predicted = kv[:, 1]  # [H, capacity, D] each
        states = before.index_select(1, slots).transpose(0, 1).flatten(1)  # [n, hidden]
        x = self.fc(torch.cat([self.embed_in(tokens), states], dim=-1))
        x = self.transformer(x, rotary, kv[:, :1], *others)
        predicted.index_copy_(1, slots, split_heads(x, kv))
        return x

    def written_slots(self, n: int, start: int | Tensor, mask: object) -> Tensor:
        """Return the slots [n] that a pass writes. start: the first one, or all of them."""
        if isinstance(start, Tensor):
            return start
        return torch.arange(start, start + n, device=self.fc.weight.device)


def split_heads(states: Tensor, kv: Tensor) -> Tensor:
    """Return states [n, hidden] as keys or values of a cache, [H, n, D]."""
    return states.unflatten(1, (kv.shape[2], kv.shape[4])).transpose(0, 1)


def with_states(kv: Tensor) -> Tensor:
    """Return a cache's memory [2, 1, H, capacity, D] with the layer for states."""
    return torch.cat([kv, torch.zeros_like(kv)], dim=1)


class EagleHead:
    """A mixin that adds the state input. List it before FastGPTNeoX in the bases.

    All states belong to a cache, so several texts may use one head at a time. Before a pass, set
    `cache.next_states` [m, hidden] to the states before the tokens that will be run, in their
    order. Each pass removes those that it uses.
    """

    transformer_class = StateTransformer

    def add_state_input(self, fc: nn.Linear) -> None:
        """Give the transformer its state input. Call this once, after from_tensors."""
        self.gpt_neox = self.transformer_class(self.gpt_neox, fc)

    def new_cache(self, capacity: int, *config: object) -> KVCache:
        """Return an empty cache that has no next_states."""
        cache = super().new_cache(capacity, *config)
        cache.next_states = self.gpt_neox.fc.weight.new_empty(0, self.config.hidden_size)
        return cache

    def take_states(self, cache: KVCache, n: int) -> None:
        """Move the first n of cache.next_states to the slots of a pass of n rows. Raises ValueError
        if there are fewer."""
        n_left = len(cache.next_states) - n
        if n_left < 0:
            raise ValueError(
                "an EAGLE head runs over the hidden states of its target; use it as the draft of "
                "dynatree_lab.generation.generate.generate"
            )
        states, cache.next_states = cache.next_states.split([n, n_left])
        cache.kv[0, 1, :, cache.length : cache.length + n] = split_heads(states, cache.kv)


def predicted_states(cache: KVCache, slots: list[int]) -> Tensor:
    """Return the states [n, hidden] that a head has predicted in these n slots of a cache."""
    return cache.kv[1, 1, :, slots].transpose(0, 1).flatten(1)


def head_of(draft: object) -> EagleHead | None:
    """Return the EagleHead that a drafter or a run has as its model, or None."""
    while draft is not None and not isinstance(draft, EagleHead):
        draft = getattr(draft, "model", None)
    return draft


def require_size(head: EagleHead, target: Model) -> None:
    """Raise ValueError if the target's hidden states have another size than the head's."""
    own, needed = head.config.hidden_size, target.config.hidden_size
    if own != needed:
        raise ValueError(f"the head is for a target of hidden_size {own}, this one has {needed}")


class HiddenDrafter(Drafter):
    """A drafter that reads the target's last hidden states, such as EagleDrafter."""

    def observe_hidden(self, hidden: Tensor) -> None:
        """Receive the states [n, hidden] of one pass of the target, on the target's device.

        They are the states before the final norm, of the next n tokens of the prompt or of the rows
        of a tree. A later pass may overwrite the tensor.
        """
        raise NotImplementedError


class EagleDrafter(HiddenDrafter):
    """A ModelDrafter over a head. It gives the head's cache the states of each pass."""

    def __init__(self, drafter: ModelDrafter, head: EagleHead):
        """drafter: runs the head and chooses the candidates."""
        self.drafter, self.head = drafter, head

    def start(self, prompt: list[int], capacity: int, vocab_size: int) -> None:
        self.drafter.start(prompt, capacity, vocab_size)
        weight = self.head.gpt_neox.embed_in.weight
        # One state for each uncached token (ModelDrafter.text), in tensors [n, hidden]. The
        # first token of the sequence has zeros
        self.states = [weight.new_zeros(1, weight.shape[1])]
        # The target's states [n, hidden] of each of its passes since the last commit
        self.observed: list[Tensor] = []

    def observe_hidden(self, hidden: Tensor) -> None:
        self.observed.append(hidden.to(self.head.dtype, copy=True))

    def draft(self, tree: Tree, rows: list[int], k: int) -> Candidates:
        cache = self.drafter.cache
        if rows == [0]:  # the pass runs all uncached tokens
            cache.next_states, self.states = torch.cat(self.states), []
        else:
            parents = [tree.draft_slots[tree.parents[row]] for row in rows]
            slots = [self.drafter.root_slot + slot for slot in parents]
            cache.next_states = predicted_states(cache, slots)
        return self.drafter.draft(tree, rows, k)

    def commit(self, tree: Tree, path: list[int], tokens: list[int]) -> None:
        # With a path of the root alone, no drafted row stays in the cache, and all accepted tokens
        # are uncached. The drafted rows were run with predicted states
        self.drafter.commit(tree, path[:1], tokens)
        states, self.observed = torch.cat(self.observed), []
        if len(tree) > 1:  # otherwise they are those of the prompt, or of a root alone
            states = states[path]
        self.states.append(states)

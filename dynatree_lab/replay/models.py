"""A target that knows only recorded texts, in place of a model.

A row at a position predicts the token that follows in the text. That is the target's own next token
after every row on the text's path, and the walk through a tree (verify.walk) reads no other row. So
the trees, paths and rows are those of the target. generation/replayed.py refuses what reads more of
a target.

    target = RecordedTarget([recorded], draft.config)
    for step in generate(target, ModelDrafter(draft), recorded.prompt, rule, 64):
        print(step.tokens)

Shapes: n rows of a pass, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dynatree_lab.replay.texts import RecordedText, ReplayError
from gpt_neox import Config


class RecordedCache:
    """The number of committed tokens of a text, in place of a KV cache."""

    def __init__(self) -> None:
        self.length = 0
        self.ids: list[int] = []  # of the prompt and the text, known after the prefill

    def commit(self, rows: Sequence[int]) -> None:
        self.length += len(rows)

    def rewind(self, length: int) -> None:
        self.length = length


class RecordedTarget:
    """A gpt_neox.Model of recorded texts. The prompt says which of them it continues."""

    device = torch.device("cpu")

    def __init__(self, texts: Sequence[RecordedText], config: Config):
        """config: the draft's, whose sizes take the place of the target's."""
        eos_ids, vocab_size = tuple(texts[0].eos_ids), texts[0].vocab_size
        self.config = replace(config, vocab_size=vocab_size, eos_ids=eos_ids)
        self.texts = list(texts)
        self.by_prompt = {tuple(text.prompt): text for text in texts}

    def find(self, prompt: Sequence[int], n_tokens: int = 1) -> RecordedText:
        """Return the text after a prompt. Raises ReplayError if none is recorded, or if it has less
        than n_tokens tokens and does not end in an EOS token."""
        text = self.by_prompt.get(tuple(prompt))
        if text is None:
            others = f"only after {len(self.texts)} others"
            raise ReplayError(f"no text is recorded after this prompt, {others}")
        if len(text.ids) < n_tokens and text.ids[-1] not in self.config.eos_ids:
            length = f"the recorded text has {len(text.ids)} tokens"
            raise ReplayError(f"max_new_tokens is {n_tokens}, but {length}")
        return text

    def new_cache(self, capacity: int) -> RecordedCache:
        return RecordedCache()

    def prefill(self, tokens: list[int], cache: RecordedCache) -> Tensor:
        text = self.find(tokens)
        cache.ids, cache.length = text.prompt + text.ids, len(tokens)
        return self.predict([cache.length - 1], cache.ids)

    def forward(
        self, tokens: Tensor, positions: Tensor, cache: RecordedCache, mask: Tensor | None = None
    ) -> Tensor:
        return self.predict(positions.tolist(), cache.ids)

    def predict(self, positions: Sequence[int], ids: list[int]) -> Tensor:
        """Return logits [n, V] with which the token after each position is certain. Raises
        ReplayError beyond the end of a text, unless it is an EOS token, after which none is read.
        """
        last = len(ids) - 1
        if max(positions) >= last and ids[last] not in self.config.eos_ids:
            raise ReplayError(
                f"the recorded text ends after {len(ids)} tokens, the prompt included"
            )
        logits = torch.full((len(positions), self.config.vocab_size), -torch.inf)
        for row, position in enumerate(positions):
            logits[row, ids[min(position + 1, last)]] = 0.0
        return logits

"""The fast model: gpt_neox.py's model with fused layers, and with caches that own their passes.

It is a gpt_neox.Model, and its greedy text is equal to that of GPTNeoX. The options of its passes
are a PassConfig, which engine/generate.py makes for each model of a generation.

    model = FastGPTNeoX.from_pretrained("models/tiny/target", "cpu", torch.float32)
    cache = model.new_cache(256, PassConfig(max_rows=64))
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from dynatree_lab.engine.cache import FastCache, count_slots
from dynatree_lab.engine.checkpoint import (
    DTYPES,
    find_checkpoint,
    load_tensors,
    published_shapes,
    read_config,
)
from dynatree_lab.engine.cuda_graphs import FixedCache
from dynatree_lab.engine.layers import fuse
from dynatree_lab.engine.memory import memory_for, require_memory
from dynatree_lab.engine.passes import PassConfig, buffer_rows
from dynatree_lab.engine.scores import Scores, make_scores
from gpt_neox import Config, GPTNeoX, rotary_table, untied_if_head_differs

T = TypeVar("T")


class FastGPTNeoX(GPTNeoX):
    """A GPT-NeoX with fused layers, made by from_pretrained or from_tensors."""

    has_graphs = True  # passes of fixed shapes may be captured as CUDA graphs

    def __init__(self, config: Config):
        super().__init__(config)
        self.n_heads = config.num_attention_heads // self.n_ranks()
        self.reusable: list[FixedCache] = []  # on CUDA, closed caches with memory and graphs
        self.n_graphs, self.capture_s = 0, 0.0  # captured graphs, seconds that it took
        # Results of strict.invariant_rows ("min_rows") and is_place_invariant (by row count)
        self.invariance_results: dict[str | int, int | bool | None] = {}

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | str = torch.float32,
    ) -> "FastGPTNeoX":
        """Load a checkpoint: a folder, or hub repository `NAME` or `NAME@REVISION`.

        Raises OutOfMemory. Raises CheckpointError if there is no checkpoint, if it is not a
        GPT-NeoX, or if a tensor is missing, extra, misshapen, truncated or not finite.
        """
        with memory_for(f"the weights of {name_or_path}"):
            return cls.from_tensors(*open_checkpoint(name_or_path, device, dtype, cls.n_ranks()))

    @classmethod
    def from_tensors(cls, config: Config, tensors: Mapping[str, Tensor]) -> "FastGPTNeoX":
        """Make a model from weights by their published names. Raises CheckpointError."""
        config = untied_if_head_differs(config, tensors)
        with torch.device("meta"):  # without memory, which the tensors bring
            model = cls(config)
        fuse(model, tensors)
        # In half precision on a CPU, attention of one row takes twice as long as of two, and
        # oneDNN's products of one or two rows take longer than of four (measured). On CUDA, torch
        # copies the bias of a product of one row, and cannot use its fused kernel (not measured)
        model.min_rows = 1
        if model.dtype != torch.float32:
            model.min_rows = 2 if model.device.type == "cuda" else 4
        model.has_fixed_shapes = model.device.type == "cuda"
        return model

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a cache per token."""
        config = self.config
        n_elements = 2 * config.num_hidden_layers * self.n_heads * config.head_size
        return n_elements * self.dtype.itemsize

    def new_memory(self, n_slots: int) -> tuple[Tensor, Tensor]:
        """Return zeros for keys and values, [2, L, H, n_slots, D], and the rotary table of n_slots
        positions."""
        config = self.config
        shape = (2, config.num_hidden_layers, self.n_heads, n_slots, config.head_size)
        kv = torch.zeros(shape, device=self.device, dtype=self.dtype)
        return kv, rotary_table(config, n_slots, self.device)

    def new_cache(self, capacity: int, config: PassConfig | None = None) -> FastCache:
        """Return an empty cache for `capacity` tokens. Raises OutOfMemory if it does not fit."""
        config = config or PassConfig()
        config = config._replace(min_rows=config.masks.min_rows(self, config))
        cache = self.find_reusable(capacity, config)
        if cache:
            self.reusable.remove(cache)
        else:
            self.reusable.clear()  # all are too small
            kind = FixedCache if self.has_fixed_shapes else FastCache
            cache = kind(self, capacity, config)
        cache.begin(self, capacity, config)
        return cache

    def find_reusable(self, capacity: int, config: PassConfig) -> FixedCache | None:
        """Return a closed cache that has room for `capacity` tokens and the rows of the config, if
        there is one."""
        n_slots, n_rows = count_slots(self, capacity, config), buffer_rows(config)
        for cache in self.reusable:
            if cache.kv.shape[3] >= n_slots and len(cache.logits) >= n_rows:
                return cache
        return None

    def before_pass(self, cache: FastCache, *inputs: Tensor | None) -> None:
        """Prepare a pass over a cache, which calls this with the tokens and, unless it is a
        prefill, the positions and the mask. A head sets the rows' states."""

    @staticmethod
    def n_ranks() -> int:
        """Return how many processes compute this model together (engine/tensor_parallel.py)."""
        return 1

    def gather(self, value: T) -> list[T]:
        """Return the value that each of them has."""
        return [value]

    def forward(
        self, tokens: Tensor, positions: Tensor, cache: FastCache, mask: Tensor | None = None
    ) -> Tensor:
        """Run n rows as GPTNeoX.forward does. On CUDA, the next pass over this cache may overwrite
        the logits."""
        return cache.forward(tokens, positions, mask).logits

    def hidden(
        self, tokens: Tensor, positions: Tensor, cache: FastCache, mask: Tensor | None = None
    ) -> Tensor:
        """Run n rows as `forward` does and return their last hidden states [n, hidden]."""
        return cache.forward(tokens, positions, mask).hidden

    def prefill(self, tokens: list[int], cache: FastCache) -> Tensor:
        """Run and commit the next tokens of the sequence as GPTNeoX.prefill does."""
        return cache.prefill(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [n, V] of last hidden states [n, hidden], in float32."""
        return self.embed_out(hidden).float()

    def score(self, x: Tensor, config: PassConfig) -> Scores:
        """Return the scores of last hidden states [n, hidden]."""
        return make_scores(x, self.logits(x)[:, : config.n_ids], config.ranking)


def is_fast(model: object) -> bool:
    return isinstance(model, FastGPTNeoX)


def load_reference(
    name_or_path: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> GPTNeoX:
    """Load a checkpoint into gpt_neox.py's model, with the checks of the fast model. Raises
    CheckpointError and OutOfMemory."""
    with memory_for(f"the weights of {name_or_path}"):
        return GPTNeoX.from_tensors(*open_checkpoint(name_or_path, device, dtype))


def open_checkpoint(
    name_or_path: str | Path,
    device: str | torch.device,
    dtype: torch.dtype | str,
    n_ranks: int = 1,
) -> tuple[Config, Mapping[str, Tensor]]:
    """Return a checkpoint's config and its tensors. Each lookup of a tensor reads it from the file.
    Raises CheckpointError, and OutOfMemory if a rank's share of the weights does not fit."""
    folder, device = find_checkpoint(name_or_path), torch.device(device)
    config = read_config(folder)
    tensors = load_tensors(folder, config, device, DTYPES.get(dtype, dtype))
    config = untied_if_head_differs(config, tensors)
    n_elements = sum(map(math.prod, published_shapes(config).values()))
    n_bytes = n_elements * tensors.dtype.itemsize // n_ranks
    require_memory(n_bytes, device, f"the weights of {name_or_path}")
    return config, tensors

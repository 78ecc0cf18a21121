"""The fast model: gpt_neox.py's model with fused layers and caches that run its passes.

It is a gpt_neox.Model, and its greedy text is equal to that of GPTNeoX. The options of its passes
are a PassConfig, which generation/generate.py makes for each model of a generation.

    model = FastGPTNeoX.from_pretrained("models/tiny/target", "cpu", torch.float32)
    cache = model.new_cache(256, PassConfig(max_rows=64))
"""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from dynatree_lab.engine.cache import FastCache
from dynatree_lab.engine.checkpoint import (
    DTYPES,
    Checkpoint,
    find_checkpoint,
    load_tensors,
    published_shapes,
)
from dynatree_lab.engine.cuda_graphs import FixedCache
from dynatree_lab.engine.inputs import PassInputs
from dynatree_lab.engine.layers import fuse
from dynatree_lab.engine.memory import free_memory, memory_for, require_memory
from dynatree_lab.engine.passes import (
    SLOT_STEP,
    SMALL_PASS,
    PassConfig,
    buffer_rows,
    round_up_rows,
    round_up_slots,
)
from dynatree_lab.engine.scores import Scores, make_scores
from gpt_neox import Config, GPTNeoX, rotary_table, untied_if_head_differs

T = TypeVar("T")


class FastGPTNeoX(GPTNeoX):
    """A GPT-NeoX with fused layers, made by from_pretrained or from_tensors. In a pass it stands
    between the run (generation/run.py) and the cache: it makes one PassInputs of its arguments."""

    has_graphs = True  # passes of fixed shapes may be captured as CUDA graphs
    has_fixed_shapes = False  # passes have a few numbers of rows and slots, as CUDA graphs need it
    min_rows = 1  # passes of fewer rows are padded

    def __init__(self, config: Config):
        super().__init__(config)
        self.n_heads = config.num_attention_heads // self.n_ranks()
        self.reusable: list[FixedCache] = []  # released caches with memory and graphs
        self.n_graphs, self.capture_s = 0, 0.0  # captured graphs, seconds that it took
        # Results of invariance.invariant_rows ("min_rows") and is_place_invariant (by row count)
        self.invariance_results: dict[str | int, int | bool | None] = {}

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path | Checkpoint,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | str = torch.float32,
    ) -> "FastGPTNeoX":
        """Load a checkpoint: a folder, or hub repository `NAME` or `NAME@REVISION`.

        Raises OutOfMemory. Raises CheckpointError if there is no checkpoint, if it is not a
        GPT-NeoX, or if a tensor is missing, extra, misshapen, truncated or not finite.
        """
        device, what = torch.device(device), f"the weights of {name_or_path}"
        with memory_for(what):
            checkpoint = find_checkpoint(name_or_path)
            config = checkpoint.config
            tensors = load_tensors(checkpoint.folder, config, device, DTYPES.get(dtype, dtype))
            shapes = published_shapes(untied_if_head_differs(config, tensors))
            n_bytes = sum(map(math.prod, shapes.values())) * tensors.dtype.itemsize
            require_memory(n_bytes // cls.n_ranks(), device, what)
            return cls.from_tensors(config, tensors)

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
        config = config._replace(min_rows=max(config.min_rows, self.min_rows))
        cache = self.find_reusable(capacity, config)
        if cache:
            self.reusable.remove(cache)
        else:
            self.reusable.clear()  # all are too small
            with memory_for(f"a cache of {capacity} tokens"):
                cache = self.allocate(capacity, config)
        cache.begin(self.gpt_neox, self.embed_out, capacity, config)
        return cache

    def find_reusable(self, capacity: int, config: PassConfig) -> FixedCache | None:
        """Return a released cache that has room for `capacity` tokens and the rows of the config,
        if there is one."""
        n_slots, n_rows = self.count_slots(capacity, config), buffer_rows(config)
        for cache in self.reusable:
            if cache.kv.shape[3] >= n_slots and len(cache.logits) >= n_rows:
                return cache
        return None

    def allocate(self, capacity: int, config: PassConfig) -> FastCache:
        """Return a new cache.

        Passes of fixed shapes get memory for as many tokens as the model was trained for. Otherwise
        every longer text would need new memory and new graphs, and graphs are not freed. This may
        take at most half of the free memory, because the draft's cache may need the rest.
        """
        if not self.has_fixed_shapes:
            return FastCache(*self.new_memory(self.count_slots(capacity, config)), capacity)
        longest = max(capacity, self.config.max_position_embeddings)
        if self.cache_bytes(longest, config) > min(self.gather(free_memory(self.device))) / 2:
            longest = capacity
        # Memory that the next cache may reuse must also be usable outside of inference mode
        with torch.inference_mode(False):
            memory = self.new_memory(self.count_slots(longest, config))
            return FixedCache(*memory, buffer_rows(config), self.config.vocab_size)

    def capture(self, cache: FastCache, shortest: int) -> None:
        """Capture the passes over a cache for all lengths from `shortest` on as CUDA graphs, if its
        passes have fixed shapes. Raises OutOfMemory."""
        if isinstance(cache, FixedCache) and self.has_graphs:
            began = time.perf_counter()
            self.n_graphs += cache.capture(shortest, is_alone=self.n_ranks() == 1)
            self.capture_s += time.perf_counter() - began

    def release(self, cache: FastCache) -> None:
        """Leave the memory and graphs of a cache to the next one, if its passes have fixed
        shapes."""
        if isinstance(cache, FixedCache):
            self.reusable.append(cache)

    def count_slots(self, capacity: int, config: PassConfig) -> int:
        """Return how many slots a cache needs, including those that padding rows write to."""
        if self.has_fixed_shapes:
            # Padding to a number of ROW_COUNTS adds fewer than half of its rows, and fewer than 256
            n_padding = min(buffer_rows(config) // 2, SLOT_STEP)
            return round_up_slots(capacity + max(round_up_rows(config.min_rows), n_padding))
        step = config.masks.slot_step
        return -(-(capacity + max(config.min_rows, self.min_rows) - 1) // step) * step

    def cache_bytes(self, capacity: int, config: PassConfig | None = None) -> int:
        """Return the size in bytes of a cache for `capacity` tokens."""
        return self.bytes_per_token * self.count_slots(capacity, config or PassConfig())

    def before_pass(self, cache: FastCache, inputs: PassInputs) -> None:
        """Prepare a pass over a cache. A head sets the rows' states."""

    @staticmethod
    def n_ranks() -> int:
        """Return how many processes compute this model together (engine/tensor_parallel.py)."""
        return 1

    def gather(self, value: T) -> list[T]:
        """Return the value that each of them has."""
        return [value]

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: FastCache,
        mask: Tensor | None = None,
        n_last: int | None = None,
    ) -> Tensor:
        """Run n rows as GPTNeoX.forward does, and return the logits of the last n_last, by default
        of all. On CUDA, the next pass over this cache may overwrite them."""
        inputs = cache.place(tokens, positions, mask, n_last or len(tokens))
        self.before_pass(cache, inputs)
        cache.scores = cache.run(inputs)
        return cache.scores.logits

    def hidden(
        self, tokens: Tensor, positions: Tensor, cache: FastCache, mask: Tensor | None = None
    ) -> Tensor:
        """Run n rows, such as a chunk of a prompt, as GPTNeoX.hidden does, and return their last
        hidden states [n, hidden]."""
        inputs = cache.place(tokens, positions, mask, n_last=0)
        self.before_pass(cache, inputs)
        return cache.run_chunk(inputs)

    def prefill(self, tokens: list[int], cache: FastCache) -> Tensor:
        """Run and commit the next tokens of the sequence as GPTNeoX.prefill does. A draft's few
        uncached tokens, with which every tree starts, are one pass, as a level is."""
        n, ids = len(tokens), torch.tensor(tokens)
        if cache.config.is_draft and n <= min(SMALL_PASS, cache.max_commit):
            self.forward(ids, torch.arange(cache.length, cache.length + n), cache, n_last=1)
            cache.advance(n)
            return cache.scores.logits
        is_finite = torch.tensor(True, device=self.device)
        for chunk in cache.chunks(ids):
            positions = torch.arange(cache.length, cache.length + len(chunk))
            x = self.hidden(chunk, positions, cache)
            is_finite &= x.isfinite().all()
            if cache.states is not None:
                cache.states.append(x)
            cache.advance(len(chunk))
        cache.scores = self.score(x[-1:].masked_fill(~is_finite, torch.nan), cache.config)
        return cache.scores.logits

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [n, V] of last hidden states [n, hidden], in float32."""
        return self.embed_out(hidden).float()

    def score(self, x: Tensor, config: PassConfig) -> Scores:
        """Return the scores of last hidden states [n, hidden]."""
        return make_scores(x, self.logits(x)[:, : config.n_ids], config.ranking)


def is_fast(model: object) -> bool:
    return isinstance(model, FastGPTNeoX)

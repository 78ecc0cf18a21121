"""A target whose layers stay in their files, for models that are larger than memory.

A budget says how much memory the target may take. As many layers as fit stay resident. All others
are streamed: each pass reads them one after the other into two buffers. While one layer runs, a
thread reads the next one and converts it to the dtype of the model. It reads on from the last layer
to the first one of the next pass, so it also reads while the draft drafts. So a pass takes the time
of reading the file, whatever its number of rows, as long as computing the rows takes less. In this
setting large trees pay most (DySpec, section 5 and table 4).

    model = load_streamed(Path("models/tiny/target"), torch.float32, budget=50_000_000)
    print(model.layers.n_resident, model.layers.bytes_per_pass)

The matrices of a streamed layer are not packed, because packing takes longer than reading. Their
products round differently than those of engine/linear.py. So the bits of the logits differ from
those of the model in memory, and greedy ids are equal in float32.

Shapes: n rows of a pass, H heads, D head size.
"""

import json
import os
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from threading import Lock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynatree_lab.engine.checkpoint import CheckpointError, StoredTensors, load_tensors, read_config
from dynatree_lab.engine.layers import (
    Affine,
    FusedLayer,
    FusedTransformer,
    Head,
    load_weights,
    qkv_order,
)
from dynatree_lab.engine.linear import Linear
from dynatree_lab.engine.memory import memory_for
from dynatree_lab.engine.model import FastGPTNeoX
from dynatree_lab.engine.tensor_parallel import UNSHARDED
from gpt_neox import Config, Layer, untied_if_head_differs

STORED_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
N_BUFFERS = 2


class StreamedGPTNeoX(FastGPTNeoX):
    """A FastGPTNeoX whose layers are read in each pass; made by load_streamed."""

    @property
    def layers(self) -> "StreamedLayers":
        return self.gpt_neox.layers


def load_streamed(folder: Path, dtype: torch.dtype, budget: int) -> StreamedGPTNeoX:
    """Load a model on the CPU that takes about `budget` bytes, with a cache for as many tokens as
    it was trained for. Raises CheckpointError and OutOfMemory."""
    config = read_config(folder)
    tensors = load_tensors(folder, config, torch.device("cpu"), dtype)
    config = untied_if_head_differs(config, tensors)
    with torch.device("meta"):
        model = StreamedGPTNeoX(config)
    transformer, head = model.gpt_neox, model.embed_out
    transformer.layers = nn.ModuleList()
    with memory_for(f"the weights of {folder}"):
        load_weights(model, "", tensors)
        if config.tie_word_embeddings:
            head.weight = transformer.embed_in.weight
        cache_bytes = model.bytes_per_token * config.max_position_embeddings
        fixed = [transformer.embed_in.weight, head.weight]
        n_bytes = sum({id(weight): weight.nbytes for weight in fixed}.values())
        transformer.layers = StreamedLayers(config, tensors, dtype)
        transformer.layers.keep(budget, n_bytes, cache_bytes)
    model.embed_out = Head(transformer.final_layer_norm, head.weight, config.vocab_size, UNSHARDED)
    model.gpt_neox = StreamedTransformer(transformer, UNSHARDED)
    model.min_rows, model.has_fixed_shapes = 1, False
    return model


class StreamedTransformer(FusedTransformer):
    """A FusedTransformer whose passes take turns, because they share the buffers."""

    def forward(self, *inputs: object) -> Tensor:
        with self.layers.lock:
            return super().forward(*inputs)


class StreamedLayers(nn.Module):
    """The layers in order, of which the first n_resident stay in memory."""

    def __init__(self, config: Config, tensors: StoredTensors, dtype: torch.dtype):
        super().__init__()
        self.config, self.dtype, self.n_layers = config, dtype, config.num_hidden_layers
        self.stored = StoredLayers(tensors)
        self.resident: list[StreamedLayer] = []
        self.buffers = [self.empty_layer(), self.empty_layer()]
        self.staging = torch.empty(self.stored.largest, dtype=torch.uint8)
        self.is_checked = [False] * self.n_layers  # for non-finite weights
        self.held: list[int | None] = [None] * N_BUFFERS  # the layer in each buffer
        self.reader = ThreadPoolExecutor(1, "layer reader")
        # The last read that was begun: its result, the layer, the buffer
        self.coming: tuple[Future, int, int] | None = None
        self.lock = Lock()

    def keep(self, budget: int, fixed: int, cache_bytes: int) -> None:
        """Make as many layers resident as fit into `budget` bytes beside embedding and head
        (`fixed`), buffers and a cache. Raises CheckpointError if the buffers do not fit."""
        layer_bytes = self.buffers[0].nbytes
        least = fixed + N_BUFFERS * layer_bytes + self.staging.nbytes
        if budget < least:
            needed = f"its embedding, head and two layers need at least {-(-least // 10**6)}MB"
            raise CheckpointError(f"the target's memory is {budget / 1e6:.4g}MB, but {needed}")
        n = max(budget - least - cache_bytes, 0) // layer_bytes
        if n + N_BUFFERS >= self.n_layers:  # the buffers are not needed then
            n = self.n_layers
            self.buffers = []
        for i in range(n):
            self.resident.append(self.fill(self.empty_layer(), i))

    @property
    def n_resident(self) -> int:
        return len(self.resident)

    @property
    def bytes_per_pass(self) -> int:
        """Bytes that a pass reads from files."""
        return sum(map(self.stored.layer_bytes, range(self.n_resident, self.n_layers)))

    def empty_layer(self) -> "StreamedLayer":
        with torch.device("meta"):
            layer = Layer(self.config)
        layer = layer.to_empty(device="cpu").to(self.dtype).requires_grad_(False)
        return StreamedLayer(layer, self.config)

    @torch.inference_mode()
    def fill(self, layer: "StreamedLayer", i: int) -> "StreamedLayer":
        """Read layer i into a layer's memory. Raises CheckpointError."""
        for name, weight in layer.layer.named_parameters():
            weight.copy_(self.stored.read(f"gpt_neox.layers.{i}.{name}", self.staging))
            if not self.is_checked[i] and not weight.isfinite().all():
                raise CheckpointError(f"layer {i}: {name} is not finite in {self.dtype}")
        self.is_checked[i] = True
        return layer

    def begin(self, i: int, buffer: int) -> None:
        """Begin to read layer i into a buffer that is not in use."""
        self.held[buffer] = None
        self.coming = self.reader.submit(self.fill, self.buffers[buffer], i), i, buffer

    def finish(self) -> None:
        """Wait for the read that was begun. Raises its error."""
        if self.coming:
            (result, i, buffer), self.coming = self.coming, None
            result.result()
            self.held[buffer] = i

    def fetch(self, i: int) -> int:
        """Return the buffer that has layer i, which is read unless that was begun."""
        self.finish()
        if i not in self.held:
            self.begin(i, 0)
            self.finish()
        return self.held.index(i)

    def __iter__(self) -> Iterator["StreamedLayer"]:
        yield from self.resident
        for i in range(self.n_resident, self.n_layers):
            buffer = self.fetch(i)
            following = i + 1 if i + 1 < self.n_layers else self.n_resident
            if following not in self.held:
                self.begin(following, 1 - buffer)
            yield self.buffers[buffer]

    def __getitem__(self, i: int) -> "StreamedLayer":
        return self.resident[i] if i < self.n_resident else self.buffers[self.fetch(i)]


class StreamedLayer(FusedLayer):
    """A FusedLayer over the weights of a gpt_neox.Layer as they are, so they may be overwritten."""

    def __init__(self, layer: Layer, config: Config):
        nn.Module.__init__(self)
        self.layer, self.config, self.shard = layer, config, UNSHARDED
        attention, mlp = layer.attention, layer.mlp
        norms = layer.input_layernorm, layer.post_attention_layernorm
        self.norms = Affine.from_module(norms[0]), Affine.from_module(norms[1])
        self.approximate = mlp.approximation
        n_rows, self.n_inner = len(attention.query_key_value.weight), len(mlp.dense_h_to_4h.weight)
        self.n_attended = n_rows // 3
        self.qkv_and_inner = None
        self.qkv = PlainLinear(attention.query_key_value, qkv_order(n_rows, config))
        self.inner = PlainLinear(mlp.dense_h_to_4h)
        self.dense, self.out = PlainLinear(attention.dense), PlainLinear(mlp.dense_4h_to_h)

    @property
    def linears(self) -> list[Linear]:
        return [self.qkv, self.inner, self.dense, self.out]

    def dense_and_out(self, combined: Tensor) -> Tensor:
        """Return the sum of both output products, [n, hidden], of what `combine` returns."""
        attended, inner = combined.split([self.n_attended, self.n_inner], dim=1)
        return self.dense(attended) + self.out(inner)


class PlainLinear(Linear):
    """A linear layer over the matrix of a module, without a copy of it."""

    def __init__(self, module: nn.Linear, order: Tensor | None = None):
        """order: of the columns [out] of the result."""
        super().__init__(*Affine.from_module(module))
        self.order = order

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            y = F.linear(x, self.weight, self.bias)
        else:  # takes half as long as F.linear for 4 to 64 rows, without AVX-512 (measured)
            y = torch.addmm(self.bias[:, None], self.weight, x.t()).t().contiguous()
        return y if self.order is None else y.index_select(1, self.order)


@dataclass(frozen=True)
class Place:
    """The place of a tensor: an open file, and the bytes from `offset` on."""

    file: FileIO
    path: Path
    offset: int
    n_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class StoredLayers:
    """The places of all tensors of layers. The files stay open as long as this object lives."""

    def __init__(self, tensors: StoredTensors):
        """Read the headers. Raises CheckpointError for a dtype that is not supported."""
        self.places: dict[str, Place] = {}
        self.stats: dict[Path, tuple[int, int]] = {}  # size and time of change, when opened
        headers, files = {}, {}
        for name, (path, stored_name) in tensors.files.items():
            if ".layers." not in name:
                continue
            if path not in files:
                files[path] = path.open("rb", buffering=0)
                weakref.finalize(self, files[path].close)
                self.stats[path] = file_stat(files[path])
                headers[path] = read_header(files[path])
            size, entries = headers[path]
            entry = entries[stored_name]
            if entry["dtype"] not in STORED_DTYPES:
                raise CheckpointError(f"{name} is {entry['dtype']}; only floating types load")
            start, end = entry["data_offsets"]
            dtype, shape = STORED_DTYPES[entry["dtype"]], tuple(entry["shape"])
            self.places[name] = Place(files[path], path, size + start, end - start, dtype, shape)

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor."""
        return max(place.n_bytes for place in self.places.values())

    def layer_bytes(self, i: int) -> int:
        prefix = f"gpt_neox.layers.{i}."
        return sum(p.n_bytes for name, p in self.places.items() if name.startswith(prefix))

    def read(self, name: str, staging: Tensor) -> Tensor:
        """Read a tensor into `staging`, bytes, and return it as a view. Raises CheckpointError if
        the file has changed or cannot be read."""
        place = self.places[name]
        view = memoryview(staging.numpy())[: place.n_bytes]
        try:
            if file_stat(place.file) != self.stats[place.path]:
                raise OSError("it has changed since the run began")
            read_at(place.file, view, place.offset)
        except OSError as error:
            line = error.strerror or error
            raise CheckpointError(f"{place.path} cannot be read: {line}") from error
        return staging[: place.n_bytes].view(place.dtype).view(place.shape)


def file_stat(file: FileIO) -> tuple[int, int]:
    """Return size and time of the last change of an open file."""
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns


def read_header(file: FileIO) -> tuple[int, dict]:
    """Return where the data of a safetensors file begin, and its header: a dict by stored name."""
    size = int.from_bytes(file.read(8), "little")
    return 8 + size, json.loads(file.read(size))


def read_at(file: FileIO, view: memoryview, offset: int) -> None:
    """Fill a view with the bytes of a file from an offset on. Raises OSError."""
    n_read = 0
    while n_read < len(view):
        rest, at = view[n_read:], offset + n_read
        if hasattr(os, "preadv"):
            n = os.preadv(file.fileno(), [rest], at)
        else:
            file.seek(at)
            n = file.readinto(rest)
        if not n:
            raise OSError("it is truncated")
        n_read += n
    # Without this, a file that is larger than memory pushes other programs out of it, and its own
    # pages are gone before the next pass needs them
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), offset, len(view), os.POSIX_FADV_DONTNEED)

"""A target whose layers do not fit into memory: they are read again in each pass.

A budget says how much memory the target may take. As many layers as fit stay resident. All others
come one after the other into two buffers, on a CPU from their files and on CUDA from pinned CPU
memory. While one layer runs, the next one is read. Reading goes on from the last layer to the first
one of the next pass, so it also overlaps with drafting. A pass takes the time of reading, whatever
its number of rows, as long as computing the rows takes less. In this setting large trees pay most
(DySpec, section 5 and table 4).

    device = torch.device("cpu")
    model = load_streamed(Path("models/tiny/target"), device, torch.float32, budget=50_000_000)
    print(model.layers.n_resident, model.layers.bytes_per_pass)

On CUDA the layers are fused as those in memory, so the bits of the logits are equal. On a CPU their
matrices are neither packed nor converted, because that takes longer than reading. Their products
round differently than those of engine/linear.py, and greedy ids are equal in float32.
"""

import json
import os
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dynatree_lab.engine.checkpoint import (
    Checkpoint,
    CheckpointError,
    StoredTensors,
    find_checkpoint,
    load_tensors,
)
from dynatree_lab.engine.layers import (
    Affine,
    FusedLayer,
    FusedTransformer,
    ParallelLayer,
    SequentialLayer,
    affine_parts,
    fuse_ends,
    fuse_layer,
    load_weights,
    qkv_order,
)
from dynatree_lab.engine.linear import Linear
from dynatree_lab.engine.memory import memory_for, require_memory
from dynatree_lab.engine.model import FastGPTNeoX
from gpt_neox import Config, Layer, untied_if_head_differs

STORED_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}
STORED_DTYPES |= {"F32": torch.float32, "F64": torch.float64}
N_BUFFERS = 2  # a layer runs in one while the next layer is read into the other
BLOCK_ELEMENTS = 2**19  # that are converted together, so that they stay in the cache


class StreamedGPTNeoX(FastGPTNeoX):
    """A FastGPTNeoX whose layers are read in each pass; made by load_streamed."""

    has_graphs = False

    @property
    def layers(self) -> "StreamedLayers":
        return self.gpt_neox.layers


def load_streamed(
    folder: Path | Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    budget: int,
    draft_cache: int = 0,
) -> StreamedGPTNeoX:
    """Load a model that takes about `budget` bytes of the device. They include the draft's cache,
    draft_cache bytes, and the model's own for as many tokens as it was trained for. Raises
    CheckpointError and OutOfMemory."""
    checkpoint = find_checkpoint(folder)
    config = checkpoint.config
    tensors = load_tensors(checkpoint.folder, config, device, dtype)
    config = untied_if_head_differs(config, tensors)
    with torch.device("meta"):
        model = StreamedGPTNeoX(config)
    with memory_for(f"the weights of {checkpoint.folder}"):
        fuse_ends(model, tensors)
        embed_in = model.gpt_neox.embed_in
        fixed = embed_in.weight.nbytes + model.embed_out.nbytes
        caches = model.bytes_per_token * config.max_position_embeddings + draft_cache
        kind = PinnedLayers if device.type == "cuda" else FileLayers
        layers = kind(config, tensors, Budget(budget, fixed, caches))
    model.gpt_neox = StreamedTransformer(embed_in, layers)
    model.has_fixed_shapes = device.type == "cuda"
    # As in FastGPTNeoX.from_tensors, except that on a CPU torch's products of one row take twice as
    # long as those of two in every dtype (measured)
    model.min_rows = 1 if model.has_fixed_shapes and dtype == torch.float32 else 2
    return model


@dataclass(frozen=True)
class Budget:
    """The memory of a streamed model, in bytes."""

    n_bytes: int  # in all
    fixed: int  # embedding and head
    caches: int

    def n_resident(self, n_layers: int, layer_bytes: int) -> int:
        """Return how many layers stay in memory. Raises CheckpointError if the buffers do not
        fit."""
        least = self.fixed + N_BUFFERS * layer_bytes
        if self.n_bytes < least:
            needed = f"the target's embedding, head and two layers need {-(-least // 10**6)}MB"
            given = f"--target-memory is {self.n_bytes / 1e6:.4g}MB"
            raise CheckpointError(f"{given}, it must be larger: {needed}")
        n = max(self.n_bytes - least - self.caches, 0) // layer_bytes
        # If only N_BUFFERS layers are left or fewer, they stay in the memory of the buffers
        return n_layers if n + N_BUFFERS >= n_layers else n


def spread(n_layers: int, n_resident: int) -> list[int]:
    """Return the layers that stay in memory: the last one of each of n_resident equal parts, for
    example 2 and 5 for 2 of 6. While they run, the next layer is read."""
    return [(part * n_layers - 1) // n_resident for part in range(1, n_resident + 1)]


class StreamedTransformer(FusedTransformer):
    """A FusedTransformer whose passes take turns, because they share the buffers."""

    def forward(self, *inputs: object) -> Tensor:
        with self.layers.lock:
            return super().forward(*inputs)


class Load(NamedTuple):
    """A streamed layer that is in a buffer, or that is being read into it."""

    buffer: int
    wait: Callable[[], object]  # waits until the layer is there, and raises the error of its read


class StreamedLayers(nn.Module):
    """The layers in order. Some are resident, all others come into the buffers in each pass."""

    def __init__(self, config: Config, n_resident: int):
        super().__init__()
        self.config = config
        self.n_layers, self.n_resident = config.num_hidden_layers, n_resident
        self.resident: dict[int, FusedLayer] = {}  # subclasses add them
        self.buffers: list[FusedLayer] = []
        self.loads: dict[int, Load] = {}  # by layer, not more than one in a buffer
        self.bytes_per_pass = 0  # that a pass reads again
        self.lock = Lock()
        # Called before layer i runs. The command line shows it
        self.on_layer: Callable[[int], None] = lambda i: None
        resident = spread(self.n_layers, n_resident)
        self.streamed = [i for i in range(self.n_layers) if i not in resident]

    def begin(self, i: int, buffer: int) -> Callable[[], object]:
        """Begin to read layer i into a buffer, and return the function that waits for it."""
        raise NotImplementedError

    def start(self, i: int, buffer: int) -> None:
        """Begin to read layer i into a buffer whose layer is not needed any more."""
        self.loads = {key: load for key, load in self.loads.items() if load.buffer != buffer}
        self.loads[i] = Load(buffer, self.begin(i, buffer))

    def __getitem__(self, i: int) -> FusedLayer:
        """Return layer i. A streamed one is read now, unless that was begun."""
        if i in self.resident:
            return self.resident[i]
        if i not in self.loads:
            self.start(i, 0)
        load = self.loads.pop(i)  # put back only if the read does not fail
        load.wait()
        self.loads[i] = load
        return self.buffers[load.buffer]

    def __iter__(self) -> Iterator[FusedLayer]:
        """Yield all layers. While one runs, the next streamed one is read."""
        for i in range(self.n_layers):
            self.on_layer(i)
            layer = self[i]
            if i in self.streamed:
                following = self.streamed[(self.streamed.index(i) + 1) % len(self.streamed)]
                if following not in self.loads:
                    self.start(following, 1 - self.loads[i].buffer)
            yield layer


class FileLayers(StreamedLayers):
    """Layers whose files a thread reads, one layer ahead of the pass."""

    def __init__(self, config: Config, tensors: StoredTensors, budget: Budget):
        """Read the resident layers. Raises CheckpointError."""
        files, n_layers = LayerFiles(tensors), config.num_hidden_layers
        largest = max(map(files.layer_bytes, range(n_layers)))
        super().__init__(config, budget.n_resident(n_layers, largest))
        self.bytes_per_pass = sum(map(files.layer_bytes, self.streamed))
        self.files, self.dtype = files, tensors.dtype
        self.is_checked = [False] * self.n_layers  # for non-finite weights
        self.reader = ThreadPoolExecutor(1, "layer reader")
        self.weights = [self.new_weights() for _ in range(N_BUFFERS if self.streamed else 0)]
        self.buffers = [stored_layer(weights, config) for weights in self.weights]
        for i in spread(self.n_layers, self.n_resident):
            weights = self.new_weights()
            self.fill(weights, i)
            self.resident[i] = stored_layer(weights, config)

    def new_weights(self) -> Layer:
        """Return a layer that has memory for the matrices in the dtype of their files."""
        with torch.device("meta"):
            layer = Layer(self.config)
        memory = {}
        for name, weight in layer.named_parameters():
            dtype = self.files.stored_dtype(name) if weight.ndim == 2 else self.dtype
            memory[name] = torch.empty(weight.shape, dtype=dtype)
        load_weights(layer, "", memory)
        return layer

    @torch.inference_mode()
    def fill(self, weights: Layer, i: int) -> None:
        """Read layer i into the memory of another layer. Raises CheckpointError."""
        for name, weight in weights.named_parameters():
            self.files.read(f"gpt_neox.layers.{i}.{name}", weight)
            if not (self.is_checked[i] or is_finite_in(self.dtype, weight)):
                raise CheckpointError(f"layer {i}: {name} is not finite in {self.dtype}")
        self.is_checked[i] = True

    def begin(self, i: int, buffer: int) -> Callable[[], object]:
        return self.reader.submit(self.fill, self.weights[buffer], i).result


@dataclass(frozen=True)
class StoredPlace:
    """The place of a tensor: an open file, and the bytes from `offset` on."""

    file: FileIO
    offset: int
    n_bytes: int
    dtype: torch.dtype


class LayerFiles:
    """The tensors of all layers in their files, which stay open as long as this object lives. A
    file that shrinks or fails while it is in use is an error that names it."""

    def __init__(self, tensors: StoredTensors):
        """Read the headers. Raises CheckpointError for a dtype that is not supported."""
        self.places: dict[str, StoredPlace] = {}  # by published name
        opened = {}  # by path: file, start of its data, header
        for name, (path, stored_name) in tensors.files.items():
            if ".layers." not in name:
                continue
            if path not in opened:
                file = path.open("rb", buffering=0)
                weakref.finalize(self, file.close)
                opened[path] = file, *read_header(file)
            file, data_start, header = opened[path]
            entry = header[stored_name]
            if entry["dtype"] not in STORED_DTYPES:
                raise CheckpointError(f"{name} is {entry['dtype']}; only floating types load")
            start, end = entry["data_offsets"]
            dtype = STORED_DTYPES[entry["dtype"]]
            self.places[name] = StoredPlace(file, data_start + start, end - start, dtype)

    def layer_bytes(self, i: int) -> int:
        prefix = f"gpt_neox.layers.{i}."
        return sum(p.n_bytes for name, p in self.places.items() if name.startswith(prefix))

    def stored_dtype(self, name: str) -> torch.dtype:
        """Return a dtype that holds the tensors of this name, such as mlp.dense_h_to_4h.weight, of
        all layers."""
        dtypes = (p.dtype for key, p in self.places.items() if key.endswith(f".{name}"))
        return reduce(torch.promote_types, dtypes)

    def read(self, name: str, weight: Tensor) -> None:
        """Read a tensor into `weight`, contiguous and of its shape, in any dtype. Raises
        CheckpointError if the file cannot be read."""
        place = self.places[name]
        is_same = weight.dtype == place.dtype
        stored = weight if is_same else torch.empty(weight.shape, dtype=place.dtype)
        try:
            read_at(place.file, memoryview(stored.view(-1).view(torch.uint8).numpy()), place.offset)
        except OSError as error:
            line = error.strerror or error
            raise CheckpointError(f"{place.file.name} cannot be read: {line}") from error
        if not is_same:
            weight.copy_(stored)


def read_header(file: FileIO) -> tuple[int, dict]:
    """Return where the data of a safetensors file begin, and its header: a dict by stored name."""
    size = int.from_bytes(file.read(8), "little")
    return 8 + size, json.loads(file.read(size))


def read_at(file: FileIO, view: memoryview, offset: int) -> None:
    """Fill a view with the bytes of a file from an offset on. Raises OSError."""
    file.seek(offset)
    rest = view
    while rest:
        n_read = file.readinto(rest)
        if not n_read:
            raise OSError("it is truncated")
        rest = rest[n_read:]
    # Without this, a file that is larger than memory pushes other programs out of it, and its own
    # pages are gone before the next pass needs them
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), offset, len(view), os.POSIX_FADV_DONTNEED)


def stored_layer(layer: Layer, config: Config) -> FusedLayer:
    """Return a FusedLayer over the weights of a layer as they are, so they may be overwritten."""
    *norms, qkv, inner, dense, out = affine_parts(layer)
    dtype = norms[0].weight.dtype
    order = qkv_order(len(qkv.weight), config)
    inputs = [StoredLinear(qkv, dtype, order), StoredLinear(inner, dtype)]
    outputs = [StoredLinear(dense, dtype), StoredLinear(out, dtype)]
    if config.use_parallel_residual:
        return ParallelLayer(config, norms, [*inputs, StoredPair(*outputs)])
    return SequentialLayer(config, norms, inputs + outputs)


class StoredLinear(Linear):
    """A linear layer over a matrix in the dtype of its file, without a copy of it. It is converted
    in blocks of rows, which stay in the processor's cache until they are multiplied."""

    def __init__(self, part: Affine, dtype: torch.dtype, order: Tensor | None = None):
        """dtype: of the bias; order: of the columns [out] of the result."""
        super().__init__(part.weight, part.bias.to(dtype))
        self.order = order
        self.n_elements, self.in_features = self.weight.numel(), self.weight.shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        y = x.new_empty(len(self.weight), len(x))  # [out, n]
        n_done = 0
        for weight in blocks_of(self.weight):
            rows = slice(n_done, n_done + len(weight))
            # W x^T takes half as long as x W^T for 4 to 64 rows, without AVX-512 (measured)
            torch.addmm(self.bias[rows, None], weight.to(x.dtype), x.t(), out=y[rows])
            n_done += len(weight)
        y = y.t().contiguous()
        return y if self.order is None else y.index_select(1, self.order)


class StoredPair(Linear):
    """The output layers of attention and MLP, over the input of both."""

    def __init__(self, dense: StoredLinear, out: StoredLinear):
        self.dense, self.out = dense, out
        self.nbytes = dense.nbytes + out.nbytes
        self.n_elements = dense.n_elements + out.n_elements
        self.in_features = dense.in_features + out.in_features

    def __call__(self, combined: Tensor) -> Tensor:
        attended, inner = combined.tensor_split([self.dense.in_features], dim=1)
        return self.dense(attended) + self.out(inner)


def is_finite_in(dtype: torch.dtype, weight: Tensor) -> bool:
    """Whether all elements of a weight are finite in a dtype. The extremes of a block are nan if an
    element is, and take a tenth of the time of isfinite (measured)."""
    if torch.finfo(weight.dtype).max <= torch.finfo(dtype).max:
        dtype = weight.dtype  # what is finite in it is finite in the other one
    extremes = [torch.stack(block.to(dtype).aminmax()) for block in blocks_of(weight)]
    return bool(torch.stack(extremes).isfinite().all())


def blocks_of(weight: Tensor) -> tuple[Tensor, ...]:
    """Return views of about BLOCK_ELEMENTS: some rows of a matrix, or a part of a vector."""
    return weight.split(max(BLOCK_ELEMENTS // weight[0].numel(), 1))


class PinnedLayers(StreamedLayers):
    """Layers in pinned CPU memory. A second CUDA stream copies them, one layer ahead of the pass.

    A copy waits until the layer that its buffer held before has run. A layer waits for its copy.
    """

    def __init__(self, config: Config, tensors: StoredTensors, budget: Budget):
        """Read all layers. Raises CheckpointError, and OutOfMemory if CPU memory is too small."""
        with torch.device("meta"):
            n_elements = sum(weight.numel() for weight in Layer(config).parameters())
        n_bytes = n_elements * tensors.dtype.itemsize  # of a layer
        super().__init__(config, budget.n_resident(config.num_hidden_layers, n_bytes))
        self.device, self.copies = tensors.device, torch.cuda.Stream(tensors.device)
        self.pinned: dict[int, list[Tensor]] = {}  # the weights of each streamed layer
        require_memory(n_bytes * len(self.streamed), torch.device("cpu"), "the target's layers")
        for i in range(self.n_layers):
            layer = fuse_layer(i, config, tensors)
            if i not in self.streamed:
                self.resident[i] = layer
                continue
            self.pinned[i] = [pin(weight) for weight in weights_of(layer)]
            self.bytes_per_pass += sum(weight.nbytes for weight in self.pinned[i])
            if len(self.buffers) < N_BUFFERS:
                self.loads[i] = Load(len(self.buffers), self.wait_for_copies)
                self.buffers.append(layer)

    def begin(self, i: int, buffer: int) -> Callable[[], object]:
        self.copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.copies):
            weights = weights_of(self.buffers[buffer])
            for weight, pinned in zip(weights, self.pinned[i], strict=True):
                weight.copy_(pinned, non_blocking=True)
        return self.wait_for_copies

    def wait_for_copies(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self.copies)


def weights_of(layer: FusedLayer) -> list[Tensor]:
    parts = [*layer.norms, *layer.linears]
    return [weight for part in parts for weight in (part.weight, part.bias)]


def pin(weight: Tensor) -> Tensor:
    """Return a copy of a tensor in pinned CPU memory, from which copies do not block the CPU."""
    return torch.empty(weight.shape, dtype=weight.dtype, pin_memory=True).copy_(weight)

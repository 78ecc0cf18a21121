"""The small kernels of a pass, in Triton: six launches a layer where torch's own need twelve.

Off unless asked for (`--kernels`), until a GPU has shown that they gain. They compute what
engine/fused.py and engine/scores.py do by torch, which is what a test holds them to, for passes of
at most 128 rows over a cache whose layers add attention and MLP together:

    normed = LN(x += added)                add_norm
    inner = normed W + b                   torch
    queries, cache, active = inner         spread: turn, mark, write, GELU
    attended = softmax(q k^T + mask) v     attend: a program per head and chunk of keys; a merge
    added = [attended, active] W + b       torch

and of the logits what the host wants (rank). No launch depends on a value, so all can be captured.
Whoever imports this needs triton, which a torch for CUDA brings along.

    x = run_layers(model.gpt_neox, x, turns, kv, slots, seen)  # engine.fused.FusedTransformer does
    ranked = rank(logits, k=3, are_logprobs=True)  # engine.scores.rank does

Shapes: n rows, S cache slots, L layers, H heads, D head size, R rotary dims, I inside of the MLP, V
vocabulary, C chunks, k candidates.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from triton import cdiv, next_power_of_2

COLUMNS = 512  # of a product that one program spreads
IDS = 2048  # of the vocabulary that one program ranks
CHUNKS = (64, 128, 256)  # slots whose keys one program attends
PROGRAMS = 264  # two for each multiprocessor of a large GPU: more would only have more to merge


def run_layers(
    transformer: nn.Module, x: Tensor, turns: Tensor, kv: Tensor, slots: Tensor, seen: Tensor
) -> Tensor:
    """The final norm of x [n, hidden], which is lost, after all layers; its rows' keys and values
    go to `slots` [n] int64 of kv [2, L, H, slots, D]. turns: complex64 [n, R / 2]. seen: [n, S]
    bool, True = may attend."""
    added = None
    with torch.cuda.device_of(x):  # else triton launches on the current one
        for layer, past in zip(transformer.layers, kv.unbind(1), strict=True):
            inner = layer.into(add_norm(x, added, layer.config.norm_eps))  # [n, 3 H D + I]
            both = spread(inner, turns, slots, past, layer.approximate, layer.mark)  # [n, H D + I]
            attend(both, past, seen)
            added = layer.out_of(both)
        norm = transformer.final_layer_norm
        return add_norm(x, added, norm.eps, norm.weight, norm.bias)


def add_norm(
    x: Tensor,
    added: Tensor | None,
    eps: float,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """LayerNorm of x [n, hidden], to which `added` is added before, in place."""
    n, hidden = x.shape
    normed = torch.empty_like(x)
    block = max(next_power_of_2(hidden), 128)  # a thread's own each: x is written where it is read
    n_warps = min(max(block // 512, 4), 16)
    _add_norm[n,](x, added, weight, bias, normed, eps, hidden, block, num_warps=n_warps)
    return normed


@triton.jit
def _add_norm(x, added, weight, bias, normed, eps, hidden, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    is_there = columns < hidden
    place = tl.program_id(0) * hidden + columns
    value = tl.load(x + place, mask=is_there, other=0.0)
    if added is not None:
        total = value.to(tl.float32) + tl.load(added + place, mask=is_there, other=0.0)
        value = total.to(value.dtype)  # the next layers read it as rounded as it is kept
        tl.store(x + place, value, mask=is_there)
    value = value.to(tl.float32)
    mean = tl.sum(value, 0) / hidden
    value = tl.where(is_there, value - mean, 0.0)
    value *= tl.rsqrt(tl.sum(value * value, 0) / hidden + eps)
    if weight is not None:
        scale = tl.load(weight + columns, mask=is_there, other=0.0).to(tl.float32)
        value = value * scale + tl.load(bias + columns, mask=is_there, other=0.0)
    tl.store(normed + place, value.to(normed.dtype.element_ty), mask=is_there)


def spread(
    inner: Tensor, turns: Tensor, slots: Tensor, past: Tensor, approximate: str, mark: float
) -> Tensor:
    """inner [n, 3 H D + I]: queries, keys, values and the MLP's inside, to where they are read.

    What is not finite of keys and values is marked there, as FusedLayer.attend does.
    Returns [n, H D + I]: the queries, turned, and the active inside. past: [2, H, slots, D].
    """
    n, n_in = inner.shape
    n_heads, _, size = past.shape[1:]
    n_attended = n_heads * size
    n_inside = n_in - 3 * n_attended
    both = inner.new_empty(n, n_attended + n_inside)
    turns = torch.view_as_real(turns)  # [n, R / 2, 2], cosines and sines
    grid = n, cdiv(3 * n_attended, COLUMNS) + cdiv(n_inside, COLUMNS)
    _spread[grid](
        *(inner, turns, slots, past, both, mark, past.stride(0), past.stride(1)),
        *(n_attended, n_inside, size, 2 * turns.shape[1], approximate == "tanh", COLUMNS),
    )
    return both


@triton.jit
def _spread(
    inner,
    turns,
    slots,
    past,
    both,
    mark,
    past_part,  # from a key to its value
    past_head,  # from a head to the next
    N_ATTENDED: tl.constexpr,
    N_INSIDE: tl.constexpr,
    SIZE: tl.constexpr,
    ROTARY: tl.constexpr,
    IS_TANH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, block = tl.program_id(0), tl.program_id(1)
    dtype: tl.constexpr = inner.dtype.element_ty
    inner += row * (3 * N_ATTENDED + N_INSIDE)
    both += row * (N_ATTENDED + N_INSIDE)
    first_inside = tl.cdiv(3 * N_ATTENDED, BLOCK)  # block
    if block < first_inside:
        column = block * BLOCK + tl.arange(0, BLOCK)
        is_there = column < 3 * N_ATTENDED
        part = column // N_ATTENDED  # of queries, keys and values
        dim = column % SIZE
        is_turned = is_there & (part < 2) & (dim < ROTARY)
        is_first = dim % 2 == 0  # of the pair that is turned together
        x = tl.load(inner + column, mask=is_there, other=0.0).to(tl.float32)
        other = tl.load(inner + tl.where(is_first, column + 1, column - 1), mask=is_turned, other=0)
        turn = turns + row * ROTARY + dim // 2 * 2
        cos = tl.load(turn, mask=is_turned, other=1.0)
        sin = tl.load(turn + 1, mask=is_turned, other=0.0)
        turned = x * cos + tl.where(is_first, -sin, sin) * other.to(tl.float32)
        x = tl.where(is_turned, turned, x).to(dtype)
        tl.store(both + column, x, mask=is_there & (part == 0))
        x = x.to(tl.float32)  # as rounded, for float16 may overflow by that
        x = tl.where(x == float("inf"), mark, tl.where(x == float("-inf"), -mark, x))
        x = tl.where(x == x, x, mark).to(dtype)  # nan is no number's equal
        head = column % N_ATTENDED // SIZE
        place = (part - 1) * past_part + head * past_head + tl.load(slots + row) * SIZE + dim
        tl.store(past + place, x, mask=is_there & (part > 0))
    else:
        column = (block - first_inside) * BLOCK + tl.arange(0, BLOCK)
        is_there = column < N_INSIDE
        inside = tl.load(inner + 3 * N_ATTENDED + column, mask=is_there, other=0.0).to(tl.float32)
        if IS_TANH:  # 1 + tanh(u) is 2 / (1 + exp(-2 u))
            cubic = inside + 0.044715 * inside * inside * inside
            active = inside / (1.0 + tl.exp(-1.5957691216057308 * cubic))
        else:
            active = 0.5 * inside * (1.0 + tl.math.erf(0.7071067811865476 * inside))
        tl.store(both + N_ATTENDED + column, active.to(dtype), mask=is_there)


def attend(both: Tensor, past: Tensor, seen: Tensor) -> None:
    """Softmax attention over the slots that each row sees; in both [n, H D + more] attended values
    take their query's place. past: [2, H, slots, D]. seen: [n, S] bool.

    One program per head and chunk of keys, as heads alone would leave most of a GPU idle; each
    gives its sum and how much that counts, the logarithm of its weights' sum.
    """
    n, n_slots = seen.shape
    n_heads, _, size = past.shape[1:]
    padded = max(next_power_of_2(size), 16)  # tensor cores take no fewer, of rows neither
    n_bytes = padded * past.itemsize
    tile = min(max(next_power_of_2(n), 16), 64 if n_bytes <= 256 else 32)
    block = min(max(2**14 // n_bytes, 16), 64)  # slots: 16 KB of keys at a time
    is_large = tile == 64 or past.itemsize == 4  # for the registers of four warps
    n_tiles = cdiv(n, tile)
    chunk = slots_of_chunk(n_heads * n_tiles, n_slots)
    n_chunks = cdiv(n_slots, chunk)
    parts = both.new_empty(n_chunks, n_heads, n, size, dtype=torch.float32)
    counts = both.new_empty(n_chunks, n_heads, n, dtype=torch.float32)
    _attend[n_heads, n_chunks, n_tiles](
        *(both, past, seen, parts, counts, size**-0.5, n, n_slots, both.stride(0)),
        *(past.stride(0), past.stride(1), size, padded, tile, block, chunk),
        num_warps=8 if is_large else 4,
        num_stages=2,  # at most 86 KB, so that programs can share a multiprocessor
    )
    width = next_power_of_2(n_chunks)
    _merge[n_heads, n](parts, counts, both, n, both.stride(0), n_chunks, size, padded, width)


def slots_of_chunk(n_programs: int, n_slots: int) -> int:
    """Slots of a chunk, where each chunk is attended by so many programs."""
    for chunk in CHUNKS:
        if n_programs * cdiv(n_slots, chunk) <= PROGRAMS:
            return chunk
    return CHUNKS[-1]


@triton.jit(do_not_specialize=["n"])
def _attend(
    queries,
    past,
    seen,
    parts,
    counts,
    scale,
    n,
    n_slots,
    row_stride,
    past_part,
    past_head,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    head, chunk = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2) * TILE + tl.arange(0, TILE)
    dim = tl.arange(0, PADDED)
    is_row, is_dim = (row < n)[:, None], dim < SIZE
    q = queries + row[:, None] * row_stride + head * SIZE + dim
    q = tl.load(q, mask=is_row & is_dim, other=0.0)  # [TILE, PADDED]
    highest = tl.full([TILE], float("-inf"), tl.float32)
    count = tl.zeros([TILE], tl.float32)
    attended = tl.zeros([TILE, PADDED], tl.float32)
    for first in range(0, CHUNK, BLOCK):
        slot = chunk * CHUNK + first + tl.arange(0, BLOCK)
        is_slot = slot < n_slots
        k = past + head * past_head + slot[:, None] * SIZE + dim
        is_there = is_slot[:, None] & is_dim
        scores = tl.dot(q, tl.load(k, mask=is_there, other=0.0).T, input_precision="ieee") * scale
        sees = tl.load(seen + row[:, None] * n_slots + slot, mask=is_row & is_slot, other=0)
        scores = tl.where(sees, scores, float("-inf"))  # [TILE, BLOCK]
        above = tl.maximum(highest, tl.max(scores, 1))
        shift = tl.where(above == float("-inf"), 0.0, above)  # of a row that has seen none yet
        weights = tl.exp(scores - shift[:, None])
        kept = tl.exp(highest - shift)
        v = tl.load(k + past_part, mask=is_there, other=0.0)  # [BLOCK, PADDED]
        seen_here = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        attended = attended * kept[:, None] + seen_here
        count = count * kept + tl.sum(weights, 1)
        highest = above
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    attended = attended / tl.where(count == 0.0, 1.0, count)[:, None]
    place = (chunk * tl.num_programs(0) + head) * n + row
    tl.store(counts + place, shift + tl.log(count), mask=row < n)  # -inf if it sees none of these
    tl.store(parts + place[:, None] * SIZE + dim, attended, mask=is_row & is_dim)


@triton.jit(do_not_specialize=["n", "n_chunks"])
def _merge(
    parts,
    counts,
    attended,
    n,
    row_stride,
    n_chunks,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    head, row = tl.program_id(0), tl.program_id(1)
    chunk, dim = tl.arange(0, CHUNKS), tl.arange(0, PADDED)
    place = (chunk * tl.num_programs(0) + head) * n + row
    count = tl.load(counts + place, mask=chunk < n_chunks, other=float("-inf"))
    weights = tl.exp(count - tl.max(count, 0))  # [CHUNKS]
    is_there = (chunk < n_chunks)[:, None] & (dim < SIZE)
    part = tl.load(parts + place[:, None] * SIZE + dim, mask=is_there, other=0.0)
    x = tl.sum(part * weights[:, None], 0) / tl.sum(weights, 0)
    attended += row * row_stride + head * SIZE + dim
    tl.store(attended, x.to(attended.dtype.element_ty), mask=dim < SIZE)


def rank(logits: Tensor, k: int, are_logprobs: bool) -> Tensor:
    """As engine.scores.rank, [n, 2 + 2 k], of logits [n, V] float32; of equals the first comes
    first among the candidates, too. A row that holds inf or nan has nan for its highest."""
    n, n_ids = logits.shape
    n_found = max(k, 1)
    n_chunks = cdiv(n_ids, IDS)
    width = next_power_of_2(n_chunks * n_found)
    found = logits.new_empty(n, n_chunks, 2 + 2 * n_found)
    ranked = logits.new_empty(n, 2 + 2 * k)
    with torch.cuda.device_of(logits):
        _find[n, n_chunks](logits, found, n_ids, logits.stride(0), n_found, IDS)
        _choose[n,](found, ranked, n_chunks, k, n_found, are_logprobs, width)
    return ranked


@triton.jit
def _find(logits, found, n_ids, row_stride, N_FOUND: tl.constexpr, IDS: tl.constexpr):
    """A chunk's highest, its sum of exponentials below that, its best values and their ids."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    place = tl.arange(0, IDS)
    ids = chunk * IDS + place
    x = tl.load(logits + row * row_stride + ids, mask=ids < n_ids, other=float("-inf"))
    left = tl.where(x == x, x, float("-inf"))  # so that no id is one of a place without a logit
    highest = tl.max(left, 0)
    total = tl.sum(tl.exp(x - tl.where(highest == float("-inf"), 0.0, highest)), 0)
    found += (row * tl.num_programs(1) + chunk) * (2 + 2 * N_FOUND)
    tl.store(found, highest)
    tl.store(found + 1, total)
    for i in range(N_FOUND):
        value, at = tl.max(left, 0, return_indices=True)  # of equals the first
        tl.store(found + 2 + i, value)
        tl.store(found + 2 + N_FOUND + i, (chunk * IDS + at).to(tl.float32))
        left = tl.where(place == at, float("-inf"), left)


@triton.jit
def _choose(
    found,
    ranked,
    n_chunks,
    K: tl.constexpr,
    N_FOUND: tl.constexpr,
    ARE_LOGPROBS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The best of all chunks' best, in the order of their ids."""
    row = tl.program_id(0)
    place = tl.arange(0, WIDTH)
    chunk = found + (row * n_chunks + place) * (2 + 2 * N_FOUND)
    is_chunk = place < n_chunks
    tops = tl.load(chunk, mask=is_chunk, other=float("-inf"))
    top = tl.max(tops, 0)
    total = tl.log(tl.sum(tl.load(chunk + 1, mask=is_chunk, other=0.0) * tl.exp(tops - top), 0))
    at = found + (row * n_chunks + place // N_FOUND) * (2 + 2 * N_FOUND) + 2 + place % N_FOUND
    is_there = place < n_chunks * N_FOUND
    left = tl.load(at, mask=is_there, other=float("-inf"))
    ids = tl.load(at + N_FOUND, mask=is_there, other=0.0)
    ranked += row * (2 + 2 * K)
    for i in range(N_FOUND):
        value, best = tl.max(left, 0, return_indices=True)
        if ARE_LOGPROBS:
            value = value - top - total
        value = tl.where(total == total, value, float("nan"))  # a total that is none tells of one
        chosen = tl.sum(tl.where(place == best, ids, 0.0), 0)
        if i == 0:
            tl.store(ranked, value)
            tl.store(ranked + 1, chosen)
        if K > 0:
            tl.store(ranked + 2 + i, value)
            tl.store(ranked + 2 + K + i, chosen)
        left = tl.where(place == best, float("-inf"), left)

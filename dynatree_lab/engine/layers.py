"""The layers of gpt_neox.py, fused for passes of a few rows over a KV cache.

gpt_neox.py defines the model. This file only computes it faster, and tests check that the results
are equal. The differences are:

- Matrices are packed (engine/linear.py).
- The rows of query_key_value are reordered: all queries, then all keys, then all values. Within a
  head, the two dimensions of a rotary pair are adjacent. So a pair is one complex number, and one
  multiplication rotates it. Attention is unchanged, because queries and keys have one order.
- With parallel residual, the output products of attention and MLP are one product. On CUDA, where
  every launch costs time, their input products are one product as well. The scales and shifts of
  both norms are folded into it.
- In float16 a key or value can overflow although x is finite. The cache must not hold a non-finite
  number, but the overflow must be detected. So the cache gets the largest float16 number instead,
  and a row that stored one gets nan at the end.
- A pass of a fixed shape writes to slots that are given as a tensor, other passes to a slice.

    fuse(model, tensors)  # FastGPTNeoX.from_tensors does this

Shapes: n rows, S cache slots, L layers, H heads, D head size, R rotary dimensions.
"""

import ctypes
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynatree_lab.engine.checkpoint import CheckpointError
from dynatree_lab.engine.linear import Linear, MixedLinear, make_linear
from dynatree_lab.engine.masks import Mask
from gpt_neox import ACTIVATIONS, Config

LARGE_LAYER = 2**23  # bytes; after packing a larger layer, free memory goes back to the system


def fuse(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give a GPTNeoX on the meta device its weights, and replace its layers by fused ones.

    This is done layer by layer, so if each lookup reads a tensor from its file, memory holds only
    one copy of the model. Raises CheckpointError if a matrix times the scale of its norm overflows.
    """
    config, layers = model.config, model.gpt_neox.layers
    model.gpt_neox.layers = nn.ModuleList()  # the loop below loads them
    load_weights(model, "", tensors)
    if config.tie_word_embeddings:
        model.embed_out.weight = model.gpt_neox.embed_in.weight
    choose_kernels(model.device, model.dtype)  # before `fold` multiplies matrices
    for i in range(config.num_hidden_layers):
        load_weights(layers[i], f"gpt_neox.layers.{i}.", tensors)
        layers[i] = FusedLayer(layers[i], config)
    model.gpt_neox.layers = layers
    norm = model.gpt_neox.final_layer_norm
    model.gpt_neox = FusedTransformer(model.gpt_neox)
    model.embed_out = Head(norm, model.embed_out.weight)


def choose_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Set torch's global options that decide which kernels passes use."""
    if device.type == "cuda":
        # cuDNN's attention is reported to reject a single row, which would make ar round
        # differently than a tree, and to plan again for every prompt length (not measured here)
        torch.backends.cuda.enable_cudnn_sdp(False)
        # Partial sums of a product are added in float32, not in 16 bits
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if device.type == "cuda" or dtype == torch.float32:
        # Some environments allow TF32. Its 10 bits would change greedy text, and 16-bit models too
        # have products in float32: folded biases, and attention in strict passes
        torch.set_float32_matmul_precision("highest")


def load_weights(module: nn.Module, prefix: str, tensors: Mapping[str, Tensor]) -> None:
    """Set the weights of a module. Their published names begin with `prefix`."""
    for name, _ in list(module.named_parameters()):
        owner, _, part = name.rpartition(".")
        weight = nn.Parameter(tensors[prefix + name], requires_grad=False)
        setattr(module.get_submodule(owner), part, weight)


def trim_heap() -> None:
    """Return freed memory to the system. glibc keeps free memory between blocks in use. After a
    model was packed layer by layer, this was half of the model's size (measured)."""
    with suppress(OSError, AttributeError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


class FusedTransformer(nn.Module):
    """gpt_neox.Transformer with fused layers, for inference."""

    def __init__(self, transformer: nn.Module):
        super().__init__()
        self.embed_in = transformer.embed_in
        self.layers = transformer.layers
        self.overflow_value = overflow_value(self.embed_in.weight.dtype)

    def forward(
        self, tokens: Tensor, rotary: Tensor, kv: Tensor, start: int | Tensor, mask: Mask
    ) -> Tensor:
        """Return the last hidden states [n, hidden] of tokens [n], before the final norm.

        Args:
            rotary: [n, R / 2] complex64, of the rows' positions.
            kv: [2, L, H, capacity, D].
            start: the first slot to write, or all slots to write, [n] int64.
            mask: of these rows.
        """
        x = self.embed_in(tokens)  # [n, hidden], layers add to it in place
        for layer, layer_kv in zip(self.layers, kv.unbind(1), strict=True):
            x = layer(x, rotary, layer_kv, start, mask)
        if self.overflow_value:
            stored = written_kv(kv, start, len(x))
            highest = torch.linalg.vector_norm(stored, torch.inf, dim=(0, 1, 2, 4))  # [n]
            has_overflowed = highest == self.overflow_value
            x = x.masked_fill(has_overflowed[:, None], torch.nan)
        return x


def written_kv(kv: Tensor, start: int | Tensor, n: int) -> Tensor:
    """Return the keys and values [2, L, H, n, D] that a pass of n rows has written."""
    if isinstance(start, Tensor):
        return kv.index_select(3, start)
    return kv[:, :, :, start : start + n]


class Affine(NamedTuple):
    """A norm's scale and shift [in], or a linear layer's matrix [out, in] and bias [out]."""

    weight: Tensor
    bias: Tensor

    @classmethod
    def from_module(cls, module: nn.LayerNorm | nn.Linear) -> "Affine":
        weight = module.weight.detach()
        bias = weight.new_zeros(len(weight)) if module.bias is None else module.bias.detach()
        return cls(weight, bias)


class FusedLayer(nn.Module):
    """A layer that adds Attn(LN1(x)) + MLP(LN2(x)) to x [n, hidden] in place, or without parallel
    residual first attention, then the MLP."""

    # Given a result [n, hidden] of a layer that has only some of its heads and columns, return the
    # sum over all ranks (engine/tensor_parallel.py)
    sum_ranks: Callable[[Tensor], Tensor] = staticmethod(lambda x: x)

    def __init__(self, layer: nn.Module, config: Config):
        """Fuse a gpt_neox.Layer. Raises CheckpointError if a matrix times the scale of its norm
        overflows."""
        super().__init__()
        self.config = config
        self.approximate = ACTIVATIONS[config.hidden_act]
        self.n_attended = len(layer.attention.query_key_value.weight) // 3  # H * D
        self.n_inner = len(layer.mlp.dense_h_to_4h.weight)  # inner columns of the MLP
        norms = layer.input_layernorm, layer.post_attention_layernorm
        self.norms = Affine.from_module(norms[0]), Affine.from_module(norms[1])
        qkv = reorder_qkv(Affine.from_module(layer.attention.query_key_value), config)
        inner = Affine.from_module(layer.mlp.dense_h_to_4h)
        dense = Affine.from_module(layer.attention.dense)
        out = Affine.from_module(layer.mlp.dense_4h_to_h)
        self.qkv_and_inner: Linear | None = None
        if config.use_parallel_residual and qkv.weight.device.type == "cuda":
            both = fold(self.norms[0], qkv), fold(self.norms[1], inner)
            weight, bias = (torch.cat(parts) for parts in zip(*both, strict=True))
            # CUDA's attention reads queries in 16 bytes, so rows must begin at multiples of 16
            n_more = -len(bias) % (16 // bias.element_size())
            weight, bias = F.pad(weight, (0, 0, 0, n_more)), F.pad(bias, (0, n_more))
            self.qkv_and_inner = make_linear(weight, bias)
        else:
            self.qkv = make_linear(*qkv)
            self.inner = make_linear(*inner)
        if config.use_parallel_residual:
            weight = torch.cat([dense.weight, out.weight], dim=1)
            self.dense_and_out = make_linear(weight, dense.bias + out.bias)
        else:
            self.dense = make_linear(*dense)
            self.out = make_linear(*out)
        if self.nbytes > LARGE_LAYER:
            trim_heap()

    def forward(
        self, x: Tensor, rotary: Tensor, kv: Tensor, start: int | Tensor, mask: Mask
    ) -> Tensor:
        if not self.config.use_parallel_residual:
            attended = self.attend(self.qkv(self.norm(x, 0)), rotary, kv, start, mask)
            columns = attended.transpose(0, 1).flatten(1)  # [n, H * D]
            x.add_(self.sum_ranks(self.dense(columns)))
            inner = self.inner(self.norm(x, 1))
            active = torch.empty_like(inner)
            gelu(inner, self.approximate, active)
            return x.add_(self.sum_ranks(self.out(active)))
        if self.qkv_and_inner:
            normed = torch.layer_norm(x, x.shape[-1:], None, None, self.config.layer_norm_eps)
            both = self.qkv_and_inner(normed)
            qkv = both[:, : 3 * self.n_attended]
            inner = both[:, 3 * self.n_attended :][:, : self.n_inner]
        else:
            qkv, inner = self.qkv(self.norm(x, 0)), self.inner(self.norm(x, 1))
        attended = self.attend(qkv, rotary, kv, start, mask)  # [H, n, D]
        combined = combine(attended, inner, self.approximate)
        return x.add_(self.sum_ranks(self.dense_and_out(combined)))

    def norm(self, x: Tensor, which: int) -> Tensor:
        """Return LN1(x) or LN2(x)."""
        return torch.layer_norm(x, x.shape[-1:], *self.norms[which], self.config.layer_norm_eps)

    def attend(
        self, qkv: Tensor, rotary: Tensor, kv: Tensor, start: int | Tensor, mask: Mask
    ) -> Tensor:
        """Return attention's output [H, n, D] for qkv [n, 3 H D]. Write this pass's keys and values
        to kv [2, H, capacity, D]."""
        qkv = qkv.view(len(qkv), 3, -1, self.config.head_size).permute(1, 2, 0, 3)  # [3, H, n, D]
        q = rotate_and_store(qkv, rotary, kv, start)
        return mask.attend(q, kv[0], kv[1])

    @property
    def linears(self) -> list[Linear]:
        """All linear layers of this layer."""
        if self.qkv_and_inner:
            return [self.qkv_and_inner, self.dense_and_out]
        if self.config.use_parallel_residual:
            return [self.qkv, self.inner, self.dense_and_out]
        return [self.qkv, self.inner, self.dense, self.out]

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a pass reads."""
        return sum(linear.nbytes for linear in self.linears)


class Head(nn.Module):
    """The final norm and the output matrix: logits [n, V] from last hidden states [n, hidden], in
    float32 on CUDA."""

    gather_ids: Callable[[Tensor], Tensor] | None = None  # joins the logits of several ranks

    def __init__(self, norm: nn.LayerNorm, weight: Tensor):
        super().__init__()
        self.norm = norm
        weight = weight.detach()
        is_mixed = weight.is_cuda and weight.dtype != torch.float32
        self.linear = MixedLinear(weight) if is_mixed else make_linear(weight, None)
        if self.linear.nbytes > LARGE_LAYER:
            trim_heap()

    @property
    def nbytes(self) -> int:
        return self.linear.nbytes

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(self.norm(x))
        return self.gather_ids(y) if self.gather_ids else y

    def write_logits(self, x: Tensor, out: Tensor) -> None:
        """Write what `forward` returns to `out`, [n, V] float32, without a copy if possible."""
        if isinstance(self.linear, MixedLinear) and not self.gather_ids:
            self.linear(self.norm(x), out)
        else:
            out.copy_(self(x))


def rotate_and_store(qkv: Tensor, rotary: Tensor, kv: Tensor, start: int | Tensor) -> Tensor:
    """Rotate queries and keys. Write keys and values to the cache, and return the queries
    [H, n, D].

    Args:
        qkv: [3, H, n, D], may be overwritten.
        rotary: [n, R / 2] complex64.
        kv: [2, H, capacity, D].
        start: the first slot to write, or all slots to write, [n] int64.
    """
    rotate_(qkv[:2, ..., : 2 * rotary.shape[1]], rotary)
    # A non-finite number in the cache would reach every row, because attention multiplies the
    # values of a masked slot by 0, and 0 x nan is nan
    value = overflow_value(kv.dtype)
    replacements = {"nan": value, "posinf": value, "neginf": -value}
    if isinstance(start, Tensor):
        kv.index_copy_(2, start, torch.nan_to_num(qkv[1:], **replacements))
    else:
        torch.nan_to_num(qkv[1:], **replacements, out=kv[:, :, start : start + qkv.shape[2]])
    return qkv[0]


def rotate_(x: Tensor, rotary: Tensor) -> None:
    """Rotate x [..., n, R] in place by rotary [n or 1, R / 2]. Adjacent dimensions are a pair."""
    pairs = x.float().view(torch.complex64)  # shares x's memory if x is float32
    pairs.mul_(rotary)
    if x.dtype != torch.float32:
        x.copy_(pairs.view(torch.float32))


def combine(attended: Tensor, inner: Tensor, approximate: str) -> Tensor:
    """Return the input of the joined output product, [n, H * D + inner]: attention's output and the
    GELU of the MLP's inside.

    attended: [H, n, D]. inner: [n, inner], may be overwritten.
    """
    n_heads, n, size = attended.shape
    n_attended = n_heads * size
    combined = inner.new_empty(n, n_attended + inner.shape[1])
    columns = combined[:, :n_attended]  # [n, H * D]
    columns.view(n, n_heads, size).copy_(attended.transpose(0, 1))
    gelu(inner, approximate, combined[:, n_attended:])
    return combined


def gelu(x: Tensor, approximate: str, out: Tensor) -> None:
    """Write GELU(x) to `out`; both are [n, inner]. May overwrite x."""
    if x.device.type != "cpu":
        F.gelu(x, approximate=approximate, out=out)
    elif x.numel() % 2:  # oneDNN cannot write to an `out` that is not contiguous
        out.copy_(F.gelu(x, approximate=approximate))
    else:
        halves = x.view(2, -1).t()  # not contiguous, to avoid oneDNN, whose calls start slowly
        F.gelu(halves, approximate=approximate, out=halves)
        out.copy_(x)  # writing to `out` directly is not vectorised


def overflow_value(dtype: torch.dtype) -> float:
    """Return the number that the cache stores in place of a non-finite one.

    This is float16's largest number. Other dtypes store 0, because their keys and values overflow
    only if x overflows.
    """
    return torch.finfo(dtype).max if dtype == torch.float16 else 0.0


def reorder_qkv(qkv: Affine, config: Config) -> Affine:
    """Return query_key_value with its rows in qkv_order."""
    order = qkv_order(len(qkv.weight), config).to(qkv.weight.device)
    return Affine(qkv.weight[order], qkv.bias[order])


def qkv_order(n_rows: int, config: Config) -> Tensor:
    """Return the rows [H * 3 * D] of query_key_value in the order [3, H, D], with the dimensions of
    each rotary pair adjacent."""
    size, n_pairs = config.head_size, config.rotary_dims // 2
    rows = torch.arange(n_rows).view(-1, 3, size).transpose(0, 1).clone()  # [3, H, D]
    pairs = rows[:2, :, : 2 * n_pairs].unflatten(-1, (2, n_pairs)).mT.flatten(-2).clone()
    rows[:2, :, : 2 * n_pairs] = pairs
    return rows.flatten()


def fold(norm: Affine, linear: Affine) -> Affine:
    """Return one matrix and bias that apply a LayerNorm's scale and shift, then a linear layer.

    They are computed in float32 and rounded once. Raises CheckpointError if they overflow.
    """
    weight = linear.weight.float()
    dtype = linear.weight.dtype
    bias = (linear.bias.float() + weight @ norm.bias.float()).to(dtype)
    weight = (weight * norm.weight.float()).to(dtype)
    if not (weight.isfinite().all() and bias.isfinite().all()):
        raise CheckpointError(f"a weight overflows {dtype} when its layer norm is folded in")
    return Affine(weight, bias)

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
- A row that overflows gets nan, and leaves the other rows as they are (methods/overflow.py). In
  float16 a key or value can overflow although x is finite. So the cache gets the largest float16
  number, and once, after all layers, a row that stored one gets nan.

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
from gpt_neox import ACTIVATIONS, Config, Layer

LARGE_LAYER = 2**23  # bytes; after packing a larger layer, free memory goes back to the system


def fuse(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give a GPTNeoX on the meta device its weights, and replace its layers by fused ones.

    This is done layer by layer. So if each lookup in `tensors` reads a file, memory holds only one
    copy of the model. Raises CheckpointError if a matrix times the scale of its norm overflows.
    """
    fuse_ends(model, tensors)
    layers = nn.ModuleList()
    for i in range(model.config.num_hidden_layers):
        layers.append(fuse_layer(i, model.config, tensors))
        if layers[i].nbytes > LARGE_LAYER:
            trim_heap()
    model.gpt_neox = FusedTransformer(model.gpt_neox.embed_in, layers)


def fuse_ends(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give a GPTNeoX on the meta device its embedding and a fused head, but no layers."""
    model.gpt_neox.layers = nn.ModuleList()
    load_weights(model, "", tensors)
    if model.config.tie_word_embeddings:
        model.embed_out.weight = model.gpt_neox.embed_in.weight
    choose_kernels(model.device, model.dtype)
    model.embed_out = Head(model.gpt_neox.final_layer_norm, model.embed_out.weight)


def fuse_layer(i: int, config: Config, tensors: Mapping[str, Tensor]) -> "FusedLayer":
    """Return layer i, in the form that is fastest on its device. Raises CheckpointError if a matrix
    times the scale of its norm overflows."""
    with torch.device("meta"):
        layer = Layer(config)
    load_weights(layer, f"gpt_neox.layers.{i}.", tensors)
    *norms, qkv, inner, dense, out = affine_parts(layer)
    order = qkv_order(len(qkv.weight), config).to(qkv.weight.device)
    qkv = Affine(qkv.weight[order], qkv.bias[order])
    if not config.use_parallel_residual:
        linears = [make_linear(*part) for part in (qkv, inner, dense, out)]
        return SequentialLayer(config, norms, linears)
    weight = torch.cat([dense.weight, out.weight], dim=1)
    dense_and_out = make_linear(weight, dense.bias + out.bias)
    if weight.device.type == "cuda":
        return FoldedLayer(config, fold(norms[0], qkv), fold(norms[1], inner), dense_and_out)
    return ParallelLayer(config, norms, [make_linear(*qkv), make_linear(*inner), dense_and_out])


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
        setattr(module.get_submodule(owner), part, weight)  # a rank's shard has other shapes


def trim_heap() -> None:
    """Return freed memory to the system. glibc keeps free memory between blocks in use. After 16
    layers of hidden size 1,024 were packed, this was 16 % of the model's size in float32, and 32 %
    in bfloat16 (measured)."""
    with suppress(OSError, AttributeError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


class FusedTransformer(nn.Module):
    """gpt_neox.Transformer with fused layers, for inference."""

    def __init__(self, embed_in: nn.Embedding, layers: nn.Module):
        super().__init__()
        self.embed_in, self.layers = embed_in, layers
        self.overflow_value = overflow_value(embed_in.weight.dtype)

    def forward(
        self, tokens: Tensor, rotary: Tensor, kv: Tensor, start: int | Tensor, mask: Mask
    ) -> Tensor:
        """Return the last hidden states [n, hidden] of tokens [n], before the final norm.

        Args:
            rotary: [n, R / 2] complex64, of the rows' positions.
            kv: [2, L, H, capacity, D].
            start: the first slot to write. A pass of a fixed shape gives all of them, [n] int64.
            mask: of these rows.
        """
        x = self.embed_in(tokens)  # [n, hidden], layers add to it in place
        for layer, layer_kv in zip(self.layers, kv.unbind(1), strict=True):
            x = layer(x, rotary, layer_kv, start, mask)
        if self.overflow_value:
            is_fixed = isinstance(start, Tensor)
            stored = kv.index_select(3, start) if is_fixed else kv[:, :, :, start : start + len(x)]
            # The highest absolute value of each row, [n]
            highest = torch.linalg.vector_norm(stored, torch.inf, dim=(0, 1, 2, 4))
            has_overflowed = highest == self.overflow_value
            x = x.masked_fill(has_overflowed[:, None], torch.nan)
        return x


class Affine(NamedTuple):
    """A norm's scale and shift [in], or a linear layer's matrix [out, in] and bias [out]."""

    weight: Tensor
    bias: Tensor


def affine_parts(layer: Layer) -> list[Affine]:
    """Return LN1 and LN2 of a layer, and its linear layers: qkv, inner, dense and out."""
    modules = [layer.input_layernorm, layer.post_attention_layernorm]
    modules += [layer.attention.query_key_value, layer.mlp.dense_h_to_4h]
    modules += [layer.attention.dense, layer.mlp.dense_4h_to_h]
    parts = []
    for module in modules:
        weight = module.weight.detach()
        bias = weight.new_zeros(len(weight)) if module.bias is None else module.bias.detach()
        parts.append(Affine(weight, bias))
    return parts


class FusedLayer(nn.Module):
    """A layer of a FusedTransformer. The three classes below have different linear layers.

    `inputs` returns qkv [n, 3 H D] and the MLP's inner product [n, inner], or None if that depends
    on attention. `outputs` returns what is then added to x [n, hidden].
    """

    # Given a result [n, hidden] of a layer that has only some of its heads and columns, return the
    # sum over all ranks (engine/tensor_parallel.py)
    sum_ranks: Callable[[Tensor], Tensor] = staticmethod(lambda x: x)

    def __init__(self, config: Config, norms: list[Affine], linears: list[Linear]):
        """norms: LN1 and LN2, unless they are folded into linear layers."""
        super().__init__()
        self.config, self.norms, self.linears = config, norms, linears
        self.nbytes = sum(linear.nbytes for linear in linears)  # of weights that a pass reads
        self.approximate = ACTIVATIONS[config.hidden_act]

    def forward(
        self, x: Tensor, rotary: Tensor, kv: Tensor, start: int | Tensor, mask: Mask
    ) -> Tensor:
        """Add attention and MLP to x in place. Write this pass's keys and values to kv [2, H,
        capacity, D]."""
        qkv, inner = self.inputs(x)
        qkv = qkv.view(len(qkv), 3, -1, self.config.head_size).permute(1, 2, 0, 3)  # [3, H, n, D]
        q = rotate_and_store(qkv, rotary, kv, start)
        attended = mask.attend(q, kv[0], kv[1])  # [H, n, D]
        return x.add_(self.sum_ranks(self.outputs(x, attended, inner)))

    def norm(self, x: Tensor, which: int) -> Tensor:
        """Return LN1(x) or LN2(x)."""
        return torch.layer_norm(x, x.shape[-1:], *self.norms[which], self.config.layer_norm_eps)


class SequentialLayer(FusedLayer):
    """y = x + Attn(LN1(x)), then y + MLP(LN2(y)). The linear layers are qkv, inner, dense, out."""

    def inputs(self, x: Tensor) -> tuple[Tensor, None]:
        return self.linears[0](self.norm(x, 0)), None

    def outputs(self, x: Tensor, attended: Tensor, _: None) -> Tensor:
        inner, dense, out = self.linears[1:]
        columns = attended.transpose(0, 1).flatten(1)  # [n, H * D]
        x.add_(self.sum_ranks(dense(columns)))
        product = inner(self.norm(x, 1))
        active = torch.empty_like(product)
        gelu(product, self.approximate, active)
        return out(active)


class ParallelLayer(FusedLayer):
    """x + Attn(LN1(x)) + MLP(LN2(x)). The linear layers are qkv, inner, and dense with out."""

    def inputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        qkv, inner, _ = self.linears
        return qkv(self.norm(x, 0)), inner(self.norm(x, 1))

    def outputs(self, x: Tensor, attended: Tensor, inner: Tensor) -> Tensor:
        n_heads, n, size = attended.shape
        n_attended = n_heads * size
        combined = inner.new_empty(n, n_attended + inner.shape[1])
        combined[:, :n_attended].view(n, n_heads, size).copy_(attended.transpose(0, 1))
        gelu(inner, self.approximate, combined[:, n_attended:])
        return self.linears[-1](combined)


class FoldedLayer(ParallelLayer):
    """A ParallelLayer that has qkv with inner, too, and the norms folded into them."""

    def __init__(self, config: Config, qkv: Affine, inner: Affine, dense_and_out: Linear):
        """qkv, inner: after `fold`."""
        weight, bias = (torch.cat(both) for both in zip(qkv, inner, strict=True))
        # CUDA's attention reads queries in 16 bytes, so rows must begin at multiples of 16
        n_more = -len(bias) % (16 // bias.element_size())
        qkv_and_inner = make_linear(F.pad(weight, (0, 0, 0, n_more)), F.pad(bias, (0, n_more)))
        super().__init__(config, [], [qkv_and_inner, dense_and_out])
        self.n_qkv, self.n_inner = len(qkv.bias), len(inner.bias)

    def inputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        normed = torch.layer_norm(x, x.shape[-1:], None, None, self.config.layer_norm_eps)
        both = self.linears[0](normed)  # [n, n_qkv + n_inner + padding]
        return both[:, : self.n_qkv], both[:, self.n_qkv : self.n_qkv + self.n_inner]


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
        self.nbytes = self.linear.nbytes
        if self.nbytes > LARGE_LAYER:
            trim_heap()

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(self.norm(x))
        return self.gather_ids(y) if self.gather_ids else y

    def write_logits(self, x: Tensor, out: Tensor) -> None:
        """Write what `forward` returns to `out`, [n, V] float32, without a copy if possible. Passes
        of fixed shapes do this."""
        if isinstance(self.linear, MixedLinear) and not self.gather_ids:
            self.linear(self.norm(x), out)
        else:
            out.copy_(self(x))


def rotate_and_store(qkv: Tensor, rotary: Tensor, kv: Tensor, start: int | Tensor) -> Tensor:
    """Rotate the queries and keys of qkv [3, H, n, D], which may be overwritten. Write keys and
    values to kv [2, H, capacity, D], and return the queries [H, n, D]."""
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


def gelu(x: Tensor, approximate: str, out: Tensor) -> None:
    """Write GELU(x) to `out`; both are [n, inner]. May overwrite x."""
    if x.device.type != "cpu":
        F.gelu(x, approximate=approximate, out=out)
    elif x.dtype != torch.float32 or x.numel() % 2:  # torch cannot write to such an `out`
        out.copy_(F.gelu(x, approximate=approximate))
    else:
        # Not contiguous, to avoid oneDNN. With 512 to 10,240 columns this takes 0.4 to 0.9 of
        # oneDNN's time for one row, and 1.0 to 1.45 for 64 (measured). The number of rows must not
        # decide, because both round differently
        halves = x.view(2, -1).t()
        F.gelu(halves, approximate=approximate, out=halves)
        out.copy_(x)  # writing to `out` directly is not vectorised


def overflow_value(dtype: torch.dtype) -> float:
    """Return the number that the cache stores in place of a non-finite one.

    In float16 this is the largest number. In float32 and bfloat16 a query times the largest number
    would overflow, and in a masked slot inf - inf is nan. They store 0, which leaves no trace, but
    their keys and values overflow only if x does.
    """
    return torch.finfo(dtype).max if dtype == torch.float16 else 0.0


def qkv_order(n_rows: int, config: Config) -> Tensor:
    """Return the rows [H * 3 * D] of query_key_value in the order [3, H, D], with the dimensions of
    each rotary pair adjacent: with two pairs, 0, 2, 1, 3."""
    size, n_pairs = config.head_size, config.rotary_dims // 2
    rows = torch.arange(n_rows).view(-1, 3, size).transpose(0, 1).clone()  # [3, H, D]
    pairs = rows[:2, :, : 2 * n_pairs]  # of queries and keys: [2, H, R]
    pairs.copy_(torch.stack(pairs.chunk(2, dim=-1), dim=-1).flatten(-2))
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

"""The layers of gpt_neox.py, fused for passes of a few rows over a KV cache.

gpt_neox.py defines the model. This file changes only how it is computed, and a test holds both
equal. The differences are:

- Matrices are packed (engine/linear.py).
- The rows of query_key_value are reordered: all queries, then all keys, then all values. Within a
  head the two dimensions of a rotary pair are adjacent, so a pair is one complex number, which is
  rotated by one multiplication. Attention allows this because queries and keys have one order.
- With parallel residual, the two products that lead back to x are one product. On CUDA, where every
  launch costs time, the two that lead away from x are one product as well, and the scales and
  shifts of both norms are folded into it.
- With tensor parallelism each rank holds some heads, some inner columns and some ids, and the
  results are added up where they meet.
- In float16 a key or value can overflow although x is finite. A non-finite number must not enter
  the cache and must not be lost either. So the largest float16 number is stored in its place, and a
  row that stored one gets nan at the end.
- A pass of a fixed shape writes to slots that are given as a tensor, other passes to a slice.

    fuse(model, tensors)  # FastGPTNeoX.from_tensors does this

Shapes: n rows, S cache slots, L layers, H heads (of this shard), D head size, R rotary dimensions.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.checkpoint import CheckpointError
from engine.cuda_graphs import choose_kernels
from engine.linear import Linear, MixedLinear, make_linear
from engine.memory import trim_heap
from engine.passes import ROW_COUNTS
from engine.strict import StrictMask, attend_by_position
from engine.tensor_parallel import UNSHARDED, Shard, split_axis
from gpt_neox import ACTIVATIONS, Config

LARGE_LAYER = 2**23  # bytes of a layer after which freed memory is returned to the system


def fuse(model: nn.Module, tensors: Mapping[str, Tensor], shard: Shard = UNSHARDED) -> None:
    """Give a GPTNeoX on the meta device its weights, and replace its layers by fused ones.

    Works layer by layer: if `tensors` reads each tensor when it is looked up, memory never holds
    two copies of the model. Raises CheckpointError if a tensor is missing or misshapen, or if a
    matrix times the scale of its norm overflows.
    """
    config, layers = model.config, model.gpt_neox.layers
    model.gpt_neox.layers = nn.ModuleList()  # their weights are loaded one layer at a time
    load_weights(model, "", tensors, shard)
    if config.tie_word_embeddings:
        model.embed_out.weight = model.gpt_neox.embed_in.weight
    choose_kernels(model.device, model.dtype)  # before `fold` multiplies matrices
    for i in range(config.num_hidden_layers):
        load_weights(layers[i], f"gpt_neox.layers.{i}.", tensors, shard)
        layers[i] = FusedLayer(layers[i], config, shard)
    model.gpt_neox.layers = layers
    model.gpt_neox = FusedTransformer(model.gpt_neox, shard)
    model.embed_out = Head(model.embed_out.weight, config.vocab_size, shard)


def load_weights(
    module: nn.Module, prefix: str, tensors: Mapping[str, Tensor], shard: Shard
) -> None:
    """Give a module its weights, whose published names begin with `prefix`. Raises
    CheckpointError."""
    for name, parameter in list(module.named_parameters()):
        published = prefix + name
        try:
            tensor = tensors[published]  # once, because each lookup may read the file
        except KeyError as error:
            raise CheckpointError(f"the checkpoint lacks the tensor {published}") from error
        expected, axis = list(parameter.shape), split_axis(published)
        if axis is not None:
            expected[axis] = shard.size(expected[axis])
        if list(tensor.shape) != expected:
            found = tuple(tensor.shape)
            raise CheckpointError(f"{published} is {found}, config.json asks for {tuple(expected)}")
        owner, _, part = name.rpartition(".")
        weight = nn.Parameter(tensor, requires_grad=False)
        setattr(module.get_submodule(owner), part, weight)


def require_divisible(config: Config, shard: Shard) -> None:
    """Raise CheckpointError unless the ranks can split heads and inner columns evenly."""
    heads = config.num_attention_heads
    sizes = {"heads": heads, "columns of the MLP's inside": config.intermediate_size}
    for what, n in sizes.items():
        if n % shard.world_size:
            raise CheckpointError(
                f"{n} {what} cannot be split evenly over {shard.world_size} ranks"
            )


class FusedTransformer(nn.Module):
    """gpt_neox.Transformer with fused layers, for inference."""

    def __init__(self, plain: nn.Module, shard: Shard):
        super().__init__()
        self.shard = shard
        self.embed_in = plain.embed_in
        self.layers = plain.layers
        self.final_layer_norm = plain.final_layer_norm
        self.mark = overflow_mark(self.embed_in.weight.dtype)

    def forward(
        self,
        tokens: Tensor,
        rotary: Tensor,
        kv: Tensor,
        start: int | Tensor,
        mask: Tensor | StrictMask,
    ) -> Tensor:
        """Return the last hidden states [n, hidden] of tokens [n].

        Args:
            rotary: [n, R / 2] complex64, of the rows' positions.
            kv: [2, L, H, capacity, D].
            start: the first slot that is written, or all slots [n] int64.
            mask: [n, S], 0 or -inf; or a StrictMask.
        """
        x = self.shard.embed(tokens, self.embed_in.weight)  # [n, hidden], added to in place
        for layer, layer_kv in zip(self.layers, kv.unbind(1), strict=True):
            x = layer(x, rotary, layer_kv, start, mask)
        x = self.final_layer_norm(x)
        if self.mark:
            stored = written(kv, start, len(x))
            has_overflowed = stored.abs().amax(dim=(0, 1, 2, 4)) == self.mark  # [n]
            x = x.masked_fill(has_overflowed[:, None], torch.nan)
        return x


def overflow_mark(dtype: torch.dtype) -> float:
    """Return what the cache stores for a number that is not finite: float16's largest number, or 0
    in other dtypes, in which keys and values overflow only if x has overflowed."""
    return torch.finfo(dtype).max if dtype == torch.float16 else 0.0


def written(kv: Tensor, start: int | Tensor, n: int) -> Tensor:
    """Return the keys and values [2, L, H, n, D] that a pass of n rows has written."""
    if isinstance(start, Tensor):
        return kv.index_select(3, start)
    return kv[:, :, :, start : start + n]


class Affine(NamedTuple):
    """A norm's scale and shift [in], or a linear layer's matrix [out, in] and bias [out]."""

    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, module: nn.LayerNorm | nn.Linear) -> "Affine":
        weight = module.weight.detach()
        bias = weight.new_zeros(len(weight)) if module.bias is None else module.bias.detach()
        return cls(weight, bias)


class FusedLayer(nn.Module):
    """A layer that adds Attn(LN1(x)) + MLP(LN2(x)) to x [n, hidden] in place, or without parallel
    residual first attention, then the MLP."""

    def __init__(self, layer: nn.Module, config: Config, shard: Shard = UNSHARDED):
        """layer: a plain one with the weights of this shard. Raises CheckpointError if a matrix
        times the scale of its norm overflows."""
        super().__init__()
        self.config, self.shard = config, shard
        self.approximate = ACTIVATIONS[config.hidden_act]
        self.mark = overflow_mark(layer.mlp.dense_4h_to_h.weight.dtype)
        self.n_attended = len(layer.attention.query_key_value.weight) // 3
        self.n_inner = len(layer.mlp.dense_h_to_4h.weight)
        self.norms = Affine.of(layer.input_layernorm), Affine.of(layer.post_attention_layernorm)
        qkv = reordered(Affine.of(layer.attention.query_key_value), config)
        inner = Affine.of(layer.mlp.dense_h_to_4h)
        dense = Affine.of(layer.attention.dense)
        out = Affine.of(layer.mlp.dense_4h_to_h)
        if shard.rank:  # rank 0 adds the biases
            dense = Affine(dense.weight, torch.zeros_like(dense.bias))
            out = Affine(out.weight, torch.zeros_like(out.bias))
        self.qkv_and_inner: Linear | None = None
        if config.use_parallel_residual and qkv.weight.device.type == "cuda":
            both = fold(self.norms[0], qkv), fold(self.norms[1], inner)
            weight, bias = (torch.cat(parts) for parts in zip(*both, strict=True))
            is_odd = len(bias) % 2  # rotate_ needs rows of an even width
            weight, bias = F.pad(weight, (0, 0, 0, is_odd)), F.pad(bias, (0, is_odd))
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
        self,
        x: Tensor,
        rotary: Tensor,
        kv: Tensor,
        start: int | Tensor,
        mask: Tensor | StrictMask,
    ) -> Tensor:
        in_order = isinstance(mask, StrictMask)  # then no sum may depend on a row's place
        if not self.config.use_parallel_residual:
            attended = self.attend(self.qkv(self.norm(x, 0)), rotary, kv, start, mask)
            x.add_(self.shard.sum(self.dense(attended.transpose(0, 1).flatten(1)), in_order))
            inner = self.inner(self.norm(x, 1))
            active = torch.empty_like(inner)
            gelu(inner, self.approximate, active)
            return x.add_(self.shard.sum(self.out(active), in_order))
        if self.qkv_and_inner:
            normed = torch.layer_norm(x, x.shape[-1:], None, None, self.config.layer_norm_eps)
            both = self.qkv_and_inner(normed)
            qkv = both[:, : 3 * self.n_attended]
            inner = both[:, 3 * self.n_attended :][:, : self.n_inner]
        else:
            qkv, inner = self.qkv(self.norm(x, 0)), self.inner(self.norm(x, 1))
        attended = self.attend(qkv, rotary, kv, start, mask)  # [H, n, D]
        both = x.new_empty(len(x), self.n_attended + inner.shape[1])
        in_heads = both[:, : self.n_attended].view(len(x), -1, self.config.head_size)  # [n, H, D]
        in_heads.copy_(attended.transpose(0, 1))
        gelu(inner, self.approximate, both[:, self.n_attended :])
        return x.add_(self.shard.sum(self.dense_and_out(both), in_order))

    def norm(self, x: Tensor, which: int) -> Tensor:
        """Return LN1(x) or LN2(x)."""
        return torch.layer_norm(x, x.shape[-1:], *self.norms[which], self.config.layer_norm_eps)

    def attend(
        self,
        qkv: Tensor,
        rotary: Tensor,
        kv: Tensor,
        start: int | Tensor,
        mask: Tensor | StrictMask,
    ) -> Tensor:
        """Return attended values [H, n, D] for qkv [n, 3 H D], and write this pass's keys and
        values to kv [2, H, capacity, D]."""
        qkv = qkv.view(len(qkv), 3, -1, self.config.head_size).permute(1, 2, 0, 3)  # [3, H, n, D]
        rotate_(qkv[:2, ..., : self.config.rotary_dims], rotary)
        # A non-finite number in the cache would reach every row, because a masked slot is
        # multiplied by 0, and 0 x nan is nan
        marks = {"nan": self.mark, "posinf": self.mark, "neginf": -self.mark}
        if isinstance(start, Tensor):
            kv.index_copy_(2, start, torch.nan_to_num(qkv[1:], **marks))
        else:
            torch.nan_to_num(qkv[1:], **marks, out=kv[:, :, start : start + qkv.shape[2]])
        if isinstance(mask, StrictMask):
            return attend_by_position(qkv[0], kv[0], kv[1], mask)
        return attend(qkv[0], *kv[:, :, : mask.shape[1]], mask)

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
    """The output layer: logits [n, V] from x [n, hidden], in float32 on CUDA. Each rank computes
    some of the ids."""

    def __init__(self, weight: Tensor, vocab_size: int, shard: Shard):
        super().__init__()
        self.vocab_size, self.shard = vocab_size, shard
        weight = weight.detach()
        is_mixed = weight.is_cuda and weight.dtype != torch.float32
        self.linear = MixedLinear(weight) if is_mixed else make_linear(weight, None)
        if self.linear.nbytes > LARGE_LAYER:
            trim_heap()

    @property
    def nbytes(self) -> int:
        return self.linear.nbytes

    def forward(self, x: Tensor) -> Tensor:
        return self.shard.concatenate(self.linear(x))[:, : self.vocab_size]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return softmax attention [H, n, D] of q [H, n, D] over k, v [H, S, D]. mask: [n, S], 0 or
    -inf."""
    # Against scaled_dot_product_attention on a CPU: 4/5 of the time for 1 row, twice that for 512
    if q.device.type == "cpu" and q.dtype == torch.float32 and q.shape[1] < ROW_COUNTS[-1]:
        scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=q.shape[-1] ** -0.5)
        return torch.bmm(scores.softmax(-1), v)  # [H, n, S] times [H, S, D]
    return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]


def gelu(x: Tensor, approximate: str, out: Tensor) -> None:
    """Write GELU(x) to `out`; both are [n, inner]. The contents of x may be lost."""
    if x.device.type != "cpu":
        F.gelu(x, approximate=approximate, out=out)
    elif x.numel() % 2:  # oneDNN does not write to an `out` with gaps
        out.copy_(F.gelu(x, approximate=approximate))
    else:
        halves = x.view(2, -1).t()  # not contiguous: else oneDNN is called, which starts slowly
        F.gelu(halves, approximate=approximate, out=halves)
        out.copy_(x)  # writing to `out` directly is not vectorised


def rotate_(x: Tensor, rotary: Tensor) -> None:
    """Rotate x [..., n, R] in place by rotary [n or 1, R / 2]. Adjacent dimensions are a pair."""
    pairs = x.float().view(torch.complex64)  # x itself if it is float32
    pairs.mul_(rotary)
    if x.dtype != torch.float32:
        x.copy_(pairs.view(torch.float32))


def reordered(qkv: Affine, config: Config) -> Affine:
    """Return query_key_value with its rows [H * 3 * D] in the order [3, H, D], and with the two
    dimensions of each rotary pair adjacent."""
    size, n_pairs = config.head_size, config.rotary_dims // 2
    rows = torch.arange(len(qkv.weight)).view(-1, 3, size).transpose(0, 1).clone()  # [3, H, D]
    pairs = rows[:2, :, : 2 * n_pairs].unflatten(-1, (2, n_pairs)).mT.flatten(-2).clone()
    rows[:2, :, : 2 * n_pairs] = pairs
    order = rows.flatten().to(qkv.weight.device)
    return Affine(qkv.weight[order], qkv.bias[order])


def fold(norm: Affine, linear: Affine) -> Affine:
    """Return one matrix and bias for a LayerNorm's scale and shift and the linear layer after it.

    They are computed in float32 and rounded once. Raises CheckpointError if they overflow.
    """
    weight = linear.weight.float()
    dtype = linear.weight.dtype
    bias = (linear.bias.float() + weight @ norm.bias.float()).to(dtype)
    weight = (weight * norm.weight.float()).to(dtype)
    if not (weight.isfinite().all() and bias.isfinite().all()):
        raise CheckpointError(f"a matrix times the norm before it is not finite in {dtype}")
    return Affine(weight, bias)

"""The layers of a loaded GPT-NeoX, replaced by fast ones that compute the same.

gpt_neox.py is the model; what is here changes only how it is computed, for one pass of a few rows
over a cache, and a test holds both equal. All that departs from the plain form is decided here:

- Matrices are packed (engine/products.py).
- The rows of query_key_value are put in order of queries, keys, values, and within a head so that
  the two dimensions that a position turns together are neighbours: then they are one complex
  number, and a turn one product. Attention does not mind, as queries and keys share the order.
- Attention's and the MLP's way back to x is one product where both are added to it together. On
  CUDA, where every launch costs, the way in is one, too: both norms' scales and shifts go into it.
- A rank's share: some heads, some of the MLP's inside, some ids, and one sum where they meet.
- In float16 a key or value can overflow alone. It must not enter the cache as it is, and must not
  be silent, so a mark stands in its place, and rows that left one are undefined at the end.
- What is written where: a slice, or for passes of a fixed shape slots that lie in a tensor.

    fill(model, tensors)  # FastGPTNeoX.from_pretrained does

Shapes: n rows, S cache slots, L layers, H heads (of this share), D head size, R rotary dims.
"""

import weakref
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.caches import CachePool
from engine.checkpoint import CheckpointError
from engine.cuda_graphs import settle_kernels
from engine.memory import give_back
from engine.passes import ROW_COUNTS
from engine.products import Product, WideProduct, open_product
from engine.shares import WHOLE, Share, split_axis
from engine.strict import Sight, attend_by_position
from gpt_neox import ACTIVATIONS, Config

LARGE_LAYER = 2**23  # bytes from which it is worth asking how memory lies


def fill(model: nn.Module, tensors: Mapping[str, Tensor], share: Share = WHOLE) -> None:
    """Give a plain GPTNeoX that has no memory yet its weights, a pool for its caches, and fast
    layers for its own.

    One layer at a time, so that where each tensor is read when it is looked at no second copy of
    all exists. Raises CheckpointError for a tensor that is missing or misshapen, or a matrix that
    overflows times the norm before it.
    """
    config, layers = model.config, model.gpt_neox.layers
    model.gpt_neox.layers = nn.ModuleList()  # theirs are taken one by one
    take(model, "", tensors, share)
    if config.tie_word_embeddings:
        model.embed_out.weight = model.gpt_neox.embed_in.weight
    settle_kernels(model.device, model.dtype)  # before norms are folded by a product
    for i in range(config.num_hidden_layers):
        take(layers[i], f"gpt_neox.layers.{i}.", tensors, share)
        layers[i] = FusedLayer(layers[i], config, share)
    model.gpt_neox.layers = layers
    model.gpt_neox = FusedTransformer(model.gpt_neox, share)
    model.embed_out = Head(model.embed_out.weight, config.vocab_size, share)
    model.share = share
    model.n_heads = config.num_attention_heads // share.count
    n_values = 2 * config.num_hidden_layers * model.n_heads * config.head_size  # of one token
    token_bytes = n_values * model.dtype.itemsize
    # The pool is the model's: what kept the model in turn would keep its weights as well
    run = weakref.WeakMethod(model.run_pass)
    min_rows = fastest_rows(model.device, model.dtype)
    model.pool = CachePool(run, token_bytes, model.device, config, min_rows, share)


def take(module: nn.Module, prefix: str, tensors: Mapping[str, Tensor], share: Share) -> None:
    """Give a module its weights, whose published names begin with `prefix`. Raises
    CheckpointError."""
    for name, parameter in list(module.named_parameters()):
        published = prefix + name
        try:
            tensor = tensors[published]  # once, as each look may read it anew
        except KeyError as error:
            raise CheckpointError(f"the checkpoint lacks the tensor {published}") from error
        asked, axis = list(parameter.shape), split_axis(published)
        if axis is not None:
            asked[axis] = share.size(asked[axis])
        if list(tensor.shape) != asked:
            found = tuple(tensor.shape)
            raise CheckpointError(f"{published} is {found}, config.json asks for {tuple(asked)}")
        owner, _, part = name.rpartition(".")
        weight = nn.Parameter(tensor, requires_grad=False)
        setattr(module.get_submodule(owner), part, weight)


def require_divisible(config: Config, share: Share) -> None:
    """Raise CheckpointError unless heads and the MLP's inside can be split evenly."""
    heads = config.num_attention_heads
    sizes = {"heads": heads, "columns of the MLP's inside": config.intermediate_size}
    for what, n in sizes.items():
        if n % share.count:
            raise CheckpointError(f"{n} {what} cannot be split evenly over {share.count} ranks")


class FusedTransformer(nn.Module):
    """The same call as gpt_neox.Transformer's, without gradients and batches.

    start: also slots [n] int64 to write, where their number must not shape the pass. bias: also a
    Sight, where the result is to be the same bit for bit wherever a row's ancestors lie.
    """

    def __init__(self, plain: nn.Module, share: Share):
        super().__init__()
        self.share = share
        self.embed_in = plain.embed_in
        self.layers = plain.layers
        self.final_layer_norm = plain.final_layer_norm
        self.mark = overflow_mark(self.embed_in.weight.dtype)

    def forward(
        self, tokens: Tensor, turns: Tensor, kv: Tensor, start: int | Tensor, bias: Tensor | Sight
    ) -> Tensor:
        x = self.share.embed(tokens, self.embed_in.weight)  # [n, hidden], added to in place
        for layer, past in zip(self.layers, kv.unbind(1), strict=True):
            x = layer(x, turns, past, start, bias)
        x = self.final_layer_norm(x)
        if self.mark:
            has_overflowed = written(kv, start, len(x)).abs().amax(dim=(0, 1, 2, 4)) == self.mark
            x = x.masked_fill(has_overflowed[:, None], torch.nan)
        return x

    @staticmethod
    def rotate(x: Tensor, turns: Tensor) -> Tensor:
        """Keys x [..., n, D] turned by turns [n or none, R / 2], in place."""
        rotate_(x[..., : 2 * turns.shape[-1]], turns)
        return x


def overflow_mark(dtype: torch.dtype) -> float:
    """Stands in the cache for what is not finite: float16 can overflow there alone, so its largest
    number is a mark; elsewhere only what had overflowed before gets there."""
    return torch.finfo(dtype).max if dtype == torch.float16 else 0.0


def written(kv: Tensor, start: int | Tensor, n: int) -> Tensor:
    """The keys and values [2, L, H, n, D] of a pass's own rows."""
    if isinstance(start, Tensor):
        return kv.index_select(3, start)
    return kv[:, :, :, start : start + n]


def fastest_rows(device: torch.device, dtype: torch.dtype) -> int:
    """To how many rows a pass is best padded at least: on a CPU in half precision attention of one
    row takes twice the time of two, and oneDNN's products of one or two more than of four
    (measured)."""
    return 4 if device.type == "cpu" and dtype != torch.float32 else 1


class Affine(NamedTuple):
    """A norm's scale and shift [in], or a matrix [out, in] and what is added to its product."""

    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, module: nn.LayerNorm | nn.Linear) -> "Affine":
        weight = module.weight.detach()
        bias = weight.new_zeros(len(weight)) if module.bias is None else module.bias.detach()
        return cls(weight, bias)


def is_joined(config: Config, device: torch.device) -> bool:
    """Whether the way into attention and MLP is one product: where launches cost."""
    return config.use_parallel_residual and device.type == "cuda"


class FusedLayer(nn.Module):
    """x + Attn(LN1(x)) + MLP(LN2(x)), or one after the other, on x [n, hidden] in place."""

    def __init__(self, layer: nn.Module, config: Config, share: Share = WHOLE):
        """layer: a plain one, whose weights are this share's. Raises CheckpointError if a matrix
        times the norm before it overflows."""
        super().__init__()
        self.config, self.share = config, share
        self.approximate = ACTIVATIONS[config.hidden_act]
        self.mark = overflow_mark(layer.mlp.dense_4h_to_h.weight.dtype)
        self.n_attended = len(layer.attention.query_key_value.weight) // 3
        self.n_inside = len(layer.mlp.dense_h_to_4h.weight)
        self.norms = Affine.of(layer.input_layernorm), Affine.of(layer.post_attention_layernorm)
        qkv = reordered(Affine.of(layer.attention.query_key_value), config)
        inside = Affine.of(layer.mlp.dense_h_to_4h)
        dense = Affine.of(layer.attention.dense)
        out = Affine.of(layer.mlp.dense_4h_to_h)
        if share.index:  # what is added once is added by rank 0
            dense = Affine(dense.weight, torch.zeros_like(dense.bias))
            out = Affine(out.weight, torch.zeros_like(out.bias))
        self.into: Product | None = None
        if is_joined(config, qkv.weight.device):
            both = fold(self.norms[0], qkv), fold(self.norms[1], inside)
            weight, bias = (torch.cat(parts) for parts in zip(*both, strict=True))
            is_odd = len(bias) % 2  # and a row is to be of whole pairs, as rotate_ takes them
            self.into = open_product(F.pad(weight, (0, 0, 0, is_odd)), F.pad(bias, (0, is_odd)))
        else:
            self.qkv = open_product(*qkv)
            self.inside = open_product(*inside)
        if config.use_parallel_residual:
            weight = torch.cat([dense.weight, out.weight], dim=1)
            self.out_of = open_product(weight, dense.bias + out.bias)
        else:
            self.dense = open_product(*dense)
            self.out = open_product(*out)
        if self.nbytes > LARGE_LAYER:
            give_back()

    def forward(
        self, x: Tensor, turns: Tensor, past: Tensor, start: int | Tensor, bias: Tensor | Sight
    ) -> Tensor:
        in_order = isinstance(bias, Sight)  # strict: no sum may depend on a row's place
        if not self.config.use_parallel_residual:
            attended = self.attend(self.qkv(self.norm(x, 0)), turns, past, start, bias)
            x.add_(self.share.sum(self.dense(attended.transpose(0, 1).flatten(1)), in_order))
            inside = self.inside(self.norm(x, 1))
            active = torch.empty_like(inside)
            gelu(inside, self.approximate, active)
            return x.add_(self.share.sum(self.out(active), in_order))
        if self.into:
            normed = torch.layer_norm(x, x.shape[-1:], None, None, self.config.layer_norm_eps)
            both = self.into(normed)
            qkv = both[:, : 3 * self.n_attended]
            inside = both[:, 3 * self.n_attended :][:, : self.n_inside]
        else:
            qkv, inside = self.qkv(self.norm(x, 0)), self.inside(self.norm(x, 1))
        attended = self.attend(qkv, turns, past, start, bias)  # [H, n, D]
        both = x.new_empty(len(x), self.n_attended + inside.shape[1])
        in_heads = both[:, : self.n_attended].view(len(x), -1, self.config.head_size)  # [n, H, D]
        in_heads.copy_(attended.transpose(0, 1))
        gelu(inside, self.approximate, both[:, self.n_attended :])
        return x.add_(self.share.sum(self.out_of(both), in_order))

    def norm(self, x: Tensor, which: int) -> Tensor:
        """LN1 or LN2."""
        return torch.layer_norm(x, x.shape[-1:], *self.norms[which], self.config.layer_norm_eps)

    def attend(
        self, qkv: Tensor, turns: Tensor, past: Tensor, start: int | Tensor, bias: Tensor | Sight
    ) -> Tensor:
        """Attended values [H, n, D] of qkv [n, 3 H D]; keys and values go to past [2, H, S, D]."""
        qkv = qkv.view(len(qkv), 3, -1, self.config.head_size).permute(1, 2, 0, 3)  # [3, H, n, D]
        rotate_(qkv[:2, ..., : self.config.rotary_dims], turns)
        # Nothing non-finite may enter the cache: it would leak through the mask (0 x nan is nan)
        # into rows that may not see it. The row itself still gets non-finite logits
        marks = {"nan": self.mark, "posinf": self.mark, "neginf": -self.mark}
        if isinstance(start, Tensor):
            past.index_copy_(2, start, torch.nan_to_num(qkv[1:], **marks))
        else:
            torch.nan_to_num(qkv[1:], **marks, out=past[:, :, start : start + qkv.shape[2]])
        if isinstance(bias, Sight):
            return attend_by_position(qkv[0], past[0], past[1], bias)
        return attend(qkv[0], *past[:, :, : bias.shape[1]], bias)

    @property
    def products(self) -> list[Product]:
        """Of its matrices."""
        if self.into:
            return [self.into, self.out_of]
        out_of = [self.out_of] if self.config.use_parallel_residual else [self.dense, self.out]
        return [self.qkv, self.inside, *out_of]

    @property
    def nbytes(self) -> int:
        """That a pass reads of its matrices."""
        return sum(product.nbytes for product in self.products)


class Head(nn.Module):
    """From x to the logits of all ids, [n, V], of which a share has some rows; on CUDA float32."""

    def __init__(self, weight: Tensor, vocab_size: int, share: Share):
        super().__init__()
        self.vocab_size, self.share = vocab_size, share
        weight = weight.detach()
        is_wide = weight.is_cuda and weight.dtype != torch.float32
        self.product = WideProduct(weight) if is_wide else open_product(weight, None)
        if self.product.nbytes > LARGE_LAYER:
            give_back()

    @property
    def nbytes(self) -> int:
        return self.product.nbytes

    def forward(self, x: Tensor) -> Tensor:
        return self.share.gather(self.product(x))[:, : self.vocab_size]


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Softmax attention [H, n, D] of q [H, n, D] over k, v [H, S, D]; bias: [n, S], 0 or -inf."""
    is_plain = q.device.type == "cpu" and q.dtype == torch.float32
    if is_plain and q.shape[1] < ROW_COUNTS[-1]:  # of one row in 4/5 of the time, of 512 in twice
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=q.shape[-1] ** -0.5)
        return torch.bmm(scores.softmax(-1), v)  # [H, n, S] times [H, S, D]
    return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=bias)[0]


def gelu(x: Tensor, approximate: str, out: Tensor) -> None:
    """GELU of x, which may be lost, to `out`; both [n, inside]."""
    if x.device.type != "cpu":
        F.gelu(x, approximate=approximate, out=out)
    elif x.numel() % 2:  # oneDNN leaves an `out` with gaps as it was
        out.copy_(F.gelu(x, approximate=approximate))
    else:
        halves = x.view(2, -1).t()  # a contiguous tensor goes to oneDNN, which takes long to begin
        F.gelu(halves, approximate=approximate, out=halves)
        out.copy_(x)  # computed there at once it is not vectorised


def rotate_(x: Tensor, turns: Tensor) -> None:
    """Turn x [..., n, R], in neighbouring pairs and in place, by turns [n or none, R / 2]."""
    pairs = x.float().view(torch.complex64)  # x itself if it is float32
    pairs.mul_(turns)
    if x.dtype != torch.float32:
        x.copy_(pairs.view(torch.float32))


def reordered(qkv: Affine, config: Config) -> Affine:
    """query_key_value's rows [H * 3 * D] as [3, H, D], the pairs that are turned side by side."""
    size, n_pairs = config.head_size, config.rotary_dims // 2
    rows = torch.arange(len(qkv.weight)).view(-1, 3, size).transpose(0, 1).clone()  # [3, H, D]
    turned = rows[:2, :, : 2 * n_pairs].unflatten(-1, (2, n_pairs)).mT.flatten(-2).clone()
    rows[:2, :, : 2 * n_pairs] = turned
    order = rows.flatten().to(qkv.weight.device)
    return Affine(qkv.weight[order], qkv.bias[order])


def fold(norm: Affine, after: Affine) -> Affine:
    """A LayerNorm's scale and shift, and the matrix behind it, as one matrix and bias.

    Rounded once. Raises CheckpointError if that overflows.
    """
    weight = after.weight.float()
    dtype = after.weight.dtype
    bias = (after.bias.float() + weight @ norm.bias.float()).to(dtype)
    weight = (weight * norm.weight.float()).to(dtype)
    if not (weight.isfinite().all() and bias.isfinite().all()):
        raise CheckpointError(f"a matrix times the norm before it is not finite in {dtype}")
    return Affine(weight, bias)

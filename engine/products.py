"""Products with a model's matrices, laid out when it is loaded for passes of a few rows.

`Product` takes rows and gives rows; what this file adds is only speed:

- Blocks of columns. On CPU a matrix is stored in blocks of at most 40 columns, because MKL
  multiplies narrow matrices as they lie, but copies a wide one first, which takes up to as long
  again as the product of 2 to 16 rows (measured). So results come in blocks, [B, n, width].
- Folded norms. A LayerNorm's scale and shift go into the matrix behind it.
- Joined products. Where attention and the MLP read the same x, one product leads into both and one
  out of both: for a small model, and on a CPU, a product costs more than what it computes.

Shapes: n rows, B blocks of columns, H heads, D head size.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.checkpoint import EMBED_IN, EMBED_OUT, LAYER_NAMES, CheckpointError, Config
from engine.rotary import order_rows
from engine.shares import WHOLE, Share

COLUMNS = 40  # of a matrix, at most, that are stored together on CPU
LEADING_OUT = ("attention_out", "mlp_out")  # parts of a layer whose products are added to x
LARGE = 512  # hidden size from which two rows of a product take less time than one (measured)


class Affine(NamedTuple):
    """A LayerNorm, or a matrix as the checkpoint has it, [out, in], with its bias."""

    weight: Tensor
    bias: Tensor


class Product(NamedTuple):
    """x [n, in] -> x weight + bias [B, n, width], the outputs in blocks of columns."""

    weight: Tensor  # [B, in, width], or [in, out] where blocks gain nothing
    bias: Tensor  # [B, 1, width] or [out]
    width: int

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight.ndim == 3:
            n_blocks = self.weight.shape[0]
            return torch.baddbmm(self.bias, x.expand(n_blocks, -1, -1), self.weight)
        return in_blocks(torch.addmm(self.bias, x, self.weight), self.width)


class ParallelLayer(NamedTuple):
    """The products of x + attention(norm(x)) + mlp(norm(x))."""

    into: Product  # to queries, keys and values, [3, H, D], then to the MLP's inside
    out_of: Product  # from attended values, then the activated inside


class SequentialLayer(NamedTuple):
    """The products of x + attention(norm(x)), then x + mlp(norm(x))."""

    qkv: Product
    attention_out: Product
    mlp_in: Product
    mlp_out: Product


class Workspace(NamedTuple):
    """x in one pass and what is added to it, each view made once: one per layer costs too much."""

    x: Tensor  # [B, n, width], to add products to
    both: Tensor  # [n, H * D + inside], what out_of reads
    attended: Tensor  # [H, n, D], the first part of it
    active: Tensor  # [B, n, width], the second
    attended_rows: Tensor  # [n, H * D], the first part again
    active_rows: Tensor  # [n, inside]


class Layout:
    """How a model's products are laid out: widths, and views of what they give.

    Of a share of the model, H heads and the inside are those that are here.
    """

    def __init__(self, config: Config, share: Share = WHOLE):
        self.config = config
        self.share = share
        self.n_heads = config.n_heads // share.count
        self.n_attended = self.n_heads * config.head_size
        self.width = COLUMNS
        while config.head_size % self.width:
            self.width -= 1
        self.n_active = config.intermediate_size // share.count  # of an MLP's inside
        self.n_inside = -(-self.n_active // self.width) * self.width  # the same in whole blocks
        self.n_qkv = 3 * self.n_attended // self.width  # blocks

    def take_layer(self, tensors: dict[str, Tensor], index: int) -> ParallelLayer | SequentialLayer:
        """One layer's products; its tensors are taken out, so that no second copy of all exists.

        Raises CheckpointError if a matrix times the norm before it overflows.
        """
        parts = {}
        for part, name in LAYER_NAMES.items():
            name = f"gpt_neox.layers.{index}.{name}"
            weight = tensors.pop(f"{name}.weight")
            bias = tensors.get(f"{name}.bias", weight.new_zeros(len(weight)))
            if part in LEADING_OUT and self.share.index:
                bias = torch.zeros_like(bias)  # it is added once, by rank 0
            parts[part] = Affine(weight, bias)
        qkv = fold(parts["attention_norm"], parts["qkv"])
        order = order_rows(self.config, self.n_heads)
        qkv = Affine(qkv.weight[order], qkv.bias[order])
        mlp_in = fold(parts["mlp_norm"], parts["mlp_in"])
        attention_out = parts["attention_out"]
        padding = self.n_inside - self.n_active
        mlp_out = Affine(F.pad(parts["mlp_out"].weight, (0, padding)), parts["mlp_out"].bias)
        if self.config.is_parallel:
            into = Affine(
                torch.cat([qkv.weight, mlp_in.weight]), torch.cat([qkv.bias, mlp_in.bias])
            )
            out_of = Affine(
                torch.cat([attention_out.weight, mlp_out.weight], dim=1),
                attention_out.bias + mlp_out.bias,
            )
            return ParallelLayer(self.lay_out(into), self.lay_out(out_of))
        return SequentialLayer(
            self.lay_out(qkv),
            self.lay_out(attention_out),
            self.lay_out(mlp_in),
            self.lay_out(mlp_out),
        )

    def take_head(self, tensors: dict[str, Tensor]) -> Product:
        """From the final norm to the scores of the ids that are here, and padding."""
        weight = tensors.pop(EMBED_OUT, tensors.get(EMBED_IN))
        return self.lay_out(Affine(weight, weight.new_zeros(len(weight))))

    def lay_out(self, affine: Affine) -> Product:
        """A matrix as a Product, with zeros up to a whole number of blocks of columns."""
        weight, bias = affine
        width = self.width
        padding = -len(weight) % width
        if padding:
            weight = F.pad(weight, (0, 0, 0, padding))
            bias = F.pad(bias, (0, padding))
        is_mkl = weight.device.type == "cpu" and torch.backends.mkl.is_available()
        if not is_mkl or weight.dtype != torch.float32:
            return Product(weight.t(), bias, width)
        weight = weight.unflatten(0, (-1, width)).transpose(1, 2).contiguous()
        return Product(weight, bias.view(-1, 1, width), width)

    def workspace(self, x: Tensor) -> Workspace:
        """x [n, hidden] and what is put together beside it in one pass."""
        both = x.new_empty(len(x), self.n_attended + self.n_inside)
        attended_rows = both[:, : self.n_attended]
        active_rows = both[:, self.n_attended :]
        return Workspace(
            x=in_blocks(x, self.width),
            both=both,
            attended=in_blocks(attended_rows, self.config.head_size),
            active=in_blocks(active_rows, self.width),
            attended_rows=attended_rows,
            active_rows=active_rows,
        )

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """What `into` gives: queries, keys and values [3, H, n, D], and the inside."""
        qkv, inside = rows.split_with_sizes((self.n_qkv, rows.shape[0] - self.n_qkv))
        return self.heads(qkv), inside

    def heads(self, qkv: Tensor) -> Tensor:
        """Queries, keys and values [B, n, width] as [3, H, n, D]."""
        n, width = qkv.shape[1:]
        parts = qkv.view(3, self.n_heads, -1, n, width)  # D / width blocks a head
        return parts.transpose(2, 3).flatten(-2)


def in_blocks(x: Tensor, width: int) -> Tensor:
    """x [n, B * width] seen as [B, n, width]."""
    return x.view(len(x), -1, width).transpose(0, 1)


def fastest_rows(head: Product, hidden_size: int) -> int:
    """To how many rows a pass is best padded at least."""
    is_in_blocks = head.weight.ndim == 3
    return 2 if is_in_blocks and hidden_size >= LARGE else 1


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


def gelu(x: Tensor, approximate: str, out: Tensor) -> None:
    """GELU of x, which may be lost, to `out`; both [B, n, width]."""
    if x.device.type != "cpu":
        F.gelu(x, approximate=approximate, out=out)
        return
    turned = x.transpose(0, 2)  # a contiguous tensor goes to oneDNN, which takes long to begin
    F.gelu(turned, approximate=approximate, out=turned)
    out.copy_(x)  # computed there at once it is not vectorised

"""Rotary embedding as one complex product: a position turns each pair of dimensions by an angle.

The checkpoint turns dimension i together with R / 2 + i. Any order of dimensions will do for
attention if queries and keys share it, so pairs are put side by side when a model is loaded; then a
pair is one complex number, and a turn one product.

Shapes: n rows, R rotary dims, H heads, D head size. Su et al. 2021 (RoFormer).
"""

import torch
from torch import Tensor

from engine.checkpoint import Config

FIRST_POSITIONS = 2**15  # a model's table has no more from the start; longer caches bring theirs


def rotary_table(config: Config, n_positions: int, device: torch.device) -> Tensor:
    """What a position turns each pair of dimensions by: complex64 [n_positions, R / 2]."""
    half = torch.arange(0, config.rotary_dims, 2, device=device).float()
    frequencies = config.rotary_base ** -(half / config.rotary_dims)  # [R / 2]
    angles = torch.arange(n_positions, device=device).float()[:, None] * frequencies
    return torch.polar(torch.ones_like(angles), angles)


def rotate_(x: Tensor, turns: Tensor) -> None:
    """Turn x [..., n, R], in neighbouring pairs and in place, by turns [n or none, R / 2]."""
    pairs = x.float().view(torch.complex64)  # x itself if it is float32
    pairs.mul_(turns)
    if x.dtype != torch.float32:
        x.copy_(pairs.view(torch.float32))


def order_rows(config: Config, n_heads: int) -> Tensor:
    """Where the rows of query_key_value [H * 3 * D] come from: to [3, H, D], pairs side by side."""
    size, n_pairs = config.head_size, config.rotary_dims // 2
    rows = torch.arange(3 * n_heads * size).view(n_heads, 3, size).transpose(0, 1).clone()
    turned = rows[:2, :, : 2 * n_pairs].unflatten(-1, (2, n_pairs)).mT.flatten(-2).clone()
    rows[:2, :, : 2 * n_pairs] = turned
    return rows.flatten()

"""Training of a small draft model, for `dynatree_lab/training/distil.py`.

The loss is the Kullback-Leibler divergence from the target's distribution to the draft model's at
every token of the text (Hinton et al. 2015; DistillSpec, Zhou et al. 2024).

Shapes: B sequences of T tokens, V vocabulary.
"""

from argparse import Namespace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from dynatree_lab.errors import UsageError
from dynatree_lab.training.batches import autocast_for, draw_rows, run_layers
from dynatree_lab.training.loop import Progress, train
from gpt_neox import Config, GPTNeoX, read_json, rotary_table

RATE = 2e-3  # learning rate at hidden size 128; proportional to 1 / sqrt(hidden size)
ATTENTION_HEAD_SIZE = 64  # the number of attention heads is hidden // 64, at least 1
STD = 0.02  # of the initial weights, as in GPT-2 and Pythia


def train_draft(
    target: GPTNeoX, folder: Path, text: Tensor, progress: Progress, args: Namespace
) -> tuple[dict[str, Tensor], dict]:
    """Train a draft model, and return its tensors by name and its config.json. The arguments are
    those of eagle_training.train_head."""
    own_json = read_json(folder / "config.json") | {
        "hidden_size": args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": max(args.hidden // ATTENTION_HEAD_SIZE, 1),
        "intermediate_size": 4 * args.hidden,
    }
    try:
        draft = new_draft(Config.from_json(own_json)).to(target.device)
    except ValueError as error:
        raise UsageError(f"--hidden {args.hidden}, --layers {args.layers}: {error}") from error

    def loss_of(step: int) -> Tensor:
        rows = draw_rows(text, args.batch, args.context, seed=step)
        return divergence(draft, target, rows.to(target.device))

    train(draft, loss_of, progress, args)
    return dict(draft.named_parameters()), own_json


def new_draft(config: Config) -> GPTNeoX:
    generator = torch.Generator().manual_seed(0)
    draft = GPTNeoX(config)
    for name, weight in draft.named_parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=STD, generator=generator)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(weight)
    return draft


def divergence(draft: GPTNeoX, target: GPTNeoX, rows: Tensor) -> Tensor:
    """Return KL(target || draft) on sequences [B, T], in nats per token."""
    with torch.no_grad():
        of_target = logprobs(target, rows)
    of_draft = logprobs(draft, rows)
    return F.kl_div(of_draft, of_target, reduction="batchmean", log_target=True)


def logprobs(model: GPTNeoX, rows: Tensor) -> Tensor:
    """Return next-token log-probabilities, float32 [B * T, V], for sequences [B, T]."""
    rotary = rotary_table(model.config, rows.shape[1], model.device)
    with autocast_for(model.device):
        logits = model.logits(run_layers(model, rows, rotary))
    return logits.log_softmax(-1).flatten(0, 1)

"""The training loop of tools/distil.py, which can be interrupted and resumed.

Shapes: B sequences of T tokens.
"""

import io
import math
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from cli.errors import UsageError, print_line
from cli.files import write_whole
from cli.models import has_instructions

WARM_UP = 50  # steps in which the learning rate rises
MAX_GRADIENT_NORM = 1.0  # larger gradients are scaled down to it
SAVE_S = 120.0  # seconds between two saves


def draw_rows(text: Tensor, n_rows: int, n_tokens: int, seed: int) -> Tensor:
    """Return sequences [n_rows, n_tokens] from random places of the text [n]."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - n_tokens + 1, (n_rows, 1), generator=generator)
    return text[starts + torch.arange(n_tokens)]


def autocast_for(device: torch.device) -> torch.autocast:
    """Return a context in which products are in bfloat16, if the device has instructions for it."""
    is_fast = bool(has_instructions(torch.bfloat16, device))
    return torch.autocast(device.type, torch.bfloat16, enabled=is_fast)


def saved_dtype() -> dict[str, str]:
    """Return the keys of config.json that name the dtype of new checkpoints: transformers 4 and 5
    have one each."""
    return {"torch_dtype": "float16", "dtype": "float16"}


def rate_at(step: int, args: Namespace) -> float:
    """Return the learning rate of a step: a cosine decay to 0, times a linear warm-up."""
    warm_up = min((step + 1) / WARM_UP, 1.0)
    return args.rate * warm_up * (1 + math.cos(math.pi * step / args.steps)) / 2


def train(
    model: nn.Module,
    loss_of: Callable[[int], Tensor],
    file: Path,
    args: Namespace,
    saves_start: bool = False,
) -> None:
    """Train a model for args.steps steps. Raises UsageError for a loss that is not finite.

    Args:
        loss_of: returns the loss of a step, a scalar with a gradient.
        file: progress is saved to it every SAVE_S seconds, and resumed from it if it exists.
        saves_start: save also before the first step, because the model has taken long to make.
    """
    # Each step sets its learning rate
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.1)
    first = 0
    if file.exists():
        first = load_progress(file, model, optimizer, args)
    elif saves_start:
        save_progress(file, model, optimizer, 0, args)
    saved_at = time.monotonic()
    bar = tqdm(range(first, args.steps), unit="step", disable=None)
    for step in bar:
        loss = loss_of(step)
        if not loss.isfinite():
            raise UsageError(f"the loss of step {step} is {loss.item()}: --rate is too high")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, args)
        optimizer.step()
        bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
        if step + 1 == args.steps or time.monotonic() - saved_at >= SAVE_S:
            save_progress(file, model, optimizer, step + 1, args)
            # Also in a log, where the bar is off
            bar.write(f"step {step + 1:,}: loss {loss.item():.3f}", file=sys.stderr)
            saved_at = time.monotonic()


def save_progress(
    file: Path, model: nn.Module, optimizer: torch.optim.Optimizer, next_step: int, args: Namespace
) -> None:
    """Write a digest, then all that later steps need. The digest finds damage before the rest is
    read. Raises OSError."""
    progress = {"trained_on": args.trained_on, "next_step": next_step}
    progress |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    written = io.BytesIO()
    torch.save(progress, written)
    content = written.getvalue()
    write_whole(file, sha256(content).digest() + content)


def describe_changes(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    """Return which options had another value before, with that value; "" if none had."""
    changed = [name for name, value in now.items() if before[name] != value]
    contents = ("--target", "--text")  # their values are digests
    return ", ".join(f"another {n}" if n in contents else f"{n} {before[n]}" for n in changed)


def load_progress(
    file: Path, model: nn.Module, optimizer: torch.optim.Optimizer, args: Namespace
) -> int:
    """Load what save_progress has written, and return the next step. Raises UsageError if the file
    is damaged, or if the run began with another target, text or option."""
    with file.open("rb") as opened:
        digest, content = opened.read(sha256().digest_size), opened.read()
    if sha256(content).digest() != digest:
        raise UsageError(f"{file} is damaged: delete it to start again")
    # The file may be untrusted, and written on another device
    progress = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if not progress.keys() >= {"trained_on", "next_step", "model", "optimizer"}:
        raise UsageError(f"{file} is of another version: delete it to start again")
    if changed := describe_changes(progress["trained_on"], args.trained_on):
        raise UsageError(f"{file} began with {changed}; use that, or delete it to start again")
    model.load_state_dict(progress["model"])
    optimizer.load_state_dict(progress["optimizer"])
    print_line(f"resuming at step {progress['next_step']:,}")
    return progress["next_step"]

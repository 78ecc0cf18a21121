"""The training loop of dynatree_lab/training/distil.py, which can be interrupted and resumed."""

import math
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from dynatree_lab.cli.program import print_line
from dynatree_lab.errors import UsageError

WARM_UP = 50  # steps in which the learning rate rises
MAX_GRADIENT_NORM = 1.0  # larger gradients are scaled down to it
SAVE_S = 120.0  # seconds between two saves
CONTENTS = ("--target", "--text")  # options whose files are compared


class Progress:
    """The file of an unfinished run, from which the same run resumes."""

    def __init__(self, file: Path, trained_on: dict[str, object]):
        """Read the file if it exists. trained_on: what the weights depend on, by option. Raises
        UsageError if the run in the file began with anything else."""
        self.file, self.trained_on = file, trained_on
        self.part = file.with_name(f".{file.name}.part")
        self.saved: dict | None = None
        if file.exists():
            self.saved = torch.load(file, map_location="cpu", weights_only=True)
            before = self.saved["trained_on"]
            changed = [name for name, value in trained_on.items() if before[name] != value]
            former = [f"another {n}" if n in CONTENTS else f"{n} {before[n]}" for n in changed]
            if former:
                line = f"{file} began with {', '.join(former)}"
                raise UsageError(f"{line}; use that, or delete it to start again")

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, next_step: int) -> None:
        """Replace the file by all that later steps need, at once, so that a process that is killed
        leaves the old file or the new. Raises OSError."""
        saved = {"trained_on": self.trained_on, "next_step": next_step}
        saved |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        with self.part.open("wb") as part:  # torch's own files do not raise OSError
            torch.save(saved, part)
        self.part.replace(self.file)

    def require_writable(self) -> None:
        """Raise OSError if `save` could not write its file. Leaves no new file."""
        self.part.touch()
        self.part.unlink()

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Load what the file had, and return the next step; 0 for a new run."""
        if self.saved is None:
            return 0
        saved, self.saved = self.saved, None  # its memory is free then
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        print_line(f"resuming at step {saved['next_step']:,}")
        return saved["next_step"]


def train(
    model: nn.Module, loss_of: Callable[[int], Tensor], progress: Progress, args: Namespace
) -> None:
    """Train a model for args.steps steps, and save it before the first step, every SAVE_S seconds
    and at the end. loss_of: returns the loss of a step, a scalar with a gradient. Raises UsageError
    for a loss that is not finite."""
    # Each step sets its learning rate
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.1)
    first = progress.restore(model, optimizer)
    progress.save(model, optimizer, first)
    saved_at = time.monotonic()
    bar = tqdm(range(first, args.steps), unit="step", disable=None)
    for step in bar:
        loss = loss_of(step)
        if not loss.isfinite():
            line = f"the loss of step {step} is {loss.item()}: lower --rate"
            raise UsageError(f"{line}, and delete {progress.file} to start again")
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, args)
        optimizer.step()
        bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
        if step + 1 == args.steps or time.monotonic() - saved_at >= SAVE_S:
            progress.save(model, optimizer, step + 1)
            # Also in a log, where the bar is off
            bar.write(f"step {step + 1:,}: loss {loss.item():.3f}", file=sys.stderr)
            saved_at = time.monotonic()


def rate_at(step: int, args: Namespace) -> float:
    """Return the learning rate of a step: a cosine decay to 0, times a linear warm-up."""
    warm_up = min((step + 1) / WARM_UP, 1.0)
    return args.rate * warm_up * (1 + math.cos(math.pi * step / args.steps)) / 2

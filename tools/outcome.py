"""What comes of training: figures on text that nothing was learned from, a card, a folder.

figures = measure_held_out(model, target_folder, held_out, context=512)
write_folder(Path("my-draft"), model, {"tokenizer.json": b"...", "README.md": b"..."})
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor

from benchmark.prompts import spread
from benchmark.report import markdown_table
from cli.errors import UsageError, shown
from cli.metrics import measure
from cli.models import choose_draft_dtype, choose_dtype
from draft_tree import DynaTree
from dynatree import generate
from engine.checkpoint import first_line
from gpt_neox import GPTNeoX
from methods.static import Chain
from tools.folders import halved, raising_endings, write_files, written_whole
from tools.trainable import Trainable, published_json

N_WINDOWS = 16  # of the held-out text, evenly spread
N_PROMPTS = 8  # beginnings of so many of them, to decode after
PROMPT_TOKENS = 64
NEW_TOKENS = 96
CARD = "README.md"
LOSS = "next token, nats"
AGREEMENT = "best guess is the target's"
METHODS = {"tokens/iter, linear K=5": Chain(K=5), "tokens/iter, dynatree": DynaTree()}


@torch.inference_mode()
def measure_held_out(
    model: Trainable, target_folder: Path | None, text: Tensor, context: int
) -> dict[str, float]:
    """Figures by name, of the model as it will be saved, run as dynatree.py runs it by default.

    text: ids [n], n > context. Without a target only the loss. Raises CheckpointError, OutOfMemory.
    """
    device = model.head.device
    dtype = choose_dtype(None, device)
    draft_dtype = choose_draft_dtype(None, dtype, device)
    tensors = {name: tensor.to(draft_dtype) for name, tensor in saved_tensors(model).items()}
    draft = GPTNeoX(model.config, tensors)
    windows = spread(text.long().unfold(0, context + 1, context), N_WINDOWS)  # [context + 1] each
    losses = []
    guesses = []
    for window in windows:
        logits = read(draft, window[:-1])
        losses.append(F.cross_entropy(logits, window[1:].to(device)).item())
        guesses.append(logits.argmax(-1))
    found = {LOSS: sum(losses) / len(losses)}
    if target_folder is None:
        return found
    target = GPTNeoX.from_pretrained(target_folder, device, dtype)
    n_equal = 0
    for window, guess in zip(windows, guesses, strict=True):
        n_equal += (read(target, window[:-1]).argmax(-1) == guess).sum().item()
    found[AGREEMENT] = n_equal / (len(windows) * context)
    prompts = [window[:PROMPT_TOKENS].tolist() for window in spread(windows, N_PROMPTS)]
    for name, settings in METHODS.items():
        total = 0.0
        for prompt in prompts:
            steps = generate(target, draft, prompt, settings, NEW_TOKENS)
            total += measure(steps).tokens_per_iter
        found[name] = total / len(prompts)
    return found


def read(model: GPTNeoX, ids: Tensor) -> Tensor:
    """Logits [n, V] of what follows each of n ids, float32."""
    cache = model.new_cache(len(ids))
    logits = model.forward(ids, torch.arange(len(ids)), cache).logits
    model.pool.take_back(cache.storage)
    return logits


def saved_tensors(model: Trainable) -> dict[str, Tensor]:
    """Its weights in float16, by checkpoint name. Raises UsageError for one that does not fit."""
    return {name: halved(name, weight) for name, weight in model.state_dict().items()}


def card(
    name: str, command: str, facts: list[str], before: dict[str, float], after: dict[str, float]
) -> str:
    """README.md of a folder: how the model was made, and its figures."""
    body = [[figure, f"{before[figure]:.3f}", f"{after[figure]:.3f}"] for figure in after]
    table = markdown_table(["on held-out text", "before", "after"], body)
    points = "\n".join(f"- {shown(fact)}" for fact in facts)
    return f"# {shown(name)}\n\n```\n{shown(command)}\n```\n\n{points}\n\n{table}\n"


def write_folder(folder: Path, model: Trainable, files: dict[str, bytes]) -> None:
    """A checkpoint with these files beside weights and config, whole or not at all; the folder is
    new or empty. Raises UsageError."""
    files = files | {"config.json": json.dumps(published_json(model.config), indent=2).encode()}
    try:
        with raising_endings(), written_whole(folder) as part:
            write_files(part, saved_tensors(model), files)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{folder} cannot be written: {first_line(error)}") from error

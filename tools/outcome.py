"""What comes of tools/distil.py: figures on text that nothing was learned from, a card, a folder.

before = measure_held_out(job, model)
write_outcome(job, model, "4,000 steps in 60.0 minutes", before, measure_held_out(job, model))
"""

import json
from dataclasses import asdict

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor

from benchmark.prompts import spread
from benchmark.report import markdown_table
from cli.errors import UsageError, say, shown
from cli.metrics import measure
from cli.models import choose_draft_dtype, choose_dtype
from draft_tree import DynaTree
from dynatree import generate
from engine.checkpoint import first_line
from gpt_neox import GPTNeoX
from methods.static import Chain
from tools.folders import halved, published_json, raising_endings, write_files, written_whole
from tools.job import ALONE, Job

N_WINDOWS = 16  # of the held-out text, evenly spread
N_PROMPTS = 8  # beginnings of so many of them, to decode after
PROMPT_TOKENS = 64
NEW_TOKENS = 96
CARD = "README.md"
LOSS = "next token, nats"
AGREEMENT = "best guess is the target's"
METHODS = {"tokens/iter, linear K=5": Chain(K=5), "tokens/iter, dynatree": DynaTree()}


@torch.inference_mode()
def measure_held_out(job: Job, model: GPTNeoX) -> dict[str, float]:
    """Figures by name, of the model as it will be saved, run as dynatree.py runs it by default.

    Without a target only the loss. Raises CheckpointError, OutOfMemory.
    """
    say("measuring on the held-out text")
    dtype = choose_dtype(None, job.device)
    draft_dtype = choose_draft_dtype(None, dtype, job.device)
    tensors = {name: tensor.to(draft_dtype) for name, tensor in saved_tensors(model).items()}
    draft = GPTNeoX.from_tensors(model.config, tensors)
    context = job.plan.context
    windows = spread(job.corpus.held_out.long().unfold(0, context + 1, context), N_WINDOWS)
    losses = []
    guesses = []
    for window in windows:
        logits = read(draft, window[:-1])  # until the next pass
        losses.append(F.cross_entropy(logits, window[1:].to(job.device)).item())
        guesses.append(logits.argmax(-1))
    found = {LOSS: sum(losses) / len(losses)}
    if job.target is None:
        return found
    target = GPTNeoX.from_pretrained(job.target.folder, job.device, dtype)
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
    """Logits [n, V] of what follows each of n ids, float32; on CUDA the next pass may overwrite
    them."""
    cache = model.new_cache(len(ids))
    logits = model.forward(ids, torch.arange(len(ids)), cache).logits
    model.pool.take_back(cache.storage)
    return logits


def saved_tensors(model: GPTNeoX) -> dict[str, Tensor]:
    """Its weights in float16, by published name. Raises UsageError for one that does not fit."""
    # Not of state_dict(), which has a tied embedding under both of its names
    return {name: halved(name, weight.detach()) for name, weight in model.named_parameters()}


def write_outcome(
    job: Job, model: GPTNeoX, taken: str, before: dict[str, float], after: dict[str, float]
) -> None:
    """A checkpoint with its card, whole or not at all; taken: what it took. Raises UsageError."""
    config = json.dumps(published_json(model.config), indent=2).encode()
    files = job.files | {"config.json": config, CARD: card(job, taken, before, after).encode()}
    try:
        with raising_endings(), written_whole(job.out) as part:
            write_files(part, saved_tensors(model), files)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{job.out} cannot be written: {first_line(error)}") from error


def card(job: Job, taken: str, before: dict[str, float], after: dict[str, float]) -> str:
    """README.md of a folder: what the model is, how it was made, and its figures."""
    config = job.config
    plan = asdict(job.plan)
    idle = {"minutes" if job.plan.steps else "steps"}  # what was not in force
    if job.target is None:
        idle |= set(ALONE)
    settings = ", ".join(f"{name} {plan[name]:.6g}" for name in plan if name not in idle)
    facts = [
        f"GPT-NeoX in float16: layers {config.n_layers}, hidden size {config.hidden_size}, "
        f"heads {config.n_heads}, ids {config.vocab_size}",
        f"made to guess what {job.target.folder} writes" if job.target else "next token",
        f"{len(job.corpus.train):,} tokens of text, and {len(job.corpus.held_out):,} held out",
        f"{taken}; {settings}",
    ]
    points = "\n".join(f"- {shown(fact)}" for fact in facts)
    body = [[figure, f"{before[figure]:.3f}", f"{after[figure]:.3f}"] for figure in after]
    table = markdown_table(["on held-out text", "before", "after"], body)
    return f"# {shown(job.out.name)}\n\n```\n{shown(job.command)}\n```\n\n{points}\n\n{table}\n"

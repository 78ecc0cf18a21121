"""Trains a draft model for a target: a small GPT-NeoX that imitates the target's predictions.

    python tools/distil.py --target my-target --text *.txt --layers 2 --hidden 128 --out my-draft
    python dynatree.py --target my-target --draft my-draft --prompt "The ship sailed at dawn"

A draft token is accepted if the target agrees with it. So the draft model learns from the target's
distribution and not from the next token of the text. The loss is the Kullback-Leibler divergence
from the target to the draft model at every token (Hinton et al. 2015; DistillSpec, Zhou et al.
2024). The generated text is exact however little the draft model has learned.

The same command resumes an interrupted run from its checkpoint. The final weights are the same,
because the batch of a step depends only on the step's number.

Shapes: B rows of T tokens, V vocabulary.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs as a file, from anywhere

if __name__ == "__main__":
    from cli.start import run_program

    run_program("tools.distil")

import io
import json
import math
import shlex
import time
from argparse import Namespace
from collections.abc import Sequence
from hashlib import sha256

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from cli.errors import Parser, UsageError, print_line, reserved, run_command_line, writing
from cli.files import require_writable, write_whole
from cli.models import choose_device, choose_dtype, has_instructions, set_threads
from cli.tokens import encode, load_tokenizer
from engine.checkpoint import find_checkpoint, parse_config, read_json, read_text
from engine.memory import require_memory
from engine.model import load_reference, weight_bytes
from gpt_neox import Config, GPTNeoX, Transformer, rotary_table, rotate
from tools.folders import new_folder, read_unchanged, to_half, write_checkpoint

HEAD_SIZE = 64  # approximate
STD = 0.02  # of the initial weights, as in GPT-2 and Pythia
RATE = 2e-3  # learning rate at hidden size 128; proportional to 1 / sqrt(hidden size)
WARM_UP = 50  # steps in which the learning rate rises
MAX_GRADIENT_NORM = 1.0  # larger gradients are scaled down to it
SAVE_S = 120.0  # seconds between two checkpoints
MAX_BYTES = 2**30  # of a file of text
PIECE = 2**16  # characters per tokenizer call, whose result takes 100 times their memory


def read_ids(file: Path, folder: Path, config: Config) -> Tensor:
    """Return a text as ids [n] int64, after an end-of-text id if the target has one. Raises
    CheckpointError and UsageError."""
    text, tokenizer = read_text(file, MAX_BYTES), load_tokenizer(folder)
    parts = [torch.tensor(config.eos_ids[:1], dtype=torch.int64)]
    for start in range(0, len(text), PIECE):
        ids = encode(text[start : start + PIECE], tokenizer, config.vocab_size)
        parts.append(torch.tensor(ids))
    return torch.cat(parts)


def run_batch(transformer: Transformer, rows: Tensor, rotary: Tensor) -> Tensor:
    """Run sequences [B, T] without a cache and return the last hidden states [B, T, hidden].

    gpt_neox.Transformer.forward runs one sequence over a cache.
    """
    x = transformer.embed_in(rows)
    for layer in transformer.layers:
        attention = layer.attention
        qkv = attention.query_key_value(layer.input_layernorm(x))
        qkv = qkv.unflatten(-1, (attention.n_heads, 3, -1)).transpose(1, 2)  # [B, H, T, 3, D]
        q, k, v = qkv.unbind(3)
        q, k = rotate(q, rotary), rotate(k, rotary)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended = attention.dense(attended.transpose(1, 2).flatten(2))
        if layer.use_parallel_residual:
            x = x + attended + layer.mlp(layer.post_attention_layernorm(x))
        else:
            x = x + attended
            x = x + layer.mlp(layer.post_attention_layernorm(x))
    return x


def draft_json(target: dict, args: Namespace) -> dict:
    """Return the draft model's config.json: the target's with other sizes."""
    return target | {
        "hidden_size": args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": max(args.hidden // HEAD_SIZE, 1),
        "intermediate_size": 4 * args.hidden,
        "torch_dtype": "float16",  # as published
        "dtype": "float16",  # in newer saves
    }


def new_draft(config: Config, device: torch.device) -> GPTNeoX:
    """Return an untrained model. Raises OutOfMemory, and CheckpointError for impossible sizes."""
    need = 4 * weight_bytes(config, torch.float32)  # weights, gradients, AdamW's two averages
    require_memory(need, device, "training a draft of these sizes")
    generator = torch.Generator().manual_seed(0)
    draft = GPTNeoX(config)
    for name, weight in draft.named_parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=STD, generator=generator)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(weight)
    return draft.to(device)


def logprobs(model: GPTNeoX, rows: Tensor) -> Tensor:
    """Return next-token log-probabilities, float32 [B * T, V], for rows [B, T]."""
    rotary = rotary_table(model.config, rows.shape[1], model.device)
    is_fast = bool(has_instructions(torch.bfloat16, model.device))
    with torch.autocast(model.device.type, torch.bfloat16, enabled=is_fast):
        logits = model.logits(run_batch(model.gpt_neox, rows, rotary))
    return logits.log_softmax(-1).flatten(0, 1)


def divergence(draft: GPTNeoX, target: GPTNeoX, rows: Tensor) -> Tensor:
    """Return the divergence from the target to the draft on rows [B, T], in nats per token."""
    with torch.no_grad():
        wanted = logprobs(target, rows)
    return F.kl_div(logprobs(draft, rows), wanted, reduction="batchmean", log_target=True)


def draw_rows(text: Tensor, step: int, args: Namespace) -> Tensor:
    """Return the batch of a step, [B, T]: rows at random places of the text [n]."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - args.context + 1, (args.batch, 1), generator=generator)
    return text[starts + torch.arange(args.context)]


def rate_at(step: int, args: Namespace) -> float:
    """Return the learning rate of a step: a linear warm-up, then a cosine decay to 0."""
    warm_up = min((step + 1) / WARM_UP, 1.0)
    return args.rate * warm_up * (1 + math.cos(math.pi * step / args.steps)) / 2


def train(draft: GPTNeoX, target: GPTNeoX, text: Tensor, file: Path, args: Namespace) -> None:
    """Train, from the checkpoint in `file` if it exists. Raises UsageError for a loss that is not
    finite."""
    optimizer = torch.optim.AdamW(draft.parameters(), betas=(0.9, 0.98), weight_decay=0.1)
    first = load_state(file, draft, optimizer, args) if file.exists() else 0
    saved_at = time.monotonic()
    bar = tqdm(range(first, args.steps), unit="step", disable=None)
    for step in bar:
        loss = divergence(draft, target, draw_rows(text, step, args).to(draft.device))
        if not loss.isfinite():
            raise UsageError(f"the loss of step {step} is {loss.item()}: --rate is too high")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), MAX_GRADIENT_NORM)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, args)
        optimizer.step()
        bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
        if step + 1 == args.steps or time.monotonic() - saved_at >= SAVE_S:
            save_state(file, draft, optimizer, step + 1, args)
            bar.write(f"step {step + 1:,}: loss {loss.item():.3f}", file=sys.stderr)
            saved_at = time.monotonic()


def save_state(
    file: Path, draft: GPTNeoX, optimizer: torch.optim.Optimizer, step: int, args: Namespace
) -> None:
    """Write a checkpoint: a digest, then all that later steps need. Raises OSError."""
    state = {"command": args.command, "step": step}
    state |= {"draft": draft.state_dict(), "optimizer": optimizer.state_dict()}
    written = io.BytesIO()
    torch.save(state, written)
    content = written.getvalue()
    write_whole(file, sha256(content).digest() + content)


def load_state(
    file: Path, draft: GPTNeoX, optimizer: torch.optim.Optimizer, args: Namespace
) -> int:
    """Load a checkpoint and return the next step. Raises UsageError if the file is damaged or
    belongs to another command."""
    with file.open("rb") as opened:
        digest, content = opened.read(sha256().digest_size), opened.read()
    if sha256(content).digest() != digest:
        raise UsageError(f"{file} is damaged: delete it to start again")
    state = torch.load(io.BytesIO(content), map_location=draft.device, weights_only=True)
    command = state["command"]
    if command != args.command:
        raise UsageError(f"{file} belongs to another command; run that or delete it: {command}")
    draft.load_state_dict(state["draft"])
    optimizer.load_state_dict(state["optimizer"])
    print_line(f"resuming at step {state['step']:,}")
    return state["step"]


def execute(args: Namespace) -> int:
    for name in ("layers", "hidden", "steps", "batch", "context"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name} is {getattr(args, name)}, it must be at least 1")
    if args.rate is not None and not 0 < args.rate <= 1:
        raise UsageError(f"--rate is {args.rate}, it must be above 0 and at most 1")
    device = choose_device(args.device)
    set_threads(args.threads, device)
    out = new_folder(args.out)
    folder = find_checkpoint(args.target, print_line)
    raw = draft_json(read_json(folder / "config.json"), args)
    config = parse_config(raw)
    if args.context > config.max_position_embeddings:
        raise UsageError(
            f"--context is {args.context}, it must be at most {config.max_position_embeddings}"
        )
    args.rate = args.rate or RATE * (128 / config.hidden_size) ** 0.5
    text = torch.cat([read_ids(Path(file), folder, config) for file in args.text])
    if len(text) < args.context:
        raise UsageError(f"--text is too short: {len(text):,} tokens, --context {args.context}")
    file = out.with_name(f"{out.name}.training")  # the checkpoint
    with reserved(file):
        with writing(file):
            require_writable(file)  # before the work
        draft = new_draft(config, device)
        target = load_reference(folder, device, choose_dtype(None, device))
        train(draft, target, text, file, args)
        tensors = {name: to_half(name, w.detach()) for name, w in draft.named_parameters()}
        files = read_unchanged(folder) | {"config.json": json.dumps(raw, indent=2).encode()}
        write_checkpoint(out, tensors, files)
        file.unlink()
    print_line(f"draft model written to {out}; measure it with --compare (docs/distil.md)")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="tools/distil.py", description=__doc__ and __doc__.splitlines()[0])
    parser.less_memory = "--batch, --context"
    add = parser.add_argument
    add("--target", required=True, metavar="MODEL", help="folder or hub NAME[@REVISION]")
    add("--text", nargs="+", required=True, metavar="FILE", help="text files to train on, UTF-8")
    add("--out", required=True, metavar="FOLDER", help="new folder of the draft model")
    add("--layers", type=int, required=True, metavar="N", help="layers of the draft model")
    add("--hidden", type=int, required=True, metavar="N", help="hidden size of the draft model")
    add("--steps", type=int, default=2000, metavar="N", help="training steps (default 2000)")
    add("--batch", type=int, default=8, metavar="N", help="rows per step (default 8)")
    add("--context", type=int, default=512, metavar="N", help="tokens per row (default 512)")
    add("--rate", type=float, metavar="X", help="learning rate (default by hidden size)")
    add("--device", help="cpu, cuda or cuda:N (default cuda if available)")
    add("--threads", type=int, metavar="N", help="CPU threads (default: one per core)")
    words = sys.argv[1:] if arguments is None else arguments
    parser.set_defaults(command=shlex.join(["python", parser.prog, *words]))
    return run_command_line(execute, parser, arguments)

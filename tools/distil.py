"""A draft for your target: a small GPT-NeoX that learns to guess what the target would write.

    python tools/distil.py --target my-target --text *.txt --layers 2 --hidden 128 --out my-draft
    python dynatree.py --target my-target --draft my-draft --prompt "The ship sailed at dawn"

A draft is accepted for saying what the target says. So it does not learn from the token that comes
next in the text, but from all that the target thinks of it: the loss is the Kullback-Leibler
divergence from the target to the draft, at every token (Hinton et al. 2015; for drafts Zhou et al.
2024, DistillSpec). However little it learns, the text is the target's own: a draft only guesses.

A run that was ended goes on from its checkpoint by the same command, to the same weights, as what
a step learns from depends on its number alone.

Shapes: B rows, T tokens of each, V vocabulary.
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

from cli.errors import Parser, UsageError, reserved, run_command_line, say, writing
from cli.files import require_writable, write_whole
from cli.models import choose_device, choose_dtype, has_instructions, set_threads
from cli.tokens import encode, load_tokenizer
from engine.checkpoint import find_checkpoint, parse_config, read_json, read_text
from engine.memory import require_memory
from engine.model import load_plain, weight_bytes
from gpt_neox import Config, GPTNeoX, Transformer, rotary_table, rotate
from tools.folders import halved, new_folder, read_unchanged, write_checkpoint

HEAD_SIZE = 64  # about
STD = 0.02  # of the first weights, GPT-2's and Pythia's
RATE = 2e-3  # of learning, at hidden size 128; it falls with the root of that
WARM_UP = 50  # steps in which it rises
LONGEST_GRADIENT = 1.0  # by its norm; a longer one is cut to it
SAVE_S = 120.0  # seconds between two checkpoints
MAX_BYTES = 2**30  # of a file of text
PIECE = 2**16  # characters; what the tokenizer makes of one takes 100 times as much


def read_ids(file: Path, folder: Path, config: Config) -> Tensor:
    """A text as the target's ids [n] int64, behind an end of text if there is such an id. Raises
    CheckpointError and UsageError."""
    text, tokenizer = read_text(file, MAX_BYTES), load_tokenizer(folder)
    parts = [torch.tensor(config.eos_ids[:1], dtype=torch.int64)]
    for start in range(0, len(text), PIECE):
        ids = encode(text[start : start + PIECE], tokenizer, config.vocab_size)
        parts.append(torch.tensor(ids))
    return torch.cat(parts)


def run_batch(transformer: Transformer, rows: Tensor, rotary: Tensor) -> Tensor:
    """Run a batch of texts [B, T] without a cache and return the last hidden states [B, T, hidden];
    gpt_neox.Transformer.forward runs one text over a cache."""
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
    return transformer.final_layer_norm(x)


def draft_json(target: dict, args: Namespace) -> dict:
    """config.json of the draft: the target's, of another size."""
    return target | {
        "hidden_size": args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": max(args.hidden // HEAD_SIZE, 1),
        "intermediate_size": 4 * args.hidden,
        "torch_dtype": "float16",  # as published
        "dtype": "float16",  # in newer saves
    }


def new_draft(config: Config, device: torch.device) -> GPTNeoX:
    """A model that has learned nothing. Raises OutOfMemory, and CheckpointError for sizes that no
    tensor has."""
    need = 4 * weight_bytes(config, torch.float32)  # weights, gradients, AdamW's two averages
    require_memory(need, device, "training a draft of these sizes")
    chance = torch.Generator().manual_seed(0)
    draft = GPTNeoX(config)
    for name, weight in draft.named_parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=STD, generator=chance)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(weight)
    return draft.to(device)


def logprobs(model: GPTNeoX, rows: Tensor) -> Tensor:
    """What the model thinks of the token after each of rows [B, T]: float32 [B * T, V]."""
    turns = rotary_table(model.config, rows.shape[1], model.device)
    is_fast = bool(has_instructions(torch.bfloat16, model.device))
    with torch.autocast(model.device.type, torch.bfloat16, enabled=is_fast):
        logits = model.embed_out(run_batch(model.gpt_neox, rows, turns))
    return logits.float().log_softmax(-1).flatten(0, 1)


def divergence(draft: GPTNeoX, target: GPTNeoX, rows: Tensor) -> Tensor:
    """Kullback-Leibler from the target to the draft on rows [B, T], in nats per token."""
    with torch.no_grad():
        wanted = logprobs(target, rows)
    return F.kl_div(logprobs(draft, rows), wanted, reduction="batchmean", log_target=True)


def draw_rows(text: Tensor, step: int, args: Namespace) -> Tensor:
    """What a step learns from: [B, T], each row from anywhere in the text [n]."""
    chance = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - args.context + 1, (args.batch, 1), generator=chance)
    return text[starts + torch.arange(args.context)]


def rate_at(step: int, args: Namespace) -> float:
    """The learning rate: half a wave of the cosine, down to 0, after a short rise."""
    rise = min((step + 1) / WARM_UP, 1.0)
    return args.rate * rise * (1 + math.cos(math.pi * step / args.steps)) / 2


def train(draft: GPTNeoX, target: GPTNeoX, text: Tensor, file: Path, args: Namespace) -> None:
    """Take the steps that its checkpoint lacks. Raises UsageError if the draft fails to learn."""
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
        torch.nn.utils.clip_grad_norm_(draft.parameters(), LONGEST_GRADIENT)
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
    """Write all that the coming steps need, behind its digest; whole, or what was there stays.
    Raises OSError."""
    state = {"command": args.command, "step": step}
    state |= {"draft": draft.state_dict(), "optimizer": optimizer.state_dict()}
    written = io.BytesIO()
    torch.save(state, written)
    content = written.getvalue()
    write_whole(file, sha256(content).digest() + content)


def load_state(
    file: Path, draft: GPTNeoX, optimizer: torch.optim.Optimizer, args: Namespace
) -> int:
    """Return the step to go on with. Raises UsageError if the file was cut or edited, or is of
    another command."""
    with file.open("rb") as opened:
        digest, content = opened.read(sha256().digest_size), opened.read()
    if sha256(content).digest() != digest:
        raise UsageError(f"{file} is damaged: delete it to begin anew")
    state = torch.load(io.BytesIO(content), map_location=draft.device, weights_only=True)
    command = state["command"]
    if command != args.command:
        raise UsageError(f"{file} is of another command, give that or delete it: {command}")
    draft.load_state_dict(state["draft"])
    optimizer.load_state_dict(state["optimizer"])
    say(f"going on from step {state['step']:,}")
    return state["step"]


def execute(args: Namespace) -> int:
    for name in ("layers", "hidden", "steps", "batch", "context"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name} {getattr(args, name)}: 1 or more")
    if args.rate is not None and not 0 < args.rate <= 1:
        raise UsageError(f"--rate {args.rate}: above 0, and at most 1")
    device = choose_device(args.device)
    set_threads(args.threads, device)
    out = new_folder(args.out)
    folder = find_checkpoint(args.target, say)
    raw = draft_json(read_json(folder / "config.json"), args)
    config = parse_config(raw)
    if args.context > config.max_position_embeddings:
        raise UsageError(
            f"--context {args.context}: there are {config.max_position_embeddings} positions"
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
        target = load_plain(folder, device, choose_dtype(None, device))
        train(draft, target, text, file, args)
        tensors = {name: halved(name, w.detach()) for name, w in draft.named_parameters()}
        files = read_unchanged(folder) | {"config.json": json.dumps(raw, indent=2).encode()}
        write_checkpoint(out, tensors, files)
        file.unlink()
    say(f"{out}: what it is worth, --compare tells (docs/distil.md)")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="tools/distil.py", description=__doc__ and __doc__.splitlines()[0])
    parser.less_memory = "--batch, --context"
    add = parser.add_argument
    add("--target", required=True, metavar="MODEL", help="folder, or hub NAME or NAME@REVISION")
    add("--text", nargs="+", required=True, metavar="FILE", help="to learn from, UTF-8")
    add("--out", required=True, metavar="FOLDER", help="where the draft goes: a new folder")
    add("--layers", type=int, required=True, metavar="N", help="of the draft")
    add("--hidden", type=int, required=True, metavar="N", help="its hidden size")
    add("--steps", type=int, default=2000, metavar="N", help="of training (2000)")
    add("--batch", type=int, default=8, metavar="N", help="rows of a step (8)")
    add("--context", type=int, default=512, metavar="N", help="tokens of a row (512)")
    add("--rate", type=float, metavar="X", help="learning rate (by hidden size)")
    add("--device", help="cpu, cuda or cuda:N (cuda where there is one)")
    add("--threads", type=int, metavar="N", help="CPU threads (one per core)")
    words = sys.argv[1:] if arguments is None else arguments
    parser.set_defaults(command=shlex.join(["python", parser.prog, *words]))
    return run_command_line(execute, parser, arguments)

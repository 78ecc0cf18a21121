"""A draft for your target: a small GPT-NeoX that learns to guess what the target writes.

    python tools/distil.py --target FOLDER --text a.txt --layers 2 --hidden 128 --out my-draft
    python tools/distil.py --target FOLDER --text *.txt --init EleutherAI/pythia-70m --out my-draft
    python dynatree.py --target FOLDER --draft my-draft --prompt "The ship sailed at dawn"

What a draft is accepted for is saying what the target says, where the target has come to. So the
loss is part next token and part Kullback-Leibler from the target to the draft, on rows of the text
and on rows that begin with the text and that the target has written on, greedily or sampled
(Zhou et al. 2024, DistillSpec).

However a run ends, the same command goes on from its last checkpoint. What is random in a step is
drawn from the seed and the step's number, so a step can be made again and is the same: with --steps
the weights will be those of a run that was never ended.

Shapes: B rows, T tokens of each, L layers, H heads, S cache slots, D head size, V vocabulary.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs as a file, from anywhere

if __name__ == "__main__":
    import cli.start  # noqa: F401

import json
import math
import shlex
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from cli.errors import Parser, UsageError, run_command_line, say, shown
from cli.metrics import measure
from cli.models import (
    choose_device,
    choose_draft_dtype,
    choose_dtype,
    has_instructions,
    set_threads,
)
from cli.tokens import encode, load_tokenizer, require_same_tokenizer
from draft_tree import DynaTree
from engine.checkpoint import parse_config, read_config
from engine.decoding import generate
from engine.files import locked, write_whole
from engine.foreign import read_json, read_text
from engine.hub import find_checkpoint
from engine.memory import require_memory
from engine.model import FastGPTNeoX, load_plain, published_shapes, weight_bytes
from gpt_neox import Config, GPTNeoX, rotary_table
from methods.static import Chain
from tools.folders import halved, new_folder, read_unchanged, write_checkpoint

HEAD_SIZE = 64  # of a new model, about
RATE = 2e-3  # of a new model of hidden size 128; it falls with the root of that
GENTLER = 0.6  # the share of it for a model that has learned
STD = 0.02  # of a new model's weights, GPT-2's and Pythia's
MEMORY = 8  # bytes in training for one in the file: float32 weight, gradient and two moments

MAX_BYTES = 2**30  # of a file of text
PIECE = 2**16  # characters; what the tokenizer makes of one takes 100 times as much
HELD_OUT = 20  # one part in so many of each file

BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.1  # of matrices
WARM_UP = 0.03  # of the budget
LONGEST_GRADIENT = 1.0  # by its norm; a longer one is cut to it
MAX_LOGITS = {"cpu": 2**22, "cuda": 2**28}  # at once: what a processor's cache and a GPU like
PROMPT = 8  # one part in so many of a row that the target writes on
TEMPERATURES = (0.3, 1.0)  # of its sampled rows, evenly spread
N_WRITTEN = {"cpu": 32, "cuda": 256}  # rows that it writes at once, if their cache is as small as
CACHE_BYTES = 2**30
N_KEPT = 8  # such writings, of which the oldest makes room
N_USES = 4  # of a written row, on average
SAVE_S = 120.0  # seconds between two checkpoints
BAR = "{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"

N_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 64, 96  # of the held-out text, evenly spread; and after
METHODS = {"linear K=5": Chain(K=5), "dynatree": DynaTree()}  # to measure with


# What is asked for


def number(kind: type, low: float, high: float) -> Callable[[str], float]:
    """For argparse: a number of this type and range, both ends allowed."""

    def read(word: str) -> float:
        value = kind(word)
        if not low <= value <= high:
            raise ArgumentTypeError(f"{word} is outside {low:g} to {high:g}")
        return value

    read.__name__ = kind.__name__  # for argparse to name what a word is not
    return read


def build_parser() -> Parser:
    parser = Parser(prog="tools/distil.py", description=__doc__.splitlines()[0])
    parser.less_memory = "--batch, --context"
    add = parser.add_argument
    whole, share = number(int, 1, 10**9), number(float, 0, 1)
    add("--target", required=True, metavar="MODEL", help="folder, or hub NAME or NAME@REVISION")
    add("--text", nargs="+", required=True, metavar="FILE", help="to learn from, UTF-8")
    add("--out", required=True, metavar="FOLDER", help="where the draft goes: a new folder")
    add("--init", metavar="MODEL", help="go on from this one, which has the target's tokenizer")
    add("--layers", type=whole, metavar="N", help="of a new draft")
    add("--hidden", type=whole, metavar="N", help="its hidden size")
    budget = parser.add_mutually_exclusive_group().add_argument
    minutes = number(float, 0.001, 10**6)
    budget("--minutes", type=minutes, default=30.0, metavar="X", help="of training (30)")
    budget("--steps", type=whole, metavar="N", help="of training, in place of --minutes")
    add("--batch", type=whole, default=8, metavar="N", help="rows of a step (8)")
    context = number(int, 8, 10**6)
    add("--context", type=context, default=512, metavar="N", help="tokens of a row (512)")
    add("--rate", type=number(float, 1e-9, 1), metavar="X", help="learning rate (by hidden size)")
    add("--ce", type=share, default=0.2, metavar="X", help="next token's part of the loss (0.2)")
    add("--greedy", type=share, default=0.25, metavar="X", help="part of rows it writes (0.25)")
    add("--sampled", type=share, default=0.15, metavar="X", help="part that it samples (0.15)")
    add("--seed", type=number(int, 0, 10**9), default=0, metavar="N", help="of all chance (0)")
    add("--device", help="cpu, cuda or cuda:N (cuda where there is one)")
    add("--threads", type=int, metavar="N", help="CPU threads (one per core)")
    return parser


@dataclass(frozen=True)
class Job:
    """A draft to be trained: how, of what, with what, and where it goes."""

    args: Namespace  # the options
    out: Path
    device: torch.device
    target: Path  # folders
    init: Path | None
    raw: dict  # config.json of the draft
    config: Config  # what it says
    n_ids: int  # V: padded vocabularies of one tokenizer may differ
    train: Tensor  # text as ids [n] int32
    held_out: Tensor  # nothing learns from it


def prepare(args: Namespace) -> Job:
    """Check all that can be checked before the work. Raises UsageError, CheckpointError and
    OutOfMemory."""
    shape = (args.layers, args.hidden)
    if any(shape) if args.init else None in shape:
        raise UsageError("give --layers and --hidden of a new draft, or --init, which has a shape")
    if args.greedy + args.sampled > 1:
        raise UsageError("--greedy and --sampled are shares of the rows, together at most 1")
    device = choose_device(args.device)
    set_threads(args.threads, device)
    out = new_folder(args.out)
    target = find_checkpoint(args.target, say)
    tokenizer = load_tokenizer(target)
    init = find_checkpoint(args.init, say) if args.init else None
    if init:
        require_same_tokenizer(tokenizer, load_tokenizer(init))
    raw = read_json(init / "config.json", dict) if init else new_json(args, target)
    config, target_config = parse_config(raw), read_config(target)
    if args.rate is None:
        args.rate = RATE * (128 / config.hidden_size) ** 0.5 * (GENTLER if init else 1.0)
    what = "training a model of these sizes"
    require_memory(MEMORY * weight_bytes(config, torch.float16), device, what)
    n_positions = min(config.max_positions, target_config.max_positions)
    if args.context > n_positions:
        raise UsageError(f"--context {args.context}: there are {n_positions} positions")
    n_ids = min(config.vocab_size, target_config.vocab_size)
    train, held_out = read_corpus(args.text, tokenizer, n_ids, config.eos_ids)
    if min(len(held_out), len(train)) <= args.context:
        found = f"{len(train) + len(held_out):,} tokens"
        need = f"{(args.context + 1) * HELD_OUT:,}"
        raise UsageError(f"--text is too short, {found}: this --context needs some {need}")
    return Job(args, out, device, target, init, raw, config, n_ids, train, held_out)


def new_json(args: Namespace, target: Path) -> dict:
    """config.json of a new draft: the target's, of another size. Raises CheckpointError."""
    return read_json(target / "config.json", dict) | {
        "hidden_size": args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": max(args.hidden // HEAD_SIZE, 1),
        "intermediate_size": 4 * args.hidden,
    }


# The text


def read_corpus(
    files: Sequence[str], tokenizer: Tokenizer, n_ids: int, eos_ids: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Ids below n_ids, [n] int32, of the files' beginnings, to train on, and of their ends, held
    out; each stands behind an end of text if there is such an id. Raises ForeignFile, and
    UsageError for what the tokenizer cannot encode."""
    train, held_out = [], []
    eos = torch.tensor(eos_ids[:1], dtype=torch.int32)
    for file in files:
        parts = [eos]
        for piece in pieces(read_text(Path(file), MAX_BYTES)):
            parts.append(torch.tensor(encode(piece, tokenizer, n_ids), dtype=torch.int32))
        ids = torch.cat(parts)
        end = len(ids) - len(ids) // HELD_OUT
        train.append(ids[:end])
        held_out += [eos, ids[end:]]
    return torch.cat(train), torch.cat(held_out)


def pieces(text: str) -> Iterator[str]:
    """A text in parts that end with a line, if no line is as long as a part."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE, start + 2 * PIECE) + 1
        if not end:
            end = start + 2 * PIECE
        yield text[start:end]
        start = end


# The model before its first step


def first_model(job: Job) -> GPTNeoX:
    """Plain, in float32, with gradients. Raises CheckpointError and OutOfMemory."""
    if job.init:
        model = load_plain(job.init, job.device)
    else:
        drawn = draw_weights(job.config, job.args.seed)
        tensors = {name: weight.to(job.device) for name, weight in drawn.items()}
        model = GPTNeoX.from_tensors(job.config, tensors)
    return model.requires_grad_(True)


def draw_weights(config: Config, seed: int) -> dict[str, Tensor]:
    """Of a model that has learned nothing, by published name."""
    chance = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in published_shapes(config).items():
        if len(shape) == 1:
            tensors[name] = torch.full(shape, float(name.endswith("weight")))  # a norm's, or a bias
            continue
        std = STD
        if name.endswith(("attention.dense.weight", "mlp.dense_4h_to_h.weight")):
            std /= (2 * config.n_layers) ** 0.5  # so many are added up (Radford et al. 2019)
        tensors[name] = torch.empty(shape).normal_(std=std, generator=chance)
    return tensors


# Texts that the target writes, many at once


def read_rows(model: GPTNeoX, tokens: Tensor) -> Tensor:
    """Logits [B, T, V] of what follows each of tokens [B, T] int64."""
    turns = rotary_table(model.config, tokens.shape[1], model.device)
    return model.embed_out(model.gpt_neox(tokens, turns))


@torch.inference_mode()
def write_rows(
    model: GPTNeoX,
    prompts: Tensor,
    n_new: int,
    temperatures: Tensor,
    chance: torch.Generator,
    n_ids: int,
) -> Tensor:
    """Prompts [B, T] int64, each continued by n_new tokens at its temperature [B], 0 for greedy,
    with the first n_ids alone."""
    n_prompt = prompts.shape[1]
    rows = F.pad(prompts, (0, n_new))  # [B, S]
    cache = model.new_cache(rows.shape[1])
    kv = cache.kv[:, :, None].repeat(1, 1, len(rows), 1, 1, 1)  # [2, L, B, H, S, D]
    start = 0
    for end in range(n_prompt, rows.shape[1]):
        seen = torch.ones(end - start, end, dtype=torch.bool, device=kv.device).tril(start)
        x = model.gpt_neox(rows[:, start:end], cache.turns[start:end], kv, start, seen)
        logits = model.embed_out(x[:, -1])[:, :n_ids].float()  # [B, n_ids]
        rows[:, end] = draw(logits, temperatures, chance)
        start = end
    return rows


def draw(logits: Tensor, temperatures: Tensor, chance: torch.Generator) -> Tensor:
    """An id [B] of each: the best after noise of Gumbel's distribution is a draw."""
    # Not divided by the temperature, which may be 0; above 0 itself, as 0 x inf would be nan
    tiny = torch.finfo(torch.float32).tiny
    noise = torch.empty_like(logits).uniform_(tiny, 1, generator=chance)
    noise = noise.log_().neg_().log_().neg_()
    return (logits + temperatures[:, None] * noise).argmax(-1)


# The training


class Training:
    """A model as it learns."""

    teacher: GPTNeoX  # plain, too; given once it is wanted

    def __init__(self, plan: Namespace, model: GPTNeoX, text: Tensor, n_ids: int):
        """plan: the options. model: plain, with float32 weights and gradients. text: ids [n] int32,
        below n_ids, those that both models know."""
        self.plan, self.model, self.text, self.n_ids = plan, model, text, n_ids
        self.device = model.device
        is_fast = has_instructions(torch.bfloat16, self.device)
        self.dtype = torch.bfloat16 if is_fast else torch.float32  # of products
        matrices = [weight for weight in model.parameters() if weight.ndim > 1]
        vectors = [weight for weight in model.parameters() if weight.ndim == 1]
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}]
        groups.append({"params": vectors, "weight_decay": 0.0})
        self.optimizer = torch.optim.AdamW(groups, betas=BETAS, fused=True)
        self.written = torch.zeros(0, plan.context + 1, dtype=torch.int32)  # by the teacher, lately
        self.step = 0
        self.seconds = 0.0  # of all steps

    def advance(self) -> float:
        """One step. Returns its loss in nats per token; raises UsageError if that is none."""
        start = time.monotonic()
        rows = self.draw_rows()
        n_at_once = MAX_LOGITS[self.device.type] // (self.plan.context * self.n_ids)
        total = 0.0
        self.optimizer.zero_grad()
        for part in rows.split(max(n_at_once, 1)):
            loss = self.loss(part) * (len(part) / len(rows))
            loss.backward()
            total += loss.item()
        if not math.isfinite(total):
            raise UsageError(f"the loss of step {self.step} is {total}: --rate is too high")
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), LONGEST_GRADIENT)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        self.optimizer.step()
        self.step += 1
        self.seconds += time.monotonic() - start
        return total

    def loss(self, rows: Tensor) -> Tensor:
        """In nats per token, of rows [b, context + 1]."""
        rows = rows.to(self.device).long()
        logprobs = self.logprobs(self.model, rows)
        next_token = F.nll_loss(logprobs, rows[:, 1:].flatten())
        with torch.no_grad():
            wanted = self.logprobs(self.teacher, rows)
        divergence = F.kl_div(logprobs, wanted, reduction="batchmean", log_target=True)
        return self.plan.ce * next_token + (1 - self.plan.ce) * divergence

    def logprobs(self, model: GPTNeoX, rows: Tensor) -> Tensor:
        """Of what follows each token but a row's last, [b * context, V]."""
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            logits = read_rows(model, rows[:, :-1])[..., : self.n_ids]
        return logits.float().log_softmax(-1).flatten(0, 1)

    def draw_rows(self) -> Tensor:
        """What the coming step learns from, [B, context + 1], of the text and of the target's."""
        plan = self.plan
        chance = self.chance(0)
        rows = self.draw_text(plan.batch, plan.context + 1, chance)
        share = plan.greedy + plan.sampled
        if share:
            self.let_target_write(share)
            is_written = torch.rand(plan.batch, generator=chance) < share
            chosen = torch.randint(len(self.written), (plan.batch,), generator=chance)
            rows[is_written] = self.written[chosen[is_written]]
        return rows

    def draw_text(self, n_rows: int, length: int, chance: torch.Generator) -> Tensor:
        """Rows that begin anywhere in the text, [n_rows, length]."""
        starts = torch.randint(len(self.text) - length + 1, (n_rows, 1), generator=chance)
        return self.text[starts + torch.arange(length)]

    def let_target_write(self, share: float) -> None:
        """Every so many steps: new rows, in the place of the oldest. share: of a step's rows."""
        plan = self.plan
        row_bytes = self.teacher.new_cache(1).kv.nbytes * plan.context
        n_rows = min(max(CACHE_BYTES // row_bytes, 1), N_WRITTEN[self.device.type])
        n_steps = max(round(n_rows * N_USES / (share * plan.batch)), 1)
        if self.step % n_steps:
            return
        n_prompt = max(plan.context // PROMPT, 1)
        prompts = self.draw_text(n_rows, n_prompt, self.chance(1)).to(self.device).long()
        temperatures = torch.zeros(n_rows, device=self.device)
        n_greedy = round(n_rows * plan.greedy / share)
        temperatures[n_greedy:] = torch.linspace(*TEMPERATURES, n_rows - n_greedy)
        n_new = plan.context + 1 - n_prompt
        chance = self.chance(1, self.device)
        new = write_rows(self.teacher, prompts, n_new, temperatures, chance, self.n_ids)
        first = self.step // n_steps % N_KEPT * n_rows  # the same if this step is made again
        parts = [self.written[:first], new.int().cpu(), self.written[first + n_rows :]]
        self.written = torch.cat(parts)

    def chance(self, purpose: int, device: str | torch.device = "cpu") -> torch.Generator:
        """What the coming step draws from."""
        seed = self.plan.seed * 10**9 + 2 * self.step + purpose
        return torch.Generator(device).manual_seed(seed)

    def rate(self) -> float:
        """The learning rate: warm-up, then half a wave of the cosine, down to 0."""
        done = self.progress()
        if self.plan.steps:
            done += 0.5 / self.plan.steps  # in the middle of a step, or the first would be lost
        if done < WARM_UP:
            return self.plan.rate * done / WARM_UP
        return self.plan.rate * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP))) / 2

    def progress(self) -> float:
        """The share of the budget that is spent."""
        if self.plan.steps:
            return self.step / self.plan.steps
        return self.seconds / (60 * self.plan.minutes)


def train(training: Training, save: Callable[[], None]) -> None:
    """Spend the budget, saving now and then and at the end."""
    saved_at = time.monotonic()
    progress = {"total": 1.0, "initial": training.progress(), "bar_format": BAR}
    with tqdm(**progress, disable=None, leave=False) as bar:
        while training.progress() < 1:
            loss = training.advance()
            line = f"step {training.step}, loss {loss:.3f}"
            bar.set_postfix_str(line, refresh=False)
            bar.update(min(training.progress(), 1.0) - bar.n)
            if time.monotonic() - saved_at >= SAVE_S:
                save()
                saved_at = time.monotonic()
                if bar.disable:  # no terminal
                    say(line)
    save()


# Its checkpoint: all of a training at some step

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's, of each weight


def save_state(file: Path, training: Training, before: dict[str, float]) -> None:
    """After a step or more; whole, or what was there stays. before: figures. Raises OSError."""
    tensors = {"written": training.written}
    for name, weight in training.model.named_parameters():
        tensors[f"weight.{name}"] = weight.detach()
        for moment in MOMENTS:
            tensors[f"{moment}.{name}"] = training.optimizer.state[weight][moment]
    standing = {"command": training.plan.command, "before": before}
    standing |= {"step": training.step, "seconds": training.seconds}
    write_whole(file, save(tensors, {"standing": json.dumps(standing)}))


@torch.no_grad()
def restore(file: Path, training: Training) -> dict[str, float]:
    """Let a training that has not begun go on from its checkpoint. Returns the figures before it;
    raises UsageError if the file is damaged, or of another command."""
    try:
        with safe_open(file, "pt") as stored:
            standing = json.loads(stored.metadata()["standing"])
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}
        other = standing["command"]
        if other != training.plan.command:
            raise UsageError(f"{file} is of another command, give that or delete it: {other}")
        training.step, training.seconds = standing["step"], standing["seconds"]
        training.written = tensors["written"]
        for name, weight in training.model.named_parameters():
            weight.copy_(tensors[f"weight.{name}"])
            state = {part: tensors[f"{part}.{name}"].to(weight.device) for part in MOMENTS}
            state["step"] = torch.tensor(float(training.step), device=weight.device)
            training.optimizer.state[weight] = state
    except (SafetensorError, LookupError, TypeError, ValueError) as error:
        raise UsageError(f"{file} is damaged: delete it to begin anew") from error
    say(f"going on from step {training.step}")
    return standing["before"]


# What comes of it: figures on text that nothing was learned from, a card, a folder


def saved_tensors(model: GPTNeoX) -> dict[str, Tensor]:
    """Its weights in float16, by published name. Raises UsageError for one that does not fit."""
    # Not of state_dict(), which has a tied embedding under both of its names
    return {name: halved(name, weight.detach()) for name, weight in model.named_parameters()}


def measure_held_out(job: Job, model: GPTNeoX) -> dict[str, float]:
    """Tokens per iteration by method, of the draft as it will be saved, run as dynatree.py runs it
    by default. Raises UsageError, CheckpointError and OutOfMemory."""
    say("measuring on the held-out text")
    dtype = choose_dtype(None, job.device)
    draft_dtype = choose_draft_dtype(None, dtype, job.device)
    tensors = {name: tensor.to(draft_dtype) for name, tensor in saved_tensors(model).items()}
    draft = FastGPTNeoX.from_tensors(model.config, tensors)
    target = FastGPTNeoX.from_pretrained(job.target, job.device, dtype)
    last = max(len(job.held_out) - PROMPT_TOKENS, 0)
    found = dict.fromkeys(METHODS, 0.0)
    for start in torch.linspace(0, last, N_PROMPTS).int().tolist():
        prompt = job.held_out[start : start + PROMPT_TOKENS].tolist()
        for name, settings in METHODS.items():
            metrics = measure(generate(target, draft, prompt, settings, NEW_TOKENS))
            found[name] += metrics.tokens_per_iter / N_PROMPTS
    return found


def card(job: Job, taken: str, before: dict[str, float], after: dict[str, float]) -> str:
    """README.md of a folder: how the model was made, and its figures."""
    n_tokens = f"{len(job.train):,} tokens of text, and {len(job.held_out):,} held out"
    lines = [f"# {job.out.name}", "", "```", job.args.command, "```", ""]
    lines += [f"{n_tokens}; {taken}; learning rate {job.args.rate:.3g}", ""]
    lines += ["| tokens/iter on held-out text | before | after |", "|---|---|---|"]
    lines += [f"| {name} | {before[name]:.3f} | {after[name]:.3f} |" for name in after]
    return "\n".join([shown(line) for line in lines]) + "\n"


def distil(job: Job, file: Path) -> None:
    """Train from the checkpoint, or the beginning, to the end; then measure and write."""
    training = Training(job.args, first_model(job), job.train, job.n_ids)
    model = training.model
    before = restore(file, training) if file.exists() else measure_held_out(job, model)
    training.teacher = load_plain(job.target, job.device, training.dtype)
    train(training, lambda: save_state(file, training, before))
    del training.teacher  # its memory is wanted
    after = measure_held_out(job, model)
    taken = f"{training.step:,} steps in {training.seconds / 60:.1f} minutes"
    raw = job.raw | {"torch_dtype": "float16", "dtype": "float16"}  # published, and newer saves
    files = {"config.json": json.dumps(raw, indent=2).encode()}
    files["README.md"] = card(job, taken, before, after).encode()
    write_checkpoint(job.out, saved_tensors(model), read_unchanged(job.target) | files)
    file.unlink()
    for name, value in after.items():
        say(f"{name}: {before[name]:.3f} tokens/iter before, {value:.3f} after")


def execute(args: Namespace) -> int:
    job = prepare(args)
    file = job.out.with_name(f"{job.out.name}.training")  # its checkpoint
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file):
            distil(job, file)
    except BlockingIOError as error:
        raise UsageError(f"another run is at work on {job.out}") from error
    except OSError as error:
        why = f"{file} cannot be written: {error.strerror or error}"
        raise UsageError(f"{why}; what was there stays, to go on from") from error
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    words = sys.argv[1:] if arguments is None else arguments
    same = [word for word in words if word != "--debug"]
    parser.set_defaults(command=shlex.join(["python", parser.prog, *same]))
    return run_command_line(execute, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())

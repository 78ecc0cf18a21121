"""A draft for your target: a small GPT-NeoX that learns to guess what the target writes.

    python tools/distil.py --target FOLDER --text a.txt --layers 2 --hidden 128 --out my-draft
    python tools/distil.py --target FOLDER --text *.txt --init EleutherAI/pythia-70m --out my-draft
    python tools/distil.py --text *.txt --layers 6 --hidden 320 --out my-target
    python dynatree.py --target FOLDER --draft my-draft --prompt "The ship sailed at dawn"

The draft has the target's tokenizer. Without a target a model learns the next token, and a
vocabulary is made of the text first. Here is the command; tools/trainable.py has the model,
tools/training.py what it learns and how, tools/corpus.py the text, tools/outcome.py the figures.

However a run ends, the same command goes on from its last checkpoint, in a hidden folder beside
--out; with --steps the weights will be those of a run that was never ended. The folder --out is
there once all of it is. Its card tells of the model before and after, on the last twentieth of each
file, from which nothing was learned.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs as a file, from anywhere

if __name__ == "__main__":  # before torch, whose import takes a second
    from cli.start import guard_imports

    guard_imports()

import gc
import hashlib
import shlex
import shutil
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from tokenizers import Tokenizer
from tqdm import tqdm

from cli.errors import Parser, UsageError, run_command_line, say
from cli.interrupts import heed_termination
from cli.models import choose_device, require_same_tokenizer, set_threads
from engine.checkpoint import Config
from engine.memory import in_bytes, require_memory
from tools.corpus import SMALLEST, Corpus, learn_tokenizer, read_corpus, require_texts
from tools.folders import TOKENIZER, file_bytes, new_folder, read_unchanged, size
from tools.outcome import CARD, card, measure_held_out, write_folder
from tools.trainable import Source, Trainable, fresh_tensors, published_json
from tools.training import (
    Plan,
    Training,
    checkpoint_of,
    read_state,
    training_dtype,
    write_state,
)

HEAD_SIZE = 64  # of a new model, about
POSITIONS = 2048  # of one without a target
VOCABULARY = 4096  # the same
RATE = 2e-3  # of a new model of hidden size 128; it falls with the root of that
GENTLER = 0.6  # the share of it for a model that has learned
WITH_TARGET = {"greedy": 0.25, "sampled": 0.15, "ce": 0.2}  # about what made models/tiny/draft
RANGES = {"minutes": (0.001, 10**6), "rate": (1e-9, 1), "context": (8, 10**6), "seed": (0, 10**9)}
RANGES |= {"greedy": (0, 1), "sampled": (0, 1), "ce": (0, 1), "vocab": (SMALLEST, 10**6)}
MEMORY = 8  # bytes in training for one in the file: float32 weight, gradient and two moments
DISK = 13  # bytes of two checkpoints and the file
MINUTES = 30
SAVE_S = 120.0  # seconds between two checkpoints
BAR = "{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"


@dataclass(frozen=True)
class Run:
    """What was asked for, checked, before anything is computed or written."""

    out: Path
    device: torch.device
    target: Source | None
    init: Source | None
    config: Config  # of the model
    corpus: Corpus
    plan: Plan
    files: dict[str, bytes]  # that the folder gets with the model
    command: str

    def identity(self) -> dict:
        """What a checkpoint to go on from must have been made with."""
        text = hashlib.sha256(self.corpus.train.numpy()).hexdigest()
        found = asdict(self.plan) | published_json(self.config) | {"text": text}
        for role, source in (("target", self.target), ("init", self.init)):
            found[role] = str(source.folder.resolve()) if source else None
        return found

    def new_model(self) -> Trainable:
        """As it is before its first step. Raises CheckpointError and OutOfMemory."""
        if self.init:
            return self.init.load(self.device, torch.float32)
        return Trainable(self.config, fresh_tensors(self.config, self.plan.seed, self.device))

    def load_teacher(self) -> Trainable | None:
        if self.target is None:
            return None
        return self.target.load(self.device, training_dtype(self.device)).requires_grad_(False)


def prepare(args: Namespace) -> Run:
    """Check all that can be checked before the work. Raises UsageError and CheckpointError."""
    require_effect(args)
    set_threads(args.threads)
    device = choose_device(args.device)
    texts = require_texts(args.text)
    target = Source.open(args.target)
    init = Source.open(args.init)
    sources = [source for source in (target, init) if source]
    for place in [source.folder for source in sources] + texts:
        out = new_folder(args.out, place)
    if sources:
        tokenizer = sources[0].tokenizer
        require_same_tokenizer(tokenizer, sources[-1].tokenizer)
        files = read_unchanged(sources[0].folder)
    else:
        tokenizer = learn_tokenizer(texts, args.vocab or VOCABULARY)
        files = {TOKENIZER: tokenizer.to_str(pretty=True).encode()}
    config = init.config if init else new_config(args, target, tokenizer)
    plan = choose_plan(args, config.hidden_size)
    configs = [config] + [source.config for source in sources]
    n_positions = min(each.max_positions for each in configs)
    if plan.context > n_positions:
        raise UsageError(f"--context {plan.context}: there are {n_positions} positions")
    n_ids = min(each.vocab_size for each in configs)
    corpus = read_corpus(texts, tokenizer, n_ids, config.eos_ids)
    corpus.require_rows(plan.context + 1)
    require_room(config, device, out)
    return Run(out, device, target, init, config, corpus, plan, files, args.command)


def require_effect(args: Namespace) -> None:
    """Raise UsageError for a value out of its range and for an option that would do nothing."""
    given = {name for name, value in vars(args).items() if value is not None}
    for name, (low, high) in RANGES.items():
        if name in given and not low <= getattr(args, name) <= high:
            raise UsageError(f"--{name} {getattr(args, name)}: {low} to {high}")
    for name in WITH_TARGET:
        if name in given and not args.target:
            raise UsageError(f"--{name} has no effect without a --target")
    for name in ("layers", "hidden", "heads"):
        if name in given and args.init:
            raise UsageError(f"--{name} has no effect: the shape is that of --init {args.init}")
    if "vocab" in given and (args.target or args.init):
        raise UsageError("--vocab has no effect: the vocabulary is there already")
    if not args.init and not {"layers", "hidden"} <= given:
        raise UsageError("give --layers and --hidden of a new model, or one to go on from: --init")


def require_room(config: Config, device: torch.device, out: Path) -> None:
    """Raise UsageError or OutOfMemory if training would fill the disk or the memory."""
    size_of_file = file_bytes(config)
    existing = [place for place in out.parents if place.exists()][0]
    free = shutil.disk_usage(existing).free
    if DISK * size_of_file > free:
        sizes = f"{in_bytes(DISK * size_of_file)} on disk, {in_bytes(free)} are free"
        raise UsageError(f"training a model of these sizes would take {sizes}")
    require_memory(MEMORY * size_of_file, device, "training a model of these sizes")


def new_config(args: Namespace, target: Source | None, tokenizer: Tokenizer) -> Config:
    """Of a new model, with the target's ids and positions. Raises CheckpointError."""
    config = Config(
        vocab_size=target.config.vocab_size if target else tokenizer.get_vocab_size(),
        hidden_size=args.hidden,
        n_layers=args.layers,
        n_heads=args.heads or max(args.hidden // HEAD_SIZE, 1),
        intermediate_size=4 * args.hidden,
        max_positions=target.config.max_positions if target else POSITIONS,
        rotary_fraction=0.25,
        rotary_base=10000.0,
        eos_ids=target.config.eos_ids if target else (0,),
    )
    return Config.from_json(published_json(config))  # as it will be read


def choose_plan(args: Namespace, hidden: int) -> Plan:
    """Defaults filled in. Raises UsageError."""
    shares = {"greedy": 0.0, "sampled": 0.0, "ce": 1.0}
    if args.target:
        for name, default in WITH_TARGET.items():
            given = getattr(args, name)
            shares[name] = default if given is None else given
    if shares["greedy"] + shares["sampled"] > 1:
        raise UsageError("--greedy and --sampled are shares of the rows, together at most 1")
    rate = args.rate
    if rate is None:
        rate = RATE * (128 / hidden) ** 0.5
        if args.init:
            rate *= GENTLER
    minutes = args.minutes
    if args.steps is None and minutes is None:
        minutes = MINUTES
    return Plan(args.steps, minutes, args.batch, args.context, rate, **shares, seed=args.seed)


def train(training: Training, save: Callable[[], None]) -> None:
    """Spend the budget, saving now and then and at the end."""
    saved_at = time.monotonic()
    recent = None  # loss, the mean of the last ten steps or so
    progress = {"total": 1.0, "initial": training.progress(), "bar_format": BAR}
    with tqdm(**progress, disable=None, leave=False) as bar:
        while training.progress() < 1:
            loss = training.advance()
            recent = loss if recent is None else 0.9 * recent + 0.1 * loss
            line = f"step {training.step}, loss {recent:.3f}, {training.speed():,.0f} tokens/s"
            bar.set_postfix_str(line, refresh=False)
            bar.update(min(training.progress(), 1.0) - bar.n)
            if time.monotonic() - saved_at >= SAVE_S:
                save()
                saved_at = time.monotonic()
                if bar.disable:  # no terminal
                    say(line)
    save()


def distil(run: Run, file: Path) -> None:
    """Train from the checkpoint, or the beginning, to the end; then measure and write."""
    state = read_state(file, run.identity())
    model = run.new_model()
    if state:
        before = state["before"]
    else:
        before = measure(run, model)
    training = Training(run.plan, model, run.corpus.train, run.load_teacher())
    if state:
        training.restore(state["training"])
        say(f"going on from step {training.step}")

    def save() -> None:
        found = {"identity": run.identity(), "before": before, "training": training.state()}
        write_state(file, found)

    try:
        train(training, save)
        training.teacher = None  # its memory is wanted
        after = measure(run, model)
        text = card(run.out.name, run.command, describe(run, training), before, after)
        write_folder(run.out, model, run.files | {CARD: text.encode()})
    except KeyboardInterrupt:
        save()
        say(f"interrupted after step {training.step}; the same command goes on from there")
        raise
    file.unlink()
    for name, value in after.items():
        say(f"{name}: {before[name]:.3f} before, {value:.3f} after")


def measure(run: Run, model: Trainable) -> dict[str, float]:
    """Figures on the held-out text, by name."""
    say("measuring on the held-out text")
    folder = run.target.folder if run.target else None
    found = measure_held_out(model, folder, run.corpus.held_out, run.plan.context)
    gc.collect()  # a GPTNeoX refers to itself, and its memory is wanted
    return found


def describe(run: Run, training: Training) -> list[str]:
    """What the model is and how it was made, for its card."""
    config, plan = run.config, run.plan
    n_train, n_held_out = len(run.corpus.train), len(run.corpus.held_out)
    shape = f"layers: {config.n_layers}, hidden size: {config.hidden_size}, heads: {config.n_heads}"
    steps = f"{training.step:,} steps of {plan.batch} x {plan.context} tokens"
    facts = [
        f"GPT-NeoX in float16; {shape}, ids: {config.vocab_size:,}",
        f"{steps} in {training.seconds / 60:.1f} minutes; learning rate {plan.rate:.2g} at most",
        f"{n_train:,} tokens of text, and {n_held_out:,} held out",
    ]
    if run.target:
        facts.append(f"to guess what {run.target.folder} writes, which wrote of the rows:")
        facts[-1] += f" {plan.greedy:.0%} greedily, {plan.sampled:.0%} sampled"
        facts.append(f"loss: {plan.ce:g} next token + {1 - plan.ce:g} divergence from the target")
    return facts


def execute(args: Namespace) -> int:
    heed_termination()
    run = prepare(args)
    with checkpoint_of(run.out) as file:
        distil(run, file)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    if arguments is None:
        arguments = sys.argv[1:]
    parser = Parser(prog="tools/distil.py", description=__doc__.splitlines()[0])
    parser.less_memory = "--batch, --context"
    parser.set_defaults(command=shlex.join(["python", parser.prog, *arguments]))
    add = parser.add_argument
    add("--target", metavar="MODEL", help="folder, or hub NAME or NAME@REVISION; none: next token")
    add("--text", nargs="+", required=True, metavar="FILE", help="to learn from, UTF-8")
    add("--out", required=True, metavar="FOLDER", help="where the model goes: new or empty")
    add("--init", metavar="MODEL", help="go on from this one, which has the target's tokenizer")
    add("--layers", type=size, metavar="N", help="of a new model")
    add("--hidden", type=size, metavar="N", help="its hidden size")
    add("--heads", type=size, metavar="N", help=f"its attention heads (of size {HEAD_SIZE})")
    add("--vocab", type=size, metavar="N", help=f"ids, without a target ({VOCABULARY})")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--minutes", type=float, metavar="X", help=f"of training ({MINUTES})")
    budget.add_argument("--steps", type=size, metavar="N", help="or so many steps")
    add("--batch", type=size, default=8, metavar="N", help="rows of a step (8)")
    add("--context", type=size, default=512, metavar="N", help="tokens of a row (512)")
    add("--rate", type=float, metavar="X", help="learning rate at its highest (by hidden size)")
    add("--greedy", type=float, metavar="X", help="share of rows the target writes greedily (0.25)")
    add("--sampled", type=float, metavar="X", help="share of rows it samples (0.15)")
    add("--ce", type=float, metavar="X", help="weight of the next token in the loss (0.2)")
    add("--seed", type=int, default=0, metavar="N", help="of all that is random (0)")
    add("--device", help="cpu, cuda or cuda:N (cuda where there is one)")
    add("--threads", type=int, metavar="N", help="CPU threads (one per core)")
    return run_command_line(execute, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())

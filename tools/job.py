"""What tools/distil.py may be asked for, checked before anything is computed or written.

job = prepare(build_parser("A draft for your target").parse_args())
model = job.new_model()
"""

import hashlib
import shutil
from argparse import Namespace
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn

from cli.errors import Parser, UsageError, say
from cli.models import (
    choose_device,
    has_bfloat16,
    lacks_instructions,
    load_tokenizer,
    processor_flags,
    require_same_tokenizer,
    set_threads,
)
from engine.checkpoint import Config, read_config
from engine.hub import find_checkpoint
from engine.memory import in_bytes, require_memory
from engine.settings import check_settings, setting
from gpt_neox import GPTNeoX
from tools.corpus import SMALLEST, Corpus, learn_tokenizer, read_corpus, require_texts
from tools.folders import (
    TOKENIZER,
    file_bytes,
    new_folder,
    published_json,
    read_unchanged,
    size,
)

HEAD_SIZE = 64  # of a new model, about
POSITIONS = 2048  # of one without a target
VOCABULARY = 4096  # the same
LARGEST = 10**6  # vocabulary that is learned
RATE = 2e-3  # of a new model of hidden size 128; it falls with the root of that
GENTLER = 0.6  # the share of it for a model that has learned
STD = 0.02  # of a new model's weights, GPT-2's and Pythia's
ALONE = {"greedy": 0.0, "sampled": 0.0, "ce": 1.0}  # without a target
MEMORY = 8  # bytes in training for one in the file: float32 weight, gradient and two moments
DISK = 13  # bytes of two checkpoints and the file


@dataclass(frozen=True)
class Plan:
    """How to train; the same plan, text and weights give the same weights on one machine."""

    steps: int = setting(0, 0, 10**15, "steps of training; if 0 as many as --minutes allow")
    minutes: float = setting(30.0, 0.001, 10**6, "of training")
    batch: int = setting(8, 1, 10**15, "rows of a step, B")
    context: int = setting(512, 8, 10**6, "tokens of a row that something follows")
    rate: float = setting(0.0, 0.0, 1.0, "learning rate at its highest; if 0 by hidden size")
    greedy: float = setting(0.25, 0.0, 1.0, "share of rows that the target writes greedily")
    sampled: float = setting(0.15, 0.0, 1.0, "share of rows that it samples")
    ce: float = setting(0.2, 0.0, 1.0, "weight of the next token in the loss")
    seed: int = setting(0, 0, 10**9, "of all that is random")

    def __post_init__(self) -> None:
        check_settings(self)
        if self.written > 1:
            raise ValueError("greedy and sampled are shares of the rows, together at most 1")

    @property
    def written(self) -> float:
        """Share of the rows, by the target."""
        return self.greedy + self.sampled


@dataclass(frozen=True)
class Source:
    """A checkpoint to learn from, or to go on from: all but its weights."""

    folder: Path
    config: Config
    tokenizer: Tokenizer

    @classmethod
    def open(cls, name: str | None) -> "Source | None":
        """Raises CheckpointError."""
        if name is None:
            return None
        folder = find_checkpoint(name, say)
        return cls(folder, read_config(folder), load_tokenizer(folder))


@dataclass(frozen=True)
class Job:
    """A model to be trained: how, of what, with what, and where it goes."""

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

    def new_model(self) -> GPTNeoX:
        """As it is before its first step. Raises CheckpointError and OutOfMemory."""
        if self.init is None:
            return fresh_model(self.config, self.plan.seed).to(self.device)
        model = GPTNeoX.from_pretrained(self.init.folder, self.device, fuse=False)
        return model.requires_grad_(True)

    def load_teacher(self) -> GPTNeoX | None:
        """Raises CheckpointError and OutOfMemory."""
        if self.target is None:
            return None
        dtype = training_dtype(self.device)
        return GPTNeoX.from_pretrained(self.target.folder, self.device, dtype, fuse=False)


def fresh_model(config: Config, seed: int) -> GPTNeoX:
    """One that has learned nothing, float32, on the CPU."""
    chance = torch.Generator().manual_seed(seed)
    model = GPTNeoX(config)
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            std = STD
            if name.endswith(("attention.dense.weight", "mlp.dense_4h_to_h.weight")):
                std /= (2 * config.n_layers) ** 0.5  # so many are added up (Radford et al. 2019)
            nn.init.normal_(weight, std=std, generator=chance)
        elif name.endswith("bias"):
            nn.init.zeros_(weight)
    return model


def training_dtype(device: torch.device) -> torch.dtype:
    """What products are computed in: bfloat16 where there are instructions for it."""
    is_fast = has_bfloat16(device)
    if device.type == "cpu":
        flags = processor_flags()
        is_fast = bool(flags) and not lacks_instructions(torch.bfloat16, flags)
    return torch.bfloat16 if is_fast else torch.float32


def prepare(args: Namespace) -> Job:
    """Check all that can be checked before the work. Raises UsageError and CheckpointError."""
    require_effect(args)
    plan = read_plan(args)
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
    if not plan.rate:
        rate = RATE * (128 / config.hidden_size) ** 0.5
        plan = replace(plan, rate=rate * GENTLER if init else rate)
    configs = [config] + [source.config for source in sources]
    n_positions = min(each.max_positions for each in configs)
    if plan.context > n_positions:
        raise UsageError(f"--context {plan.context}: there are {n_positions} positions")
    n_ids = min(each.vocab_size for each in configs)
    corpus = read_corpus(texts, tokenizer, n_ids, config.eos_ids)
    corpus.require_rows(plan.context + 1)
    require_room(config, device, out)
    return Job(out, device, target, init, config, corpus, plan, files, args.command)


def require_effect(args: Namespace) -> None:
    """Raise UsageError for an option that would do nothing, and for a model without a shape."""
    idle = {}  # options -> why
    if not args.target:
        idle |= dict.fromkeys(ALONE, "without a --target")
    if args.init:
        idle |= dict.fromkeys(("layers", "hidden", "heads"), f"beside --init {args.init}")
    if args.target or args.init:
        idle["vocab"] = "as the vocabulary is there already"
    for name, why in idle.items():
        if getattr(args, name) is not None:
            raise UsageError(f"--{name} has no effect {why}")
    if args.vocab is not None and not SMALLEST <= args.vocab <= LARGEST:
        raise UsageError(f"--vocab {args.vocab}: {SMALLEST} to {LARGEST}")
    if not args.init and None in (args.layers, args.hidden):
        raise UsageError("give --layers and --hidden of a new model, or one to go on from: --init")


def read_plan(args: Namespace) -> Plan:
    """The options that are a plan's fields. Raises UsageError."""
    values = {} if args.target else ALONE
    for field in fields(Plan):
        value = getattr(args, field.name)
        if value is not None:
            values = values | {field.name: value}
    try:
        return Plan(**values)
    except ValueError as error:
        raise UsageError(f"--{error}") from error


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


def require_room(config: Config, device: torch.device, out: Path) -> None:
    """Raise UsageError or OutOfMemory if training would fill the disk or the memory."""
    n_bytes = file_bytes(config)
    existing = [place for place in out.parents if place.exists()][0]
    free = shutil.disk_usage(existing).free
    if DISK * n_bytes > free:
        sizes = f"{in_bytes(DISK * n_bytes)} on disk, {in_bytes(free)} are free"
        raise UsageError(f"training a model of these sizes would take {sizes}")
    require_memory(MEMORY * n_bytes, device, "training a model of these sizes")


def build_parser(description: str) -> Parser:
    parser = Parser(prog="tools/distil.py", description=description)
    parser.less_memory = "--batch, --context"
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
    for field in fields(Plan):
        kind = type(field.default)
        metavar = "N" if kind is int else "X"
        meaning = f"{field.metadata['meaning']} ({field.default:g})"
        place = budget if field.name in ("steps", "minutes") else parser
        place.add_argument(f"--{field.name}", type=kind, metavar=metavar, help=meaning)
    add("--device", help="cpu, cuda or cuda:N (cuda where there is one)")
    add("--threads", type=int, metavar="N", help="CPU threads (one per core)")
    return parser

"""Train a draft for a target: a small GPT-NeoX model or, with --eagle, an EAGLE head.

    python -m dynatree_lab.training.distil --target big --text x.txt --layers 2 --hidden 96 --out d
    python -m dynatree_lab --target big --draft d --prompt "She opened the door"

A drafted token is accepted if the target agrees with it. So a draft learns the distribution of the
target after each token of a text, and not the text's next token (draft_training.py,
eagle_training.py). The generated text is exact however little the draft has learned.

The same command resumes an interrupted run. The final weights are the same, because the batch of a
step depends only on the files and on the step's number. If the target, the text or an option of the
training has changed since, the run is refused.
"""

if __name__ == "__main__":  # before torch is imported, because run_program sets it up
    from dynatree_lab.cli.start import run_program

    run_program("dynatree_lab.training.distil")  # does not return

from argparse import Namespace
from collections.abc import Sequence
from hashlib import file_digest, sha256
from pathlib import Path

import torch
from torch import Tensor

from dynatree_lab.cli.options import set_threads
from dynatree_lab.cli.program import Parser, print_line, run_command_line
from dynatree_lab.engine.checkpoint import find_checkpoint, reading
from dynatree_lab.engine.memory import memory_for
from dynatree_lab.errors import UsageError, writing
from dynatree_lab.folders import write_checkpoint
from dynatree_lab.pair import choose_device, choose_dtype
from dynatree_lab.tokens import known_ids, load_tokenizer
from dynatree_lab.training import draft_training, eagle_training
from dynatree_lab.training.loop import Progress
from gpt_neox import Config, GPTNeoX

# Characters per call of the tokenizer, whose result takes 100 times the memory of the characters
PIECE = 2**16
TRAINING_OPTIONS = ("eagle", "layers", "hidden", "steps", "batch", "context", "rate")


def read_ids(files: Sequence[str], folder: Path, config: Config) -> Tensor:
    """Return the ids [n] int64 of text files, each after the target's first EOS id if it has one.
    folder: the target's. Raises CheckpointError and UsageError."""
    tokenizer, ids = load_tokenizer(folder), []
    for file in files:
        try:
            text = Path(file).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--text {file} cannot be read: {error}") from error
        ids += config.eos_ids[:1]
        for start in range(0, len(text), PIECE):
            ids += tokenizer.encode(text[start : start + PIECE], add_special_tokens=False).ids
    return torch.tensor(known_ids(ids, tokenizer, config.vocab_size))


def require_valid(args: Namespace) -> None:
    """Raise UsageError if an option is missing, out of range or without effect."""
    has_sizes = args.layers is not None, args.hidden is not None
    if args.eagle and any(has_sizes):
        raise UsageError("--layers and --hidden have no effect with --eagle: a head has one layer")
    if not args.eagle and not all(has_sizes):
        raise UsageError("a draft model needs --layers and --hidden")
    for name in ("layers", "hidden", "steps", "batch", "context", "rate"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise UsageError(f"--{name} is {value}, it must be above 0")


def trained_on(args: Namespace, folder: Path, text: Tensor) -> dict[str, object]:
    """Return what the trained weights depend on, by option: digests of the target's config.json and
    weights and of the text's ids, and the values of the other options. folder: the target's."""
    target = sha256()
    for file in (folder / "config.json", *sorted(folder.glob("*.safetensors"))):
        with file.open("rb") as opened:
            target.update(file_digest(opened, "sha256").digest())
    ids = sha256(text.numpy().tobytes())
    options = {f"--{name}": getattr(args, name) for name in TRAINING_OPTIONS}
    return {"--target": target.hexdigest(), "--text": ids.hexdigest(), **options}


def execute(args: Namespace) -> int:
    """Train as the options say, write the new folder, and return the exit status."""
    require_valid(args)
    device = choose_device(args.device)
    set_threads(args.threads, device)
    out = Path(args.out).absolute()
    if out.exists():
        raise UsageError(f"{args.out} exists already; use a new folder")
    checkpoint = find_checkpoint(args.target, print_line)
    folder, config = checkpoint.folder, checkpoint.config
    text = read_ids(args.text, folder, config)
    if len(text) < args.context:
        raise UsageError(f"--text is too short: {len(text):,} tokens, --context {args.context}")
    rate = eagle_training.RATE if args.eagle else draft_training.RATE
    args.rate = args.rate or rate * (128 / (args.hidden or config.hidden_size)) ** 0.5
    file = out.with_name(f"{out.name}.training")
    progress = Progress(file, trained_on(args, folder, text))
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        progress.require_writable()  # now, and not after hours
    # A head's loss reads hidden states, which may overflow in float16
    dtype = torch.float32 if args.eagle else choose_dtype(None, device)
    with reading(folder), memory_for(f"the weights of {folder}"):
        target = GPTNeoX.from_pretrained(folder, device, dtype)  # layers that can be trained
    run = eagle_training.train_head if args.eagle else draft_training.train_draft
    tensors, own_json = run(target, folder, text, progress, args)
    source = None if args.eagle else folder  # a head needs no tokenizer
    write_checkpoint(out, tensors, own_json, source)
    file.unlink()
    print_line(f"draft written to {out}; measure it with --compare (docs/distil.md)")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m dynatree_lab.training.distil",
        description=__doc__ and __doc__.splitlines()[0],
    )
    parser.less_memory = "--batch, --context"
    add = parser.add_argument
    add("--target", required=True, metavar="MODEL", help="folder or hub NAME[@REVISION]")
    add("--text", nargs="+", required=True, metavar="FILE", help="text files to train on, UTF-8")
    add("--out", required=True, metavar="FOLDER", help="new folder of the draft")
    add("--eagle", action="store_true", help="train an EAGLE head instead of a draft model")
    add("--layers", type=int, metavar="N", help="layers of a draft model")
    add("--hidden", type=int, metavar="N", help="hidden size of a draft model")
    add("--steps", type=int, default=2000, metavar="N", help="training steps (default 2000)")
    add("--batch", type=int, default=8, metavar="N", help="rows per step (default 8)")
    add("--context", type=int, default=512, metavar="N", help="tokens per row (default 512)")
    add("--rate", type=float, metavar="X", help="learning rate (default by hidden size)")
    add("--device", help="cpu, cuda or cuda:N (default cuda if available)")
    add("--threads", type=int, metavar="N", help="CPU threads (default: one per core)")
    return run_command_line(execute, parser, arguments)

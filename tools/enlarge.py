"""A checkpoint of a larger shape that computes what a small one does.

Speed at the papers' scale needs weights of that shape, and acceptance needs a model that has
learned something. Where published weights cannot be fetched, this gives both: every channel and
every head of the small model is repeated r times and what reads them is divided by r, layers are
added that write nothing, and ids are added that no text comes to. Up to rounding the logits are the
small model's.

    # to the shapes of Pythia-2.8B and Pythia-70M
    python tools/enlarge.py models/tiny/target FOLDER --hidden 2560 --layers 32 --vocab 50304
    python tools/enlarge.py models/tiny/draft FOLDER --hidden 512 --layers 6 --vocab 50304
"""

import json
import shutil
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs as a file, from anywhere

from cli.errors import Parser, UsageError, run_command_line
from engine.checkpoint import (
    EMBED_IN,
    EMBED_OUT,
    FINAL_NORM,
    LAYER_NAMES,
    first_line,
    load_tensors,
    read_config,
    read_json,
)

NEVER = -60.0  # the logit of an added id


def enlarge_tensors(
    tensors: dict[str, Tensor], r: int, n_layers: tuple[int, int], n_ids: int
) -> dict[str, Tensor]:
    """The tensors of the larger model, float16. n_layers: of the small one, of the large one."""
    embed_in = add_rows(tensors[EMBED_IN], n_ids, tensors[EMBED_IN][0]).repeat(1, r)
    enlarged = {EMBED_IN: embed_in.half()}
    few, many = n_layers
    for index in range(many):
        for name in LAYER_NAMES.values():
            for part in ("weight", "bias"):
                small = tensors.get(f"gpt_neox.layers.{index % few}.{name}.{part}")
                if small is not None:
                    is_silent = index >= few and name in ("attention.dense", "mlp.dense_4h_to_h")
                    large = repeat(small, r) * (not is_silent)
                    enlarged[f"gpt_neox.layers.{index}.{name}.{part}"] = large.half()
    weight, bias = (repeat(tensors[f"{FINAL_NORM}.{part}"], r) for part in ("weight", "bias"))
    head = (tensors.get(EMBED_OUT, tensors[EMBED_IN]) / r).repeat(1, r)  # [V, hidden]
    if n_ids > len(head):
        # The last channel becomes a constant 1 that added ids alone read, each with NEVER; its
        # share of all other logits goes to the channel that it was a copy of.
        original = head.shape[1] // r - 1
        head[:, original] += head[:, -1]
        head[:, -1] = 0.0
        weight[-1], bias[-1] = 0.0, 1.0
        never = torch.zeros(head.shape[1])
        never[-1] = NEVER
        head = add_rows(head, n_ids, never)
    last = {f"{FINAL_NORM}.weight": weight, f"{FINAL_NORM}.bias": bias, EMBED_OUT: head}
    return enlarged | {name: tensor.half() for name, tensor in last.items()}


def repeat(small: Tensor, r: int) -> Tensor:
    """Outputs and inputs r times; each output is then a sum of r times as many, so divided."""
    return small.repeat(r) if small.ndim == 1 else (small / r).repeat(r, r)


def add_rows(small: Tensor, n: int, row: Tensor) -> Tensor:
    return torch.cat([small, row.expand(n - len(small), -1)])


def execute(args: Namespace) -> int:
    source, folder = Path(args.source), Path(args.folder)
    config = read_config(source)
    r, rest = divmod(args.hidden, config.hidden_size)
    if rest or r < 2 or args.layers < config.n_layers or args.vocab < config.vocab_size:
        raise UsageError(
            f"{source} can be enlarged to two or more times hidden size {config.hidden_size}, "
            f"and to no less than {config.n_layers} layers and {config.vocab_size} ids"
        )
    tensors = load_tensors(source, config, torch.device("cpu"), torch.float32)
    enlarged = enlarge_tensors(tensors, r, (config.n_layers, args.layers), args.vocab)
    raw = read_json(source / "config.json")
    raw |= {"hidden_size": args.hidden, "num_hidden_layers": args.layers, "vocab_size": args.vocab}
    raw |= {"num_attention_heads": config.n_heads * r, "tie_word_embeddings": False}
    raw |= {"intermediate_size": config.intermediate_size * r}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(enlarged, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            if name == "tokenizer.json" or (source / name).exists():
                shutil.copy(source / name, folder)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{folder} cannot be written: {first_line(error)}") from error
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="tools/enlarge.py", description=__doc__.splitlines()[0])
    parser.add_argument("source", help="folder of the small checkpoint")
    parser.add_argument("folder", help="where the large one goes, in float16")
    for name, what in (("hidden", "hidden size"), ("layers", "layers"), ("vocab", "ids")):
        parser.add_argument(f"--{name}", type=int, required=True, metavar="N", help=what)
    return run_command_line(execute, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())

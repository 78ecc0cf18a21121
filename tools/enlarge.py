"""A checkpoint of a larger shape that computes what a small one does.

To measure speed at the papers' scale one needs weights of that shape, and for realistic acceptance
a trained model. Without published weights this gives both. Every channel and head of the small
model is repeated r times, and their consumers are divided by r. Added layers write zeros, and added
ids have tiny probabilities. The logits are the small model's up to rounding.

    # to the shapes of Pythia-2.8B and Pythia-70M
    python tools/enlarge.py models/tiny/target large --hidden 2560 --layers 32 --vocab 50304
    python tools/enlarge.py models/tiny/draft large-draft --hidden 512 --layers 6 --vocab 50304
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs as a file, from anywhere

if __name__ == "__main__":
    from cli.start import run_program

    run_program("tools.enlarge")

from argparse import Namespace
from collections.abc import Sequence

import torch
from torch import Tensor

from cli.errors import Parser, UsageError, run_command_line
from engine.checkpoint import load_tensors, published_shapes, read_config
from gpt_neox import EMBEDDING, OUTPUT_HEAD, Config, read_json
from tools.folders import new_folder, write_checkpoint

NEVER = -60.0  # the logit of an added id


def enlarge_tensors(tensors: dict[str, Tensor], small: Config, large: Config) -> dict[str, Tensor]:
    """Return the large model's tensors in float16, by published name."""
    r = large.hidden_size // small.hidden_size
    n_ids = large.vocab_size
    ids = tensors[EMBEDDING]
    enlarged = {EMBEDDING: add_rows(ids, n_ids, ids[0]).repeat(1, r).half()}
    for name, tensor in enlarge_end(tensors, r, n_ids).items():
        enlarged[name] = tensor.half()
    for name in published_shapes(large):
        if name not in enlarged:
            enlarged[name] = enlarge_layers(tensors, name, r, small.num_hidden_layers).half()
    return enlarged


def enlarge_layers(tensors: dict[str, Tensor], name: str, r: int, n_layers: int) -> Tensor:
    """Return the large tensor of a layer, in float32. Layers from n_layers on write zeros."""
    _, _, index, part = name.split(".", 3)  # gpt_neox, layers, 7, mlp.dense_h_to_4h.bias
    large = repeat(tensors[f"gpt_neox.layers.{int(index) % n_layers}.{part}"], r)
    if int(index) >= n_layers and part.startswith(("attention.dense", "mlp.dense_4h_to_h")):
        large.zero_()
    return large


def enlarge_end(tensors: dict[str, Tensor], r: int, n_ids: int) -> dict[str, Tensor]:
    """Return the final norm and the output matrix for n_ids, in float32."""
    norm = "gpt_neox.final_layer_norm"
    weight, bias = (repeat(tensors[f"{norm}.{part}"], r) for part in ("weight", "bias"))
    head = (tensors.get(OUTPUT_HEAD, tensors[EMBEDDING]) / r).repeat(1, r)  # [V, hidden]
    if n_ids > len(head):
        # The last channel becomes a constant 1. Only the added ids read it, with weight NEVER. What
        # it added to the other logits goes to the channel that it is a copy of.
        original = head.shape[1] // r - 1
        head[:, original] += head[:, -1]
        head[:, -1] = 0.0
        weight[-1], bias[-1] = 0.0, 1.0
        never = torch.zeros(head.shape[1])
        never[-1] = NEVER
        head = add_rows(head, n_ids, never)
    return {f"{norm}.weight": weight, f"{norm}.bias": bias, OUTPUT_HEAD: head}


def repeat(small: Tensor, r: int) -> Tensor:
    """Return a tensor with outputs and inputs repeated r times. A matrix is divided by r, because
    each output then sums r times as many inputs."""
    return small.repeat(r) if small.ndim == 1 else (small / r).repeat(r, r)


def add_rows(small: Tensor, n: int, row: Tensor) -> Tensor:
    return torch.cat([small, row.expand(n - len(small), -1)])


def execute(args: Namespace) -> int:
    source, folder = Path(args.source), new_folder(args.folder)
    small = read_config(source)
    r, rest = divmod(args.hidden, small.hidden_size)
    if rest or r < 2 or args.layers < small.num_hidden_layers or args.vocab < small.vocab_size:
        raise UsageError(
            f"{source} can be enlarged to two or more times hidden size {small.hidden_size}, "
            f"and to no less than {small.num_hidden_layers} layers and {small.vocab_size} ids"
        )
    config_json = read_json(source / "config.json") | {
        "hidden_size": args.hidden,
        "num_hidden_layers": args.layers,
        "vocab_size": args.vocab,
        "num_attention_heads": small.num_attention_heads * r,
        "intermediate_size": small.intermediate_size * r,
        "tie_word_embeddings": False,
    }
    tensors = load_tensors(source, small, torch.device("cpu"), torch.float32)
    large = Config.from_json(config_json, {})
    write_checkpoint(folder, enlarge_tensors(tensors, small, large), config_json, source)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="tools/enlarge.py", description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("source", help="folder of the small checkpoint")
    parser.add_argument("folder", help="new folder of the large checkpoint, in float16")
    for name, what in (("hidden", "hidden size"), ("layers", "layers"), ("vocab", "ids")):
        parser.add_argument(f"--{name}", type=int, required=True, metavar="N", help=what)
    return run_command_line(execute, parser, arguments)

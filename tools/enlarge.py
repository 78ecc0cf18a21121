"""A checkpoint of a larger shape that computes what a small one does.

Speed at the papers' scale needs weights of that shape, and acceptance needs a model that has
learned something. Where published weights cannot be fetched, this gives both: every channel and
every head of the small model is repeated r times and what reads them is divided by r, layers are
added that write nothing, and ids are added that no text comes to. Up to rounding the logits are the
small model's. The folder is a new one, and it is there once all of it is.

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

import json
import math
from argparse import Namespace
from collections.abc import Sequence

import torch
from torch import Tensor

from cli.errors import Parser, UsageError, run_command_line
from engine.checkpoint import (
    EMBEDDING,
    HEAD,
    load_tensors,
    parse_config,
    published_shapes,
    read_config,
    read_json,
)
from engine.memory import require_memory
from engine.model import weight_bytes
from gpt_neox import Config
from tools.folders import halved, new_folder, read_unchanged, write_checkpoint

NEVER = -60.0  # the logit of an added id


def enlarge_tensors(tensors: dict[str, Tensor], small: Config, large: Config) -> dict[str, Tensor]:
    """The tensors of the larger model, float16, by published name. Raises UsageError for one that
    float16 cannot hold."""
    r = large.hidden_size // small.hidden_size
    n_ids = large.vocab_size
    ids = tensors[EMBEDDING]
    enlarged = {EMBEDDING: halved(EMBEDDING, add_rows(ids, n_ids, ids[0]).repeat(1, r))}
    for name, tensor in enlarge_end(tensors, r, n_ids).items():
        enlarged[name] = halved(name, tensor)
    for name in published_shapes(large):
        if name not in enlarged:
            enlarged[name] = halved(name, enlarge_layers(tensors, name, r, small.num_hidden_layers))
    return enlarged


def enlarge_layers(tensors: dict[str, Tensor], name: str, r: int, n_layers: int) -> Tensor:
    """The large tensor of this name, of a layer, in float32; those past n_layers write nothing."""
    _, _, index, part = name.split(".", 3)  # gpt_neox, layers, 7, mlp.dense_h_to_4h.bias
    large = repeat(tensors[f"gpt_neox.layers.{int(index) % n_layers}.{part}"], r)
    if int(index) >= n_layers and part.startswith(("attention.dense", "mlp.dense_4h_to_h")):
        large.zero_()
    return large


def enlarge_end(tensors: dict[str, Tensor], r: int, n_ids: int) -> dict[str, Tensor]:
    """The last norm, and the matrix to the logits of n_ids, in float32."""
    norm = "gpt_neox.final_layer_norm"
    weight, bias = (repeat(tensors[f"{norm}.{part}"], r) for part in ("weight", "bias"))
    head = (tensors.get(HEAD, tensors[EMBEDDING]) / r).repeat(1, r)  # [V, hidden]
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
    return {f"{norm}.weight": weight, f"{norm}.bias": bias, HEAD: head}


def repeat(small: Tensor, r: int) -> Tensor:
    """Outputs and inputs r times; each output is then a sum of r times as many, so divided."""
    return small.repeat(r) if small.ndim == 1 else (small / r).repeat(r, r)


def add_rows(small: Tensor, n: int, row: Tensor) -> Tensor:
    return torch.cat([small, row.expand(n - len(small), -1)])


def enlarged_json(raw: dict, config: Config, args: Namespace) -> dict:
    """The large model's config.json, of the small one's as it stands and as it was read. Raises
    UsageError for sizes that it cannot grow to."""
    r, rest = divmod(args.hidden, config.hidden_size)
    if rest or r < 2 or args.layers < config.num_hidden_layers or args.vocab < config.vocab_size:
        raise UsageError(
            f"{args.source} can be enlarged to two or more times hidden size {config.hidden_size}, "
            f"and to no less than {config.num_hidden_layers} layers and {config.vocab_size} ids"
        )
    large = {"hidden_size": args.hidden, "num_hidden_layers": args.layers, "vocab_size": args.vocab}
    large |= {"num_attention_heads": config.num_attention_heads * r, "tie_word_embeddings": False}
    large |= {"intermediate_size": config.intermediate_size * r}
    return raw | large


def execute(args: Namespace) -> int:
    source, folder = Path(args.source), new_folder(args.folder)
    small = read_config(source)
    raw = enlarged_json(read_json(source / "config.json"), small, args)
    large = parse_config(raw)  # as it will be read
    need = weight_bytes(large, torch.float16) + weight_bytes(small, torch.float32)
    largest = max(math.prod(shape) for shape in published_shapes(large).values())
    need += 2 * 4 * largest  # twice in float32, then gone
    require_memory(need, torch.device("cpu"), "making a checkpoint of these sizes")
    files = read_unchanged(source) | {"config.json": json.dumps(raw, indent=2).encode() + b"\n"}
    tensors = load_tensors(source, small, torch.device("cpu"), torch.float32)
    write_checkpoint(folder, enlarge_tensors(tensors, small, large), files)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="tools/enlarge.py", description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("source", help="folder of the small checkpoint")
    parser.add_argument("folder", help="where the large one goes, in float16: a new folder")
    for name, what in (("hidden", "hidden size"), ("layers", "layers"), ("vocab", "ids")):
        parser.add_argument(f"--{name}", type=int, required=True, metavar="N", help=what)
    return run_command_line(execute, parser, arguments)

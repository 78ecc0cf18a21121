"""The embedded pair at the cost of larger models, made once, for --pair.

The embedded pair is so small that calls take longer than their computation, so its speeds say
little about real models. An enlarged pair generates the same text, and its passes read as many
weights as those of a published pair. Every channel and head of the small model is repeated r times,
and their consumers are divided by r. Added layers write zeros, and added ids have tiny
probabilities. The logits are the small model's up to rounding.

A pair is in a folder of models/, in the working folder. Git ignores it, and it may be deleted. This
makes another shape:

    python -m dynatree_lab.benchmark.enlarge models/tiny/target large --hidden 640 --layers 12
"""

if __name__ == "__main__":
    from dynatree_lab.cli.start import run_program

    run_program("dynatree_lab.benchmark.enlarge")  # does not return

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dynatree_lab.cli.options import embedded_pair
from dynatree_lab.cli.program import Parser, print_line, run_command_line
from dynatree_lab.engine.checkpoint import Checkpoint, load_tensors, published_shapes
from dynatree_lab.errors import UsageError
from dynatree_lab.folders import write_checkpoint
from dynatree_lab.pair import TINY
from gpt_neox import EMBEDDING, OUTPUT_HEAD, Config, read_json

VOCABULARY = 50304
EMBEDDED_VOCABULARY = 4096  # ids of the embedded models
# Of target and draft: hidden size, a multiple of the embedded model's, layers and ids
SHAPES = {
    # Pythia-410M and 70M, 1 GB on disk
    "enlarged": {"target": (960, 28, VOCABULARY), "draft": (512, 6, VOCABULARY)},
    # Pythia-2.8B and 70M, 6 GB
    "enlarged_gpu": {"target": (2560, 32, VOCABULARY), "draft": (512, 6, VOCABULARY)},
    # Pythia-2.8B with the embedded draft model, 5 GB
    "enlarged_streamed": {"target": (2560, 32, EMBEDDED_VOCABULARY)},
}
NEVER = -60.0  # the logit of an added id


def enlarged_pair(name: str) -> list[str]:
    """Return the folders of target and draft, relative to the working folder, and make the models
    if they are missing. Raises UsageError if they cannot be written."""
    folders = dict(zip(("target", "draft"), embedded_pair(), strict=True))
    for role, shape in SHAPES[name].items():
        folder = Path("models", name, role)
        if not folder.exists():
            print_line(f"making {folder}, once")
            enlarge(TINY / role, folder, *shape)
        folders[role] = str(folder)
    return list(folders.values())


def enlarge(source: Path, folder: Path, hidden_size: int, n_layers: int, vocab_size: int) -> None:
    """Write a checkpoint of a larger shape, in float16, that computes what `source` does. Raises
    UsageError for a shape that is not larger."""
    small = Checkpoint(source).config
    r, rest = divmod(hidden_size, small.hidden_size)
    if rest or r < 2 or n_layers < small.num_hidden_layers or vocab_size < small.vocab_size:
        raise UsageError(
            f"{source} can be enlarged to two or more times hidden size {small.hidden_size}, and "
            f"to no less than {small.num_hidden_layers} layers and {small.vocab_size} ids"
        )
    config_json = read_json(source / "config.json") | {
        "hidden_size": hidden_size,
        "num_hidden_layers": n_layers,
        "vocab_size": vocab_size,
        "num_attention_heads": small.num_attention_heads * r,
        "intermediate_size": small.intermediate_size * r,
        "tie_word_embeddings": False,
    }
    tensors = load_tensors(source, small, torch.device("cpu"), torch.float32)
    large = Config.from_json(config_json)
    write_checkpoint(folder, enlarge_tensors(tensors, small, large), config_json, source)


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
        # it added to the other logits goes to the channel that it is a copy of
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
    folder = Path(args.folder)
    if folder.exists():
        raise UsageError(f"{folder} exists already; use a new folder")
    enlarge(Path(args.source), folder, args.hidden, args.layers, args.vocab)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    description = "Write a checkpoint of a larger shape that computes what a small one does."
    parser = Parser(prog="python -m dynatree_lab.benchmark.enlarge", description=description)
    parser.add_argument("source", help="folder of the small checkpoint")
    parser.add_argument("folder", help="new folder of the large checkpoint, in float16")
    parser.add_argument("--hidden", type=int, required=True, metavar="N", help="hidden size")
    parser.add_argument("--layers", type=int, required=True, metavar="N", help="layers")
    ids = f"ids (default {VOCABULARY})"
    parser.add_argument("--vocab", type=int, default=VOCABULARY, metavar="N", help=ids)
    return run_command_line(execute, parser, arguments)

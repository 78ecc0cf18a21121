"""Models of given shapes with random weights, made on their device, for measurements on a GPU.

The time of a pass does not depend on the values of its weights, so no checkpoint has to be made,
copied or read. The default shapes are those of the default pair, Pythia-2.8B and Pythia-70M.

    model = random_model(PYTHIA["draft"], torch.device("cuda"), torch.bfloat16)
"""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from cli.errors import UsageError
from engine.checkpoint import published_shapes, read_config
from engine.model import FastGPTNeoX
from gpt_neox import Config

PYTHIA = {
    "target": Config(50304, 2560, 32, 32, 10240, eos_ids=(0,)),  # 2.8B
    "draft": Config(50304, 512, 6, 8, 2048, eos_ids=(0,)),  # 70M
}
DRY = {"target": Config(384, 160, 2, 2, 640), "draft": Config(384, 128, 1, 2, 512)}
DTYPES = {"target": torch.float16, "draft": torch.bfloat16}  # of the default pair on a GPU
DEVIATION = 0.02  # of random matrices and biases; keys and logits then stay small


class RandomTensors(Mapping[str, Tensor]):
    """Random weights by their published names. Each lookup makes a tensor on the device."""

    def __init__(self, config: Config, device: torch.device, dtype: torch.dtype):
        self.shapes = published_shapes(config)
        self.options = {"device": device, "dtype": dtype}
        self.generator = torch.Generator(device).manual_seed(0)

    def __getitem__(self, name: str) -> Tensor:
        if "norm" in name and name.endswith("weight"):
            return torch.ones(self.shapes[name], **self.options)
        random = torch.randn(self.shapes[name], generator=self.generator, **self.options)
        return random.mul_(DEVIATION)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def random_model(config: Config, device: torch.device, dtype: torch.dtype) -> FastGPTNeoX:
    """Return a fast model of this shape with random weights."""
    return FastGPTNeoX.from_tensors(config, RandomTensors(config, device, dtype))


def add_shape_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the tools that measure random models: those of read_shapes, and a file."""
    for name, size in (("target", "2.8B"), ("draft", "70M")):
        shape = f"folder whose config.json has the shape of the {name} (default Pythia-{size})"
        parser.add_argument(f"--{name}", metavar="FOLDER", help=shape)
    parser.add_argument("--dry", action="store_true", help="tiny shapes: does this run?")
    parser.add_argument("--output", required=True, metavar="FILE", help="JSON file of the results")


def read_shapes(args: argparse.Namespace) -> dict[str, Config]:
    """Return the shapes of target and draft. Raises CheckpointError for an invalid folder."""
    shapes = DRY if args.dry else PYTHIA
    folders = {"target": args.target, "draft": args.draft}
    return {
        name: read_config(Path(folders[name])) if folders[name] else shapes[name] for name in shapes
    }


def describe_shapes(shapes: Mapping[str, Config]) -> str:
    """Return the shapes in words, as "target 32 x 2560, draft 6 x 512", layers x hidden size."""
    return ", ".join(f"{r} {c.num_hidden_layers} x {c.hidden_size}" for r, c in shapes.items())


def require_gpu() -> torch.device:
    """Return the CUDA device. Raises UsageError if there is none."""
    if not torch.cuda.is_available():
        raise UsageError("torch finds no CUDA device, and these measurements need one")
    return torch.device("cuda")

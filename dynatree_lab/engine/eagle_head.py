"""Checkpoints of EAGLE heads (methods/eagle.py), and heads with the engine's fast passes.

The folder of a head has a config.json of model_type "eagle_head", and the head's own weights as
safetensors: fc and one layer. All other weights and the tokenizer are the target's. The config.json
has the target's sizes and name. A digest of the target's final norm, which is small, tells targets
of equal sizes apart.

    folders = Path("models/tiny/eagle"), Path("models/tiny/target")
    head = load_head(*folders, torch.device("cpu"), torch.float32)
"""

from dataclasses import fields, replace
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor, nn

from dynatree_lab.engine.cache import FastCache
from dynatree_lab.engine.checkpoint import (
    Checkpoint,
    CheckpointError,
    StoredTensors,
    find_checkpoint,
    find_tensors,
    load_tensors,
    published_shapes,
    read_json,
    reading,
)
from dynatree_lab.engine.inputs import PassInputs
from dynatree_lab.engine.memory import memory_for
from dynatree_lab.engine.model import FastGPTNeoX
from dynatree_lab.methods.eagle import EagleHead, with_states
from gpt_neox import EMBEDDING, OUTPUT_HEAD, Config

NORM = ("gpt_neox.final_layer_norm.weight", "gpt_neox.final_layer_norm.bias")
LAYER = "gpt_neox.layers.0."
NEEDED = ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size")
NEEDED += ("target", "target_digest")  # keys of config.json without a default


class FastHead(EagleHead, FastGPTNeoX):
    """A head with the fast passes of the engine."""

    def new_memory(self, n_slots: int) -> tuple[Tensor, Tensor]:
        kv, rotary = super().new_memory(n_slots)
        return with_states(kv), rotary

    def before_pass(self, cache: FastCache, inputs: PassInputs) -> None:
        self.take_states(cache, len(inputs.tokens))


def load_head(
    folder: Path | Checkpoint,
    target_folder: Path | Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
) -> FastHead:
    """Load a head, and from the target's folder copies of the weights that both have.

    Raises CheckpointError if a file is invalid, or if the head belongs to another target. Raises
    OutOfMemory.
    """
    folder = find_checkpoint(folder).folder
    target_checkpoint = find_checkpoint(target_folder)
    target_folder, target_config = target_checkpoint.folder, target_checkpoint.config
    config = replace(target_config, num_hidden_layers=1)
    shapes = head_shapes(config)
    with memory_for(f"the weights of {folder}"):
        target = load_tensors(target_folder, target_config, device, dtype)
        require_target(folder, target_folder, config, target)
        own = StoredTensors(find_tensors(folder, shapes, shapes), device, dtype)
        shared = [name for name in (EMBEDDING, *NORM, OUTPUT_HEAD) if name in target.files]
        weights = {name: target[name] for name in shared}
        weights |= {name: own[name] for name in shapes if name.startswith(LAYER)}
        head = FastHead.from_tensors(config, weights)
        fc = nn.Linear(2 * config.hidden_size, config.hidden_size, device="meta")
        fc.load_state_dict({name: own[f"fc.{name}"] for name in ("weight", "bias")}, assign=True)
        head.add_state_input(fc.requires_grad_(False))
        return head


def head_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a head's own tensors, by name. config: the target's, with one layer."""
    hidden = config.hidden_size
    layer = {k: v for k, v in published_shapes(config).items() if k.startswith(LAYER)}
    return {"fc.weight": (hidden, 2 * hidden), "fc.bias": (hidden,)} | layer


def require_target(
    folder: Path, target_folder: Path, config: Config, target: StoredTensors
) -> None:
    """Raise CheckpointError if the sizes of a head differ from config, which is the target's with
    one layer, or if its digest is not the target's."""
    raw = read_json(folder / "config.json")
    for name in NEEDED:
        if name not in raw:
            raise CheckpointError(f"{folder / 'config.json'} has no {name}")
    with reading(folder):
        own = Config.from_json(raw | {"model_type": "gpt_neox", "num_hidden_layers": 1})
    head = f"{folder} is a head of {raw['target']!r:.80}"
    for f in fields(Config):
        value, needed = getattr(own, f.name), getattr(config, f.name)
        # A target's EOS ids may be in generation_config.json, which a head lacks
        if value != needed and f.name != "eos_ids":
            what = f"whose {f.name} is {value}, while {target_folder} has {needed}"
            raise CheckpointError(f"{head}, {what}; use a head of this target")
    if raw["target_digest"] != target_digest(target):
        what = f"whose weights differ from those of {target_folder}"
        raise CheckpointError(f"{head}, {what}; use a head of this target")


def target_digest(target: StoredTensors) -> str:
    """Return a digest of a target's final norm. It is read in float32, so that it does not depend
    on the dtype of a run."""
    stored = replace(target, dtype=torch.float32, device=torch.device("cpu"))
    return sha256(torch.cat([stored[name] for name in NORM]).numpy().tobytes()).hexdigest()

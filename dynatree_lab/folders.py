"""The folder of a new checkpoint, written whole or not at all.

write_checkpoint(Path("my-draft"), tensors, {"model_type": "gpt_neox"}, source)
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dynatree_lab.errors import UsageError

UNCHANGED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
# transformers 4 and 5 have one key each
DTYPE = {"torch_dtype": "float16", "dtype": "float16"}


def write_checkpoint(
    folder: Path, tensors: Mapping[str, Tensor], config_json: dict, source: Path | None
) -> None:
    """Write a checkpoint in float16. Leaves nothing if that fails. Raises UsageError.

    Args:
        tensors: by published name.
        source: a checkpoint with the same tokenizer, None for a checkpoint without one.
    """
    part = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(part, ignore_errors=True)  # of a run that was killed
    try:
        part.mkdir(parents=True)
        half = {name: tensor.detach().half() for name, tensor in tensors.items()}
        save_file(half, part / "model.safetensors", metadata={"format": "pt"})
        (part / "config.json").write_text(json.dumps(config_json | DTYPE, indent=2) + "\n")
        for file in [source / name for name in UNCHANGED] if source else []:
            if file.exists():
                shutil.copy(file, part)
        # safetensors makes its file readable by its owner only
        shutil.copymode(part / "config.json", part / "model.safetensors")
        part.rename(folder)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)

"""Tests that what does not fit in memory is refused in one line that says what it was for."""

from pathlib import Path

import pytest
import torch
from fast import random_model
from safetensors import SafetensorError
from small import random_config, random_tensors, write_checkpoint

from dynatree_lab.engine import memory
from dynatree_lab.engine.memory import OutOfMemory, free_memory
from dynatree_lab.engine.model import FastGPTNeoX

CPU = torch.device("cpu")


def test_free_memory_of_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check Linux's estimate, which counts files that the system can drop as free. Without it, as
    on Windows, nothing is refused."""
    monkeypatch.setattr(memory, "MEMORY_INFO", tmp_path / "meminfo")
    assert free_memory(CPU) > 10**18
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemFree: 7 kB\nMemAvailable:    20 kB\n")
    assert free_memory(CPU) == 20 * 1024


def test_weights_that_do_not_fit_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, random_config(), random_tensors(random_config(), 1))
    monkeypatch.setattr(memory, "free_memory", lambda device: 10**3)
    with pytest.raises(OutOfMemory, match=f"weights of {tmp_path} needs 0.00 GB on cpu, 0.00 GB"):
        FastGPTNeoX.from_pretrained(tmp_path)


REFUSALS = [  # function that gets no memory, its error
    ("dynatree_lab.engine.checkpoint.safe_open", OSError(12, "Cannot allocate memory")),
    (
        "dynatree_lab.engine.checkpoint.safe_open",
        SafetensorError("Cannot allocate memory (os error 12)"),
    ),
    (
        "dynatree_lab.engine.checkpoint.safe_open",
        RuntimeError("unable to mmap: Cannot allocate memory (12)"),
    ),
    ("torch.Tensor.to", RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to")),
    ("dynatree_lab.engine.linear.OneDnnLinear", RuntimeError("could not create a memory object")),
]


@pytest.mark.parametrize(("place", "error"), REFUSALS)
def test_memory_that_is_refused_is_named(
    place: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check each error of an allocation. A process may be allowed less memory than the machine has,
    which shows only when it allocates. If packing a matrix fails, no other kind is tried."""

    def refuse(*_: object, **__: object) -> None:
        raise error

    write_checkpoint(tmp_path, random_config(), random_tensors(random_config(), 15))
    monkeypatch.setattr("dynatree_lab.engine.linear.is_exact_in_half", lambda _: False)
    monkeypatch.setattr("dynatree_lab.engine.linear.MIN_ONEDNN_BYTES", 0)
    monkeypatch.setattr(place, refuse)
    with pytest.raises(OutOfMemory, match=f"out of memory for the weights of {tmp_path}"):
        FastGPTNeoX.from_pretrained(tmp_path)


def test_a_cache_that_is_too_large_is_named() -> None:
    with pytest.raises(OutOfMemory, match="out of memory for a cache of 1000000000000 tokens"):
        random_model(0).new_cache(10**12)


def test_a_model_of_many_positions_takes_memory_for_those_in_use() -> None:
    """Check the size of the rotary table. It was once made for all positions, so a model of 10^9
    positions ended in a RuntimeError of the allocator."""
    assert len(random_model(15, max_position_embeddings=10**7).new_cache(40).rotary) == 40

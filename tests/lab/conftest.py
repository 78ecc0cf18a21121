"""Fixtures of the tests of dynatree_lab."""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small import TINY

from dynatree_lab.engine.checkpoint import DTYPES
from dynatree_lab.engine.model import FastGPTNeoX

if "pretend_cuda" not in sys.modules:
    collect_ignore = ["pretend_cuda"]  # tests on a pretended device: python tests/lab/pretend_cuda

# The workers and programs that tests start share the cores. A thread that spins while it waits for
# another one would keep that one from running
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@functools.cache
def load_tiny(load: Callable[..., FastGPTNeoX], *arguments: object) -> FastGPTNeoX:
    """Load an embedded model by FastGPTNeoX.from_pretrained, which takes longer than most tests."""
    return load(FastGPTNeoX, *arguments)


@pytest.fixture(autouse=True)
def load_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the fast models of the embedded pair share their weights on a CPU.

    Each has settings and memory of its own. The reference model is loaded anew, because training
    changes its weights.
    """
    load = FastGPTNeoX.from_pretrained.__func__

    def from_pretrained(
        cls: type[FastGPTNeoX],
        name_or_path: str | Path,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | str = torch.float32,
    ) -> FastGPTNeoX:
        folder = Path(str(name_or_path)).absolute()
        if folder.parent != TINY or str(device) != "cpu" or cls is not FastGPTNeoX:
            return load(cls, name_or_path, device, dtype)
        shared = load_tiny(load, folder, "cpu", DTYPES.get(dtype, dtype))
        model = object.__new__(FastGPTNeoX)
        model.__dict__ |= shared.__dict__ | {"reusable": [], "invariance_results": {}}
        return model

    monkeypatch.setattr(FastGPTNeoX, "from_pretrained", classmethod(from_pretrained))

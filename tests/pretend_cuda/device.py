"""Puts the pretended device into this process's torch.

torch keeps one guard for each kind of device in a table, whose place for CUDA is empty in a build
without it. The guard of the meta device, which does nothing, goes there; so torch's own C++ runs as
in a build with CUDA, and dispatch.py sees what it asks for.
"""

import atexit
import ctypes
from pathlib import Path

import torch

from . import nccl, runtime
from .attention import fused_sdp_choice, scaled_dot_product_attention
from .dispatch import MODE
from .graphs import CUDAGraph
from .timeline import timeline

VERSIONS = ("2.11", "2.12", "2.13")  # of torch, whose inside this knows
GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
N_DEVICE_TYPES = 21
CPU = 0  # places in the table
CUDA = 1
META = 14


def install() -> None:
    """Pretend from now on."""
    version = ".".join(torch.__version__.split(".")[:2])
    assert version in VERSIONS, f"torch {version}: pretends with {', '.join(VERSIONS)} only"
    put_guard()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=) by operations we see
    torch._C._host_emptyCache = lambda: None  # which torch.cuda.graph calls
    for name, function in (runtime.FUNCTIONS | {"CUDAGraph": CUDAGraph}).items():
        setattr(torch.cuda, name, function)
    for name, function in nccl.FUNCTIONS.items():
        setattr(torch.distributed, name, function)
    torch.Generator = runtime.Generator
    torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention
    torch._fused_sdp_choice = fused_sdp_choice
    MODE.__enter__()
    atexit.register(timeline.settle)


def put_guard() -> None:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * N_DEVICE_TYPES).in_dll(library, GUARDS)
    assert guards[CUDA] is None, "this torch has a CUDA of its own, or pretends already"
    assert guards[CPU] and guards[META], "torch's table of device guards is not as it was"
    guards[CUDA] = guards[META]

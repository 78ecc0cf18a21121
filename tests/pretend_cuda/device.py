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
    torch._C._host_emptyCache = runtime.empty_cache  # as torch.cuda.graph does
    for name in runtime.__all__:
        setattr(torch.cuda, name, getattr(runtime, name))
    for name in nccl.__all__:
        setattr(torch.distributed, name, getattr(nccl, name))
    torch.cuda.CUDAGraph = CUDAGraph
    torch.Generator = runtime.Generator
    torch.tensor = tensor
    torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention
    torch._fused_sdp_choice = fused_sdp_choice
    MODE.__enter__()
    atexit.register(timeline.finish)


def put_guard() -> None:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * N_DEVICE_TYPES).in_dll(library, GUARDS)
    assert guards[CUDA] is None, "this torch has a CUDA of its own, or pretends already"
    assert guards[CPU] and guards[META], "torch's table of device guards is not as it was"
    guards[CUDA] = guards[META]


host_tensor = torch.tensor


def tensor(data: object, *, pin_memory: bool = False, **options: object) -> torch.Tensor:
    """torch.tensor, whose own way to pinned memory no dispatch sees."""
    made = host_tensor(data, **options)
    return made.pin_memory() if pin_memory else made

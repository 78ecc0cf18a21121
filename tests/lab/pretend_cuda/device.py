"""Installation of the pretended device in this process's torch.

torch has a table with one guard for each kind of device. In a build without CUDA, the place for
CUDA is empty. The guard of the meta device, which does nothing, is put there. Then torch's own C++
runs as in a build with CUDA, and dispatch.py sees the operations that it calls.
"""

import atexit
import ctypes
from pathlib import Path

import torch

from . import runtime
from .attention import scaled_dot_product_attention
from .dispatch import MODE
from .graphs import CUDAGraph
from .timeline import timeline

VERSIONS = ("2.11", "2.12", "2.13")  # of torch, whose internals this file relies on
GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
N_DEVICE_TYPES = 21
CPU = 0  # indices of the table
CUDA = 1
META = 14


def install() -> None:
    """Replace torch's CUDA functions by those of the pretended device, for the whole process."""
    version = ".".join(torch.__version__.split(".")[:2])
    assert version in VERSIONS, f"torch {version}: pretends with {', '.join(VERSIONS)} only"
    put_guard()
    torch._C._set_only_lift_cpu_tensors(True)  # makes torch.tensor(..., device=) dispatch
    torch._C._host_emptyCache = lambda: None  # torch.cuda.graph calls it
    for name, function in (runtime.FUNCTIONS | {"CUDAGraph": CUDAGraph}).items():
        setattr(torch.cuda, name, function)
    torch.Generator = runtime.Generator
    torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention
    MODE.__enter__()
    atexit.register(timeline.settle)


def put_guard() -> None:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * N_DEVICE_TYPES).in_dll(library, GUARDS)
    assert guards[CUDA] is None, "this torch has a CUDA of its own, or pretends already"
    assert guards[CPU] and guards[META], "torch's table of device guards is not as it was"
    guards[CUDA] = guards[META]

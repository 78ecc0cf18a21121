"""A pretended nccl, on top of gloo, between processes that each have a pretended device.

A collective of nccl is an operation of the device: the host does not wait for it, a capture records
it, and a replay runs it. Where ranks would hang on a GPU, this module raises an error:

- not all ranks reach a collective within seconds, or they reach different ones
- a communicator is destroyed while graphs with its collectives exist
"""

import zlib
from collections.abc import Callable
from datetime import timedelta
from functools import partial, wraps

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from .dispatch import Operation, run
from .graphs import CUDAGraph
from .tensors import CudaTensor, tensors_in
from .timeline import project_line, timeline

LIMIT = timedelta(seconds=20)  # until all ranks have reached a collective of nccl
NCCL: dict[dist.ProcessGroup, "Communicator"] = {}  # by gloo's group
host_new_group = dist.new_group
host_all_gather = dist.all_gather
host_destroy = dist.destroy_process_group


class Communicator:
    """The nccl communicator of a group."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.captured: dict[CUDAGraph, list[str]] = {}  # its collectives, in order

    def submit(self, host: Callable, args: tuple, options: dict) -> None:
        """Submit a collective to the device. host: torch.distributed's function for it."""
        name = f"nccl {host.__name__}"
        what = f"{name} of {[(tensor.shape, tensor.dtype) for tensor in tensors_in(args)]}"
        graph = timeline.capture
        if graph is None:
            self.require_same([what])
        elif graph in self.captured:
            self.captured[graph].append(what)
        else:
            self.captured[graph] = [what]
            graph.record(self.require_same, (), {"what": self.captured[graph]})
        carry_out = partial(self.carry_out, host)
        run(carry_out, Operation(name, written=(0,)), args, options)

    def carry_out(self, host: Callable, *args: object, **options: object) -> None:
        with _disable_current_modes():
            host(*args, group=self.group, **options)

    def require_same(self, what: list[str]) -> None:
        """Raise RuntimeError unless every rank has reached the same collectives."""
        with _disable_current_modes():
            own = torch.tensor([zlib.crc32(str(what).encode())])
            marks = [torch.zeros_like(own) for _ in range(dist.get_world_size(self.group))]
            host_all_gather(marks, own, group=self.group)
        if any(mark != own for mark in marks):
            raise RuntimeError(f"not every rank has come to {what[0]}, as one has")


def wrap_collective(host: Callable) -> Callable:
    """Return a collective of torch.distributed that also takes tensors of the device."""

    @wraps(host)
    def collective(*args: object, group: dist.ProcessGroup | None = None, **options) -> object:
        tensors = tensors_in(args)
        communicator = NCCL.get(group)
        if any(isinstance(tensor, CudaTensor) != bool(communicator) for tensor in tensors):
            raise RuntimeError(f"the group is of another kind of device, at {project_line()}")
        if communicator is None:
            return host(*args, group=group, **options)
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise ValueError(f"Tensors must be contiguous: {project_line()}")
        return communicator.submit(host, args, options)

    return collective


def new_group(backend: str | None = None, **options: object) -> dist.ProcessGroup:
    if backend != "nccl":
        return host_new_group(backend=backend, **options)
    group = host_new_group(backend="gloo", **options | {"timeout": LIMIT})
    NCCL[group] = Communicator(group)
    return group


def destroy_process_group() -> None:
    for communicator in NCCL.values():
        n_graphs = sum(graph.is_done for graph in communicator.captured)
        if n_graphs:
            # A GPU would hang and raise nothing
            raise AssertionError(f"nccl would wait for ever for {n_graphs} graphs to be gone")
    NCCL.clear()
    host_destroy()


FUNCTIONS = {  # of torch.distributed
    "all_gather": wrap_collective(host_all_gather),
    "all_reduce": wrap_collective(dist.all_reduce),
    "destroy_process_group": destroy_process_group,
    "new_group": new_group,
}

"""nccl between processes that each pretend a device of their own: on top of gloo.

A collective of nccl is an operation of the device: nobody waits for it, a capture records it and a
replay carries it out. Where ranks would wait for each other for ever on a GPU, an error is raised:
if not all of them come to a collective within seconds or if they come to different ones, and if a
communicator is destroyed while there are graphs with its collectives.
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

LIMIT = timedelta(seconds=20)  # for all ranks to come to a collective of nccl
NCCL: dict[dist.ProcessGroup, "Communicator"] = {}  # what there is of it, by gloo's group
host_new_group = dist.new_group
host_all_gather = dist.all_gather
host_destroy = dist.destroy_process_group


class Communicator:
    """What nccl has for a group."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.captured: dict[CUDAGraph, list[str]] = {}  # the collectives of each, in order

    def submit(self, host: Callable, args: tuple, options: dict) -> None:
        """A collective is asked of the device; host: torch.distributed's function for it."""
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
        """Raise unless every rank has come to the same collectives."""
        with _disable_current_modes():
            own = torch.tensor([zlib.crc32(str(what).encode())])
            marks = [torch.zeros_like(own) for _ in range(dist.get_world_size(self.group))]
            host_all_gather(marks, own, group=self.group)
        if any(mark != own for mark in marks):
            raise RuntimeError(f"not every rank has come to {what[0]}, as one has")


def stand_in(host: Callable) -> Callable:
    """A collective of torch.distributed, for tensors of the device as well."""

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
            # On a GPU there is no error that could be caught
            raise AssertionError(f"nccl would wait for ever for {n_graphs} graphs to be gone")
    NCCL.clear()
    host_destroy()


FUNCTIONS = {  # of torch.distributed
    "all_gather": stand_in(host_all_gather),
    "all_reduce": stand_in(dist.all_reduce),
    "destroy_process_group": destroy_process_group,
    "new_group": new_group,
}

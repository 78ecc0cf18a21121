"""Dispatch of every operation of torch: it is checked, and run or captured.

A TorchDispatchMode receives all operations, also those on host tensors only. An operation that is
composed of others is decomposed first, as on a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .copies import COPIES, copy, run_on_host
from .streams import record_use
from .tensors import CudaTensor, is_cuda, map_nested, poison, tensors_in, unwrap, wrap
from .timeline import timeline

aten = torch.ops.aten
UNINITIALIZED = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
WITHOUT_KERNEL = UNINITIALIZED | {"_unsafe_view", "_local_scalar_dense"}
DATA_DEPENDENT = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
CUDA_ONLY = {  # not on CPUs
    aten.mm.dtype: lambda a, b, dtype: a.to(dtype) @ b.to(dtype),
    aten.mm.dtype_out: lambda a, b, dtype, out: out.copy_(a.to(dtype) @ b.to(dtype)),
}


@dataclass(frozen=True)
class Operation:
    """The properties of an operation that its dispatch depends on."""

    name: str
    is_composite: bool = False  # composed of other operations
    is_view: bool = False
    is_data_dependent: bool = False  # the host needs its result, or the shape of it
    takes_scalar: bool = False  # an argument may be a scalar on the host
    written: tuple[int | str, ...] = ()  # arguments that it writes to, by index or name


@cache
def describe_operation(func: torch._ops.OpOverload) -> Operation:
    name = func.name().removeprefix("aten::").split(".")[0]
    schema = func._schema
    written = tuple(
        argument.name if argument.kwarg_only else place
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info and argument.alias_info.is_write
    )
    has_alias = any(result.alias_info for result in schema.returns)
    return Operation(
        name=name,
        is_composite=torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), "CompositeImplicitAutograd"
        ),
        is_view=has_alias and not written,
        is_data_dependent=not DATA_DEPENDENT.isdisjoint(func.tags),
        takes_scalar=torch.Tag.pointwise in func.tags or name == "fill_",
        written=written,
    )


class PretendedDevice(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here uses dynamo, and skipping it takes a quarter of the time

    def __torch_dispatch__(
        self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        return dispatch(func, args, kwargs or {})


MODE = PretendedDevice()


def dispatch(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> object:
    """Run one operation, on whichever device its tensors are."""
    tensors = tensors_in([args, kwargs])
    hosts = [tensor for tensor in tensors if not isinstance(tensor, CudaTensor)]
    # In inference mode `to` arrives here without being decomposed, its device as second argument
    target = args[1] if func is aten.to.device else kwargs.get("device")
    is_ours = len(hosts) < len(tensors)
    if not is_ours and not is_cuda(target):
        return run_on_host(func, args, kwargs)
    operation = describe_operation(func)
    if operation.name == "_conj":  # a wrapper cannot be marked as conjugate
        with torch.inference_mode(args[0].is_inference()):
            return dispatch(aten._conj_physical.default, args, kwargs)
    if operation.is_composite:
        with MODE:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    if func in COPIES and is_crossing(func, args, target):
        return copy(func, args, kwargs)
    if target is not None and not is_cuda(target):
        return run_on_host(func, map_nested(unwrap, args), kwargs)
    if is_ours:
        for host in hosts:
            check_mixing(operation, args, host)
    if operation.is_data_dependent:
        timeline.wait(operation.name)
    return run(func, operation, args, kwargs)


def is_crossing(func: Callable, args: tuple, target: torch.device | None) -> bool:
    """Whether a copy is between host and device."""
    is_ours = isinstance(args[0], CudaTensor)
    if func is aten.copy_.default:
        return is_ours != isinstance(args[1], CudaTensor)
    return target is not None and is_ours != is_cuda(target)


def check_mixing(operation: Operation, args: tuple, host: Tensor) -> None:
    """Raise RuntimeError if torch does not let this host tensor meet a CUDA tensor."""
    if not operation.takes_scalar or host.ndim or (operation.written and args[0] is host):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 "
            f"and cpu! ({operation.name}, host tensor {tuple(host.shape)})"
        )


def run(func: Callable, operation: Operation, args: tuple, kwargs: dict) -> object:
    """Run or capture an operation on the device."""
    func = CUDA_ONLY.get(func, func)
    if operation.name == "detach_":  # there is no graph of gradients
        return args[0]
    if operation.is_view:
        return map_nested(wrap, func(*map_nested(unwrap, args), **map_nested(unwrap, kwargs)))
    if kwargs.get("generator") is not None:
        timeline.forbid_capture("a generator that the graph does not know")
    launch(operation, args, kwargs)
    use_memory(operation, args, kwargs)
    if operation.written:
        return write(func, operation, args, kwargs)
    return make(func, operation, args, kwargs)


def launch(operation: Operation, args: tuple, kwargs: dict) -> None:
    """Submit an operation. In a capture, raise if it has not run before.

    In its first run on such types and shapes, a GPU chooses and loads kernels, and libraries
    prepare for them. A capture does not permit this.
    """
    if operation.name in WITHOUT_KERNEL:
        return
    given = [(tensor.dtype, tensor.shape) for tensor in tensors_in([args, kwargs])]
    kernel = (operation.name, *given, kwargs.get("dtype"))
    if timeline.capture is None:
        timeline.loaded.add(kernel)
        timeline.submit()
    elif kernel not in timeline.loaded:
        timeline.forbid_capture(f"first run of {operation.name}")


def use_memory(operation: Operation, args: tuple, kwargs: dict) -> None:
    """Check and record which memory an operation reads and writes."""
    written = [kwargs.get(key) if isinstance(key, str) else args[key] for key in operation.written]
    ours = [tensor for tensor in tensors_in([args, kwargs]) if isinstance(tensor, CudaTensor)]
    written = [tensor for tensor in ours if any(tensor is each for each in tensors_in(written))]
    record_use([tensor for tensor in ours if all(tensor is not w for w in written)], written)


def write(func: Callable, operation: Operation, args: tuple, kwargs: dict) -> object:
    """Run or capture an operation that writes to its arguments, and return these."""
    if timeline.capture is None:
        func(*map_nested(unwrap, args), **map_nested(unwrap, kwargs))
    else:
        timeline.capture.record(func, args, kwargs)
    written = [kwargs.get(key) if isinstance(key, str) else args[key] for key in operation.written]
    return written[0] if len(written) == 1 else tuple(written)


def make(func: Callable, operation: Operation, args: tuple, kwargs: dict) -> object:
    """Run or capture an operation that makes new tensors."""
    result = map_nested(wrap, func(*map_nested(unwrap, args), **map_nested(unwrap, kwargs)))
    made = [outer for outer in tensors_in([result]) if outer.owner is None]
    record_use([], made)
    capture = timeline.capture
    if capture and made:  # nothing is made if the result shares the memory of an argument
        if operation.name in UNINITIALIZED:
            capture.record(poison, tuple(made), {})
        else:
            capture.record(func, args, kwargs, [outer.inner for outer in made])
    elif operation.name in UNINITIALIZED:
        for outer in made:
            poison(outer.inner)
    return result

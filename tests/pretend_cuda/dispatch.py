"""Every operation of torch on its way: checked, counted, and carried out or captured.

A TorchDispatchMode sees them all, those of the host alone too. An operation that is made of others
is taken apart first, as a GPU would run it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .copies import COPIES, copy, on_host
from .runtime import require_own
from .tensors import CudaTensor, is_cuda, mapped, poison, tensors_in, unwrap, wrap
from .timeline import project_line, timeline

aten = torch.ops.aten
FRESH = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
N_KERNELS = dict.fromkeys(FRESH, 0) | {"_unsafe_view": 0}  # of an operation, where not one
N_KERNELS |= {"_local_scalar_dense": 0, "topk": 22, "sort": 4, "eye": 2, "nonzero": 3}  # 50,304 ids
READING = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
STAND_INS = {aten.mm.dtype: lambda a, b, dtype: a.to(dtype) @ b.to(dtype)}  # what CUDA alone has


@dataclass(frozen=True)
class Operation:
    """What has to be known of one."""

    name: str
    n_kernels: int = 1
    is_composite: bool = False  # made of others
    is_view: bool = False
    is_reading: bool = False  # its result, or the shape of that, is content on the host
    takes_scalar: bool = False
    written: tuple[int | str, ...] = ()  # arguments, by place or name


@cache
def operation(func: torch._ops.OpOverload) -> Operation:
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
        n_kernels=N_KERNELS.get(name, 1),
        is_composite=torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), "CompositeImplicitAutograd"
        ),
        is_view=has_alias and not written,
        is_reading=not READING.isdisjoint(func.tags),
        takes_scalar=torch.Tag.pointwise in func.tags or name == "fill_",
        written=written,
    )


class PretendedDevice(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip what nobody asks for here would cost a quarter of the time

    def __torch_dispatch__(
        self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        return dispatch(func, args, kwargs or {})


MODE = PretendedDevice()


def dispatch(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> object:
    """Carry out one operation, wherever its tensors are."""
    tensors = tensors_in([args, kwargs])
    hosts = [tensor for tensor in tensors if not isinstance(tensor, CudaTensor)]
    # In inference mode, where `to` is not taken apart before it comes here, one has it by place
    target = args[1] if func is aten.to.device else kwargs.get("device")
    is_ours = len(hosts) < len(tensors)
    if not is_ours and not is_cuda(target):
        return on_host(func, args, kwargs)
    if is_cuda(target):
        require_own(target)
    known = operation(func)
    if known.name == "_conj":  # that a wrapper is conjugate cannot be noted on it
        with torch.inference_mode(args[0].is_inference()):
            return dispatch(aten._conj_physical.default, args, kwargs)
    if known.is_composite:
        with MODE:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    if func in COPIES and is_crossing(func, args, target):
        return copy(func, args, kwargs)
    if target is not None and not is_cuda(target):
        return on_host(func, mapped(unwrap, args), kwargs)
    if is_ours:
        for host in hosts:
            check_mixing(known, args, host)
    if known.is_reading:
        timeline.wait(known.name)
    return run(func, known, args, kwargs)


def is_crossing(func: Callable, args: tuple, target: torch.device | None) -> bool:
    """Whether a copy is between host and device."""
    is_ours = isinstance(args[0], CudaTensor)
    if func is aten.copy_.default:
        return is_ours != isinstance(args[1], CudaTensor)
    return target is not None and is_ours != is_cuda(target)


def check_mixing(known: Operation, args: tuple, host: Tensor) -> None:
    """Raise where torch does not let a host tensor and a CUDA tensor meet."""
    if not known.takes_scalar or host.ndim or (known.written and args[0] is host):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 "
            f"and cpu! ({known.name}, host tensor {tuple(host.shape)}, at {project_line()})"
        )


def run(func: Callable, known: Operation, args: tuple, kwargs: dict) -> object:
    """An operation on the device alone."""
    func = STAND_INS.get(func, func)
    if known.name == "detach_":  # there is no graph of gradients to leave
        return args[0]
    if known.is_view:
        return mapped(wrap, func(*mapped(unwrap, args), **mapped(unwrap, kwargs)))
    if kwargs.get("generator") is not None:
        timeline.forbid_capture("a generator that the graph does not know")
    launch(known, args, kwargs)
    if known.written:
        return write(func, known, args, kwargs)
    return make(func, known, args, kwargs)


def launch(known: Operation, args: tuple, kwargs: dict) -> None:
    """Count its kernels. Those that have not run before are chosen, by type and shape, and loaded,
    and libraries open what they need for them; which no capture may do."""
    n = n_kernels(known, args)
    if n == 0:
        return
    given = [(tensor.dtype, tensor.shape) for tensor in tensors_in([args, kwargs])]
    kernel = (known.name, *given, kwargs.get("dtype"))
    if timeline.capture is None:
        timeline.loaded.add(kernel)
        timeline.submit("kernel", known.name, n)
        return
    if kernel not in timeline.loaded:
        timeline.forbid_capture(f"first run of {known.name}")
    timeline.count("node", known.name, n)
    timeline.capture.nodes[known.name] += n


def n_kernels(known: Operation, args: tuple) -> int:
    """Kernels of an operation, as torch's own code for CUDA has them."""
    if known.name == "cat" and len({part.dtype for part in args[0]}) > 1:
        return len(args[0])  # each is copied by itself
    if known.name == "addmm" and len(args[1]) == 1:
        return 2  # the bias is copied first; with more rows the product adds it
    return known.n_kernels


def write(func: Callable, known: Operation, args: tuple, kwargs: dict) -> object:
    """An operation that writes to its arguments."""
    if timeline.capture is None:
        func(*mapped(unwrap, args), **mapped(unwrap, kwargs))
    else:
        timeline.capture.record(func, args, kwargs)
    written = [kwargs.get(key) if isinstance(key, str) else args[key] for key in known.written]
    return written[0] if len(written) == 1 else tuple(written)


def make(func: Callable, known: Operation, args: tuple, kwargs: dict) -> object:
    """An operation that makes its results."""
    result = mapped(wrap, func(*mapped(unwrap, args), **mapped(unwrap, kwargs)))
    made = [outer for outer in tensors_in([result]) if outer.owner is None]
    capture = timeline.capture
    if capture and made:  # else it is the same memory under another name
        if known.name in FRESH:
            capture.record(poison, tuple(made), {})
        else:
            capture.record(func, args, kwargs, [outer.inner for outer in made])
    elif known.name in FRESH:
        for outer in made:
            poison(outer.inner)
    return result

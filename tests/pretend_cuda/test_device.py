"""Planted mistakes: what raises or goes wrong on a GPU must do so on the pretended device.

Each in inference mode, as texts are written, and outside.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.cuda_graphs import record

from .timeline import timeline

pytestmark = pytest.mark.cuda
Run = Callable[[], object]
ones, zeros = (partial(make, device="cuda") for make in (torch.ones, torch.zeros))


@pytest.fixture(params=[False, True], ids=["normal", "inference"], autouse=True)
def inference_mode(request: pytest.FixtureRequest) -> Iterator[None]:
    with torch.inference_mode(request.param):
        yield


def captured(
    run: Run, pool: tuple[int, int] | None = None, warm_up: Run | None = None
) -> torch.cuda.CUDAGraph:
    """It runs once before it is captured, or what warms up in its place does."""
    (warm_up or run)()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, pool=pool):
        run()
    return graph


# Capture and replay.


def test_python_values_and_host_scalars_stay_as_they_were_captured() -> None:
    x, out, scaled = ones(3), zeros(3), zeros(3)
    state, factor = {"factor": 2.0, "n": 2}, torch.tensor(3.0)

    def run() -> None:
        out[: state["n"]].copy_((x * state["factor"])[: state["n"]])
        torch.mul(x, factor, out=scaled)

    graph = captured(run)
    x.fill_(5.0)
    factor.fill_(7.0)
    state |= {"factor": 100.0, "n": 3}
    graph.replay()
    assert out.tolist() == [10.0, 10.0, 0.0] and scaled.tolist() == [15.0] * 3


def test_a_capture_carries_out_nothing() -> None:
    x = zeros(3)
    graph = captured(lambda: x.add_(1))
    assert x.tolist() == [1.0] * 3, "of the warm-up"
    graph.replay()
    assert x.tolist() == [2.0] * 3


OTHERS = {  # that run before x @ x is captured
    "nothing": lambda x: None,
    "operation": lambda x: x + x,
    "type": lambda x: x.half() @ x.half(),
    "shape": lambda x: x[:2] @ x,
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_has_not_run_before_a_capture_fails_there(other: str) -> None:
    """Planted: its kernels would be chosen and loaded there."""
    x = ones(3, 3)
    with pytest.raises(RuntimeError, match="previous error during capture") as raised:
        captured(lambda: x @ x, warm_up=lambda: OTHERS[other](x))
    assert "first run of mm at tests/pretend_cuda/test_device" in str(raised.value.__context__)


def test_a_replay_sees_what_memory_holds_now() -> None:
    """Through views, too, and by indices that are themselves results."""
    rows = torch.arange(8.0, device="cuda").reshape(4, 2)
    cache, place, out = zeros(2, 4, 3), zeros(1).long(), zeros(1, 2)

    def run() -> None:
        cache.unbind(0)[1].index_copy_(0, place, ones(1, 3))
        out.copy_(rows.index_select(0, place + 1))

    graph = captured(run)
    cache.zero_()
    place.fill_(2)
    graph.replay()
    assert cache.sum((0, 2)).tolist() == [0, 0, 3, 0] and out.tolist() == [[6.0, 7.0]]


@pytest.mark.parametrize("is_result", [False, True])
def test_memory_that_was_freed_since(is_result: bool) -> None:
    kept = []
    other = captured(lambda: kept.append(ones(3) + 1))
    if not is_result:
        kept.append(ones(3))
    out = zeros(3)
    graph = captured(lambda: out.copy_(kept[-1][:]), pool=other.pool())
    graph.replay()
    kept.clear()
    gc.collect()
    with pytest.raises(RuntimeError, match="freed"):
        graph.replay()


FORBIDDEN = {  # in a capture; x: ones [3] on the device
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "boolean index": lambda x: x[x > 0],
    "synchronize": lambda x: torch.cuda.synchronize(),
    "to host": lambda x: x.cpu(),
    "new tensor": lambda x: torch.tensor([1, 2], device="cuda"),
    "pinned": lambda x: x.copy_(torch.ones(3, pin_memory=True), non_blocking=True),
    "generator": lambda x: x.exponential_(generator=torch.Generator("cuda")),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_capture_that_waits_copies_or_draws_fails_twice(name: str) -> None:
    """That raises, and the capture's end says no more than that something failed."""
    x = ones(3)
    with pytest.raises(RuntimeError, match="previous error during capture") as raised:
        captured(lambda: FORBIDDEN[name](x))
    assert "test_device.py" in str(raised.value.__context__)
    assert "when stream is capturing" in str(raised.value.__context__)


def test_a_capture_that_fails_leaves_its_stream() -> None:
    """Torch's own way does not if the capture's end raises: all that came later ran there."""
    x = ones(3)
    with pytest.raises(RuntimeError, match="when stream is capturing"):
        record(x.tolist, None, x.device)
    assert torch.cuda.current_stream() is torch.cuda.default_stream()
    with torch.cuda.stream(torch.cuda.current_stream()):
        with pytest.raises(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.tolist()
        assert torch.cuda.current_stream() is not torch.cuda.default_stream()


def test_nothing_is_collected_in_a_capture() -> None:
    """What that frees would spoil it."""
    was_collecting: list[bool] = []
    record(lambda: was_collecting.append(gc.isenabled()), None, torch.device("cuda:0"))
    assert was_collecting == [False] and gc.isenabled()


# Host and device in one operation.

MIXED = {  # x: zeros [3] on the device, h: on the host
    "add": lambda x, h: x + h,
    "scalar of the device into host": lambda x, h: h.add_(x.sum()),
    "out": lambda x, h: torch.add(x, x, out=h),
    "device by host index": lambda x, h: x[h.long()],
    "product": lambda x, h: x @ h,
    "attention": lambda x, h: F.scaled_dot_product_attention(x[None], h[None], h[None]),
}


@pytest.mark.parametrize("name", MIXED)
def test_host_and_device_do_not_mix(name: str) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        MIXED[name](zeros(3), torch.zeros(3))


# Memory.


def test_new_memory_is_poisoned_and_counted() -> None:
    gc.collect()  # what other tests have left
    before = torch.cuda.memory_allocated()
    x = torch.empty(1000, device="cuda")
    view = x[:10]
    assert x.isnan().all()
    assert torch.cuda.memory_allocated() - before == x.nbytes
    del x
    assert torch.cuda.memory_allocated() - before == 4000, "a view keeps all of it"
    del view
    assert torch.cuda.memory_allocated() == before


# Waits, events, copies.

COPIES = {  # between x: ones [3] on the device and h: ordinary, p: pinned; what is counted
    "up": (lambda x, h, p: x.copy_(h), {"h2d waits": 1, "sync": 1}),
    "up, staged": (lambda x, h, p: x.copy_(h, non_blocking=True), {"h2d staged": 1}),
    "up, pinned": (lambda x, h, p: x.copy_(p, non_blocking=True), {"h2d pinned": 1}),
    "up, part": (lambda x, h, p: x[1:].copy_(p[1:], non_blocking=True), {"h2d pinned": 1}),
    "up, converted": (lambda x, h, p: x.copy_(p.int(), non_blocking=True), {"h2d staged": 1}),
    "up, pinned, waits": (lambda x, h, p: x.copy_(p), {"h2d waits": 1, "sync": 1}),
    "down": (lambda x, h, p: x.cpu(), {"d2h ": 1, "sync": 1}),
    "down, ordinary": (lambda x, h, p: h.copy_(x, non_blocking=True), {"d2h ": 1, "sync": 1}),
    "down, pinned": (lambda x, h, p: p.copy_(x, non_blocking=True), {"d2h pinned": 1}),
    "list": (lambda x, h, p: x.tolist(), {"sync": 1}),
}


@pytest.mark.parametrize("name", COPIES)
def test_which_copies_wait(name: str) -> None:
    run, expected = COPIES[name]
    tensors = ones(3), torch.zeros(3), torch.zeros(3, pin_memory=True)
    with timeline.traced() as sites:
        run(*tensors)
    found: Counter[str] = Counter()
    for (kind, what, _), n in sites.items():
        found["sync" if kind == "sync" else f"{kind} {what}"] += n
    assert found == expected


def pinned(*values: float) -> Tensor:
    return torch.zeros(len(values), pin_memory=True).copy_(torch.tensor(values))


def test_pinned_memory_must_stay_until_its_copy_is_waited_for() -> None:
    x = zeros(2)
    host = pinned(1.0, 2.0)
    x.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    host.fill_(3.0)
    x[:1].copy_(host[:1], non_blocking=True)
    host[1] = 4.0  # which was not copied
    torch.cuda.synchronize()
    x.copy_(host, non_blocking=True)
    host[1] = 5.0
    with pytest.raises(RuntimeError, match="written to before the copy at tests/.*test_device.py"):
        x.tolist()

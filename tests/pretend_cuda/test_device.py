"""Planted mistakes: what raises or goes wrong on a GPU must do so on the pretended device.

Each in inference mode, as texts are written, and outside.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.cuda_graphs import record

from . import device, graphs
from .attention import choose
from .tensors import memory
from .timeline import timeline

pytestmark = pytest.mark.cuda


@pytest.fixture(params=[False, True], ids=["normal", "inference"], autouse=True)
def inference_mode(request: pytest.FixtureRequest) -> Iterator[None]:
    with torch.inference_mode(request.param):
        yield


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, device="cuda")


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, device="cuda")


def pinned(*values: float) -> Tensor:
    return torch.tensor(values, pin_memory=True)


def captured(
    run: Callable[[], object], pool: tuple[int, int] | None = None
) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, pool=pool):
        run()
    return graph


# Capture and replay.


def test_a_python_value_stays_as_it_was_captured() -> None:
    x = ones(3)
    out = zeros(3)
    state = {"factor": 2.0, "n": 2}

    def run() -> None:
        out[: state["n"]].copy_((x * state["factor"])[: state["n"]])

    graph = captured(run)
    x.fill_(5.0)
    state["factor"] = 100.0
    state["n"] = 3
    graph.replay()
    assert out.tolist() == [10.0, 10.0, 0.0]


def test_a_host_scalar_stays_as_it_was_captured() -> None:
    x = ones(3)
    out = zeros(3)
    factor = torch.tensor(2.0)
    graph = captured(lambda: torch.mul(x, factor, out=out))
    factor.fill_(7.0)
    graph.replay()
    assert out.tolist() == [2.0, 2.0, 2.0]


def test_a_capture_carries_out_nothing() -> None:
    x = zeros(3)
    graph = captured(lambda: x.add_(1))
    assert x.tolist() == [0.0, 0.0, 0.0]
    graph.replay()
    assert x.tolist() == [1.0, 1.0, 1.0]


def test_an_index_may_be_a_result() -> None:
    rows = torch.arange(8.0, device="cuda").reshape(4, 2)
    packed = torch.tensor([1, 2], device="cuda")
    out = zeros(2, 2)
    graph = captured(lambda: out.copy_(rows.index_select(0, packed + 1)))
    graph.replay()
    assert out.tolist() == [[4.0, 5.0], [6.0, 7.0]]


def test_views_share_memory_and_a_replay_sees_what_it_holds_now() -> None:
    cache = zeros(2, 4, 3)
    place = torch.tensor([1], device="cuda")
    row = ones(2, 1, 3)
    graph = captured(lambda: cache.unbind(0)[1].index_copy_(0, place, row[1]))
    place.fill_(3)
    graph.replay()
    assert cache.sum((0, 2)).tolist() == [0, 0, 0, 3]
    assert cache[1, 3].tolist() == [1.0, 1.0, 1.0]


def test_memory_that_nobody_wrote_is_as_bad_in_every_replay() -> None:
    out = zeros(2)

    def run() -> None:
        space = torch.empty(2, device="cuda")
        out.copy_(space)
        space.zero_()

    graph = captured(run)
    graph.replay()
    graph.replay()
    assert out.isnan().all()


def test_a_result_lasts_until_an_earlier_graph_of_its_pool() -> None:
    x = ones(3)
    results = []
    first = captured(lambda: x.mul_(2))
    second = captured(lambda: results.append((x + 1)[:2]), pool=first.pool())
    (result,) = results
    assert result.isnan().all()
    second.replay()
    assert result.tolist() == [2.0, 2.0]
    first.replay()
    assert result.isnan().all()


@pytest.mark.parametrize("is_result", [False, True])
def test_memory_that_was_freed_since(is_result: bool) -> None:
    kept = []
    other = captured(lambda: kept.append(ones(3) + 1))
    if not is_result:
        kept = [ones(3)]
    out = zeros(3)
    graph = captured(lambda: out.copy_(kept[0][:]), pool=other.pool())
    graph.replay()
    kept.clear()
    gc.collect()
    with pytest.raises(RuntimeError, match="freed"):
        graph.replay()


WAITS = {  # x: ones [3] on the device
    "item": lambda x: x[0].item(),
    "truth": lambda x: bool(x.sum() > 0),
    "tolist": lambda x: x.tolist(),
    "nonzero": lambda x: x.nonzero(),
    "boolean index": lambda x: x[x > 0],
    "equal": lambda x: torch.equal(x, x),
    "synchronize": lambda x: torch.cuda.synchronize(),
    "stream": lambda x: torch.cuda.current_stream().synchronize(),
    "event": lambda x: torch.cuda.Event().synchronize(),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_capture_that_waits_fails_twice(name: str) -> None:
    """The wait raises, and the capture's end says no more than that something failed."""
    x = ones(3)
    with pytest.raises(RuntimeError, match="previous error during capture") as raised:
        captured(lambda: WAITS[name](x))
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


BETWEEN_HOST_AND_DEVICE = {
    "to host": lambda x: x.cpu(),
    "new tensor": lambda x: torch.tensor([1, 2], device="cuda"),
    "to device": lambda x: torch.ones(3).to("cuda", non_blocking=True),
    "into": lambda x: x.copy_(torch.ones(3)),
    "pinned": lambda x: x.copy_(pinned(1.0, 2.0, 3.0), non_blocking=True),
    "host index": lambda x: x[torch.tensor([0])],
}


@pytest.mark.parametrize("name", BETWEEN_HOST_AND_DEVICE)
def test_a_capture_copies_nothing_from_or_to_the_host(name: str) -> None:
    x = ones(3)
    with pytest.raises(RuntimeError, match="during .*capture"):
        captured(lambda: BETWEEN_HOST_AND_DEVICE[name](x))


def test_a_capture_draws_nothing_with_a_generator_of_its_own() -> None:
    x = ones(3)
    generator = torch.Generator("cuda")
    with pytest.raises(RuntimeError, match="generator"):
        captured(lambda: x.exponential_(generator=generator))


def test_a_capture_is_not_on_the_default_stream() -> None:
    with pytest.raises(RuntimeError, match="non-default"):
        torch.cuda.CUDAGraph().capture_begin()


def test_only_what_was_captured_is_replayed() -> None:
    with pytest.raises(RuntimeError, match="without a preceding"):
        torch.cuda.CUDAGraph().replay()


@pytest.mark.parametrize("is_old", [False, True])
def test_captures_in_and_outside_inference_mode(
    is_old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to torch 2.10 the first capture's seeds served all others."""
    monkeypatch.setattr(graphs.Seeds, "are_kept", is_old)
    monkeypatch.setattr(graphs.Seeds, "are_inference", None)
    x = ones(3)
    with torch.inference_mode():
        captured(lambda: x + 1)
    with torch.inference_mode(False):
        if is_old:
            with pytest.raises(RuntimeError, match="outside InferenceMode"):
                captured(lambda: x + 1)
        else:
            captured(lambda: x + 1)
    with torch.inference_mode():
        captured(lambda: x + 1)


# Host and device in one operation.

MIXED = {  # x: zeros [3] on the device, h: on the host
    "add": lambda x, h: x + h,
    "add to host": lambda x, h: h + x,
    "cat": lambda x, h: torch.cat([x, h]),
    "in place": lambda x, h: x.mul_(h),
    "scalar of the device into host": lambda x, h: h.add_(x.sum()),
    "out": lambda x, h: torch.add(x, x, out=h),
    "index_select": lambda x, h: x.index_select(0, h.long()),
    "gather": lambda x, h: x.gather(0, h.long()),
    "take": lambda x, h: x.take(h.long()),
    "embedding": lambda x, h: F.embedding(h.long(), x[:, None]),
    "host by device index": lambda x, h: h[x.long()],
    "index_copy": lambda x, h: x.index_copy_(0, h.long(), x),
    "product": lambda x, h: x @ h,
    "attention": lambda x, h: F.scaled_dot_product_attention(x[None], h[None], h[None]),
}


@pytest.mark.parametrize("name", MIXED)
def test_host_and_device_do_not_mix(name: str) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        MIXED[name](zeros(3), torch.zeros(3))


def test_what_may_be_mixed() -> None:
    x = torch.arange(3.0, device="cuda")
    assert (x + torch.tensor(1.0)).tolist() == [1, 2, 3]
    assert (torch.tensor(1.0) + x).is_cuda
    assert x[torch.tensor([2])].tolist() == [2.0]
    assert x.masked_fill(x > 1, torch.tensor(9.0)).tolist() == [0.0, 1.0, 9.0]


def test_where_a_result_is() -> None:
    x = ones(2)
    assert type(x.cpu()) is Tensor
    assert torch.ones(2).cuda().device == torch.device("cuda:0")
    assert torch.ones(2).to(x.device, torch.float16, copy=True).device == torch.device("cuda:0")
    assert type(x.to(torch.device("cpu"), torch.float16)) is Tensor
    assert x.new_zeros(2).is_cuda and torch.zeros_like(x).is_cuda
    assert not x.new_zeros(2, device="cpu").is_cuda
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()


# Memory.


def test_new_memory_is_poisoned_and_counted() -> None:
    before = torch.cuda.memory_allocated()
    x = torch.empty(1000, device="cuda")
    view = x[:10]
    assert x.isnan().all()
    assert torch.cuda.memory_allocated() - before == x.nbytes
    del x
    assert torch.cuda.memory_allocated() - before == 4000, "a view keeps all of it"
    del view
    assert torch.cuda.memory_allocated() == before


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    monkeypatch.setattr(memory, "capacity", memory.reserved + 1000)
    assert torch.cuda.mem_get_info() == (1000, memory.capacity)
    x = ones(200)
    with pytest.raises(torch.OutOfMemoryError):
        ones(200)
    del x
    ones(200)


def test_too_little_memory_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """The capture's end hides what failed."""
    x = ones(100)
    monkeypatch.setattr(memory, "capacity", memory.reserved + 1000)
    with pytest.raises(torch.AcceleratorError, match="previous error during capture") as raised:
        captured(lambda: torch.cat([x, x, x]))
    assert isinstance(raised.value.__context__, torch.OutOfMemoryError)
    assert not torch.cuda.is_current_stream_capturing()


def test_what_graphs_keep_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a pool is reserved: the next graph of the pool may use it, nothing else."""
    x = ones(100)
    allocated = torch.cuda.memory_allocated()
    first = captured(lambda: (x + 1).add_(1))
    assert torch.cuda.memory_allocated() == allocated
    segments = {s["segment_pool_id"]: s["total_size"] for s in torch.cuda.memory_snapshot()}
    assert segments[first.pool()] == x.nbytes
    monkeypatch.setattr(memory, "capacity", memory.reserved + 10)
    captured(lambda: (x + 1).add_(1), pool=first.pool())
    with pytest.raises(torch.OutOfMemoryError):
        x + 1


# Waits, events, copies.


def counted(run: Callable[[], object]) -> Counter[str]:
    """What is asked of the device, by kind, and by kind and what."""
    found: Counter[str] = Counter()
    with timeline.traced() as sites:
        run()
    for (kind, what, _), n in sites.items():
        found[kind] += n
        found[f"{kind} {what}"] += n
    return found


def test_a_copy_from_ordinary_memory() -> None:
    x = zeros(3)
    host = torch.ones(3)
    found = counted(lambda: x.copy_(host))
    assert found["h2d waits"] == found["sync"] == 1
    found = counted(lambda: x.copy_(host, non_blocking=True))
    assert found["h2d staged"] == 1 and not found["sync"]
    assert counted(lambda: x.tolist())["sync"] == 1
    assert counted(lambda: x.cpu())["sync"] == 1


def test_a_copy_from_pinned_memory() -> None:
    x = zeros(3)
    host = torch.ones(3).pin_memory()
    found = counted(lambda: x.copy_(host, non_blocking=True))
    assert found["h2d pinned"] == 1 and not found["sync"]
    assert counted(lambda: x.copy_(host))["sync"] == 1
    half = x.half()
    found = counted(lambda: half.copy_(host, non_blocking=True))
    assert found["h2d staged"] == 1, "converted first, which is ordinary memory"


def test_what_is_pinned() -> None:
    host = torch.ones(3).pin_memory()
    assert host.is_pinned() and host[1:].is_pinned() and host.pin_memory() is host
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert torch.zeros(3, dtype=torch.int64, pin_memory=True).is_pinned()
    assert not torch.ones(3).is_pinned() and not host.clone().is_pinned()


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


def test_pinned_memory_may_be_freed_at_once() -> None:
    x = zeros(2)
    host = pinned(1.0, 2.0)
    x.copy_(host, non_blocking=True)
    del host
    other = torch.zeros(2)
    other.fill_(7.0)
    assert x.tolist() == [1.0, 2.0]


def test_an_event_waits_for_what_came_before_it() -> None:
    x = zeros(2)
    first = pinned(1.0, 2.0)
    second = pinned(3.0, 4.0)
    event = torch.cuda.Event()
    x.copy_(first, non_blocking=True)
    event.record()
    x.copy_(second, non_blocking=True)
    event.synchronize()
    first.fill_(0.0)
    second.fill_(0.0)
    with pytest.raises(RuntimeError, match="written to before"):
        torch.cuda.synchronize()


def test_what_comes_to_the_host_is_there_after_a_wait() -> None:
    x = ones(2)
    host = torch.zeros(2, pin_memory=True)
    found = counted(lambda: host.copy_(x, non_blocking=True))
    assert found["d2h pinned"] == 1 and not found["sync"]
    other = x.to("cpu", non_blocking=True)
    assert host.isnan().all() and other.isnan().all()
    torch.cuda.synchronize()
    assert host.tolist() == other.tolist() == [1.0, 1.0]
    ordinary = torch.zeros(2)
    assert counted(lambda: ordinary.copy_(x, non_blocking=True))["sync"] == 1
    assert ordinary.tolist() == [1.0, 1.0]


def test_an_event_is_complete_once_it_was_waited_for() -> None:
    before = torch.cuda.Event(enable_timing=True)
    after = torch.cuda.Event(enable_timing=True)
    with pytest.raises(ValueError, match="must be recorded"):
        before.elapsed_time(after)
    before.record()
    after.record()
    assert not before.query()
    with pytest.raises(RuntimeError, match="must be completed"):
        before.elapsed_time(after)
    assert counted(after.synchronize)["sync"] == 1
    assert before.query() and before.elapsed_time(after) >= 0
    found = counted(before.synchronize)
    assert found["event wait"] == 1 and not found["sync"]


# What it knows of torch.


def test_which_attention_a_gpu_would_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)

    def chosen(n_slots: int, dtype: torch.dtype, head_size: int = 80) -> str:
        queries = torch.zeros(1, 4, 5, head_size, dtype=dtype, device="cuda")
        keys = torch.zeros(1, 4, n_slots, head_size, dtype=dtype, device="cuda")
        mask = torch.zeros(5, n_slots, dtype=dtype, device="cuda")
        return choose(queries, keys, keys, mask).name

    assert chosen(256, torch.float16) == chosen(256, torch.float32) == "memory-efficient attention"
    assert chosen(250, torch.bfloat16) == "memory-efficient attention, mask copied"
    assert chosen(256, torch.float16, 4) == "attention by single operations"


def test_another_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="pretends already"):
        device.install()
    monkeypatch.setattr(torch, "__version__", "2.14.0+cpu")
    with pytest.raises(AssertionError, match="torch 2.14: pretends with 2.11"):
        device.install()

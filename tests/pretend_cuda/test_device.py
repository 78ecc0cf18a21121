"""Tests that mistakes which fail on a GPU also fail on the pretended device."""

import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch

from engine.cuda_graphs import capture_graph

from .timeline import timeline

pytestmark = pytest.mark.cuda
Run = Callable[[], object]
ones, zeros = (partial(make, device="cuda") for make in (torch.ones, torch.zeros))


def warm_up_and_capture(run: Run, warm_up: Run | None = None) -> torch.cuda.CUDAGraph:
    """Capture a function as a graph. Before, run `warm_up` once, by default the function."""
    (warm_up or run)()
    return capture_graph(run, None, torch.device("cuda"))[0]


def test_a_replay_computes_with_what_memory_holds_now() -> None:
    """Check a replay through views, and by indices that are results. Python values and host scalars
    stay as they were at the capture. A capture computes nothing."""
    place, factor, state = zeros(1).long(), torch.tensor(3.0), {"n": 2}
    cache = zeros(2, 4)

    def run() -> None:
        cache.unbind(0)[1].index_add_(0, place + 1, ones(1) * factor)
        cache[0, : state["n"]].add_(1)

    graph = warm_up_and_capture(run)
    assert cache.tolist() == [[1, 1, 0, 0], [0, 3, 0, 0]], "only the warm-up has run"
    place.fill_(2)
    factor.fill_(7.0)
    state["n"] = 3
    graph.replay()
    assert cache.tolist() == [[2, 2, 0, 0], [0, 3, 0, 3]]


FORBIDDEN = {  # operations that no capture may do; x: ones [3] on the device
    "item": lambda x: x[0].item(),
    "boolean index": lambda x: x[x > 0],
    "synchronize": lambda x: torch.cuda.synchronize(),
    "to host": lambda x: x.cpu(),
    "new tensor": lambda x: torch.tensor([1, 2], device="cuda"),
    "generator": lambda x: x.exponential_(generator=torch.Generator("cuda")),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_capture_that_waits_copies_or_draws_fails(name: str) -> None:
    """Check that the capture fails. plugin.py asserts that it leaves its stream, on which torch's
    own context manager stays."""
    x = ones(3)
    with pytest.raises(RuntimeError, match="when stream is capturing"):
        warm_up_and_capture(lambda: FORBIDDEN[name](x))


def test_what_has_not_run_before_a_capture_fails_there() -> None:
    """Check that a warm-up on other types or shapes does not count, as other kernels are loaded."""
    x = ones(3, 3)
    for warm_up in (list, lambda: x.half() @ x.half(), lambda: x[:2] @ x):
        with pytest.raises(RuntimeError, match="first run of mm at tests/pretend_cuda"):
            warm_up_and_capture(lambda: x @ x, warm_up)


def test_a_capture_is_in_inference_mode_and_collects_nothing() -> None:
    """Check both. After a capture in inference mode, torch up to 2.10 cannot capture outside of it
    (pytorch issue 166792). Memory that a collection frees would spoil the capture."""
    found: list[tuple[bool, bool]] = []
    warm_up_and_capture(lambda: found.append((torch.is_inference_mode_enabled(), gc.isenabled())))
    assert found == [(False, True), (True, False)] and gc.isenabled()


def test_host_and_device_do_not_mix() -> None:
    x, host = zeros(3), torch.zeros(3)
    attend = torch.nn.functional.scaled_dot_product_attention
    mixed = [
        lambda: x + host,
        lambda: host.add_(x.sum()),
        lambda: x[host.long()],
        lambda: attend(x[None], x[None], host[None]),
    ]
    for mistake in mixed:
        with pytest.raises(RuntimeError, match="same device"):
            mistake()


def test_which_copies_wait() -> None:
    x, host = ones(3), torch.zeros(3)
    waiting = [partial(x.copy_, host), x.cpu, partial(host.copy_, x, non_blocking=True), x.tolist]
    before = timeline.counts["sync"]
    for copy in waiting:
        copy()
    assert timeline.counts["sync"] - before == len(waiting)


def test_what_is_not_there_yet() -> None:
    """Check that memory is poison before it is written to, and pinned memory before the host has
    waited for its copy."""
    assert torch.empty(3, device="cuda").isnan().all()
    host = torch.zeros(2, pin_memory=True)
    host.copy_(ones(2), non_blocking=True)
    assert host.isnan().all()
    torch.cuda.synchronize()
    assert host.tolist() == [1.0, 1.0]


def test_pinned_memory_must_stay_until_its_copy_is_waited_for() -> None:
    x, host = zeros(2), torch.zeros(2, pin_memory=True)
    x.copy_(host, non_blocking=True)
    host[1] = 5.0
    with pytest.raises(RuntimeError, match="written to before the copy at tests/.*test_device.py"):
        x.tolist()


def test_compile_returns_the_function_itself() -> None:
    for compile_it in (torch.compile, torch.compile(dynamic=True)):
        assert compile_it(warm_up_and_capture) is warm_up_and_capture

"""Planted mistakes: what raises or goes wrong on a GPU must do so on the pretended device."""

import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch

from engine.cuda_graphs import record

from .timeline import timeline

pytestmark = pytest.mark.cuda
Run = Callable[[], object]
ones, zeros = (partial(make, device="cuda") for make in (torch.ones, torch.zeros))


def captured(run: Run, warm_up: Run | None = None) -> torch.cuda.CUDAGraph:
    """It runs once before it is captured, or what warms up in its place does."""
    (warm_up or run)()
    return record(run, None, torch.device("cuda"))[0]


def test_a_replay_computes_with_what_memory_holds_now() -> None:
    """Through views, and by indices that are results; but with Python values and host scalars as
    they were. A capture carries out nothing."""
    place, factor, state = zeros(1).long(), torch.tensor(3.0), {"n": 2}
    cache = zeros(2, 4)

    def run() -> None:
        cache.unbind(0)[1].index_add_(0, place + 1, ones(1) * factor)
        cache[0, : state["n"]].add_(1)

    graph = captured(run)
    assert cache.tolist() == [[1, 1, 0, 0], [0, 3, 0, 0]], "of the warm-up"
    place.fill_(2)
    factor.fill_(7.0)
    state["n"] = 3
    graph.replay()
    assert cache.tolist() == [[2, 2, 0, 0], [0, 3, 0, 3]]


FORBIDDEN = {  # in a capture; x: ones [3] on the device
    "item": lambda x: x[0].item(),
    "boolean index": lambda x: x[x > 0],
    "synchronize": lambda x: torch.cuda.synchronize(),
    "to host": lambda x: x.cpu(),
    "new tensor": lambda x: torch.tensor([1, 2], device="cuda"),
    "generator": lambda x: x.exponential_(generator=torch.Generator("cuda")),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_capture_that_waits_copies_or_draws_fails(name: str) -> None:
    """And leaves its stream, as plugin.py asserts: torch's own way stays there."""
    x = ones(3)
    with pytest.raises(RuntimeError, match="when stream is capturing"):
        captured(lambda: FORBIDDEN[name](x))


def test_what_has_not_run_before_a_capture_fails_there() -> None:
    """On the same type and shape: its kernels would be chosen and loaded there."""
    x = ones(3, 3)
    for warm_up in (list, lambda: x.half() @ x.half(), lambda: x[:2] @ x):
        with pytest.raises(RuntimeError, match="first run of mm at tests/pretend_cuda"):
            captured(lambda: x @ x, warm_up)


def test_a_capture_is_in_inference_mode_and_collects_nothing() -> None:
    """Torch up to 2.10 can capture outside of it only as long as it has not captured inside
    (pytorch issue 166792). What a collection frees would spoil the capture."""
    found: list[tuple[bool, bool]] = []
    captured(lambda: found.append((torch.is_inference_mode_enabled(), gc.isenabled())))
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
    """Memory that nobody has written to, and pinned memory until its copy is waited for."""
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

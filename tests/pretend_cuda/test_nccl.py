"""Tests with planted mistakes: what hangs or raises between GPUs raises on pretended devices."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from test_ranks import run_in_processes

from engine.ranks import Ranks

from .test_device import warm_up_and_capture

pytestmark = pytest.mark.cuda


def mistakes(ranks: Ranks) -> None:
    """Make each mistake on both ranks and check the error."""
    own, other = (torch.device("cuda", index) for index in (ranks.rank, 1 - ranks.rank))
    x = torch.ones(3, device=own)
    wrong = [partial(torch.ones, 3, device=other)]
    if ranks.rank:  # device 0 is the current one until set_device
        wrong += [partial(torch.ones, 3, device="cuda"), partial(torch.ones, 3, pin_memory=True)]
    for mistake in wrong:
        with pytest.raises(AssertionError, match="another rank's device"):
            mistake()
    torch.cuda.set_device(own)
    torch.ones(3, device="cuda")
    group = dist.new_group(backend="nccl")
    add_up = partial(dist.all_reduce, x, group=group)
    with pytest.raises(torch.AcceleratorError, match="first run"):
        warm_up_and_capture(add_up, warm_up=list)  # a first run would connect the devices
    add_up()
    graph = warm_up_and_capture(add_up, warm_up=list)
    assert x.tolist() == [2.0] * 3  # a capture adds up nothing
    graph.replay()
    assert x.tolist() == [4.0] * 3
    for tensor, of in ((x, ranks.group), (torch.ones(3), group)):
        with pytest.raises(RuntimeError, match="another kind of device"):
            dist.all_reduce(tensor, group=of)
    with pytest.raises(ValueError, match="contiguous"):
        dist.all_reduce(torch.ones(3, 2, device=own).t(), group=group)
    of_one_rank = [graph.replay, partial(dist.all_reduce, torch.ones(4, device=own), group=group)]
    with pytest.raises(RuntimeError, match="not every rank has come to nccl all_reduce"):
        of_one_rank[ranks.rank]()
    with pytest.raises(AssertionError, match="wait for ever for 1 graph"):
        dist.destroy_process_group()
    graph.reset()


def test_mistakes() -> None:
    assert run_in_processes(2, mistakes) == [None, None]

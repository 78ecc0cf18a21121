"""Fixtures of all tests, and the number of processes that run them."""

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    what = "WikiText-2's raw test text, for tests of committed results (skipped without it)"
    parser.addoption("--prompts", metavar="FILE", help=what)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Use up to four cores if pytest-xdist is installed and -n does not say otherwise."""
    is_worker = hasattr(config, "workerinput")  # one of the processes that this starts
    if config.getoption("numprocesses", 0) is None and not is_worker:
        config.option.numprocesses, config.option.maxprocesses = "auto", 4
        config.option.dist = "loadfile"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Use one thread. A second one costs a wait in small products, of 30 ms on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide every GPU, which would be the default device, except from tests marked cuda. The
    environment variable hides it from the processes that a test starts."""
    if not request.node.get_closest_marker("cuda"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

"""A pytest plugin: each test ends with the device idle and leaves nothing for the next test."""

from collections.abc import Generator

import pytest

from .streams import DEFAULT_STREAM, Stream
from .timeline import timeline


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Wait for the device after a test, so that an error of an open transfer is raised."""
    result = yield
    timeline.settle()
    return result


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Reset what a failed capture leaves behind. Also forget which kernels have run, so that every
    test warms up for itself."""
    timeline.open.clear()
    timeline.loaded.clear()
    timeline.capture = None
    Stream.current = DEFAULT_STREAM

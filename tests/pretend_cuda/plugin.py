"""pytest's part: no test ends before the device has been waited for, and none sees another's."""

from collections.abc import Generator

import pytest

from .runtime import DEFAULT_STREAM, Stream
from .timeline import timeline


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """A transfer that nobody waited for must not have gone wrong, and all that comes after a test
    would run on the stream that it leaves."""
    result = yield
    timeline.settle()
    assert Stream.current is DEFAULT_STREAM, "the test ends on the stream of a capture"
    return result


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """What a capture that failed leaves behind; and no test warms up for another."""
    timeline.open.clear()
    timeline.loaded.clear()
    timeline.capture = None
    Stream.current = DEFAULT_STREAM

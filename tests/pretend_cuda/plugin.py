"""pytest's part: no test ends before the device has been waited for, and none sees another's."""

from collections.abc import Generator

import pytest

from .runtime import DEFAULT_STREAM, Stream
from .timeline import timeline


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """A transfer that nobody waited for must not have gone wrong."""
    result = yield
    timeline.finish()
    return result


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """A capture that failed leaves both behind."""
    timeline.open.clear()
    timeline.capture = None
    Stream.current = DEFAULT_STREAM

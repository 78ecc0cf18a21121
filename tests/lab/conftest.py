"""Fixtures of the tests of dynatree_lab."""

import functools
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from small import TINY

from dynatree_lab.engine.checkpoint import DTYPES
from dynatree_lab.engine.model import FastGPTNeoX

if "pretend_cuda" not in sys.modules:
    collect_ignore = ["pretend_cuda"]  # tests on a pretended device: python tests/lab/pretend_cuda

# The workers and programs that tests start share the cores. A thread that spins while it waits for
# another one would keep that one from running
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@functools.cache
def load_tiny(load: Callable[..., FastGPTNeoX], *arguments: object) -> FastGPTNeoX:
    """Load an embedded model by FastGPTNeoX.from_pretrained, which takes longer than most tests."""
    return load(FastGPTNeoX, *arguments)


@pytest.fixture(autouse=True)
def load_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the fast models of the embedded pair share their weights on a CPU.

    Each has settings and memory of its own. The reference model is loaded anew, because training
    changes its weights.
    """
    load = FastGPTNeoX.from_pretrained.__func__

    def from_pretrained(
        cls: type[FastGPTNeoX],
        name_or_path: str | Path,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | str = torch.float32,
    ) -> FastGPTNeoX:
        folder = Path(str(name_or_path)).absolute()
        if folder.parent != TINY or str(device) != "cpu" or cls is not FastGPTNeoX:
            return load(cls, name_or_path, device, dtype)
        shared = load_tiny(load, folder, "cpu", DTYPES.get(dtype, dtype))
        model = object.__new__(FastGPTNeoX)
        model.__dict__ |= shared.__dict__ | {"reusable": [], "invariance_results": {}}
        return model

    monkeypatch.setattr(FastGPTNeoX, "from_pretrained", classmethod(from_pretrained))


CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SCREEN = {"width": 1920, "height": 1080}


@pytest.fixture(scope="module")
def browser() -> Iterator:
    """Start a Chromium. Skip the test if there is none on this machine, or no playwright."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright")
    program = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(CHROMIUM)}")
    with playwright.sync_playwright() as driver:
        # --no-sandbox: root, as in containers, has no sandbox, and the pages are our own
        chromium = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: object, tmp_path: Path) -> Iterator[Callable]:
    """Return a function that opens a page of ours. At the end, check that the browser logged
    nothing and requested only the page."""
    events = []
    file = tmp_path / "run.html"

    def open_text(text: str, address: str = "", **options: object) -> object:
        file.write_text(text)
        page = browser.new_page(offline=True, **{"viewport": SCREEN} | options)
        page.on("console", lambda message: events.append(message.text))
        page.on("pageerror", lambda error: events.append(str(error)))
        page.on("dialog", lambda dialog: events.append("a dialog"))
        page.on("request", lambda request: events.append(request.url.partition("#")[0]))
        page.goto(file.as_uri() + address)
        page.wait_for_function("() => document.documentElement.dataset.ready === '1'")
        return page

    yield open_text
    for context in browser.contexts:
        context.close()
    assert set(events) == {file.as_uri()}

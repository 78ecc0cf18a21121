"""A launcher: `python tests/lab/pretend_cuda ARGUMENTS` runs Python with a pretended GPU."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE / "startup"), str(HERE.parent)])
    os.environ["PYTEST_PLUGINS"] = "pretend_cuda.plugin"
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])

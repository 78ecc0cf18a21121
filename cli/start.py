"""What every program imports first, before torch, whose import takes a second and can fail.

if __name__ == "__main__":
    import cli.start  # noqa: F401
"""

import os
import re
import signal
import sys
from pathlib import Path
from types import TracebackType

# Torch reads it when it is imported, and then asks Linux for huge pages, from which one row's
# weights are fetched in 0.7 to 0.85 of the time (docs/results.md)
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored: nohup, &
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until a command line runs: there is no traceback


for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
    if getattr(sys, name) is None:  # closed, as by >&-: else the next file would take its place
        setattr(sys, name, open(os.devnull, mode))


def explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print one line and exit with status 2 if a package of requirements.txt is not installed."""
    needed = Path(__file__).parents[1].joinpath("requirements.txt").read_text(encoding="utf-8")
    packages = re.findall(r"^[\w-]+", needed.replace("-", "_"), re.MULTILINE)
    if not (isinstance(error, ModuleNotFoundError) and error.name in packages):
        sys.__excepthook__(kind, error, trace)
        return
    print(f"error: {error}; pip install -r requirements.txt brings all", file=sys.stderr)
    sys.exit(2)


sys.excepthook = explain

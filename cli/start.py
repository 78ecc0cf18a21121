"""How every program starts: before torch is imported, which takes a second and can fail.

if __name__ == "__main__":
    run_program("bench")
"""

import importlib
import os
import re
import signal
import sys
from pathlib import Path
from typing import NoReturn

REQUIREMENTS = Path(__file__).parents[1] / "requirements.txt"


def run_program(module: str) -> NoReturn:
    """Import a module, run its `main`, and exit with the status that it returns; with 2 and one
    line if a package is missing."""
    # Torch reads it when it is imported, and then asks Linux for huge pages, from which one row's
    # weights are fetched in 0.7 to 0.85 of the time (docs/results.md)
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    open_closed_streams()
    end_at_ctrl_c()
    try:
        program = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in required_packages():
            raise
        print(f"error: {error}; pip install -r requirements.txt brings all", file=sys.stderr)
        sys.exit(2)
    sys.exit(program.main())


def open_closed_streams() -> None:
    """Open the null device for each standard stream that is closed, as by `>&-`. Otherwise the next
    file that is opened would take its place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))


def end_at_ctrl_c() -> None:
    """Let Ctrl-C end the process without a traceback, until the program handles it. Where it is
    ignored, as under nohup, it stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def required_packages() -> list[str]:
    """Return the packages of requirements.txt, by the names that imports give them."""
    lines = REQUIREMENTS.read_text(encoding="utf-8").replace("-", "_")
    return re.findall(r"^\w+", lines, re.MULTILINE)

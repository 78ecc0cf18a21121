"""The start of every program, before torch is imported.

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
    """Import a module, run its `main`, and exit with the status that it returns. If a package is
    missing, print one line and exit with 2."""
    # Torch reads this when it is imported, and then asks Linux for huge pages. One row's weights
    # are read from these in 0.7 to 0.85 of the time
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    open_closed_streams()
    end_at_ctrl_c()
    try:
        program = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in required_packages():
            raise
        print(f"error: {error}; pip install -r requirements.txt installs all", file=sys.stderr)
        sys.exit(2)
    sys.exit(program.main())


def open_closed_streams() -> None:
    """Open the null device for each closed standard stream (`>&-`). Otherwise the next file that is
    opened would get its descriptor."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))


def end_at_ctrl_c() -> None:
    """Let Ctrl-C end the process without a traceback until the program handles it. If it is already
    ignored, for example under nohup, it stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def required_packages() -> list[str]:
    """Return the import names of the packages in requirements.txt."""
    lines = REQUIREMENTS.read_text(encoding="utf-8").replace("-", "_")
    return re.findall(r"^\w+", lines, re.MULTILINE)

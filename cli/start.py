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
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a kill keeps what Ctrl-C keeps
    sys.stdout.reconfigure(errors="replace")  # characters that the encoding lacks
    try:
        sys.exit(importlib.import_module(module).main())
    except KeyboardInterrupt:  # at most the imports; run_command_line handles it from then on
        sys.exit(130)
    except ModuleNotFoundError as error:
        if error.name not in required_packages():
            raise
        print(f"error: {error}; pip install -r requirements.txt installs all", file=sys.stderr)
        sys.exit(2)


def required_packages() -> list[str]:
    """Return the import names of the packages in requirements.txt."""
    lines = REQUIREMENTS.read_text(encoding="utf-8").replace("-", "_")
    return re.findall(r"^\w+", lines, re.MULTILINE)

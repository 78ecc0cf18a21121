"""What a program sees to before its imports, which take a second and can fail.

if __name__ == "__main__":  # before anything slow is imported
    from cli.start import guard_imports

    guard_imports()
"""

import os
import sys
from types import TracebackType

from cli.interrupts import end_quietly

MISTAKE = 2  # the exit status
INSTALL = "; pip install -r requirements.txt brings all that is needed"


def guard_imports() -> None:
    """From here on, until a command line runs, Ctrl-C ends the process without a traceback, and
    what cannot be imported is one line. --debug shows the traceback instead."""
    end_quietly()
    if "--debug" not in sys.argv:
        sys.excepthook = _explain


def _explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """One line for a failed import: packages that lack, a library that finds no memory."""
    if not isinstance(error, (ImportError, MemoryError, OSError)):
        sys.__excepthook__(kind, error, trace)
        return
    reason = str(error).strip() or "there is too little memory"  # a MemoryError has no words
    line = f"error: Python cannot load what it needs: {reason.splitlines()[-1]}"
    if isinstance(error, ModuleNotFoundError):
        line += INSTALL
    if sys.stderr is not None:
        print(line, file=sys.stderr, flush=True)
    os._exit(MISTAKE)  # a hook cannot choose the status, and nothing has begun

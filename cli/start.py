"""What a program sees to before its imports, which take a second and can fail.

if __name__ == "__main__":  # before anything slow is imported
    from cli.start import guard_imports

    guard_imports()
"""

import os
import sys
from types import TracebackType

from cli.interrupts import end_quietly

MISTAKE, UNFORESEEN = 2, 70  # exit statuses, the second from sysexits.h
NEEDED = 640 * 2**20  # bytes of addresses; with less torch is not imported, or hangs (measured)
NO_MEMORY = "there is too little memory"
INSTALL = "; pip install -r requirements.txt brings all that is needed"


def guard_imports() -> None:
    """From here on, until a command line runs, Ctrl-C ends the process without a traceback, and
    what cannot be imported is one line. --debug shows the traceback instead."""
    end_quietly()
    # Torch reads it when it is imported, and then asks Linux for huge pages, from which one row's
    # weights are fetched in 0.7 to 0.85 of the time (docs/results.md)
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    limit = address_limit()
    if limit < NEEDED:
        line = f"ulimit -v allows {limit // 2**10}, and importing torch takes {NEEDED // 2**10}"
        end(f"error: Python cannot load what it needs: {NO_MEMORY}: {line}", MISTAKE)
    if "--debug" not in sys.argv:
        sys.excepthook = _explain


def address_limit() -> int:
    """The bytes of addresses that this process may have."""
    try:
        import resource  # which not every system has
    except ImportError:
        return sys.maxsize
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def _explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """One line for a failed import: packages that lack, a library that finds no memory."""
    reason = str(error).strip() or NO_MEMORY  # a MemoryError has no words
    reason = reason.splitlines()[-1]
    status = MISTAKE
    line = f"error: Python cannot load what it needs: {reason}"
    if isinstance(error, ModuleNotFoundError):
        line += INSTALL
    elif not isinstance(error, (ImportError, MemoryError, OSError)) and "bad_alloc" not in reason:
        status = UNFORESEEN
        line = f"error: {kind.__name__}: {reason}; nobody foresaw this, --debug shows where"
    end(line, status)


def end(line: str, status: int) -> None:
    """Say this and end: a hook cannot choose the status, and nothing has begun."""
    if sys.stderr is not None:
        print(line, file=sys.stderr, flush=True)
    os._exit(status)

"""The start of every program, before torch is imported.

run_program("dynatree_lab.cli.main")
"""

import importlib
import os
import re
import signal
import sys
import tomllib
from pathlib import Path
from typing import NoReturn

from dynatree_lab import describe_clash

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
INSTALLED_PAIR = Path(__file__).parents[1] / "tiny"


def run_core() -> NoReturn:
    """Run dynatree.py, as the command `dynatree` of an installed project."""
    dynatree = importlib.import_module("dynatree")
    if INSTALLED_PAIR.exists():  # in a clone, dynatree.py finds models/tiny
        dynatree.TINY = INSTALLED_PAIR
    sys.exit(dynatree.main())


def run_lab() -> NoReturn:
    """Run the full program, as the command `dynatree-lab`."""
    run_program("dynatree_lab.cli.main")


def run_bench() -> NoReturn:
    """Run the benchmark of all methods, as the command `dynatree-bench`."""
    run_program("dynatree_lab.benchmark.measure")


def run_program(module: str) -> NoReturn:
    """Import a module, run its `main`, and exit with the status that it returns. If a package is
    missing, or a file of the user's hides one of the core, print one line and exit with 2."""
    # Torch reads this when it is imported, and then asks Linux for huge pages. One row's weights
    # are read from these in 0.7 to 0.85 of the time
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a kill keeps what Ctrl-C keeps
    sys.stdout.reconfigure(errors="replace")  # characters that the encoding lacks
    try:
        sys.exit(importlib.import_module(module).main())
    except KeyboardInterrupt:  # at most the imports; run_command_line handles it from then on
        sys.exit(130)
    except ImportError as error:
        hint = "pip install tqdm pandas installs both"
        if PROJECT.exists():
            hint = f"pip install -e '{PROJECT.parent}[lab]' installs all"
        if error.name not in required_packages() and not (hint := describe_clash()):
            raise
        print(f"error: {error}; {hint}", file=sys.stderr)
        sys.exit(2)


def required_packages() -> list[str]:
    """Return the import names of the packages in pyproject.toml, with those of the extra `lab`;
    without a clone only the latter, because pip has then installed the others."""
    if not PROJECT.exists():
        return ["tqdm", "pandas"]
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    needed = project["dependencies"] + project["optional-dependencies"]["lab"]
    return [re.match(r"[\w-]+", each)[0].replace("-", "_") for each in needed]

"""Python files of the user's that add methods (--load): mine.py has lab.METHODS["mine"] = Mine.

python -m dynatree_lab --method mine --load mine.py --prompt "She opened the door"
"""

import argparse
import hashlib
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_loader
from pathlib import Path

from dynatree_lab.errors import UsageError
from dynatree_lab.methods import METHODS


def add_load_option(parser: argparse._ActionsContainer) -> None:
    file = "Python file that adds a method to dynatree_lab.METHODS (repeatable)"
    parser.add_argument("--load", action="append", metavar="FILE", help=file)


def load_files(words: Sequence[str]) -> None:
    """Import the files of --load, wherever these options stand. Raises UsageError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_load_option(parser)
    try:
        found, _ = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise UsageError(str(error)) from error
    import_files(found.load or [])


def import_files(files: Iterable[str]) -> None:
    """Import files as modules that are named by their stems. Raises UsageError for a file that is
    missing, has the name of another module or replaces a method of others, and the file's own
    errors."""
    for file in files:
        before = dict(METHODS)
        path = Path(file).resolve()
        name = path.stem
        if not path.is_file():
            raise UsageError(f"--load {file}: no such file")
        other = find_spec(name) if name.isidentifier() else None
        if other and other.origin != str(path):
            raise UsageError(f"--load {file}: another module is named {name}; rename the file")
        loader = SourceFileLoader(name, str(path))
        module = module_from_spec(spec_from_loader(name, loader))
        sys.modules[name] = module  # where dataclasses look it up while it is run
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))  # for its own imports
        loader.exec_module(module)
        for method, kind in before.items():
            if METHODS.get(method) is not kind and kind.__module__ != name:
                METHODS.update(before)
                what = f"it replaces another method named {method}"
                raise UsageError(f"--load {file}: {what}; use another name")


def digest_files(files: Iterable[str]) -> dict[str, str]:
    """Return the sha256 of each file, by its path."""
    return {file: hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files}

"""--page and --trace: what was recorded of a run, as one file that needs nothing else.

    save_trace(trace.as_json(prompt, about), page="run.html", trace=None)

The page is page/template.html with colours, style, scripts and the data put in. Text of a user or a
model is data: it stands in a JSON string without any `<`, and the script shows it as text.
"""

import json
import os
from contextlib import suppress
from pathlib import Path

from cli.errors import UsageError, say, writing
from cli.files import require_writable, write_whole
from methods import METHODS

FOLDER = Path(__file__).parent.parent / "page"
SCRIPTS = (  # in their order: the first make elements and read the data, the last starts the page
    "elements.js",
    "run.js",
    "tree.js",
    "rows.js",
    "overview.js",
    "words.js",
    "about.js",
    "main.js",
)
MARKS = (b'{"format":{"name":"dynatree-trace"', b"<title>DynaTree: a run</title>")  # of our files


def require_places(page: str | None, trace: str | None) -> None:
    """Raise UsageError if page or trace cannot be written, if they are one file, or if either would
    replace another kind of file: weights, the prompt, the text that is printed."""
    names = [name for name in (page, trace) if name is not None]
    for name in names:
        with writing(name):
            require_writable(Path(name))
            if os.path.exists(name) and is_foreign(name):
                raise UsageError(f"{name} is no page or trace of a run; it is not overwritten")
    if len(set(map(os.path.realpath, names))) < len(names):
        raise UsageError("--page and --trace must not be one file")


def is_foreign(name: str) -> bool:
    """Whether a file is neither empty nor a page or a trace, or is where we print."""
    with open(name, "rb") as file:
        start = file.read(2000)
        status = os.fstat(file.fileno())
    for descriptor in (1, 2):
        with suppress(OSError):  # which may be closed
            if os.path.samestat(status, os.fstat(descriptor)):
                return True
    return bool(start) and not any(mark in start for mark in MARKS)


def save_trace(content: dict, page: str | None, trace: str | None) -> None:
    """Write the page, the trace, or both, whole or not at all, and say where they are. Raises
    UsageError."""
    for kind, name, form in (("trace", trace, as_data), ("page", page, as_page)):
        if name:
            with writing(name):
                write_whole(Path(name), form(content))
            say(f"{kind} written to {name}")


def as_data(content: dict) -> str:
    return json.dumps(content, separators=(",", ":"))


def as_page(content: dict) -> str:
    """Return the page with this trace in it."""
    parts = {
        "/* style */": colours(content["settings"]["method"]) + read("style.css"),
        "/* script */": "\n".join(map(read, SCRIPTS)),
        "/* data */": as_data(content).replace("<", "\\u003c"),  # no end of the script inside
    }
    text = read("template.html")
    for place, part in parts.items():
        text = text.replace(place, part, 1)
    return text


def colours(method: str) -> str:
    """Return the figures' colours as CSS: of each part of the work, and of the method."""
    found = json.loads(read("colours.json"))
    methods = found["methods"]
    parts = found["parts"] | {"method": methods[list(METHODS).index(method) % len(methods)]}
    names = "".join(f"--{name}-colour: {colour}; " for name, colour in parts.items())
    return f":root {{ {names}}}\n"


def read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")

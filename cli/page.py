"""--page and --trace: what was collected of a run, as one file that needs nothing else.

    save_trace(trace.as_json(prompt, about), page="run.html", trace=None)

The page is page/template.html with the style, the scripts and the data put in. Whatever a user or a
model wrote is data: it stands in a JSON string, in which no `<` is left, and the script shows it as
text.
"""

import json
from pathlib import Path

from cli.errors import UsageError
from engine.files import write_whole

FOLDER = Path(__file__).parent.parent / "page"
SCRIPTS = (  # in their order: the first make elements and read the data, the last starts the page
    "elements.js",
    "run.js",
    "words.js",
    "text.js",
    "layout.js",
    "tree.js",
    "mask.js",
    "caches.js",
    "thresholds.js",
    "time.js",
    "details.js",
    "about.js",
    "steps.js",
    "pointing.js",
    "keys.js",
    "main.js",
)
PARTS = {"/* style */": ("style.css",), "/* script */": [f"script/{name}" for name in SCRIPTS]}
DATA = "/* data */"


def save_trace(content: dict, page: str | None, trace: str | None) -> None:
    """Write the page, the trace, or both, whole or not at all. Raises UsageError."""
    data = json.dumps(content, separators=(",", ":"))
    if trace:
        save(trace, data)
    if page:
        save(page, as_page(data))


def as_page(data: str) -> str:
    """The page with this JSON in it."""
    text = (FOLDER / "template.html").read_text(encoding="utf-8")
    for place, names in PARTS.items():
        parts = [(FOLDER / name).read_text(encoding="utf-8") for name in names]
        text = text.replace(place, "\n".join(parts), 1)
    return text.replace(DATA, data.replace("<", "\\u003c"), 1)  # no end of the script inside


def save(name: str, text: str) -> None:
    try:
        write_whole(Path(name), text)
    except (OSError, ValueError) as error:
        raise not_written(name, error) from error


def not_written(name: str, error: OSError | ValueError) -> UsageError:
    """ValueError: what no file can be called."""
    reason = error.strerror if isinstance(error, OSError) else error
    return UsageError(f"{name} cannot be written: {reason}")

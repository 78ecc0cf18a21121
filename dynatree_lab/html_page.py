"""The HTML page of a run: one file without dependencies.

    Path("run.html").write_text(as_page(result.data), encoding="utf-8")

The page is page/template.html with colours, style, scripts and data inserted. Text from a user or a
model is data: it is in a JSON string without any `<`, and the script shows it as text.
"""

import json
from pathlib import Path

from dynatree_lab.methods import METHODS

FOLDER = Path(__file__).parent / "page"
SCRIPTS = (  # in order: the first two make elements and read the data, the last starts the page
    "elements.js",
    "run.js",
    "tree.js",
    "rows.js",
    "overview.js",
    "words.js",
    "about.js",
    "main.js",
)


def as_data(content: dict) -> str:
    """Return the data of a run as JSON."""
    return json.dumps(content, separators=(",", ":"))


def as_page(content: dict) -> str:
    """Return the HTML page that shows this data."""
    parts = {
        "/* style */": colours(content["settings"]["method"]) + read("style.css"),
        "/* script */": "\n".join(map(read, SCRIPTS)),
        "/* data */": as_data(content).replace("<", "\\u003c"),  # no text can end the script
    }
    text = read("template.html")
    for place, part in parts.items():
        text = text.replace(place, part, 1)
    return text


def colours(method: str) -> str:
    """Return CSS variables with the colours of the figures: of each part, and of the method."""
    found = json.loads(read("colours.json"))
    methods = found["methods"]
    place = list(METHODS).index(method) if method in METHODS else len(METHODS)
    parts = found["parts"] | {"method": methods[place % len(methods)]}
    names = "".join(f"--{name}-colour: {colour}; " for name, colour in parts.items())
    return f":root {{ {names}}}\n"


def read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")

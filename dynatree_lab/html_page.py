"""The HTML page of a run: one file without dependencies.

    Path("run.html").write_text(as_page(result.data), encoding="utf-8")

A page is a template with colours, styles, scripts and data inserted; those of a run are in page/.
Text from a user or a model is data: it is in a JSON string without any `<`, and the script shows it
as text.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from dynatree_lab.methods import METHODS

FOLDER = Path(__file__).parent / "page"
SCRIPTS = (  # in order: the first three are read by the others, the last starts the page
    "elements.js",
    "layout.js",
    "run.js",
    "tree.js",
    "rows.js",
    "overview.js",
    "words.js",
    "about.js",
    "main.js",
)


def as_data(content: dict) -> str:
    """Return the data of a page as JSON."""
    return json.dumps(content, separators=(",", ":"))


def as_page(content: dict) -> str:
    """Return the HTML page that shows the data of a run."""
    own = {"method": method_colour(content["settings"]["method"])}
    return fill("template.html", ("base.css", "style.css"), SCRIPTS, own, content)


def fill(
    template: str,
    styles: Sequence[str],
    scripts: Sequence[str],
    own_colours: dict[str, str],
    content: dict,
) -> str:
    """Return a template of page/ with these files, colours and data. own_colours: CSS variables
    beside those of the figures' parts."""
    colours = load_colours()["parts"] | own_colours
    variables = "".join(f"--{name}-colour: {colour}; " for name, colour in colours.items())
    parts = {
        "/* style */": f":root {{ {variables}}}\n" + "\n".join(map(read, styles)),
        "/* script */": "\n".join(map(read, scripts)),
        "/* data */": as_data(content).replace("<", "\\u003c"),  # no text can end the script
    }
    text = read(template)
    for place, part in parts.items():
        text = text.replace(place, part, 1)
    return text


def load_colours() -> dict:
    """Return the colours of the figures: `parts` by name, and the list `methods`."""
    return json.loads(read("colours.json"))


def method_colour(method: str) -> str:
    """Return the colour of a method. A method of the user's has that of the first one."""
    colours = load_colours()["methods"]
    place = list(METHODS).index(method) if method in METHODS else len(METHODS)
    return colours[place % len(colours)]


def read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")

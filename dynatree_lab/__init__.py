"""DynaTree beyond the five files of the algorithm, under one name.

    import dynatree_lab as lab

    pair = lab.load_pair()
    result = lab.write_text(pair, "She opened the door", "dynatree tau=0.01")
    print(lab.draw_tree(result.steps[3], pair.tokenizer))

docs/python.md shows every name. A name is imported when it is first used, so `import dynatree_lab`
does not import torch: the programs set how torch allocates memory before it is imported. Paths in
the docstrings of this package, such as methods/drawn.py, start at this folder.

methods    all methods but those of draft_tree.py
engine     the fast model: CUDA graphs, windows, strict mode, ranks
generation  one text: its options, its loop, its steps
replay     what a method does, judged by recorded texts

errors     the error of a request that cannot be carried out
tokens     tokenizers, prompts, streamed text, stop texts
pair       target and draft: device, dtypes, checkpoints
request    a request to continue a prompt, and its steps
metrics    the numbers of one generation
drawing    an iteration's tree as text
trace      the gates that decided each tree, and what was accepted, as data
html_page  this data as an HTML page, from the files in page/
playground  a page that replays a text under other settings
page       the parts of both pages, in JavaScript
result     a text in pieces, with its steps, metrics and page; a session of several texts
folders    new checkpoints, written whole or not at all
enumeration  the distribution of a method's sampled text, compared with the target's own

cli        the command line
benchmark  the benchmark of all methods: tables, results files, figures
training   draft models and EAGLE heads
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

__version__ = "0.6.0"
PLACES = {  # of each name, the module that has it
    "load_pair": "pair",
    "stream_text": "result",
    "write_text": "result",
    "Session": "result",
    "save_page": "result",
    "draw_tree": "drawing",
    "generate": "generation.generate",
    "GenerationConfig": "generation.config",
    "METHODS": "methods",
    "run": "cli.main",
    "Sampling": "methods.sampler",
    "distribution_difference": "enumeration",
}
__all__ = list(PLACES)
CORE = ("gpt_neox", "draft_tree", "verify", "sampling", "dynatree")  # modules without a package


def __getattr__(name: str) -> object:
    """Import a public name of the package (PEP 562)."""
    if name not in PLACES:
        raise AttributeError(f"dynatree_lab has no {name!r}; it has {', '.join(PLACES)}")
    try:
        return getattr(import_module(f"dynatree_lab.{PLACES[name]}"), name)
    except (ImportError, AttributeError) as error:
        if (clash := describe_clash()) and clash not in str(error):
            raise ImportError(f"{error}: {clash}") from error
        raise


def describe_clash() -> str:
    """Return, after an import has failed, which files of the user's hide modules of the core. It is
    empty if none does."""
    found = []
    for name in CORE:
        spec, own = find_spec(name), Path(__file__).resolve().parents[1] / f"{name}.py"
        file = spec and (spec.origin or spec.submodule_search_locations[0])  # a folder's has none
        if file and Path(file).resolve() != own:
            found.append(f"{file} is imported instead of {own}; rename yours")
    return ", ".join(found)


def __dir__() -> list[str]:
    return __all__

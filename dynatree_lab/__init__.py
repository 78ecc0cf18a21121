"""DynaTree beyond the five files of the algorithm, under one name.

    import dynatree_lab as lab

    pair = lab.load_pair()
    result = lab.write_text(pair, "The ship sailed at dawn", "dynatree tau=0.01")
    print(lab.draw_tree(result.steps[3], pair.tokenizer))

docs/python.md shows every name. A name is imported when it is first used, so `import dynatree_lab`
does not import torch: the programs set how torch allocates memory before it is imported. Paths in
the docstrings of this package, such as methods/drawn.py, start at this folder.

engine     the fast model: CUDA graphs, windows, strict mode, ranks
methods    all methods but those of draft_tree.py
cli        the command line, requests from Python, the data of the page
training   draft models and EAGLE heads
benchmark  what bench.py measures: tables, results files, figures
page       the HTML page, in JavaScript
errors     the error of a request that cannot be carried out
"""

from importlib import import_module

__version__ = "0.6.0"
PLACES = {  # of each name, the module that has it
    "load_pair": "cli.models",
    "stream_text": "cli.request",
    "write_text": "cli.result",
    "Session": "cli.result",
    "save_page": "cli.result",
    "draw_tree": "cli.terminal",
    "generate": "engine.generate",
    "GenerationConfig": "engine.generation_config",
    "METHODS": "methods",
    "Sampling": "methods.sampler",
}
__all__ = list(PLACES)


def __getattr__(name: str) -> object:
    """Import a public name of the package (PEP 562)."""
    if name not in PLACES:
        raise AttributeError(f"dynatree_lab has no {name!r}; it has {', '.join(PLACES)}")
    return getattr(import_module(f"dynatree_lab.{PLACES[name]}"), name)


def __dir__() -> list[str]:
    return __all__

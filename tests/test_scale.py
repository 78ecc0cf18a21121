"""Claim: the table of docs/scale.md is what its formulas give for what it says is assumed.

python -m pytest tests/test_scale.py
"""

import re
from pathlib import Path

import torch
from conftest import random_config

from engine.checkpoint import Config
from gpt_neox import weight_bytes

PAGE = (Path(__file__).parent.parent / "docs" / "scale.md").read_text(encoding="utf-8")
SIZES = {  # layers, hidden size, heads, width of the MLP, ids
    "Pythia-12B": (36, 5120, 40, 20480, 50688),
    "GPT-NeoX-20B": (44, 6144, 64, 24576, 50432),
}
DRAFT = (6, 512, 8, 2048, 50304)  # Pythia-70M


def assumed() -> dict[str, float]:
    """The symbols that the page gives a value."""
    rows = re.findall(r"^\| (\w) \| ([\d.e-]+) \|", PAGE, re.MULTILINE)
    return {symbol: float(value) for symbol, value in rows}


def config_of(sizes: tuple[int, ...]) -> Config:
    n_layers, hidden_size, n_heads, intermediate_size, vocab_size = sizes
    return random_config(
        n_layers=n_layers,
        hidden_size=hidden_size,
        n_heads=n_heads,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
    )


def read_bytes(config: Config, b: float) -> float:
    """W: the weights that a pass reads."""
    whole = weight_bytes(config, torch.float16) * b / torch.float16.itemsize
    return whole - b * config.vocab_size * config.hidden_size


def pass_s(config: Config, n: int, rows: float) -> tuple[float, float]:
    """Seconds of a target pass on n GPUs: reading, and all that comes of being several."""
    value = assumed()
    cache = 2 * config.n_layers * config.hidden_size * value["b"]
    read = (read_bytes(config, value["b"]) + value["S"] * cache) / (n * value["B"])
    if n == 1:
        return read, 0.0
    sent = rows * config.hidden_size * value["b"]
    one_sum = value["a"] + 2 * (n - 1) / n * sent / value["C"]
    scores = rows * config.vocab_size * value["b"]
    gather = value["a"] + (n - 1) / n * scores / value["C"]
    return read, (config.n_layers + 1) * one_sum + gather + value["c"]


def line(model: str, n: int) -> str:
    """A row of the page's table."""
    config = config_of(SIZES[model])
    value = assumed()
    weights = weight_bytes(config, torch.float16) / n
    cache = 2048 * 2 * config.n_layers * config.hidden_size * value["b"] / n
    read, together = pass_s(config, n, value["N"])
    iteration = read + together + value["D"]
    alone = sum(pass_s(config, 1, value["N"])) + value["D"]
    cells = [model, str(n), f"{weights / 1e9:.1f}", f"{cache / 1e9:.2f}"]
    cells += [f"{1e3 * seconds:.2f}" for seconds in (read, together, iteration)]
    cells += [f"{value['D'] / iteration:.0%}", f"{alone / iteration:.2f}"]
    cells.append(f"{iteration / sum(pass_s(config, n, 1)):.2f}")
    return f"| {' | '.join(cells)} |"


def test_the_table_is_what_its_formulas_give() -> None:
    expected = [line(model, n) for model in SIZES for n in (1, 2, 4, 8)]
    assert re.findall(r"^\| (?:Pythia|GPT).*", PAGE, re.MULTILINE) == expected


def test_what_the_sentences_say_of_it() -> None:
    value = assumed()
    draft = read_bytes(config_of(DRAFT), value["b"])
    assert f"its {draft / 1e6:.0f} MB would take {1e3 * draft / value['B']:.2f}" in PAGE
    sent = value["N"] * SIZES["Pythia-12B"][1] * value["b"]
    assert f"(32 rows of 5,120 numbers are {sent / 1e6:.1f} MB)" in PAGE
    rows = 300e12 * value["b"] / (2 * value["B"])
    assert f"With 300e12 operations a second and the B above that is {rows:.0f} rows" in PAGE

"""Claim: an iteration asks no more of the device than the table says.

Launches, waits and copies are what an iteration costs on a fast GPU beside its passes; how much,
only a GPU can tell. Where they come from: python tests/pretend_cuda -m pretend_cuda.counts
"""

import pytest

from engine.sampling import Sampling
from gpt_neox import GPTNeoX
from methods import METHODS

from .counts import count_iterations, load_pair, nodes_of_layer

pytestmark = pytest.mark.cuda
# Of an iteration, in the mean over a text and rounded; a greedy text unless it says sampled
MOST = """
                   launches    waits    copies up
ar                      7.0      3.0          2.0
linear                 41.2      7.8         17.2
fixed                  29.3      5.6         11.8
dynatree               24.7      5.0          9.9
dyspec                 42.9      7.2         17.4
deagle                 26.5      5.1         10.5
recycle                 8.7      4.0          2.7
graft                  18.5      5.0          6.5
auto                   12.8      4.5          4.8
linear sampled        188.0     15.0         18.1
dynatree sampled       53.9     12.0         10.2
"""
MOST_NODES = 10  # of a layer, in a graph


def read_table() -> dict[str, dict[str, float]]:
    """MOST, by row and by what counts.py calls it."""
    table = {}
    for line in MOST.strip().splitlines()[1:]:
        *name, launches, waits, copies = line.split()
        row = {"kernel": float(launches), "sync": float(waits), "h2d": float(copies)}
        table[" ".join(name)] = row
    return table


@pytest.fixture(scope="module")
def pair() -> tuple[GPTNeoX, GPTNeoX, list[int]]:
    return load_pair("cuda")


@pytest.mark.parametrize("name", read_table())
def test_an_iteration_asks_for_little(name: str, pair: tuple[GPTNeoX, GPTNeoX, list[int]]) -> None:
    method = name.removesuffix(" sampled")
    sampling = Sampling(0.8, 0.95, seed=1) if method != name else None
    counts = count_iterations(pair, method, sampling)
    for kind, most in read_table()[name].items():
        found = round(counts.of_each(kind), 1)
        assert found <= most, f"{found} of {kind}:\n" + "\n".join(counts.lines(30))


def test_the_table_has_every_method() -> None:
    assert set(METHODS) <= set(read_table())


def test_a_layer_has_few_nodes() -> None:
    assert nodes_of_layer() <= MOST_NODES

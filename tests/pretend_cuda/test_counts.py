"""Limits on the launches, waits and copies of an iteration of each method.

On a fast GPU these are the cost of an iteration in addition to its passes. Their time can only be
measured on a GPU. To list where they come from: python tests/pretend_cuda -m pretend_cuda.counts
"""

import pytest

from engine.model import FastGPTNeoX
from methods import METHODS

from .counts import count_iterations, count_pythia_kernels, load_pair

pytestmark = pytest.mark.cuda
# Rounded means per iteration over one greedy text
LIMITS = """
                   launches    waits    copies up
ar                      0.0      1.0          1.0
linear                  0.0      5.8          5.8
confident               0.0      3.2          3.2
fixed                   1.1      3.6          3.6
specinfer               5.2      5.8          5.8
sequoia                 4.8      6.5          6.5
dynatree                0.8      3.0          3.0
dyspec                  3.4      5.2          5.2
opttree                 2.8      4.2          4.2
beam                    4.2      6.7          6.7
deagle                  1.8      3.1          3.1
recycle                 0.4      1.0          1.0
lookup                  0.0      1.0          1.0
graft                   0.9      2.0          2.0
auto                    1.7      1.8          1.8
"""
# Round limits, because the numbers of kernels have not been compared with a profile on a GPU
PYTHIA = {"target, 32 rows": 410, "draft level": 100, "iteration": 1000, "ar": 410}


TABLE = {}
for row in LIMITS.strip().splitlines()[1:]:
    name, launches, waits, copies = row.split()
    TABLE[name] = {"kernel": launches, "sync": waits, "h2d": copies}


@pytest.fixture(scope="module")
def pair() -> tuple[FastGPTNeoX, FastGPTNeoX, list[int]]:
    return load_pair("cuda")


@pytest.mark.parametrize("method", TABLE)
def test_an_iteration_stays_within_the_limits(
    method: str, pair: tuple[FastGPTNeoX, FastGPTNeoX, list[int]]
) -> None:
    counts = count_iterations(pair, method)
    for kind, limit in TABLE[method].items():
        found = round(counts.per_iteration(kind), 1)
        assert found <= float(limit), f"{found} of {kind}:\n{counts.format_sites()}"
    staged = sum(n for site, n in counts.sites.items() if site[:2] == ("h2d", "pinned"))
    n_events = counts.per_iteration("event") * counts.n_iterations
    assert round(n_events) == staged, "one for what is staged, none to time"


def test_the_table_has_only_methods() -> None:
    """Allow methods without a row: a new method has no limit until it gets one."""
    assert set(TABLE) <= set(METHODS)


def test_passes_of_the_default_pair_have_few_kernels() -> None:
    for name, n in count_pythia_kernels().items():
        assert n <= PYTHIA[name], f"{n} kernels: {name}"

"""Claim: every method writes on the device the ids that it writes on the CPU, in every way.

In float32, where nothing but a mistake can make them differ here: the values come from the CPU's
own kernels. Half precision is left to a GPU.
"""

import json

import pytest
from conftest import TINY, generate

from cli.main import main
from cli.metrics import token_ids
from engine.model import FastGPTNeoX
from engine.passes import Window
from methods import METHODS
from methods.sampler import DrawingSampler, Sampling

from .counts import TEXT, load_pair, settings_of

pytestmark = pytest.mark.cuda
Pair = tuple[FastGPTNeoX, FastGPTNeoX, list[int]]  # target, draft and a prompt
WAYS = {
    "greedy": {},
    "rebuild": {"commit": "rebuild"},
    "window": {"window": Window(64, sinks=4)},
    "sampled": {"sampling": Sampling(0.8, 0.9, seed=3)},
    "long prompt": {},
}
N_TOKENS = {"window": 100, "long prompt": 20}  # where not 60
on_cuda = pytest.fixture(lambda: load_pair("cuda"), scope="module", name="on_cuda")
on_cpu = pytest.fixture(lambda: load_pair("cpu"), scope="module", name="on_cpu")


def write(pair: Pair, method: str, way: str) -> list[int]:
    target, draft, prompt = pair
    if way == "long prompt":
        prompt = prompt * 30  # more than one chunk of prefill, and than any pass of a fixed shape
    n_tokens = N_TOKENS.get(way, 60)
    return token_ids(generate(target, draft, prompt, settings_of(method), n_tokens, **WAYS[way]))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", METHODS)
def test_the_ids_are_those_of_the_cpu(
    method: str, way: str, on_cuda: Pair, on_cpu: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_as_gpu = DrawingSampler.draw_by_race
    monkeypatch.setattr(DrawingSampler, "draw_by_points", draw_as_gpu)
    expected = write(on_cpu, method, way)
    assert len(expected) == N_TOKENS.get(way, 60)
    assert write(on_cuda, method, way) == expected


def test_the_command_line_compares(on_cpu: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    """--compare warms up, writes and runs ar, all over the same graphs."""
    arguments = ["--device", "cuda", "--dtype", "float32", "--prompt", TEXT, "--compare", "--json"]
    arguments += ["--target", str(TINY / "target"), "--draft", str(TINY / "draft")]
    assert main([*arguments, "--max-new-tokens", "60", "--ignore-eos"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["compare"]["exact"] and report["graphs"]["n"] > 0
    assert report["token_ids"] == write(on_cpu, "ar", "greedy")

"""Tests that every method writes the same ids on the pretended device as on the CPU.

The device computes with the CPU's kernels, so in float32 only a bug can change the ids. In half
precision they depend on the number of rows in a pass. There the ids with graphs must be those
without, because both pad the passes to the same shapes.
"""

import json

import pytest
import torch
from conftest import LARGE_SETTINGS, TINY, generate

from cli.main import main
from cli.metrics import token_ids
from engine.eagle_head import load_head
from engine.model import FastGPTNeoX
from engine.passes import Window
from methods import METHODS
from methods.sampler import DrawingSampler, Sampling

from .counts import TEXT, load_pair, make_settings

pytestmark = pytest.mark.cuda
Pair = tuple[FastGPTNeoX, FastGPTNeoX, list[int]]  # target, draft and a prompt
OPTIONS = {
    "greedy": {},
    "rebuild": {"commit": "rebuild"},
    "window": {"window": Window(64, sinks=4)},
    "sampled": {"sampling": Sampling(0.8, 0.9, seed=3)},
    "long prompt": {},
    "head": {},
    "large": {},
}
N_TOKENS = {"window": 100, "long prompt": 20, "large": 20}  # others: 60
on_cuda = pytest.fixture(lambda: load_pair("cuda"), scope="module", name="on_cuda")
on_cpu = pytest.fixture(lambda: load_pair("cpu"), scope="module", name="on_cpu")


def write(pair: Pair, method: str, case: str) -> list[int]:
    target, draft, prompt = pair
    if case == "head":
        draft = load_head(TINY / "eagle", TINY / "target", target.device, target.dtype)
    if case == "long prompt":
        prompt = prompt * 30  # longer than a chunk of prefill and any fixed shape
    settings = make_settings(method)
    if case == "large":
        settings = LARGE_SETTINGS.get(method, settings)
    n_tokens = N_TOKENS.get(case, 60)
    return token_ids(generate(target, draft, prompt, settings, n_tokens, **OPTIONS[case]))


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("method", METHODS)
def test_the_ids_are_those_of_the_cpu(
    method: str, case: str, on_cuda: Pair, on_cpu: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_as_gpu = DrawingSampler.draw_by_exponential_race
    monkeypatch.setattr(DrawingSampler, "draw_by_inverse_cdf", draw_as_gpu)
    expected = write(on_cpu, method, case)
    assert len(expected) == N_TOKENS.get(case, 60)
    assert write(on_cuda, method, case) == expected


@pytest.fixture(scope="module", params=[torch.float16, torch.bfloat16], ids=str)
def in_half(request: pytest.FixtureRequest, on_cuda: Pair) -> Pair:
    pair = (TINY / name for name in ("target", "draft"))
    models = [FastGPTNeoX.from_pretrained(folder, "cuda", request.param) for folder in pair]
    return *models, on_cuda[2]


@pytest.mark.parametrize("method", METHODS)
def test_graphs_keep_the_ids_of_half_precision(method: str, in_half: Pair) -> None:
    settings = make_settings(method)
    eager, replayed = (
        token_ids(generate(*in_half, settings, 8, graphs=graphs)) for graphs in (False, True)
    )
    assert len(eager) == 8 and eager == replayed


def test_the_command_line_compares(on_cpu: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    """Check --compare, which warms up, writes a text and runs ar with the same graphs."""
    arguments = ["--device", "cuda", "--dtype", "float32", "--prompt", TEXT, "--compare", "--json"]
    arguments += ["--target", str(TINY / "target"), "--draft", str(TINY / "draft")]
    assert main([*arguments, "--max-new-tokens", "60", "--ignore-eos"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["compare"]["exact"] and report["graphs"]["n"] > 0
    assert report["token_ids"] == write(on_cpu, "ar", "greedy")

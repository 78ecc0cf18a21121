"""Tests that methods write the same ids on the pretended device as on the CPU.

The device computes with the CPU's kernels, so in float32 only a bug can change the ids.
"""

import json
import re

import pytest
from fast import generate
from growing import LARGE_SETTINGS
from small import TINY
from tokenizers import Tokenizer

import dynatree
from dynatree_lab.cli.main import main
from dynatree_lab.engine.eagle_head import load_head
from dynatree_lab.engine.model import FastGPTNeoX
from dynatree_lab.engine.passes import Window
from dynatree_lab.engine.streamed import load_streamed
from dynatree_lab.generation.kept import KeptCache
from dynatree_lab.methods import METHODS
from dynatree_lab.methods.retrieval import Graft
from dynatree_lab.methods.sampler import DrawingSampler, Sampling
from dynatree_lab.metrics import token_ids

pytestmark = pytest.mark.cuda
Pair = tuple[FastGPTNeoX, FastGPTNeoX, list[int]]  # target, draft and a prompt
TEXT = "The harbour lay quiet under the morning fog, and the boats that had gone out at dawn"
OPTIONS = {
    "greedy": {},
    "rebuild": {"commit": "rebuild"},
    "window": {"window": Window(64, sinks=4)},
    "sampled": {"sampling": Sampling(0.8, 0.9, seed=3)},
    "long prompt": {},
    "head": {},
    "streamed": {},
    "large": {},
}
N_TOKENS = {"window": 100, "long prompt": 20, "large": 20}  # others: 40
# Of levels, retrieval and drawn candidates. tests/lab/test_cuda.py has greedy text of every method
CASES = [(method, case) for method in ("dynatree", "graft") for case in OPTIONS]
CASES.append(("dyspec", "sampled"))


def load_pair(device: str) -> Pair:
    """Return the embedded target and draft, and a prompt."""
    target, draft = (
        FastGPTNeoX.from_pretrained(TINY / name, device) for name in ("target", "draft")
    )
    tokenizer = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))
    return target, draft, tokenizer.encode(TEXT).ids


@pytest.fixture(scope="module")
def on_cuda() -> Pair:
    return load_pair("cuda")


@pytest.fixture(scope="module")
def on_cpu() -> Pair:
    return load_pair("cpu")


def write(pair: Pair, method: str, case: str) -> list[int]:
    target, draft, prompt = pair
    if case == "head":
        draft = load_head(TINY / "eagle", TINY / "target", target.device, target.dtype)
    if case == "streamed":
        target = load_streamed(TINY / "target", target.device, target.dtype, budget=40_000_000)
    if case == "long prompt":
        prompt = prompt * 30  # longer than a chunk of prefill and any fixed shape
    settings = LARGE_SETTINGS[method] if case == "large" else METHODS[method]()
    n_tokens = N_TOKENS.get(case, 40)
    return token_ids(generate(target, draft, prompt, settings, n_tokens, **OPTIONS[case]))


@pytest.mark.parametrize(("method", "case"), CASES)
def test_the_ids_are_those_of_the_cpu(
    method: str, case: str, on_cuda: Pair, on_cpu: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_as_gpu = DrawingSampler.draw_by_exponential_race
    monkeypatch.setattr(DrawingSampler, "draw_by_inverse_cdf", draw_as_gpu)
    expected = write(on_cpu, method, case)
    assert len(expected) == N_TOKENS.get(case, 40)
    assert write(on_cuda, method, case) == expected


def test_the_command_line_compares(on_cpu: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    """Check --compare, which warms up, writes a text and runs ar with the same graphs."""
    arguments = ["--device", "cuda", "--dtype", "float32", "--prompt", TEXT, "--compare", "--json"]
    arguments += ["--target", str(TINY / "target"), "--draft", str(TINY / "draft")]
    assert main([*arguments, "--max-new-tokens", "40", "--ignore-eos"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["compare"]["exact"] and report["graphs"]["n"] > 0
    assert report["token_ids"] == write(on_cpu, "ar", "greedy")


def test_the_core_runs_on_its_default_device(capsys: pytest.CaptureFixture[str]) -> None:
    """Compare texts and metrics of dynatree.py, whose default device is cuda if there is one."""
    found = []
    for options in ([], ["--device", "cpu"]):
        assert dynatree.main(["--prompt", TEXT, "--max-new-tokens", "40", *options]) == 0
        captured = capsys.readouterr()
        found.append((captured.out, re.sub("[\\d.]+ tokens/s", "", captured.err)))
    assert found[0] == found[1] and len(found[0][0]) > 100


def test_a_session_is_that_of_the_cpu(on_cuda: Pair, on_cpu: Pair) -> None:
    """Check two turns. Another text on the device comes between them."""
    found = []
    for pair in (on_cuda, on_cpu):
        target, draft, ids = pair
        kept = KeptCache(), KeptCache()
        for _ in range(2):
            ids = ids + token_ids(generate(target, draft, ids, Graft(), 20, kept=kept))
            list(generate(target, draft, ids[::-1], Graft(), 20))
        found.append(ids)
    assert found[0] == found[1]

"""Claims: the five files are the whole algorithm wherever they are copied to, and what makes it
fast departs from them in nothing but speed."""

import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT, TINY, generate, noisy_pair, random_settings
from tokenizers import Tokenizer

import dynatree
from draft_tree import Settings
from dynatree import DynaTree, Step
from engine import decoding
from engine.model import FastGPTNeoX
from engine.sampling import FastSampler
from engine.way import Way
from gpt_neox import GPTNeoX
from methods import METHODS
from methods.auto import Auto
from sampling import GREEDY, Sampler, Sampling

Pairs = list[tuple[GPTNeoX, GPTNeoX]]  # plain and fast
CORE = ("gpt_neox", "draft_tree", "sampling", "verify", "dynatree")
PROMPTS = (
    "The harbour lay quiet under the morning fog, and",
    "= List of rivers =\n\n The longest of them",
)
# Hot: where a few ids are all that is likely, rounding says which others a tree has room for
SAMPLINGS = (GREEDY, Sampling(4.0, 0.95), Sampling(3.0, draft_temperature=4.0))


def told(step: Step) -> tuple:
    """All that a step says but how long it took."""
    tree = step.tree
    rows = tree and (tree.tokens, tree.parents, tree.are_retrieved)
    return step.tokens, rows, step.path, step.bonus, step.draft_rows, step.cached


# Prompts come on standard input as JSON; steps, and every module that was imported, go out
ALONE = """
import json, sys
from dynatree import DynaTree, generate
from gpt_neox import GPTNeoX
pair = [GPTNeoX.from_pretrained(f"models/tiny/{name}") for name in ("target", "draft")]
texts = []
for prompt in json.load(sys.stdin):
    steps = list(generate(*pair, prompt, DynaTree(), 100))
    texts.append([[step.tokens, step.path, step.draft_rows, step.cached] for step in steps])
print(json.dumps([texts, list(sys.modules)]))
"""


def test_the_five_files_are_whole_by_themselves(tmp_path: Path) -> None:
    """In a folder with nothing else they write the fast engine's greedy text, step by step."""
    for name in CORE:
        shutil.copy(ROOT / f"{name}.py", tmp_path)
    shutil.copytree(TINY, tmp_path / "models" / "tiny")
    tokenizer = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [sys.executable, "-c", ALONE],
        cwd=tmp_path,
        env=environment,
        input=json.dumps(prompts),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    texts, modules = json.loads(run.stdout)
    names = {name.partition(".")[0] for name in modules}
    rooms = {file.parent.name for file in ROOT.glob("*/__init__.py")} | {"bench"}
    assert names >= set(CORE) and not names & rooms
    pair = [FastGPTNeoX.from_pretrained(TINY / name) for name in ("target", "draft")]
    for prompt, text in zip(prompts, texts, strict=True):
        steps = generate(*pair, prompt, DynaTree(), 100)
        assert text == [[s.tokens, s.path, s.draft_rows, list(s.cached)] for s in steps]


@pytest.fixture(scope="module")
def pairs() -> list[tuple[GPTNeoX, GPTNeoX]]:
    """One random target and a draft that is often right, plain and fast."""
    return [noisy_pair(3, kind=kind) for kind in (GPTNeoX, FastGPTNeoX)]


def without_clock(settings: Settings) -> Settings:
    """The same, but for what goes by the time that iterations take."""
    return replace(settings, costs="0.3:0.04:0.2:0.4") if isinstance(settings, Auto) else settings


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "top-p", "draft temperature"])
@pytest.mark.parametrize("method", METHODS)
def test_plain_is_fast(
    method: str, sampling: Sampling, pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of random settings step by step: tokens, trees, draft passes, caches; sampled ones
    where both draw as the plain sampler does."""
    monkeypatch.setattr(FastSampler, "draw", Sampler.draw)
    plain, fast = pairs
    for number in range(3):
        rng = random.Random(f"{method} {number}")
        settings = without_clock(random_settings(method, rng))
        prompt = rng.choices(range(96), k=rng.randint(1, 30))
        way = Way(settings, sampling=sampling)
        how = {"sampling": sampling, "acceptance": way.accepts()}
        expected = [told(s) for s in dynatree.generate(*plain, prompt, settings, 30, **how)]
        found = [told(s) for s in decoding.generate(*fast, prompt, way, 30)]
        assert found == expected, settings

"""Tests that the ground floor is a whole, and that the fast engine writes what it writes."""

import os
import random
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fast import noisy_pair
from growing import random_options, random_settings
from small import ROOT, TINY, Captured
from test_sampling import warped
from torch import Tensor

import dynatree
import dynatree_lab.generation.generate
from draft_tree import Autoregressive, Candidates, DynaTree, Settings
from dynatree_lab.cli.main import build_parser, main
from dynatree_lab.engine.model import FastGPTNeoX
from dynatree_lab.enumeration import (
    Choices,
    difference,
    model_distribution,
    text_distribution,
    tiny_model,
)
from dynatree_lab.generation.config import GenerationConfig
from dynatree_lab.generation.step import Step
from dynatree_lab.methods import METHODS
from dynatree_lab.methods.auto import Auto
from dynatree_lab.methods.rules import are_retrieved
from dynatree_lab.methods.sampler import GREEDY, Sampling
from dynatree_lab.metrics import token_ids
from gpt_neox import GPTNeoX
from sampling import Sampler

Pairs = list[tuple[GPTNeoX, GPTNeoX]]  # (target, draft) of the reference and of the fast engine
CORE = ("gpt_neox", "draft_tree", "sampling", "verify", "dynatree")
PROMPT = "The harbour lay quiet under the morning fog, and"
# High temperatures: if only a few ids were likely, rounding would decide which others a tree has
SAMPLINGS = (GREEDY, Sampling(4.0, 0.95, draft_temperature=3.0))


def copy_core(folder: Path) -> None:
    """Copy the five files and the embedded pair into a folder."""
    for name in CORE:
        shutil.copy(ROOT / f"{name}.py", folder)
    shutil.copytree(TINY, folder / "models" / "tiny")


def test_the_core_works_without_the_package(capsys: Captured, tmp_path: Path) -> None:
    """Start dynatree.py through a link, where there is nothing else. It finds its own models,
    writes the greedy text of the full program, and imports no package of the project. It does not
    import torch's compiler either, which takes 2 s."""
    core, elsewhere = tmp_path / "core", tmp_path / "elsewhere"
    for folder in (core, elsewhere):
        folder.mkdir()
    copy_core(core)
    (elsewhere / "link.py").symlink_to(core / "dynatree.py")
    words = ["--prompt", PROMPT, "--max-new-tokens", "40"]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables["OMP_NUM_THREADS"] = "1"  # as the tests themselves
    command = [sys.executable, "-X", "importtime", "link.py", *words]
    alone = subprocess.run(command, cwd=elsewhere, env=variables, capture_output=True, text=True)
    assert alone.returncode == 0, alone.stderr
    assert main(words) == 0
    captured = capsys.readouterr()
    assert alone.stdout == captured.out and len(alone.stdout) > 100
    (tokens_per_iter,) = re.findall(r" [\d.]+ tokens/iter", alone.stderr)
    assert tokens_per_iter in captured.err
    imported = set(re.findall(r"^import time: .*\| +(\S+)$", alone.stderr, re.MULTILINE))
    names = {name.partition(".")[0] for name in imported}
    packages = {"dynatree_lab", "tools", "bench"}
    assert names >= set(CORE) - {"dynatree"} and not names & packages
    assert "torch.nn" in imported and "torch._dynamo" not in imported


def test_the_ground_floor_does_not_know_the_first() -> None:
    """Check that one line of the six files and their tests names dynatree_lab: an error says there
    that the full program has more options. A test looks for that line."""
    files = [*(ROOT / f"{name}.py" for name in (*CORE, "bench")), *(ROOT / "tests").glob("*.py")]
    named = [
        (file.name, line)
        for file in files
        for line in file.read_text(encoding="utf-8").splitlines()
        if "dynatree_lab" in line or "tests/lab" in line
    ]
    assert [file for file, _ in named] == ["dynatree.py", "test_program.py"]
    assert all("(python -m dynatree_lab has more methods and options)" in line for _, line in named)


def test_options_of_the_core_have_the_names_of_the_full_programs(capsys: Captured) -> None:
    with pytest.raises(SystemExit, match="0"):
        dynatree.main(["--help"])
    names = set(re.findall(r"^  (--[\w-]+)", capsys.readouterr().out, re.MULTILINE))
    assert len(names) > 10 and names <= build_parser()._option_string_actions.keys()


class ScriptedSampler(Sampler):
    """A sampler of the core with scripted random choices."""

    def __init__(self, choices: Choices, temperature: float, top_p: float):
        super().__init__(temperature, top_p)
        self.choices = choices

    def draw(self, probs: Tensor) -> int:
        total = float(probs.sum())
        return self.choices.choose([p / total for p in probs.tolist()])


@torch.inference_mode()
@pytest.mark.parametrize(("seed", "temperature", "top_p"), [(3, 1.0, 1.0), (5, 0.6, 0.8)])
def test_sampled_text_of_the_core_has_the_targets_distribution(
    seed: int, temperature: float, top_p: float
) -> None:
    """Enumerate all random choices over several trees, and add up the probabilities per text."""
    target, draft = tiny_model(seed, 3), tiny_model(seed + 1, 3)
    settings = DynaTree(B_min=1, B_max=2, tau_l=0.5, tau_h=0.6, rho_stop=0.05, W=1, D0=2, D_max=3)

    def write(choices: Choices) -> tuple[int, ...]:
        accept = ScriptedSampler(choices, temperature, top_p)
        drafter, rule = dynatree.ModelDrafter(draft), settings.make_rule()
        steps = dynatree.generate(target, drafter, [0], rule, 4, accept=accept)
        return tuple(token for step in steps for token in step.tokens)

    expected = model_distribution(target, 4, lambda logits: warped(logits, temperature, top_p))
    assert difference(text_distribution(write), expected) < 1e-6


@pytest.fixture(scope="module")
def pairs() -> list[tuple[GPTNeoX, GPTNeoX]]:
    """Return a random target and a draft that is often right, as reference and as fast models."""
    return [noisy_pair(3, kind=kind) for kind in (GPTNeoX, FastGPTNeoX)]


def with_fixed_costs(settings: Settings) -> Settings:
    """Return settings whose trees do not depend on measured times."""
    return replace(settings, costs="0.3:0.04:0.2:0.4") if isinstance(settings, Auto) else settings


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", METHODS)
def test_the_fast_engine_writes_what_the_reference_writes(
    method: str, sampling: Sampling, pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare tokens, trees and draft slots in every iteration, for random settings."""
    reference, fast = pairs
    rng = random.Random(f"{method} {SAMPLINGS.index(sampling)}")
    settings = with_fixed_costs(random_settings(method, rng))
    prompt = rng.choices(range(96), k=rng.randint(1, 30))
    config = GenerationConfig(settings, sampling=sampling, **random_options(settings, rng))
    expected, found = (
        list(map(describe, dynatree_lab.generation.generate.generate(*pair, prompt, config, 30)))
        for pair in (reference, fast)
    )
    assert found == expected, settings


class Shuffled(dynatree.ModelDrafter):
    """A user's drafter: the likeliest candidates in a random order."""

    def choose(self, logits: Tensor, k: int) -> Candidates:
        found, order = super().choose(logits, k), torch.randperm(min(k, logits.shape[1])).numpy()
        return Candidates(found.tokens[:, order], found.logprobs[:, order])


@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("method", METHODS)
def test_ranked_candidates_write_the_sampled_text_of_the_cores_ar(
    method: str, top_p: float, pairs: Pairs
) -> None:
    """Compare ids with one seed: of methods whose candidates are not drawn, and of the others with
    a user's drafter. Random settings; the texts must have accepted tokens."""
    (target, _), fast = pairs
    rng = random.Random(method)
    settings = with_fixed_costs(random_settings(method, rng))
    prompt, sampling = rng.choices(range(96), k=9), Sampling(1.0, top_p, seed=3)
    accept = Sampler(1.0, top_p, seed=3)
    rule = Autoregressive().make_rule()
    steps = dynatree.generate(target, None, prompt, rule, 40, accept=accept)
    expected = [token for step in steps for token in step.tokens]
    config = GenerationConfig(settings, sampling=sampling)
    models, drafter = fast, None
    if not config.method.writes_ar_ids:
        models, drafter = (fast[0], None), Shuffled(fast[1])
    found = dynatree_lab.generation.generate.generate(*models, prompt, config, 40, drafter=drafter)
    assert token_ids(found) == expected


def describe(step: Step) -> tuple:
    """Return everything that a step holds except times and values of rows."""
    tree = step.tree
    rows = tree.tokens, tree.parents, tree.draft_slots, are_retrieved(tree)
    others = step.bonus, step.predictions, step.draft_rows, step.cache_lengths
    return step.tokens, rows, step.path, others

"""Tests of the core: its five files work without the packages, and the fast engine writes the same
texts with the same trees."""

import math
import os
import random
import re
import runpy
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from conftest import (
    ROOT,
    TINY,
    Captured,
    noisy_pair,
    random_model,
    random_settings,
    run,
)
from enumeration import (
    Choices,
    ScriptedUniform,
    difference,
    every_outcome,
    model_distribution,
    tiny_model,
)
from torch import Tensor

import dynatree
import dynatree_lab.engine.generate
from draft_tree import Candidates, DynaTree, Rule, Settings, grow
from dynatree import Drafter, ModelDrafter
from dynatree_lab.cli.main import build_parser, main
from dynatree_lab.engine.generate import Step
from dynatree_lab.engine.generation_config import GenerationConfig
from dynatree_lab.engine.model import FastGPTNeoX
from dynatree_lab.methods import METHODS
from dynatree_lab.methods.auto import Auto
from dynatree_lab.methods.rules import are_retrieved
from dynatree_lab.methods.sampler import GREEDY, Sampling
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


def test_the_core_works_without_the_packages(capsys: Captured, tmp_path: Path) -> None:
    """Start the core's command line through a link, where there is nothing else. It finds its own
    models, writes the greedy text of the whole project, and imports none of the packages. It does
    not import torch's compiler either, which takes 2 s."""
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


def test_a_link_to_the_clones_program_is_the_clones_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link.py").symlink_to(ROOT / "dynatree.py")
    monkeypatch.setattr("dynatree_lab.cli.start.run_program", sys.exit)
    with pytest.raises(SystemExit, match="dynatree_lab.cli.main"):
        runpy.run_path(str(tmp_path / "link.py"), run_name="__main__")


def test_the_cores_options_are_those_of_the_clone() -> None:
    """Check names and defaults. Without a GPU the clone's models and sampling are the same too."""
    small = vars(dynatree.parse_arguments(["--prompt", "a"]))
    clone = vars(build_parser().parse_args(["--prompt", "a"]))
    assert small.keys() <= clone.keys()
    by_device = {"device": "cpu", "dtype": "float32", "top_p": 1.0, "seed": 0}
    by_device |= {"target": TINY / "target", "draft": TINY / "draft"}
    assert small == {name: clone[name] for name in small} | by_device
    with pytest.raises(SystemExit):  # no abbreviations
        dynatree.parse_arguments(["--prompt", "a", "--max", "3"])


def test_the_core_loads_no_draft_for_ar(capsys: Captured) -> None:
    words = ["--prompt", PROMPT, "--max-new-tokens", "3", "--method", "ar", "--draft", "/nope"]
    assert dynatree.main(words) == main(words) == 0
    written = capsys.readouterr().out
    assert len(written) > 2 and written[: len(written) // 2] * 2 == written


# The core's loop on reference models.


class ScriptedSampler(Sampler):
    """The core's sampler with scripted random choices."""

    def __init__(self, choices: Choices, temperature: float, top_p: float):
        super().__init__(temperature, top_p)
        self.choices = choices
        self.random = SimpleNamespace(random=lambda: ScriptedUniform(choices.choose))

    def draw(self, probs: Tensor) -> int:
        total = float(probs.sum())
        return self.choices.choose([p / total for p in probs.tolist()])


@torch.inference_mode()
@pytest.mark.parametrize(("seed", "temperature", "top_p"), [(3, 1.0, 1.0), (5, 0.6, 0.8)])
def test_sampled_text_has_the_targets_distribution(
    seed: int, temperature: float, top_p: float
) -> None:
    """Enumerate all random choices over several trees, and add up the probabilities per text."""
    target, draft = tiny_model(seed, 3), tiny_model(seed + 1, 3)
    settings = DynaTree(B_min=1, B_max=2, tau_l=0.5, tau_h=0.6, rho_stop=0.05, W=1, D0=2, D_max=3)

    def write(choices: Choices) -> tuple[int, ...]:
        accept = ScriptedSampler(choices, temperature, top_p)
        drafter, rule = ModelDrafter(draft), settings.make_rule()
        steps = dynatree.generate(target, drafter, [0], rule, 4, accept=accept)
        return tuple(token for step in steps for token in step.tokens)

    found: dict[tuple[int, ...], float] = defaultdict(float)
    for text, probability in every_outcome(write):
        found[text] += probability
    expected = model_distribution(target, 4, Sampling(temperature, top_p))
    assert difference(found, expected) < 1e-6


def test_draws_follow_probabilities_that_need_not_sum_to_one() -> None:
    sampler = Sampler(1.0, seed=1)
    probs = torch.tensor([0.0, 0.1, 0.0, 0.3, 0.2, 0.0])
    counts = Counter(sampler.draw(probs) for _ in range(6000))
    assert set(counts) == {1, 3, 4}
    for token, n in counts.items():
        p = float(probs[token] / 0.6)
        assert abs(n - 6000 * p) < 5 * math.sqrt(6000 * p * (1 - p))


WRONG = [
    ({"prompt": []}, "prompt must have at least one id, and all from 0 to 95"),
    ({"prompt": [0, 96]}, "all from 0 to 95"),
    ({"prompt": [0, -1]}, "all from 0 to 95"),
    ({"prompt": [0.5]}, "it must be a sequence of token ids"),
    ({"max_new_tokens": 0}, "max_new_tokens is 0, it must be an int from 1"),
    ({"max_new_tokens": 1.5}, "max_new_tokens is 1.5, it must be an int from 1"),
    ({"rule": DynaTree()}, "rule is DynaTree"),
    ({"drafter": None}, "drafter is None, this rule needs a Drafter"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_arguments_are_checked(changes: dict[str, object], message: str) -> None:
    target, draft = noisy_pair(3, kind=GPTNeoX)
    given = {"drafter": ModelDrafter(draft), "prompt": [1], "rule": DynaTree().make_rule()}
    given |= {"max_new_tokens": 5} | changes
    with pytest.raises(ValueError, match=re.escape(message)):
        next(dynatree.generate(target, **given))


def test_a_rule_serves_one_text() -> None:
    """Refuse a used rule: its history would leak to the next prompt, as in the paper's code."""
    target, draft = noisy_pair(3, kind=GPTNeoX)
    rule = DynaTree().make_rule()
    list(dynatree.generate(target, ModelDrafter(draft), [1], rule, 5))
    with pytest.raises(ValueError, match="must be a Rule that served no other text"):
        next(dynatree.generate(target, ModelDrafter(draft), [1], rule, 5))


def test_a_caller_may_change_the_lists_of_a_step() -> None:
    """Empty the lists of each step. The loop once read them after the step."""
    target, draft = noisy_pair(3, kind=GPTNeoX)
    text = [1]
    for step in dynatree.generate(target, ModelDrafter(draft), [1], DynaTree().make_rule(), 30):
        text += step.tokens
        step.tokens.clear()
        step.path.clear()
    best = run(target, text[:-1]).argmax(dim=-1)
    assert text[1:] == best.tolist() and len(text) == 31


@pytest.mark.parametrize(
    ("given", "found"), [(-3e38, numpy.float32(-3e38)), (numpy.log(numpy.float32(1.0000001)), 0.0)]
)
def test_log_probabilities_at_the_ends_of_their_range(given: float, found: float) -> None:
    """Check a sum below the lowest float32, which is impossible and of which numpy must not warn,
    and a value above 0, as rounding may give it. It once made a path likelier than its parent's."""

    def draft(tokens: list[int], parents: list[int] | None, k: int) -> Candidates:
        n = len(tokens)
        logprobs = numpy.array([[0, given]], numpy.float32).repeat(n, axis=0)
        return Candidates(numpy.arange(2)[None].repeat(n, axis=0), logprobs)

    tree = grow(Rule(2, 2, 9), 0, draft, 2, 2)
    assert tree.parents == [-1, 0, 0, 1, 1, 2] + ([2] if found == 0 else [])
    assert set(tree.path_logprobs) == {0.0, found}


VALID = numpy.zeros((1, 2), numpy.int64), numpy.zeros((1, 2), numpy.float32)
INVALID_CANDIDATES = [
    (None, "a drafter gave None, it must give Candidates"),
    (
        Candidates(torch.zeros(1, 2).long(), torch.zeros(1, 2)),
        "it must give Candidates of two arrays",
    ),
    (
        Candidates(VALID[0], VALID[1][:, :1]),
        "gave int64 [1, 2] and float32 [1, 1], it must",
    ),
    (
        Candidates(VALID[0][[0, 0]], VALID[1][[0, 0]]),
        "gave int64 [2, 2] and float32 [2, 2], it",
    ),
    (Candidates(VALID[0][:, :0], VALID[1][:, :0]), "gave int64 [1, 0] and float32 [1, 0], it must"),
    (Candidates(VALID[1], VALID[1]), "gave float32 [1, 2] and"),
    (Candidates(VALID[0], VALID[0]), "and int64 [1, 2], it must"),
    (Candidates(VALID[0] + 96, VALID[1]), "outside the target's ids, 0 to 95"),
    (Candidates(VALID[0] - 1, VALID[1]), "outside the target's ids, 0 to 95"),
]


@pytest.mark.parametrize(
    ("found", "message"), INVALID_CANDIDATES, ids=[message for _, message in INVALID_CANDIDATES]
)
def test_candidates_are_checked(found: object, message: str) -> None:
    class Wrong(Drafter):
        def draft(self, tokens: list[int], parents: list[int] | None, k: int) -> object:
            return found

    target = random_model(3, kind=GPTNeoX)
    with pytest.raises(ValueError, match=re.escape(message)):
        list(dynatree.generate(target, Wrong(), [1], DynaTree().make_rule(), 5))


# The fast engine.


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
    config = GenerationConfig(settings, sampling=sampling)
    expected, found = (
        list(map(describe, dynatree_lab.engine.generate.generate(*pair, prompt, config, 30)))
        for pair in (reference, fast)
    )
    assert found == expected, settings


def describe(step: Step) -> tuple:
    """Return everything that a step holds except times and values of rows."""
    tree = step.tree
    rows = tree.tokens, tree.parents, tree.draft_slots, are_retrieved(tree)
    others = step.bonus, step.predictions, step.draft_rows, step.cache_lengths
    return step.tokens, rows, step.path, others

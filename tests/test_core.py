"""Claims: the five files are the whole algorithm wherever they are copied to, and what makes it
fast departs from them in nothing but speed."""

import ast
import json
import math
import os
import random
import re
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
    assert_close,
    noisy_pair,
    prefilled,
    random_model,
    random_settings,
    run,
)
from law import Choices, difference, every_outcome, own_law, tiny_model
from torch import Tensor

import draft_tree
import dynatree
import engine.generate
from cli.main import main
from draft_tree import Autoregressive, Candidates, DynaTree, Rule, Settings, Tree, grow
from dynatree import Drafter, ModelDrafter
from engine.generation_config import GenerationConfig
from engine.model import FastGPTNeoX
from gpt_neox import GPTNeoX, KVCache
from methods import METHODS, compose
from methods.auto import Auto
from methods.rules import are_retrieved
from methods.sampler import GREEDY, Sampling
from sampling import Sampler

Pairs = list[tuple[GPTNeoX, GPTNeoX]]  # plain and fast
CORE = ("gpt_neox", "draft_tree", "sampling", "verify", "dynatree")
PROMPTS = (
    "The harbour lay quiet under the morning fog, and",
    "= List of rivers =\n\n The longest of them",
)
# Hot: where a few ids are all that is likely, rounding says which others a tree has room for
SAMPLINGS = (GREEDY, Sampling(4.0, 0.95), Sampling(3.0, draft_temperature=4.0))


def copy_core(folder: Path) -> None:
    """Copy the five files and the embedded pair into a folder."""
    for name in CORE:
        shutil.copy(ROOT / f"{name}.py", folder)
    shutil.copytree(TINY, folder / "models" / "tiny")


def run_python(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run Python in a folder, with its own modules alone."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["OMP_NUM_THREADS"] = "1"  # as the tests themselves
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )


def test_the_five_files_are_whole_by_themselves(capsys: Captured, tmp_path: Path) -> None:
    """In a folder with nothing else their command line writes the clone's greedy text, and their
    modules import no room."""
    copy_core(tmp_path)
    for prompt in PROMPTS:
        words = ["--prompt", prompt, "--max-new-tokens", "60"]
        alone = run_python(tmp_path, "dynatree.py", *words, "--compare")
        assert alone.returncode == 0, alone.stderr
        assert alone.stderr.endswith("x; the ids are equal\n")
        assert main(words) == 0
        assert alone.stdout == capsys.readouterr().out and len(alone.stdout) > 100
    listed = run_python(tmp_path, "-c", "import dynatree, sys; print(list(sys.modules))")
    names = {name.partition(".")[0] for name in ast.literal_eval(listed.stdout)}
    rooms = {file.parent.name for file in ROOT.glob("*/__init__.py")} | {"bench"}
    assert names >= set(CORE) and not names & rooms


MISTAKES = [
    (["--set", "N_max=a"], "--set N_max=a: N_max must be int"),
    (["--set", "history=yes"], "--set history=yes: history must be on or off"),
    (["--set", "width=2"], "--set width=2: the settings are B_min, B_mid"),
    (["--set", "tau=2"], "tau is 2.0, it must be from 0.0 to 1.0"),
    (["--max-new-tokens", "0"], "max_new_tokens is 0, it must be an int from 1"),
    (["--target", "nowhere"], "nowhere"),
    (["--target", "no-tokenizer"], "no-tokenizer/tokenizer.json: "),
    (["--temperature", "-1"], "temperature is -1.0, it must be a positive float32"),
    (["--top-p", "0", "--temperature", "1"], "top_p is 0.0, it must be above 0"),
]
if not torch.cuda.is_available():
    MISTAKES.append((["--device", "cuda:0"], "--device cuda:0: torch finds no CUDA device"))


def test_the_cores_command_line_reports_mistakes_in_one_line(tmp_path: Path) -> None:
    """In one process, as ten would take as long as all other tests of the core."""
    copy_core(tmp_path)
    shutil.copytree(TINY / "target", tmp_path / "no-tokenizer")
    (tmp_path / "no-tokenizer" / "tokenizer.json").write_text("{")
    program = "import dynatree, json, sys\n"
    program += "for words in json.loads(sys.argv[1]):\n"
    program += "    sys.argv[1:] = ['--prompt', 'a', *words]\n"
    program += "    print(dynatree.main())\n"
    found = run_python(tmp_path, "-c", program, json.dumps([words for words, _ in MISTAKES]))
    assert found.stdout.split() == ["2"] * len(MISTAKES)
    lines = found.stderr.splitlines()
    assert len(lines) == len(MISTAKES)
    for line, (_, said) in zip(lines, MISTAKES, strict=True):
        assert line.startswith("error: ") and said in line


# The core's loop on plain models.


class Number:
    """A random number of [0, 1), of which it is scripted how its one comparison ends."""

    def __init__(self, choices: Choices):
        self.choices = choices

    def __mul__(self, total: float) -> "Number":
        self.total = total
        return self

    def __ge__(self, p: float) -> bool:
        return self.choices.choose([p / self.total, 1 - p / self.total]) == 1


class ScriptedSampler(Sampler):
    """The core's sampler, of which every random choice is scripted."""

    def __init__(self, choices: Choices, temperature: float, top_p: float):
        super().__init__(temperature, top_p)
        self.choices = choices
        self.random = SimpleNamespace(random=lambda: Number(choices))

    def draw(self, probs: Tensor) -> int:
        total = float(probs.sum())
        return self.choices.choose([p / total for p in probs.tolist()])


@torch.inference_mode()
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 0.8)])
@pytest.mark.parametrize("seed", [3, 5])
def test_sampled_text_has_the_targets_distribution(
    seed: int, temperature: float, top_p: float
) -> None:
    """By enumeration of all that the sampler may draw, over several trees."""
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
    expected = own_law(target, 4, Sampling(temperature, top_p))
    assert difference(found, expected) < 1e-6


def test_draws_follow_probabilities_that_need_not_sum_to_one() -> None:
    sampler = Sampler(1.0, seed=1)
    probs = torch.tensor([0.0, 0.1, 0.0, 0.3, 0.2, 0.0])
    counts = Counter(sampler.draw(probs) for _ in range(6000))
    assert set(counts) == {1, 3, 4}
    for token, n in counts.items():
        p = float(probs[token] / 0.6)
        assert abs(n - 6000 * p) < 5 * math.sqrt(6000 * p * (1 - p))


@pytest.mark.parametrize("settings", [DynaTree(tau=0.001), Autoregressive()])
def test_greedy_text_and_both_caches(settings: Settings) -> None:
    """The ids of a whole pass for each token, and after each commit the caches of a prefill."""
    target, draft = noisy_pair(3, kind=GPTNeoX)
    text = [3, 1, 4, 1, 5]
    made: list[KVCache] = []

    def keep(model: GPTNeoX) -> SimpleNamespace:
        def new_cache(capacity: int) -> KVCache:
            made.append(model.new_cache(capacity))
            return made[-1]

        return SimpleNamespace(
            config=model.config, new_cache=new_cache, forward=model.forward, prefill=model.prefill
        )

    steps = dynatree.generate(
        keep(target), ModelDrafter(keep(draft)), text, settings.make_rule(), 40
    )
    n_accepted = 0
    for step in steps:
        for token in step.tokens:
            assert token == int(run(target, text)[-1].argmax())
            text.append(token)
        n_accepted += len(step.path) - 1
        for model, cache in zip((target, draft), made, strict=True):
            n = cache.length
            fresh = prefilled(model, text[: max(n, 1)], 64)
            assert_close(cache.kv[..., :n, :], fresh.kv[..., :n, :])
        assert made[0].length == len(text) - 1
    assert len(text) == 45 and (n_accepted > 10 or isinstance(settings, Autoregressive))


WRONG = [
    ({"prompt": []}, "prompt must have at least one id, and all from 0 to 95"),
    ({"prompt": [0, 96]}, "all from 0 to 95"),
    ({"prompt": [0, -1]}, "all from 0 to 95"),
    ({"prompt": [0.5]}, "prompt must be a sequence of token ids"),
    ({"prompt": None}, "prompt must be a sequence of token ids"),
    ({"max_new_tokens": 0}, "max_new_tokens is 0, it must be an int from 1"),
    ({"max_new_tokens": 1.5}, "max_new_tokens is 1.5, it must be an int from 1"),
    ({"max_new_tokens": math.nan}, "max_new_tokens is nan"),
    ({"rule": DynaTree()}, "rule is DynaTree"),
    ({"drafter": None}, "drafter is None, this rule needs a Drafter"),
]


@pytest.mark.parametrize(("changes", "said"), WRONG)
def test_arguments_are_checked(changes: dict[str, object], said: str) -> None:
    target, draft = noisy_pair(3, kind=GPTNeoX)
    given = {"drafter": ModelDrafter(draft), "prompt": [1], "rule": DynaTree().make_rule()}
    given |= {"max_new_tokens": 5} | changes
    with pytest.raises(ValueError, match=re.escape(said)):
        next(dynatree.generate(target, **given))


def test_a_rule_serves_one_text() -> None:
    """Else history would leak from one prompt to the next, as in the paper's own code."""
    target, draft = noisy_pair(3, kind=GPTNeoX)
    rule = DynaTree().make_rule()
    list(dynatree.generate(target, ModelDrafter(draft), [1], rule, 5))
    with pytest.raises(ValueError, match="must be a Rule that served no other text"):
        next(dynatree.generate(target, ModelDrafter(draft), [1], rule, 5))


def test_a_path_below_the_least_float_is_impossible() -> None:
    """As a tiny temperature makes them; numpy must not warn of it."""
    logprobs = numpy.array([[0, -3e38]], numpy.float32)

    def draft(tokens: list[int], parents: list[int] | None, k: int) -> Candidates:
        n = len(tokens)
        return Candidates(numpy.arange(2)[None].repeat(n, axis=0), logprobs.repeat(n, axis=0))

    tree = grow(Rule(2, 2, 9), 0, draft, 2, 2)
    assert tree.parents == [-1, 0, 0, 1, 1, 2] and min(tree.path_logprobs) == logprobs.min()


FINE = numpy.zeros((1, 2), numpy.int64), numpy.zeros((1, 2), numpy.float32)
NO_CANDIDATES = [
    (None, "a drafter gave None, it must give Candidates"),
    ([[1, 2], [0.0, 0.0]], "it must give Candidates of two arrays"),
    ((torch.zeros(1, 2).long(), torch.zeros(1, 2)), "it must give Candidates of two arrays"),
    ((FINE[0][0], FINE[1][0]), "gave int64 [2] and float32 [2], it must"),
    (
        (FINE[0], FINE[1][:, :1]),
        "gave int64 [1, 2] and float32 [1, 1], it must give int64 and float32 [1, k]",
    ),
    ((FINE[0][[0, 0]], FINE[1][[0, 0]]), "gave int64 [2, 2] and float32 [2, 2], it must"),
    ((FINE[0][:, :0], FINE[1][:, :0]), "gave int64 [1, 0] and float32 [1, 0], it must"),
    ((FINE[1], FINE[1]), "gave float32 [1, 2] and"),
    ((FINE[0], FINE[0]), "and int64 [1, 2], it must"),
    ((FINE[0] + 96, FINE[1]), "outside the target's ids, 0 to 95"),
    ((FINE[0] - 1, FINE[1]), "outside the target's ids, 0 to 95"),
]


@pytest.mark.parametrize(("found", "said"), NO_CANDIDATES, ids=[said for _, said in NO_CANDIDATES])
def test_candidates_are_checked(found: object, said: str) -> None:
    class Wrong(Drafter):
        def draft(self, tokens: list[int], parents: list[int] | None, k: int) -> object:
            return found

    target = random_model(3, kind=GPTNeoX)
    with pytest.raises(ValueError, match=re.escape(said)):
        list(dynatree.generate(target, Wrong(), [1], DynaTree().make_rule(), 5))


def test_a_log_probability_above_0_by_rounding_is_0() -> None:
    """As a float32 softmax gives. It made paths likelier than their beginning."""

    def draft(tokens: list[int], parents: list[int] | None, k: int) -> Candidates:
        logprobs = numpy.log(numpy.full((len(tokens), 1), 1.0000001, numpy.float32))
        return Candidates(numpy.ones((len(tokens), 1), numpy.int64), logprobs)

    tree = draft_tree.grow(DynaTree().make_rule(), 0, draft, 9, 96)
    assert len(tree) > 3 and set(tree.path_logprobs) == {0.0}


# What makes it fast.


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
    """Texts of random settings step by step: tokens, trees, draft slots."""
    plain, fast = pairs
    for number in range(3):
        rng = random.Random(f"{method} {number}")
        settings = without_clock(random_settings(method, rng))
        prompt = rng.choices(range(96), k=rng.randint(1, 30))
        way = GenerationConfig(settings, sampling=sampling)
        steps = compose.generate(*plain, prompt, settings, 30, sampling=sampling)
        expected = [told(step.tokens, step.tree, step.path) for step in steps]
        found = []
        for step in engine.generate.generate(*fast, prompt, way, 30):
            tree = step.tree or Tree.from_root(prompt[-1])
            found.append(told(step.tokens, tree, step.path or [0]))
        assert found == expected, settings


def told(tokens: list[int], tree: Tree, path: list[int]) -> tuple:
    """What a step says, but for times."""
    rows = tree.tokens, tree.parents, tree.draft_slots, are_retrieved(tree)
    return tokens, rows, path

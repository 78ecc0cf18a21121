"""Tests of docs/steps: the programs write the core's texts with its trees, a tree's logits are
those of its paths, and docs/steps.md shows what the programs print.

    python -m pytest tests/test_steps.py
"""

import importlib.util
import re
import runpy
from dataclasses import replace
from types import ModuleType

import pytest
from small import ROOT, Captured, assert_close, noisy_pair, prefilled, run
from trees import path_to

from bench import ROWS
from draft_tree import Autoregressive, DynaTree, Settings, Tree
from dynatree import ModelDrafter, generate

STEPS = ROOT / "docs" / "steps"
if not STEPS.exists():
    pytest.skip("the six files were copied without docs/steps", allow_module_level=True)
PROMPTS = [[3, 1, 4, 1, 5], [9], [40, 41, 42, 43]]
CHAIN, TREE = ROWS["chain"].settings, ROWS["tree"].settings
RULE = DynaTree(history=False)
SMALL = {"tau": 0.002, "rho_stop": 0.01, "rho_deep": 0.05, "D0": 3, "D_max": 5, "N_max": 20}
CASES = [  # a program, the core's settings, the draft temperature, constants to change
    ("1_ar", Autoregressive(), 1.0, {}),
    ("2_chain", CHAIN, 1.0, {}),
    ("3_tree", TREE, 1.0, {}),
    ("3_tree", replace(TREE, D0=3, B_mid=3), 1.0, {"D0": 3, "B_mid": 3}),
    ("4_confidence", RULE, 1.0, {}),
    ("4_confidence", RULE, 0.3, {}),
    ("4_confidence", replace(RULE, **SMALL), 1.0, SMALL),
]


def load(name: str) -> ModuleType:
    """Return a program as a module."""
    spec = importlib.util.spec_from_file_location(f"step_{name}", STEPS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("name", "settings", "temperature", "constants"), CASES)
def test_a_step_writes_the_cores_text_with_its_trees(
    name: str, settings: Settings, temperature: float, constants: dict[str, float]
) -> None:
    """Check long texts, and short ones, whose limit cuts trees. Some accepted rows must move in the
    caches, because a later child was accepted."""
    target, draft = noisy_pair(3)
    step, n_moved = load(name), 0
    vars(step).update(constants)
    models = {"1_ar": [target], "4_confidence": [target, ModelDrafter(draft, temperature)]}
    for prompt in PROMPTS:
        for limit in (1, 4, 24):
            ids, passes = step.generate(*models.get(name, [target, draft]), prompt, limit)
            drafter = ModelDrafter(draft, temperature)
            core = list(generate(target, drafter, prompt, settings.make_rule(), limit))
            assert ids == [token for each in core for token in each.tokens]
            for found, each in zip(passes, core[1:], strict=True):
                assert_same(found, each.tree)
                n_moved += each.path != list(range(len(each.path)))
    assert (n_moved > 3) == (name in ("3_tree", "4_confidence"))


def assert_same(found: object, tree: Tree) -> None:
    """Compare what a step returns of a pass, the number of its rows or its tree, with a tree."""
    if isinstance(found, int):
        assert found == len(tree)
        return
    assert (found.tokens, found.parents) == (tree.tokens, tree.parents)
    if isinstance(found, Tree):
        assert found.draft_slots == tree.draft_slots
        assert found.path_logprobs == pytest.approx(tree.path_logprobs, abs=1e-4)


def test_a_trees_logits_are_those_of_its_paths() -> None:
    step, (target, draft), prompt = load("3_tree"), noisy_pair(3), PROMPTS[0]
    tree = step.grow(draft, prompt, draft.new_cache(80), step.D0)
    cache = prefilled(target, prompt[:-1], 80)
    tokens, positions, mask = step.tree_inputs(tree, cache.length)
    logits = target.forward(tokens, positions, cache, mask)
    for leaf in range(31, 63):
        path = path_to(tree, leaf)
        alone = run(target, prompt[:-1] + [tree.tokens[row] for row in path])
        assert_close(logits[path], alone[-6:])


def test_the_page_shows_what_the_steps_print(capsys: Captured) -> None:
    """Compare texts and lines. It takes 3 s, because the page's texts are the embedded pair's."""
    page = (ROOT / "docs" / "steps.md").read_text(encoding="utf-8")
    texts, lines = [], []
    for file in sorted(STEPS.glob("*.py")):
        names = runpy.run_path(str(file), run_name="__main__")
        texts.append(names["ids"])
        printed = capsys.readouterr().out
        lines += re.findall(r"^.* rows per pass$", printed, re.MULTILINE)
        assert re.sub(r"^.* rows per pass\n", "", printed, flags=re.MULTILINE) in page
    prompt = names["tokenizer"].encode(names["PROMPT"]).ids
    rule, drafter = RULE.make_rule(), ModelDrafter(names["draft"])
    core = generate(names["target"], drafter, prompt, rule, names["N_NEW"])
    assert texts == [[token for each in core for token in each.tokens]] * 4
    assert lines == re.findall(r"^.* rows per pass$", page, re.MULTILINE) and len(lines) == 6


def test_each_step_is_short() -> None:
    files = list(STEPS.glob("*.py"))
    assert len(files) == 4 and all(file.read_text("utf-8").count("\n") < 100 for file in files)

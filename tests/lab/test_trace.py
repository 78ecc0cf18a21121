"""Tests that the data of --trace and --html is what the rules decided and what the run did."""

import itertools
import json
import math
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from fast import generate, random_model
from growing import random_settings
from small import TINY, Captured
from tokenizers import Tokenizer
from trees import make_tree, paths

from draft_tree import DynaTree, Settings, Tree
from dynatree_lab.cli.main import main
from dynatree_lab.generation.generate import Step
from dynatree_lab.methods import METHODS
from dynatree_lab.methods.rules import are_retrieved
from dynatree_lab.methods.sampler import GREEDY, Sampling
from dynatree_lab.trace import MAX_DROPPED, NO_LEVEL_LEFT, describe_base, meanings, trace_of
from gpt_neox import GPTNeoX

TOKENIZER = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))
TEXT = ["--prompt", "The ship sailed at dawn", "--max-new-tokens", "20"]


def write(
    settings: Settings, seed: int, n: int = 24, draft: GPTNeoX | None = None, **options: object
) -> list[Step]:
    """Write a text and return its steps. By default the draft is the target, so trees are deep."""
    models = random_model(seed), draft or random_model(seed)
    return list(generate(*models, [1, 2, 3, seed], settings, n, **options))


@pytest.mark.parametrize("method", METHODS)
def test_the_trace_is_the_run_and_changes_nothing(method: str) -> None:
    """Compare with a run without a trace, which is sampled for every other method. auto's random
    settings have fixed costs, so its trees do not depend on the clock."""
    settings = random_settings(method, random.Random(method))
    options = {"sampling": (GREEDY, Sampling(0.8, 1.0, 1))[list(METHODS).index(method) % 2]}
    plain = write(settings, 2, **options)
    steps = write(settings, 2, is_recorded=True, **options)
    content = json.loads(json.dumps(trace_of(steps, [1, 2], settings, TOKENIZER)))
    assert len(content["iterations"]) == len(steps) and "tree" not in content["iterations"][0]
    for one, found, step in zip(plain[1:], content["iterations"][1:], steps[1:], strict=True):
        assert (one.tokens, one.path) == (step.tokens, step.path)
        tree = found["tree"]
        for name in ("tokens", "path", "draft_rows", "bonus"):
            assert found[name] == getattr(step, name)
        assert found["cached"] == list(step.cache_lengths)
        assert (tree["tokens"], tree["parents"]) == (one.tree.tokens, one.tree.parents)
        probs = [math.exp(logprob) for logprob in step.tree.path_logprobs]
        assert tree["p"] == pytest.approx(probs, rel=1e-3, abs=1e-6)
        assert tree["retrieved"] == [row for row, it in enumerate(are_retrieved(step.tree)) if it]
        are_run = [slot >= 0 for slot in step.tree.draft_slots]
        assert are_run == [c is not None for c in tree["confidence"]]
        named = found["tokens"] + tree["tokens"] + tree["target"]
        named += [entry[1] for entry in tree["dropped"]]
        assert {str(i) for i in named} <= content["vocabulary"].keys()


def iterations(settings: Settings, seed: int, **options: object) -> list[dict]:
    steps = write(settings, seed, is_recorded=True, **options)
    return trace_of(steps, [1], settings, TOKENIZER)["iterations"][1:]


def test_a_calibrated_tree_also_has_the_drafts_own_probabilities() -> None:
    """Compare the rows that the first tree has with and without calibration."""
    kind = METHODS["dynatree"]
    plain, calibrated = (iterations(kind(), 3, calibrate=on)[0] for on in (False, True))
    expected = dict(zip(paths(tree_of(plain)), plain["tree"]["p"], strict=True))
    found = dict(zip(paths(tree_of(calibrated)), calibrated["tree"]["draft_p"], strict=True))
    shared = expected.keys() & found.keys()
    assert len(shared) > 3 and plain["tree"]["draft_p"] is None
    assert calibrated["tree"]["p"] != calibrated["tree"]["draft_p"]
    for path in shared:
        assert found[path] == pytest.approx(expected[path], rel=2e-3)


def test_dynatrees_gates_have_their_reasons() -> None:
    """Check the gate of every node and every candidate of many trees against its numbers."""
    s = DynaTree(tau=0.02, D0=2, D_max=4, N_max=6, rho_stop=0.05, history=False)
    seen: Counter[str] = Counter()
    for found in itertools.chain(*(iterations(s, seed) for seed in range(12))):
        tree, depths = found["tree"], tree_of(found).depths
        for row, gate in enumerate(tree["stopped"]):
            seen[f"stopped {gate}"] += 1
            p = tree["p"][row]
            reasons = {
                None: tree["slots"][row] >= 0,
                "rho_stop": depths[row] < 2 and p < 0.05,
                "rho_deep": 2 <= depths[row] and p < 0.5,
                "D_max": depths[row] == 4,
                "N_max": len(depths) == 6,
                NO_LEVEL_LEFT: depths[row] == max(depths),
            }
            assert reasons[gate], (gate, row, tree)
        for row, _, p, gate in tree["dropped"]:
            seen[gate] += 1
            breadth = tree["breadth"][row]
            reasons = {
                "tau": p < 0.02,
                "confidence": tree["parents"].count(row) <= breadth,
                "N_max": len(depths) == 6 and p >= 0.02,
            }
            assert reasons[gate], (gate, row, tree)
            confidence = tree["confidence"][row]
            assert breadth == 1 + (confidence < 0.9) + (confidence < 0.4)
            seen["both gates"] += gate == "confidence" and p < 0.02  # the first one is named
    assert set(seen) >= {"tau", "confidence", "N_max", "stopped D_max", "stopped rho_deep"}
    assert seen["both gates"]


def tree_of(found: dict) -> Tree:
    """Return the tree of an iteration of a trace."""
    return make_tree(found["tree"]["tokens"], found["tree"]["parents"])


def test_all_that_is_dropped_is_counted() -> None:
    """Check that each row that was run has k candidates, and that only the likeliest are listed."""
    settings = METHODS["dyspec"](N=24, D_max=3)
    k = settings.make_rule().max_branches
    for found in iterations(settings, 3):
        tree = found["tree"]
        n_run = sum(slot >= 0 for slot in tree["slots"])
        assert tree["n_dropped"] == n_run * k - (len(tree["tokens"]) - 1)
        assert len(tree["dropped"]) == min(tree["n_dropped"], MAX_DROPPED)
        probs = [p for _, _, p, _ in tree["dropped"]]
        assert probs == sorted(probs, reverse=True)


def test_history_is_traced_as_it_moves() -> None:
    """Check the thresholds before each tree. `adapt` has moved them after earlier trees."""
    seen = [found["state"] for found in iterations(METHODS["dynatree"](W=3), 1, n=60)]
    assert seen[0] == {"D0": 5, "tau_h": 0.9, "rho_deep": 0.5}
    assert {state["D0"] for state in seen} > {5}
    assert all(0 <= state["depth_ratio"] <= 1 for state in seen[1:])


LAST_GATES = [  # a method, its settings, the one that ends its first tree
    ("linear", {}, "K"),
    ("fixed", {}, "D"),
    ("specinfer", {}, "widths"),
    ("dyspec", {"D_max": 2}, "D_max"),
    ("graft", {"base": "linear:K=2", "checkpoints": "off"}, "K"),
]


@pytest.mark.parametrize(("method", "values", "gate"), LAST_GATES)
def test_the_last_level_is_named_by_its_setting(
    method: str, values: dict[str, object], gate: str
) -> None:
    """Check some methods' own settings, and those of graft's base."""
    tree = iterations(METHODS[method](**values), 1)[0]["tree"]
    stopped = {row: name for row, name in enumerate(tree["stopped"]) if name}
    assert set(stopped.values()) == {gate} and all(tree["slots"][row] < 0 for row in stopped)


def test_rows_that_graft_and_its_base_limit_are_named_rows() -> None:
    settings = METHODS["graft"](base="dyspec:N=8", N=4, checkpoints="off", graft=False)
    assert describe_base(settings)["settings"]["N"] == 8
    gates = [gate for found in iterations(settings, 1) for *_, gate in found["tree"]["dropped"]]
    assert "rows" in gates


@pytest.mark.parametrize("method", ["dyspec", "graft"])
def test_the_trials_decide_the_path(method: str) -> None:
    """Check that the trials of sampled text have every child that was tried, and no other."""
    settings = METHODS[method]()
    options = {"sampling": Sampling(0.8, 1.0, 2), "acceptance": "token", "is_recorded": True}
    n_rejected = 0
    steps = write(settings, 1, 16, random_model(2), **options)
    for step in steps[1:]:
        path = [0]
        for row, p, number, remaining in step.record.trials:
            assert step.tree.parents[row] == path[-1] and 0 <= remaining <= 1 and 0 <= p <= 1
            if number < p:
                path.append(row)
        assert path == step.path
        n_rejected += len(step.record.trials) + 1 - len(path)
    assert n_rejected > 3


def test_confidence_is_that_of_the_likeliest_token_not_of_the_drawn_one() -> None:
    """Check c(u), the probability of the draft's likeliest token. The drawn child may differ."""
    shares = []
    for found in iterations(METHODS["linear"](), 1, sampling=Sampling(1.0, 1.0, 3)):
        tree = found["tree"]
        for row in range(1, len(tree["tokens"])):
            above = tree["parents"][row]
            shares.append(tree["p"][row] / (tree["confidence"][above] * tree["p"][above]))
    assert min(shares) < 0.9 and 0.99 < max(shares) <= 1.01


def test_a_draft_that_overflows_leaves_json() -> None:
    """Check a draft that gives NaN. NaN is not JSON, so the page would not open."""
    draft = random_model(1)
    draft.embed_out.norm.weight.fill_(torch.nan)
    steps = write(DynaTree(), 1, 4, draft, is_recorded=True)
    text = json.dumps(trace_of(steps, [1, 2, 3], DynaTree(), TOKENIZER), allow_nan=False)
    assert json.loads(text)["iterations"][1]["tree"]["confidence"] == [None]


@pytest.mark.parametrize(("text", "is_ended"), [("a\U0001f600", False), ("the end", True)])
def test_the_last_token_is_shown_as_in_json(text: str, is_ended: bool) -> None:
    """Check that half a character is shown. An EOS token is not, even if the tokenizer does not
    call it special."""
    ids = TOKENIZER.encode(text).ids
    if not is_ended:
        del ids[-1]
    hidden_ids = ids[-1:] if is_ended else ()
    steps = [Step(ids, Tree.from_root(0), [0])]
    (found,) = trace_of(steps, [1], DynaTree(), TOKENIZER, hidden_ids)["iterations"]
    shown = TOKENIZER.decode(ids[:-1] if is_ended else ids)
    assert "".join(found["text"]) == shown != "a" and is_ended == (found["text"][-1] == "")


def data_of(page: str) -> dict:
    start = page.index('type="application/json"')
    start = page.index(">", start) + 1
    return json.loads(page[start : page.index("</script>", start)])


def test_page_trace_and_json_say_the_same(capsys: Captured, tmp_path: Path) -> None:
    """Check also that nothing in the data ends the page's script."""
    page, trace = tmp_path / "run.html", tmp_path / "run.json"
    page.write_text("an older page")
    hostile = "</script><img src=x onerror=alert(1)><!--<script>"
    words = ["--prompt", hostile, "--max-new-tokens", "20", "--json", "--compare"]
    assert main([*words, "--html", str(page), "--trace", str(trace)]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert f"trace written to {trace}\npage written to {page}\n" in captured.err
    content = json.loads(trace.read_text())
    assert "<img" not in page.read_text() and "<!--<script>" not in page.read_text()
    assert data_of(page.read_text()) == content and report.items() <= content.items()
    assert content["format"] == {"name": "dynatree-trace", "version": 3}
    assert content["meanings"] == meanings(METHODS["dynatree"]())
    pieces = [piece for found in content["iterations"] for piece in found["text"]]
    assert "".join(pieces) == report["text"]
    assert "".join(content["prompt"]["text"]) == hostile
    ids = [i for found in content["iterations"] for i in found["tokens"]]
    assert ids == report["token_ids"]
    assert content["command"][:3] == ["python", "-m", "dynatree_lab"]
    assert "--html" in content["command"]

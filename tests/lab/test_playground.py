"""Tests that the rules in the playground's JavaScript are the project's, and that its page works.

They need a browser, as test_page.py does. To make docs/playground.html again:

    python -m dynatree_lab --prompt "She opened the door of the house and looked" \
        --playground docs/playground.html
"""

import json
import math
import random
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import numpy
import pytest
from small import ROOT, Captured
from test_page import HOSTILE, NAMELESS

import dynatree_lab as lab
from draft_tree import Tree
from dynatree import draft_temperature
from dynatree_lab.cli.main import main
from dynatree_lab.generation.config import GenerationConfig
from dynatree_lab.generation.step import Step
from dynatree_lab.html_page import as_page
from dynatree_lab.playground import (
    PRICES,
    SLIDERS,
    TEMPERATURES,
    as_playground,
    describe_method,
    pack,
    playground_data,
    record,
    rounded,
)
from dynatree_lab.replay.candidates import CandidateTree, Width, make_candidates
from dynatree_lab.replay.draft import RecordedDraft
from dynatree_lab.replay.models import RecordedTarget
from dynatree_lab.replay.prices import x_ar
from dynatree_lab.replay.texts import RecordedText
from dynatree_lab.trace import describe_tree

NEAR = 1e-5  # difference of log-probabilities that rounding may reverse
OUTSIDE = HOSTILE + ' "日本\u202e'
PAGE = ROOT / "docs" / "playground.html"
Recorded = tuple[RecordedText, CandidateTree, dict]


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    """Record a text: its numbers, and the data of its page."""
    result = lab.write_text(lab.load_pair(), "She opened the door of the house", max_new_tokens=24)
    text, candidates = record(result)
    return text, candidates, playground_data(text, candidates, result.request.pair.tokenizer)


def random_place(rng: random.Random) -> dict:
    """Return a random place of the sliders, as the page has it."""
    method = rng.choice([*SLIDERS, *["dynatree"] * 4, "dyspec"])
    sliders = [each for group in SLIDERS[method].values() for each in group.items()]
    while True:
        settings = {name: rng.choice(values) for name, values in sliders}
        with suppress(ValueError):  # such as tau_l above tau_h
            lab.METHODS[method](**settings)
            return {"method": method, "settings": settings, "temperature": rng.choice(TEMPERATURES)}


def config_of(place: dict) -> GenerationConfig:
    """Return the config of a place, and let a place that has no temperature have the default."""
    config = GenerationConfig(lab.METHODS[place["method"]](**place["settings"]))
    if not config.method.has_temperature(False):
        place["temperature"] = draft_temperature(0)
        return config
    return config.with_sampling(draft_temperature=place["temperature"])


def replayed(text: RecordedText, tree: CandidateTree, config: GenerationConfig) -> list[Step]:
    """Return the steps of the project's rules over recorded numbers."""
    models = lab.load_pair().draft.config
    target, draft = RecordedTarget([text], models), RecordedDraft(tree, [text], models)
    steps = lab.generate(target, draft, text.prompt, config, len(text.ids), is_recorded=True)
    return list(steps)[1:]


REPLAY = """(settings) => settings.map((setting) => {
  const { recording, replay } = playground;
  return replay(recording, setting).iterations.map(({ tree, path, state, missed }) => ({
    tokens: tree.tokens, parents: tree.parents, path_logprobs: tree.logprobs, path,
    bonus: missed.token, draft_rows: tree.passes, is_complete: !tree.isIncomplete,
    state, stopped: tree.stopped, missed: missed.gate,
    dropped: tree.dropped.map(({ row, token, gate }) => [row, token, gate]),
  }));
})"""


def expected(step: Step, config: GenerationConfig) -> dict:
    """Return what the page should have of a step."""
    tree = describe_tree(step.tree, step.predictions, step.record, config.settings)
    state = {name: value for name, value in step.record.state.items() if name != "depth_ratio"}
    found = {name: getattr(step.tree, name) for name in ("tokens", "parents", "path_logprobs")}
    found |= {name: getattr(step, name) for name in ("path", "bonus", "draft_rows", "is_complete")}
    return found | {"state": state, "stopped": tree["stopped"], "dropped": tree["dropped"]}


def require_equal(found: Sequence[dict], steps: Sequence[Step], config: GenerationConfig) -> None:
    """Compare the page's iterations with the project's over the same numbers, bit for bit."""
    assert len(found) == len(steps)
    for one, step in zip(found, steps, strict=True):
        wanted, leaf = expected(step, config), step.path[-1]
        gates = {(row, token): gate for row, token, gate in one.pop("dropped")}
        # The page lists all that are recorded, the trace the likeliest of all candidates
        for row, token, _, gate in wanted.pop("dropped"):
            assert gates.get((row, token), gate) == gate
        missed = wanted["stopped"][leaf] or gates.get((leaf, step.bonus))
        assert one.pop("missed") == missed or missed is None
        assert one == wanted


def is_near_tie(step: Step, config: GenerationConfig) -> bool:
    """Whether rounding may change a tree: log p(u) of a candidate or log c(u) of a row is near a
    threshold, or the last candidate among the N best is near the next one."""
    given = [*asdict(config.settings).values(), *step.record.state.values()]
    limits = [math.log(each) for each in given if isinstance(each, float) and each]
    n_best, so_far = getattr(config.settings, "N", 0) - 1, []
    for level in (one.level for one in step.record.levels):
        values = [*level.path_logprobs.ravel().tolist(), *level.logprobs[:, 0].tolist()]
        if any(abs(value - limit) < NEAR for value in values for limit in limits):
            return True
        so_far = sorted([*so_far, *level.path_logprobs.ravel().tolist()], reverse=True)
        if 0 < n_best < len(so_far) and so_far[n_best - 1] - so_far[n_best] < NEAR:
            return True
    return False


def equal_trees(steps: Sequence[Step], real: Sequence[Step], config: GenerationConfig) -> int:
    """Compare a replay with a real run and return the number of equal trees. They are all trees, or
    those before the first near-tie."""
    names = ("tokens", "parents", "path", "bonus", "draft_rows", "state")
    for i, (one, step) in enumerate(zip(steps, real, strict=False)):
        wanted, found = expected(step, config), expected(one, config)
        if any(found[name] != wanted[name] for name in names):
            assert is_near_tie(step, config), (config, i)
            return i
        assert found["path_logprobs"] == pytest.approx(wanted["path_logprobs"], abs=5e-5)
    assert len(steps) == len(real)
    return len(steps)


@pytest.mark.browser
def test_trees_are_those_of_the_rules_and_of_real_runs(
    open_page: Callable, recorded: Recorded
) -> None:
    """Compare 64 random places of the sliders. Slow, 12 s: each is a real run, too."""
    text, tree, content = recorded
    rng, pair = random.Random(1), lab.load_pair()
    places = [random_place(rng) for _ in range(64)]
    configs = [config_of(place) for place in places]
    found = open_page(as_playground(content)).evaluate(REPLAY, places)
    n_equal = n_trees = 0
    for config, iterations in zip(configs, found, strict=True):
        steps = replayed(text, tree, config)
        assert all(step.is_complete for step in steps)  # no place of the sliders is left out
        require_equal(iterations, steps, config)
        arguments = pair.target, pair.draft, text.prompt, config, len(text.ids)
        real = list(lab.generate(*arguments, is_recorded=True))[1:]
        n_equal += equal_trees(steps, real, config)
        n_trees += len(steps)
    assert n_equal > 0.97 * n_trees > 350


# Of 1/2, for thresholds. A low tau lets other ties decide
EXPONENTS = defaultdict(lambda: (0, 1, 1, 1, 2, 2, 3, 4), tau=(2, 3, 4, 6, 11))


@pytest.mark.browser
def test_ties_and_misses_are_those_of_the_rules(open_page: Callable, recorded: Recorded) -> None:
    """Round probabilities to powers of 1/2, and let thresholds be such powers, so that many
    comparisons are ties. The recording is narrow, so that rules ask for more than it has."""
    text, _, content = recorded
    narrow = Width(min_probability=0.1, n_best=6, max_depth=6, min_candidates=1)
    tree = rounded(make_candidates(lab.load_pair().draft, [text], narrow, TEMPERATURES))
    halves = numpy.round(tree.logprobs / math.log(0.5)) * math.log(0.5)
    tree = replace(tree, logprobs=halves.astype(numpy.float32))
    rng, places = random.Random(2), []
    while len(places) < 64:
        place = random_place(rng)
        floats = [name for name, value in place["settings"].items() if isinstance(value, float)]
        place["settings"] |= {name: 0.5 ** rng.choice(EXPONENTS[name]) for name in floats}
        with suppress(ValueError):
            config_of(place | {"temperature": 1.0})
            places.append(place | {"temperature": 1.0})
    configs = [config_of(place) for place in places]
    content = content | {"candidates": pack(tree, text.vocab_size)}
    page = open_page(as_playground(content))
    counts = []
    for config, found in zip(configs, page.evaluate(REPLAY, places), strict=True):
        steps = replayed(text, tree, config)
        require_equal(found, steps, config)
        counts.append(sum(not step.is_complete for step in steps))
    assert sum(counts) > 10
    show = "(place) => { playground.state.now = place; playground.draw(); }"
    for n, place in [*zip(counts, places, strict=True)][::3]:
        page.evaluate(show, place)
        assert page.locator("#text-now .incomplete").count() == n
        assert page.locator("#misses").inner_text().startswith(f"{n} of " if n else "")
        assert page.locator("#misses").is_visible() == (n > 0)


ADAPT = """([settings, accepted]) => {
  const rule = playground.RULES.dynatree(settings);
  return accepted.map((n) => {
    const depths = n < 0 ? [0] : [0, 5];
    rule.adapt({ tokens: depths, depths }, Array(Math.max(n, 0) + 1).fill(0));
    return rule.state();
  });
}"""


@pytest.mark.browser
def test_history_moves_thresholds_as_the_rule_does(open_page: Callable, recorded: Recorded) -> None:
    """Accept 3 or 4 of 5 levels of most trees, so that many means are 0.6 or 0.8. Some trees are
    only a root, and have no ratio."""
    page, rng = open_page(as_playground(recorded[2])), random.Random(3)
    places = [random_place(rng)["settings"] for _ in range(150)]
    for settings in (place for place in places if "W" in place):
        settings |= {"history": True, "W": rng.choice((1, 2, 3, 5, 10))}
        accepted = rng.choices((*[rng.choice((3, 4))] * 3, 2, 5, -1), k=30)
        rule = lab.METHODS["dynatree"](**settings).make_rule()
        for n, found in zip(accepted, page.evaluate(ADAPT, [settings, accepted]), strict=True):
            tree = Tree([0, 1], [-1, 0], [0, 5], [0, 0], [0, -1]) if n >= 0 else Tree.from_root(0)
            rule.adapt(tree, [0] * (max(n, 0) + 1))
            assert found == {name: getattr(rule.current, name) for name in found}


def shown_numbers(page: object, side: str = "now") -> list[float]:
    """Return the numbers of a setting: tokens, iterations, rows, draft passes, cost, x ar."""
    page.evaluate("playground.draw()")  # at once, not with the next frame
    return [float(each) for each in page.locator(f"#result td.{side}").all_inner_texts()]


@pytest.mark.browser
@pytest.mark.parametrize("words", ["dynatree tau=0.02 rho_stop=0.03 T=0.7", "dyspec N=12"])
def test_the_result_is_that_of_the_command(
    words: str, open_page: Callable, recorded: Recorded, capsys: Captured
) -> None:
    """Run the command of a setting, and compute x ar from its rows at each of the prices."""
    page = open_page(as_playground(recorded[2]), f"#now={words.replace(' ', '+')}")
    command = shlex.split(page.locator("#command-words").text_content())
    assert main([*command[3:], "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    n = metrics["iterations"]
    for name, prices in PRICES.items():
        page.locator("#prices").select_option(name)
        tokens, iterations, rows, passes, _, speedup = shown_numbers(page)
        text = {"new_tokens": metrics["new_tokens"], "draft_rows": {"1": passes * n}}
        text["target_rows"] = {"0": n - 1, str(round(rows * n)): 1}
        found = tokens, iterations, passes, speedup
        wanted = metrics["tokens_per_iter"], n, metrics["draft_passes"], x_ar(prices, text)
        assert found == pytest.approx(wanted, abs=0.02)


@pytest.mark.browser
def test_keys_and_the_address_change_what_is_shown(open_page: Callable, recorded: Recorded) -> None:
    """Use a page of 700 pixels by keys alone."""
    text, now = as_playground(recorded[2]), "[playground.state.now, playground.state.position]"
    page = open_page(text, viewport={"width": 700, "height": 900})
    first = shown_numbers(page)
    page.keyboard.press("]")
    page.keyboard.press("c")
    page.locator("#set-rho_deep").focus()
    for _ in range(8):
        page.keyboard.press("ArrowLeft")  # moves rho_stop, too
    found, position = page.evaluate(now)
    assert found["settings"]["rho_stop"] < found["settings"]["rho_deep"] == 0.03 and position > 0
    assert shown_numbers(page, "kept") == first != shown_numbers(page)
    for side in ("now", "kept"):
        assert page.locator(f"#tree-{side} .node").last.is_visible()
        assert page.locator(f"#text-{side} .selected").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(NAMELESS) == []
    page.wait_for_function("() => location.hash.includes('rho_deep=0.03')")
    again = open_page(text, page.evaluate("location.hash"))
    assert again.evaluate(now) == [found, position] and shown_numbers(again, "kept") == first
    for question in again.locator("#questions button").all():
        again.locator("#questions summary").click()
        question.click()
        assert len(shown_numbers(again, "kept")) == len(first)
    again = open_page(text)
    again.locator("#methods :checked").focus()
    again.keyboard.press("ArrowRight")
    assert again.evaluate(now)[0]["method"] == "dyspec"
    speeds = shown_numbers(again)[-1], first[-1]
    again.keyboard.press("f")  # the fastest visited setting
    assert shown_numbers(again)[-1] == max(speeds)


@pytest.mark.browser
def test_outside_text_is_text(open_page: Callable, recorded: Recorded) -> None:
    text, _, content = recorded
    content = content | {
        "prompt": content["prompt"] | {"text": OUTSIDE},
        "pieces": [OUTSIDE] * len(text.ids),
        "vocabulary": dict.fromkeys(content["vocabulary"], OUTSIDE),
        "command": [*content["command"], OUTSIDE],
    }
    page = open_page(as_playground(content))
    page.keyboard.press("]")
    assert page.locator("#text-now .token").first.text_content() == OUTSIDE
    assert page.locator("img").count() == 0 and page.evaluate("typeof hacked") == "undefined"
    assert shlex.split(page.locator("#command-words").text_content())[-5] == OUTSIDE


def data_of(page: str) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_the_command_writes_a_page(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "play.html"
    words = ["--prompt", 'The "</script>"', "--max-new-tokens", "6", "--playground", str(file)]
    assert main(words) == 0
    captured = capsys.readouterr()
    content = data_of(file.read_text())
    assert "".join(content["pieces"]) + "\n" == captured.out
    assert content["prompt"]["text"] == words[1] and str(file) in captured.err
    assert content["draft_temperature"] in content["candidates"]["temperatures"]


def test_the_committed_pages_are_made_of_these_files() -> None:
    """Make both pages again from their data. The playground has today's settings and defaults."""
    example = (PAGE.parent / "example.html").read_text(encoding="utf-8")
    assert as_page(data_of(example)) == example
    page = PAGE.read_text(encoding="utf-8")
    content = data_of(page)
    assert as_playground(content) == page and len(page.encode()) < 500_000
    methods = {name: describe_method(name) for name in SLIDERS}
    assert json.loads(json.dumps(methods)) == content["methods"]

"""Tests of the page of --html in a real browser: it shows the run, and text in it stays text.

They need a Chromium on this machine, and `pip install -e ".[browser]"`. To make
docs/example.html again, run the command that its Settings panel shows. docs/page.png is that page
at #1, 1280 x 720, with the pointer on the node `·door` of depth 2.
"""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from fast import override
from small import Captured
from test_trace import TEXT, tree_of
from trees import path_to

from dynatree_lab.cli.main import main
from dynatree_lab.html_page import as_page

pytestmark = pytest.mark.browser
HOSTILE = "<img src=x onerror=hacked=1></script><script>hacked=1</script>"


@pytest.fixture
def opened(open_page: Callable) -> Callable:
    """Return a function that opens the page of a trace."""
    return lambda content: open_page(as_page(content))


@pytest.fixture
def traced(capsys: Captured, tmp_path: Path) -> Callable[..., dict]:
    """Return a function that runs the embedded pair and returns its trace."""

    def trace(*options: str) -> dict:
        file = tmp_path / "run.json"
        main(override(TEXT, *options, "--trace", str(file)))
        capsys.readouterr()
        return json.loads(file.read_text())

    return trace


def go(page: object, iteration: int, stage: int | str = 0) -> int:
    """Show a stage of an iteration, and return its number. 0 is the whole iteration; the draft
    passes and the other steps follow. A name means the first stage of this kind."""
    if isinstance(stage, str):
        go(page, iteration)
        kinds = page.evaluate("dynatree.state.view.stages.map((stage) => stage.kind)")
        stage = kinds.index(stage)
    move = "([i, s]) => { dynatree.go(i, s); return dynatree.state.step; }"
    return page.evaluate(move, [iteration, stage])


def widest(content: dict) -> int:
    """Return the iteration with the most nodes."""
    sizes = [len(i["tree"]["tokens"]) if "tree" in i else 0 for i in content["iterations"]]
    return sizes.index(max(sizes))


# What the panels show
SHOWN = """() => {
  const all = (where) => [...document.querySelectorAll(where)];
  const rowOf = (element) => Number(element.dataset.row);
  const isVisible = (token) => token.checkVisibility({ visibilityProperty: true });
  const nodes = all('#tree .node').sort((a, b) => rowOf(a) - rowOf(b));
  return {
    text: all('#text .token').filter(isVisible).map((token) => token.textContent).join(''),
    framed: all('#text .new').map((element) => element.textContent).join(''),
    origins: all('#text .token').map((token) => token.classList[1]),
    rows: nodes.map(rowOf),
    accepted: nodes.filter((node) => node.matches('.accepted')).map(rowOf),
    retrieved: nodes.filter((node) => node.matches('.retrieved')).map(rowOf),
    notes: nodes.map((node) => node.querySelector('.note').textContent),
    bonus: all('#tree .bonus-node .label').length,
    attends: document.querySelector('#mask .attends')?.getAttribute('d') ?? '',
    bold: all('#mask .row.accepted').length,
    target: all('#caches .cell.written rect').filter((r) => r.y.baseVal.value < 40).length,
    moves: all('#caches .move').length,
    chips: new Set(all('#tree .chip').map((chip) => getComputedStyle(chip).fill)).size,
    names: all('#details dt').map((name) => name.textContent),
    aloud: nodes.map((node) => node.getAttribute('aria-label')).join(),
  };
}"""

RUNS = {
    "dynatree": ["--compare"],
    "graft": ["--method", "graft"],
    "sampled": ["--temperature", "0.9", "--method", "dyspec", "--set", "N=12"],
    "ar": ["--method", "ar", "--max-new-tokens", "5"],
}


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS.keys())
def test_every_step_shows_what_is_known_by_then(
    options: list[str], opened: Callable, traced: Callable
) -> None:
    """Compare every stage with the trace. No stage shows what a later step decides. The page once
    showed text, accepted rows, mask and caches from the first draft pass on."""
    content = traced(*options)
    iterations = content["iterations"]
    written = ""
    kinds = []
    page = opened(content)
    for at, found in enumerate(iterations):
        before, written = written, written + "".join(found["text"])
        kinds += origins(found)
        last = go(page, at, 99)  # adapt, if there is a tree
        for stage in range(last + 1):
            assert go(page, at, stage) == stage
            shown = page.evaluate(SHOWN)
            is_committed = stage == 0 or stage >= last - 1
            assert shown["text"] == (written if is_committed else before)
            root = iterations[at - 1]["text"][-1]
            assert shown["framed"] == ("".join(found["text"]) if is_committed else root)
            if "tree" in found:
                check_tree(shown, content, at, stage, last)
    assert written == content["text"] and shown["origins"] == kinds


def check_tree(shown: dict, content: dict, at: int, stage: int, last: int) -> None:
    """Check one stage of an iteration with a tree; the last five are mask to adapt, 0 is all."""
    found = content["iterations"][at]
    tree, path = found["tree"], found["path"]
    n = len(tree["tokens"])
    steps = ("mask", "verify", "accept", "commit", "adapt")
    is_known = {name: stage == 0 or stage >= last - 4 + i for i, name in enumerate(steps)}
    rows = list(range(n)) if is_known["mask"] else drafted_by(found, stage)
    assert shown["rows"] == rows
    assert shown["retrieved"] == [row for row in rows if row in tree["retrieved"]]
    assert shown["accepted"] == (path if is_known["accept"] else [])
    assert shown["bonus"] == is_known["accept"] and (shown["bonus"] or not shown["bold"])
    attended = {(row, above) for row in rows for above in path_to(tree_of(found), row)}
    assert marks(shown["attends"]) == (attended if is_known["mask"] else set())
    assert shown["target"] == (n if is_known["verify"] else 0)
    assert ("target model predicts" in shown["aloud"]) == is_known["verify"]
    assert ("accepted" in shown["names"]) == is_known["accept"]
    slots = [tree["slots"][row] for row in path if tree["slots"][row] >= 0]
    moved = [row for moving in (path, slots) for i, row in enumerate(moving) if i != row]
    assert shown["moves"] == (len(moved) if is_known["commit"] else 0)
    notes = dict(zip(rows, shown["notes"], strict=True))
    if stage == last - 3:  # verify; all predictions have one colour, also in retrieved nodes
        assert shown["chips"] == 1
        for row, target in enumerate(tree["target"]):
            word = content["vocabulary"][str(target)].replace(" ", "·").replace("\n", "↵")
            assert notes[row][:5] == f"→{word}"[:5]
    elif stage == last - 2:  # accept
        for row, p, number, _ in found["trials"]:
            assert notes[row][-1] == ("✓" if number < p else "✗")
            assert (row in path) == (number < p)


def test_the_page_tells_how_a_path_was_chosen(opened: Callable, traced: Callable) -> None:
    """Check the caption of step 4, and the tokens that a walk has drawn."""
    content = traced("--method", "deagle", "--temperature", "0.8", "--max-new-tokens", "20")
    at = widest(content)
    page = opened(content)
    go(page, at)
    page.locator("#steps button", has_text="Accept").click()
    assert "the target model’s next token is drawn" in page.locator("#caption").inner_text()
    found = content["iterations"][at]
    told = page.locator("#details .trials li").all_inner_texts()
    assert len(told) == len(found["path"]) and told[-1].endswith("held by no child")
    for line, row in zip(told, found["path"][1:], strict=False):
        assert line.endswith(f"held by row {row}")
    content["settings"]["acceptance"] = "own"
    page = opened(content)
    go(page, at)
    page.locator("#steps button", has_text="Accept").click()
    assert "The user’s acceptance chooses the path" in page.locator("#caption").inner_text()
    assert page.locator("#details .trials").count() == 0


def drafted_by(found: dict, stage: int) -> list[int]:
    """Return the rows at a stage of the draft: one depth more per pass, then the retrieved rows."""
    tree = found["tree"]
    if stage > len(found["draft_rows"]) and tree["retrieved"]:
        return list(range(len(tree["tokens"])))
    n_passes = min(stage, len(found["draft_rows"]))
    rows = [row for row, depth in enumerate(tree_of(found).depths) if depth <= n_passes]
    return [row for row in rows if row not in tree["retrieved"]]


def marks(path: str) -> set[tuple[int, int]]:
    """Return row and column of each mark of the drawn mask."""
    corners = [tuple(map(float, corner)) for corner in re.findall(r"M(\S+) ([\d.]+)h", path)]
    columns = sorted({x for x, _ in corners})
    rows = sorted({y for _, y in corners})
    return {(rows.index(y), columns.index(x)) for x, y in corners}


def origins(found: dict) -> list[str]:
    """Return the origin of each token of an iteration."""
    retrieved = found["tree"]["retrieved"] if "tree" in found else []
    rows = found.get("path", [0])[1:]
    kinds = ["retrieved" if row in retrieved else "drafted" for row in rows]
    return (kinds + ["bonus"])[: len(found["tokens"])]


def test_keys_clicks_and_the_address_change_the_stage(opened: Callable, traced: Callable) -> None:
    content = traced()
    last = len(content["iterations"]) - 1
    page = opened(content)
    at = "[dynatree.state.iteration, dynatree.state.step]"
    for key, place in (
        ("Home", [0, 0]),
        ("ArrowRight", [1, 0]),
        ("ArrowDown", [1, 1]),
        ("ArrowUp", [1, 0]),
        ("ArrowLeft", [0, 0]),
        ("ArrowDown", [1, 1]),
        ("End", [last, 0]),
    ):
        page.keyboard.press(key)
        assert page.evaluate(at) == place
    page.evaluate("location.hash = '#3.2'")
    page.wait_for_function("() => dynatree.state.step === 2")
    page.locator("#steps button", has_text="Whole").click()
    assert page.evaluate(at) == [3, 0]
    page.locator('#text .token[data-iteration="2"]').first.click()
    assert page.evaluate(at) == [2, 0]
    page.keyboard.press("Space")
    page.wait_for_function("() => dynatree.state.iteration > 2")
    assert page.evaluate(NAMELESS) == []


# Elements that have no name for a screen reader
NAMELESS = """[...document.querySelectorAll('button, [tabindex], [role=slider], canvas, svg')]
  .filter((e) => !e.closest('[aria-hidden=true]') && !e.getAttribute('aria-label')
    && !e.getAttribute('aria-labelledby') && !e.textContent.trim())
  .map((e) => e.outerHTML.slice(0, 80))"""


def test_a_node_shows_the_numbers_of_the_trace(opened: Callable, traced: Callable) -> None:
    """Check the details of every node, and that the glossary explains every gate."""
    content = traced("--max-new-tokens", "60", "--draft-temperature", "1")  # a tree with room
    at = widest(content)
    tree = content["iterations"][at]["tree"]
    page = opened(content)
    go(page, at)
    assert page.locator("#tree g.ghost").count() == len(tree["dropped"])
    counts = Counter(gate for *_, gate in tree["dropped"])
    shown = page.locator("#details").inner_text()
    assert all(f"{n} by {gate}" in shown for gate, n in counts.items())
    for row in range(len(tree["tokens"])):
        page.locator(f'#tree .node[data-row="{row}"]').hover()
        shown = page.locator("#details").inner_text()
        assert row == 0 or f"{tree['p'][row]:.2f}"[:4] in shown
        if tree["confidence"][row] is not None:
            assert f"c(u)\n{tree['confidence'][row]:.2f}"[:8] in shown
        lit = page.locator("#mask .lit").evaluate_all("(all) => all.map((e) => e.dataset.row)")
        assert set(lit) == {str(row)}
        below = page.locator("#details .dropped li").all_inner_texts()
        gates = [entry[3] for entry in tree["dropped"] if entry[0] == row]
        assert all(gate in line for line, gate in zip(below, gates, strict=True))
    page.locator("#help summary").click()
    words = page.locator("#words").inner_text()
    assert all(entry[3] in words for entry in tree["dropped"])


def test_acceptance_by_depth_is_that_of_the_trace(opened: Callable, traced: Callable) -> None:
    """Count the trees up to the shown one."""
    content = traced()
    reached: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for found in content["iterations"][1:4]:
        accepted.update(range(1, len(found["path"])))
        reached.update(range(1, 1 + max(tree_of(found).depths)))
    bars = "(all) => all.map((w) => [w.title, w.firstChild.clientHeight / w.clientHeight])"
    page = opened(content)
    go(page, 3)
    shown = page.locator("#depths .well").evaluate_all(bars)
    for depth, (title, share) in enumerate(shown, start=1):
        n = reached[depth]
        trees = f"{accepted[depth]} of {n} trees at least this deep"
        assert title == f"Depth {depth}: accepted in {trees}"
        assert share == pytest.approx(accepted[depth] / max(n, 1), abs=0.05)
    assert len(shown) >= len(reached) > 1


def test_outside_text_is_text(opened: Callable, traced: Callable) -> None:
    """Put HTML into the prompt, the generated text, and every name that a user or a file gives."""
    content = traced("--prompt", HOSTILE)
    content["vocabulary"] = {i: HOSTILE for i in content["vocabulary"]}
    content["settings"]["target"] = HOSTILE
    content["command"].append(HOSTILE)
    content["versions"]["machine"] = HOSTILE
    content["interrupted"] = True
    for iteration in content["iterations"]:
        iteration["text"] = [HOSTILE] * len(iteration["text"])
    page = opened(content)
    go(page, widest(content))
    assert page.locator("#text .token").first.text_content() == HOSTILE
    assert page.locator("img").count() == 0 and page.evaluate("typeof hacked") == "undefined"
    page.locator('#tree .node[data-row="1"]').hover()

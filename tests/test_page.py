"""The page of --page in a real browser: what it shows is the run, and nothing in it is obeyed.

Needs a Chromium on this machine, and `pip install -r requirements-browser.txt`.

    PYTHONPATH=. python tests/test_page.py  # makes docs/example.html and docs/page.png again
"""

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import Captured
from test_trace import TEXT, depths_of

from cli.main import main
from cli.page import as_page

playwright = pytest.importorskip("playwright.sync_api", reason="no playwright")
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason=f"no browser: none of {', '.join(NAMES)}"),
]
DOCS = Path(__file__).parent.parent / "docs"
LAPTOP = {"width": 1280, "height": 720}
PHONE = {"width": 390, "height": 844}
LARGE = {"width": 853, "height": 480}  # a laptop's at 150 %
HALL = {"width": 1920, "height": 1080}
HOSTILE = "<img src=x onerror=hacked=1></script><script>hacked=1</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with playwright.sync_playwright() as driver:
        # --no-sandbox: as root, which containers are, there is none; the pages are our own
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser: object, tmp_path: Path) -> Callable:
    """Opens the page of a trace; at the end, nothing may have gone wrong."""

    @contextmanager
    def open_page(content: dict, size: dict = LAPTOP, scheme: str = "light") -> Iterator:
        file = tmp_path / "run.html"
        file.write_text(as_page(content))
        with browser.new_context(viewport=size, color_scheme=scheme, offline=True) as context:
            page = context.new_page()
            wrong = []
            page.on("console", lambda message: wrong.append(message.text))
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.on("dialog", lambda dialog: wrong.append("a dialog"))
            page.on("request", lambda request: wrong.append(request.url))
            page.goto(file.as_uri())
            wrong.remove(file.as_uri())  # all that may be asked for
            page.wait_for_function("() => document.documentElement.dataset.ready === '1'")
            yield page
            assert page.evaluate("typeof hacked") == "undefined"
            assert wrong == []

    return open_page


@pytest.fixture
def traced(capsys: Captured, tmp_path: Path) -> Callable[..., dict]:
    """The trace of a run of the embedded pair."""

    def trace(*options: str) -> dict:
        file = tmp_path / "run.json"
        main([*TEXT, *options, "--trace", str(file)])
        capsys.readouterr()
        return json.loads(file.read_text())

    return trace


def go(page: object, iteration: int, stage: int = 0) -> int:
    """stage: 0 is the whole, then the draft's passes and the other steps. Returns where it is."""
    return page.evaluate(
        "([i, s]) => { dynatree.go(i, s); return dynatree.state.step; }", [iteration, stage]
    )


def go_to(page: object, iteration: int, kind: str) -> None:
    """To the first stage of a kind."""
    go(page, iteration)
    stages = page.evaluate("dynatree.state.view.stages.map((stage) => stage.kind)")
    go(page, iteration, stages.index(kind))


def widest(content: dict) -> int:
    """The iteration with the most nodes."""
    sizes = [len(i["tree"]["tokens"]) if "tree" in i else 0 for i in content["iterations"]]
    return sizes.index(max(sizes))


# All that the panels show, as it stands there
SHOWN = """() => {
  const all = (where) => [...document.querySelectorAll(where)];
  const rowOf = (element) => Number(element.dataset.row);
  const isSeen = (token) => token.checkVisibility({ visibilityProperty: true });
  const nodes = all('#tree .node').sort((a, b) => rowOf(a) - rowOf(b));
  return {
    text: all('#text .token').filter(isSeen).map((token) => token.textContent).join(''),
    framed: all('#text .new').map((element) => element.textContent).join(''),
    origins: all('#text .token').map((token) => token.classList[1]),
    rows: nodes.map(rowOf),
    accepted: nodes.filter((node) => node.matches('.accepted')).map(rowOf),
    retrieved: nodes.filter((node) => node.matches('.retrieved')).map(rowOf),
    notes: nodes.map((node) => node.querySelector('.note').textContent),
    bonus: all('#tree .bonus-node .label').length,
    ghosts: all('#tree .ghost').length,
    sees: document.querySelector('#mask .sees')?.getAttribute('d') ?? '',
    bold: all('#mask .row.accepted').length,
    target: all('#caches .cell.written rect').filter((r) => r.y.baseVal.value < 40).length,
    moves: all('#caches .move').length,
    after: all('#caches .after').length,
    names: all('#details dt').map((name) => name.textContent),
    aloud: nodes.map((node) => node.getAttribute('aria-label')).join(),
  };
}"""

RUNS = {
    "dynatree": ["--max-new-tokens", "40", "--compare"],
    "graft": ["--method", "graft", "--max-new-tokens", "40"],
    "sampled": ["--temperature", "0.9", "--method", "dyspec", "--set", "N=12"],
    "ar": ["--method", "ar", "--max-new-tokens", "5"],
    "window": ["--window", "64", "--max-new-tokens", "90", "--method", "linear"],
}


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS.keys())
def test_every_step_shows_what_is_known_by_then(
    options: list[str], opened: Callable, traced: Callable
) -> None:
    """What the trace says, and nothing that a later step decides: text, accepted rows, mask and
    caches stood there from the first pass of the draft on."""
    content = traced(*options)
    iterations = content["iterations"]
    written = ""
    with opened(content) as page:
        assert page.evaluate("dynatree.data.iterations.length") == len(iterations)
        for at, found in enumerate(iterations):
            before, written = written, written + "".join(found["text"])
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
        assert written == content["text"] and shown["origins"] == origins(content)


def check_tree(shown: dict, content: dict, at: int, stage: int, last: int) -> None:
    """One stage of an iteration with a tree; the last five are mask to adapt, 0 is the whole."""
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
    assert seen(shown["sees"]) == (visible(tree["parents"]) if is_known["mask"] else set())
    assert shown["target"] == (n if is_known["verify"] else 0)
    assert ("target says" in shown["aloud"]) == is_known["verify"]
    for name in ("verify", "accepted"):
        assert (name in shown["names"]) == is_known[name.removesuffix("ed")]
    slots = [tree["slots"][row] for row in path if tree["slots"][row] >= 0]
    moved = [row for moving in (path, slots) for i, row in enumerate(moving) if i != row]
    assert shown["moves"] == (len(moved) if is_known["commit"] else 0)
    assert bool(shown["after"]) == is_known["commit"]
    notes = dict(zip(rows, shown["notes"], strict=True))
    if stage == last - 3:  # verify
        for row, target in enumerate(tree["target"]):
            word = content["vocabulary"][str(target)].replace(" ", "·").replace("\n", "↵")
            assert notes[row][:5] == f"→{word}"[:5]
    elif stage == last - 2 and found["tried"]:
        for row, chance, coin, _ in found["tried"]:
            assert notes.pop(row)[-1] == ("✓" if coin < chance else "✗")
            assert (row in path) == (coin < chance)
        for row, note in notes.items():  # kept with what is below it, or never tried
            assert note == ("✓" if row in path[1:] else "")
    elif stage == last - 1:  # commit
        n_before = content["iterations"][at - 1]["cached"][0]
        for place, row in enumerate(path):
            assert notes.pop(row) == ("stays" if row == place else f"→{n_before + place}")
        assert set(notes.values()) <= {""}


def drafted_by(found: dict, stage: int) -> list[int]:
    """The rows that are there at a stage of the draft: a depth with each pass, then memory's."""
    tree = found["tree"]
    if stage > len(found["draft_rows"]) and tree["retrieved"]:
        return list(range(len(tree["tokens"])))
    n_passes = min(stage, len(found["draft_rows"]))
    depths = depths_of(tree["parents"])
    there = [row for row, depth in enumerate(depths) if depth <= n_passes]
    return [row for row in there if row not in tree["retrieved"]]


def seen(path: str) -> set[tuple[int, int]]:
    """Row and column of each mark of the drawn mask."""
    corners = [tuple(map(float, corner)) for corner in re.findall(r"M(\S+) ([\d.]+)h", path)]
    columns = sorted({x for x, _ in corners})
    rows = sorted({y for _, y in corners})
    return {(rows.index(y), columns.index(x)) for x, y in corners}


def visible(parents: list[int]) -> set[tuple[int, int]]:
    """Row and column of what each row may see of the tree."""
    found = set()
    for row in range(len(parents)):
        above = row
        while above >= 0:
            found.add((row, above))
            above = parents[above]
    return found


def origins(content: dict) -> list[str]:
    """Who wrote each token of the text."""
    found = []
    for iteration in content["iterations"]:
        kinds = []
        for row in iteration.get("path", [0])[1:]:
            is_retrieved = row in iteration["tree"]["retrieved"]
            kinds.append("retrieved" if is_retrieved else "drafted")
        found += (kinds + ["bonus"])[: len(iteration["tokens"])]
    return found


def test_one_moves_by_keys_clicks_and_address(opened: Callable, traced: Callable) -> None:
    content = traced("--max-new-tokens", "60")
    last = len(content["iterations"]) - 1
    with opened(content) as page:

        def at() -> list[int]:
            return page.evaluate("[dynatree.state.iteration, dynatree.state.step]")

        def picture() -> list[str]:
            return page.locator("main .panel").evaluate_all("(all) => all.map((p) => p.innerHTML)")

        go(page, 3)
        before = picture()
        page.keyboard.press("End")
        assert at() == [last, 0] and picture() != before
        page.keyboard.press("Home")
        for key, place in (
            ("ArrowRight", [1, 0]),
            ("ArrowDown", [1, 1]),
            ("ArrowUp", [1, 0]),
            ("ArrowLeft", [0, 0]),
            ("ArrowDown", [1, 1]),
        ):
            page.keyboard.press(key)
            assert at() == place
        page.evaluate("location.hash = '#3.2'")
        page.wait_for_function("() => dynatree.state.step === 2")
        assert at() == [3, 2]
        page.locator("#steps button", has_text="Whole").click()
        assert at() == [3, 0] and picture() == before
        page.locator('#text .token[data-iteration="2"]').first.click()
        assert at() == [2, 0]
        page.keyboard.press("Space")
        page.wait_for_function("() => dynatree.state.iteration > 2")
        page.keyboard.press("Space")


def test_a_node_shows_the_numbers_of_the_trace(opened: Callable, traced: Callable) -> None:
    """And a gate the value that it had in that tree; every gate is explained."""
    content = traced("--max-new-tokens", "60")
    at = widest(content)
    tree = content["iterations"][at]["tree"]
    content["iterations"][at]["state"]["rho_deep"] = 0.4321
    tree["stopped"][-1] = "rho_deep"
    with opened(content) as page:
        go(page, at)
        assert page.locator("#tree g.ghost").count() == len(tree["dropped"])
        assert f"{tree['n_dropped']} candidates dropped" in page.locator("#details").inner_text()
        for row in range(len(tree["tokens"])):
            page.locator(f'#tree .node[data-row="{row}"]').hover()
            shown = page.locator("#details").inner_text()
            assert row == 0 or f"{tree['p'][row]:.2f}"[:4] in shown
            assert (tree["stopped"][row] or "") in shown
            if tree["confidence"][row] is not None:
                assert f"c(u)\n{tree['confidence'][row]:.2f}"[:8] in shown
                assert f"B(u)\n{tree['breadth'][row]}" in shown
            lit = page.locator("#mask .lit").evaluate_all("(all) => all.map((e) => e.dataset.row)")
            assert set(lit) == {str(row)}
            below = page.locator("#details .dropped li").all_inner_texts()
            gates = [entry[3] for entry in tree["dropped"] if entry[0] == row]
            assert len(below) == len(gates)
            assert all(gate in line for line, gate in zip(below, gates, strict=True))
        assert "rho_deep = 0.4321" in shown  # of the last row
        page.locator("#help summary").click()
        words = page.locator("#words").inner_text()
        dropped = {
            entry[3] for found in content["iterations"][1:] for entry in found["tree"]["dropped"]
        }
        assert all(gate in words for gate in dropped | {"reach", "p(u)", "rho_deep"})


def test_sums_over_the_run_are_the_traces(opened: Callable, traced: Callable) -> None:
    """By depth; a depth that no tree had reached was drawn taller."""
    content = traced("--max-new-tokens", "60")
    reached: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    deepest = max(max(depths_of(i["tree"]["parents"])) for i in content["iterations"][1:])
    with opened(content) as page:
        for at, iteration in enumerate(content["iterations"][1:4], start=1):
            accepted.update(range(1, len(iteration["path"])))
            reached.update(range(1, 1 + max(depths_of(iteration["tree"]["parents"]))))
            go(page, at)
            wells = page.locator("#depths .well").evaluate_all(
                "(all) => all.map((w) => [w.title, w.clientHeight, w.firstChild.clientHeight])"
            )
            assert len(wells) == deepest
            for depth, (title, height, bar) in enumerate(wells, start=1):
                counts = f"{accepted[depth]} of {reached[depth]} trees so deep"
                assert title == f"depth {depth}: {counts}" and height == wells[0][1]
                share = accepted[depth] / reached[depth] if reached[depth] else 0
                assert bar == pytest.approx(share * height, abs=1)
        page.keyboard.press("End")
        for name in ("D0", "tau_h", "rho_deep"):
            shown = page.locator(f"#thresholds .value.{name}").inner_text()
            now = content["iterations"][-1]["state"][name]
            assert float(shown) == pytest.approx(now, abs=0.006)
        page.locator("#settings summary").click()
        assert " ".join(content["command"][-4:-2]) in page.locator("#about").inner_text()


def test_outside_text_is_text(opened: Callable, traced: Callable) -> None:
    """In the prompt, in what was written, and in every name that comes from outside."""
    content = traced("--prompt", HOSTILE)
    content["vocabulary"] = {i: HOSTILE for i in content["vocabulary"]}
    content["settings"]["target"] = HOSTILE
    content["command"].append(HOSTILE)
    content["versions"]["machine"] = HOSTILE
    content["interrupted"] = True
    for iteration in content["iterations"]:
        iteration["text"] = [HOSTILE] * len(iteration["text"])
    with opened(content) as page:
        for i in range(len(content["iterations"])):
            go(page, i)
        assert page.locator("#text .token").first.text_content() == HOSTILE
        assert page.locator("img").count() == 0
        for node in page.locator("#tree .node").all()[:5]:
            node.hover()


def test_a_prompt_turns_only_its_own_writing(opened: Callable, traced: Callable) -> None:
    """A right-to-left override turned all that followed it around."""
    content = traced("--prompt", "left \u202e right")
    with opened(content) as page:
        page.keyboard.press("End")
        tokens = page.locator("#text .token").evaluate_all(
            "(all) => all.slice(0, 2).map((token) => token.getBoundingClientRect().left)"
        )
        assert tokens[0] < tokens[1]


@pytest.mark.parametrize(
    ("size", "scheme"),
    [(LAPTOP, "light"), (HALL, "dark"), (LARGE, "light"), (PHONE, "dark")],
    ids=["laptop", "hall", "150", "phone"],
)
def test_nothing_sticks_out(size: dict, scheme: str, opened: Callable, traced: Callable) -> None:
    """And of a tree too large for its place the root is in sight; it was not. Letters are no
    smaller than 12 pixels, in a tree that is made to fit 11."""
    content = traced("--method", "dyspec", "--max-new-tokens", "30")
    with opened(content, size, scheme) as page:
        go(page, widest(content))
        root = "document.documentElement"
        assert page.evaluate(f"{root}.scrollWidth <= {root}.clientWidth")
        if size in (LAPTOP, HALL):
            assert page.evaluate(f"{root}.scrollHeight <= {root}.clientHeight")
        if size is not PHONE:  # three columns
            lefts = [
                page.locator(f"#{name}-panel").bounding_box()["x"]
                for name in ("text", "tree", "mask")
            ]
            assert lefts == sorted(set(lefts))
        for iteration in range(1, len(content["iterations"])):
            go(page, iteration)
            assert is_inside(page, "#tree .node.root", "#tree"), iteration
            tools = page.locator("#tree-tools").bounding_box()
            tree = page.locator("#tree").bounding_box()
            assert tools["y"] >= tree["y"] + tree["height"], "they hide no node"
            go_to(page, iteration, "accept")
            assert is_inside(page, "#tree .bonus-node", "#tree"), iteration
        for where, least in (("#tree *", 10.99), ("body *:not(#tree *)", 11.99)):
            assert page.evaluate(SMALLEST, where) >= least


def is_inside(page: object, what: str, where: str) -> bool:
    """Whether one element is wholly seen within another."""
    own, place = page.evaluate(BOXES, [what, where])
    return all(inner >= outer - 1 for inner, outer in zip(own, place, strict=True))


def test_what_the_target_says_is_green_in_every_node(opened: Callable, traced: Callable) -> None:
    """In retrieved ones it had memory's orange."""
    content = traced("--method", "graft", "--max-new-tokens", "60")
    trees = {i: found["tree"] for i, found in enumerate(content["iterations"]) if "tree" in found}
    n_retrieved = {i: len(tree["retrieved"]) for i, tree in trees.items()}
    mixed = next(i for i, n in n_retrieved.items() if 0 < n < len(trees[i]["tokens"]) - 1)
    with opened(content) as page:
        go_to(page, mixed, "verify")
        chips = page.locator("#tree .chip")
        fills = chips.evaluate_all("(all) => all.map((chip) => getComputedStyle(chip).fill)")
        assert page.locator("#tree .retrieved .chip").count() and len(set(fills)) == 1


# Two frames later: what a new caption has resized is then drawn again
BOXES = """async (names) => {
  const frame = () => new Promise((done) => requestAnimationFrame(done));
  await frame().then(frame);
  const boxes = names.map((name) => document.querySelector(name).getBoundingClientRect());
  return boxes.map((box) => [box.left, box.top, -box.right, -box.bottom]);
}"""


SMALLEST = """(where) => Math.min(...[...document.querySelectorAll(where)]
  .filter((e) => e.checkVisibility() && [...e.childNodes].some((c) => c.data?.trim()))
  .map((e) => parseFloat(getComputedStyle(e).fontSize) * (e.getScreenCTM?.()?.a ?? 1)))"""


def test_who_does_not_see_is_told(opened: Callable, traced: Callable) -> None:
    """Whatever can be focused has a name, and what changes is said."""
    content = traced()
    with opened(content) as page:
        go(page, widest(content))
        nameless = page.evaluate(
            "[...document.querySelectorAll('button, [tabindex], [role=slider], canvas, svg')]"
            ".filter((e) => !e.closest('[aria-hidden=true]') && !e.getAttribute('aria-label')"
            " && !e.getAttribute('aria-labelledby') && !e.textContent.trim())"
            ".map((e) => e.outerHTML.slice(0, 80))"
        )
        assert nameless == []
        said = page.locator("[aria-live]").first
        before = said.text_content()
        page.keyboard.press("ArrowLeft")
        assert said.text_content() != before


def make_example() -> None:
    """docs/example.html, and README's picture of it: a node of a tree is pointed at."""
    page = Path("docs/example.html")  # as the command is shown on it
    wide = ["--set", "tau=0.01", "--set", "rho_stop=0.02", "--set", "rho_deep=0.05"]
    prompt = "She opened the door of the house and"
    main(["--prompt", prompt, "--max-new-tokens", "48", "--compare", *wide, "--page", str(page)])
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        shown = chromium.new_page(viewport=LAPTOP)
        shown.goto(page.absolute().as_uri() + "#7")
        shown.locator('#tree .node[data-row="3"]').hover()
        shown.screenshot(path=DOCS / "page.png")
        chromium.close()


if __name__ == "__main__":
    make_example()

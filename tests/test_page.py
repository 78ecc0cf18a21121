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
    def open_page(
        content: dict, size: dict = LAPTOP, scheme: str = "light", script: str = ""
    ) -> Iterator:
        file = tmp_path / "run.html"
        file.write_text(as_page(content))
        with browser.new_context(viewport=size, color_scheme=scheme, offline=True) as context:
            page = context.new_page()
            page.add_init_script(script)
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
    sees: document.querySelector('#mask .sees')?.getAttribute('d') ?? '',
    bold: all('#mask .row.accepted').length,
    target: all('#caches .cell.written rect').filter((r) => r.y.baseVal.value < 40).length,
    moves: all('#caches .move').length,
    names: all('#details dt').map((name) => name.textContent),
    aloud: nodes.map((node) => node.getAttribute('aria-label')).join(),
  };
}"""

RUNS = {
    "dynatree": ["--max-new-tokens", "40", "--compare"],
    "graft": ["--method", "graft", "--max-new-tokens", "40"],
    "sampled": ["--temperature", "0.9", "--method", "dyspec", "--set", "N=12"],
    "ar": ["--method", "ar", "--max-new-tokens", "5"],
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
    assert ("accepted" in shown["names"]) == is_known["accept"]
    slots = [tree["slots"][row] for row in path if tree["slots"][row] >= 0]
    moved = [row for moving in (path, slots) for i, row in enumerate(moving) if i != row]
    assert shown["moves"] == (len(moved) if is_known["commit"] else 0)
    notes = dict(zip(rows, shown["notes"], strict=True))
    if stage == last - 3:  # verify
        for row, target in enumerate(tree["target"]):
            word = content["vocabulary"][str(target)].replace(" ", "·").replace("\n", "↵")
            assert notes[row][:5] == f"→{word}"[:5]
    elif stage == last - 2:  # accept
        for row, chance, coin, _ in found["tried"]:
            assert notes[row][-1] == ("✓" if coin < chance else "✗")
            assert (row in path) == (coin < chance)


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
    above: list[set[int]] = []
    for row, parent in enumerate(parents):
        above.append({row} | (above[parent] if row else set()))
    return {(row, column) for row, columns in enumerate(above) for column in columns}


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
    content = traced()
    last = len(content["iterations"]) - 1
    with opened(content) as page:
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


def test_the_page_says_why(opened: Callable, traced: Callable) -> None:
    """In the open: which bar gave a row its children, and what moved a threshold."""
    content = traced("--set", "W=1", "--window", "64", "--max-new-tokens", "60")
    iterations = content["iterations"]
    told = []
    with opened(content) as page:
        caption, details = page.locator("#caption"), page.locator("#details")
        assert page.locator("#method").inner_text() == "dynatree, greedy, window 64"
        for at in range(1, len(iterations) - 1):
            tree, after = iterations[at]["tree"], iterations[at + 1]["state"]
            go_to(page, at, "draft")
            n_passes = len(iterations[at]["draft_rows"])
            if n_passes:
                assert f"Pass 1 of {n_passes}:" in caption.inner_text()
                reason = reason_of(tree["confidence"][0], iterations[at]["state"]["tau_h"])
                shown = f"{reason} = {tree['breadth'][0]} child"
                assert shown in caption.inner_text() and shown in details.inner_text()
            go_to(page, at, "adapt")
            for name in ("D0", "tau_h", "rho_deep"):
                now = iterations[at]["state"][name]
                moved = f"{name} {now:g} → {after[name]:g}"
                assert (moved in caption.inner_text()) == (now != after[name])
            if "→" in caption.inner_text():
                reach = after["reach"]
                bar = "above 0.8" if reach > 0.8 else "below 0.6"
                assert caption.inner_text().endswith(f", as reach {reach:.2f} is {bar}.")
                told.append(bar)
        go(page, widest(content))
        gates = Counter(gate for *_, gate in iterations[widest(content)]["tree"]["dropped"])
        assert all(f"{n} by {gate}" in details.inner_text() for gate, n in gates.items())
    assert set(told) == {"above 0.8", "below 0.6"}


def reason_of(c: float, tau_h: float) -> str:
    """Why the paper's B(u) is what it is, at the default tau_l."""
    if c >= tau_h:
        return f"c(u) {c:.2f} ≥ tau_h {tau_h:g}: B_min"
    if c < 0.4:
        return f"c(u) {c:.2f} < tau_l 0.4: B_max"
    return f"tau_l 0.4 ≤ c(u) {c:.2f} < tau_h {tau_h:g}: B_mid"


def test_a_node_shows_the_numbers_of_the_trace(opened: Callable, traced: Callable) -> None:
    """And a gate the value that it had in that tree; every gate is explained."""
    content = traced("--max-new-tokens", "60")
    at = widest(content)
    tree = content["iterations"][at]["tree"]
    content["iterations"][at]["state"]["rho_deep"] = 0.4321
    tree["stopped"][-1] = "rho_deep"
    with opened(content, HALL) as page:
        go(page, at)
        assert page.locator("#tree g.ghost").count() == len(tree["dropped"])
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
        assert "rho_deep = 0.4321" in shown  # of the last row
        page.locator("#help summary").click()
        words = page.locator("#words").inner_text()
        assert all(entry[3] in words for entry in tree["dropped"])


def test_sums_over_the_run_are_the_traces(opened: Callable, traced: Callable) -> None:
    """By depth; a depth that no tree had reached was drawn taller."""
    content = traced()
    reached: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    with opened(content) as page:
        for at, iteration in enumerate(content["iterations"][1:4], start=1):
            accepted.update(range(1, len(iteration["path"])))
            reached.update(range(1, 1 + max(depths_of(iteration["tree"]["parents"]))))
            go(page, at)
            wells = page.locator("#depths .well").evaluate_all(
                "(all) => all.map((w) => [w.title, w.clientHeight, w.firstChild.clientHeight])"
            )
            for depth, (title, height, bar) in enumerate(wells, start=1):
                counts = f"{accepted[depth]} of {reached[depth]} trees so deep"
                assert title == f"depth {depth}: {counts}" and height == wells[0][1]
                share = accepted[depth] / reached[depth] if reached[depth] else 0
                assert bar == pytest.approx(share * height, abs=1)


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
        go(page, widest(content))
        assert page.locator("#text .token").first.text_content() == HOSTILE
        assert page.locator("img").count() == 0
        page.locator('#tree .node[data-row="1"]').hover()


def test_a_prompt_turns_only_its_own_writing(opened: Callable, traced: Callable) -> None:
    """A right-to-left override turned all that followed it around."""
    with opened(traced("--prompt", "left \u202e right")) as page:
        page.keyboard.press("End")
        place = "(all) => all.slice(0, 2).map((token) => token.getBoundingClientRect().left)"
        first, second = page.locator("#text .token").evaluate_all(place)
        assert first < second


@pytest.mark.parametrize(
    ("size", "scheme"),
    [(LAPTOP, "light"), (HALL, "dark"), (LARGE, "light"), (PHONE, "dark")],
    ids=["laptop", "hall", "150", "phone"],
)
def test_nothing_sticks_out(size: dict, scheme: str, opened: Callable, traced: Callable) -> None:
    """The root and the path's end are in sight. Letters are no smaller than 12 pixels, in a tree
    that is made to fit 11."""
    content = traced("--method", "dyspec", "--temperature", "0.9")
    with opened(content, size, scheme) as page:
        root = "document.documentElement"
        assert page.evaluate(f"{root}.scrollWidth <= {root}.clientWidth")
        if size in (LAPTOP, HALL):
            assert page.evaluate(f"{root}.scrollHeight <= {root}.clientHeight")
        for at in range(1, len(content["iterations"])):
            go(page, at)
            assert is_inside(page, "#tree .node.root", "#tree"), at
            go_to(page, at, "accept")
            assert is_inside(page, "#tree .bonus-node", "#tree"), at
        for where, least in (("#tree *", 10.99), ("body *:not(#tree *)", 11.99)):
            assert page.evaluate(SMALLEST, where) >= least


def test_a_tree_of_five_levels_is_whole_and_stays(opened: Callable, traced: Callable) -> None:
    """The last coin, and the word beside the bonus, were cut off; and all of it jumped where a
    caption was of three lines."""
    content = traced("--method", "specinfer", "--temperature", "0.9", "--max-new-tokens", "40")
    tops = set()
    with opened(content) as page:
        for at in range(1, len(content["iterations"])):
            for kind in ("whole", "accept", "adapt"):
                go_to(page, at, kind)
                tops.add(page.evaluate("tree.offsetTop"))
                assert page.evaluate("(t => t.scrollWidth <= t.clientWidth)(tree)"), (at, kind)
    assert len(tops) == 1


def test_on_paper_everything_is_whole(opened: Callable, traced: Callable) -> None:
    """Mask and caches were cut, backgrounds left out, and in the dark all was dark."""
    content = traced("--method", "dyspec")
    fixed = "ResizeObserver = class { observe() {} }"  # printing draws nothing anew
    with opened(content, HALL, "dark", fixed) as page:
        go(page, widest(content))
        page.set_viewport_size({"width": 718, "height": 1047})  # A4 within its margins
        page.emulate_media(media="print")
        for name in ("tree", "mask", "caches"):
            assert is_inside(page, f"#{name} > svg", f"#{name}-panel"), name
        style = "getComputedStyle(document.body)"
        assert page.evaluate(f"{style}.printColorAdjust") == "exact"
        assert page.evaluate(f"{style}.getPropertyValue('--paper')") == "#f6f4ef"
        assert not page.locator("#controls button:visible").count()


def is_inside(page: object, what: str, where: str) -> bool:
    """Whether one element is wholly seen within another."""
    own, place = page.evaluate(BOXES, [what, where])
    return all(inner >= outer - 1 for inner, outer in zip(own, place, strict=True))


def test_what_the_target_says_is_green_in_every_node(opened: Callable, traced: Callable) -> None:
    """In retrieved ones it had memory's orange."""
    content = traced("--method", "graft", "--max-new-tokens", "60")
    with opened(content) as page:
        go_to(page, widest(content), "verify")
        chips = page.locator("#tree .chip")
        fills = chips.evaluate_all("(all) => all.map((chip) => getComputedStyle(chip).fill)")
        n_retrieved = page.locator("#tree .retrieved .chip").count()
        assert 0 < n_retrieved < len(fills) - 1 and len(set(fills)) == 1


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

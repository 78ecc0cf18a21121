"""The page of --page in a real browser: what it shows is the run, and nothing in it is obeyed.

Needs a Chromium on this machine, and `pip install -r requirements-browser.txt`.

    PYTHONPATH=. python tests/test_page.py docs/page.png  # makes the README's picture again
"""

import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_trace import TEXT, depths_of, interrupt_at

from cli.main import main
from cli.models import Request
from cli.page import as_page

playwright = pytest.importorskip("playwright.sync_api", reason="no playwright")
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason=f"no browser: none of {', '.join(NAMES)}"),
]
Captured = pytest.CaptureFixture[str]
LAPTOP = {"width": 1280, "height": 720}
PHONE = {"width": 390, "height": 844}
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
    """Opens the page of a trace; at the end, nothing may have gone wrong in it."""

    @contextmanager
    def open_page(content: dict, size: dict = LAPTOP, scheme: str = "light") -> Iterator:
        file = tmp_path / "run.html"
        file.write_text(as_page(json.dumps(content)))
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


def take_picture(file: str) -> None:
    """The README's: a real run of the embedded pair, a node of its tree pointed at."""
    run = Path(file).with_suffix(".html")
    prompt = "It was a cold morning, and Holmes"
    main(["--prompt", prompt, "--max-new-tokens", "120", "--compare", "--page", str(run)])
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = chromium.new_page(viewport=LAPTOP)
        page.goto(run.absolute().as_uri())
        go(page, 14)
        page.locator('#tree .node[data-row="3"]').hover()
        page.screenshot(path=file)
        chromium.close()
    run.unlink()


def go(page: object, iteration: int, step: int | None = None) -> None:
    """step: of the six, from 0; after the last of them if not given."""
    page.evaluate("([i, s]) => window.dynatree.go(i, s)", [iteration, step])


def drawn(page: object) -> dict[str, str]:
    """What is shown, as it stands in the document."""
    parts = ("text", "tree", "mask", "caches", "thresholds", "details")
    return {part: page.locator(f"#{part}").inner_html() for part in parts}


def written(page: object) -> str:
    """The text beside the prompt, from its tokens."""
    return page.evaluate(
        "[...document.querySelectorAll('#text .token[data-iteration]')]"
        ".map((token) => token.textContent).join('')"
    )


RUNS = {
    "dynatree": [],
    "compared": ["--compare"],
    "graft": ["--method", "graft"],
    "auto": ["--method", "auto"],
    "dyspec": ["--method", "dyspec"],
    "sampled": ["--temperature", "0.9", "--method", "linear"],
    "ar": ["--method", "ar"],
    "one token": ["--max-new-tokens", "1"],
    "window": ["--window", "64", "--max-new-tokens", "150"],
}


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS.keys())
def test_the_page_is_the_run(options: list[str], opened: Callable, traced: Callable) -> None:
    content = traced(*options)
    with opened(content) as page:
        assert page.evaluate("window.dynatree.data.iterations.length") == len(content["iterations"])
        go(page, len(content["iterations"]) - 1)
        assert written(page) == content["text"]
        for i, iteration in enumerate(content["iterations"]):
            go(page, i)
            tree = iteration.get("tree", {"tokens": []})
            rows = page.locator("#tree .node[data-row]")
            assert rows.count() == len(tree["tokens"])
            accepted = page.locator("#tree .node.accepted[data-row]").evaluate_all(
                "(nodes) => nodes.map((node) => Number(node.dataset.row)).sort((a, b) => a - b)"
            )
            assert accepted == iteration.get("path", [])
            retrieved = page.locator("#tree .node.retrieved[data-row]").count()
            assert retrieved == len(tree.get("retrieved", []))


def test_to_the_end_and_back_is_the_same_picture(opened: Callable, traced: Callable) -> None:
    content = traced("--max-new-tokens", "60")
    with opened(content) as page:
        go(page, 3)
        before = drawn(page)
        page.keyboard.press("End")
        assert page.evaluate("window.dynatree.iteration") == len(content["iterations"]) - 1
        assert drawn(page)["tree"] != before["tree"]
        page.keyboard.press("Home")
        assert page.evaluate("window.dynatree.iteration") == 0
        go(page, 3)
        assert drawn(page) == before


def test_the_keyboard_leads_through_the_run(opened: Callable, traced: Callable) -> None:
    with opened(traced()) as page:
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert page.evaluate("window.dynatree.iteration") == 2
        page.keyboard.press("ArrowLeft")
        assert page.evaluate("window.dynatree.iteration") == 1
        page.keyboard.press("Space")
        page.wait_for_function("() => window.dynatree.iteration > 1")
        page.keyboard.press("Space")


def test_a_node_shows_the_numbers_of_the_trace(opened: Callable, traced: Callable) -> None:
    content = traced("--max-new-tokens", "60")
    at = widest(content)
    tree = content["iterations"][at]["tree"]
    with opened(content) as page:
        go(page, at)
        for row in range(1, len(tree["tokens"])):
            page.locator(f'#tree .node[data-row="{row}"]').hover()
            shown = page.locator("#details").inner_text()
            if tree["stopped"][row]:
                assert tree["stopped"][row] in shown
            assert f"{tree['p'][row]:.2f}"[:4] in shown or f"{tree['p'][row]}" in shown
            lit = page.locator("#mask .lit").count() + page.locator("#mask [data-lit]").count()
            assert lit > 0
        for row, confidence in enumerate(tree["confidence"]):
            if confidence is not None:
                page.locator(f'#tree .node[data-row="{row}"]').focus()
                shown = page.locator("#details").inner_text()
                assert str(tree["breadth"][row]) in shown
                assert f"{confidence:.2f}"[:4] in shown or f"{confidence}" in shown


def widest(content: dict) -> int:
    """The iteration with the most nodes."""
    sizes = [len(i["tree"]["tokens"]) if "tree" in i else 0 for i in content["iterations"]]
    return sizes.index(max(sizes))


def test_a_gate_has_the_value_that_it_had_in_that_tree(opened: Callable, traced: Callable) -> None:
    content = traced("--max-new-tokens", "60")
    at = widest(content)
    tree = content["iterations"][at]["tree"]
    content["iterations"][at]["state"]["rho_deep"] = 0.4321
    tree["stopped"][-1] = "rho_deep"
    with opened(content) as page:
        go(page, at)
        assert page.locator("#tree g.ghost").count() == len(tree["dropped"])
        assert f"{tree['n_dropped']} candidates dropped" in page.locator("#details").inner_text()
        page.locator(f'#tree .node[data-row="{len(tree["tokens"]) - 1}"]').hover()
        assert "rho_deep = 0.4321" in page.locator("#details").inner_text()
        for row in {entry[0] for entry in tree["dropped"]}:
            page.locator(f'#tree .node[data-row="{row}"]').focus()
            below = page.locator("#details .dropped li").all_inner_texts()
            gates = [entry[3] for entry in tree["dropped"] if entry[0] == row]
            assert len(below) == len(gates)
            for line, gate in zip(below, gates, strict=True):
                assert gate in line


def test_a_token_has_the_colour_of_who_wrote_it(opened: Callable, traced: Callable) -> None:
    content = traced("--method", "graft", "--max-new-tokens", "60")
    expected = []
    for iteration in content["iterations"]:
        origins = []
        for row in iteration.get("path", [0])[1:]:
            is_retrieved = row in iteration["tree"]["retrieved"]
            origins.append("retrieved" if is_retrieved else "drafted")
        expected += (origins + ["bonus"])[: len(iteration["tokens"])]
    assert set(expected) == {"drafted", "retrieved", "bonus"}
    with opened(content) as page:
        kinds = page.locator("#text .token").evaluate_all(
            "(tokens) => tokens.map((token) => token.classList[1])"
        )
        assert kinds == expected


def test_the_mask_marks_each_rows_ancestors(opened: Callable, traced: Callable) -> None:
    content = traced("--method", "dyspec", "--set", "N=12")
    at = widest(content)
    expected = {(0, 0)}
    for row, parent in enumerate(content["iterations"][at]["tree"]["parents"]):
        expected |= {(row, column) for above, column in expected if above == parent} | {(row, row)}
    with opened(content) as page:
        go(page, at)
        path = page.locator("#mask .sees").get_attribute("d")
        corners = [tuple(map(float, corner)) for corner in re.findall(r"M(\S+) ([\d.]+)h", path)]
        columns = sorted({x for x, _ in corners})
        rows = sorted({y for _, y in corners})
        assert {(rows.index(y), columns.index(x)) for x, y in corners} == expected
        page.locator('#tree .node[data-row="1"]').hover()
        for band in ("across", "down"):
            size = page.locator(f"#mask .{band}").bounding_box()
            assert size["width"] > 0 and size["height"] > 0


def notes_by_row(page: object) -> list[str]:
    """What stands behind each node."""
    return page.locator("#tree .node").evaluate_all(
        "(nodes) => nodes.sort((a, b) => a.dataset.row - b.dataset.row)"
        ".map((node) => node.querySelector('.note').textContent)"
    )


def test_what_the_target_says_and_what_the_commit_moves(opened: Callable, traced: Callable) -> None:
    content = traced("--method", "dyspec", "--set", "N=12", "--max-new-tokens", "40")
    before = [iteration["cached"][0] for iteration in content["iterations"]]
    with opened(content) as page:
        for at, iteration in list(enumerate(content["iterations"]))[1:]:
            tree, path = iteration["tree"], iteration["path"]
            last = page.evaluate("(i) => { dynatree.go(i, 99); return dynatree.step; }", at)
            go(page, at, last - 1)
            notes = notes_by_row(page)
            expected = [""] * len(notes)
            for place, row in enumerate(path):
                expected[row] = "stays" if row == place else f"→{before[at - 1] + place}"
            assert notes == expected
            slots = [tree["slots"][row] for row in path if tree["slots"][row] >= 0]
            moved = [row for moving in (path, slots) for i, row in enumerate(moving) if i != row]
            assert page.locator("#caches .move").count() == len(moved)
            go(page, at, last - 3)
            for note, target in zip(notes_by_row(page), tree["target"], strict=True):
                word = content["vocabulary"][str(target)].replace(" ", "·").replace("\n", "↵")
                assert note[:5] == f"→{word}"[:5]


def test_sums_over_the_run_are_the_traces(opened: Callable, traced: Callable) -> None:
    content = traced("--max-new-tokens", "60")
    reached: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for iteration in content["iterations"][1:]:
        accepted.update(range(1, len(iteration["path"])))
        reached.update(range(1, 1 + max(depths_of(iteration["tree"]["parents"]))))
    with opened(content) as page:
        page.keyboard.press("End")
        for depth, well in enumerate(page.locator("#depths .well").all(), start=1):
            counts = f"depth {depth}: {accepted[depth]} of {reached[depth]} trees so deep"
            assert well.get_attribute("title") == counts
        for name in ("D0", "tau_h", "rho_deep"):
            shown = page.locator(f"#thresholds .value.{name}").inner_text()
            now = content["iterations"][-1]["state"][name]
            assert float(shown) == pytest.approx(now, abs=0.006)
        page.locator("#settings summary").click()
        assert " ".join(content["command"][-4:-2]) in page.locator("#about").inner_text()


def test_a_prompt_turns_only_its_own_writing(opened: Callable, traced: Callable) -> None:
    """A right-to-left override turned all that followed it around."""
    content = traced("--prompt", "left \u202e right")
    with opened(content) as page:
        page.keyboard.press("End")
        tokens = page.locator("#text .token").evaluate_all(
            "(all) => all.slice(0, 2).map((token) => token.getBoundingClientRect().left)"
        )
        assert tokens[0] < tokens[1]


def test_a_click_on_a_token_goes_to_its_iteration(opened: Callable, traced: Callable) -> None:
    with opened(traced()) as page:
        page.keyboard.press("End")
        page.locator('#text .token[data-iteration="2"]').first.click()
        assert page.evaluate("window.dynatree.iteration") == 2


def test_every_step_can_be_shown(opened: Callable, traced: Callable) -> None:
    content = traced()
    with opened(content) as page:
        pictures = set()
        for step in range(6):
            go(page, widest(content), step)
            assert page.evaluate("window.dynatree.step") == step
            pictures.add(json.dumps(drawn(page)))
        assert len(pictures) >= 4


def test_a_hostile_token_is_text(opened: Callable, traced: Callable) -> None:
    """In the prompt, in what was written, and in every name that comes from outside."""
    content = traced("--prompt", HOSTILE)
    content["vocabulary"] = {i: HOSTILE for i in content["vocabulary"]}
    content["settings"]["target"] = HOSTILE
    content["command"].append(HOSTILE)
    content["versions"]["machine"] = HOSTILE
    for iteration in content["iterations"]:
        iteration["text"] = [HOSTILE] * len(iteration["text"])
    with opened(content) as page:
        for i in range(len(content["iterations"])):
            go(page, i)
        assert HOSTILE in written(page)
        assert page.locator("img").count() == 0
        for node in page.locator("#tree .node").all()[:5]:
            node.hover()


def test_an_interrupted_run_opens(
    opened: Callable, traced: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Request, "decode", interrupt_at(3, Request.decode))
    content = traced()
    assert content["interrupted"]
    with opened(content) as page:
        go(page, 2)
        assert written(page) == content["text"]


def test_two_thousand_iterations_scrub(opened: Callable, traced: Callable) -> None:
    """Every iteration of a run again and again; the time it takes is for the eye to judge."""
    content = traced("--max-new-tokens", "80")
    own = content["iterations"][1:]
    for i in range(2000 - len(own)):
        content["iterations"].append(own[i % len(own)])
    with opened(content) as page:
        for i in range(0, 2001, 50):
            go(page, i)
        page.keyboard.press("End")
        assert page.evaluate("window.dynatree.iteration") == 2000


def test_five_hundred_tokens_are_small(traced: Callable) -> None:
    content = traced("--max-new-tokens", "500", "--method", "dyspec", "--ignore-eos")
    assert len(as_page(json.dumps(content, separators=(",", ":")))) < 3_000_000


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_nothing_sticks_out(size: dict, scheme: str, opened: Callable, traced: Callable) -> None:
    content = traced("--max-new-tokens", "60")
    with opened(content, size, scheme) as page:
        go(page, widest(content))
        root = "document.documentElement"
        assert page.evaluate(f"{root}.scrollWidth <= {root}.clientWidth")
        if size is LAPTOP:
            assert page.evaluate(f"{root}.scrollHeight <= {root}.clientHeight")


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


if __name__ == "__main__":
    take_picture(sys.argv[1])

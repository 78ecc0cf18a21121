"""Tests of a user's method: its drafter and acceptance, and the file that adds it (--load)."""

import itertools
import json
import math
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy
import pytest
from numpy import ndarray
from small import ROOT, TINY, Captured, error_line
from torch import Tensor

import dynatree
import dynatree_lab as lab
from draft_tree import (
    Candidates,
    DynaTree,
    DynaTreeRule,
    Gates,
    Level,
    Rule,
    Settings,
    Tree,
)
from dynatree import Drafter, ModelDrafter
from dynatree_lab.benchmark import measure
from dynatree_lab.benchmark.cases import TABLES
from dynatree_lab.benchmark.results import load
from dynatree_lab.cli.load import import_files
from dynatree_lab.cli.main import main
from dynatree_lab.methods import PROJECT_METHODS
from dynatree_lab.methods.acceptances import accept_by_token
from dynatree_lab.methods.rules import facts_of
from dynatree_lab.methods.sampler import DrawingSampler
from dynatree_lab.methods.static import Chain, Fixed, PaddedAutoregressive
from dynatree_lab.pair import Pair
from verify import Acceptance, accept_greedy

PROMPT = "The ship sailed at dawn"
ASK = ["--prompt", PROMPT, "--max-new-tokens", "12"]
HEAD = str(TINY / "eagle")


class Counting(ModelDrafter):
    """A ModelDrafter that proposes half of the candidates, and counts its calls."""

    n_calls = 0

    def choose(self, logits: Tensor, k: int) -> Candidates:
        type(self).n_calls += 1
        return super().choose(logits, (k + 1) // 2)


class Repeating(Drafter):
    """Proposes each token again, without a draft model."""

    temperature = 1.0  # for ModelDrafter.choose

    def draft(self, tree: Tree, rows: list[int], k: int) -> Candidates:
        return ModelDrafter.choose(self, one_hot([tree.tokens[row] for row in rows]), 1)


def one_hot(tokens: list[int]) -> Tensor:
    logits = Tensor(len(tokens), 4096).zero_()
    logits[range(len(tokens)), tokens] = 9.0
    return logits


def accept_first(tree: Tree, logits: Tensor) -> tuple[list[int], list[int]]:
    """Accept every first child, whatever the target says. It is lossy."""
    path, tokens = [0], []
    for row in range(1, len(tree)):
        if tree.parents[row] == path[-1]:
            path.append(row)
            tokens.append(tree.tokens[row])
    return path, [*tokens, int(logits[path[-1]].argmax())]


@dataclass(frozen=True)
class Halved(DynaTree):
    """halved: a drafter of its own over the draft model."""

    def make_drafter(self, draft: object) -> Drafter:
        return Counting(draft)


@dataclass(frozen=True)
class Repeated(Chain):
    """repeated: a drafter that needs no draft model."""

    needs_draft = False

    def make_drafter(self, draft: object) -> Drafter:
        assert draft is None
        return Repeating()


@dataclass(frozen=True)
class Own(DynaTree):
    """own: dynatree under another name."""


class TwoLevels(DynaTreeRule):
    """A rule that says nothing of drawn candidates, and needs not."""

    def expand_gates(self, level: Level) -> Gates:
        return {"two": level.row_depth < 1}


class EntropyRule(DynaTreeRule):
    """A rule that says that it decides by what is known before the draw."""

    reads_entropy = True
    draws_candidates = True

    def breadth(self, level: Level) -> ndarray:
        return numpy.exp(level.entropy).round().clip(1, 3)


class UnlikelyRule(DynaTreeRule):
    """A rule that cuts candidates by their own probability, so they must not be drawn."""

    def add_gates(self, level: Level) -> Gates:
        return {"likely": level.logprobs >= math.log(0.05)}


class CountingRule(DynaTreeRule):
    """Another one. If they were drawn, the total variation would be 0.04."""

    def breadth(self, level: Level) -> ndarray:
        return (level.logprobs >= math.log(0.3)).sum(axis=1)


@dataclass(frozen=True)
class Lossy(Settings):
    """lossy: accepts what the draft proposes."""

    def make_rule(self) -> Rule:
        return Rule(max_branches=1, max_depth=3, max_rows=4)

    def make_accept(self) -> Acceptance:
        return accept_first


@dataclass(frozen=True)
class Both(Fixed):
    """both: an acceptance of greedy text, and one of sampled text."""

    def make_rule(self) -> Rule:
        rule = super().make_rule()
        rule.acceptance = accept_by_token
        return rule

    def make_accept(self) -> Acceptance:
        return accept_first


@pytest.fixture(autouse=True)
def own_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (Halved, Repeated, Own, Lossy, Both):
        monkeypatch.setitem(lab.METHODS, kind.__name__.lower(), kind)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return lab.load_pair()


COSTS = "costs=0.3:0.04:0.2:0.4"
OPTIONS = ("", "calibrate=on", COSTS, f"calibrate=on {COSTS}")


@pytest.mark.parametrize("method", PROJECT_METHODS)
def test_a_subclass_from_a_file_is_the_built_in_method(
    method: str, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check trees, ids and the page's data, greedy and sampled, of an unchanged subclass. Once it
    got other candidates and no options. Options without effect are refused for both alike."""
    name = f"same_{method}"
    monkeypatch.setitem(lab.METHODS, name, None)  # so that it is gone after the test
    file = tmp_path / f"{name}.py"
    base = f"lab.METHODS['{method}']"
    file.write_text(
        f"import dynatree_lab as lab\nclass Same({base}):\n    pass\nlab.METHODS['{name}'] = Same\n"
    )
    del lab.METHODS[name]
    import_files([str(file)])
    fixed = COSTS if method == "auto" else ""  # learned costs depend on time
    n_written = 0
    for options, sampling in itertools.product(OPTIONS, ("", "temperature=0.8 seed=2")):
        words = f"{options if method != 'auto' else fixed} {sampling}"
        own, built_in = (written(pair, f"{each} {words}") for each in (name, method))
        assert own == built_in
        n_written += not isinstance(own, str)
    assert n_written >= 2


def written(pair: Pair, words: str) -> str | tuple:
    """Return the ids and the page's data of a text, or the message of a refused option."""
    try:
        result = lab.write_text(pair, PROMPT, words, max_new_tokens=16)
    except ValueError as error:
        return str(error)
    data = result.data
    iterations = [each | {"ms": 0} for each in data["iterations"]]
    return result.ids, data["meanings"], data["base"], iterations


@pytest.mark.parametrize("kind", ["TwoLevels", "EntropyRule", "UnlikelyRule", "CountingRule"])
@pytest.mark.parametrize("words", ["", "calibrate=on", COSTS])
def test_a_rule_of_ones_own_samples_the_targets_distribution(kind: str, words: str) -> None:
    """Check drawn candidates, and those of rules that may not have them, by enumeration."""
    rule = globals()[kind]

    @dataclass(frozen=True)
    class Made(DynaTree):
        def make_rule(self) -> Rule:
            return rule(self)

    settings = Made(B_min=1, B_mid=2, B_max=2, tau=0.02, rho_stop=0.05, D0=2, D_max=2, N_max=4)
    options = {"calibrate": "calibrate" in words}
    options |= {"costs": words.partition("=")[2]} if words == COSTS else {}
    assert lab.distribution_difference(settings, lab.Sampling(0.8), **options) < 1e-6


def test_which_rules_get_drawn_candidates() -> None:
    """Check that a subclass gets them unless it decides by itself which candidates become rows."""
    for kind in (DynaTreeRule, TwoLevels, EntropyRule, UnlikelyRule, CountingRule):
        is_safe = kind not in (UnlikelyRule, CountingRule)
        assert facts_of(kind(DynaTree())).draws_candidates == is_safe
    assert facts_of(Rule(2, 2, 9)).draws_candidates
    unlikely = UnlikelyRule(DynaTree())
    unlikely.draws_candidates = True
    assert facts_of(unlikely).draws_candidates


@pytest.mark.parametrize("words", ["halved", "repeated", "halved temperature=0.8"])
def test_a_method_brings_its_drafter(words: str, pair: Pair) -> None:
    """Check greedy ids, that the drafter drafts each level, and an EAGLE head under it."""
    Counting.n_calls = 0
    result = lab.write_text(pair, PROMPT, words, max_new_tokens=24)
    n_levels = sum(len(step.draft_rows) for step in result.steps)
    assert Counting.n_calls == n_levels and (n_levels > 0) == words.startswith("halved")
    assert result.data["command"] == [] and any(step.n_drafted for step in result.steps)
    if "temperature" not in words:
        assert result.ids == lab.write_text(pair, PROMPT, "ar", max_new_tokens=24).ids
        if "halved" in words:
            head = lab.load_pair(draft=HEAD)
            assert lab.write_text(head, PROMPT, words, max_new_tokens=24).ids == result.ids
        own = lab.write_text(pair, PROMPT, words, drafter=Repeating(), max_new_tokens=24)
        assert own.ids == result.ids and not any(step.draft_rows for step in own.steps)


@dataclass(frozen=True)
class Leaving(Repeated):
    """leaving: a drafter that leaves the draft unused, and does not say so."""

    needs_draft = True

    def make_drafter(self, draft: object) -> Drafter:
        return Repeating()


def test_a_drafter_may_leave_the_draft_unused(pair: Pair) -> None:
    """Check a session as well, whose caches are kept."""
    config = lab.GenerationConfig(Leaving())
    session = lab.Session(pair)
    for words in (config, "dynatree", config):
        found = session.write(PROMPT, words, max_new_tokens=9)
    steps = lab.generate(
        pair.target, None, found.request.prompt, lab.GenerationConfig.parse("ar"), 9
    )
    assert found.ids == [token for step in steps for token in step.tokens]
    assert not any(step.draft_rows or step.draft_overflowed for step in found.steps)


@pytest.mark.parametrize("words", ["dynatree", "dynatree calibrate=on"])
def test_what_is_no_candidates_is_named(words: str, pair: Pair) -> None:
    class Nothing(Drafter):
        def draft(self, tree: Tree, rows: list[int], k: int) -> Candidates:
            return None

    with pytest.raises(
        ValueError, match="gave NoneType, it must return Candidates of numpy arrays"
    ):
        lab.write_text(pair, PROMPT, words, drafter=Nothing())


def test_settings_are_no_rule(pair: Pair) -> None:
    ids, config = pair.tokenizer.encode(PROMPT).ids, lab.GenerationConfig(DynaTree())
    drafter = ModelDrafter(pair.draft)
    for write in (
        lambda rule: lab.write_text(pair, PROMPT, rule=rule),
        lambda rule: list(lab.generate(pair.target, pair.draft, ids, config, 9, rule=rule)),
        lambda rule: list(dynatree.generate(pair.target, drafter, ids, rule, 9)),
    ):
        with pytest.raises(
            ValueError, match=r"rule is Fixed\(.*, the settings of one; use .make_rule"
        ):
            write(Fixed())


def test_a_method_without_a_draft_asks_for_none(
    pair: Pair, capsys: Captured, tmp_path: Path
) -> None:
    """Check both programs with a target alone, and a table of passes that needs the draft."""
    alone, target = replace(pair, draft=None), str(TINY / "target")
    assert lab.write_text(alone, PROMPT, "repeated", max_new_tokens=9).ids
    assert lab.write_text(alone, PROMPT, rule=Rule(1, 0, 1), max_new_tokens=9).ids
    assert main([*ASK, "--method", "repeated", "--target", target, "--compare", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["draft"] is None and found["compare"]["exact"]
    options = "--methods repeated --n-prompts 1 --max-new-tokens 6 --output".split()
    assert measure.main([*options, str(tmp_path / "a"), "--target", target]) == 0
    assert "draft" not in load(tmp_path / "a").head["machine"]
    capsys.readouterr()
    assert "--draft" in error_line(capsys, main, [*ASK, "--method", "halved", "--target", target])


def test_a_method_brings_its_greedy_acceptance(
    pair: Pair, capsys: Captured, tmp_path: Path
) -> None:
    """Check that a lossy one shows: in --compare, in the column `exact`, and in both statuses."""
    exact = lab.write_text(pair, PROMPT, "ar", max_new_tokens=24).ids
    for words in ("lossy", "both tau=0"):
        assert lab.write_text(pair, PROMPT, words, max_new_tokens=24).ids != exact
        found = lab.write_text(pair, PROMPT, words, max_new_tokens=24, accept=accept_greedy)
        assert found.ids == exact
    assert main([*ASK, "--method", "lossy", "--compare"]) == 1
    assert "the ids differ from token" in capsys.readouterr().err
    options = f"--methods lossy --n-prompts 1 --max-new-tokens 12 --output {tmp_path / 'a'}"
    assert measure.main(options.split()) == 1
    assert "0/1" in capsys.readouterr().out
    sampled = [
        lab.write_text(pair, PROMPT, lab.GenerationConfig(kind()), 24, temperature=0.8).ids
        for kind in (Both, Drawn)
    ]
    assert sampled[0] == sampled[1]
    message = "temperature is 0.8, the method's acceptance is for greedy text; use temperature 0"
    hot = [*ASK, "--method", "lossy", "--temperature", "0.8"]
    assert message in error_line(capsys, main, hot)
    hot = ["--methods", "lossy", "--temperature", "0.8"]
    assert f"lossy: {message}" in error_line(capsys, measure.main, hot)


ACCEPTANCES = [  # words, options, how the page says that the path is chosen
    ("dynatree", {}, None),
    ("lossy", {}, "own"),
    ("dynatree", {"accept": accept_first}, "own"),
    ("both temperature=0.8", {}, "own"),
    ("dynatree temperature=0.8", {}, "token"),
    ("dynatree temperature=0.8", {"drafter": Repeating()}, "walk"),
    ("deagle temperature=0.8", {}, "walk"),
    ("ar temperature=0.8", {}, "walk"),
]


@pytest.mark.parametrize(("words", "options", "expected"), ACCEPTANCES)
def test_the_page_names_the_acceptance(
    words: str, options: dict[str, object], expected: str | None, pair: Pair
) -> None:
    """Check that trials are told only where numbers were drawn for them."""
    data = lab.write_text(pair, PROMPT, words, max_new_tokens=12, **options).data
    assert data["settings"]["acceptance"] == expected
    has_trials = any(found.get("trials") for found in data["iterations"])
    assert has_trials == (expected == "token" or words.startswith("both"))


@dataclass(frozen=True)
class Drawn(Both):
    """drawn: an acceptance of sampled text alone."""

    make_accept = property()  # hides that of Both, as if it had none


def test_exactness_is_not_claimed_for_an_acceptance_that_is_not_called(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(lab.METHODS, "drawn", Drawn)
    note = "Greedy text does not call the acceptance of drawn: use --temperature."
    options = "--methods drawn,both --n-prompts 1 --max-new-tokens 6 --output".split()
    measure.main([*options, str(tmp_path / "a")])
    assert note in " ".join(capsys.readouterr().out.split())
    measure.main([*options, str(tmp_path / "b"), "--temperature", "0.8"])
    assert "does not call" not in capsys.readouterr().out


def accept_typical(
    tree: Tree, probs: Tensor, sampler: DrawingSampler, draft_probs: list[Tensor]
) -> tuple[list[int], list[int]]:
    """Accept every first child that the target gives more than 0.3. It is lossy."""
    path, tokens = [0], []
    for row in range(1, len(tree)):
        if tree.parents[row] == path[-1] and probs[path[-1]][tree.tokens[row]] > 0.3:
            path.append(row)
            tokens.append(tree.tokens[row])
    return path, [*tokens, sampler.draw(probs[path[-1]])]


@dataclass(frozen=True)
class Typical(Chain):
    """typical: a lossy acceptance of sampled text."""

    def make_rule(self) -> Rule:
        rule = super().make_rule()
        rule.acceptance = accept_typical
        return rule


def test_an_acceptance_of_ones_own_is_not_vouched_for(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that both programs say what is known, and that the function that they name tells a
    lossy acceptance from an exact one. It takes 3 s: four runs of the programs."""
    monkeypatch.setitem(lab.METHODS, "typical", Typical)
    how = "nobody has computed the distribution of this text; lab.distribution_difference(settings,"
    for method, is_own in (("typical", True), ("linear", False)):
        words = [*ASK, "--method", method, "--temperature", "0.8", "--compare"]
        assert main(words) == 0 and (f"note: {method}: {how}" in capsys.readouterr().err) == is_own
        options = f"--methods {method} --n-prompts 1 --max-new-tokens 6 --temperature 0.8 --output"
        assert measure.main([*options.split(), str(tmp_path / method)]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert (f"{method}: {how}" in printed) == is_own
        assert "The tests compute the distribution of the project's methods" in printed
    sampling = lab.Sampling(0.8)
    assert lab.distribution_difference(Typical(), sampling) > 0.1
    for settings in (Chain(), Drawn(B=2, tau=0.0)):
        assert lab.distribution_difference(settings, sampling) < 1e-6
    with pytest.raises(ValueError, match="the method's acceptance is for greedy text"):
        lab.distribution_difference(Lossy(), sampling)


def test_a_draft_temperature_has_no_effect_on_a_drafter(capsys: Captured) -> None:
    line = error_line(capsys, main, [*ASK, "--method", "halved", "--draft-temperature", "2"])
    assert "draft_temperature has no effect" in line


OWN = "import dynatree_lab as lab\nfrom beside import Kind\nlab.METHODS['own'] = Kind\n"
BESIDE = """from __future__ import annotations
from dataclasses import dataclass
from draft_tree import setting
from dynatree_lab.methods.static import Chain

@dataclass(frozen=True)
class Kind(Chain):
    other: int = setting(1, 0, 9, "a setting whose type is a string here")
"""


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file that adds the method `own`, with another file beside it that it imports."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("beside", "own_method"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(lab.METHODS, "own", None)
    del lab.METHODS["own"]
    (tmp_path / "beside.py").write_text(BESIDE)
    (tmp_path / "own_method.py").write_text(OWN)
    return tmp_path / "own_method.py"


def test_a_file_adds_a_method(own_file: Path, capsys: Captured) -> None:
    """Check --load after the options that need it, twice in one process, and in lab.run."""
    options = [
        *ASK,
        "--method",
        "own",
        "--set",
        "K=2",
        "--compare",
        "--json",
        "--load",
        str(own_file),
    ]
    for program in (main, lab.run):
        assert program(options) == 0
        assert json.loads(capsys.readouterr().out)["settings"]["method"] == "own"
    with pytest.raises(SystemExit):
        main(["--list-methods", "own", "--load", str(own_file)])
    assert "K=5" in capsys.readouterr().out


def test_mistakes_with_files(own_file: Path, capsys: Captured) -> None:
    folder = own_file.parent
    (folder / "json.py").write_text(OWN)
    (folder / "broken.py").write_text("1 / 0\n")
    for name, message in [
        ("nothing.py", "nothing.py: no such file"),
        (".", "no such file"),
        ("json.py", "another module is named json; rename the file"),
    ]:
        assert message in error_line(capsys, main, [*ASK, "--load", str(folder / name)])
    assert "expected one argument" in error_line(capsys, main, [*ASK, "--load"])
    with pytest.raises(ZeroDivisionError):
        main([*ASK, "--load", str(folder / "broken.py")])


def test_a_file_does_not_replace_a_method(own_file: Path, capsys: Captured) -> None:
    """Check a method of the project, with which --compare compares, and one of another file."""
    second = own_file.with_name("second.py")
    for name in ("ar", "own"):
        second.write_text(BESIDE + f"import dynatree_lab as lab\nlab.METHODS[{name!r}] = Kind\n")
        words = [*ASK, "--load", str(own_file), "--load", str(second)]
        line = error_line(capsys, main, words)
        assert f"second.py: it replaces another method named {name}; use another name" in line
    assert lab.METHODS["ar"] is PaddedAutoregressive


def show_without(file: Path, note: str, capsys: Captured) -> bool:
    """Whether --show prints the note, and the table of a results file without its method."""
    lab.METHODS.pop("own")
    capsys.readouterr()
    assert measure.main(["--show", str(file)]) == 0 and "own" not in lab.METHODS
    captured = capsys.readouterr()
    return note in captured.err and "\nown " in captured.out


@pytest.mark.slow
def test_a_results_file_loads_it_again(own_file: Path, capsys: Captured, tmp_path: Path) -> None:
    """Check a table and its file's digest, --show, --resume of a moved and of a changed file, and
    the process that measures memory. It takes 4 s: that process loads torch."""
    file = tmp_path / "r.jsonl"
    options = ["--n-prompts", "1", "--max-new-tokens", "6", "--methods", "own", "--output"]
    assert measure.main([*options, str(file), "--load", str(own_file)]) == 0
    ((path, digest),) = load(file).head["options"]["load"].items()
    assert path == str(own_file) and re.fullmatch("[0-9a-f]{64}", digest)
    for again, status in [("--show", 0), ("--resume", 0)]:
        del lab.METHODS["own"]
        assert measure.main([again, str(file)]) == status and "own" in lab.METHODS
    moved = own_file.parent / "below" / own_file.name
    moved.parent.mkdir()
    own_file.rename(moved)
    note = f"note: {path} is not there as it was; the table is shown without it"
    assert show_without(file, note, capsys)
    line = error_line(capsys, measure.main, ["--resume", str(file)])
    assert f"{path} is not there; use --load to say where it is now" in line
    sys.modules.pop("own_method")  # as in another process
    assert measure.main(["--resume", str(file), "--load", str(moved)]) == 0
    moved.rename(own_file)
    sys.modules.pop("own_method")
    own_file.write_text(OWN + "# changed\n")
    assert show_without(file, note, capsys)
    line = error_line(capsys, measure.main, ["--resume", str(file)])
    assert "a file of --load has changed" in line
    options = ["--table", "memory", *options, str(tmp_path / "m"), "--load", str(own_file)]
    assert measure.main(options) == 0
    assert all("own" not in part.rows for part in TABLES["main"].parts)
    assert {*TABLES["main"].parts[0].rows} == {*PROJECT_METHODS}


@pytest.mark.slow
def test_the_page_works_in_an_empty_folder(tmp_path: Path) -> None:
    """Run the first part of docs/method.md: its files, and its commands as printed, but with short
    texts. They take 20 s, because each loads torch."""
    page = (ROOT / "docs" / "method.md").read_text(encoding="utf-8").partition("\n## In the pro")[0]
    blocks = dict.fromkeys(("python", "bash"), ())
    for kind, text in re.findall(r"^```(\w+)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        blocks[kind] += (text,)
    for name, code in zip(("bushy", "echo", "lenient"), blocks["python"], strict=True):
        (tmp_path / f"{name}.py").write_text(code)
    printed = []
    for command in "".join(blocks["bash"]).splitlines():
        more = " --n-prompts 1" * ("benchmark" in command) + " --max-new-tokens 12"
        words = [sys.executable, *shlex.split(command + more)[1:]]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
        printed.append((done.returncode, done.stdout + done.stderr))
    found = "the ids are equal", "bushy K=2", "the ids are equal", "lenient differs from ar on 1"
    for (status, text), words, expected in zip(printed, found, (0, 0, 0, 1), strict=True):
        assert status == expected and words in text, text

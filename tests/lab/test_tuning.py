"""Tests of table tune: the order of its rows, and the settings that its report ends with."""

import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from fast import generate, noisy_pair
from small import run
from test_measure import BRIEF, DRAFT, QUICK, run_bench
from test_results import AR, make_head, make_results, make_text, rows_of

from dynatree_lab.benchmark.cases import TABLES
from dynatree_lab.benchmark.report import markdown_report, text_report
from dynatree_lab.benchmark.results import Line, Results
from dynatree_lab.benchmark.tuning import (
    DRAFTED,
    RETRIEVED,
    count_root_ranks,
    describe_fit,
    fit_draft,
)
from dynatree_lab.cli.main import build_parser
from dynatree_lab.cli.options import choose_config
from dynatree_lab.enumeration import tiny_model
from dynatree_lab.generation.config import GenerationConfig
from dynatree_lab.methods import METHODS
from dynatree_lab.methods.sampler import Sampling
from dynatree_lab.metrics import token_ids
from dynatree_lab.replay.candidates import TEMPERATURES


def settings_of(report: str) -> dict[str, str]:
    """Return the indented lines of a report by the beginnings of the lines above them."""
    parts = report.split("\n\n")
    indented = [i for i, part in enumerate(parts) if part.startswith("    ")]
    return {parts[i - 1].partition(",")[0]: parts[i].strip() for i in indented}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_root_ranks_are_those_of_the_next_tokens(temperature: float) -> None:
    """Find the token after each root among the draft's candidates, by another pass of the draft if
    the text is greedy. A rejected candidate is never that token, so no path is needed."""
    target, draft = noisy_pair(noise=0.3)
    settings = GenerationConfig.parse(*DRAFTED.split()).settings
    text, n_trees, ranks = [3, 14, 15], 0, Counter()
    steps = list(generate(target, draft, text, settings, 80, sampling=Sampling(temperature)))
    text = text + steps[0].tokens
    for step in steps[1:]:
        candidates = step.tree.tokens[1:]
        if candidates:  # the last tree may have none
            n_trees += 1
            best = run(draft, text)[-1].topk(4).indices.tolist()
            assert temperature or candidates == best
            if step.tokens[0] in candidates:
                ranks[candidates.index(step.tokens[0])] += 1
        text += step.tokens
    found = count_root_ranks(steps)
    assert found == {"trees": n_trees, "accepted": [ranks[i] for i in range(max(ranks) + 1)]}
    assert 10 < ranks.total() < n_trees and len(ranks) > 1
    assert count_root_ranks(steps[:1]) == {"trees": 0, "accepted": []}


def test_a_draft_is_fitted_to_the_targets_texts() -> None:
    """Compare with each token's distribution, computed by itself. Texts that a model samples at a
    temperature fit its own logits at this temperature."""
    model, tokens = tiny_model(2, 30).float(), [3, 14, 15]
    fits = []
    for seed in range(4):
        steps = generate(
            model, None, tokens, METHODS["ar"](), 200, sampling=Sampling(0.5, seed=seed)
        )
        ids = token_ids(steps)
        fits.append(fit_draft(model, tokens, ids))
        logits = [run(model, tokens + ids[:i])[-1] for i in range(len(ids))]
        assert fits[-1]["n_best"] == sum(
            int(x.argmax()) == i for x, i in zip(logits, ids, strict=True)
        )
        for t, confidence, logprob in zip(
            TEMPERATURES, fits[-1]["confidence"], fits[-1]["logprob"], strict=True
        ):
            probs = [(x / t).softmax(dim=-1) for x in logits]
            assert confidence == pytest.approx(sum(float(p.max()) for p in probs), rel=1e-4)
            own = sum(float(p[i].log()) for p, i in zip(probs, ids, strict=True))
            assert logprob == pytest.approx(own, rel=1e-4)
    assert describe_fit(fits, 0.5).endswith("    --draft-temperature 0.5")
    assert "from 800 tokens" in describe_fit(fits, 0.5)


SPEEDS = {"ar": 100.0, "fixed": 50.0, DRAFTED: 90.0, RETRIEVED: 80.0}
SPEEDS |= {"lookup n=2 strict": 150.0, "linear": 150.0, "auto": 120.0, "auto N=9": 130.0}
SPEEDS |= {"hf-ar": 300.0}
COUNTS = {DRAFTED: [(50, [20, 0, 5]), (50, [25, 3])], RETRIEVED: [(10, [1, 0, 4]), (0, [])]}


def tuned(speeds: dict[str, float], options: Line | None = None, **changes: object) -> Results:
    """Return a sorted table of two prompts with these speeds in it, and COUNTS."""
    cases = [replace(AR, row=row, **changes) for row in speeds]
    lines = [make_text(case, prompt, speeds[case.row]) for case in cases for prompt in (0, 1)]
    for line in lines:
        if line["row"] in COUNTS:
            trees, accepted = COUNTS[line["row"]][line["prompt"]]
            line["root_ranks"] = {"trees": trees, "accepted": accepted}
    head = make_head(cases, 2, is_sorted=True, options=options or {})
    return make_results(lines, head)


def test_rows_are_sorted_and_settings_can_be_copied() -> None:
    """Check that ties stay in order, that p has zeros for sequoia only, and that it falls for
    recycle. transformers is no method."""
    found = tuned(SPEEDS, {"target": "my models/a", "draft": "b", "threads": 2})
    rows = dict(rows_of(found, "speedup")[1:])
    order = ["hf-ar", "lookup n=2 strict", "linear", "auto N=9", "auto", "ar", DRAFTED, RETRIEVED]
    assert list(rows) == [*order, "fixed"] and rows["ar"] == "1.00x"
    models = "--target 'my models/a' --draft b --threads 2"
    expected = {
        "Options for the fastest row but auto": f"--method lookup --set n=2 --set strict {models}",
        "Options for auto": f"--method auto --set N=9 {models}",
        "p of sequoia at temperature 0.0": "--set p=0.45:0.03:0.05",
        "p of recycle and graft at temperature 0.0": "--set p=0.4:0.1",
    }
    assert settings_of(text_report(found, ["speedup"], 80)) == expected
    assert settings_of(markdown_report(found, ["speedup"])) == expected
    *_, of_draft, of_table = expected.values()
    for method, word in (("sequoia", of_draft), ("recycle", of_table), ("graft", of_table)):
        choose_config(build_parser().parse_args(["--prompt=a", "--method", method, *word.split()]))


def test_rows_are_sorted_within_their_temperature() -> None:
    """Check two temperatures with different winners."""
    speeds = {0.0: {"ar": 50.0, "linear": 150.0}, 0.8: {"ar": 50.0, "linear": 25.0, "auto": 100.0}}
    cases = [replace(AR, row=row, temperature=t) for t, rows in speeds.items() for row in rows]
    lines = [make_text(case, 0, speeds[case.temperature][case.row]) for case in cases]
    found = make_results(lines, make_head(cases, 1, is_sorted=True))
    order = ["linear t=0.0", "ar t=0.0", "auto t=0.8", "ar t=0.8", "linear t=0.8"]
    assert list(dict(rows_of(found, "speedup")[1:])) == order


def test_only_what_was_measured_is_said() -> None:
    """Check rows without auto and counts, texts without ar's, and a table that is not sorted. The
    draft of a row with the word head is the head."""
    report = text_report(tuned({"linear": 9.0, "ar": 9.0}), ["speedup"], 80)
    assert settings_of(report) == {"Options for the fastest row but auto": "--method linear"}
    assert not settings_of(text_report(tuned({"linear": 9.0, "auto": 9.0}), ["speedup"], 80))
    found = tuned({"linear head": 9.0, "ar": 8.0}, {"draft": "b"})
    found.head["machine"] = found.head["machine"] | {"head": "h"}
    assert "--method linear --draft h" in settings_of(text_report(found, [], 80)).values()
    found = tuned(SPEEDS)
    found.is_sorted = False
    assert not settings_of(text_report(found, ["speedup"], 80))
    assert list(dict(rows_of(found, "speedup")[1:])) == list(SPEEDS)


def test_a_tuned_pair(tmp_path: Path) -> None:
    """Run two rounds at two temperatures. Greedy texts are counted in one of them."""
    assert {DRAFTED, RETRIEVED} <= set(TABLES["tune"].parts[0].rows)
    rows = ",".join([DRAFTED, RETRIEVED, "auto costs=0.3:0.04:0.2:0.4"])
    options = ["--methods", rows, "--temperature", "0,0.8", "--top-p", "0.9", "--repeats", "2"]
    results, printed = run_bench(tmp_path / "r.jsonl", ["--table", "tune", *QUICK], *options)
    counted = [key for key, text in results.texts.items() if "root_ranks" in text]
    assert len(counted) == 2 * (2 + 4)  # rows x (greedy + sampled texts)
    commands = [part.strip() for part in printed.split("\n\n") if part.startswith("    --method")]
    assert len(commands) == 4
    for command, temperature in zip(commands, (0.0, 0.0, 0.8, 0.8), strict=True):
        args = build_parser().parse_args(["--prompt", "a", *shlex.split(command)])
        sampling = choose_config(args).sampling
        assert (sampling.temperature, args.draft, args.target) == (temperature, DRAFT, DRAFT)
        assert sampling.top_p == (0.9 if temperature else 1.0)


def test_searched_settings_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the passes of rows over ar's recorded texts are those of measured rows."""
    measured, _ = run_bench(tmp_path / "m.jsonl", BRIEF, "--methods", "linear,dynatree tau=0.3")
    (part,) = TABLES["tune"].parts
    few = replace(part, rows=["ar", "lookup"], searched=["linear", "dynatree tau=0.3", "lookup"])
    monkeypatch.setitem(TABLES, "tune", replace(TABLES["tune"], parts=[few]))
    words = ["--table", "tune", *QUICK, "--repeats", "2"]
    results, printed = run_bench(tmp_path / "r.jsonl", words, "--device", "cpu")
    n_rounds = Counter(text["row"] for text in results.texts.values())
    assert n_rounds == {"ar": 4, "lookup": 4, "linear": 2, "dynatree tau=0.3": 2}
    for key, text in measured.texts.items():
        found = results.texts[key]
        assert ("throughput" in found) == (text["row"] == "ar") and "incomplete" not in text
        names = ("target_rows", "draft_rows", "iterations", "tokens_per_iter")
        assert [found[name] for name in names] == [text[name] for name in names]
    assert "Replayed texts have the trees and rows of real runs" in printed

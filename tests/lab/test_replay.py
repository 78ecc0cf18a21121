"""Tests of replay: over recorded texts and candidates, a rule does what it does over the models.

A replay's trees, paths, draft rows and cache lengths are compared with those of a real run.
Recorded log-probabilities are equal up to rounding, so candidates that are nearly equally likely
could change places. The pairs and seeds here have none.
"""

import functools
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, takewhile
from pathlib import Path
from typing import NamedTuple

import numpy
import pytest
import torch
from fast import make_head
from growing import random_options, random_settings
from pairs import VOCAB, build_model, make_draft, target_weights
from small import run

import dynatree
from draft_tree import DynaTree
from dynatree import ModelDrafter
from dynatree_lab.engine.model import FastGPTNeoX
from dynatree_lab.generation.config import GenerationConfig
from dynatree_lab.generation.generate import generate
from dynatree_lab.generation.step import Step
from dynatree_lab.methods import METHODS
from dynatree_lab.methods.method import Method
from dynatree_lab.methods.sampler import Sampling
from dynatree_lab.metrics import token_ids
from dynatree_lab.pair import Pair
from dynatree_lab.replay import candidates
from dynatree_lab.replay.candidates import (
    DEFAULT_WIDTH,
    DTYPES,
    TEMPERATURES,
    CandidateTree,
    Width,
    load_candidates,
    make_candidates,
    record_candidates,
)
from dynatree_lab.replay.draft import RecordedDraft
from dynatree_lab.replay.models import RecordedTarget
from dynatree_lab.replay.texts import RecordedText, ReplayError
from dynatree_lab.request import Request
from gpt_neox import Model
from sampling import Sampler
from verify import Acceptance, accept_greedy

N_NEW = 12  # tokens of a text
DRAFTS = {3: "noise0.2", 5: "vocab48"}  # by the number of their target
REFUSED = [name for name, kind in METHODS.items() if Method(kind()).facts.target_top_k]
REPLAYED = [name for name in METHODS if name not in REFUSED]
SETTINGS = {  # of a method's first case. Only beam's trees are not inside the recorded ones
    "linear": "K=16",
    "confident": "p_min=0.01",
    "fixed": "D=8 B=4 tau=0.005 N_max=256",
    "dynatree": "B_max=4 tau=0.005 rho_stop=0.005 D0=8 N_max=256",
    "dyspec": "N=16",
    "beam": "k=8",
}
MADE = {"model": "m", "weights": "w", "dtype": "float32", "tokenizer": "t"}  # of every text


class Recorded(NamedTuple):
    """A random pair, two of the target's texts, and their draft with recorded candidates."""

    target: FastGPTNeoX
    draft: FastGPTNeoX
    texts: list[RecordedText]
    recorded: RecordedDraft


def make_text(prompt: list[int], ids: list[int], **others: object) -> RecordedText:
    given = {"vocab_size": VOCAB, "eos_ids": []} | MADE | others
    return RecordedText(prompt=prompt, ids=ids, **given)


@functools.cache
def recorded_pair(number: int) -> Recorded:
    rng = random.Random(number)
    tensors, changes = target_weights(number)
    target = build_model(tensors, FastGPTNeoX, **changes)
    draft = make_draft(DRAFTS[number], tensors, changes, number, FastGPTNeoX)
    texts = []
    for n_tokens in (4, 9):
        prompt = [rng.randrange(VOCAB) for _ in range(n_tokens)]
        steps = generate(target, None, prompt, GenerationConfig.parse("ar"), N_NEW)
        texts.append(make_text(prompt, token_ids(steps)))
    recorded = RecordedDraft(make_candidates(draft, texts), texts, draft.config)
    return Recorded(target, draft, texts, recorded)


def steps_of(
    target: Model, draft: Model | None, text: RecordedText, config: GenerationConfig
) -> list[Step]:
    return list(generate(target, draft, text.prompt, config, len(text.ids)))


def are_equal(
    real: Sequence[dynatree.Step], found: Sequence[dynatree.Step], tolerance: float = 1e-4
) -> bool:
    """Whether two texts have equal steps, up to this difference of log-probabilities."""

    def parts(step: dynatree.Step) -> list[object]:
        own = [step.draft_rows, step.cache_lengths] if isinstance(step, Step) else []
        tree = step.tree
        return [step.tokens, step.path, tree.tokens, tree.parents, tree.draft_slots, *own]

    def are_near(one: dynatree.Step, other: dynatree.Step) -> bool:
        logprobs = one.tree.path_logprobs, other.tree.path_logprobs
        return numpy.allclose(*logprobs, rtol=tolerance / 10, atol=tolerance)

    if len(real) != len(found):
        return False
    pairs = zip(real, found, strict=True)
    return all(parts(one) == parts(other) and are_near(one, other) for one, other in pairs)


def complete_steps(steps: Sequence[Step], learns: bool) -> dict[int, dynatree.Step]:
    """Return the steps whose trees are said to be complete, by the number of tokens before. A rule
    that learns has learned otherwise after the first other tree."""
    ends = accumulate(len(step.tokens) for step in steps)
    found = list(zip(ends, steps, strict=True))
    if learns:
        found = list(takewhile(lambda each: each[1].is_complete, found))
    return {end - len(step.tokens): core_step(step) for end, step in found if step.is_complete}


def core_step(step: Step) -> dynatree.Step:
    """Return what the core has of a step. The rest depends on earlier trees."""
    return dynatree.Step(step.tokens, step.tree, step.path)


def random_config(method: str, number: int) -> GenerationConfig:
    """Return random settings of a method, for 0 those of SETTINGS, at a recorded temperature."""
    rng = random.Random(f"{method} {number}")
    sampling = Sampling(draft_temperature=rng.choice(TEMPERATURES))
    if method in SETTINGS and number == 0:
        return replace(GenerationConfig.parse(method, *SETTINGS[method].split()), sampling=sampling)
    settings = random_settings(method, rng)
    return GenerationConfig(settings, sampling=sampling, **random_options(settings, rng))


@functools.cache
def compare_replays(method: str) -> Counter:
    """Compare the replays of a method with its real runs, and count events. Trees are compared
    where both texts have one after as many tokens."""
    seen: Counter = Counter()
    for i, number in enumerate(2 * list(DRAFTS)):
        target, draft, texts, recorded = recorded_pair(number)
        config, text = random_config(method, i), texts[i // 2]
        real = steps_of(target, draft, text, config)
        replayed = RecordedTarget(texts, draft.config)
        assert are_equal(real, steps_of(replayed, draft, text, config), tolerance=0.0), config
        # Calibration takes the log-odds of probabilities, which have an error of 2 % near 1
        tolerance = 1e-3 if config.calibrate else 1e-4
        has_history = getattr(config.settings, "history", False)
        learns = config.calibrate or config.costs != "off" or has_history
        theirs = complete_steps(real, learns)
        for model in (None, draft):
            own_draft = RecordedDraft(recorded.tree, texts, draft.config, model)
            found = steps_of(replayed, own_draft, text, config)
            are_complete = [step.is_complete for step in found]
            n_incomplete = are_complete.count(False)
            assert n_incomplete or are_equal(real, found, tolerance), config
            own = complete_steps(found, learns)
            shared = sorted(own.keys() & theirs.keys())
            steps = ([each[at] for at in shared] for each in (theirs, own))
            assert are_equal(*steps, tolerance), config
            # The draft runs missing nodes. It does not run those with too few candidates
            is_narrow = config.method.max_branches <= DEFAULT_WIDTH.min_candidates
            assert not (n_incomplete and model and is_narrow), config
            assert i or method not in SETTINGS or (n_incomplete > 0) == (method == "beam"), config
            seen["complete"] += len(shared)
            seen["incomplete"] += n_incomplete
            seen["complete again"] += (False, True) in pairwise(are_complete)
        seen["accepted"] += sum(len(step.path) > 1 for step in real)
        seen["history"] += has_history
        seen["calibrate"] += config.calibrate
        seen["costs"] += config.costs != "off"
    return seen


@pytest.mark.parametrize("method", REPLAYED)
def test_a_replay_equals_a_real_run(method: str) -> None:
    """Compare a recorded text over the draft, and over recorded candidates without and with the
    draft. What the steps call complete are the trees of the real run."""
    compare_replays(method)


def test_the_replays_cover_what_they_should() -> None:
    seen: Counter = Counter()
    for method in REPLAYED:
        seen.update(compare_replays(method))
    assert min(seen.values()) > 2 and seen["complete"] > 10 * seen["incomplete"], seen


@pytest.mark.parametrize("planted", ["text", "position", "temperature", None])
def test_the_comparison_finds_a_planted_error(
    planted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shift the text by a token or the candidates by a position, or apply a temperature twice."""
    target, draft, texts, recorded = recorded_pair(3)
    text, config = texts[0], GenerationConfig(DynaTree())  # at temperature 0.5
    real = steps_of(target, draft, text, config)
    shifted = replace(text, ids=[*text.ids[1:], text.ids[-1]]) if planted == "text" else text
    if planted == "temperature":
        log_probabilities = candidates.log_probabilities
        changed = lambda logits, _: log_probabilities(logits, 0.5)  # noqa: E731
        monkeypatch.setattr(candidates, "log_probabilities", changed)
        recorded = RecordedDraft(make_candidates(draft, texts), texts, draft.config)
    if planted == "position":
        recorded = RecordedDraft(recorded.tree, texts, draft.config)
        recorded.roots = {prompt: roots[1:] + roots[:1] for prompt, roots in recorded.roots.items()}
    replayed = RecordedTarget([shifted], draft.config)
    assert are_equal(real, steps_of(replayed, recorded, text, config)) == (planted is None)


def test_recorded_candidates_are_those_of_the_draft(tmp_path: Path) -> None:
    """Compare nodes of two texts in one file with a pass over their paths. A draft runs token 0 in
    place of a token that its vocabulary lacks."""
    _, draft, texts, recorded = recorded_pair(5)
    n_ids = draft.config.vocab_size
    record_candidates(draft, texts, tmp_path / "c.npz")
    tree = load_candidates(tmp_path / "c.npz", texts)
    for name in ("temperatures", *DTYPES):
        assert numpy.array_equal(getattr(tree, name), getattr(recorded.tree, name)), name
    n_compared = 0
    for path, node in recorded_paths(tree, texts):
        n, first = tree.n_candidates[node], tree.first_candidate[node]
        if n and node % 31 == 0:
            logits = run(draft, [token if token < n_ids else 0 for token in path])[-1]
            logprobs = torch.log_softmax(logits[:VOCAB], dim=-1)
            best = logprobs.topk(int(n))
            assert tree.tokens[first : first + n].tolist() == best.indices.tolist()
            assert tree.logprobs[first : first + n] == pytest.approx(best.values.numpy(), abs=3e-5)
            sums = [float(torch.logsumexp(logprobs / t, dim=-1)) for t in tree.temperatures]
            assert tree.log_sums[tree.run_index[node]] == pytest.approx(sums, abs=3e-5)
            n_compared += 1
    assert n_compared > 50


def test_the_chain_of_best_candidates_is_recorded() -> None:
    """Check it where no other node is."""
    target, draft, texts, _ = recorded_pair(5)
    narrow = Width(min_probability=1.0, n_best=1, min_candidates=1)
    recorded = RecordedDraft(make_candidates(draft, texts, narrow), texts, draft.config)
    replayed, config = RecordedTarget(texts, draft.config), GenerationConfig.parse("linear K=16")
    for text in texts:
        found = steps_of(replayed, recorded, text, config)
        assert are_equal(steps_of(target, draft, text, config), found)
        assert all(step.is_complete for step in found)


def recorded_paths(tree: CandidateTree, texts: list[RecordedText]) -> Iterator[tuple[list, int]]:
    """Yield each recorded node after the ids before it, its own included."""
    places = [(text, i) for text in texts for i in range(1, len(text.ids))]
    for (text, i), root, size in zip(places, tree.roots, tree.tree_sizes, strict=True):
        paths = {root: text.prompt + text.ids[:i]}
        for node in range(root, root + size):
            yield paths[node], node
            for j in range(tree.n_children[node]):
                token = int(tree.tokens[tree.first_candidate[node] + j])
                paths[tree.first_child[node] + j] = [*paths[node], token]


def test_a_sampled_text() -> None:
    """Compare with a real run of the core, whose candidates are the top k. A replay's own draft
    temperature is that of the recorded text."""
    target, draft, (text, _), _ = recorded_pair(3)

    def core_steps(model: Model, accept: Acceptance) -> list[dynatree.Step]:
        drafter, rule = ModelDrafter(draft, 0.9), DynaTree().make_rule()
        return list(dynatree.generate(model, drafter, text.prompt, rule, N_NEW, accept=accept))

    real = core_steps(target, Sampler(0.8, seed=5))
    sampled = make_text(text.prompt, token_ids(real), temperature=0.8, seed=5)
    replayed, config = RecordedTarget([sampled], draft.config), GenerationConfig(DynaTree())
    assert core_steps(replayed, accept_greedy) == real
    recorded = RecordedDraft(make_candidates(draft, [sampled]), [sampled], draft.config)
    for model in (draft, recorded):
        request = Request(Pair(replayed, model, None, Path(), None, {}), text.prompt, config, N_NEW)
        assert are_equal(real, list(map(core_step, request.decode())))
        assert request.draft_temperature == 0.9
    given = replace(config, sampling=Sampling(draft_temperature=0.5))
    assert replace(request, config=given).draft_temperature == 0.5
    assert not are_equal(real, list(map(core_step, steps_of(replayed, draft, sampled, given))))


REFUSALS = [  # words of a config, changed arguments, words of the message
    ("dynatree temperature=0.7", {}, "temperature 0.7 with drawn candidates, because a recorded"),
    ("dynatree strict", {}, "a replay cannot have strict, because"),
    ("dynatree window=64", {}, "a replay cannot have window, because"),
    ("dynatree rebuild", {}, "a replay cannot have rebuild, because"),
    (
        "dynatree costs=learned",
        {},
        "a replay cannot have costs=learned, which reads",
    ),
    ("dynatree", {"logprobs": 2}, "a replay cannot have logprobs, because"),
    ("dynatree", {"process": lambda text, logits: logits}, "a replay cannot have process, because"),
    ("dynatree", {"prompt": [3]}, "no text is recorded after this prompt, only after 2 others"),
    (
        "ar",
        {"max_new_tokens": N_NEW + 1},
        "max_new_tokens is 13, but the recorded text has 12 to",
    ),
    ("dynatree draft_temperature=0.45", {}, "draft_temperature is 0.45, recorded are 0.4, 0.5, 0."),
]
REFUSALS += [(name, {}, "with the target's best tokens off the path, because") for name in REFUSED]


@pytest.mark.parametrize(("words", "changes", "message"), REFUSALS)
def test_what_a_replay_cannot_have(words: str, changes: dict[str, object], message: str) -> None:
    _, draft, texts, recorded = recorded_pair(3)
    given = {"prompt": texts[0].prompt, "max_new_tokens": N_NEW, **changes}
    config, target = GenerationConfig.parse(words), RecordedTarget(texts, draft.config)
    with pytest.raises(ReplayError, match=re.escape(message)) as raised:
        list(generate(target, recorded, config=config, **given))
    assert "\n" not in str(raised.value)


def test_a_rule_that_reads_entropy_needs_the_draft() -> None:
    target, draft, texts, recorded = recorded_pair(3)

    def steps(model: Model, own_draft: Model) -> list[Step]:
        rule = DynaTree().make_rule()
        rule.reads_entropy = True
        given = texts[0].prompt, GenerationConfig(DynaTree()), N_NEW
        return list(generate(model, own_draft, *given, rule=rule))

    replayed = RecordedTarget(texts, draft.config)
    with pytest.raises(ReplayError, match="reads more of a draft than its candidates; add the"):
        steps(replayed, recorded)
    with_draft = RecordedDraft(recorded.tree, texts, draft.config, draft)
    assert are_equal(steps(target, draft), steps(replayed, with_draft), tolerance=0.0)


def test_an_eagle_head_has_no_replay() -> None:
    assert REFUSED == ["recycle", "graft", "auto"]
    texts, (tensors, changes) = recorded_pair(3).texts, target_weights(3)
    head = make_head(tensors, 1, **changes)
    with pytest.raises(ReplayError, match="an EAGLE head, which reads hidden states, because"):
        steps_of(RecordedTarget(texts, head.config), head, texts[0], GenerationConfig(DynaTree()))


def test_a_recorded_text_that_ends_in_eos() -> None:
    """Ask for more tokens. The last trees may then be deeper than the recorded ones, and the last
    path may go on after EOS, where the text is not known."""
    target, draft, (text, _), _ = recorded_pair(3)
    at = next(i for i, token in enumerate(text.ids) if i > 6 and token not in text.ids[:i])
    ended = replace(text, ids=text.ids[: at + 1], eos_ids=[text.ids[at]])
    replayed, tree = RecordedTarget([ended], draft.config), make_candidates(draft, [ended])
    models = [draft, *(RecordedDraft(tree, [ended], draft.config, own) for own in (draft, None))]
    given = text.prompt, GenerationConfig(DynaTree()), 99
    *real, last = generate(target, draft, *given, eos_ids=ended.eos_ids)
    for model in models:
        *found, end = generate(replayed, model, *given, eos_ids=ended.eos_ids)
        n = next((i for i, step in enumerate(found) if not step.is_complete), len(real))
        assert are_equal(real[:n], found[:n]) and end.tokens == last.tokens
        assert end.is_complete == (model is not models[-1])
        assert end.tree.tokens == last.tree.tokens or not end.is_complete

"""The claim of the project: every method writes exactly the target's own greedy text.

Hundreds of seeded random cases: pairs (draft equal, noisy, adversarial, smaller, of another
vocabulary), tree shapes and settings, prompt lengths, limits, EOS, both commits, in each of the
ways a text may be decoded. The suite counts what it saw and fails if a case it is meant to cover
never came up.
"""

import functools
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from conftest import (
    append,
    generate,
    pretend_capture,
    random_config,
    random_settings,
    random_tensors,
)
from test_tensor_parallel import small, with_ranks, write
from torch import Tensor

from cli.metrics import token_ids
from draft_tree import Settings
from engine.cache import invariant_rows
from engine.generate import Step
from engine.model import FastGPTNeoX
from engine.passes import Window, row_count
from gpt_neox import GPTNeoX
from methods import METHODS
from methods.rules import are_retrieved, make_rule
from methods.sampler import Sampling
from methods.static import Alone, Chain, Fixed
from verify import cut

# How many cases a method has in each way: gpt_neox.py's own model; passes of exactly the rows and
# slots they need, or of the fixed shapes that graphs replay; over a window; candidates at a
# temperature, the top k or drawn
WAYS = {"plain": 8, "tight": 16, "fixed": 16, "window": 8, "top-k": 8, "drawn": 8}
N_STRICT = 6
# Of texts on two ranks, in turn
ON_RANKS = [{}, {"commit": "rebuild"}, {"window": Window(16, 2)}, {"strict": True}]
LONGEST = 32  # tokens of their texts
VOCAB = 96
DRAFTS = ("equal", "noise0.02", "half0.1", "noise0.3", "adversary", "small", "vocab48", "vocab112")
N_TARGETS = 7
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Tensors = dict[str, Tensor]  # a model's weights
Changes = dict[str, object]  # fields of Config that differ from conftest's


# The pairs: random targets whose text is worth comparing, and a draft of each kind.


def build(tensors: Tensors, kind: type[GPTNeoX] = FastGPTNeoX, **changes: object) -> GPTNeoX:
    """A model of its own copy of the weights, as a model consumes what it is given."""
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    return kind.from_tensors(random_config(**changes), copies)


def best(logits: Tensor) -> int:
    """The likeliest id, by more than rounding moves one of these logits [V]."""
    first, second = logits.topk(2).values.tolist()
    assert first - second > 3e-5, "a tie, which may be decided otherwise in a tree"
    return int(logits.argmax())


def greedy(target: FastGPTNeoX, prompt: list[int], n: int) -> list[int]:
    """The oracle: the whole text again for every token, no cache reused, no tree."""
    ids = list(prompt)
    for _ in range(n):
        logits = target.prefill(ids, target.new_cache(len(ids)))[0]  # [V]
        ids.append(best(logits))
    return ids[len(prompt) :]


@torch.inference_mode()
def stream(
    target: FastGPTNeoX, prompt: list[int], window: Window, n: int
) -> tuple[list[int], Tensor]:
    """The oracle over a window: one token at a time, a drop whenever the cache is full. The text,
    and the logits [V] after it."""
    slack = max(window.size // 4, 1)
    full = window.sinks + window.size + slack
    n_tokens = len(prompt) + n
    cache = target.new_cache(min(full, n_tokens))
    text = list(prompt)
    for n_read, token in enumerate(text, 1):  # which grows meanwhile
        logits = append(target, [token], cache)[0].clone()
        if cache.length == full:
            cache.forget(window.sinks, slack)
        if n_read == len(text) < n_tokens:
            text.append(best(logits))
    return text[len(prompt) :], logits


@functools.cache
def varied_targets() -> list[tuple[Tensors, Changes]]:
    """Random targets whose greedy text has at least 10 distinct ids in 48."""
    found = []
    for seed in range(100):
        changes: Changes = {"use_parallel_residual": seed % 3 > 0, "max_position_embeddings": 128}
        if seed % 2:
            changes["max_position_embeddings"] = 24  # most texts run past the trained range
        tensors = random_tensors(random_config(**changes), seed)
        text = greedy(build(tensors, **changes), [seed % VOCAB], 48)
        if len(set(text)) >= 10:
            found.append((tensors, changes))
        if len(found) == N_TARGETS:
            return found
    raise AssertionError("too few random targets write varied text")


def make_draft(
    kind: str,
    tensors: Tensors,
    changes: Changes,
    seed: int,
    model: type[GPTNeoX] = FastGPTNeoX,
) -> GPTNeoX:
    """A draft for this target: equal, noisy, in half precision too, adversarial, with another
    padded vocabulary, or another model of another size."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "small":
        changes = changes | {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
        tensors = random_tensors(random_config(**changes), seed)
    elif kind == "adversary":  # its best candidates are the target's worst
        tensors = tensors | {"embed_out.weight": -tensors["embed_out.weight"]}
    elif kind.startswith("vocab"):  # cut to so many ids, or filled up with loud random ones
        size = int(kind.removeprefix("vocab"))
        changes = changes | {"vocab_size": size}
        extra = 3 * torch.randn(max(size - VOCAB, 0), 32, generator=generator)
        longer = {n: torch.cat([t, extra])[:size] for n, t in tensors.items() if "embed" in n}
        tensors = tensors | longer
    elif kind != "equal":  # noise as a share of each tensor's own spread
        scale = float(kind.removeprefix("half").removeprefix("noise"))
        noise = {n: torch.randn(t.shape, generator=generator) for n, t in tensors.items()}
        tensors = {n: t + scale * t.std() * noise[n] for n, t in tensors.items()}
    if kind.startswith("half"):
        dtype = (torch.float16, torch.bfloat16)[seed % 2]
        tensors = {n: t.to(dtype) for n, t in tensors.items()}
    return build(tensors, model, **changes)


# The random cases.


@dataclass(frozen=True)
class Case:
    """One random pair with everything that generate is asked for."""

    target: GPTNeoX
    draft: GPTNeoX
    prompt: list[int]
    settings: Settings
    limit: int
    eos_ids: list[int]  # none, or one of the ids that the target writes
    commit: str
    greedy: list[int]  # the target's own text, as long as the limit
    more: dict[str, object] = field(default_factory=dict)  # options of generate

    def write(self) -> list[Step]:
        """The steps of its text."""
        options = {"eos_ids": self.eos_ids, "commit": self.commit, **self.more}
        pair = self.target, self.draft
        return list(generate(*pair, self.prompt, self.settings, self.limit, **options))


@functools.cache
def greedy_text(number: int) -> tuple[list[int], list[int]]:
    """A random prompt and what its target writes after it; every method is to write the same."""
    rng = random.Random(number)
    tensors, changes = varied_targets()[number % N_TARGETS]
    prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 1, 4, 19]))]
    return prompt, greedy(build(tensors, **changes), prompt, LONGEST)


def random_case(method: str, way: str, number: int) -> Case:
    """Seeded by all three; the kinds of target and draft go round with the number."""
    rng = random.Random(f"{method} {way} {number}")
    tensors, changes = varied_targets()[number % N_TARGETS]
    kind = GPTNeoX if way == "plain" else FastGPTNeoX
    target = build(tensors, kind, **changes)
    draft = make_draft(DRAFTS[number % len(DRAFTS)], tensors, changes, number, kind)
    settings = random_settings(method, rng)
    prompt, text = greedy_text(number)
    more: dict[str, object] = {} if way == "plain" else {"graphs": number % 2 == 1}
    if way == "window":
        size = max(make_rule(settings).max_verified, rng.choice([1, 5, 16, 24]))
        more["window"] = Window(size, rng.choice([0, 1, 4]))
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 7, 40, 90]))]
        text, _ = stream(target, prompt, more["window"], LONGEST)
    elif way in ("top-k", "drawn"):
        heat = (0.3, 0.6, 2.5)[number % 3]
        more["sampling"] = Sampling(0.0, 1.0, number, heat, draws_greedy=way == "drawn")
    limit = rng.choice([LONGEST, LONGEST] + list(range(1, 21)))
    text = text[:limit]
    eos_ids = [] if number % 3 else rng.sample(text, 1)
    commit = rng.choice(["keep", "keep", "rebuild"]) if way != "plain" else "keep"
    for model in (target, draft) if kind is FastGPTNeoX else ():
        model.has_fixed_shapes = way == "fixed"
        model.min_rows = 1 + number % 2  # one row may be padded to two
    return Case(target, draft, prompt, settings, limit, eos_ids, commit, text, more)


def note(seen: Counter, step: Step, case: Case) -> None:
    """Count what one iteration shows; its path spells what it committed."""
    tree, path = step.tree, step.path
    accepted = [tree.tokens[row] for row in path[1:]]
    assert path[0] == 0 and step.tokens == (accepted + [step.bonus])[: len(step.tokens)]
    is_eos = step.tokens[-1] in case.eos_ids
    seen[f"accepted {min(len(accepted), 3)}"] += 1
    seen["tree of depth 1"] += max(tree.depths) == 1
    seen["second sibling"] += any(tree.parents[row] in tree.parents[1:row] for row in path[1:])
    seen["accepted grafted"] += any(are_retrieved(tree)[row] for row in path)
    seen["moved row"] += path != list(range(len(path)))
    seen["eos in path"] += is_eos and len(step.tokens) < len(path)
    seen["eos as bonus"] += is_eos and len(step.tokens) == len(path)
    settings = case.settings
    if (
        isinstance(settings, Fixed) and max(tree.depths) and settings.tau == 0
    ):  # between two children
        is_full = len(tree) == settings.N_max
        seen["N_max cut"] += is_full and tree.depths.count(max(tree.depths)) % settings.B > 0


@functools.cache
def run_cases(method: str, way: str) -> Counter:
    """All random cases of one method; raises where the text differs. Returns what was seen."""
    seen: Counter = Counter()
    for number in range(WAYS[way]):
        case = random_case(method, way, number)
        steps = case.write()
        assert token_ids(steps) == cut(case.greedy, case.eos_ids, case.limit), number
        n_tokens = len(case.prompt) + case.limit
        seen["past positions"] += n_tokens > case.target.config.max_position_embeddings
        seen["other vocabulary"] += case.draft.config.vocab_size != VOCAB
        seen["prompt of one"] += len(case.prompt) == 1
        seen["budget of one row"] += make_rule(case.settings).max_verified == 1 and method != "ar"
        rule = make_rule(case.settings)
        if way == "drawn" and rule.draws_candidates:
            seen["drawn trees"] += sum(len(step.tree) > 1 for step in steps[1:])
        if window := case.more.get("window"):
            assert max(max(step.cached) for step in steps) <= window.full
            seen["dropped"] += n_tokens > 2 * window.full
        left = case.limit - 1
        for step in steps[1:]:
            assert max(step.tree.depths) < left or left == 1 and not max(step.tree.depths)
            left -= len(step.tokens)
            note(seen, step, case)
    return seen


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_writes_ars_text(
    method: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token for token, whatever the draft and the tree's shape."""
    pretend_capture(monkeypatch)
    run_cases(method, way)


def test_the_cases_cover_what_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_capture(monkeypatch)
    seen: Counter = Counter()
    for method, way in itertools.product(METHODS, WAYS):
        seen.update(run_cases(method, way))
    assert len(seen) == 17 and min(seen.values()) > 0, seen


@functools.cache
def strict_pair(number: int) -> tuple[FastGPTNeoX, FastGPTNeoX]:
    """Whose trials of how many rows are steady are made once."""
    tensors, changes = varied_targets()[number % N_TARGETS]
    halved = {name: tensor.to(DTYPES[number % 3]) for name, tensor in tensors.items()}
    return build(halved, **changes), make_draft("noise0.02", tensors, changes, number)


def rows_of(settings: Settings) -> int:
    """Of a pass of a run with these settings, where all have as many."""
    rule = make_rule(settings)
    return row_count(max(rule.max_verified, rule.min_rows))


@pytest.mark.parametrize("method", METHODS)
def test_every_strict_method_writes_ars_bits(method: str) -> None:
    """All of the logits that the text was chosen from, in half precision too; around the end of a
    block of attention, and far before it."""
    for number in range(N_STRICT):
        rng = random.Random(f"{method} {number}")
        target, draft = strict_pair(number)
        prompt = [rng.randrange(VOCAB) for _ in range((3, 250)[number % 2])]
        own = random_settings(method, rng)
        how: dict[str, object] = {"strict": True, "commit": rng.choice(["keep", "rebuild"])}
        if number % 3 == 2:
            how["window"] = Window(max(rows_of(own), 40), 4)
        # ar's passes have one row, unless only as many rows as the run's have the same bits
        rows = 1 if invariant_rows(target) else rows_of(own)
        found = []
        for settings in (Alone(rows=rows), own):
            logits: list[Tensor] = []
            how["inspect"] = logits.append
            ids = token_ids(generate(target, draft, prompt, settings, LONGEST, **how))
            found.append((ids, torch.cat(logits)))
        (ar_ids, ar_logits), (ids, logits) = found
        assert ids == ar_ids and torch.equal(logits, ar_logits), number


def write_all(target: FastGPTNeoX, folder: Path) -> list[list[int]]:
    """Return a text of every method, and one that is sampled. Rank 0 alone has the draft, which is
    the same model: its logits are the target's but for rounding."""
    draft = FastGPTNeoX.from_pretrained(folder)
    rng = random.Random(0)
    found = []
    for i, method in enumerate(METHODS):
        settings = random_settings(method, rng)
        found.append(write(target, draft, settings, **ON_RANKS[i % len(ON_RANKS)]))
    found.append(write(target, draft, Chain(), sampling=Sampling(temperature=0.9, seed=3)))
    return found


def test_texts_on_two_ranks_are_those_of_one_process(tmp_path: Path) -> None:
    expected = write_all(FastGPTNeoX.from_pretrained(small(tmp_path)), tmp_path)
    assert with_ranks(2, tmp_path, write_all) == expected

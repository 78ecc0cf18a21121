"""Tests of the project's main claim: every method writes exactly the target's own greedy text.

There is one seeded random case for each method and mode of decoding. The cases vary the draft
(equal, noisy, adversarial, smaller, of another vocabulary, an EAGLE head), settings, prompt length,
limit, EOS and commit. The suite counts the events that it should cover, and fails if one never
occurs. Each mode also has a case whose trees have more than 128 rows.

A wrong tree still gives the right text. So these tests find errors of cache, positions, mask and
acceptance, and none of a rule.
"""

import functools
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pairs
import pytest
import torch
from fast import ReferenceHead, append, fix_shapes, generate, make_head, pretend_capture
from growing import LARGE_SETTINGS, random_options, random_settings
from pairs import (
    VOCAB,
    Changes,
    Tensors,
    argmax_no_tie,
    build_model,
    generate_greedy,
    target_weights,
)
from small import random_config, random_tensors
from torch import Tensor

from draft_tree import Settings
from dynatree_lab.engine.eagle_head import FastHead
from dynatree_lab.engine.invariance import invariant_rows
from dynatree_lab.engine.model import FastGPTNeoX
from dynatree_lab.engine.passes import SMALL_PASS, Window, round_up_rows
from dynatree_lab.generation.generate import Step
from dynatree_lab.methods import METHODS
from dynatree_lab.methods.dyspec import DySpec
from dynatree_lab.methods.eagle import EagleHead
from dynatree_lab.methods.method import Method
from dynatree_lab.methods.rules import are_retrieved
from dynatree_lab.methods.sampler import Sampling
from dynatree_lab.methods.static import PaddedAutoregressive
from dynatree_lab.metrics import token_ids
from gpt_neox import GPTNeoX
from verify import cut

# The reference model of gpt_neox.py; passes of exactly the rows and slots they need, or of the
# fixed shapes that graphs replay; accepted rows that are run again; a window; candidates at a
# temperature, top-k or drawn
MODES = ("plain", "tight", "fixed", "rebuild", "window", "top-k", "drawn")
N_NUMBERS = 18  # of prompts with their texts
STRICT_METHODS = ("dynatree", "graft", "dyspec", "fixed", "lookup", "sequoia")
MAX_TOKENS = 32  # tokens of a text
DRAFTS = (*pairs.DRAFTS, "head")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADS = {GPTNeoX: ReferenceHead, FastGPTNeoX: FastHead}  # by the kind of the target


@torch.inference_mode()
def generate_streaming(
    target: FastGPTNeoX, prompt: list[int], window: Window, n: int
) -> tuple[list[int], Tensor]:
    """Return n greedy tokens over a window, and the logits [V] after them.

    This oracle runs one token at a time, and drops slots whenever the cache is full.
    """
    slack = max(window.size // 4, 1)
    full = window.sinks + window.size + slack
    n_tokens = len(prompt) + n
    cache = target.new_cache(min(full, n_tokens))
    text = list(prompt)
    for n_read, token in enumerate(text, 1):  # the loop appends to it
        logits = append(target, [token], cache)[0].clone()
        if cache.length == full:
            cache.remove_slots(window.sinks, slack)
        if n_read == len(text) < n_tokens:
            text.append(argmax_no_tie(logits))
    return text[len(prompt) :], logits


def make_draft(
    kind: str, tensors: Tensors, changes: Changes, seed: int, model: type[GPTNeoX] = FastGPTNeoX
) -> GPTNeoX:
    """Return a draft for this target: an EAGLE head, or one of pairs.make_draft."""
    if kind == "head":
        return make_head(tensors, seed, HEADS[model], **changes)
    return pairs.make_draft(kind, tensors, changes, seed, model)


# The random cases.


@dataclass(frozen=True)
class Case:
    """A random pair, with the arguments and options of generate."""

    target: GPTNeoX
    draft: GPTNeoX
    prompt: list[int]
    settings: Settings
    limit: int
    eos_ids: list[int]  # empty, or one of the ids that the target writes
    greedy: list[int]  # the target's own text, of up to `limit` tokens
    options: dict[str, object] = field(default_factory=dict)  # of generate

    def write(self) -> Iterator[Step]:
        """Yield the steps of its text."""
        options = {"eos_ids": self.eos_ids, **self.options}
        pair = self.target, self.draft
        return generate(*pair, self.prompt, self.settings, self.limit, **options)


@functools.cache
def random_prompt_and_text(number: int) -> tuple[list[int], list[int]]:
    """Return a random prompt and its target's greedy text, which every method must write."""
    rng = random.Random(number)
    tensors, changes = target_weights(number)
    prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 1, 4, 19]))]
    return prompt, generate_greedy(build_model(tensors, FastGPTNeoX, **changes), prompt, MAX_TOKENS)


def random_case(method: str, mode: str, is_large: bool = False) -> Case:
    """Return the case of a method in a mode, with small trees of random settings or large trees."""
    # Methods meet different targets and drafts in a mode, and modes in a method
    number = (list(METHODS).index(method) + 2 * MODES.index(mode)) % N_NUMBERS
    rng = random.Random(f"{method} {mode} {number}")
    tensors, changes = target_weights(number)
    kind = GPTNeoX if mode == "plain" else FastGPTNeoX
    target = build_model(tensors, kind, **changes)
    # A draft that is often right accepts rows that are not the first ones, so rebuilt rows differ
    name = "noise0.02" if mode == "rebuild" else DRAFTS[number % len(DRAFTS)]
    draft = make_draft(name, tensors, changes, number, kind)
    settings = LARGE_SETTINGS[method] if is_large else random_settings(method, rng)
    prompt, text = random_prompt_and_text(number)
    options = {} if is_large else random_options(settings, rng)
    if mode == "fixed":
        options["graphs"] = number % 2 == 1
    if mode == "rebuild":
        options["commit"] = "rebuild"
    elif mode == "window":
        size = max(Method(settings).facts.max_verified, rng.choice([1, 5, 16, 24]))
        options["window"] = Window(size, rng.choice([0, 1, 4]))
        options["commit"] = rng.choice(["keep", "rebuild"])
        # The window of a large tree is nearly full
        n_prompt = options["window"].max_length - 5 if is_large else rng.choice([1, 7, 40, 90])
        prompt = [rng.randrange(VOCAB) for _ in range(n_prompt)]
        text, _ = generate_streaming(target, prompt, options["window"], MAX_TOKENS)
    elif mode in ("top-k", "drawn"):
        temperature = (0.3, 0.6, 2.5)[number % 3]
        options["sampling"] = Sampling(0.0, 1.0, number, temperature, draws_greedy=mode == "drawn")
    limit = 200 if is_large else rng.choice([MAX_TOKENS, MAX_TOKENS] + list(range(1, 21)))
    text = text[:limit]
    eos_ids = [] if number % 3 or is_large else rng.sample(text, 1)
    for model in (target, draft) if kind is FastGPTNeoX else ():
        model.has_fixed_shapes = mode == "fixed"
        model.min_rows = 1 + number % 2  # one row may be padded to two
    return Case(target, draft, prompt, settings, limit, eos_ids, text, options)


def count_events(seen: Counter, step: Step, case: Case) -> None:
    """Count the events of one iteration, and check that its path gives its tokens."""
    tree, path = step.tree, step.path
    accepted = [tree.tokens[row] for row in path[1:]]
    assert path[0] == 0 and step.tokens == (accepted + [step.bonus])[: len(step.tokens)]
    is_eos = step.tokens[-1] in case.eos_ids
    seen["accepted grafted"] += any(are_retrieved(tree)[row] for row in path)
    seen["accepted of a head"] += isinstance(case.draft, EagleHead) and len(path) > 1
    seen["eos in path"] += is_eos and len(step.tokens) < len(path)
    seen["eos as bonus"] += is_eos and len(step.tokens) == len(path)


@functools.cache
def run_cases(method: str) -> Counter:
    """Run the cases of a method in all modes and count events. Fails if a text differs."""
    seen: Counter = Counter()
    for mode in MODES:
        case = random_case(method, mode)
        steps = list(case.write())
        assert token_ids(steps) == cut(case.greedy, set(case.eos_ids), case.limit), mode
        n_tokens = len(case.prompt) + case.limit
        seen["past positions"] += n_tokens > case.target.config.max_position_embeddings
        if mode == "drawn" and Method(case.settings).facts.draws_candidates:
            seen["drawn trees"] += sum(len(step.tree) > 1 for step in steps[1:])
        if window := case.options.get("window"):
            assert max(max(step.cache_lengths) for step in steps) <= window.max_length
            seen["dropped"] += n_tokens > 2 * window.max_length
        left = case.limit - 1
        for step in steps[1:]:
            assert max(step.tree.depths) < left or left == 1 and not max(step.tree.depths)
            left -= len(step.tokens)
            count_events(seen, step, case)
            is_moved = step.path != list(range(len(step.path)))
            seen[f"moved row in mode {mode}"] += is_moved
    return seen


@pytest.mark.parametrize("method", METHODS)
def test_every_method_writes_ars_text(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare token for token, with drafts of all kinds and trees of all shapes."""
    pretend_capture(monkeypatch)
    run_cases(method)


def test_the_cases_cover_what_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_capture(monkeypatch)
    seen: Counter = Counter()
    for method in METHODS:
        seen.update(run_cases(method))
    assert len(seen) == 14 and min(seen.values()) > 0, seen


@pytest.mark.parametrize(("method", "mode"), list(zip(LARGE_SETTINGS, MODES, strict=True)))
def test_a_large_tree_writes_ars_text(
    method: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare the tokens of three trees of up to 1,024 rows in each mode."""
    pretend_capture(monkeypatch)
    case = random_case(method, mode, is_large=True)
    steps = list(itertools.islice(case.write(), 4))
    ids = token_ids(steps)[:MAX_TOKENS]
    assert ids == case.greedy[: len(ids)] and len(ids) >= 4
    assert max(len(step.tree) for step in steps[1:]) > SMALL_PASS


@pytest.mark.parametrize("is_shaped", [False, True])
def test_an_eagle_head_drafts_levels_of_many_rows(
    is_shaped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a level of 599 rows. The head's buffer of states once had room for 512."""
    pretend_capture(monkeypatch)
    changes: Changes = {"vocab_size": 1000}
    tensors = random_tensors(random_config(**changes), 5)
    target, head = (
        build_model(tensors, FastGPTNeoX, **changes),
        make_head(tensors, seed=1, **changes),
    )
    if is_shaped:
        fix_shapes(target, head)
    expected = generate_greedy(target, [3, 14, 15], 5)
    steps = list(generate(target, head, [3, 14, 15], DySpec(N=600, D_max=2), 5))
    assert token_ids(steps) == expected
    assert max(n for step in steps for n in step.draft_rows) == 599


@pytest.mark.parametrize(("number", "method"), list(enumerate(STRICT_METHODS)))
def test_a_strict_method_writes_ars_bits(number: int, method: str) -> None:
    """Compare all logits of the text, also in half precision. The text is near the end of a block
    of attention, or far before it."""
    rng = random.Random(f"{method} {number}")
    tensors, changes = target_weights(number)
    halved = {name: tensor.to(DTYPES[number % 3]) for name, tensor in tensors.items()}
    draft = make_draft(("noise0.02", "head")[number % 2], tensors, changes, number)
    target = build_model(halved, FastGPTNeoX, **changes)
    prompt = [rng.randrange(VOCAB) for _ in range((3, 250)[number % 2])]
    own = random_settings(method, rng)
    n_rows = round_up_rows(Method(own).n_verified)
    options: dict[str, object] = {"strict": True, "commit": ("keep", "rebuild")[number // 3]}
    if number % 3 == 2:
        options["window"] = Window(max(n_rows, 40), 4)
    # ar's passes have one row, or as many as the run's if only those are batch-invariant
    ar = PaddedAutoregressive(rows=1 if invariant_rows(target) else n_rows)
    found = []
    for settings in (ar, own):
        logits: list[Tensor] = []
        options["inspect"] = logits.append
        ids = token_ids(generate(target, draft, prompt, settings, MAX_TOKENS, **options))
        found.append((ids, torch.cat(logits)))
    (ar_ids, ar_logits), (ids, logits) = found
    assert ids == ar_ids and torch.equal(logits, ar_logits)

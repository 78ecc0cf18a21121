"""Tests of the project's main claim: every method writes exactly the target's own greedy text.

There are hundreds of seeded random cases in several modes of decoding. They vary the draft (equal,
noisy, adversarial, smaller, of another vocabulary, an EAGLE head), settings, prompt length, limit,
EOS and commit. The suite counts the events that it should cover, and fails if one never occurs.
"""

import functools
import itertools
import random
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest
import torch
from conftest import (
    append,
    generate,
    make_head,
    pretend_capture,
    random_config,
    random_settings,
    random_tensors,
)
from test_tensor_parallel import with_ranks, write, write_small_checkpoint
from torch import Tensor

from cli.metrics import token_ids
from draft_tree import Settings
from engine.cache import invariant_rows
from engine.checkpoint import load_tensors, read_config
from engine.eagle_head import FastHead
from engine.generate import Step
from engine.model import FastGPTNeoX
from engine.passes import Window, round_up_rows
from gpt_neox import GPTNeoX
from methods import METHODS
from methods.eagle import EagleHead, ReferenceHead
from methods.rules import are_retrieved, make_rule
from methods.sampler import Sampling
from methods.static import Chain, Fixed, PaddedAutoregressive
from verify import cut

# Cases per method in each mode: the reference model of gpt_neox.py; passes of exactly the rows and
# slots they need, or of the fixed shapes that graphs replay; a window; candidates at a temperature,
# top-k or drawn
MODES = {"plain": 9, "tight": 18, "fixed": 18, "window": 9, "top-k": 9, "drawn": 9}
N_STRICT = 6
# Options of the texts on two ranks, in turn
ON_RANKS = [{}, {"commit": "rebuild"}, {"window": Window(16, 2)}, {"strict": True}]
MAX_TOKENS = 32  # tokens of a text
VOCAB = 96
DRAFTS = (
    *("equal", "noise0.02", "half0.1", "noise0.3", "adversary", "small", "vocab48", "vocab112"),
    "head",
)
N_TARGETS = 7
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADS = {GPTNeoX: ReferenceHead, FastGPTNeoX: FastHead}  # by the kind of the target

Tensors = dict[str, Tensor]  # a model's weights
Changes = dict[str, object]  # fields of Config that differ from conftest's


# The pairs: random targets with varied text, and a draft of each kind.


def build_model(tensors: Tensors, kind: type[GPTNeoX] = FastGPTNeoX, **changes: object) -> GPTNeoX:
    """Build a model from a copy of the weights, because a model consumes its weights."""
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    return kind.from_tensors(random_config(**changes), copies)


def argmax_no_tie(logits: Tensor) -> int:
    """Return the likeliest id by logits [V]. Fails if rounding could change it."""
    first, second = logits.topk(2).values.tolist()
    assert first - second > 3e-5, "a tie, which a tree may decide differently"
    return int(logits.argmax())


def generate_greedy(target: FastGPTNeoX, prompt: list[int], n: int) -> list[int]:
    """Return n greedy tokens. This oracle prefills the whole sequence for each, without a tree."""
    ids = list(prompt)
    for _ in range(n):
        logits = target.prefill(ids, target.new_cache(len(ids)))[0]  # [V]
        ids.append(argmax_no_tie(logits))
    return ids[len(prompt) :]


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


@functools.cache
def varied_targets() -> list[tuple[Tensors, Changes]]:
    """Return random targets whose greedy text has at least 10 distinct ids in 48."""
    found = []
    for seed in range(100):
        changes: Changes = {"use_parallel_residual": seed % 3 > 0, "max_position_embeddings": 128}
        if seed % 2:
            changes["max_position_embeddings"] = 24  # most texts run past the trained range
        tensors = random_tensors(random_config(**changes), seed)
        text = generate_greedy(build_model(tensors, **changes), [seed % VOCAB], 48)
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
    """Return a draft for this target: an equal model, a noisy one (also in half precision), an
    adversarial one, one with another padded vocabulary, a smaller random one, or an EAGLE head."""
    if kind == "head":
        return make_head(tensors, seed, HEADS[model], **changes)
    generator = torch.Generator().manual_seed(seed)
    if kind == "small":
        changes = changes | {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
        tensors = random_tensors(random_config(**changes), seed)
    elif kind == "adversary":  # its best candidates are the target's worst
        tensors = tensors | {"embed_out.weight": -tensors["embed_out.weight"]}
    elif kind.startswith("vocab"):  # cut to this size, or padded with large random rows
        size = int(kind.removeprefix("vocab"))
        changes = changes | {"vocab_size": size}
        extra = 3 * torch.randn(max(size - VOCAB, 0), 32, generator=generator)
        longer = {n: torch.cat([t, extra])[:size] for n, t in tensors.items() if "embed" in n}
        tensors = tensors | longer
    elif kind != "equal":  # noise relative to each tensor's standard deviation
        scale = float(kind.removeprefix("half").removeprefix("noise"))
        noise = {n: torch.randn(t.shape, generator=generator) for n, t in tensors.items()}
        tensors = {n: t + scale * t.std() * noise[n] for n, t in tensors.items()}
    if kind.startswith("half"):
        dtype = (torch.float16, torch.bfloat16)[seed % 2]
        tensors = {n: t.to(dtype) for n, t in tensors.items()}
    return build_model(tensors, model, **changes)


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
    commit: str
    greedy: list[int]  # the target's own text, of `limit` tokens
    options: dict[str, object] = field(default_factory=dict)  # of generate

    def write(self) -> list[Step]:
        """Return the steps of its text."""
        options = {"eos_ids": self.eos_ids, "commit": self.commit, **self.options}
        pair = self.target, self.draft
        return list(generate(*pair, self.prompt, self.settings, self.limit, **options))


@functools.cache
def random_prompt_and_text(number: int) -> tuple[list[int], list[int]]:
    """Return a random prompt and its target's greedy text, which every method must write."""
    rng = random.Random(number)
    tensors, changes = varied_targets()[number % N_TARGETS]
    prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 1, 4, 19]))]
    return prompt, generate_greedy(build_model(tensors, **changes), prompt, MAX_TOKENS)


def random_case(method: str, mode: str, number: int) -> Case:
    """Return a case seeded by all arguments. The number selects the kinds of target and draft."""
    rng = random.Random(f"{method} {mode} {number}")
    tensors, changes = varied_targets()[number % N_TARGETS]
    kind = GPTNeoX if mode == "plain" else FastGPTNeoX
    target = build_model(tensors, kind, **changes)
    draft = make_draft(DRAFTS[number % len(DRAFTS)], tensors, changes, number, kind)
    settings = random_settings(method, rng)
    prompt, text = random_prompt_and_text(number)
    options: dict[str, object] = {"graphs": number % 2 == 1} if mode == "fixed" else {}
    if mode == "window":
        size = max(make_rule(settings).max_verified, rng.choice([1, 5, 16, 24]))
        options["window"] = Window(size, rng.choice([0, 1, 4]))
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 7, 40, 90]))]
        text, _ = generate_streaming(target, prompt, options["window"], MAX_TOKENS)
    elif mode in ("top-k", "drawn"):
        temperature = (0.3, 0.6, 2.5)[number % 3]
        options["sampling"] = Sampling(0.0, 1.0, number, temperature, draws_greedy=mode == "drawn")
    limit = rng.choice([MAX_TOKENS, MAX_TOKENS] + list(range(1, 21)))
    text = text[:limit]
    eos_ids = [] if number % 3 else rng.sample(text, 1)
    commit = rng.choice(["keep", "keep", "rebuild"]) if mode != "plain" else "keep"
    for model in (target, draft) if kind is FastGPTNeoX else ():
        model.has_fixed_shapes = mode == "fixed"
        model.min_rows = 1 + number % 2  # one row may be padded to two
    return Case(target, draft, prompt, settings, limit, eos_ids, commit, text, options)


def count_events(seen: Counter, step: Step, case: Case) -> None:
    """Count the events of one iteration, and check that its path gives its tokens."""
    tree, path = step.tree, step.path
    accepted = [tree.tokens[row] for row in path[1:]]
    assert path[0] == 0 and step.tokens == (accepted + [step.bonus])[: len(step.tokens)]
    is_eos = step.tokens[-1] in case.eos_ids
    seen[f"accepted {min(len(accepted), 3)}"] += 1
    seen["tree of depth 1"] += max(tree.depths) == 1
    seen["second sibling"] += any(tree.parents[row] in tree.parents[1:row] for row in path[1:])
    seen["accepted grafted"] += any(are_retrieved(tree)[row] for row in path)
    seen["moved row"] += path != list(range(len(path)))
    seen["accepted of a head"] += isinstance(case.draft, EagleHead) and len(path) > 1
    seen["eos in path"] += is_eos and len(step.tokens) < len(path)
    seen["eos as bonus"] += is_eos and len(step.tokens) == len(path)
    settings = case.settings
    if isinstance(settings, Fixed) and max(tree.depths) and settings.tau == 0:
        is_full = len(tree) == settings.N_max
        # The budget ends between two children
        seen["N_max cut"] += is_full and tree.depths.count(max(tree.depths)) % settings.B > 0


@functools.cache
def run_cases(method: str, mode: str) -> Counter:
    """Run all random cases of a method in one mode and count events. Fails if a text differs."""
    seen: Counter = Counter()
    for number in range(MODES[mode]):
        case = random_case(method, mode, number)
        steps = case.write()
        assert token_ids(steps) == cut(case.greedy, case.eos_ids, case.limit), number
        n_tokens = len(case.prompt) + case.limit
        seen["past positions"] += n_tokens > case.target.config.max_position_embeddings
        seen["other vocabulary"] += case.draft.config.vocab_size != VOCAB
        seen["prompt of one"] += len(case.prompt) == 1
        seen["budget of one row"] += make_rule(case.settings).max_verified == 1 and method != "ar"
        rule = make_rule(case.settings)
        if mode == "drawn" and rule.draws_candidates:
            seen["drawn trees"] += sum(len(step.tree) > 1 for step in steps[1:])
        if window := case.options.get("window"):
            assert max(max(step.cache_lengths) for step in steps) <= window.max_length
            seen["dropped"] += n_tokens > 2 * window.max_length
        left = case.limit - 1
        for step in steps[1:]:
            assert max(step.tree.depths) < left or left == 1 and not max(step.tree.depths)
            left -= len(step.tokens)
            count_events(seen, step, case)
    return seen


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_writes_ars_text(
    method: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare token for token, with drafts of all kinds and trees of all shapes."""
    pretend_capture(monkeypatch)
    run_cases(method, mode)


def test_the_cases_cover_what_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_capture(monkeypatch)
    seen: Counter = Counter()
    for method, mode in itertools.product(METHODS, MODES):
        seen.update(run_cases(method, mode))
    assert len(seen) == 18 and min(seen.values()) > 0, seen


@functools.cache
def strict_pair(number: int) -> tuple[FastGPTNeoX, FastGPTNeoX]:
    """Return a pair. It is cached, so its smallest batch-invariant row count is tried only once."""
    tensors, changes = varied_targets()[number % N_TARGETS]
    halved = {name: tensor.to(DTYPES[number % 3]) for name, tensor in tensors.items()}
    kind = ("noise0.02", "head")[number % 2]
    return build_model(halved, **changes), make_draft(kind, tensors, changes, number)


def rows_per_pass(settings: Settings) -> int:
    """Return the rows of every pass, in a strict run that gives all passes equally many."""
    rule = make_rule(settings)
    return round_up_rows(max(rule.max_verified, rule.min_rows))


@pytest.mark.parametrize("method", METHODS)
def test_every_strict_method_writes_ars_bits(method: str) -> None:
    """Compare all logits of the text, also in half precision. The text is near the end of a block
    of attention, or far before it."""
    for number in range(N_STRICT):
        rng = random.Random(f"{method} {number}")
        target, draft = strict_pair(number)
        prompt = [rng.randrange(VOCAB) for _ in range((3, 250)[number % 2])]
        own = random_settings(method, rng)
        options: dict[str, object] = {"strict": True, "commit": rng.choice(["keep", "rebuild"])}
        if number % 3 == 2:
            options["window"] = Window(max(rows_per_pass(own), 40), 4)
        # ar's passes have one row, or as many as the run's if only those are batch-invariant
        rows = 1 if invariant_rows(target) else rows_per_pass(own)
        found = []
        for settings in (PaddedAutoregressive(rows=rows), own):
            logits: list[Tensor] = []
            options["inspect"] = logits.append
            ids = token_ids(generate(target, draft, prompt, settings, MAX_TOKENS, **options))
            found.append((ids, torch.cat(logits)))
        (ar_ids, ar_logits), (ids, logits) = found
        assert ids == ar_ids and torch.equal(logits, ar_logits), number


def write_all(target: FastGPTNeoX, folder: Path) -> list[list[int]]:
    """Return texts of every method and sampled ones, with two drafts that only rank 0 has: the same
    model, whose logits differ from the target's only by rounding, and an EAGLE head."""
    config = read_config(folder)
    tensors = load_tensors(folder, config, torch.device("cpu"), torch.float32)
    head = make_head(dict(tensors), seed=0, **asdict(config))
    rng = random.Random(0)
    found = []
    for draft in (FastGPTNeoX.from_pretrained(folder), head):
        for i, method in enumerate(METHODS):
            settings = random_settings(method, rng)
            found.append(write(target, draft, settings, **ON_RANKS[i % len(ON_RANKS)]))
        found.append(write(target, draft, Chain(), sampling=Sampling(temperature=0.9, seed=3)))
    return found


def test_texts_on_two_ranks_are_those_of_one_process(tmp_path: Path) -> None:
    expected = write_all(FastGPTNeoX.from_pretrained(write_small_checkpoint(tmp_path)), tmp_path)
    assert with_ranks(2, tmp_path, write_all) == expected

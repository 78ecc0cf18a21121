"""The claim of the project: every method writes exactly the target's own greedy text.

Hundreds of seeded random cases: pairs (draft equal, noisy, adversarial, other vocabulary), tree
shapes and settings, prompt lengths, limits, EOS, both commits. The suite counts what it saw and
fails if a case it is meant to cover never came up.
"""

import functools
import itertools
import random
import warnings
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from conftest import GOLDEN, TINY, pretend_capture, random_config, random_settings, random_tensors
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from cli.compare import TIE
from cli.metrics import token_ids
from draft_tree import Settings
from dynatree import Step
from engine.decoding import generate
from engine.model import FastGPTNeoX
from methods import METHODS
from methods.static import Alone, Fixed
from verify import cut

CASES = 20  # per method and kind of shapes
LONGEST = 32  # tokens of their texts
VOCAB = 96
DRAFTS = ("equal", "noise0.02", "half0.1", "noise0.3", "adversary", "vocab80", "vocab112")
PROMPTS = (
    "The harbour lay quiet under the morning fog, and",
    "Chapter 3. In which the travellers",
    "= List of rivers =\n\n The longest of them",
)

Tensors = dict[str, Tensor]  # a model's weights
Changes = dict[str, object]  # fields of Config that differ from conftest's


# The pairs: random targets whose text is worth comparing, and a draft of each kind.


def build(tensors: Tensors, **changes: object) -> FastGPTNeoX:
    """A model of its own copy of the weights, as a model consumes what it is given."""
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    return FastGPTNeoX.from_tensors(random_config(**changes), copies)


def greedy(target: FastGPTNeoX, prompt: list[int], n: int) -> list[int]:
    """The oracle: the whole text again for every token, no cache reused, no tree."""
    ids = list(prompt)
    for _ in range(n):
        logits = target.prefill(ids, target.new_cache(len(ids))).logits[0]  # [V]
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


@functools.cache
def varied_targets() -> list[tuple[Tensors, Changes]]:
    """Random targets whose greedy text has at least 10 distinct ids in 48."""
    found = []
    for seed in range(100):
        changes: Changes = {"is_parallel": seed % 3 > 0, "max_positions": 128}
        if seed % 2:
            changes["max_positions"] = 24  # most texts run past the trained range
        tensors = random_tensors(random_config(**changes), seed)
        text = greedy(build(tensors, **changes), [seed % VOCAB], 48)
        if len(set(text)) >= 10:
            found.append((tensors, changes))
        if len(found) == 8:
            return found
    raise AssertionError("too few random targets write varied text")


def make_draft(kind: str, tensors: Tensors, changes: Changes, seed: int) -> FastGPTNeoX:
    """A draft for this target: equal, noisy, in half precision too, adversarial, or with another
    padded vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "adversary":  # its best candidates are the target's worst
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
    return build(tensors, **changes)


SHAPES = ("tight", "fixed")


@pytest.fixture(params=SHAPES)
def shapes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Passes of exactly the rows and slots they need, or padded to the few that graphs replay."""
    pretend_capture(monkeypatch)
    return request.param


def use_shapes(shapes: str, case: int, *models: FastGPTNeoX) -> None:
    """Every second case pads one row to two; of the fixed shapes, replays what was captured."""
    is_second = case % 2 == 1
    for model in models:
        model.pool.is_shaped = shapes == "fixed"
        model.pool.has_graphs = model.pool.is_shaped and is_second
        model.pool.min_rows = 2 if is_second else 1


# The comparison, and what it has met.


def check(target: FastGPTNeoX, prompt: list[int], steps: list[Step], expected: list[int]) -> bool:
    """Equal ids; a difference at a top-2 gap under TIE is reported and skipped, never silently."""
    ids = token_ids(steps)
    if ids == expected:
        return True
    pairs = enumerate(zip(ids, expected, strict=False))
    differing = [at for at, (one, other) in pairs if one != other]
    assert differing, f"{len(ids)} tokens, not {len(expected)}, and no other difference"
    at = differing[0]
    context = prompt + expected[:at]
    best = target.prefill(context, target.new_cache(len(context))).logits[0].topk(2).values
    gap = float(best[0] - best[1])
    assert gap < TIE, f"token {at} is {ids[at]}, not {expected[at]}; top-2 gap {gap:.2e}"
    warnings.warn(f"tie at token {at}: top-2 gap {gap:.2e}", stacklevel=1)
    return False


def note(seen: Counter, step: Step, settings: Settings, eos_ids: list[int]) -> None:
    """Count what one iteration shows; its path spells what it committed."""
    tree, path = step.tree, step.path
    accepted = [tree.tokens[row] for row in path[1:]]
    assert path[0] == 0 and step.tokens == (accepted + [step.bonus])[: len(step.tokens)]
    is_eos = step.tokens[-1] in eos_ids
    seen[f"accepted {min(len(accepted), 3)}"] += 1
    seen["tree of depth 1"] += tree.depth == 1
    seen["second sibling"] += any(tree.parents[row] in tree.parents[1:row] for row in path[1:])
    seen["accepted grafted"] += any(tree.are_retrieved[row] for row in path)
    seen["moved row"] += path != list(range(len(path)))
    seen["eos in path"] += is_eos and len(step.tokens) < len(path)
    seen["eos as bonus"] += is_eos and len(step.tokens) == len(path)
    if isinstance(settings, Fixed) and tree.depth and settings.tau == 0:  # between two children
        is_full = len(tree) == settings.N_max
        seen["N_max cut"] += is_full and tree.depths.count(tree.depth) % settings.B > 0


# The random cases.


@dataclass(frozen=True)
class Case:
    """One random pair with everything that generate is asked for."""

    target: FastGPTNeoX
    draft: FastGPTNeoX
    prompt: list[int]
    settings: Settings
    limit: int
    eos_ids: list[int]  # none, or one of the ids that the target writes
    commit: str
    greedy: list[int]  # the target's own text, as long as the limit


@functools.cache
def greedy_text(shapes: str, number: int) -> tuple[list[int], list[int]]:
    """A random prompt and what its target writes after it; every method is to write the same."""
    rng = random.Random(f"{shapes} {number}")
    tensors, changes = varied_targets()[number % 8]
    prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 1, 4, 19]))]
    return prompt, greedy(build(tensors, **changes), prompt, LONGEST)


def random_case(method: str, shapes: str, number: int) -> Case:
    """Seeded by all three; the kinds of target and draft go round with the number."""
    rng = random.Random(f"{method} {shapes} {number}")
    tensors, changes = varied_targets()[number % 8]
    target = build(tensors, **changes)
    draft = make_draft(DRAFTS[number % len(DRAFTS)], tensors, changes, number)
    prompt, text = greedy_text(shapes, number)
    limit = rng.choice([LONGEST, LONGEST] + list(range(1, 21)))
    text = text[:limit]
    eos_ids = [] if number % 3 else rng.sample(text, 1)
    settings = random_settings(method, rng)
    commit = rng.choice(["keep", "keep", "rebuild"])
    use_shapes(shapes, number, target, draft)
    return Case(target, draft, prompt, settings, limit, eos_ids, commit, text)


@functools.cache
@functools.cache
def run_cases(method: str, shapes: str) -> Counter:
    """All random cases of one method; raises where the text differs. Returns what was seen."""
    seen: Counter = Counter()
    for number in range(CASES):
        case = random_case(method, shapes, number)
        options = {"eos_ids": case.eos_ids, "commit": case.commit}
        steps = list(
            generate(case.target, case.draft, case.prompt, case.settings, case.limit, **options)
        )
        expected = cut(case.greedy, case.eos_ids, case.limit)
        seen["equal"] += check(case.target, case.prompt, steps, expected)
        n_tokens = len(case.prompt) + case.limit
        seen["past positions"] += n_tokens > case.target.config.max_positions
        seen["other vocabulary"] += case.draft.config.vocab_size != VOCAB
        seen["prompt of one"] += len(case.prompt) == 1
        seen["budget of one row"] += case.settings.rule().max_rows == 1 and method != "ar"
        for step in steps[1:]:
            note(seen, step, case.settings, case.eos_ids)
    return seen


@pytest.mark.parametrize("method", METHODS)
def test_random_pairs_and_trees(method: str, shapes: str) -> None:
    """Greedy tree == greedy ar, token for token, whatever the draft and the tree's shape."""
    assert run_cases(method, shapes)["equal"] >= CASES - 2


def test_the_cases_cover_what_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_capture(monkeypatch)
    seen: Counter = Counter()
    for method, shapes in itertools.product(METHODS, SHAPES):
        seen.update(run_cases(method, shapes))
    assert len(seen) == 16 and min(seen.values()) > 0, seen


def test_every_limit(shapes: str) -> None:
    """Never more tokens than asked for, and a tree never deeper than the tokens still allowed."""
    tensors, changes = varied_targets()[0]
    target = build(tensors, **changes)
    draft = make_draft("noise0.1", tensors, changes, 1)
    text = greedy(target, [5, 6], 20)
    for limit in range(1, 21):
        use_shapes(shapes, limit, target, draft)
        steps = list(generate(target, draft, [5, 6], Fixed(tau=0.0), limit))
        assert token_ids(steps) == text[:limit]
        left = limit
        for step in steps:
            assert step.tree is None or step.tree.depth < left
            left -= len(step.tokens)


def shapes_of(method: str) -> str:
    """One of the two: the random cases have both."""
    return "fixed" if list(METHODS).index(method) % 2 else "tight"


@pytest.mark.parametrize("method", METHODS)
def test_golden_greedy_ids(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference implementation's own greedy text, of another checkpoint by each method."""
    pretend_capture(monkeypatch)
    folder = GOLDEN[list(METHODS).index(method) % len(GOLDEN)]
    golden = load_file(folder / "golden.safetensors")
    prompt = golden["input_ids"].tolist()
    expected = golden["greedy_ids"].tolist()
    target = FastGPTNeoX.from_pretrained(folder)
    use_shapes(shapes_of(method), len(method), target)
    steps = generate(target, target, prompt, METHODS[method](), len(expected))
    assert token_ids(steps) == expected


@functools.cache
def embedded_pair() -> tuple[FastGPTNeoX, FastGPTNeoX, list[tuple[list[int], list[int]]]]:
    """Target and draft, and prompts with ar's ids; one of them against the cache-free oracle."""
    target = FastGPTNeoX.from_pretrained(TINY / "target")
    draft = FastGPTNeoX.from_pretrained(TINY / "draft")
    tokenizer = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))
    prompts = []
    for text in PROMPTS:
        prompt = tokenizer.encode(text).ids
        ids = token_ids(generate(target, None, prompt, Alone(), 45))
        prompts.append((prompt, ids))
    prompt, ids = prompts[0]
    assert ids[:10] == greedy(target, prompt, 10)
    return target, draft, prompts


@pytest.mark.parametrize("method", METHODS)
def test_embedded_pair(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trained pair on real prompts."""
    pretend_capture(monkeypatch)
    target, draft, prompts = embedded_pair()
    use_shapes(shapes_of(method), len(method), target, draft)
    for prompt, expected in prompts:
        steps = list(generate(target, draft, prompt, METHODS[method](), 45))
        check(target, prompt, steps, expected)

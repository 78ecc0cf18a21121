"""Strict: the logits of a tree's rows are ar's, bit for bit, in every dtype."""

import functools
import random
from collections.abc import Callable

import pytest
import torch
from conftest import TINY, pretend_capture, random_config, random_settings, random_tensors
from pytest import MonkeyPatch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import engine.passes
from cli.metrics import token_ids
from draft_tree import Settings, Tree
from dynatree import generate
from engine import caches, fused, strict
from engine.checkpoint import Config
from engine.cuda_graphs import Shape
from engine.passes import Use, row_count
from engine.sampling import Sampling
from engine.streaming import Window
from gpt_neox import GPTNeoX, KVCache
from methods import METHODS
from methods.static import Alone
from verify import tree_pass

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Around the first near position, the ends of blocks, and where a block is left
LENGTHS = [1, 14, 15, 16, 17, 31, 33, 48, 254, 256, 257, 270, 271, 272, 512, 527]
SHAPES = [  # sizes of heads: 16, 32, 64, 80, 256
    {"hidden_size": 32},
    {"hidden_size": 64, "is_parallel": False},
    {"hidden_size": 128, "rotary_fraction": 0.25},
    {"hidden_size": 160, "rotary_fraction": 0.25},
    {"hidden_size": 256, "n_heads": 1, "is_parallel": False},
]


def model_of(changes: dict[str, object], dtype: torch.dtype, is_shaped: bool = False) -> GPTNeoX:
    config: Config = random_config(max_positions=700, **changes)
    tensors = random_tensors(config, 7)
    model = GPTNeoX.from_tensors(
        config, {name: tensor.to(dtype) for name, tensor in tensors.items()}
    )
    model.pool.is_shaped = is_shaped
    return model


def random_tree(rng: random.Random, n_most: int) -> Tree:
    """Up to n_most rows in breadth-first order, some chains deep and some families large."""
    n = rng.randint(2, n_most)
    is_bushy = rng.random() < 0.5
    above = [(-1, 0)]  # of each node: its parent and its depth
    for node in range(1, n):
        parent = rng.randrange(node) if is_bushy or rng.random() < 0.3 else node - 1
        if above[parent][1] == strict.MAX_DEPTH:
            parent = 0
        above.append((parent, above[parent][1] + 1))
    order = sorted(range(n), key=lambda node: above[node][1])
    parents = [order.index(above[node][0]) if node else -1 for node in order]
    depths = [above[node][1] for node in order]
    tokens = [rng.randrange(90) for _ in range(n)]
    return Tree(tokens, parents, depths, [0.0] * n, [-1] * n, [False] * n)


def path_to(tree: Tree, row: int) -> list[int]:
    """Rows from the root to this one."""
    above = tree.parents[row]
    return (path_to(tree, above) if above >= 0 else []) + [row]


def run_tree(model: GPTNeoX, cache: KVCache, tree: Tree) -> Tensor:
    """The logits [N, V] of a tree's rows, as the loop asks for them."""
    tokens, positions, mask = tree_pass(tree, cache.length)
    return model.forward(tokens, positions, cache, mask).logits.clone()


def decode_path(model: GPTNeoX, cache: KVCache, tokens: list[int]) -> Tensor:
    """The last of these tokens' logits [V], one after the other, as ar has them."""
    for token in tokens:
        position = torch.tensor([cache.length])
        logits = model.forward(torch.tensor([token]), position, cache).logits
        cache.advance(1)
    return logits[0]


@torch.inference_mode()
def count_differing(
    model: GPTNeoX, length: int, n_rows: int, rng: random.Random, n_paths: int = 4
) -> int:
    """How many rows of a random tree differ in any bit from their path decoded alone, or leave
    other keys and values in the cache; of so many rows."""
    cache = model.new_cache(length + 140, Use(n_rows, is_strict=True))
    model.prefill([rng.randrange(90) for _ in range(length)], cache)
    tree = random_tree(rng, n_rows)
    logits = run_tree(model, cache, tree)
    leaves = rng.sample(range(len(tree)), min(len(tree), n_paths))
    n_differing = 0
    for leaf in leaves:
        cache.rewind(length)
        path = path_to(tree, leaf)
        run_tree(model, cache, tree)
        cache.commit(path)
        end = cache.length
        committed = cache.kv[:, :, :, length:end].clone()
        cache.rewind(length)
        alone = decode_path(model, cache, [tree.tokens[row] for row in path])
        is_same = torch.equal(alone, logits[leaf])
        is_same &= torch.equal(cache.kv[:, :, :, length:end], committed)
        n_differing += not is_same
    return n_differing


@pytest.mark.parametrize("is_shaped", [False, True], ids=["tight", "fixed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_a_row_is_its_path_bit_for_bit(
    changes: dict[str, object], dtype: torch.dtype, is_shaped: bool
) -> None:
    model = model_of(changes, dtype, is_shaped)
    rng = random.Random(str(changes))
    for length in LENGTHS:
        assert count_differing(model, length, rng.choice([2, 8, 32]), rng) == 0, length


def test_on_two_threads(monkeypatch: MonkeyPatch) -> None:
    """In products of the embedded target's sizes; each is a wait, if another process is at work."""
    torch.set_num_threads(2)
    sizes = {"hidden_size": 320, "intermediate_size": 1280, "n_heads": 4, "vocab_size": 4096}
    rng = random.Random(2)
    for dtype in DTYPES:
        model = model_of(sizes, dtype)
        for length in (30, 257):
            assert count_differing(model, length, 16, rng, n_paths=1) == 0


def of_the_root(positions: Tensor) -> Tensor:
    """A planted error: where the near keys begin depends on where the tree's root is."""
    is_deeper = positions > positions.min()
    return (positions - strict.MAX_DEPTH).clamp(min=0) + is_deeper.long()


def in_order_of_slots(positions: Tensor, mask: Tensor | None) -> Tensor:
    """A planted error: a tree's rows first, then the prefix, as if order did not matter."""
    near = strict.near_slots(positions, mask)
    n_near = (positions + 1).clamp(max=strict.NEAR)
    if mask is not None:
        for row in range(len(near)):
            n = int(n_near[row])
            near[row, :n] = near[row, :n].flip(0)
    return near


def of_one_row(layer: fused.FusedLayer, x: Tensor, which: int) -> Tensor:
    """A planted error: one row alone is computed otherwise, and nobody looked."""
    return norm(layer, x, which) + 1e-5 * (len(x) == 1)


def in_other_blocks(q: Tensor, k: Tensor, v: Tensor, sight: strict.Sight) -> Tensor:
    """A planted error: a pass that sees more than one block takes them in halves."""
    width = strict.BLOCK
    if q.isfinite().all() and is_tree_pass(sight):
        strict.BLOCK = width // 2
    attended = strict.attend_by_position(q, k, v, sight)
    strict.BLOCK = width
    return attended


def is_tree_pass(sight: strict.Sight) -> bool:
    """Whether a second row is not padding, whose every near slot is 0."""
    return bool(sight.near.view(-1, strict.NEAR)[1:].any())


def by_sdpa(q: Tensor, k: Tensor, v: Tensor, sight: strict.Sight) -> Tensor:
    """A planted error: torch's attention, over the same slots by a mask."""
    m = q.shape[1]
    mask = torch.zeros(m, k.shape[1], dtype=torch.bool)
    mask[:, : sight.far.shape[1]] = sight.far == 0
    is_near = sight.is_near == 0
    for row, slots in enumerate(sight.near.view(m, -1)):
        mask[row, slots[is_near[row]]] = True
    attended = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], mask)
    return attended[0]


PLANTED = {
    "near from the root": (strict, "first_near", of_the_root),
    "near in another order": (engine.passes, "near_slots", in_order_of_slots),
    "one row alone": (fused.FusedLayer, "norm", of_one_row),
    "other blocks": (fused, "attend_by_position", in_other_blocks),
    "torch's attention": (fused, "attend_by_position", by_sdpa),
}
norm = fused.FusedLayer.norm


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_seen(mistake: str, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(*PLANTED[mistake])
    if mistake == "one row alone":
        monkeypatch.setattr(caches, "steady_rows", lambda model: 1)
    rng = random.Random(3)
    model = GPTNeoX.from_pretrained(TINY / "target")
    n_differing = 0
    for length in (40, 300, 500):
        n_differing += count_differing(model, length, 16, rng)
    assert n_differing > 0


def record(*arguments: object, **options: object) -> tuple[list[int], Tensor]:
    """A strict run's ids, and the target's logits [ids, V] that each was chosen from."""
    logits = []
    ids = token_ids(generate(*arguments, strict=True, inspect=logits.append, **options))
    return ids, torch.cat(logits)


def ar_rows(target: GPTNeoX, settings: Settings) -> int:
    """Of a pass of the strict ar that a run with these settings is held against: one, unless only
    as many rows as the run's have the same bits."""
    return 1 if target.pool.steady_rows(target) else rows_of(settings)


def rows_of(settings: Settings) -> int:
    """Of a pass of a run with these settings, where all have as many."""
    rule = settings.rule()
    return row_count(max(rule.max_rows, rule.min_rows))


OPTIONS = {
    "greedy": {},
    "rebuild": {"commit": "rebuild"},
    "window": {"window": Window(40, 4)},
}


@functools.cache
def ar_text(option: str, dtype: torch.dtype, rows: int) -> tuple[list[int], list[int], Tensor]:
    """A prompt, and the ids and logits of ar after it at so many rows a pass."""
    target = model_of({"hidden_size": 64}, dtype)
    rng = random.Random(option)
    length = rng.sample([3, 20, 250], 3)[DTYPES.index(dtype)]
    prompt = [rng.randrange(90) for _ in range(length)]
    return prompt, *record(target, None, prompt, Alone(rows=rows), 50, **OPTIONS[option])


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_writes_ars_bits(method: str, option: str) -> None:
    """Other settings and another prompt in each type."""
    rng = random.Random(f"{method} {option}")
    for dtype in DTYPES:
        target = model_of({"hidden_size": 64}, dtype)
        draft = GPTNeoX.from_tensors(target.config, noisy(target.config))
        settings = random_settings(method, rng)
        while option == "window" and rows_of(settings) > 40:
            settings = random_settings(method, rng)
        prompt, ar_ids, ar_logits = ar_text(option, dtype, ar_rows(target, settings))
        ids, logits = record(target, draft, prompt, settings, 50, **OPTIONS[option])
        assert ids == ar_ids
        assert torch.equal(logits, ar_logits)


def noisy(config: Config) -> dict[str, Tensor]:
    """The target's tensors with noise: a draft that is often right."""
    generator = torch.Generator().manual_seed(0)
    tensors = random_tensors(config, 7)
    for name, tensor in tensors.items():
        tensors[name] = tensor + 0.02 * torch.randn(tensor.shape, generator=generator)
    return tensors


def test_a_sampled_texts_logits_are_ars() -> None:
    """Another method draws other tokens; whatever it wrote, ar's logits over it are the same."""
    target = model_of({"hidden_size": 64}, torch.bfloat16)
    draft = GPTNeoX.from_tensors(target.config, noisy(target.config))
    prompt = [3, 1, 4, 1, 5]
    for method in METHODS:
        settings = METHODS[method]()
        sampling = Sampling(0.8, 0.9, seed=1)
        ids, logits = record(target, draft, prompt, settings, 40, sampling=sampling)
        with torch.inference_mode():
            cache = target.new_cache(200, Use(rows_of(settings), is_strict=True))
            expected = [target.prefill(prompt, cache).logits[0]]
            for token in ids[:-1]:
                expected.append(decode_path(target, cache, [token]).clone())
        assert torch.equal(logits, torch.stack(expected)), method


def test_replays_are_strict_too(monkeypatch: MonkeyPatch) -> None:
    """As on CUDA, with captures that are only pretended: fixed shapes for every pass."""
    pretend_capture(monkeypatch)
    target = model_of({"hidden_size": 64}, torch.float16, is_shaped=True)
    draft = GPTNeoX.from_tensors(target.config, noisy(target.config))
    for model in (target, draft):
        model.pool.is_shaped = True
        model.pool.has_graphs = True
    settings = METHODS["dynatree"](tau=0.01)
    for prompt in ([3] * 5, [7] * 240):
        ids, logits = record(target, draft, prompt, settings, 40)
        ar_ids, ar_logits = record(target, None, prompt, Alone(rows=64), 40)
        assert ids == ar_ids and torch.equal(logits, ar_logits)
    shapes = {step[1] for storage in target.pool.idle for step in storage.passes.captured}
    assert {Shape(64, 256, True), Shape(64, 512, True)} <= shapes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strict_attention_is_as_exact_as_torchs(dtype: torch.dtype) -> None:
    """Both against float64, over contexts of one block and of four."""
    generator = torch.Generator().manual_seed(0)
    for length in (200, 1000):
        q = torch.randn(4, 16, 40, generator=generator).to(dtype)
        k, v = (2 * torch.randn(2, 4, 1024, 40, generator=generator)).to(dtype)
        positions = torch.full((16,), length)
        seen = torch.arange(1024) <= length
        bias = torch.zeros(1024).masked_fill_(~seen, -torch.inf)
        scores = q.double() @ k.double().transpose(1, 2) * 40**-0.5 + bias.double()
        expected = scores.softmax(-1) @ v.double()
        near = strict.near_slots(positions, None)
        sight = strict.open_sight(positions, near, 1024)
        ours = strict.attend_by_position(q, k, v, sight).double()
        plain = fused.attend(q, k, v, bias.to(dtype).expand(16, -1)).double()
        assert (ours - expected).abs().mean() <= 1.1 * (plain - expected).abs().mean()


def test_a_strict_pass_of_too_many_rows_is_refused() -> None:
    """Cropped to the run's rows it once gave two logits for five rows."""
    model = model_of({"hidden_size": 32}, torch.float32)
    cache = model.new_cache(100, Use(2, is_strict=True))
    with pytest.raises(AssertionError, match="5 rows in a strict pass of 2"):
        model.forward(torch.arange(5), torch.arange(5), cache)


class Outputs(TorchDispatchMode):
    """Every operation, with what it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, Tensor]] = []

    def __torch_dispatch__(self, func: Callable, types: object, args=(), kwargs=None) -> object:
        result = func(*args, **(kwargs or {}))
        is_computed = not func.is_view and "empty" not in str(func)
        if is_computed and isinstance(result, Tensor) and result.is_floating_point():
            self.seen.append((str(func), result.clone()))
        return result


N_PROBED = 32  # rows of the probe's passes, unlike any other size of the model


@torch.inference_mode()
def first_differing_operation(model: GPTNeoX) -> str | None:
    """Of a row that is alone, the others padding, and the same row as the last of many."""
    runs = []
    for n in (1, N_PROBED - 1):
        model.pool.steady["rows"] = None  # all passes of as many rows
        cache = model.new_cache(100, Use(N_PROBED, N_PROBED, is_strict=True))
        model.prefill([i % 90 for i in range(40)], cache)
        ids = torch.tensor([5] * (n - 1) + [9])
        mask = torch.zeros(n, 40 + N_PROBED, dtype=torch.bool)
        mask[:, :40] = True
        mask[:, 40 : 40 + n] = torch.eye(n, dtype=torch.bool)
        with Outputs() as outputs:
            model.forward(ids, torch.full((n,), 40), cache, mask)
        runs.append(outputs.seen)
    for (name, alone), (_, last) in zip(*runs, strict=True):
        if N_PROBED in alone.shape:
            rows = alone.shape.index(N_PROBED)
            if not torch.equal(alone.select(rows, 0), last.select(rows, N_PROBED - 2)):
                return name
    return None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_operation_depends_on_a_rows_company(
    dtype: torch.dtype, monkeypatch: MonkeyPatch
) -> None:
    model = model_of({"hidden_size": 160}, dtype)
    assert first_differing_operation(model) is None

    def beside_others(layer: fused.FusedLayer, x: Tensor, which: int) -> Tensor:
        return norm(layer, x - x.mean(dim=0), which)

    monkeypatch.setattr(fused.FusedLayer, "norm", beside_others)
    assert first_differing_operation(model) == "aten.sub.Tensor"

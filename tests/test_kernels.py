"""Claim: the kernels in Triton compute what torch's functions do, alone and in whole passes.

On a GPU they run there. Without one they run in Triton's interpreter, which knows no compiler; so
each of their launches is compiled beside that, for GPUs that need not be there.

    pip install -r requirements-kernels.txt  # torch for CUDA has it already
    python -m pytest tests/test_kernels.py
"""

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from itertools import cycle, product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    fix_shapes,
    prefilled,
    pretend_capture,
    random_config,
    random_tensors,
    random_tree,
    run_tree,
)
from pytest import MonkeyPatch
from torch import Tensor

from cli.metrics import token_ids
from dynatree import capture
from engine import fused, scores
from engine.decoding import generate
from engine.model import FastGPTNeoX
from engine.passes import Use, causal_mask
from engine.scores import Ranking
from gpt_neox import Config
from methods.static import Alone, Chain
from verify import tree_pass

IS_COMPILED = torch.cuda.is_available() and "pretend_cuda" not in sys.modules
if not IS_COMPILED:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
triton = pytest.importorskip("triton", reason="no triton: pip install -r requirements-kernels.txt")
kernels = import_module("engine.kernels")
DEVICE = torch.device("cuda" if IS_COMPILED else "cpu")
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")]  # inf, nan in numpy
pytestmark += [pytest.mark.cuda] if IS_COMPILED else []

PROMPT = [3, 1, 4, 1, 5]
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # of numbers about 1
SIZES = {64: 16, 80: 20, 128: 128, 256: 64}  # of heads: how many dimensions are turned
EXTREMES = [torch.nan, torch.inf, -torch.inf]


@pytest.fixture(autouse=True)
def exact_bfloat16(monkeypatch: MonkeyPatch) -> None:
    """The interpreter cuts bfloat16 off where GPUs round, and multiplies its bits as integers."""
    if IS_COMPILED:
        return
    interpreter = import_module("triton.runtime.interpreter")
    tl, builder = interpreter.tl, interpreter.InterpreterBuilder
    cast, dot = builder.cast_impl, builder.create_dot

    def round_to(self: object, x: object, dtype: object) -> object:
        if (x.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, x, dtype)
        rounded = torch.from_numpy(x.data.copy()).bfloat16().view(torch.uint16).numpy()
        return interpreter.TensorHandle(rounded, tl.bfloat16)

    def multiply(self: object, a: object, b: object, *rest: object) -> object:
        if a.dtype.scalar == tl.bfloat16:
            a, b = cast(self, a, tl.float32), cast(self, b, tl.float32)
        return dot(self, a, b, *rest)

    monkeypatch.setattr(builder, "cast_impl", round_to)
    monkeypatch.setattr(builder, "create_dot", multiply)


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, where the kernels run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """Up to rounding; nan where it is expected, and nowhere else."""
    bound = BOUNDS[actual.dtype]
    torch.testing.assert_close(actual, expected, atol=bound, rtol=bound, equal_nan=True)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("n", "hidden"), [(1, 2560), (3, 512), (5, 48)])
def test_add_and_norm(n: int, hidden: int, dtype: torch.dtype) -> None:
    x, added = drawn(n, 2, n, hidden, dtype=dtype)
    weight, bias = drawn(7, 2, hidden, dtype=dtype)
    assert_near(kernels.add_norm(x, None, 1e-5), torch.layer_norm(x, [hidden]))
    total = x + added
    normed = kernels.add_norm(x, added, 1e-5, weight, bias)
    assert torch.equal(x, total)
    assert_near(normed, torch.layer_norm(total, [hidden], weight, bias))


def spread_by_torch(
    inner: Tensor, turns: Tensor, slots: Tensor, past: Tensor, approximate: str, mark: float
) -> Tensor:
    """As FusedLayer does it."""
    n_heads, _, size = past.shape[1:]
    queries_keys_values = inner[:, : 3 * n_heads * size].reshape(len(inner), 3, n_heads, size)
    qkv = queries_keys_values.permute(1, 2, 0, 3).clone()  # [3, H, n, D]
    fused.rotate_(qkv[:2, ..., : 2 * turns.shape[1]], turns)
    marks = {"nan": mark, "posinf": mark, "neginf": -mark}
    past.index_copy_(2, slots, torch.nan_to_num(qkv[1:], **marks))
    inside = inner[:, 3 * n_heads * size :].clone()
    active = torch.empty_like(inside)
    fused.gelu(inside, approximate, active)
    return torch.cat([qkv[0].transpose(0, 1).flatten(1), active], dim=1)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    ("size", "approximate"), list(zip(SIZES, ["none", "tanh"] * 2, strict=True))
)
def test_what_comes_of_the_joined_product(size: int, approximate: str, dtype: torch.dtype) -> None:
    """Into one layer of a cache, of which nothing else may change; some of it not finite, and some
    made so in float16 by a turn."""
    n, n_heads, n_slots, n_inside = 4, 2, 40, 700
    inner = drawn(size, n, 3 * n_heads * size + n_inside, dtype=dtype)
    keys, values = inner[:, n_heads * size : 3 * n_heads * size].view(n, 2, n_heads, size).unbind(1)
    keys[1, 1, :2] = torch.finfo(dtype).max if dtype == torch.float16 else 100.0
    for i, extreme in enumerate(EXTREMES):
        values[i, 0, 3 + i] = inner[i, i] = extreme
        if SIZES[size] < size:
            keys[i, 1, -1 - i] = extreme
    inner[:, -100:] *= 4.0  # where the two forms differ, and where both end
    angles = 3 * drawn(1, n, SIZES[size] // 2)
    turns = torch.polar(torch.ones_like(angles), angles)
    turns[1, 0] = torch.polar(torch.tensor(1.0), torch.tensor(-0.8))  # (x, x) to (1.4 x, 0)
    turns[:3, :2] = turns[1, 0]
    slots = torch.arange(31, 31 + n, device=DEVICE)
    kv = drawn(2, 2, 3, n_heads, n_slots, size, dtype=dtype)
    expected_kv, mark = kv.clone(), fused.overflow_mark(dtype)
    expected = spread_by_torch(inner, turns, slots, expected_kv[:, 1], approximate, mark)
    both = kernels.spread(inner, turns, slots, kv[:, 1], approximate, mark)
    attended = n_heads * size
    assert_near(both[3:], expected[3:])
    assert_near(both[:, SIZES[size] :], expected[:, SIZES[size] :])
    assert_near(both[:, attended:], expected[:, attended:])
    assert_near(kv, expected_kv)
    assert torch.equal(kv[:, ::2], expected_kv[:, ::2]) and kv.isfinite().all()
    assert (kv[0, 1, 1, 32, 0] == mark) == (dtype == torch.float16)


def tree_mask(n: int, n_slots: int, length: int) -> Tensor:
    """A tree's, padded to these rows and slots as a pass is: a row that was added sees one slot."""
    tree = random_tree(random.Random(n), max(n - 2, 1))
    _, _, mask = tree_pass(tree, length)
    mask = causal_mask(1) if mask is None else mask
    seen = torch.zeros(n, n_slots, dtype=torch.bool)
    seen[: len(mask), :length] = True
    seen[: len(mask), length : length + len(mask)] = mask
    seen[len(mask) :, 0] = True
    return seen.to(DEVICE)


ROWS = cycle([(1, 2304, 700), (128, 512, 130), (33, 1024, 900), (5, 256, 3), (16, 2304, 2200)])
PASSES = [(*shape, *rows) for shape, rows in zip(product(SIZES, BOUNDS), ROWS, strict=False)]


@pytest.mark.parametrize(("size", "dtype", "n", "n_slots", "length"), PASSES, ids=str)
def test_attention(
    size: int, dtype: torch.dtype, n: int, n_slots: int, length: int, monkeypatch: MonkeyPatch
) -> None:
    """Over a tree, where most rows see nothing of the last chunks."""
    n_heads, n_inside = (1 if n == 128 else 2), 10
    monkeypatch.setattr(kernels, "PROGRAMS", 8 if n > 5 else 264)  # long chunks, and short ones
    both = drawn(n, n, n_heads * size + n_inside, dtype=dtype)
    kv = drawn(size, 2, 2, n_heads, n_slots, size, dtype=dtype)
    seen = tree_mask(n, n_slots, length)
    queries = 3 * both[:, : n_heads * size].view(n, n_heads, size).transpose(0, 1)  # [H, n, D]
    given = torch.cat([queries.transpose(0, 1).flatten(1), both[:, -n_inside:]], dim=1)
    bias = torch.zeros(n, n_slots, device=DEVICE).masked_fill_(~seen, -torch.inf)
    expected = fused.attend(queries.float(), *kv[:, 1].float(), bias)
    kernels.attend(given, kv[:, 1], seen)
    assert_near(given[:, :-n_inside], expected.transpose(0, 1).flatten(1).to(dtype))
    assert torch.equal(given[:, -n_inside:], both[:, -n_inside:])


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_a_row_that_sees_one_slot_has_its_value(dtype: torch.dtype) -> None:
    """To the last bit, whichever chunk that is in; a row that is nan leaves the others alone."""
    seen = torch.eye(600, dtype=torch.bool)[[0, 63, 64, 300, 599, 7]].to(DEVICE)
    both, past = drawn(0, 6, 64, dtype=dtype), drawn(1, 2, 2, 600, 32, dtype=dtype)
    both[5] = torch.nan
    kernels.attend(both, past, seen)
    expected = past[1, :, [0, 63, 64, 300, 599]].transpose(0, 1).flatten(1)
    assert torch.equal(both[:5], expected) and both[5].isnan().all()


@pytest.mark.parametrize(
    ("k", "n", "n_ids"), [(0, 2, 300), (1, 3, 5000), (4, 3, 5000), (10, 1, 50304)]
)
@pytest.mark.parametrize(("are_logprobs", "temperature"), [(False, 1.0), (True, 1.0), (True, 0.6)])
def test_rank(k: int, n: int, n_ids: int, are_logprobs: bool, temperature: float) -> None:
    """Of some of the columns, as of a draft that knows more ids than the target."""
    logits = 3 * drawn(k, n, n_ids + 8)[:, :n_ids]
    ranking = Ranking(k, are_logprobs, temperature=temperature)
    assert_near(scores.rank(logits, ranking, has_kernels=True), scores.rank(logits, ranking))


def test_of_equal_logits_the_first_is_first() -> None:
    """In one part of the vocabulary, and in several."""
    logits = drawn(0, 3, 5000)
    logits[0, [4000, 7, 4999]] = logits[1, [4999, 4998, 4997]] = 9.0
    logits[2] = 0.0
    ranked = kernels.rank(logits, 3, True).cpu()
    values, ids = scores.maxima(torch.log_softmax(logits, -1).cpu().numpy(), 3)
    assert ids[0].tolist() == [7, 4000, 4999]
    assert torch.equal(ranked[:, 5:], torch.from_numpy(ids).float())
    assert torch.equal(ranked[:, 1], ranked[:, 5]) and torch.equal(ranked[:, 0], ranked[:, 2])
    assert_near(ranked[:, 2:5], torch.from_numpy(values))


@pytest.mark.parametrize("are_logprobs", [False, True])
def test_a_row_that_is_not_finite_is_told(are_logprobs: bool) -> None:
    """And none but that; its ids are of the vocabulary, as somebody may look them up."""
    logits = drawn(0, 6, 5000)
    for row, extreme in enumerate(EXTREMES):
        logits[row, 3000] = extreme
    logits[3], logits[4] = torch.nan, -torch.inf
    ranked = kernels.rank(logits, 2, are_logprobs).cpu()
    assert ranked[:, 0].isfinite().tolist() == [False, False, True, False, False, True]
    ids = ranked[:, [1, 4, 5]]
    assert ids.isfinite().all() and ids.max() < 5000


# Whole passes, of models whose way in is one product as on CUDA.


@pytest.fixture
def calls(monkeypatch: MonkeyPatch) -> Counter[str]:
    """How often kernels were used for layers and ranks, over captures that are pretended."""
    found: Counter[str] = Counter()

    def counted(name: str) -> Callable:
        real = getattr(kernels, name)

        def call(*arguments: object) -> Tensor:
            found[name] += 1
            return real(*arguments)

        return call

    for name in ("run_layers", "rank"):
        monkeypatch.setattr(kernels, name, counted(name))
    monkeypatch.setattr(fused, "is_joined", lambda config, device: config.is_parallel)
    if not IS_COMPILED:  # each program of the interpreter takes milliseconds
        monkeypatch.setattr(fused, "gelu", gelu_of_a_part)
        pretend_capture(monkeypatch)
        monkeypatch.setattr(kernels, "PROGRAMS", 3)
        monkeypatch.setattr(kernels, "COLUMNS", 256)
    return found


def gelu_of_a_part(x: Tensor, approximate: str, out: Tensor) -> None:
    """Of a joined product: on a CPU there is none, so fused.gelu takes only a tensor of its own."""
    out.copy_(F.gelu(x, approximate=approximate))


def build(tensors: dict[str, Tensor], config: Config, dtype: torch.dtype) -> FastGPTNeoX:
    """A model where the kernels run, its passes of shapes that are captured."""
    tensors = {name: tensor.to(DEVICE, dtype) for name, tensor in tensors.items()}
    model = FastGPTNeoX.from_tensors(config, tensors)
    fix_shapes(model, has_graphs=True)
    return model


def run_trees(model: FastGPTNeoX, n_rows: int, has_kernels: bool) -> tuple[Tensor, Tensor]:
    """The logits of two trees of one shape over a prompt, and the cache that the second leaves."""
    model.pool.has_kernels = has_kernels
    rng = random.Random(0)
    prompt = [rng.randrange(90) for _ in range(40)]
    cache = prefilled(model, prompt, 60, Use(n_rows, n_rows, ranking=Ranking(2)))
    capture(model, cache, 10)
    found = torch.cat([run_tree(model, cache, random_tree(rng, n_rows)) for _ in range(2)])
    return found, cache.kv[:, :, :, : 40 + n_rows].clone()


def assert_alike(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    """Up to what roundings of many layers add up to, in shares of the largest."""
    bound = 2 * BOUNDS[dtype] * float(theirs.abs().max())
    assert float((ours.float() - theirs.float()).abs().max()) < bound


CHANGES = [
    (torch.float32, {"intermediate_size": 62, "activation": "gelu_new"}),
    (torch.float16, {"rotary_fraction": 1.0}),
    (torch.bfloat16, {"has_attention_bias": False}),
]


@torch.inference_mode()
@pytest.mark.parametrize(("dtype", "changes"), CHANGES, ids=str)
def test_a_whole_pass(dtype: torch.dtype, changes: dict[str, object], calls: Counter[str]) -> None:
    config = random_config(**changes)
    model = build(random_tensors(config, 3), config, dtype)
    expected = run_trees(model, 4, False)
    assert not calls, "off unless asked for"
    for ours, theirs in zip(run_trees(model, 4, True), expected, strict=True):
        assert_alike(ours, theirs, dtype)
    assert calls["run_layers"] >= 2 and calls["rank"] >= 2


@torch.inference_mode()
def test_rows_that_overflow_are_undefined_and_no_others(calls: Counter[str]) -> None:
    """Values that float16 cannot hold, in a layer whose way back makes them small again."""
    config = random_config()
    tensors = random_tensors(config, 3)
    layer = "gpt_neox.layers.1.attention."
    tensors[layer + "query_key_value.weight"].view(2, 3, 16, 32)[:, 2] *= 2.1e4
    tensors[layer + "dense.weight"] /= 2.1e4
    model = build(tensors, config, torch.float16)
    (expected, _), (ours, _) = run_trees(model, 4, False), run_trees(model, 4, True)
    is_lost = expected.isnan().any(1)
    assert torch.equal(ours.isnan().any(1), is_lost) and 0 < is_lost.sum() < len(ours)
    assert_alike(ours[~is_lost], expected[~is_lost], torch.float16)


def test_the_text_is_the_one_that_torch_writes(calls: Counter[str]) -> None:
    """Of a draft and a target that differ; a strict pass is computed as ever."""
    config = random_config()
    tensors, others = random_tensors(config, 5), random_tensors(config, 6)
    near = {name: tensor + 0.06 * others[name] for name, tensor in tensors.items()}
    target, draft = (build(weights, config, torch.float32) for weights in (tensors, near))
    target.pool.has_graphs = draft.pool.has_graphs = IS_COMPILED
    expected = token_ids(generate(target, None, PROMPT, Alone(), 9))
    assert not calls
    target.pool.has_kernels = draft.pool.has_kernels = True
    assert token_ids(generate(target, draft, PROMPT, Chain(K=2), 9)) == expected
    assert calls["run_layers"] and calls["rank"]
    calls.clear()
    list(generate(target, None, PROMPT, Alone(), 3, strict=True))
    assert not calls


# What the interpreter cannot tell: that a compiler takes them.


def compile_launches(capability: int, dtype: torch.dtype) -> None:
    """Compile each launch of a pass for a GPU of this capability, in place of launching it."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction, mangle_type

    compiled = set()

    def run(
        self: JITFunction, *arguments: object, grid: tuple, warmup: bool, **options: int
    ) -> None:
        values = dict(zip(self.arg_names, arguments, strict=True))
        constants = {p.name for p in self.params if p.is_constexpr or values[p.name] is None}
        kinds = {n: "constexpr" if n in constants else mangle_type(v) for n, v in values.items()}
        source = ASTSource(self, kinds, {name: values[name] for name in constants})
        triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        compiled.add(self.__name__)

    JITFunction.run = run
    past = drawn(0, 2, 2, 512, 80, dtype=dtype)
    x, weight = drawn(0, 3, 96, dtype=dtype), drawn(0, 96, dtype=dtype)
    kernels.add_norm(x, None, 1e-5)
    kernels.add_norm(x, x, 1e-5, weight, weight)
    inner, turns = drawn(0, 3, 3 * 160 + 640, dtype=dtype), drawn(0, 3, 10).to(torch.complex64)
    for approximate in ("none", "tanh"):
        kernels.spread(inner, turns, torch.arange(3), past, approximate, 0.0)
    kernels.attend(inner, past, torch.ones(3, 512, dtype=torch.bool))
    kernels.rank(drawn(0, 3, 5000), 3, True)
    print(*sorted(compiled))


@pytest.mark.parametrize(("capability", "dtype"), [(80, "bfloat16"), (90, "float16")])
def test_a_compiler_takes_every_launch(capability: int, dtype: str, tmp_path: Path) -> None:
    """For GPUs that need not be there; a branch that ends in two types is an error to it alone."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, __file__, str(capability), dtype]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == [
        "_add_norm",
        "_attend",
        "_choose",
        "_find",
        "_merge",
        "_spread",
    ], done.stderr[-2000:]


if __name__ == "__main__":
    compile_launches(int(sys.argv[1]), getattr(torch, sys.argv[2]))

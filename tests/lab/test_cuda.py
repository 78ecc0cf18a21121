"""Tests that need a GPU: capture, replay, half precision, and attention masks.

They are skipped without one. Other tests run the same passes eagerly, and with a pretended capture.
"""

import pytest
import torch
from fast import append, generate
from small import TINY, assert_close, prefilled, random_config, random_tensors
from tokenizers import Tokenizer

from draft_tree import DynaTree
from dynatree_lab.engine.masks import Mask
from dynatree_lab.engine.model import FastGPTNeoX
from dynatree_lab.engine.streamed import Budget, load_streamed
from dynatree_lab.methods import METHODS
from dynatree_lab.methods.static import PaddedAutoregressive
from dynatree_lab.metrics import token_ids

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("default"),  # a driver may warn
]
TEXT = "The harbour lay quiet under the morning fog, and the boats that had gone out at dawn"
Pair = tuple[FastGPTNeoX, FastGPTNeoX, list[int]]  # target, draft and a prompt


@pytest.fixture(scope="module")
def pair() -> Pair:
    target = FastGPTNeoX.from_pretrained(TINY / "target", "cuda")
    draft = FastGPTNeoX.from_pretrained(TINY / "draft", "cuda")
    tokenizer = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))
    return target, draft, tokenizer.encode(TEXT).ids


@pytest.mark.parametrize("method", METHODS)
def test_replays_write_what_eager_ar_writes(method: str, pair: Pair) -> None:
    """Compare texts across two cache lengths, so that more than one set of graphs is used."""
    target, draft, prompt = pair
    prompt = (prompt * 20)[:235]
    settings = METHODS[method]()
    expected = token_ids(generate(target, None, prompt, PaddedAutoregressive(), 40, graphs=False))
    eager = generate(target, draft, prompt, settings, 40, graphs=False)
    assert token_ids(eager) == expected
    assert token_ids(generate(target, draft, prompt, settings, 40)) == expected
    n_graphs = target.n_graphs, draft.n_graphs
    assert n_graphs[0] > 0, "captured"
    assert token_ids(generate(target, draft, prompt, settings, 40)) == expected
    assert n_graphs == (target.n_graphs, draft.n_graphs), "captured once"


def test_the_text_is_the_one_the_cpu_writes(pair: Pair) -> None:
    target, draft, prompt = pair
    on_cpu = FastGPTNeoX.from_pretrained(TINY / "target")
    expected = token_ids(generate(on_cpu, None, prompt, PaddedAutoregressive(), 30))
    assert token_ids(generate(target, draft, prompt, DynaTree(), 30)) == expected


@pytest.mark.parametrize("n_resident", [0, 2, 6])
def test_a_streamed_target_computes_the_same_bits(
    n_resident: int, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare logits with those of the model in memory, over trees and single rows."""
    monkeypatch.setattr(Budget, "n_resident", lambda *_: n_resident)
    target, draft, prompt = pair
    streamed = load_streamed(TINY / "target", target.device, target.dtype, budget=0)
    found = []
    for model in (target, streamed):
        logits: list[torch.Tensor] = []
        options = {"graphs": model is streamed, "inspect": logits.append}
        for settings in (DynaTree(), PaddedAutoregressive()):
            list(generate(model, draft, prompt, settings, 20, **options))
        found.append(torch.cat(logits).cpu())
    assert torch.equal(*found)
    assert streamed.n_graphs == 0, "passes are not captured"
    assert len(streamed.layers.buffers) == (0 if n_resident == 6 else 2)


@pytest.mark.parametrize("intermediate_size", [61, 63])
def test_an_odd_width_is_padded(intermediate_size: int) -> None:
    """Compare with the CPU. A row of the fused linear layer then has an odd length, and is padded.
    The rotary embedding takes pairs of a row, and the attention kernel reads 16 bytes at a time."""
    config = random_config(intermediate_size=intermediate_size)
    tensors = random_tensors(config, 3)
    on_cuda = {name: tensor.cuda() for name, tensor in tensors.items()}
    found = [
        token_ids(generate(model, None, [5, 7], PaddedAutoregressive(), 8))
        for model in (FastGPTNeoX.from_tensors(config, weights) for weights in (tensors, on_cuda))
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("n", [1, 8, 60, 128])
def test_a_replay_gives_the_eager_logits(n: int) -> None:
    config = random_config(max_position_embeddings=600)
    model = FastGPTNeoX.from_tensors(
        config, {name: t.cuda() for name, t in random_tensors(config, 3).items()}
    )
    prefix = [i % 90 for i in range(240)]
    found = []
    for has_graphs in (False, True):
        cache = prefilled(model, prefix, 400)
        if has_graphs:
            model.capture(cache, 240)
        logits = append(model, prefix[:n], cache).clone()
        found.append((logits, cache.kv[:, :, :, : cache.length].clone()))
    for eager, replayed in zip(*found, strict=True):
        assert_close(replayed, eager)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [1, 7, 128])
def test_attention_obeys_an_arbitrary_mask(n: int, dtype: torch.dtype) -> None:
    """Compare with float64, with Pythia-2.8B's heads over 2,304 slots. Some backends have been
    silently wrong if the mask has another dtype than the queries."""
    generator = torch.Generator("cuda").manual_seed(n)
    sizes = (n, 2304, 2304)
    q, k, v = (
        torch.randn(32, size, 80, generator=generator, device="cuda").to(dtype) for size in sizes
    )
    mask = torch.rand(n, 2304, generator=generator, device="cuda") < 0.3
    mask[:, 0] = True
    mask[:, 1500:] = False  # like the slots that padding adds
    bias = q.new_full((n, 2304), -torch.inf).masked_fill_(mask, 0.0)
    scores = q.double() @ k.double().transpose(1, 2) * 80**-0.5 + bias.double()
    expected = scores.softmax(-1) @ v.double()
    error = (Mask(bias).attend(q, k, v).double() - expected).abs().max()
    assert error < 0.02 * expected.abs().max()


@pytest.mark.parametrize("has_graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_strict_logits_are_ars_bit_for_bit(
    dtype: torch.dtype, has_graphs: bool, pair: Pair
) -> None:
    """Compare across two cache lengths, also for a text that is run again with its old graphs."""
    prompt = (pair[2] * 20)[:235]
    target = FastGPTNeoX.from_pretrained(TINY / "target", "cuda", dtype)
    draft = FastGPTNeoX.from_pretrained(TINY / "draft", "cuda", dtype)
    written = []
    for settings in (DynaTree(), PaddedAutoregressive(rows=64), DynaTree()):
        logits = []
        options = {"strict": True, "graphs": has_graphs, "inspect": logits.append}
        ids = token_ids(generate(target, draft, prompt, settings, 24, **options))
        written.append((ids, torch.cat(logits).cpu()))
    (ids, logits), (ar_ids, ar_logits), (again, again_logits) = written
    assert ids == ar_ids == again
    assert torch.equal(logits, ar_logits) and torch.equal(again_logits, ar_logits)
    assert (target.n_graphs > 0) == has_graphs

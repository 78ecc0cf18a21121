"""What only a GPU can tell: capture, replay, half precision there, and that attention obeys masks.

Skipped without one; the same passes run eagerly, and with a capture that is only pretended, in the
other tests.
"""

import pytest
import torch
from conftest import TINY, assert_close, random_config, random_tensors
from tokenizers import Tokenizer

from cli.metrics import token_ids
from draft_tree import DynaTree, Settings
from dynatree import capture, generate
from engine.sampling import Sampling
from gpt_neox import GPTNeoX, attend
from methods import METHODS
from methods.static import Alone

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("default"),  # of a driver's, say
]
TEXT = "The harbour lay quiet under the morning fog, and the boats that had gone out at dawn"


@pytest.fixture(scope="module")
def pair() -> tuple[GPTNeoX, GPTNeoX, list[int]]:
    target, draft = (GPTNeoX.from_pretrained(TINY / r, "cuda") for r in ("target", "draft"))
    tokenizer = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))
    return target, draft, tokenizer.encode(TEXT).ids


def use_graphs(has_graphs: bool, *models: GPTNeoX) -> None:
    for model in models:
        model.pool.has_graphs = has_graphs


@pytest.mark.parametrize("method", METHODS)
def test_replays_write_what_eager_ar_writes(method: str, pair: tuple) -> None:
    """Across two cache lengths, so that more than one set of graphs is used."""
    target, draft, prompt = pair
    use_graphs(False, target, draft)
    expected = token_ids(generate(target, None, prompt, Alone(), 300))
    assert token_ids(generate(target, draft, prompt, METHODS[method](), 40)) == expected[:40]
    use_graphs(True, target, draft)
    assert token_ids(generate(target, draft, prompt, METHODS[method](), 300)) == expected
    n_graphs = target.pool.n_graphs, draft.pool.n_graphs
    assert token_ids(generate(target, draft, prompt, METHODS[method](), 300)) == expected
    assert (target.pool.n_graphs, draft.pool.n_graphs) == n_graphs and n_graphs[0], "captured once"


def test_the_text_is_the_one_the_cpu_writes(pair: tuple) -> None:
    target, draft, prompt = pair
    expected = token_ids(
        generate(GPTNeoX.from_pretrained(TINY / "target"), None, prompt, Alone(), 30)
    )
    assert token_ids(generate(target, draft, prompt, DynaTree(), 30)) == expected


@pytest.mark.parametrize("commit", ["keep", "rebuild"])
def test_two_generations_at_once(commit: str, pair: tuple) -> None:
    """Each has its own cache, so neither replays over the other's."""
    target, draft, prompt = pair
    alone = token_ids(generate(target, draft, prompt, DynaTree(), 60, commit=commit))
    first = generate(target, draft, prompt, DynaTree(), 60, commit=commit)
    second = generate(target, draft, prompt[:5], DynaTree(), 60, commit=commit)
    expected = token_ids(generate(target, draft, prompt[:5], DynaTree(), 60, commit=commit))
    steps, others = [next(first)], [next(second)]
    for step, other in zip(first, second, strict=False):
        steps.append(step)
        others.append(other)
    ours, theirs = token_ids(steps), token_ids(others)
    assert ours == alone[: len(ours)] and theirs == expected[: len(theirs)]


@pytest.mark.parametrize("n", [1, 3, 8, 60, 128])
def test_a_replay_gives_the_eager_logits(n: int) -> None:
    config = random_config(max_positions=600)
    model = GPTNeoX(config, {name: t.cuda() for name, t in random_tensors(config, 3).items()})
    prefix = [i % 90 for i in range(240)]
    results = []
    for has_graphs in (False, True):
        use_graphs(has_graphs, model)
        cache = model.new_cache(400)
        model.prefill(prefix, cache)
        capture(model, cache, 240)
        results.append(model.append([i % 90 for i in range(n)], cache).clone())
        results.append(cache.kv[:, :, :, : cache.length].clone())
    assert_close(results[2], results[0])
    assert_close(results[3], results[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 7, 32, 128])
def test_attention_obeys_an_arbitrary_mask(n: int, dtype: torch.dtype) -> None:
    """Pythia-2.8B's heads over 2,304 slots. A mask of another dtype than the queries' has been
    silently wrong on some backends, so the error is held against exact arithmetic."""
    generator = torch.Generator("cuda").manual_seed(n)
    q, k, v = (
        torch.randn(1, 32, size, 80, generator=generator, device="cuda").to(dtype)
        for size in (n, 2304, 2304)
    )
    seen = torch.rand(n, 2304, generator=generator, device="cuda") < 0.3
    seen[:, 0] = True
    seen[:, 1500:] = False  # as the slots that padding adds
    bias = q.new_full((n, 2304), -torch.inf).masked_fill_(seen, 0.0)
    exact = [t.double() for t in (q, k, v)]
    scores = exact[0] @ exact[1].transpose(2, 3) * 80**-0.5 + bias.double()
    expected = (scores.softmax(-1) @ exact[2])[0]
    error = (attend(q, k, v, bias).double() - expected).abs().max()
    assert error < 0.02 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("settings", [Alone(), DynaTree()])
def test_half_precision_stays_close(settings: Settings, dtype: torch.dtype, pair: tuple) -> None:
    """No claim of equal ids: that the first ones are shows that nothing is broken."""
    target, draft, prompt = pair
    expected = token_ids(generate(target, draft, prompt, settings, 8))
    half = [GPTNeoX.from_pretrained(TINY / role, "cuda", dtype) for role in ("target", "draft")]
    assert token_ids(generate(*half, prompt, settings, 8))[:4] == expected[:4]


def test_a_seed_decides_a_sampled_text(pair: tuple) -> None:
    target, draft, prompt = pair
    sampling = Sampling(0.8, 0.95, seed=3)
    first, again = (
        token_ids(generate(target, draft, prompt, DynaTree(), 40, sampling=sampling))
        for _ in range(2)
    )
    assert first == again

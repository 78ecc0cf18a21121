"""Tests of the log-probabilities of written tokens: they are the target's, whatever the method."""

from pathlib import Path

import pytest
import torch
from fast import fix_shapes, generate, noisy_pair
from safetensors.torch import load_file
from small import GOLDEN, TINY, Captured, error_line

import dynatree_lab as lab
from dynatree_lab.cli.main import main
from dynatree_lab.engine.model import FastGPTNeoX
from dynatree_lab.engine.passes import Window
from dynatree_lab.methods import METHODS
from dynatree_lab.methods.sampler import Sampling
from dynatree_lab.methods.static import Fixed, PaddedAutoregressive
from dynatree_lab.metrics import token_ids

PROMPT = [5, 7, 9, 5, 7]
OPTIONS = [{}, {"commit": "rebuild"}, {"sampling": Sampling(0.7, 0.9, seed=3, top_k=20)}]
WORDS = ["--prompt", "The ship sailed at dawn", "--max-new-tokens", "12"]


@pytest.mark.parametrize("options", OPTIONS, ids=["greedy", "rebuilt", "sampled"])
@pytest.mark.parametrize("method", METHODS)
def test_they_are_those_of_one_pass_over_the_text(method: str, options: dict) -> None:
    """Compare with a prefill of the whole text, at temperature 1 and without top-p and top-k."""
    target, draft = noisy_pair()
    steps = list(generate(target, draft, PROMPT, METHODS[method](), 24, logprobs=3, **options))
    ids, found = token_ids(steps), [each for step in steps for each in step.logprobs]
    text = torch.tensor(PROMPT + ids)
    with torch.inference_mode():
        logits = target.forward(text, torch.arange(len(text)), target.new_cache(len(text)))
    expected = logits[len(PROMPT) - 1 : -1].log_softmax(-1)
    assert [each.id for each in found] == ids
    own = torch.tensor([each.logprob for each in found])
    torch.testing.assert_close(own, expected[range(len(ids)), ids], atol=1e-4, rtol=1e-4)
    top = expected.topk(3)
    values = torch.tensor([[logprob for _, logprob in each.top] for each in found])
    torch.testing.assert_close(values, top.values, atol=1e-4, rtol=1e-4)
    assert [[i for i, _ in each.top] for each in found] == top.indices.tolist()


def test_a_rebuilt_commit_overwrites_none_of_them() -> None:
    """Check passes of fixed shapes, which share one buffer of logits, with wide trees."""
    written = []
    for commit in ("keep", "rebuild"):
        models = noisy_pair()
        fix_shapes(*models)
        settings = Fixed(D=4, B=3, tau=0.0)
        steps = generate(*models, PROMPT, settings, 24, logprobs=0, commit=commit, graphs=False)
        written.append([each for step in steps for each in step.logprobs])
    assert [each.id for each in written[0]] == [each.id for each in written[1]]
    own = [torch.tensor([each.logprob for each in text]) for text in written]
    torch.testing.assert_close(*own, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [{"strict": True}, {"strict": True, "window": Window(16)}])
def test_strict_ones_are_ars_bit_for_bit(options: dict) -> None:
    target, draft = noisy_pair()
    written = []
    for settings in (Fixed(D=3, B=2, tau=0.0), PaddedAutoregressive(rows=16)):
        steps = generate(target, draft, PROMPT, settings, 24, logprobs=2, **options)
        written.append([each for step in steps for each in step.logprobs])
    assert written[0] == written[1] and len(written[0]) == 24


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda folder: folder.name)
def test_they_are_those_of_transformers(folder: Path) -> None:
    """Compare with golden logits, which transformers has computed."""
    data = load_file(folder / "golden.safetensors")
    prompt, expected = data["input_ids"].tolist(), data["logits"][-1].log_softmax(-1)
    target = FastGPTNeoX.from_pretrained(folder)
    (step,) = generate(target, None, prompt, METHODS["ar"](), 1, logprobs=4)
    (found,) = step.logprobs
    assert found.top[0] == (found.id, found.logprob) and found.id == expected.argmax()
    ids, logprobs = zip(*found.top, strict=True)
    torch.testing.assert_close(torch.tensor(logprobs), expected[list(ids)], atol=1e-4, rtol=1e-4)


def test_the_command_line_and_python_have_them(capsys: Captured) -> None:
    """Check the keys, an EAGLE head and a streamed target, and that there are none without the
    option."""
    pair = lab.load_pair(TINY / "target", TINY / "eagle", target_memory="30MB")
    result = lab.write_text(pair, WORDS[1], max_new_tokens=12, logprobs=1)
    assert [each.id for each in result.logprobs] == result.ids
    (first,) = result.data["logprobs"][0]["top"]
    expected = result.logprobs[0].top[0]
    assert (first["id"], first["logprob"]) == expected and isinstance(first["token"], str)
    assert "logprobs" not in lab.write_text(pair, WORDS[1], max_new_tokens=2).data
    assert main([*WORDS, "--json", "--logprobs"]) == 0
    assert '"top": []' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--logprobs"], "--logprobs needs --json or --trace"),
        (["--logprobs", "-1", "--json"], "--logprobs is -1, it must be at least 0"),
    ],
)
def test_mistakes(words: list[str], message: str, capsys: Captured) -> None:
    with pytest.raises(ValueError, match="logprobs is -1, it must be at least 0"):
        list(generate(*noisy_pair(), PROMPT, METHODS["ar"](), 2, logprobs=-1))
    assert message in error_line(capsys, main, WORDS + words)

"""Tests that an EAGLE head runs as dynatree_lab/methods/eagle.py defines it, and of its checkpoint.

test_exactness.py tests the texts over a head, of all methods and in all modes.

    python -m pytest tests/lab/test_eagle.py
"""

import contextlib
import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from every_text import PLAIN
from fast import (
    ReferenceHead,
    fix_shapes,
    generate,
    make_head,
    predict_states,
    pretend_capture,
    random_model,
)
from safetensors.torch import load_file, save_file
from small import TINY, Captured, error_line, random_config, random_tensors
from torch import Tensor
from trees import path_to

import dynatree
from draft_tree import DynaTree, Settings, Tree
from dynatree_lab.cli.main import main
from dynatree_lab.engine.checkpoint import CheckpointError
from dynatree_lab.engine.eagle_head import FastHead, load_head
from dynatree_lab.engine.model import FastGPTNeoX
from dynatree_lab.engine.passes import Window
from dynatree_lab.enumeration import distribution_difference, tiny_model
from dynatree_lab.methods.eagle import EagleDrafter, EagleHead
from dynatree_lab.methods.sampler import Sampling
from dynatree_lab.methods.static import Fixed, PaddedAutoregressive, SpecInfer
from dynatree_lab.metrics import token_ids
from gpt_neox import GPTNeoX, KVCache

PROMPT = [3, 14, 15, 92, 65, 35, 89]
CPU = torch.device("cpu")
TREE = Fixed(D=3, B=2, tau=0.0)
HEAD, TARGET = TINY / "eagle", TINY / "target"


def random_pair(
    kind: type[GPTNeoX] = FastGPTNeoX, seed: int = 3, scale: float = 0.3, **changes: object
) -> tuple[GPTNeoX, EagleHead]:
    """Return a random target and a head for it. scale: of the noise in the head's fc. `changes`
    override fields of the config."""
    head_kind = FastHead if kind is FastGPTNeoX else ReferenceHead
    tensors = random_tensors(random_config(**changes), seed)
    return random_model(seed, kind=kind, **changes), make_head(
        tensors, seed, head_kind, scale, **changes
    )


def ar_ids(target: GPTNeoX, n: int, prompt: Sequence[int] = PROMPT, **options: object) -> list[int]:
    return token_ids(generate(target, None, prompt, PaddedAutoregressive(), n, **options))


def target_states(target: GPTNeoX, tokens: list[int]) -> Tensor:
    positions = torch.arange(len(tokens))
    return target.hidden(torch.tensor(tokens), positions, target.new_cache(len(tokens)))


def path_logprob(head: ReferenceHead, text: list[int], path: list[int], states: Tensor) -> float:
    """Return the head's log-probability of a path below the text's last token, by plain runs: the
    text on the target's states [n, hidden], then the path's tokens on the head's own states."""
    found = 0.0
    for i, token in enumerate(path):
        predicted = predict_states(head, text + path[:i], states)[-1:]
        states = torch.cat([states, predicted])
        found += head.logits(predicted).log_softmax(-1)[0, token].item()
    return found


@pytest.mark.parametrize("has_fixed_shapes", [False, True], ids=["tight", "fixed"])
def test_a_nodes_probability_is_that_of_its_path(
    has_fixed_shapes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare each row with plain runs of its path. This also fails if the tokens of a pass follow
    the states of other tokens, which would not change the text. For that, some accepted rows must
    not be the first ones of their tree."""
    pretend_capture(monkeypatch)
    target, head = random_pair(seed=5)
    if has_fixed_shapes:
        fix_shapes(target, head)
    reference, plain = random_pair(GPTNeoX, seed=5)
    text, n_moved, n_deep = list(PROMPT), 0, 0
    settings, sampling = Fixed(D=3, B=4, tau=0.0, N_max=30), Sampling(draft_temperature=1.0)
    for step in generate(target, head, PROMPT, settings, 20, sampling=sampling):
        tree = step.tree
        states = torch.cat([torch.zeros(1, 32), target_states(reference, text[:-1])])
        for row in range(1, len(tree)):
            path = [tree.tokens[each] for each in path_to(tree, row)[1:]]
            expected = path_logprob(plain, text, path, states)
            assert tree.path_logprobs[row] == pytest.approx(expected, abs=1e-3)
            n_deep += tree.depths[row] == 3
        n_moved += step.path != list(range(len(step.path)))
        text += step.tokens
    assert n_moved > 1 and n_deep > 50


def test_every_token_follows_one_state() -> None:
    """Check that each pass uses up the states, and that one waits for every uncached token."""
    target, head = random_pair(GPTNeoX)
    drafter = EagleDrafter(dynatree.ModelDrafter(head), head)
    for _ in generate(target, None, PROMPT, TREE, 20, drafter=drafter):
        assert len(drafter.drafter.cache.next_states) == 0
        uncached = drafter.drafter.text[drafter.drafter.n_cached :]
        assert sum(map(len, drafter.states)) == len(uncached)


@pytest.mark.parametrize(
    ("n_prompt", "options"),
    [(1, {}), (2, {"commit": "rebuild"}), (600, {"window": Window(700, 4)}), (1100, {})],
)
def test_prompts_of_several_passes(
    n_prompt: int, options: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check texts after prompts of one token, and of more than a prefill's chunk."""
    target, head = random_pair(max_position_embeddings=2048)
    caches = []
    new_cache = head.new_cache
    monkeypatch.setattr(head, "new_cache", lambda *a: caches.append(new_cache(*a)) or caches[-1])
    prompt = [(7 * i) % 96 for i in range(n_prompt)]
    steps = list(generate(target, head, prompt, TREE, 20, **options))
    assert token_ids(steps) == ar_ids(target, 20, prompt, **options)
    assert len(caches[0].next_states) == 0 and steps[1].draft_rows[0] == n_prompt + 1


HALF = {name: t.half() for name, t in random_tensors(random_config(), 3).items()}
HEADS = {  # that are no good, or have another dtype
    "large": lambda: random_pair(scale=1e30)[1],
    "nan": lambda: random_pair(scale=float("nan"))[1],
    "of another target": lambda: random_pair(seed=4)[1],
    "float16": lambda: make_head(HALF, 3),
}


@pytest.mark.parametrize("name", HEADS)
def test_no_head_changes_the_text(name: str) -> None:
    target = random_model(3)
    assert token_ids(generate(target, HEADS[name](), PROMPT, TREE, 24)) == ar_ids(target, 24)


def test_a_drafter_over_a_head_is_like_the_head() -> None:
    target, head = random_pair()
    by_head = [step.path for step in generate(target, head, PROMPT, TREE, 24)]
    drafter = dynatree.ModelDrafter(random_pair()[1])
    steps = generate(target, None, PROMPT, TREE, 24, drafter=drafter)
    assert [step.path for step in steps] == by_head


@pytest.mark.parametrize("kind", [GPTNeoX, FastGPTNeoX], ids=["reference", "fast"])
def test_generations_may_share_a_head(kind: type[GPTNeoX]) -> None:
    """Draft each level of two texts at one time, as two threads may. Their states once belonged to
    the head, so each text got some of the other one's."""
    target, head = random_pair(kind)
    prompts = [3, 14, 15], [92, 65]
    alone = [[s.tree for s in generate(target, head, p, TREE, 24)] for p in prompts]
    barrier = threading.Barrier(2)
    take_states = head.take_states

    def wait_and_take(cache: KVCache, n: int) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):  # one text has ended
            barrier.wait(timeout=5)
        take_states(cache, n)

    def write(prompt: list[int]) -> list[Tree | None]:
        torch.set_num_threads(1)
        try:
            return [step.tree for step in generate(target, head, prompt, TREE, 24)]
        finally:
            barrier.abort()

    head.take_states = wait_and_take
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(write, prompts)) == alone


@pytest.mark.parametrize("kind", [GPTNeoX, FastGPTNeoX], ids=["reference", "fast"])
def test_a_head_without_its_targets_states_is_refused(kind: type[GPTNeoX]) -> None:
    """Check a head as the target, in the core's loop, and with a target of another size."""
    target, head = random_pair(kind)
    drafter, rule = dynatree.ModelDrafter(head), TREE.make_rule()
    larger = random_model(3, kind=kind, hidden_size=64)
    for steps, message in [
        (
            generate(head, head, PROMPT, TREE, 5),
            "use it as the draft of dynatree_lab.generation.generate",
        ),
        (dynatree.generate(target, drafter, PROMPT, rule, 5), "use it as the draft of"),
        (generate(larger, head, PROMPT, TREE, 5), "hidden_size 32, this one has 64"),
    ]:
        with pytest.raises(ValueError, match=message):
            list(steps)


@pytest.mark.parametrize("settings", [SpecInfer("2:1"), DynaTree(N_max=4)])
def test_the_distribution_of_sampled_text_is_the_targets(settings: Settings) -> None:
    """Enumerate all random choices over a head on a tiny target."""
    target = tiny_model(1, 3)
    head = make_head(target.state_dict(), 0, ReferenceHead, **vars(target.config))
    assert distribution_difference(settings, PLAIN, models=(target, head)) < 1e-7


# Checkpoints.


@pytest.fixture
def head_folder(tmp_path: Path) -> Path:
    """Return a copy of the embedded head's folder, to be changed."""
    folder = tmp_path / "head"
    folder.mkdir()
    for file in HEAD.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 640}, "whose hidden_size is 640, while "),
        ({"rotary_pct": 0.5}, "whose rotary_pct is 0.5, while "),
        ({"target_digest": "0" * 64}, "whose weights differ from those of"),
        ({"target": 7, "target_digest": 7}, "is a head of 7, whose weights differ from"),
        ({"hidden_size": "big"}, "head: hidden_size is 'big', which GPT-NeoX cannot have"),
        ({"vocab_size": ...}, "config.json has no vocab_size"),
        ({"target": ...}, "config.json has no target"),
        ({"target_digest": ...}, "config.json has no target_digest"),
    ],
)
def test_a_config_of_another_head_is_refused(
    changes: dict, message: str, head_folder: Path, capsys: Captured
) -> None:
    """Check changed keys, and missing ones (...)."""
    file = head_folder / "config.json"
    raw = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in raw.items() if value is not ...}))
    options = ["--target", str(TARGET), "--draft", str(head_folder), "--prompt", "a"]
    assert message in error_line(capsys, main, options)


def test_damaged_weights_are_refused(head_folder: Path) -> None:
    file = head_folder / "model.safetensors"
    tensors = load_file(file)
    cases = {"has no tensor fc.bias": {n: t for n, t in tensors.items() if n != "fc.bias"}}
    cases["fc.bias is not finite"] = tensors | {"fc.bias": tensors["fc.bias"] * torch.inf}
    cases["fc.bias"] = tensors | {"fc.bias": torch.zeros(7)}
    for message, changed in cases.items():
        save_file(changed, file)
        with pytest.raises(CheckpointError, match=message):
            load_head(head_folder, TARGET, CPU, torch.float32)
    save_file(tensors | {"fc.extra": tensors["fc.bias"].clone()}, file)
    with pytest.warns(UserWarning, match="tensors that nothing uses: fc.extra"):
        load_head(head_folder, TARGET, CPU, torch.float32)


def test_the_embedded_head_is_of_use(capsys: Captured) -> None:
    """Check the head that ships with the project."""
    options = ["--target", str(TARGET), "--draft", str(HEAD), "--prompt", "The ship", "--json"]
    options += ["--max-new-tokens", "60", "--compare", "--method", "linear", "--set", "K=4"]
    assert main(options) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["compare"]["exact"] and report["metrics"]["tokens_per_iter"] > 2

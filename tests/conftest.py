"""Fixtures and helpers of the tests: tiny random GPT-NeoX models, trees and checkpoints, seeded."""

import functools
import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field, asdict, fields, replace
from pathlib import Path

import pytest
import tape
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import draft_tree
import dynatree_lab.engine.generate
from draft_tree import MAX_ROWS, Candidates, Rule, Settings, Tree
from dynatree_lab.engine import cuda_graphs
from dynatree_lab.engine.checkpoint import DTYPES, INDEX, SINGLE, published_shapes
from dynatree_lab.engine.eagle_head import FastHead
from dynatree_lab.engine.generate import Step
from dynatree_lab.engine.generation_config import GenerationConfig
from dynatree_lab.engine.model import FastCache, FastGPTNeoX
from dynatree_lab.engine.passes import PassConfig
from dynatree_lab.methods import METHODS
from dynatree_lab.methods.drawn import DrawnRule
from dynatree_lab.methods.eagle import EagleHead, StateTransformer, last_states, with_states
from dynatree_lab.methods.rules import breadth_first
from gpt_neox import Config, GPTNeoX, KVCache
from verify import tree_inputs

if "pretend_cuda" not in sys.modules:
    collect_ignore = ["pretend_cuda"]  # tests on a pretended device: python tests/pretend_cuda

# The workers and programs that tests start share the cores. A thread that spins while it waits for
# another one would keep that one from running
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

ROOT = Path(__file__).parent.parent
TINY = ROOT / "models" / "tiny"
GOLDEN = sorted(file.parent for file in (ROOT / "tests" / "golden").glob("*/config.json"))
Captured = pytest.CaptureFixture[str]


def source_files() -> list[Path]:
    """Return the project's Python files at the top, in tools/ and in its packages, but no tests."""
    lab = ROOT / "dynatree_lab"
    packages = sorted(file.parent for file in lab.glob("*/__init__.py"))
    folders = [ROOT, ROOT / "tools", lab, *packages]
    return [file for folder in folders for file in sorted(folder.glob("*.py"))]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Use one thread. A second one costs a wait in small products, of 30 ms on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide every GPU of the machine, except from tests marked cuda.

    With a GPU, the default device is cuda and the default models are Pythia, which would be fetched
    from the hub. The environment variable hides the GPU from the processes that a test starts.
    """
    if not request.node.get_closest_marker("cuda"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@functools.cache
def load_tiny(load: Callable[..., FastGPTNeoX], *arguments: object) -> FastGPTNeoX:
    """Load an embedded model by FastGPTNeoX.from_pretrained, which takes longer than most tests."""
    return load(FastGPTNeoX, *arguments)


@pytest.fixture(autouse=True)
def load_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the fast models of the embedded pair share their weights on a CPU.

    Each has settings and memory of its own. The reference model is loaded anew, because training
    changes its weights.
    """
    load = FastGPTNeoX.from_pretrained.__func__

    def from_pretrained(
        cls: type[FastGPTNeoX],
        name_or_path: str | Path,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | str = torch.float32,
    ) -> FastGPTNeoX:
        folder = Path(name_or_path).absolute()
        if folder.parent != TINY or str(device) != "cpu" or cls is not FastGPTNeoX:
            return load(cls, name_or_path, device, dtype)
        shared = load_tiny(load, folder, "cpu", DTYPES.get(dtype, dtype))
        model = object.__new__(FastGPTNeoX)
        model.__dict__ |= shared.__dict__ | {"reusable": [], "invariance_results": {}}
        return model

    monkeypatch.setattr(FastGPTNeoX, "from_pretrained", classmethod(from_pretrained))


def pretend_one_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
    """Report one GPU of this compute capability. Nothing can be computed on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Pretended GPU")


def pretend_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record and replay passes of fixed shapes on the CPU, as CUDA graphs do on a GPU."""
    monkeypatch.setattr(cuda_graphs, "capture_graph", tape.record)


class RuleRecorder:
    """Settings that record every rule they make."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.rules: list[Rule] = []

    def make_rule(self) -> Rule:
        rule = self.settings.make_rule()
        self.rules.append(rule)
        return rule


LARGE_TREES = {  # settings that give trees of more than 128 rows
    "specinfer": "widths=6:5:4:2",
    "dynatree": "B_min=2 B_mid=4 B_max=6 tau=0 rho_stop=0 rho_deep=0.001 N_max=300",
    "dyspec": "N=256",
    "graft": "base=fixed:D=4:B=4:tau=0:N_max=256 N=300",
    "beam": "k=12 N_max=400",
    "opttree": "N=200 delta=0",
    "sequoia": "N=700 D_max=12 p=0.5:0.3:0.1:0.05",
}
LARGE_SETTINGS = {
    method: GenerationConfig.parse(method, *words.split()).settings
    for method, words in LARGE_TREES.items()
}


def random_settings(method: str, rng: random.Random) -> Settings:
    """Draw small settings of a method; some switch parts of it off.

    The ranges, options and examples are those of the fields' metadata, so a new method is covered
    by its line in the registry. Raises KeyError if there is no such method.
    """
    kind = METHODS[method]
    for _ in range(1000):
        values = {field.name: random_value(field, rng) for field in fields(kind)}
        try:
            return kind(**values)
        except ValueError as error:  # such as two thresholds out of order: draw again
            refused = error
    raise refused


def random_value(field: Field, rng: random.Random) -> object:
    """Draw the value of one setting, often at an end of its range."""
    if "parse" in field.metadata:
        return rng.choice(field.metadata["examples"])
    low = field.metadata["low"]
    high = field.metadata["high"]
    if field.type is bool:
        return rng.random() < 0.8
    if field.type is float:
        value = rng.choice([low, field.default, 10 ** rng.uniform(-3, 0)])
        return min(max(value, low), high)
    if high == MAX_ROWS:  # a limit on the rows of a tree
        n_rows = rng.choice([1, 2, 3, 5, 8, 13, 32, 64])
        return max(n_rows, low)
    return rng.randint(low, min(low + 5, high))


def top_k(logits: Tensor, k: int) -> Candidates:
    """Return the top-k candidates of each row of logits [n, V]."""
    logprobs, ids = torch.log_softmax(logits, dim=-1).sort(descending=True, stable=True)
    return Candidates(ids.numpy()[:, :k], logprobs.numpy()[:, :k])


def grow(
    rule: Rule, root: int, draft: Callable[..., Candidates], max_depth: int, vocab_size: int = 1000
) -> Tree:
    """Run draft_tree.grow. If the draft has a sampler, it draws its candidates, and the rule is
    wrapped in DrawnRule."""
    if getattr(draft, "sampler", None):
        rule = DrawnRule(rule, draft, None)
    return draft_tree.grow(rule, root, draft, max_depth, vocab_size)


def random_config(**changes: object) -> Config:
    """Return a config of two layers, each with two heads of 16. `changes` override its fields."""
    config = Config(
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        rotary_pct=0.5,
        rotary_emb_base=10000.0,
        eos_ids=(),
    )
    return replace(config, **changes)


def random_tensors(config: Config, seed: int) -> dict[str, Tensor]:
    """Return weights so large that attention matters and greedy text varies."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in published_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            tensors[name] = 1 + 0.1 * noise
        elif "embed" in name:
            tensors[name] = noise
        else:
            tensors[name] = noise * (1.5 * shape[-1] ** -0.5)
    return tensors


def random_model(
    seed: int,
    dtype: torch.dtype = torch.float32,
    kind: type[GPTNeoX] = FastGPTNeoX,
    **changes: object,
) -> GPTNeoX:
    config = random_config(**changes)
    tensors = {name: t.to(dtype) for name, t in random_tensors(config, seed).items()}
    return kind.from_tensors(config, tensors)


def noisy_pair(
    seed: int = 5,
    noise: float = 0.06,
    dtype: torch.dtype = torch.float32,
    kind: type[GPTNeoX] = FastGPTNeoX,
    **changes: object,
) -> tuple[GPTNeoX, GPTNeoX]:
    """Return a target and, as its draft, a noisy copy: it is often accepted and often rejected."""
    config = random_config(**changes)
    tensors, other = random_tensors(config, seed), random_tensors(config, seed + 1)
    noisy = {name: (t + noise * other[name]).to(dtype) for name, t in tensors.items()}
    target = random_model(seed, dtype, kind, **changes)
    return target, kind.from_tensors(config, noisy)


def make_head(
    tensors: dict[str, Tensor],
    seed: int,
    kind: type[EagleHead] = FastHead,
    scale: float = 0.3,
    **changes: object,
) -> EagleHead:
    """Return a head for the target with these weights, which random_config(**changes) describes.

    It runs the target's first layer over the embeddings plus noise. The noise has this standard
    deviation, relative to the embeddings and to the states.
    """
    config = random_config(**changes | {"num_hidden_layers": 1})
    weights = {name: tensors[name].clone() for name in published_shapes(config)}
    head = kind.from_tensors(config, weights)
    n = config.hidden_size
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(n, 2 * n, generator=generator) * scale * n**-0.5
    bias = torch.randn(n, generator=generator) * scale * n**-0.5
    dtype = tensors["embed_out.weight"].dtype
    fc = nn.Linear(2 * n, n, dtype=dtype)
    fc.weight.data, fc.bias.data = (torch.eye(n, 2 * n) + noise).to(dtype), bias.to(dtype)
    head.add_state_input(fc.requires_grad_(False))
    return head


def predict_states(head: EagleHead, tokens: list[int], states: Tensor) -> Tensor:
    """Return the states [n, hidden] that a head predicts at the n tokens of a text, by one pass.
    states: [n, hidden], before each token."""
    cache = head.new_cache(len(tokens))
    cache.next_states = states
    head.prefill(tokens, cache)
    return last_states(cache, len(tokens))


class PlainStateTransformer(StateTransformer):
    """The state input of gpt_neox.Transformer."""

    def written_slots(self, n: int, mask: Tensor) -> Tensor:
        return torch.arange(mask.shape[1] - n, mask.shape[1])


class ReferenceHead(EagleHead, GPTNeoX):
    """A head on the model of gpt_neox.py, whose every pass is a call of `hidden`: the oracle."""

    transformer_class = PlainStateTransformer

    def new_cache(self, capacity: int) -> KVCache:
        cache = super().new_cache(capacity)
        cache.kv = with_states(cache.kv)
        return cache

    def hidden(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | None = None
    ) -> Tensor:
        self.take_states(cache, len(tokens))
        return super().hidden(tokens, positions, cache, mask)


class Stub(GPTNeoX):
    """A reference model whose logits depend only on a row's own token and position."""

    def __init__(self, logits: Callable[[Tensor, Tensor], Tensor], vocab_size: int):
        """logits: maps tokens [n] and positions [n] to logits [n, V]."""
        super().__init__(random_config(vocab_size=vocab_size, num_hidden_layers=1))
        self.logits_of = logits

    def hidden(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | None = None
    ) -> Tensor:
        return self.logits_of(tokens, positions)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


def count_rows(model: GPTNeoX) -> list[int]:
    """Return a list that gets the number of rows of each pass, unless it is replayed."""
    rows: list[int] = []
    model.gpt_neox.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    return rows


GENERATE_ARGUMENTS = ("eos_ids", "drafter", "logprobs", "inspect", "is_recorded", "kept")


def generate(
    target: GPTNeoX,
    draft: GPTNeoX | None,
    prompt: list[int],
    settings: Settings,
    max_new_tokens: int,
    **options: object,
) -> Iterator[Step]:
    """Run the engine's generate. `options`: its arguments and the fields of GenerationConfig."""
    rest = {name: options.pop(name) for name in GENERATE_ARGUMENTS if name in options}
    config = GenerationConfig(settings, **options)
    return dynatree_lab.engine.generate.generate(
        target, draft, prompt, config, max_new_tokens, **rest
    )


def fix_shapes(*models: FastGPTNeoX) -> None:
    """Give passes a few fixed shapes, as on CUDA. After pretend_capture they are replayed."""
    for model in models:
        model.has_fixed_shapes = True


def published_json(config: Config) -> dict[str, object]:
    """Return the content of config.json for a model of this config."""
    raw = asdict(config)
    return {"model_type": "gpt_neox", "eos_token_id": list(raw.pop("eos_ids"))} | raw


def write_checkpoint(folder: Path, config: Config, tensors: dict[str, Tensor]) -> Path:
    """Write a checkpoint without a tokenizer to a folder, and return the folder."""
    (folder / "config.json").write_text(json.dumps(published_json(config)))
    save_file(tensors, folder / SINGLE)
    return folder


def write_shards(folder: Path, config: Config, tensors: dict[str, Tensor]) -> Path:
    """Write a checkpoint as three shards and their index, each layer spread over all of them."""
    write_checkpoint(folder, config, {})
    (folder / SINGLE).unlink()
    weight_map = {}
    for i in range(3):
        names = list(tensors)[i::3]
        save_file({name: tensors[name] for name in names}, folder / f"model-{i}.safetensors")
        weight_map |= dict.fromkeys(names, f"model-{i}.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def override(words: Sequence[str], *later: str) -> list[str]:
    """Return a command line in which the later options replace those of the same names."""
    named = {word.partition("=")[0] for word in later if word.startswith("--")}
    kept, is_replaced = [], False
    for word in words:
        if word.startswith("--"):
            is_replaced = word in named
        if not is_replaced:
            kept.append(word)
    return [*kept, *later]


def error_line(capsys: Captured, main: Callable[[list[str]], int], arguments: list[str]) -> str:
    """Return the error line of a command. Fails unless it prints one line and exits with 2."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    assert captured.err.count("error: ") == 1, captured.err
    line = captured.err.splitlines()[-1]
    assert line.startswith("error: "), captured.err
    return line


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def run(model: FastGPTNeoX, tokens: list[int]) -> Tensor:
    """Return the logits [n, V] of one causal pass over a fresh cache. This is the oracle."""
    positions = torch.arange(len(tokens))
    cache = model.new_cache(len(tokens))
    return model.forward(torch.tensor(tokens), positions, cache)


def prefilled(model: GPTNeoX, tokens: list[int], capacity: int, *config: PassConfig) -> KVCache:
    cache = model.new_cache(capacity, *config)
    model.prefill(tokens, cache)
    return cache


def append(model: GPTNeoX, tokens: list[int], cache: KVCache) -> Tensor:
    """Append tokens to the cache in one pass and return the logits [1, V] after the last one."""
    positions = torch.arange(cache.length, cache.length + len(tokens))
    logits = model.forward(torch.tensor(tokens), positions, cache)
    cache.commit(range(len(tokens)))
    return logits[-1:]


def make_tree(tokens: list[int], parents: list[int]) -> Tree:
    """Build a tree from tokens and parents. Verification reads nothing else but the depths."""
    tree = Tree.from_root(tokens[0])
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        tree.add(token, parent, 0.0)
    return tree


def random_tree(rng: random.Random, n_rows: int, n_ids: int = 90, max_depth: int = 15) -> Tree:
    """Return a random tree in breadth-first order, with either long chains or many siblings."""
    tree = Tree.from_root(rng.randrange(n_ids))
    is_bushy = rng.random() < 0.5
    while len(tree) < n_rows:
        row = rng.randrange(len(tree)) if is_bushy or rng.random() < 0.3 else len(tree) - 1
        siblings = [tree.tokens[i] for i, above in enumerate(tree.parents) if above == row]
        token = rng.randrange(n_ids)
        if tree.depths[row] < max_depth and token not in siblings:
            tree.add(token, row, 0.0)
    return breadth_first(tree)


def path_to(tree: Tree, row: int) -> list[int]:
    """Return the rows from the root to this one."""
    path = [row]
    while path[0]:
        path.insert(0, tree.parents[path[0]])
    return path


def run_tree(model: FastGPTNeoX, cache: FastCache, tree: Tree) -> Tensor:
    """Return the logits [N, V] of a tree's rows, by one pass as in the decoding loop."""
    tokens, positions, mask = tree_inputs(tree, cache.length)
    return model.forward(tokens, positions, cache, mask).clone()

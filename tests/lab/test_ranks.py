"""Tests of a target that two ranks compute: texts, errors, and the ranks' shards.

Two processes run PROGRAMS one after the other. They join and leave for each program, as two
commands would. gloo connects them.
"""

import io
import json
import multiprocessing
import os
import pickle
import signal
from argparse import Namespace
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fast import generate, make_head, pretend_one_gpu
from small import Captured, error_line, random_config, random_tensors, write_checkpoint

import dynatree_lab.cli.main
import dynatree_lab.engine.ranks
from draft_tree import DynaTree
from dynatree_lab.benchmark.measure import main as run_benchmark
from dynatree_lab.cli.options import open_pair
from dynatree_lab.cli.program import Parser, run_command_line
from dynatree_lab.engine import tensor_parallel
from dynatree_lab.engine.checkpoint import Checkpoint, CheckpointError, load_tensors
from dynatree_lab.engine.inputs import PassInputs
from dynatree_lab.engine.memory import OutOfMemory
from dynatree_lab.engine.model import FastGPTNeoX
from dynatree_lab.engine.passes import Window
from dynatree_lab.engine.ranks import RanksError, from_rank_0, rank, run_on_ranks, world_size
from dynatree_lab.engine.tensor_parallel import ShardedGPTNeoX, ShardedTensors, sum_ranks
from dynatree_lab.errors import UsageError
from dynatree_lab.methods.auto import Auto
from dynatree_lab.methods.costs import CostTracker
from dynatree_lab.methods.dyspec import DySpec
from dynatree_lab.methods.retrieval import Graft
from dynatree_lab.methods.sampler import Sampling
from dynatree_lab.methods.static import Chain, Fixed
from dynatree_lab.metrics import token_ids
from dynatree_lab.pair import load_pair
from gpt_neox import PREFILL_CHUNK, NonFiniteLogits

CPU = torch.device("cpu")
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46]
SHAPES: dict[str, dict[str, object]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True, "vocab_size": 97, "intermediate_size": 72},
    "sequential": {"use_parallel_residual": False, "hidden_act": "gelu_new"},
    "no bias": {"attention_bias": False, "vocab_size": 98},
}
TEXTS = [  # shape, settings, options
    ("plain", DynaTree(), {}),
    ("plain", Fixed(D=2), {"strict": True}),
    ("tied", Graft(), {"commit": "rebuild"}),
    ("sequential", Auto(), {"window": Window(16, 2)}),
    ("no bias", DySpec(N=6), {"sampling": Sampling(0.9)}),
]
ENDED = "error: another rank has ended; torchrun reports why\n"

Found = dict[str, object]  # the results of one rank


def write_models(folder: Path) -> None:
    """Write a random model of each shape, and one whose head 3, which rank 1 has, overflows float16
    after token 1."""
    for name, changes in (SHAPES | {"overflow": {}}).items():
        config = random_config(num_attention_heads=4, hidden_size=64, intermediate_size=128)
        config = replace(config, **changes)
        tensors = random_tensors(config, 0)
        if name == "overflow":
            tensors["gpt_neox.embed_in.weight"][1, 5] = 100.0
            qkv = tensors["gpt_neox.layers.0.attention.query_key_value.weight"].view(4, 3, 16, 64)
            qkv[3, 2, 7] = 0.0
            qkv[3, 2, 7, 5] = 20_000.0
        (folder / name).mkdir()
        write_checkpoint(folder / name, config, tensors)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> FastGPTNeoX:
    kind = ShardedGPTNeoX if world_size() > 1 else FastGPTNeoX
    return kind.from_pretrained(folder, CPU, dtype)


def write_texts(folder: Path) -> list[list[int]]:
    """Return texts of every shape, several methods, and with an EAGLE head."""
    target, draft = load(folder / "plain"), FastGPTNeoX.from_pretrained(folder / "plain")
    tensors = load_tensors(folder / "plain", target.config, CPU, torch.float32)
    head = make_head(dict(tensors), seed=0, **asdict(target.config))
    texts = [generate(target, head, PROMPT, Chain(), 8)]
    for shape, settings, options in TEXTS:
        texts.append(generate(load(folder / shape), draft, PROMPT, settings, 8, **options))
    return [token_ids(steps) for steps in texts]


def find_overflow(folder: Path) -> list[bool]:
    """Return which of three rows are finite, of which the second is token 1. Check that a prompt
    with token 1 in its first chunk is not."""
    target = load(folder / "overflow", torch.float16)
    cache = target.new_cache(PREFILL_CHUNK + 10)
    target.forward(torch.tensor([2, 1, 3]), torch.arange(3), cache)
    rows = cache.scores.finite_rows()
    target.prefill([2, 1] + [3] * PREFILL_CHUNK, cache)
    with pytest.raises(NonFiniteLogits):
        cache.scores.finite_rows()
    return rows


def run_different_tokens(folder: Path) -> str:
    """Return the error of a pass that has another token on each rank."""
    target = load(folder / "plain")
    with pytest.raises(RanksError) as caught:
        target.forward(torch.tensor([5 + rank()]), torch.tensor([0]), target.new_cache(9))
    return str(caught.value)


def learn_prices(folder: Path) -> list[float]:
    """Return prices that are learned from times that differ between the ranks."""
    tracker = CostTracker()
    tracker.record(4, 12, 3, draft_ms=2.0 + rank(), other_ms=5.5 + rank())
    tracker.begin_tree()
    return tracker.prices


def read_rank(folder: Path) -> tuple[int, bool]:
    """Return a value of rank 0, and whether this process ignores Ctrl-C."""
    return from_rank_0(rank), signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def compute(folder: Path, found: Found) -> int:
    """Run what ends without an error."""

    def program() -> int:
        for work in (write_texts, find_overflow, run_different_tokens, learn_prices, read_rank):
            found[work.__name__] = work(folder)
        return 0

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    return run_on_ranks(program)


def fail(ranks: tuple[int, ...], folder: Path, found: Found) -> int:
    """Run a program that fails on these ranks."""
    if 0 not in ranks:
        dynatree_lab.engine.ranks.RANK_0_TIMEOUT = timedelta(seconds=0.1)

    def execute(args: Namespace) -> int:
        if rank() in ranks:
            raise UsageError("a mistake")
        return from_rank_0(rank) + dynatree_lab.engine.ranks.gather(0)[1]

    return run_on_ranks(partial(run_command_line, execute, Parser(prog="x"), []))


def measure(folder: Path, found: Found) -> int:
    """Measure a table. Then remove its last texts. Rank 1 has no file."""
    file, options = folder / f"{rank()}.jsonl", ["--methods", "ar,dynatree", "--columns", "exact"]
    sizes = ["--n-prompts", "2", "--max-new-tokens", "10", "--threads", "1"]
    status = run_benchmark([*options, *sizes, "--output", str(file)])
    if rank() == 0:
        lines = file.read_bytes().splitlines(keepends=True)
        file.write_bytes(b"".join(lines[:3]))
    return status


def resume(folder: Path, found: Found) -> int:
    return run_benchmark([f"--resume={folder / f'{rank()}.jsonl'}"])


def end_within_a_text(folder: Path, found: Found) -> int:
    """Kill rank 1 before its ninth pass."""
    before_pass, n_left = ShardedGPTNeoX.before_pass, iter(range(8))

    def pass_or_end(*arguments: object) -> None:
        if rank() and next(n_left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        before_pass(*arguments)

    ShardedGPTNeoX.before_pass = pass_or_end
    return dynatree_lab.cli.main.main(
        ["--prompt", "The ship sailed at dawn", "--json", "--threads", "1"]
    )


def write_prompts(folder: Path, found: Found) -> int:
    """Write the texts of two prompts. The first cannot be encoded. Rank 1 has no file."""
    file = folder / f"prompts of {rank()}"
    if rank() == 0:
        file.write_text('{"prompt": "\\ud83d"}\n{"prompt": "The ship"}')
    words = ["--json", "--max-new-tokens", "8", "--threads", "1"]
    return dynatree_lab.cli.main.main(["--prompts", str(file), *words])


def lack_memory(folder: Path, found: Found) -> int:
    """Write the texts of the same prompts while rank 1 has no memory."""
    with pytest.MonkeyPatch.context() as patch:
        if rank():
            patch.setattr("dynatree_lab.generation.run.require_caches", raise_out_of_memory)
        return write_prompts(folder, found)


def raise_out_of_memory(*arguments: object) -> None:
    raise OutOfMemory("no room")


PROGRAMS: dict[str, Callable[[Path, Found], int]] = {
    "compute": compute,
    "prompts": write_prompts,
    "both fail": partial(fail, (0, 1)),
    "one fails": partial(fail, (1,)),
    "no memory": lack_memory,
    "measure": measure,
    "resume": resume,
    "end": end_within_a_text,
}


def run_programs(number: int, ports: list[int], folder: Path) -> None:
    """Run all programs as one of two ranks. Save what they find, return and print."""
    os.environ |= {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    torch.set_num_threads(1)
    found: Found = {}
    for (name, program), port in zip(PROGRAMS.items(), ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            status = program(folder, found)
        found[name] = status, out.getvalue(), err.getvalue()
        (folder / f"rank {number}").write_bytes(pickle.dumps(found))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[Found]:
    """Run the programs and return what each rank has found. This process has the stores, as
    torchrun has. It takes some seconds, because every pass waits for both processes."""
    context = multiprocessing.get_context("forkserver")
    store = partial(dist.TCPStore, "127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [store() for _ in PROGRAMS]
    ports = [each.port for each in stores]
    processes = [context.Process(target=run_programs, args=(i, ports, folder)) for i in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
        process.kill()
    return [pickle.loads((folder / f"rank {number}").read_bytes()) for number in (0, 1)]


@pytest.mark.slow
def test_two_ranks_compute_what_one_process_does(ranks: list[Found], folder: Path) -> None:
    """Check texts, prices, an overflow that only rank 1 has, and the error of different tokens.
    Without that error, the ranks would add up different rows."""
    for found in ranks:
        assert found["write_texts"] == write_texts(folder)
        assert found["find_overflow"] == [True, False, True]
        assert found["run_different_tokens"] == (
            "the ranks run different tokens; use equal machines and equal files"
        )
        assert found["learn_prices"] == learn_prices(folder)
    assert [found["read_rank"] for found in ranks] == [(0, False), (0, True)]


@pytest.mark.slow
def test_errors_are_printed_once(ranks: list[Found]) -> None:
    """Check an error of both ranks, then one of rank 1 alone."""
    assert [found["both fail"] for found in ranks] == [(2, "", "error: a mistake\n"), (2, "", "")]
    assert ranks[0]["one fails"] == (2, "", ENDED)
    assert ranks[1]["one fails"] == (2, "", "error: rank 1: a mistake\n")


@pytest.mark.slow
def test_all_ranks_write_the_texts_of_the_same_prompts(
    ranks: list[Found], capsys: Captured
) -> None:
    """Check a prompt that no rank can encode, and then a lack of memory of rank 1 alone, which ends
    the run."""
    status, out, err = ranks[0]["prompts"]
    assert status == 2 and "error: prompt 1 of 2: " in err
    words = ["--prompt", "The ship", "--json", "--max-new-tokens", "8"]
    assert dynatree_lab.cli.main.main(words) == 0
    alone = json.loads(capsys.readouterr().out)
    failed, written = map(json.loads, out.splitlines())
    assert "error" in failed and written["token_ids"] == alone["token_ids"]
    assert ranks[1]["prompts"] == (2, "", "")
    assert ranks[0]["no memory"][0] == 2 and ranks[0]["no memory"][2].endswith(ENDED)
    assert ranks[1]["no memory"][2].startswith("error: rank 1: no room; ")


@pytest.mark.slow
def test_only_rank_0_has_a_results_file(ranks: list[Found], folder: Path) -> None:
    """Check a table that is measured, cut off, and measured to its end. 0: all texts are ar's."""
    for name in ("measure", "resume"):
        status, out, _ = ranks[0][name]
        assert status == 0 and "dynatree" in out
        assert ranks[1][name] == (0, "", "")
    assert [file.name for file in folder.glob("*.jsonl")] == ["0.jsonl"]
    head, *texts = map(json.loads, (folder / "0.jsonl").read_text().splitlines())
    assert head["head"]["machine"]["ranks"] == 2 and len(texts) == 4


@pytest.mark.slow
def test_text_is_kept_if_a_rank_ends(ranks: list[Found]) -> None:
    status, out, err = ranks[0]["end"]
    assert status == 2 and err.endswith(ENDED) and "end" not in ranks[1]
    report = json.loads(out)
    assert report["interrupted"] and 5 < len(report["token_ids"]) < 128


def test_each_rank_holds_only_its_shard(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the size of a rank's weights and caches. 97 ids are not divisible by two."""
    tensors = load_tensors(folder / "tied", Checkpoint(folder / "tied").config, CPU, torch.float32)
    whole = sum(tensor.nbytes for tensor in tensors.values())
    monkeypatch.setenv("WORLD_SIZE", "2")
    for number in ("0", "1"):
        monkeypatch.setenv("RANK", number)
        own = ShardedTensors(tensors.files, CPU, torch.float32)
        assert sum(part.nbytes for part in own.values()) < 0.55 * whole
        model = ShardedGPTNeoX.from_pretrained(folder / "tied")
        monkeypatch.setattr(model, "gather", lambda value: [value])
        assert model.cache_bytes(10) == model.new_cache(10).kv.nbytes == 2 * 2560


def test_ranks_compare_all_inputs_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that other tokens, other positions and another mask give other checksums."""
    checksums = []
    monkeypatch.setattr(
        tensor_parallel, "run_collective", lambda _, found, **options: checksums.append(found[0])
    )
    ids, mask = torch.tensor([1, 2]), torch.eye(2, dtype=torch.bool)
    for inputs in ((ids, ids, mask), (ids + 1, ids, mask), (ids, ids + 1, mask), (ids, ids, ~mask)):
        tensor_parallel.ShardedGPTNeoX.before_pass(None, None, PassInputs(*inputs, 0, 2))
    assert len(set(map(int, checksums))) == 4


def test_a_sum_in_order_does_not_depend_on_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check three ranks, whose all-reduce may begin with another rank for each part of the rows."""
    parts = torch.tensor([1e8, -1e8, 1.0]).view(3, 1, 1)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(tensor_parallel, "gather_tensors", lambda x: parts)
    assert sum_ranks(torch.zeros(1, 1)).item() == 1.0


def test_what_cannot_be_split(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(CheckpointError, match="4 heads cannot be split evenly over 3 ranks"):
        ShardedGPTNeoX.from_pretrained(folder / "plain")


def test_fewer_devices_than_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_one_gpu(monkeypatch)
    for name, number in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, number)
    with pytest.raises(UsageError, match="--device cuda:1: torch finds 1 CUDA devices"):
        args = dynatree_lab.cli.main.build_parser().parse_args(["--prompt", "a"])
        open_pair(args, is_drafting=True, announce=print)


def test_a_number_of_ranks_without_a_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Check both programs, and a pair from Python."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = "WORLD_SIZE is 2, but RANK is not set; use torchrun or unset WORLD_SIZE"
    for main, words in ((dynatree_lab.cli.main.main, ["--prompt", "a"]), (run_benchmark, [])):
        assert error_line(capsys, main, words) == f"error: {message}"
    with pytest.raises(RanksError, match=message):
        load_pair()

"""Target and draft: their device, dtype and checkpoints; a request to continue a prompt.

pair = load_pair("models/tiny/target", "models/tiny/draft")
for piece in stream_text(pair, "The ship sailed at dawn", max_new_tokens=64):
    print(piece, end="", flush=True)
"""

import argparse
import os
import re
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from cli.errors import UsageError, say
from cli.tokens import (
    StopTexts,
    TextStream,
    encode,
    load_tokenizer,
    read_stops,
    require_same_tokenizer,
    special_stops,
)
from dynatree import Drafter
from engine.checkpoint import DTYPES, CheckpointError, find_checkpoint
from engine.driver import Driver
from engine.generate import Step, generate
from engine.generation_config import GenerationConfig
from engine.memory import memory_for, read_system_file
from engine.model import FastGPTNeoX, is_fast, load_plain
from engine.ranks import Ranks
from gpt_neox import GPTNeoX
from methods.sampler import Sampling

TINY = Path(__file__).parent.parent / "models" / "tiny"
CPU_INFO = Path("/proc/cpuinfo")
BFLOAT16_CAPABILITY = (8, 0)  # of the first NVIDIA GPUs that compute in it
PYTHIA = ("EleutherAI/pythia-2.8b", "EleutherAI/pythia-70m")  # the papers' target and draft


def choose_device(name: str | None) -> torch.device:
    """Return the named device; if none is named, cuda where there is one, else cpu. Raises
    UsageError."""
    n_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = name or ("cuda" if n_cuda else "cpu")
    if not re.fullmatch(r"cpu|cuda(:[0-9]+)?", name):
        raise UsageError(f"unknown device {name!r}; there are cpu, cuda and cuda:N")
    if name == "cpu":
        return torch.device(name)
    index = name.removeprefix("cuda").removeprefix(":") or "0"
    if len(index) > 3 or int(index) >= n_cuda:  # of a long index torch keeps the last eight bits
        has = f"torch sees {n_cuda} CUDA devices" + ", cuda:0 the first" * bool(n_cuda)
        raise UsageError(f"--device {name}: {has}; use --device cpu")
    return torch.device("cuda", int(index))


def choose_dtype(
    name: str | torch.dtype | None, device: torch.device, option: str = "--dtype"
) -> torch.dtype:
    """Return the named dtype; if none is named, Pythia's published float16 on CUDA, float32 on CPU.
    Raises UsageError."""
    if isinstance(name, torch.dtype):
        name = dtype_name(name)
    name = name or ("float16" if device.type == "cuda" else "float32")
    if name not in DTYPES:
        raise UsageError(f"{option} {name}: there are {', '.join(DTYPES)}")
    if name == "bfloat16" and device.type == "cuda" and not has_instructions(DTYPES[name], device):
        gpu = torch.cuda.get_device_name(device)
        raise UsageError(f"{option} bfloat16: {gpu} has none; use {option} float16")
    return DTYPES[name]


def choose_draft_dtype(
    name: str | None, target_dtype: torch.dtype, device: torch.device
) -> torch.dtype:
    """Return the named dtype; if none is named, the target's, but bfloat16 for float16 on a GPU
    that has it, because small Pythia models overflow in float16. Raises UsageError."""
    if name:
        return choose_dtype(name, device, "--draft-dtype")
    if target_dtype == torch.float16 and device.type == "cuda":
        return torch.bfloat16 if has_instructions(torch.bfloat16, device) else torch.float16
    return target_dtype


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def has_instructions(dtype: torch.dtype, device: torch.device) -> bool | None:
    """Whether a device computes in this dtype without emulating it; None for a processor whose
    features Linux does not list."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        return dtype != torch.bfloat16 or capability >= BFLOAT16_CAPABILITY
    names = {torch.bfloat16: {"avx512_bf16", "amx_bf16"}, torch.float16: {"avx512_fp16"}}
    found = re.search(r"^flags\s*:(.*)$", read_system_file(CPU_INFO), re.MULTILINE)
    if not found:
        return None
    return dtype not in names or not names[dtype].isdisjoint(found[1].split())


def set_threads(n: int | None, device: torch.device) -> None:
    """Use n CPU threads. None is one thread on CUDA, because the host's work is small there and
    waking a second thread takes longer; on CPU it is torch's choice. Raises UsageError."""
    if n is None:
        if device.type == "cuda":
            torch.set_num_threads(1)
        return
    n_cores = os.cpu_count() or 1
    if not 1 <= n <= n_cores:
        raise UsageError(f"--threads {n}: 1 to {n_cores} on this machine")
    torch.set_num_threads(n)


@dataclass(frozen=True)
class Pair:
    """A target, its tokenizer, and a draft unless the method needs none."""

    target: GPTNeoX  # fast unless --plain; a Driver if several ranks compute it
    draft: GPTNeoX | Drafter | None
    tokenizer: Tokenizer
    target_folder: Path
    draft_folder: Path | None
    load_s: dict[str, float]  # seconds, by "target" and "draft"
    ranks: Ranks | None = None  # the processes that compute the target, if there are several

    @property
    def models(self) -> list[GPTNeoX]:
        return [model for model in (self.target, self.draft) if isinstance(model, GPTNeoX | Driver)]

    @cached_property
    def float32_target(self) -> FastGPTNeoX:
        """The fast target in float32, loaded for this if need be. Raises OutOfMemory."""
        if self.target.dtype == torch.float32 and is_fast(self.target):
            return self.target
        return load_model(self.target_folder, self.target.device, torch.float32, self.ranks)

    def captured(self) -> tuple[int, float]:
        """Return the number of CUDA graphs so far, and the seconds that capturing them took."""
        fast = [model for model in self.models if is_fast(model)]
        return sum(model.n_graphs for model in fast), sum(model.capture_s for model in fast)


@dataclass(frozen=True)
class Request:
    """One text to generate: its prompt, how it is generated, and where it ends."""

    pair: Pair
    prompt: list[int]  # ids
    config: GenerationConfig
    max_new_tokens: int
    eos_ids: Sequence[int] = ()
    stop: Sequence[str] = ()  # it ends before any of these texts

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids of stop texts that are special tokens. Raises UsageError."""
        return special_stops(self.stop, self.pair.tokenizer)

    def decode(
        self,
        inspect: Callable[[Tensor], None] | None = None,
        watcher: object | None = None,
    ) -> Iterator[Step]:
        """Return its steps. inspect, watcher: as in engine.generate.generate."""
        return generate(
            self.pair.target,
            self.pair.draft,
            self.prompt,
            self.config,
            self.max_new_tokens,
            eos_ids=(*self.eos_ids, *self.stop_ids),
            inspect=inspect,
            watcher=watcher,
        )

    def text(
        self,
        on_step: Callable[[Step], None] = lambda step: None,
        inspect: Callable[[Tensor], None] | None = None,
        watcher: object | None = None,
    ) -> Generator[str, None, str]:
        """Yield its text in pieces, each as soon as it is final, without what ends the text. Return
        the finish reason: "eos", "stop" or "length".

        on_step: called with each step, before its piece.
        """
        stream, stops = TextStream(self.pair.tokenizer), StopTexts(self.stop)
        for step in self.decode(inspect, watcher):
            on_step(step)
            new = stream.push([i for i in step.tokens if i not in self.eos_ids])
            yield stops.push(new)
            if stops.has_ended:
                return "stop"
        yield stops.push(stream.finish())
        yield stops.held
        if step.tokens[-1] in self.eos_ids:
            return "eos"
        has_stopped = stops.has_ended or step.tokens[-1] in self.stop_ids
        return "stop" if has_stopped else "length"


def stream_text(
    pair: Pair,
    prompt: str,
    config: GenerationConfig | str = "dynatree",
    max_new_tokens: int = 128,
    eos_ids: Iterable[int] | None = None,
    stop: str | Iterable[str] = (),
    **sampling: float,
) -> Generator[str, None, str]:
    """Yield the text that continues a prompt, in pieces of whole characters, each as soon as it is
    final. Return, as the value of `yield from`, why it ended: "eos", "stop" or "length".

    Args:
        config: how it is generated, or words for it, such as "dynatree tau=0.02 strict".
        eos_ids: None for the target's.
        stop: the text ends before this text, or before any of several.
        sampling: temperature, top_p, seed and the others of methods.sampler.Sampling, in place of
            the config's.

    Raises UsageError for a prompt that the model cannot read, ValueError for an invalid config or
    stop text, and what engine.generate.generate raises.
    """
    target = pair.target.config
    ids = encode(prompt, pair.tokenizer, target.vocab_size)
    if isinstance(config, str):
        config = GenerationConfig.parse(*config.split())
    if sampling:
        config = replace(config, sampling=Sampling(**sampling))
    eos_ids = target.eos_ids if eos_ids is None else tuple(eos_ids)
    return Request(pair, ids, config, max_new_tokens, eos_ids, read_stops(stop)).text()


def warn_of_length(pair: Pair, n_tokens: int) -> None:
    """Warn if prompt and text are longer than what the target was trained for."""
    trained = pair.target.config.max_position_embeddings
    if n_tokens > trained:
        say(f"warning: {n_tokens} tokens with the prompt, and the target was trained for {trained}")


def overflow_note(draft: GPTNeoX) -> str:
    """Return what to say when no candidate of this draft is finite."""
    way_out = "another --draft" if draft.dtype == torch.float32 else "--draft-dtype float32"
    what = f"the draft's logits are not finite in {dtype_name(draft.dtype)}"
    return f"note: {what}; until they are, it drafts nothing; try {way_out}"


def embedded_pair() -> tuple[str, str]:
    """Return the folders of target and draft, relative to the working folder."""
    return os.path.relpath(TINY / "target"), os.path.relpath(TINY / "draft")


def require_graphs(args: argparse.Namespace) -> None:
    """Raise UsageError if --no-graphs has no effect on --device."""
    device = choose_device(args.device)
    if args.no_graphs and device.type != "cuda":
        raise UsageError(f"--no-graphs has no effect on {device}: only cuda has graphs")


def default_models(device: torch.device) -> tuple[str, str]:
    """Return names of target and draft: Pythia on CUDA, the embedded pair elsewhere."""
    return PYTHIA if device.type == "cuda" else embedded_pair()


def open_pair(
    args: argparse.Namespace,
    is_drafting: bool,
    say: Callable[[str], None],
    ranks: Ranks | None = None,
    is_plain: bool = False,
) -> tuple[Pair, dict[str, str | int | None]]:
    """Announce and load the models that the options name. Return them, and what to report of them.

    Args:
        ranks: the processes that compute the target, if there are several.
        is_plain: load the models of gpt_neox.py in place of fast ones.
    """
    device = choose_device(args.device)
    set_threads(args.threads, device)
    if ranks and ":" in (args.device or ""):
        raise UsageError(f"--device {args.device}: under torchrun each rank has its own; say cuda")
    dtype = choose_dtype(args.dtype, device)
    draft_dtype = choose_draft_dtype(args.draft_dtype, dtype, device)
    if is_drafting and args.target and not args.draft:
        raise UsageError(
            "--target also needs --draft: the method drafts; --method lookup or recycle needs none"
        )
    target, draft = default_models(device)
    target = args.target or target
    draft = (args.draft or draft) if is_drafting else None
    found = {"target": target, "draft": draft, "device": str(device), "dtype": dtype_name(dtype)}
    found["draft_dtype"] = dtype_name(draft_dtype) if draft else None
    if ranks:
        found["ranks"] = ranks.world_size
    say(announcement(found))
    for each in {dtype, draft_dtype} if draft else {dtype}:
        if has_instructions(each, device) is False:
            say(f"note: this processor has no {dtype_name(each)} instructions: it will be slow")
    pair = load_pair(target, draft, device, dtype, draft_dtype, say, ranks, is_plain)
    return pair, found | {"threads": torch.get_num_threads()}


def announcement(found: dict[str, str | int | None]) -> str:
    """Return the line on what is about to run. found: what open_pair reports."""
    models = f"target {found['target']}"
    precision = found["dtype"]
    if found["draft"]:
        models += f", draft {found['draft']}"
        if found["draft_dtype"] != found["dtype"]:
            precision += f", draft {found['draft_dtype']}"
    where = found["device"]
    if "ranks" in found:
        where = f"{found['ranks']} ranks on {where}"
    return f"{models}; {where}, {precision}"


def load_pair(
    target: str,
    draft: str | None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    draft_dtype: torch.dtype | str | None = None,
    announce: Callable[[str], None] = lambda line: None,
    ranks: Ranks | None = None,
    is_plain: bool = False,
) -> Pair:
    """Find, check and load the models.

    Args:
        device, dtype: None for the defaults of choose_device and choose_dtype.
        draft_dtype: None for the target's.
        announce: called with a line before a download.
        ranks: each loads a share of the target; this one alone loads the draft.
        is_plain: load the models of gpt_neox.py in place of fast ones.

    Raises UsageError for an unknown device or dtype, CheckpointError also for two tokenizers that
    differ, and OutOfMemory.
    """
    device = choose_device(str(device) if device else None)
    dtype = choose_dtype(dtype, device, "dtype")
    draft_dtype = choose_dtype(draft_dtype or dtype, device, "draft_dtype")
    with memory_for("the tokenizer"):
        target_folder, draft_folder = find_both(target, draft, announce)
        tokenizer = load_tokenizer(target_folder)
        if draft_folder:
            require_same_tokenizer(tokenizer, load_tokenizer(draft_folder))
    start = time.perf_counter()
    target_model = load_model(target, device, dtype, ranks, is_plain)
    load_s = {"target": time.perf_counter() - start, "draft": 0.0}
    draft_model = None
    if draft_folder:
        start = time.perf_counter()
        draft_model = load_model(draft_folder, device, draft_dtype, is_plain=is_plain)
        load_s["draft"] = time.perf_counter() - start
    return Pair(target_model, draft_model, tokenizer, target_folder, draft_folder, load_s, ranks)


def find_both(
    target: str, draft: str | None, announce: Callable[[str], None]
) -> tuple[Path, Path | None]:
    """Return the folders of both. Raises CheckpointError, which names both if neither is there."""
    if draft is None:
        return find_checkpoint(target, announce), None
    try:
        draft_folder = find_checkpoint(draft, announce)
    except CheckpointError as error:
        problem = error
    else:
        return find_checkpoint(target, announce), draft_folder

    def fetch_nothing(line: str) -> None:
        raise problem

    try:
        find_checkpoint(target, fetch_nothing)
    except CheckpointError as other:
        if other is not problem:
            raise type(problem)(f"{other}; {problem}") from problem
    raise problem


def load_model(
    name_or_path: str | Path,
    device: torch.device,
    dtype: torch.dtype,
    ranks: Ranks | None = None,
    is_plain: bool = False,
) -> GPTNeoX | Driver:
    """Load one of the pair; with other ranks a share of it. Raises what FastGPTNeoX.from_pretrained
    raises."""
    if ranks:
        return Driver.load(ranks, str(name_or_path), device, dtype)
    load = load_plain if is_plain else FastGPTNeoX.from_pretrained
    return load(name_or_path, device, dtype)

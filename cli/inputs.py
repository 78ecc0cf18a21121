"""What the user asked for, checked: settings, prompt, device, models, tokenizer.

Every mistake raises an exception whose message is one line that says what is wrong and what to do;
the command lines print it and exit with status 2.

    pair = load_pair("models/tiny/target", "models/tiny/draft", torch.device("cpu"), torch.float32)
"""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
from tokenizers import Tokenizer

from engine.checkpoint import DTYPES, CheckpointError, find_checkpoint, read_json
from engine.sampling import Sampling
from engine.streaming import DEFAULT_SINKS, WHOLE_TEXT, Window
from gpt_neox import GPTNeoX

TINY = Path(__file__).parent.parent / "models" / "tiny"
BFLOAT16_CAPABILITY = (8, 0)  # of the first NVIDIA GPUs that compute in it
PYTHIA = ("EleutherAI/pythia-2.8b", "EleutherAI/pythia-70m")  # the papers' target and draft
SWITCH = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}

Kind = TypeVar("Kind")


class UsageError(Exception):
    """A request that cannot be carried out; the message is one line for the user."""


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line and an exception, not a usage text and an exit."""

    less_memory = ""  # what lowers the memory that a run needs

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists everything)")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The options that `open_pair` reads."""
    add = parser.add_argument
    add("--target", metavar="MODEL", help="folder, or hub NAME or NAME@REVISION")
    add("--draft", metavar="MODEL", help="the same, of a smaller model with this tokenizer")
    add("--device", help="cpu, cuda or cuda:N (cuda where there is one)")
    add("--dtype", help=f"{', '.join(DTYPES)} (float16 on cuda, float32 on cpu)")
    add("--threads", type=int, metavar="N", help="CPU threads (one per core)")
    add("--no-graphs", action="store_true", help="on cuda, launch every kernel by itself")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """The options that `choose_sampling` takes."""
    add = parser.add_argument
    add("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default)")
    add("--top-p", type=float, metavar="P", help="sample from the likeliest tokens reaching P (1)")
    add("--seed", type=int, metavar="N", help="of the sampling (0)")


def choose_sampling(temperature: float, top_p: float | None, seed: int | None) -> Sampling | None:
    """None for greedy. Raises UsageError, also for options that greedy decoding ignores."""
    if temperature == 0:
        if top_p is not None or seed is not None:
            raise UsageError("--top-p and --seed need a --temperature above 0")
        return None
    try:
        return Sampling(temperature, 1.0 if top_p is None else top_p, seed or 0)
    except ValueError as error:
        raise UsageError(f"--{error}") from error


def choose_window(size: int | None, sinks: int | None, max_rows: int, pair: "Pair") -> Window:
    """What the caches keep. Raises UsageError if the tree or the trained range does not fit."""
    if size is None:
        if sinks is not None:
            raise UsageError("--sinks needs a --window")
        return WHOLE_TEXT
    longest = min(model.config.max_positions for model in pair.models)
    window = Window(size, DEFAULT_SINKS if sinks is None else sinks)
    most = (longest - window.sinks) * 4 // 5  # size + size // 4 tokens beside the sinks
    why = f"the method's tree has {max_rows} rows, the models {longest} positions"
    if window.sinks < 0 or most < max_rows:
        raise UsageError(f"--sinks {window.sinks} leaves no window: {why}")
    if not max_rows <= size <= most:
        raise UsageError(f"--window {size}: {max_rows} to {most} ({why})")
    return window


def parse_settings(kind: type[Kind], assignments: Sequence[str]) -> Kind:
    """A settings dataclass with NAME=VALUE changes. Raises UsageError naming what is wrong."""
    types = {f.name: type(f.default) for f in fields(kind)}
    values = {}
    for assignment in assignments:
        name, _, text = (part.strip() for part in assignment.partition("="))
        if name not in types:
            known = ", ".join(types)
            raise UsageError(f"--set {assignment}: this method has no {name!r}; it has {known}")
        try:
            values[name] = SWITCH[text.lower()] if types[name] is bool else types[name](text)
        except (ValueError, KeyError) as error:
            expected = (
                "on or off" if types[name] is bool else f"a value of type {types[name].__name__}"
            )
            raise UsageError(f"--set {assignment}: {name} takes {expected}") from error
    try:
        return kind(**values)
    except ValueError as error:
        raise UsageError(f"--set: {error}") from error


def read_prompt(text: str | None, file: str | None) -> str:
    """The prompt given as text, or as a file (- is standard input).

    Raises UsageError: none or both given, empty, unreadable, not UTF-8.
    """
    if (text is None) == (file is None):
        raise UsageError("give either --prompt or --prompt-file")
    try:
        if text is not None:
            raw = text.encode("utf-8", "surrogateescape")
        else:
            raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        prompt = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt is not UTF-8: {error}") from error
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from error
    if not prompt:
        raise UsageError("the prompt is empty")
    return prompt


def choose_device(name: str | None) -> torch.device:
    """cpu or cuda, the latter where it exists if none is asked for. Raises UsageError."""
    n_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind, _, index = (name or ("cuda" if n_cuda else "cpu")).partition(":")
    if kind not in ("cpu", "cuda") or (":" in (name or "") and not index.isdecimal()):
        raise UsageError(f"unknown device {name!r}; there are cpu, cuda and cuda:N")
    if kind == "cpu":
        return torch.device("cpu")
    if not n_cuda:
        raise UsageError(f"--device {name}: torch sees no CUDA device; use --device cpu")
    if int(index or 0) >= n_cuda:
        raise UsageError(f"--device {name}: there are {n_cuda} CUDA devices, cuda:0 the first")
    return torch.device("cuda", int(index or 0))


def choose_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """Pythia's published float16 on CUDA, float32 on CPU, unless named. Raises UsageError."""
    name = name or ("float16" if device.type == "cuda" else "float32")
    if name not in DTYPES:
        raise UsageError(f"unknown dtype {name!r}; there are {', '.join(DTYPES)}")
    if device.type == "cuda" and name == "bfloat16":
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < BFLOAT16_CAPABILITY:
            what = f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
            raise UsageError(f"--dtype bfloat16: {what}, has none; use --dtype float16")
    return DTYPES[name]


def lacks_instructions(dtype: torch.dtype, flags: str) -> bool:
    """Whether an x86 processor with these /proc/cpuinfo flags must emulate a dtype."""
    names = {torch.bfloat16: ("avx512_bf16", "amx_bf16"), torch.float16: ("avx512_fp16",)}
    return dtype in names and not set(names[dtype]) & set(flags.split())


def processor_flags() -> str:
    """The processor's features as Linux lists them on x86; elsewhere nothing."""
    try:
        found = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return ""
    return found[1] if found else ""


def set_threads(n: int | None) -> None:
    """Use n CPU threads; torch's own choice, one per core, if None. Raises UsageError."""
    if n is None:
        return
    most = os.cpu_count() or 1
    if not 1 <= n <= most:
        raise UsageError(f"--threads {n}: 1 to {most} on this machine")
    torch.set_num_threads(n)


@dataclass(frozen=True)
class Pair:
    """A target, the tokenizer, and a draft unless the method needs none."""

    target: GPTNeoX
    draft: GPTNeoX | None
    tokenizer: Tokenizer
    target_folder: Path
    draft_folder: Path | None
    load_s: dict[str, float]  # seconds, by "target" and "draft"

    @property
    def models(self) -> list[GPTNeoX]:
        return [model for model in (self.target, self.draft) if model]

    @cached_property
    def float32_target(self) -> GPTNeoX:
        """The target in float32, loaded again if it is not. Raises OutOfMemory."""
        if self.target.dtype == torch.float32:
            return self.target
        return GPTNeoX.from_pretrained(self.target_folder, self.target.device, torch.float32)

    def captured(self) -> tuple[int, float]:
        """CUDA graphs so far, and the seconds they took."""
        n_graphs = sum(model.pool.n_graphs for model in self.models)
        return n_graphs, sum(model.pool.capture_s for model in self.models)

    def use_graphs(self, has_graphs: bool) -> None:
        """Whether passes are replayed as CUDA graphs, as they are by default on CUDA."""
        for model in self.models:
            model.pool.has_graphs = has_graphs and model.pool.is_fixed


def default_models(device: torch.device) -> tuple[str, str]:
    """Target and draft: Pythia on CUDA, the embedded pair elsewhere."""
    if device.type == "cuda":
        return PYTHIA
    return os.path.relpath(TINY / "target"), os.path.relpath(TINY / "draft")


def open_pair(
    args: argparse.Namespace, is_drafting: bool, say: Callable[[str], None]
) -> tuple[Pair, dict[str, str | int | None]]:
    """The models that the options name, announced and loaded; and what to report of them."""
    set_threads(args.threads)
    device = choose_device(args.device)
    dtype = choose_dtype(args.dtype, device)
    if is_drafting and args.target and not args.draft:
        raise UsageError("--target also needs --draft: the method drafts")
    target, draft = default_models(device)
    names = {"target": args.target or target, "draft": args.draft or draft if is_drafting else None}
    dtype_name = str(dtype).removeprefix("torch.")
    models = ", ".join(f"{role} {name}" for role, name in names.items() if name)
    say(f"{models}; {device}, {dtype_name}")
    flags = processor_flags() if device.type == "cpu" else ""
    if flags and lacks_instructions(dtype, flags):
        say(f"note: this processor has no {dtype_name} instructions and emulates them, slowly")
    if args.no_graphs and device.type != "cuda":
        raise UsageError(f"--no-graphs has no effect on {device}: only cuda has graphs")
    pair = load_pair(names["target"], names["draft"], device, dtype, say)
    if args.no_graphs:
        pair.use_graphs(False)
    threads = torch.get_num_threads()
    return pair, {**names, "device": str(device), "dtype": dtype_name, "threads": threads}


def load_pair(
    target: str,
    draft: str | None,
    device: torch.device,
    dtype: torch.dtype,
    announce: Callable[[str], None] = lambda line: None,
) -> Pair:
    """Find, check and load the models; `announce` is told before a download.

    Raises CheckpointError (the two tokenizers must be the same) and OutOfMemory.
    """
    target_folder = find_checkpoint(target, announce)
    draft_folder = None if draft is None else find_checkpoint(draft, announce)
    tokenizer = load_tokenizer(target_folder)
    if draft_folder:
        require_same_tokenizer(tokenizer, load_tokenizer(draft_folder))
    load_s = {}

    def load(role: str, folder: Path) -> GPTNeoX:
        start = time.perf_counter()
        model = GPTNeoX.from_pretrained(folder, device, dtype)
        load_s[role] = time.perf_counter() - start
        return model

    target_model = load("target", target_folder)
    draft_model = load("draft", draft_folder) if draft_folder else None
    return Pair(target_model, draft_model, tokenizer, target_folder, draft_folder, load_s)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer.json. Raises CheckpointError."""
    file = folder / "tokenizer.json"
    read_json(file)  # its errors are the clearer ones
    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{folder}/tokenizer.json is not a tokenizer: {error}") from error
    tokenizer.no_truncation()  # a file may carry either, meant for training
    tokenizer.no_padding()
    return tokenizer


def require_same_tokenizer(target: Tokenizer, draft: Tokenizer) -> None:
    """Raise CheckpointError unless both split text into the same ids."""
    ours, theirs = (json.loads(tokenizer.to_str()) for tokenizer in (target, draft))
    differing = [
        name
        for name, differs in {
            "vocabulary": target.get_vocab() != draft.get_vocab(),
            "merges": ours["model"].get("merges") != theirs["model"].get("merges"),
            "normaliser": ours["normalizer"] != theirs["normalizer"],
            "pre-tokeniser": ours["pre_tokenizer"] != theirs["pre_tokenizer"],
        }.items()
        if differs
    ]
    if differing:
        raise CheckpointError(f"target and draft tokenizers differ: {', '.join(differing)}")


def encode(prompt: str, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """The prompt's ids, no special token added. Raises UsageError if the model cannot read them."""
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    if not ids:
        raise UsageError("the prompt is empty: the tokenizer makes no token of it")
    if max(ids) >= vocab_size:
        raise UsageError(f"the prompt has id {max(ids)}, but the target knows {vocab_size} ids")
    return ids

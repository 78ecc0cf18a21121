"""Opening a pair: device, dtype, checkpoints, tokenizers; a request to continue a prompt with it.

pair = load_pair("models/tiny/target", "models/tiny/draft", torch.device("cpu"), torch.float32)
steps = Request(pair, prompt_ids, {"max_new_tokens": 64}).decode(DynaTree())
"""

import argparse
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from cli.errors import UsageError, no_panic
from draft_tree import Settings, Watcher
from dynatree import Step, generate
from engine.checkpoint import DTYPES, CheckpointError, first_line, read_json
from engine.hub import find_checkpoint
from engine.memory import memory_for, require_memory
from gpt_neox import GPTNeoX
from parallel.target import Mail

TINY = Path(__file__).parent.parent / "models" / "tiny"
BFLOAT16_CAPABILITY = (8, 0)  # of the first NVIDIA GPUs that compute in it
# What the tokenizers library takes for one of a prompt (measured: 94 to 254)
BYTES_PER_BYTE = 300
LARGEST_ID = 2**24
PYTHIA = ("EleutherAI/pythia-2.8b", "EleutherAI/pythia-70m")  # the papers' target and draft


def choose_device(name: str | None) -> torch.device:
    """cpu or cuda, the latter where it exists if none is asked for. Raises UsageError."""
    n_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name is None:
        name = "cuda" if n_cuda else "cpu"
    found = re.fullmatch(r"(cpu|cuda)(?::([0-9]+))?", name)
    if not found:
        raise UsageError(f"unknown device {name!r}; there are cpu, cuda and cuda:N")
    if found[1] == "cpu":
        return torch.device("cpu")
    if not n_cuda:
        raise UsageError(f"--device {name}: torch sees no CUDA device; use --device cpu")
    index = int(found[2] or 0)
    if index >= n_cuda:
        raise UsageError(f"--device {name}: there are {n_cuda} CUDA devices, cuda:0 the first")
    return torch.device("cuda", index)


def choose_dtype(name: str | None, device: torch.device, option: str = "--dtype") -> torch.dtype:
    """Pythia's published float16 on CUDA, float32 on CPU, unless named. Raises UsageError."""
    name = name or ("float16" if device.type == "cuda" else "float32")
    if name not in DTYPES:
        raise UsageError(f"{option} {name}: there are {', '.join(DTYPES)}")
    if name == "bfloat16" and not has_bfloat16(device):
        major, minor = torch.cuda.get_device_capability(device)
        what = f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
        raise UsageError(f"{option} bfloat16: {what}, has none; use {option} float16")
    return DTYPES[name]


def choose_draft_dtype(
    name: str | None, target_dtype: torch.dtype, device: torch.device
) -> torch.dtype:
    """The target's, but on a GPU bfloat16 for float16 if it has it, unless named.

    A draft's precision can cost acceptance and never correctness, while a product that overflows
    costs every guess, as small Pythia models do in float16. Raises UsageError.
    """
    if name:
        return choose_dtype(name, device, "--draft-dtype")
    if target_dtype == torch.float16 and device.type == "cuda" and has_bfloat16(device):
        return torch.bfloat16
    return target_dtype


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def has_bfloat16(device: torch.device) -> bool:
    """Whether a device computes in bfloat16; a CPU at least emulates it."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= BFLOAT16_CAPABILITY


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


def warn_of_emulation(dtypes: set[torch.dtype], say: Callable[[str], None]) -> None:
    """Say which of these this processor is known to have no instructions for."""
    flags = processor_flags()
    for dtype in dtypes:
        if flags and lacks_instructions(dtype, flags):
            name = dtype_name(dtype)
            say(f"note: this processor has no {name} instructions and emulates them, slowly")


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
    mail: Mail | None = None  # to other ranks, with whom the target is computed

    @property
    def models(self) -> list[GPTNeoX]:
        return [model for model in (self.target, self.draft) if model]

    @cached_property
    def float32_target(self) -> GPTNeoX:
        """The target in float32, loaded again if it is not. Raises OutOfMemory."""
        if self.target.dtype == torch.float32:
            return self.target
        return load_target(self.target_folder, self.target.device, torch.float32, self.mail)

    def captured(self) -> tuple[int, float]:
        """CUDA graphs so far, and the seconds they took."""
        n_graphs = sum(model.pool.n_graphs for model in self.models)
        return n_graphs, sum(model.pool.capture_s for model in self.models)

    def use_graphs(self, has_graphs: bool) -> None:
        """Whether passes are replayed as CUDA graphs, as they are by default on CUDA."""
        for model in self.models:
            model.pool.has_graphs = has_graphs and model.pool.is_shaped


@dataclass(frozen=True)
class Request:
    """One prompt to continue, whatever the method."""

    pair: Pair
    prompt: list[int]
    options: dict[str, object]  # of dynatree.generate, by keyword

    def decode(
        self,
        settings: Settings,
        inspect: Callable[[Tensor], None] | None = None,
        watcher: Watcher | None = None,
    ) -> Iterator[Step]:
        """inspect, watcher: as dynatree.generate has them."""
        pair = self.pair
        options = self.options | {"inspect": inspect, "watcher": watcher}
        return generate(pair.target, pair.draft, self.prompt, settings, **options)

    def printable(self, ids: Iterable[int]) -> list[int]:
        """EOS is counted, not printed."""
        return [i for i in ids if i not in self.options.get("eos_ids", ())]


def overflow_note(draft: GPTNeoX) -> str:
    """What to say when no candidate of this draft is finite."""
    way_out = "--draft-dtype float32"
    if draft.dtype == torch.float16 and has_bfloat16(draft.device):
        way_out = "--draft-dtype bfloat16"
    elif draft.dtype == torch.float32:
        way_out = "another --draft"
    what = f"the draft's logits are not finite in {dtype_name(draft.dtype)}"
    return (
        f"note: {what}; until they are, it drafts nothing and saves nothing over ar; try {way_out}"
    )


def default_models(device: torch.device) -> tuple[str, str]:
    """Target and draft: Pythia on CUDA, the embedded pair elsewhere."""
    if device.type == "cuda":
        return PYTHIA
    return os.path.relpath(TINY / "target"), os.path.relpath(TINY / "draft")


def open_pair(
    args: argparse.Namespace,
    is_drafting: bool,
    say: Callable[[str], None],
    mail: Mail | None = None,
) -> tuple[Pair, dict[str, str | int | None]]:
    """The models that the options name, announced and loaded; and what to report of them.

    mail: to the other ranks, if the target is computed with them.
    """
    set_threads(args.threads)
    device = choose_device(args.device)
    if mail and ":" in (args.device or ""):
        raise UsageError(f"--device {args.device}: under torchrun each rank has its own; say cuda")
    dtype = choose_dtype(args.dtype, device)
    draft_dtype = choose_draft_dtype(args.draft_dtype, dtype, device)
    if is_drafting and args.target and not args.draft:
        raise UsageError("--target also needs --draft: the method drafts")
    target, draft = default_models(device)
    target = args.target or target
    draft = (args.draft or draft) if is_drafting else None
    found = {"target": target, "draft": draft, "device": str(device), "dtype": dtype_name(dtype)}
    found["draft_dtype"] = dtype_name(draft_dtype) if draft else None
    if mail:
        found["ranks"] = mail.ranks.count
    say(announcement(found))
    if device.type == "cpu":
        warn_of_emulation({dtype, draft_dtype} if draft else {dtype}, say)
    if args.no_graphs and device.type != "cuda":
        raise UsageError(f"--no-graphs has no effect on {device}: only cuda has graphs")
    pair = load_pair(target, draft, device, dtype, draft_dtype, say, mail)
    if args.no_graphs:
        pair.use_graphs(False)
    return pair, found | {"threads": torch.get_num_threads()}


def announcement(found: dict[str, str | int | None]) -> str:
    """What is about to run; found: as open_pair reports it."""
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
    device: torch.device,
    dtype: torch.dtype,
    draft_dtype: torch.dtype | None = None,
    announce: Callable[[str], None] = lambda line: None,
    mail: Mail | None = None,
) -> Pair:
    """Find, check and load the models; `announce` is told before a download.

    draft_dtype: the target's if None. mail: to the ranks that each load a share of the target; the
    draft is loaded whole, here alone. Raises CheckpointError (the two tokenizers must be the same)
    and OutOfMemory.
    """
    with memory_for("the tokenizer"):
        # The draft first: a mistake in its name is told before gigabytes are fetched
        draft_folder = None if draft is None else find_checkpoint(draft, announce)
        target_folder = find_checkpoint(target, announce)
        tokenizer = load_tokenizer(target_folder)
        if draft_folder:
            require_same_tokenizer(tokenizer, load_tokenizer(draft_folder))
    start = time.perf_counter()
    target_model = load_target(target_folder, device, dtype, mail)
    load_s = {"target": time.perf_counter() - start}
    draft_model = None
    if draft_folder:
        start = time.perf_counter()
        draft_model = GPTNeoX.from_pretrained(draft_folder, device, draft_dtype or dtype)
        load_s["draft"] = time.perf_counter() - start
    return Pair(target_model, draft_model, tokenizer, target_folder, draft_folder, load_s, mail)


def load_target(
    folder: Path, device: torch.device, dtype: torch.dtype, mail: Mail | None
) -> GPTNeoX:
    """The whole of it, or with other ranks a share. Raises as GPTNeoX.from_pretrained."""
    if mail:
        return mail.load(folder, device, dtype)
    return GPTNeoX.from_pretrained(folder, device, dtype)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer.json. Raises CheckpointError."""
    file = folder / "tokenizer.json"
    read_json(file)  # its errors are the clearer ones
    text = file.read_text(encoding="utf-8")
    # The library ends the whole process if it gets none (tiny's takes 20 times its file)
    require_memory(40 * len(text) + 2**25, torch.device("cpu"), "the tokenizer")
    try:
        with no_panic():
            tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{file} is not a tokenizer: {first_line(error)}") from error
    tokenizer.no_truncation()  # a file may carry either, meant for training
    tokenizer.no_padding()
    return tokenizer


def require_same_tokenizer(target: Tokenizer, draft: Tokenizer) -> None:
    """Raise CheckpointError unless both split text into the same ids."""
    vocabularies = []
    for tokenizer in (target, draft):
        vocabulary = tokenizer.get_vocab()
        largest = max(vocabulary.values(), default=0)
        if largest > LARGEST_ID:  # to_str counts up to it, which takes minutes and gigabytes
            raise CheckpointError(f"a tokenizer.json has id {largest}, as no vocabulary has")
        vocabularies.append(vocabulary)
    ours = json.loads(target.to_str())
    theirs = json.loads(draft.to_str())
    differing = []
    if vocabularies[0] != vocabularies[1]:
        differing.append("vocabulary")
    if ours["model"].get("merges") != theirs["model"].get("merges"):
        differing.append("merges")
    if ours["normalizer"] != theirs["normalizer"]:
        differing.append("normaliser")
    if ours["pre_tokenizer"] != theirs["pre_tokenizer"]:
        differing.append("pre-tokeniser")
    if differing:
        raise CheckpointError(f"target and draft tokenizers differ: {', '.join(differing)}")


def encode(prompt: str, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """The prompt's ids, no special token added. Raises UsageError if the model cannot read them,
    and OutOfMemory."""
    n_bytes = BYTES_PER_BYTE * len(prompt.encode("utf-8"))
    if n_bytes > 2**25:  # where it gets none, it ends the whole process
        require_memory(n_bytes, torch.device("cpu"), "tokenizing the prompt")
    try:
        with no_panic():
            ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    except Exception as error:  # the library raises nothing narrower
        why = first_line(error).rpartition(": ")[2]  # after the name of its kind of model
        to_do = "leave out what no token stands for"
        raise UsageError(f"the tokenizer cannot encode the prompt ({why}); {to_do}") from error
    if not ids:
        raise UsageError("the prompt is empty: the tokenizer makes no token of it")
    if max(ids) >= vocab_size:
        raise UsageError(f"the prompt has id {max(ids)}, but the target knows {vocab_size} ids")
    return ids

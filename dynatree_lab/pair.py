"""The pair of target and draft models: device, dtypes, loading.

pair = load_pair()
"""

import re
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from tokenizers import Tokenizer

from dynatree_lab.engine.checkpoint import (
    DTYPES,
    Checkpoint,
    find_checkpoint,
    unused_settings,
)
from dynatree_lab.engine.eagle_head import load_head
from dynatree_lab.engine.model import FastGPTNeoX, is_fast
from dynatree_lab.engine.ranks import world_size
from dynatree_lab.engine.streamed import StreamedGPTNeoX, load_streamed
from dynatree_lab.engine.tensor_parallel import ShardedGPTNeoX
from dynatree_lab.errors import UsageError, writing
from dynatree_lab.replay.candidates import (
    load_candidates,
    record_candidates,
    require_same_draft,
)
from dynatree_lab.replay.draft import RecordedDraft
from dynatree_lab.replay.models import RecordedTarget
from dynatree_lab.replay.texts import RecordedText, read_replay, require_same_vocabulary
from dynatree_lab.tokens import load_tokenizer, require_same_tokenizer
from gpt_neox import Config, GPTNeoX

TINY = Path(__file__).parents[1] / "models" / "tiny"
if not TINY.exists():  # the project is installed
    TINY = Path(__file__).parent / "tiny"
EMBEDDED = "embedded"  # a name of these models that works in every folder
CPU_INFO = Path("/proc/cpuinfo")
BFLOAT16_CAPABILITY = (8, 0)  # the first NVIDIA GPUs with bfloat16 arithmetic
POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}  # of 1,000, or of 1,024 in KiB, MiB, ...

Report = dict[str, str | int | None]


def choose_device(name: str | None) -> torch.device:
    """Return the named device; without a name, cuda if available, else cpu. Raises UsageError."""
    n_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = name or ("cuda" if n_cuda else "cpu")
    found = re.fullmatch(r"cpu|cuda(?::([0-9]+))?", name)
    if not found:
        raise UsageError(f"--device is {name!r}, it must be cpu, cuda or cuda:N")
    if name == "cpu":
        return torch.device(name)
    index = int(found[1] or 0)
    if index >= n_cuda:
        has = f"torch finds {n_cuda} CUDA devices" + ", the first is cuda:0" * bool(n_cuda)
        raise UsageError(f"--device {name}: {has}; use --device cpu")
    return torch.device("cuda", index)


def choose_dtype(
    name: str | torch.dtype | None, device: torch.device, option: str = "--dtype"
) -> torch.dtype:
    """Return the named dtype; without a name, float16 on CUDA and float32 on CPU. Raises
    UsageError."""
    if isinstance(name, torch.dtype):
        name = dtype_name(name)
    name = name or ("float16" if device.type == "cuda" else "float32")
    if name not in DTYPES:
        raise UsageError(f"{option} is {name}, it must be one of {', '.join(DTYPES)}")
    return DTYPES[name]


def choose_draft_dtype(
    name: str | torch.dtype | None, target_dtype: torch.dtype, device: torch.device
) -> torch.dtype:
    """Return the named dtype; without a name, the target's. On a GPU with bfloat16 it replaces
    float16, because small Pythia models overflow in float16. Raises UsageError."""
    if name:
        return choose_dtype(name, device, "--draft-dtype")
    if target_dtype == torch.float16 and device.type == "cuda":
        return torch.bfloat16 if has_instructions(torch.bfloat16, device) else torch.float16
    return target_dtype


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def has_instructions(dtype: torch.dtype, device: torch.device) -> bool | None:
    """Whether a device computes in this dtype without emulation; None if Linux does not list the
    features of the processor."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        return dtype != torch.bfloat16 or capability >= BFLOAT16_CAPABILITY
    names = {torch.bfloat16: {"avx512_bf16", "amx_bf16"}, torch.float16: {"avx512_fp16"}}
    text = CPU_INFO.read_text() if CPU_INFO.exists() else ""
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    if not found:
        return None
    return dtype not in names or not names[dtype].isdisjoint(found[1].split())


@dataclass(frozen=True, repr=False)
class Pair:
    """A target model with its tokenizer, and a draft model unless the method needs none."""

    target: GPTNeoX  # fast if loaded here; one shard of it if there are several ranks
    draft: GPTNeoX | None  # may be an EAGLE head
    tokenizer: Tokenizer | None  # None for a replay without a draft
    target_folder: Path
    draft_folder: Path | None
    load_s: dict[str, float]  # seconds, by "target" and "draft"
    report: Report = field(default_factory=dict)  # names, device, dtypes
    target_memory: int | None = None  # bytes; other layers are streamed (engine/streamed.py)

    def __repr__(self) -> str:  # as a notebook shows it
        return f"Pair(target {self.target_folder}, draft {self.draft_folder})"

    @property
    def models(self) -> list[GPTNeoX]:
        return [model for model in (self.target, self.draft) if model]

    @cached_property
    def float32_target(self) -> FastGPTNeoX:
        """The fast target in float32, loaded if necessary. Raises OutOfMemory."""
        if self.target.dtype == torch.float32 and is_fast(self.target):
            return self.target
        device, memory = self.target.device, self.target_memory
        return load_target(self.target_folder, device, torch.float32, target_memory=memory)

    @property
    def warm_up_steps(self) -> int:
        """Iterations that run before speed is measured. Those of a streamed target take seconds,
        and the first two do all that is done only once."""
        return 8 if self.target_memory is None else 2

    def captured(self) -> tuple[int, float]:
        """Return the number of captured CUDA graphs, and the seconds that capturing took."""
        fast = [model for model in self.models if is_fast(model)]
        return sum(model.n_graphs for model in fast), sum(model.capture_s for model in fast)


def warn_of_unused_settings(folder: Path) -> None:
    """Warn if the target's generation_config.json changes transformers' text."""
    if names := unused_settings(folder):
        what = f"generation_config.json sets {', '.join(names)}, which DynaTree does not use"
        warnings.warn(f"{what}, so transformers' text may differ", stacklevel=3)


def length_warning(pair: Pair, n_tokens: int) -> str:
    """Return a warning if a sequence is longer than the target was trained for, else ""."""
    trained = pair.target.config.max_position_embeddings
    if n_tokens <= trained:
        return ""
    return f"{n_tokens} tokens in all; the target was trained for {trained}"


def announcement(found: Report) -> str:
    """Return the line that announces a run."""
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
    target: str | Path | None = None,
    draft: str | Path | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    draft_dtype: torch.dtype | str | None = None,
    announce: Callable[[str], None] = lambda line: None,
    target_memory: int | str | None = None,
    replay: str | Path | Sequence[RecordedText] | None = None,
    candidates: str | Path | None = None,
) -> Pair:
    """Find, check and load the models. Each rank loads its shard of the target.

    Args:
        target: None or "embedded" for the embedded target, and without a draft the embedded pair.
        draft: None for methods that need none. With a replay and no candidates, None is the
            embedded draft.
        device, dtype: None for the defaults of choose_device and choose_dtype.
        draft_dtype: None for the default of choose_draft_dtype.
        announce: called with lines about the models and before a download.
        target_memory: bytes, or a size such as "2GB" or "1.5GiB". Layers of the target that do not
            fit into it are read from their files in each pass.
        replay: recorded texts in place of the target (replay/), or their file. A file that does
            not end in .jsonl is a text of people.
        candidates: file of recorded candidates in place of the draft, which then only answers what
            they lack. Without a draft, nothing does. A file that does not exist is recorded first.

    Warns of settings in the target's generation_config.json that are not used. Raises UsageError
    for an unknown device or dtype, CheckpointError for invalid checkpoints or different tokenizers,
    and OutOfMemory.
    """
    for name, model in {"target": target, "draft": draft}.items():
        if not isinstance(model, str | Path | None):
            raise UsageError(f"{name} is {model!r:.80}, it must be a folder or a hub name")
    if replay is not None:
        if target or dtype or target_memory:
            raise UsageError("replay takes the place of the target, which then has no options")
        of_draft = str(device) if device else None, draft_dtype
        return load_replay(replay, draft, candidates, announce, *of_draft)
    if candidates:
        raise UsageError("candidates need a replay")
    if target is None or target == EMBEDDED and not Path(EMBEDDED).exists():
        target, draft = TINY / "target", draft or TINY / "draft"
    device = choose_device(str(device) if device else None)
    dtype = choose_dtype(dtype, device)
    draft_dtype = choose_draft_dtype(draft_dtype, dtype, device)
    report: Report = {"target": str(target), "draft": None, "device": str(device)}
    report |= {"dtype": dtype_name(dtype), "draft_dtype": None}
    if draft:
        report |= {"draft": str(draft), "draft_dtype": dtype_name(draft_dtype)}
    if world_size() > 1:
        report["ranks"] = world_size()
    announce(announcement(report))
    for each in {dtype, draft_dtype} if draft else {dtype}:
        if has_instructions(each, device) is False:
            announce(f"note: {device} has no {dtype_name(each)} instructions, so it is slow")
    # The draft first, because a misspelt one is noticed before the target, which may be gigabytes
    own_draft = find_checkpoint(draft, announce) if draft else None
    own = find_checkpoint(target, announce)
    config = own.config  # refuses an EAGLE head, which has no tokenizer either
    warn_of_unused_settings(own.folder)
    tokenizer = load_tokenizer(own.folder)
    if own_draft and not own_draft.is_head:
        require_same_tokenizer(tokenizer, load_tokenizer(own_draft.folder))
    memory = parse_size(target_memory) if target_memory is not None else None
    start = time.perf_counter()
    memories = {"target_memory": memory}
    if memory and own_draft:
        memories["draft_cache"] = cache_bytes_of_draft(own_draft, config, draft_dtype)
    target_model = load_target(own, device, dtype, **memories)
    load_s = {"target": time.perf_counter() - start, "draft": 0.0}
    if memory is not None:
        report["streamed"] = describe_layers(target_model)
        announce(f"note: {report['streamed']}")
    others = {"load_s": load_s, "report": report, "target_memory": memory}
    pair = Pair(target_model, None, tokenizer, own.folder, draft_folder=None, **others)
    return with_draft(pair, own_draft, draft_dtype) if own_draft else pair


def load_replay(
    replay: str | Path | Sequence[RecordedText],
    draft: str | Path | None,
    candidates: str | Path | None,
    announce: Callable[[str], None],
    device: str | None,
    draft_dtype: torch.dtype | str | None,
) -> Pair:
    """Return the pair of recorded texts and of a draft, or its recorded candidates, or both. With
    neither, the draft is the embedded one. device and draft_dtype are the draft's. Raises
    ReplayError, CheckpointError, UsageError and OutOfMemory."""
    if not draft and not candidates:
        draft = TINY / "draft"
    checkpoint = find_checkpoint(draft, announce) if draft else None
    if checkpoint and checkpoint.is_head:
        raise UsageError(f"{draft} is an EAGLE head, which reads more of a target than its text")
    config = checkpoint.config if checkpoint else Config()
    tokenizer = load_tokenizer(checkpoint.folder) if checkpoint else None
    texts = replay
    if isinstance(replay, str | Path):
        texts = read_replay(replay, tokenizer, config.vocab_size)
    if tokenizer:
        require_same_vocabulary(texts, tokenizer)
    target = RecordedTarget(texts, config)
    report: Report = {"target": texts[0].model, "draft": draft and str(draft), "device": "cpu"}
    report |= {"dtype": texts[0].dtype, "draft_dtype": None}
    announce(f"replay of {len(texts)} texts of {texts[0].model}")
    load_s = {"target": 0.0, "draft": 0.0}
    pair = Pair(target, None, tokenizer, Path(texts[0].model), None, load_s=load_s, report=report)
    if checkpoint:
        where = choose_device(device)
        draft_dtype = choose_draft_dtype(draft_dtype, choose_dtype(None, where), where)
        report |= {"device": str(where), "draft_dtype": dtype_name(draft_dtype)}
        report["dtype"] = report["dtype"] or report["draft_dtype"]  # of a text of people
        pair = with_draft(pair, checkpoint, draft_dtype, where)
    if not candidates:
        return pair
    if not Path(candidates).exists() and pair.draft:
        announce(f"recording the draft's candidates in {candidates}")
        with writing(candidates):
            record_candidates(pair.draft, texts, Path(candidates))
    tree = load_candidates(candidates, texts)
    if pair.draft:
        require_same_draft(tree, texts, pair.draft)
    return replace(pair, draft=RecordedDraft(tree, texts, config, pair.draft))


def with_draft(
    pair: Pair, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | None = None
) -> Pair:
    """Return the pair with a draft model or an EAGLE head, by default on the target's device.
    Raises CheckpointError and OutOfMemory."""
    start, device = time.perf_counter(), device or pair.target.device
    if checkpoint.is_head:
        draft = load_head(checkpoint, pair.target_folder, device, dtype)
    else:
        draft = FastGPTNeoX.from_pretrained(checkpoint, device, dtype)
    load_s = pair.load_s | {"draft": time.perf_counter() - start}
    return replace(pair, draft=draft, draft_folder=checkpoint.folder, load_s=load_s)


def load_target(
    folder: Path | Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    target_memory: int | None = None,
    draft_cache: int = 0,
) -> FastGPTNeoX:
    """Load this rank's shard of a target, or stream its layers if target_memory, bytes, is given.
    draft_cache: the part of it that the draft's cache takes. Raises the errors of
    FastGPTNeoX.from_pretrained, and UsageError."""
    if target_memory is not None:
        if world_size() > 1:
            raise UsageError("--target-memory works without torchrun")
        return load_streamed(folder, device, dtype, target_memory, draft_cache=draft_cache)
    kind = FastGPTNeoX if world_size() == 1 else ShardedGPTNeoX
    return kind.from_pretrained(folder, device, dtype)


def cache_bytes_of_draft(draft: Checkpoint, target: Config, dtype: torch.dtype) -> int:
    """Return the bytes of a draft's cache for as many tokens as the target was trained for."""
    config = draft.model_config or replace(target, num_hidden_layers=1)
    n_elements = 2 * config.num_hidden_layers * config.hidden_size
    return n_elements * dtype.itemsize * target.max_position_embeddings


def describe_layers(target: StreamedGPTNeoX) -> str:
    """Return what stays in memory and what is read."""
    layers = target.layers
    if not layers.bytes_per_pass:
        return "all layers of the target fit into --target-memory"
    kept = f"{layers.n_resident} of the target's {layers.n_layers} layers stay in memory"
    return f"{kept}, and each pass reads {layers.bytes_per_pass / 1e9:.3g} GB"


def parse_size(size: int | str) -> int:
    """Return the bytes of a size: an int is bytes, a word is like 2GB, 1.5 GiB, 800M. Raises
    UsageError."""
    if isinstance(size, int) and size >= 0:
        return size
    found = re.fullmatch(r"([0-9]*\.?[0-9]+) *([KMGT])(i?)B?", str(size).strip(), re.IGNORECASE)
    if not found:
        raise UsageError(f"--target-memory is {size!r}, it must be like 2GB, 800M or 1.5GiB")
    base = 1024 if found[3] else 1000
    return int(float(found[1]) * base ** POWERS[found[2].upper()])

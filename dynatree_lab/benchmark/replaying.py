"""Replay in the benchmark: recording the texts of a table's prompts, and tables without a target.

    dynatree-bench --record texts.jsonl --candidates candidates.npz
    dynatree-bench --replay texts.jsonl --candidates candidates.npz --methods "linear K=8,dynatree"

A replayed text has no times. Its line in the results file has the rows of all passes, from which
`--prices` compute the speed. docs/replay.md explains both programs.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from dynatree_lab import __version__
from dynatree_lab.benchmark.cases import Case, Part
from dynatree_lab.benchmark.machine import path_from_root
from dynatree_lab.benchmark.results import Line
from dynatree_lab.cli.options import set_threads
from dynatree_lab.cli.program import print_line
from dynatree_lab.engine.checkpoint import find_checkpoint
from dynatree_lab.errors import UsageError
from dynatree_lab.generation.config import GenerationConfig
from dynatree_lab.generation.replayed import require_replayable
from dynatree_lab.generation.step import Step
from dynatree_lab.metrics import count_passes, measure
from dynatree_lab.pair import TINY, Pair, choose_device, dtype_name, load_pair
from dynatree_lab.replay.candidates import make_candidates
from dynatree_lab.replay.draft import RecordedDraft
from dynatree_lab.replay.models import RecordedTarget
from dynatree_lab.replay.texts import (
    SUFFIX,
    RecordedText,
    ReplayError,
    read_replay,
    tokenizer_digest,
    weights_name,
)
from dynatree_lab.request import Request
from dynatree_lab.tokens import load_tokenizer

# The metrics of a replayed text: those that are no times
REPLAYED_METRICS = (
    "iterations", "tokens_per_iter", "accepted_per_iter", "drafted_per_iter", "acceptance_rate",
    "draft_passes", "repetition",
)  # fmt: skip
OF_TARGET = (  # options of a target, which a replay does not have
    "pair", "target", "dtype", "target_memory", "temperature", "top_p", "seed", "hf", "record",
)  # fmt: skip


def read_texts_of(args: argparse.Namespace, part: Part) -> list[RecordedText]:
    """Return all texts of --replay. part: the table's, whose sizes are those of a text of people.
    Raises UsageError and ReplayError."""
    if given := [name for name in OF_TARGET if getattr(args, name)]:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(f"{options}: no effect with --replay, which has the texts already")
    if args.repeats > 1:
        raise UsageError("--repeats: no effect with --replay, whose rounds are equal")
    is_recorded = Path(args.replay).suffix == SUFFIX
    if is_recorded and args.prompt_tokens:
        raise UsageError("--prompt-tokens: no effect with --replay, which has the prompts already")
    sizes = [getattr(args, name) or getattr(part, name) for name in ("prompt_tokens", "new_tokens")]
    n_texts = args.n_prompts or part.n_prompts  # of a text of people
    tokenizer, n_ids = None, 0
    if args.draft or not args.candidates:
        checkpoint = find_checkpoint(args.draft or TINY / "draft", print_line)
        n_ids = checkpoint.config.vocab_size  # raises CheckpointError for an EAGLE head
        tokenizer = load_tokenizer(checkpoint.folder)
    texts = read_replay(args.replay, tokenizer, n_ids, (n_texts, sizes[0][0], sizes[1][0]))
    if len({text.temperature for text in texts}) > 1:
        raise UsageError(f"{args.replay} has texts of several temperatures, it must have one")
    return texts


def move_to_texts(texts: Sequence[RecordedText], part: Part, args: argparse.Namespace) -> Part:
    """Return a part moved to recorded texts, all of which are cut to the shortest one's length.
    Raises UsageError for --max-new-tokens above it."""
    shortest = min(len(text.ids) for text in texts)
    new_tokens = args.new_tokens or [shortest]
    if max(new_tokens) > shortest:
        length = f"{args.replay} has a text of {shortest} tokens"
        raise UsageError(f"--max-new-tokens is {max(new_tokens)}, but {length}")
    return replace(
        part,
        dataset=Path(args.replay).name,
        n_prompts=len(texts),
        prompt_tokens=[max(len(text.prompt) for text in texts)],
        new_tokens=new_tokens,
        rows=[*part.rows, *part.searched],
        searched=(),
        temperature=[0.0],
        text_temperature=texts[0].temperature,
        published={},
        drawn=(),
    )


def choose_replayable(cases: Sequence[Case], is_named: bool) -> list[Case]:
    """Return the cases that a replay can have. Raises UsageError for another one if the options
    name it, else prints a note.

    is_named: the rows are those of the options, not the table's.
    """
    found, left_out = [], []
    for case in cases:
        try:
            require_row_replayable(case)
            found.append(replace(case, is_replayed=True))
        except UsageError:
            if is_named:
                raise
            left_out.append(case.row)
    if left_out:
        why = "they need more of the target than its tokens"
        print_line(f"note: a replay leaves out {', '.join(left_out)}, because {why}")
    return found


def require_row_replayable(case: Case) -> None:
    """Raise UsageError if a replay cannot have a case."""
    if case.is_hf or case.uses_head:
        raise UsageError(f"{case.row}: a recorded text has only the target's tokens")
    config = case.generation_config()
    try:
        require_replayable(config, config.method)
    except ReplayError as error:
        raise UsageError(f"{case.row}: {error}") from error


def open_replay(args: argparse.Namespace, texts: Sequence[RecordedText]) -> Pair:
    """Return the pair of all recorded texts, to which a file of candidates belongs, and the draft
    of the options. Raises UsageError and ReplayError."""
    set_threads(args.threads, choose_device(args.device))
    return load_pair(
        draft=args.draft,
        device=args.device,
        draft_dtype=args.draft_dtype,
        announce=print_line,
        replay=texts,
        candidates=args.candidates,
    )


def replayed_line(steps: Sequence[Step], config: GenerationConfig) -> Line:
    """Return the part of a replayed text's line in a results file: what is no time."""
    metrics = asdict(measure(steps))
    found: Line = {name: metrics[name] for name in REPLAYED_METRICS}
    found |= count_passes(steps, config)
    return found | {"incomplete": sum(not step.is_complete for step in steps)}


def source_of(pair: Pair) -> dict[str, object]:
    """Return what a recorded text says of the target. Reads the target's weights."""
    return {
        "model": path_from_root(str(pair.report["target"])),
        "weights": weights_name(pair.target_folder),
        "dtype": dtype_name(pair.target.dtype),
        "vocab_size": pair.target.config.vocab_size,
        "eos_ids": list(pair.target.config.eos_ids),
        "tokenizer": tokenizer_digest(pair.tokenizer),
        "program": f"dynatree_lab {__version__}, torch {torch.__version__}",
    }


def recorded_text(request: Request, ids: list[int], source: dict[str, object]) -> RecordedText:
    """Return ar's ids of a request as a recorded text. source: as source_of returns it."""
    sampling = request.config.sampling
    given = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed}
    return RecordedText(prompt=request.prompt, ids=ids, **source, **given)


def with_replay(pair: Pair, texts: Sequence[RecordedText]) -> Pair:
    """Return the pair with recorded texts in place of its target, and with its draft's candidates
    along them, which are recorded first."""
    print_line(f"recording the draft's candidates along {len(texts)} texts of ar")
    candidates = make_candidates(pair.draft, texts)
    draft = RecordedDraft(candidates, texts, pair.draft.config, pair.draft)
    return replace(pair, target=RecordedTarget(texts, pair.draft.config), draft=draft)

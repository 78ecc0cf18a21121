"""Benchmark of the five files: DynaTree, part by part, against ar.

    python bench.py
    python bench.py --rows chain,dynatree --row "tau=0.02 N_max=32" --rounds 3
    python bench.py --rows dynatree --prompt "The captain opened the letter"

Each row of the table is a method with settings. It generates a text after each prompt. What makes
the comparison fair:

baseline  ar is the target alone, with the same forward, cache and loop as all other rows
turns     all rows run on one prompt before the next, and a different row comes first on each
          prompt, so whatever slows the machine for a while slows all of them
warm-up   every row generates some tokens before the clock runs, because first passes are slower
clock     it starts after the first token, so the target's pass over the prompt does not count, but
          the draft's does. A step ends with a read from the device, so all of its work counts
length    an end-of-text token does not end a text, so all texts are equally long
seeds     sampled texts have a seed for each prompt and round, the same for all rows

The columns, as medians over all prompts and rounds:

tok/s        (tokens - 1) / seconds after the first token
x ar         tok/s / ar's tok/s on the same prompt in the same round, with quartiles
tokens/iter  tokens per pass of the target, the bonus token included
rows/tree    rows of such a pass, the root included
passes       of the draft model per pass of the target, one per level (draft passes)
exact        the texts whose ids equal ar's; sampled texts do, because their seeds are equal
"""

import argparse
import json
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy

from draft_tree import Autoregressive, DynaTree, Settings
from dynatree import (
    TINY,
    Metrics,
    ModelDrafter,
    add_model_options,
    draft_temperature,
    encode_prompt,
    generate,
    load_models,
    load_tokenizer,
    make_acceptance,
    measure,
    parse_settings,
    require_values,
)
from gpt_neox import Model, NonFiniteLogits
from sampling import Sampler, distance_to_interval, probabilities
from verify import Acceptance

# Rounding may decide between two float32 logits that differ by less, or on a random number that is
# less than this from a token's interval
TIE = 1e-4

PROMPTS = (
    "She opened the door of the house and looked",
    "The ship sailed at dawn, and the captain",
    "In the winter of that year the old king",
    "The city stands on the left bank of the river",
    "He was the first player of the team to",
    '"I have never seen such a place," said',
    "The station was built in the nineteenth century and",
    "After the war the family moved to a small town,",
)


@dataclass(frozen=True)
class Row:
    """A row of the table: a method with its settings."""

    settings: Settings
    draft_temperature: float | None = None  # None: that of the options


# From `tree` to `dynatree` each row has one part of DynaTree more
TREE = DynaTree(adapt_breadth=False, adapt_depth=False, prune=False, history=False)
PRUNE = replace(TREE, prune=True)
BREADTH = replace(PRUNE, adapt_breadth=True)
ROWS = {
    "ar": Row(Autoregressive()),  # the target alone
    "chain": Row(replace(TREE, B_mid=1)),  # linear speculation: five tokens, no branches
    "tree": Row(TREE),  # two children everywhere, five levels: 63 rows
    "+prune": Row(PRUNE),  # without children below tau: the paper's fixed tree
    "+breadth": Row(BREADTH),  # more children where the draft is unsure
    "+depth": Row(DynaTree(history=False)),  # paths end where they get unlikely
    "dynatree": Row(DynaTree()),  # +history: thresholds move with acceptance
    "unscaled": Row(DynaTree(), draft_temperature=1.0),  # with the draft's own probabilities
}
N_WARM_UP = 8  # tokens
NOTES = {  # printed if all of these rows ran
    ("tree", "+prune", "+breadth", "+depth", "dynatree"): """
From tree to dynatree each row has one part of DynaTree more. A part trades tokens/iter for
rows/tree and draft passes, so what it gains depends on what these cost on this machine. With
models/tiny, +breadth, +depth and history change few trees. Only the speeds change from run to run;
compare those of parts with --rounds 3 or more.""",
    ("dynatree", "unscaled"): """
unscaled is dynatree at draft temperature 1: its thresholds apply to the draft's own probabilities,
which are further from those of acceptance.""",
}


@dataclass(frozen=True)
class Text:
    """A measured text."""

    row: str
    prompt: int  # its index
    round: int
    metrics: Metrics


class Bench:
    """The models, prompts and rows of a run."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.rows = choose_rows(args.rows.split(","), args.row)
        self.target, self.draft = load_models(args, has_draft=set(self.rows) != {"ar"})
        tokenizer = load_tokenizer(args.target or TINY / "target")
        self.prompts = [encode_prompt(prompt, tokenizer) for prompt in choose_prompts(args)]

    def measure_all(self) -> Iterator[Text]:
        """Generate all texts: all rows on one prompt, then all rows on the next."""
        rows, n_prompts = list(self.rows), len(self.prompts)
        for row in rows:
            self.measure(row, 0, seed=0, max_new_tokens=N_WARM_UP)
        for turn in range(self.args.rounds * n_prompts):
            round_index, prompt = divmod(turn, n_prompts)
            first = turn % len(rows)
            for row in rows[first:] + rows[:first]:
                seed = self.seed_of(prompt, round_index)
                metrics = self.measure(row, prompt, seed, self.args.max_new_tokens)
                yield Text(row, prompt, round_index, metrics)

    def seed_of(self, prompt: int, round_index: int) -> int:
        """Return the seed of the texts of a prompt in a round."""
        return self.args.seed + round_index * len(self.prompts) + prompt

    def measure(self, row: str, prompt: int, seed: int, max_new_tokens: int) -> Metrics:
        """Generate one text."""
        settings, given = self.rows[row].settings, self.rows[row].draft_temperature
        rule, accept = settings.make_rule(), make_acceptance(self.args, seed)
        scale = draft_temperature(self.args.temperature, given or self.args.draft_temperature)
        drafter = self.draft and ModelDrafter(self.draft, scale)
        arguments = self.target, drafter, self.prompts[prompt], rule, max_new_tokens
        return measure(generate(*arguments, accept=accept))


def choose_rows(names: Sequence[str], added: Sequence[str]) -> dict[str, Row]:
    """Return ar, the named rows, and a row of dynatree for each "NAME=VALUE ..." of `added`."""
    for name in names:
        if name not in ROWS:
            raise ValueError(f"--rows {name}: a row must be one of {', '.join(ROWS)}")
    rows = {name: ROWS[name] for name in ("ar", *names)}
    return rows | {words: Row(parse_settings(DynaTree, words.split())) for words in added}


def choose_prompts(args: argparse.Namespace) -> Sequence[str]:
    """Return the prompts of the options. Raises OSError and ValueError."""
    if args.prompt is not None:
        return [args.prompt]
    if args.prompts is None:
        return PROMPTS
    try:
        text = Path(args.prompts).read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{args.prompts} is not UTF-8: {error}") from error
    return [prompt["prompt"] for prompt in split_prompts(text, args.prompts)[0]]


def split_prompts(text: str, file: str) -> tuple[list[dict[str, object]], str]:
    """Return the prompts in the text of a file, each an object with "prompt", and what is one.

    If the text begins with a brace, each line has {"prompt": ...} or {"turns": [...]}. If all lines
    are JSON strings, each is a prompt. Other text has a prompt in each block between empty lines
    or, if it is a single block, in each line. Raises ValueError naming the file, and the line.
    """
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")  # U+FEFF: the byte order mark
    lines = [(n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise ValueError(f"{file} has no prompt: it is empty")
    if re.match(r'\s*\[\s*["{]', text):
        raise ValueError(f"{file} is a JSON array; use one JSON object per line, or plain text")
    if is_heading(lines[0][1]):
        raise ValueError(f"{file} is raw WikiText; use one JSON object per line, or plain text")
    has_objects = lines[0][1].lstrip().startswith("{")
    if has_objects or all(is_json_string(line) for _, line in lines):
        found = [prompt_of(line, f"{file}, line {n}") for n, line in lines]
        return found, "one per JSON object" if has_objects else "one per JSON string"
    blocks = [block for block in re.split(r"\n\s*\n", text) if block.strip()]
    if len(blocks) > 1:
        return [{"prompt": block.rstrip()} for block in blocks], "one per block"
    return [{"prompt": line.rstrip()} for _, line in lines], "one per line"


def is_heading(line: str) -> bool:
    """Whether a line is a heading of WikiText, such as " = Title = "."""
    return line.startswith(" = ") and line.rstrip().endswith(" =")


def is_json_string(line: str) -> bool:
    """Whether a line is a JSON string. One that only begins with a quotation mark is not."""
    try:
        return isinstance(json.loads(line), str)
    except ValueError:
        return False


def prompt_of(line: str, where: str) -> dict[str, object]:
    """Return the prompt in a line of JSON: the string, the "prompt" of an object or, in the format
    of MT-bench and Spec-Bench, the first of its "turns". Raises ValueError."""
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    match found:
        case {"prompt": str(prompt)} | {"turns": [str(prompt), *_]} if prompt:
            return found | {"prompt": prompt}
        case str(prompt) if prompt:
            return {"prompt": prompt}
    raise ValueError(f"{where} has no text as `prompt` or as the first of its `turns`")


def make_table(texts: Sequence[Text]) -> str:
    """Return the Markdown table of all texts, a line per row."""
    ar = {(text.prompt, text.round): text.metrics for text in texts if text.row == "ar"}
    head = "row", "tok/s", "x ar (quartiles)", "tokens/iter", "rows/tree", "draft passes", "exact"
    lines = [head]
    for row in dict.fromkeys(text.row for text in texts):
        own = [text for text in texts if text.row == row]
        pairs = [(text.metrics, ar[text.prompt, text.round]) for text in own]
        low, middle, high = quartiles([each.rate / base.rate for each, base in pairs])
        n_exact = sum(each.ids == base.ids for each, base in pairs)
        values = (
            row,
            f"{quartiles([each.rate for each, _ in pairs])[1]:.1f}",
            f"{middle:.2f} ({low:.2f} to {high:.2f})",
            f"{quartiles([each.tokens_per_iter for each, _ in pairs])[1]:.2f}",
            f"{quartiles([each.rows_per_tree for each, _ in pairs])[1]:.1f}",
            f"{quartiles([each.draft_passes for each, _ in pairs])[1]:.1f}",
            f"{n_exact} of {len(own)}",
        )
        lines.append(values)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, tuple("-" * width for width in widths))
    rows = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the lower quartile, the median and the upper quartile."""
    return numpy.percentile(values, (25, 50, 75)).tolist()


def run(args: argparse.Namespace) -> int:
    """Measure all texts and print the table. Return 1 if a float32 text is wrong, else 0."""
    require_values(args)
    if args.json and Path(args.json).is_file():
        raise ValueError(f"--json: {args.json} exists; use another name")
    bench, texts = Bench(args), []
    n_texts = args.rounds * len(bench.prompts) * len(bench.rows)
    try:
        with open(args.json or os.devnull, "a", encoding="utf-8") as file:
            for text in bench.measure_all():
                texts.append(text)
                which = f"{len(texts)}/{n_texts} prompt {text.prompt + 1}, {text.row}"
                print(f"{which}: {text.metrics}", file=sys.stderr)
                print(json.dumps(asdict(text)), file=file, flush=True)
    finally:  # also after Ctrl-C or SIGTERM
        if texts := with_ar(texts):
            print(make_table(texts))
            for rows, note in NOTES.items():
                if bench.rows.keys() >= set(rows):
                    print(note)
    return 1 if has_wrong_text(bench, texts) and args.dtype == "float32" else 0


def with_ar(texts: Sequence[Text]) -> list[Text]:
    """Return the texts that have one of ar to compare with, which an interrupted turn may lack."""
    turns = {(text.prompt, text.round) for text in texts if text.row == "ar"}
    return [text for text in texts if (text.prompt, text.round) in turns]


def has_wrong_text(bench: Bench, texts: Sequence[Text]) -> bool:
    """Whether a text differs from ar's, and not by rounding. Prints where texts differ."""
    ar_ids = {(text.prompt, text.round): text.metrics.ids for text in texts if text.row == "ar"}
    is_wrong = False
    for text in texts:
        ids, reference = text.metrics.ids, ar_ids[text.prompt, text.round]
        if ids != reference:
            accept = make_acceptance(bench.args, bench.seed_of(text.prompt, text.round))
            prompt = bench.prompts[text.prompt]
            i, gap = find_difference(bench.target, prompt, ids, reference, accept)
            where = f"prompt {text.prompt + 1}, {text.row}: the ids differ from token {i} on"
            what = "random number's distance" if isinstance(accept, Sampler) else "top-2 gap"
            print(f"{where}, where the {what} is {gap:.1g}", file=sys.stderr)
            is_wrong |= gap >= TIE
    return is_wrong


def find_difference(
    target: Model, prompt: list[int], ids: list[int], reference: list[int], accept: Acceptance
) -> tuple[int, float]:
    """Return the first index at which two texts differ, and how far rounding would have to reach.

    accept: a new acceptance of the texts. For greedy text the gap is by how much the target's best
    logit leads over the second. For a Sampler it is how far the random number of this token is
    from the intervals of both tokens.
    """
    i = next(i for i, (one, other) in enumerate(zip(ids, reference, strict=True)) if one != other)
    context = prompt + ids[:i]
    logits = target.prefill(context, target.new_cache(len(context)))  # [1, V]
    if isinstance(accept, Sampler):
        *_, number = (accept.random.random() for _ in range(i + 1))
        probs = probabilities(logits, accept.temperature, accept.top_p)[0]
        return i, max(distance_to_interval(probs, each[i], number) for each in (ids, reference))
    best, second = logits.topk(2).values[0].tolist()
    return i, best - second


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Benchmark of DynaTree", allow_abbrev=False)
    add = parser.add_argument
    add("--rows", default=",".join(ROWS), help="rows besides ar, by name (default all)")
    add("--row", action="append", default=[], help="row of dynatree, as 'tau=0.02'; repeatable")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", help="text to continue")
    prompts.add_argument(
        "--prompts", help="file of plain text or JSON lines (default: eight texts)"
    )
    add("--max-new-tokens", type=int, default=64, help="per text (default 64)")
    add("--rounds", type=int, default=1, help="passes over all prompts (default 1)")
    add("--json", help="new file, with a JSON object per text")
    add_model_options(parser)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        return run(args)
    except (OSError, ValueError, NonFiniteLogits) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())

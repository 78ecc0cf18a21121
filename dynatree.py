"""DynaTree: tree speculative decoding. The loop, the draft model's part, and a command line.

Each iteration drafts a tree of candidates below the last token, runs the target once over the whole
tree, and keeps the path that the target accepts, plus one token of the target's own. The text is
exact: greedy text is what the target writes, and sampled text has the target's distribution.
Paper: DynaTree v2, Algorithm 1.

    target = GPTNeoX.from_pretrained("models/tiny/target")
    drafter = ModelDrafter(GPTNeoX.from_pretrained("models/tiny/draft"), temperature=0.5)
    rule = DynaTree().make_rule()
    for step in generate(target, drafter, [510, 1453], rule, max_new_tokens=64):
        print(step.tokens)

    python dynatree.py --prompt "She opened the door of the house and looked" --max-new-tokens 48

A fork can replace four parts, which are arguments of `generate`: the target (gpt_neox.Model), the
drafter (Drafter), the rule (draft_tree.Rule), and the acceptance (verify.Acceptance).

Shapes: n rows of one level, k candidates of each row, V vocabulary.
"""

import argparse
import math
import operator
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from draft_tree import Autoregressive, Candidates, DynaTree, Rule, Settings, Tree, draw, grow
from gpt_neox import GPTNeoX, Model, NonFiniteLogits, find_checkpoint
from sampling import Sampler, require_positive, tempered
from verify import Acceptance, accept_greedy, ancestor_mask, cut, tree_inputs

TINY = Path(__file__).resolve().parent / "models" / "tiny"  # the default pair
METHODS = {"ar": Autoregressive, "dynatree": DynaTree}  # of the command line below
BOOLS = {"on": True, "off": False}  # values of a setting that is a bool


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one iteration. The first step is the prefill's. Its tree is only a root: the
    last token of the prompt, which unlike later roots has been run."""

    tokens: list[int]  # the new tokens: one after each row of the path, cut at EOS and the limit
    tree: Tree
    path: list[int]  # the accepted rows of the tree, the root first


class Drafter:
    """Proposes candidates for trees. ModelDrafter does it with a draft model."""

    def start(self, prompt: list[int], capacity: int, vocab_size: int) -> None:
        """Begin a text. capacity: cache slots for the whole text and a tree. vocab_size: the
        target's; candidates are ids below it."""

    def draft(self, tree: Tree, rows: list[int], k: int) -> Candidates:
        """Run these rows of a tree, one level, and return k candidates below each (a
        draft_tree.Draft). rows is [0] in the first call for a tree."""
        raise NotImplementedError(f"{type(self).__name__} has no draft")

    def commit(self, tree: Tree, path: list[int], tokens: list[int]) -> None:
        """Record what was accepted of a tree. In the first call, after the prefill, the tree is
        only the last token of the prompt. tokens: the target's token after each row of the path;
        the last one is the next root."""


class ModelDrafter(Drafter):
    """A draft model and its KV cache, which also holds the tree while it grows.

    Between trees the cache holds text[:n_cached]. The first pass of a tree runs the rest: at first
    the prompt, later the accepted rows that the draft skipped, and the root. From then on the
    cache's newest rows are the root and the nodes in the order in which they are run, which is that
    of Tree.draft_slots. `commit` makes all of them scratch again and keeps the accepted ones.
    """

    def __init__(self, model: Model, temperature: float = 1.0):
        """temperature: divides the draft's logits, which keeps the order of candidates.

        Rules take p(u) for the probability that u is accepted. A greedy target always takes its
        best token, so it accepts a draft's best one far more often than the draft's probability
        says. A temperature below 1 corrects this; 1 is the paper's. Raises ValueError.
        """
        require_positive("draft_temperature", temperature)
        self.model, self.temperature = model, temperature

    def start(self, prompt: list[int], capacity: int, vocab_size: int) -> None:
        self.cache = self.model.new_cache(capacity)
        self.vocab_size = vocab_size
        self.text = list(prompt)  # up to the root
        self.n_cached = 0

    def draft(self, tree: Tree, rows: list[int], k: int) -> Candidates:
        logits = self.run_uncached() if rows == [0] else self.run_level(tree, rows)
        return self.choose(logits[:, : self.vocab_size], k)

    def run_uncached(self) -> Tensor:
        """Run all uncached tokens and return the logits [1, V] after the last one, the root."""
        uncached, self.n_cached = self.text[self.n_cached :], len(self.text)
        # The draft runs token 0 in place of a token that its vocabulary lacks
        ids = [token if token < self.model.config.vocab_size else 0 for token in uncached]
        logits = self.model.prefill(ids, self.cache)
        self.root_slot = self.cache.length - 1  # in the cache; the older slots are committed
        self.parents = [-1]  # of the rows that are run, by draft slot: each parent's draft slot
        return logits

    def run_level(self, tree: Tree, rows: list[int]) -> Tensor:
        """Run n rows, one level below the latest one. Return the logits [n, V] after them."""
        self.parents += [tree.draft_slots[tree.parents[row]] for row in rows]
        mask = ancestor_mask(self.parents)[-len(rows) :]  # as for the target's pass
        tokens = torch.tensor([tree.tokens[row] for row in rows])
        positions = torch.full((len(rows),), self.root_slot + tree.depths[rows[0]])
        logits = self.model.forward(tokens, positions, self.cache, torch.from_numpy(mask))
        self.cache.length += len(rows)  # the next level comes after it; `commit` rewinds
        return logits

    def choose(self, logits: Tensor, k: int) -> Candidates:
        """Return the k likeliest tokens after each row of logits [n, V]."""
        logprobs = torch.log_softmax(tempered(logits, self.temperature), dim=-1)
        found = logprobs.topk(min(k, logits.shape[1]))
        return Candidates(found.indices.cpu().numpy(), found.values.cpu().numpy())

    def commit(self, tree: Tree, path: list[int], tokens: list[int]) -> None:
        slots = [tree.draft_slots[row] for row in path if tree.draft_slots[row] >= 0]
        if slots:  # they come first on the path, because nothing is run below a skipped row
            self.cache.rewind(self.root_slot)
            self.cache.commit(slots)
            self.n_cached += len(slots) - 1  # the root is counted already
        self.text += tokens


def draft_temperature(temperature: float, given: float | None = None) -> float:
    """Return the given temperature of a draft or, for None, one that suits text of a temperature (0
    is greedy). With models/tiny the target's tokens are most likely at 0.4 to 0.5 for greedy text
    and at 0.8 for text of 0.7; this line is near both."""
    return (1 + temperature) / 2 if given is None else given


@torch.inference_mode()
def generate(
    target: Model,
    drafter: Drafter | None,
    prompt: Sequence[int],
    rule: Rule,
    max_new_tokens: int,
    *,
    eos_ids: Iterable[int] = (),
    accept: Acceptance = accept_greedy,
) -> Iterator[Step]:
    """Decode a text and yield one Step per iteration.

    Args:
        drafter: None for a rule that never drafts.
        rule: a new one for each text.
        eos_ids: tokens that end the text; target.config.eos_ids are those of the checkpoint.
        accept: accept_greedy, or a new Sampler for sampled text.

    The first next() raises ValueError if an argument is invalid. Raises NonFiniteLogits if a model
    overflows.
    """
    vocab_size, n_left = target.config.vocab_size, max_new_tokens
    prompt = [operator.index(token) for token in prompt]
    if not prompt or not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise ValueError(f"prompt must have at least one id, and all from 0 to {vocab_size - 1}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}, it must be at least 1")
    if isinstance(rule, Settings):
        raise ValueError(f"rule is {rule!r:.80}, the settings of one; use .make_rule()")
    if rule.is_used:
        raise ValueError(f"this {type(rule).__name__} has served another text; make a new rule")
    rule.is_used = True
    eos_ids = {operator.index(token) for token in eos_ids}
    drafter = drafter or Drafter()  # which raises if it is asked to draft
    capacity = len(prompt) + max_new_tokens + rule.max_rows
    cache = target.new_cache(capacity)
    drafter.start(prompt, capacity, vocab_size)
    # prefill commits the whole prompt. The last token then serves as a tree of one row, so that
    # `accept` chooses the first new token as it chooses all others
    tree = Tree.from_root(prompt[-1])
    path, tokens = accept(tree, target.prefill(prompt, cache))
    drafter.commit(tree, path, tokens)
    new = cut(tokens, eos_ids, n_left)
    n_left, last = n_left - len(new), new[-1]
    yield Step(new, tree, path)
    while n_left and last not in eos_ids:
        # 1 draft: a tree below the last token, of at most n_left - 1 levels, because the bonus
        # token comes after them
        tree = grow(rule, last, drafter.draft, n_left - 1, vocab_size)
        # 2 mask and positions: a row attends to its ancestors; its depth gives its position
        tree_tokens, positions, mask = tree_inputs(tree, cache.length)
        # 3 verify: one pass of the target over the whole tree
        logits = target.forward(tree_tokens, positions, cache, mask)
        # 4 accept: a path of the tree, then one token of the target's own, the bonus token
        path, tokens = accept(tree, logits)
        new = cut(tokens, eos_ids, n_left)  # the caches are not cut, because the loop ends
        n_left, last = n_left - len(new), new[-1]
        # 5 commit: both caches keep the accepted rows and discard the others
        cache.commit(path)
        drafter.commit(tree, path, tokens)
        # 6 adapt: the rule learns from what was accepted
        rule.adapt(tree, path)
        yield Step(new, tree, path)


@dataclass(frozen=True)
class Metrics:
    """The measurements of a text. The prefill's step counts in no average."""

    ids: list[int]  # the new tokens
    rate: float  # tokens per second after the first token; nan for a text of one token
    tokens_per_iter: float  # with the bonus token, and with what EOS or the limit cuts
    rows_per_tree: float  # rows of a target pass, the root included
    draft_passes: float  # of an iteration, one per level

    def __str__(self) -> str:
        if math.isnan(self.rate):
            return "1 token"
        speed = f"{self.rate:.1f} tokens/s, {self.tokens_per_iter:.2f} tokens/iter"
        return f"{len(self.ids)} tokens, {speed}, {self.rows_per_tree:.1f} rows/tree"


def measure(steps: Iterator[Step]) -> Metrics:
    """Generate a text and return its metrics."""
    first = next(steps)
    began = time.perf_counter()
    rest = list(steps)  # each step ends with a read from the device, so all of its work counts
    seconds = time.perf_counter() - began
    ids = [token for step in (first, *rest) for token in step.tokens]
    n = len(rest) or math.nan
    rate = (len(ids) - 1) / seconds if rest else math.nan
    n_tokens = sum(len(step.path) for step in rest)  # one token after each row of a path
    n_rows = sum(len(step.tree) for step in rest)
    n_passes = sum(count_draft_passes(step.tree) for step in rest)
    return Metrics(ids, rate, n_tokens / n, n_rows / n, n_passes / n)


def count_draft_passes(tree: Tree) -> int:
    """Return the levels of which the draft has run a row."""
    return len({tree.depths[row] for row, slot in enumerate(tree.draft_slots) if slot >= 0})


def parse_settings(kind: type[Settings], words: Sequence[str]) -> Settings:
    """Return the settings of a method from words such as "tau=0.02". Raises ValueError."""
    types, values = {f.name: f.type for f in fields(kind)}, {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in types:
            raise ValueError(f"{word}: the method's settings are {', '.join(types) or 'none'}")
        try:
            values[name] = BOOLS[value] if types[name] is bool else types[name](value)
        except (KeyError, ValueError) as error:
            allowed = "on or off" if types[name] is bool else f"of type {types[name].__name__}"
            raise ValueError(f"{word}: {name} must be {allowed}") from error
    return kind(**values)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that bench.py has too: models, device and sampling."""
    add, device = parser.add_argument, "cuda" if torch.cuda.is_available() else "cpu"
    add("--target", help="folder of a checkpoint, or hub repository (default models/tiny)")
    add("--draft", help="the same, with the target's tokenizer (default models/tiny)")
    add("--device", default=device, help="(default cuda if there is one, else cpu)")
    add("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    add("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add("--top-p", type=float, default=1.0, help="(default 1)")
    scale = "of the draft's probabilities (default: (1 + temperature) / 2; the paper: 1)"
    add("--draft-temperature", type=float, metavar="X", help=scale)
    add("--seed", type=int, default=0, help="random seed (default 0)")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    more = "(python -m dynatree_lab has more methods and options)"  # shown with each error, too
    usage = f"%(prog)s --prompt TEXT [options]\n{more}"
    parser = argparse.ArgumentParser(usage=usage, allow_abbrev=False)
    add = parser.add_argument
    add("--prompt", required=True, help="text to continue")
    add("--max-new-tokens", type=int, default=128, help="(default 128)")
    add("--method", choices=METHODS, default="dynatree", help="(default dynatree)")
    names = ", ".join(f.name for f in fields(DynaTree))
    add("--set", metavar="NAME=VALUE", action="append", default=[], help=f"repeatable: {names}")
    add("--show-tree", action="store_true", help="draw trees on stderr: tokens, p(u), * accepted")
    add_model_options(parser)
    return parser.parse_args(arguments)


def require_values(args: argparse.Namespace) -> None:
    """Raise ValueError for an option that is empty, as from an unset shell variable, or for a count
    below 1."""
    for name, value in vars(args).items():
        option = f"--{name.replace('_', '-')}"
        if "" in (value if isinstance(value, list) else [value]):
            raise ValueError(f"{option} is empty")
        if name in ("max_new_tokens", "rounds") and value < 1:
            raise ValueError(f"{option} is {value}, it must be at least 1")


def load_models(args: argparse.Namespace, has_draft: bool) -> tuple[GPTNeoX, GPTNeoX | None]:
    """Return the target and the draft of the options. Raises OSError and ValueError."""
    n_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if args.device not in ("cpu", *["cuda"][:n_cuda], *(f"cuda:{i}" for i in range(n_cuda))):
        allowed = f"it must be cpu, cuda or cuda:N, and torch finds {n_cuda} CUDA devices"
        raise ValueError(f"--device is {args.device}, {allowed}")
    if args.target and not args.draft and has_draft:
        raise ValueError("--target needs a --draft with its tokenizer, or only --method ar")
    if args.dtype != "float32":
        why = "rounding may decide between two tokens that are nearly equal"
        print(f"note: in {args.dtype} {why}, so text may differ from ar's", file=sys.stderr)
    options = args.device, getattr(torch, args.dtype)
    if args.draft_temperature is not None and not has_draft:
        raise ValueError("--draft-temperature has no effect, because ar drafts nothing")
    target = GPTNeoX.from_pretrained(args.target or TINY / "target", *options)
    if not has_draft:
        return target, None
    return target, GPTNeoX.from_pretrained(args.draft or TINY / "draft", *options)


def make_acceptance(args: argparse.Namespace, seed: int) -> Acceptance:
    """Return a new acceptance for one text. Raises ValueError."""
    if args.temperature == 0:
        if args.top_p != 1:
            raise ValueError("--top-p needs a --temperature above 0")
        return accept_greedy
    return Sampler(args.temperature, args.top_p, seed)


def load_tokenizer(checkpoint: str | Path) -> Tokenizer:
    """Return the tokenizer of a checkpoint. Raises OSError, and ValueError naming the file."""
    file = find_checkpoint(checkpoint) / "tokenizer.json"
    text = file.read_text("utf-8")
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library's errors have no type of their own
        raise ValueError(f"{file} is not a tokenizer: {error}") from error
    tokenizer.no_truncation()  # training code may have left truncation or padding in the file
    tokenizer.no_padding()
    return tokenizer


def encode_prompt(prompt: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a text that begins a sequence, with the tokens that the post_processor of
    tokenizer.json adds. Raises ValueError for a text without tokens of its own."""
    encoding = tokenizer.encode(prompt)
    if all(encoding.special_tokens_mask):  # 1 for each added token
        raise ValueError("the prompt is empty: it has no tokens")
    return encoding.ids


def write(
    steps: Iterator[Step], tokenizer: Tokenizer, eos_ids: set[int], is_at_end: bool
) -> Iterator[Step]:
    """Print a text, without EOS, while it is generated or at its end, and yield its steps."""
    ids, n_shown = [], 0
    try:
        for step in steps:
            ids += [token for token in step.tokens if token not in eos_ids]
            if not is_at_end:
                # An incomplete character is decoded as U+FFFD, until later ids complete it
                text = tokenizer.decode(ids).rstrip("\ufffd")
                print(text[n_shown:], end="", flush=True)
                n_shown = len(text)
            yield step
    finally:  # also after Ctrl-C, but not if there is no text, as after an error
        if ids:
            print(tokenizer.decode(ids)[n_shown:], flush=True)


def show_trees(steps: Iterator[Step], tokenizer: Tokenizer) -> Iterator[Step]:
    """Draw the tree of every iteration on stderr, and yield the steps."""

    def label(row: int) -> str:
        token = tokenizer.decode([step.tree.tokens[row]], skip_special_tokens=False)
        accepted = " *" if row in step.path else ""
        return f"{token!r} {math.exp(step.tree.path_logprobs[row]):.2f}{accepted}"

    yield next(steps)  # the prefill drafts no tree
    for number, step in enumerate(steps, start=1):
        print(f"tree {number}\n{draw(step.tree, label)}", file=sys.stderr)
        yield step


def run(args: argparse.Namespace) -> None:
    """Generate and print a text, and its metrics on stderr."""
    require_values(args)
    settings = parse_settings(METHODS[args.method], args.set)
    target, draft = load_models(args, has_draft=args.method != "ar")
    tokenizer, eos_ids = load_tokenizer(args.target or TINY / "target"), set(target.config.eos_ids)
    accept = make_acceptance(args, args.seed)
    scale = draft_temperature(args.temperature, args.draft_temperature)
    steps = generate(
        target,
        draft and ModelDrafter(draft, scale),
        encode_prompt(args.prompt, tokenizer),
        settings.make_rule(),
        args.max_new_tokens,
        eos_ids=eos_ids,
        accept=accept,
    )
    if args.show_tree:
        steps = show_trees(steps, tokenizer)
    print(measure(write(steps, tokenizer, eos_ids, args.show_tree)), file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    sys.stdout.reconfigure(errors="replace")  # characters that the encoding lacks
    args = parse_arguments(arguments)
    try:
        run(args)
    except (OSError, ValueError, NonFiniteLogits) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""DynaTree: tree speculative decoding. The loop, the draft model's side of it, a command line.

Each iteration drafts a tree of candidates below the last token of the text, runs the target once
over the whole tree, and keeps the path that the target accepts, plus one token of the target's own.
The text is exact: greedy text is the target's own, and sampled text has the target's distribution.
Paper: DynaTree v2, Algorithm 1.

    target = GPTNeoX.from_pretrained("models/tiny/target")
    drafter = ModelDrafter(GPTNeoX.from_pretrained("models/tiny/draft"))
    rule = DynaTree().make_rule()
    for step in generate(target, drafter, [510, 1453], rule, max_new_tokens=64):
        print(step.tokens)

    python dynatree.py --prompt "The ship sailed at dawn" --max-new-tokens 64

The five files gpt_neox.py, draft_tree.py, verify.py, sampling.py and dynatree.py are the whole
algorithm. A fork can replace four parts of it, which are arguments of `generate`: the target
(gpt_neox.Model), the drafter (Drafter), the rule (draft_tree.Rule), and the acceptance
(verify.Acceptance).

Shapes: n rows of one level, k candidates of each row, V vocabulary.
"""

import sys
from pathlib import Path

# In a clone, the command line of cli/, with all methods and options, takes over from the small one
# below: before torch is imported, because it sets up how torch takes memory
if __name__ == "__main__" and (Path(__file__).parent / "cli" / "main.py").exists():
    from cli.start import run_program

    run_program("cli.main")

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from operator import index

import numpy
import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import Tensor

from draft_tree import Autoregressive, Candidates, DynaTree, Rule, Settings, Tree, grow
from gpt_neox import GPTNeoX, Model
from sampling import Sampler
from verify import Acceptance, NonFiniteLogits, accept_greedy, cut, tree_inputs

METHODS = {"ar": Autoregressive, "dynatree": DynaTree}  # of the command line below


@dataclass(frozen=True, slots=True)
class Step:
    """What one iteration adds to the text. The first step is the prompt's; its tree is only a root,
    the prompt's last token."""

    tokens: list[int]  # one for each row of the path, fewer where EOS or the limit ends the text
    tree: Tree
    path: list[int]  # the accepted rows of the tree, the root first


class Drafter:
    """Proposes candidates for trees. ModelDrafter does so by a draft model."""

    def start(self, prompt: list[int], capacity: int, vocab_size: int) -> None:
        """Begin a text. capacity: cache slots that are needed, for the whole text and a tree.
        vocab_size: of the target; no candidate may be outside it."""

    def draft(self, tokens: list[int], parents: list[int] | None, k: int) -> Candidates:
        """Run n nodes of a tree and return k candidates below each, as draft_tree.Draft says."""
        raise NotImplementedError(f"{type(self).__name__} has no draft")

    def commit(self, tree: Tree, path: list[int], tokens: list[int]) -> None:
        """Take in a verified tree, or the prompt's. tokens: the target's token after each row of
        the path; the last one is the next root."""


class ModelDrafter(Drafter):
    """A draft model and its KV cache, which also holds the tree while it grows.

    In the cache stand the text, the root, and the rows below it in the order in which they are run.
    Tree.draft_slots counts from the root's slot. `uncached` has the tokens of the text that the
    draft has not run yet, the next root last: the next tree begins by running them.
    """

    def __init__(self, model: Model):
        self.model = model

    def start(self, prompt: list[int], capacity: int, vocab_size: int) -> None:
        self.cache = self.model.new_cache(capacity)
        self.vocab_size = vocab_size
        self.uncached = list(prompt)
        self.reset_tree()

    def reset_tree(self) -> None:
        """Begin a tree: the last level is the root, and no row below it has been run."""
        self.n_run = 0  # rows below the root that have been run; they are the newest of the cache
        self.depth = 0  # of the last level
        # [rows of the last level, n_run]: which of the rows that were run each of them attends to
        self.mask = numpy.zeros((1, 0), dtype=bool)

    def draft(self, tokens: list[int], parents: list[int] | None, k: int) -> Candidates:
        logits = self.run_root() if parents is None else self.run_level(tokens, parents)
        return self.choose(logits[:, : self.vocab_size], k)

    def run_root(self) -> Tensor:
        """Run all uncached tokens and return the logits [1, V] after the last one, the root."""
        # The draft runs token 0 for one that its vocabulary lacks. That makes worse candidates, and
        # the target still decides
        ids = [token if token < self.model.config.vocab_size else 0 for token in self.uncached]
        self.uncached = []
        return self.model.prefill(ids, self.cache)

    def run_level(self, tokens: list[int], parents: list[int]) -> Tensor:
        """Run n nodes and return the logits [n, V] after them. Each attends to all that the node
        above it attends to, and to itself."""
        n = len(tokens)
        first = self.cache.length - self.n_run  # the position after the root's
        position = first + self.depth
        self.mask = numpy.concatenate([self.mask[parents], numpy.eye(n, dtype=bool)], axis=1)
        mask, positions = torch.from_numpy(self.mask), torch.full((n,), position)
        logits = self.model.forward(torch.tensor(tokens), positions, self.cache, mask)
        self.cache.length += n  # until the tree is verified
        self.n_run += n
        self.depth += 1
        return logits

    def choose(self, logits: Tensor, k: int) -> Candidates:
        """Return the k likeliest tokens of each row of logits [n, V]."""
        found = torch.log_softmax(logits, dim=-1).topk(min(k, logits.shape[1]))
        return Candidates(found.indices.cpu().numpy(), found.values.cpu().numpy())

    def commit(self, tree: Tree, path: list[int], tokens: list[int]) -> None:
        self.cache.rewind(self.cache.length - self.n_run)
        self.reset_tree()
        slots = [tree.draft_slots[row] for row in path[1:]]
        rows = [slot - 1 for slot in slots if slot > 0]  # counted from the slot after the root's
        self.cache.commit(rows)
        self.uncached += tokens[len(rows) :]  # tokens[i] is that of path[i + 1]


@torch.inference_mode()
def generate(
    target: Model,
    drafter: Drafter | None,
    prompt: Sequence[int],
    rule: Rule,
    max_new_tokens: int,
    *,
    eos_ids: Sequence[int] = (),
    accept: Acceptance = accept_greedy,
) -> Iterator[Step]:
    """Decode a text and yield one Step per iteration.

    Args:
        drafter: None for a rule that never drafts.
        rule: a new one for each text.
        eos_ids: end the text; those of a checkpoint are target.config.eos_ids.
        accept: accept_greedy, or a new Sampler for sampled text.

    When the first step is asked for, raises ValueError if an argument is invalid. Raises
    NonFiniteLogits if the target overflows.
    """
    vocab_size, n_left = target.config.vocab_size, max_new_tokens
    prompt, eos_ids = require_text(vocab_size, prompt, max_new_tokens), tuple(eos_ids)
    require_parts(drafter, rule)
    rule.is_used = True
    drafter = drafter or Drafter()  # which is never asked to draft
    capacity = len(prompt) + max_new_tokens + rule.max_rows
    cache = target.new_cache(capacity)
    drafter.start(prompt, capacity, vocab_size)
    # prefill commits the prompt. Its last token is then taken for a tree, so that `accept` chooses
    # the first token of the text as it chooses all others
    tree = Tree.from_root(prompt[-1])
    path, tokens = accept(tree, target.prefill(prompt, cache))
    drafter.commit(tree, path, tokens)
    new = cut(tokens, eos_ids, n_left)
    n_left -= len(new)
    yield Step(new, tree, path)
    while n_left and new[-1] not in eos_ids:
        # 1 draft: a tree below the last token, one level less than tokens left: one is the bonus
        tree = grow(rule, new[-1], drafter.draft, n_left - 1, vocab_size)
        # 2 mask and positions: a row attends to the rows above it; its depth gives its position
        tree_tokens, positions, mask = tree_inputs(tree, cache.length)
        # 3 verify: one pass of the target over the whole tree
        logits = target.forward(tree_tokens, positions, cache, mask)
        # 4 accept: a path of the tree, then one token of the target's own, the bonus token
        path, tokens = accept(tree, logits)
        new = cut(tokens, eos_ids, n_left)
        n_left -= len(new)
        # 5 commit: both caches keep the accepted rows and forget the others
        cache.commit(path)
        drafter.commit(tree, path, tokens)
        # 6 adapt: the rule learns from what was accepted
        rule.adapt(tree, path)
        yield Step(new, tree, path)


def require_text(vocab_size: int, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """Return the prompt as a list. Raises ValueError for it or for max_new_tokens."""
    try:
        ids = [index(token) for token in prompt]
    except TypeError as error:
        raise ValueError("prompt must be a sequence of token ids") from error
    if not ids or not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ValueError(f"prompt must have at least one id, and all from 0 to {vocab_size - 1}")
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens!r}, it must be an int from 1")
    return ids


def require_parts(drafter: Drafter | None, rule: Rule) -> None:
    """Raise ValueError for what `generate` cannot use as a drafter or a rule."""
    if not isinstance(rule, Rule) or rule.is_used:
        raise ValueError(f"rule is {rule!r:.80}, it must be a Rule that served no other text")
    is_needed = drafter is not None or rule.max_depth > 0
    if is_needed and not isinstance(drafter, Drafter):
        raise ValueError(f"drafter is {drafter!r:.80}, this rule needs a Drafter")


def read_settings(kind: type[Settings], assignments: Sequence[str]) -> Settings:
    """Return a method's default settings, changed by NAME=VALUE assignments. Raises ValueError."""
    types = {f.name: f.type for f in fields(kind)}
    values = {}
    for assignment in assignments:
        name, _, word = assignment.partition("=")
        if name not in types:
            raise ValueError(f"--set {assignment}: the settings are {', '.join(types) or 'none'}")
        try:
            is_bool = types[name] is bool
            values[name] = {"on": True, "off": False}[word] if is_bool else types[name](word)
        except (KeyError, ValueError) as error:
            expected = "on or off" if types[name] is bool else types[name].__name__
            raise ValueError(f"--set {assignment}: {name} must be {expected}") from error
    return kind(**values)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tree speculative decoding of GPT-NeoX models")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="(default 64)")
    parser.add_argument("--method", choices=METHODS, default="dynatree", help="(default dynatree)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="change a setting"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="(default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of sampled text (default 0)")
    parser.add_argument("--target", default="models/tiny/target", help="folder of a checkpoint")
    parser.add_argument("--draft", default="models/tiny/draft", help="folder of a checkpoint")
    parser.add_argument("--device", default="cpu", help="(default cpu)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--compare", action="store_true", help="also run ar on the same prompt")
    return parser.parse_args()


def write(steps: Iterator[Step], tokenizer: Tokenizer) -> tuple[list[int], int]:
    """Print a text as it is committed, and return its ids and the number of steps."""
    ids, n_steps, n_shown = [], 0, 0
    for step in steps:
        ids += step.tokens
        n_steps += 1
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # else more bytes of the last character are to come
            print(text[n_shown:], end="", flush=True)
            n_shown = len(text)
    print(text[n_shown:])
    return ids, n_steps


def run(args: argparse.Namespace) -> None:
    """Write a text by a method, and if asked for, compare it with ar's."""
    settings = read_settings(METHODS[args.method], args.set)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {args.device}: torch finds no CUDA device")
    dtype = getattr(torch, args.dtype)
    target = GPTNeoX.from_pretrained(args.target, args.device, dtype)
    drafter = ModelDrafter(GPTNeoX.from_pretrained(args.draft, args.device, dtype))
    file = Path(args.target) / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_str(file.read_text("utf-8"))
    except Exception as error:  # the library's errors have no type of their own
        raise ValueError(f"{file}: {error}") from error
    prompt = tokenizer.encode(args.prompt).ids

    def decode(rule: Rule) -> Iterator[Step]:
        is_sampled = args.temperature != 0
        accept = Sampler(args.temperature, args.top_p, args.seed) if is_sampled else accept_greedy
        options = {"eos_ids": target.config.eos_ids, "accept": accept}
        return generate(target, drafter, prompt, rule, args.max_new_tokens, **options)

    def timed(settings: Settings) -> tuple[list[int], float]:
        began = time.perf_counter()
        ids = [token for step in decode(settings.make_rule()) for token in step.tokens]
        return ids, len(ids) / (time.perf_counter() - began)

    began = time.perf_counter()
    ids, n_steps = write(decode(settings.make_rule()), tokenizer)
    rate = len(ids) / (time.perf_counter() - began)
    summary = f"{len(ids)} tokens, {rate:.1f} tokens/s, {len(ids) / n_steps:.2f} tokens/iter"
    print(summary, file=sys.stderr)
    if args.compare:  # both without printing
        ids, rate = timed(settings)
        ar_ids, ar_rate = timed(Autoregressive())
        verdict = "equal" if ids == ar_ids else "different"
        if args.temperature:  # two samples of one distribution
            verdict = "sampled, not compared"
        compared = f"ar: {ar_rate:.1f} tokens/s, so {rate / ar_rate:.2f}x; the ids are {verdict}"
        print(compared, file=sys.stderr)


def main() -> int:
    args = parse_arguments()
    try:
        run(args)
    except (OSError, ValueError, NonFiniteLogits, SafetensorError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

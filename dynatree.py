"""DynaTree: tree speculative decoding. The loop, the draft model's part, and a command line.

Each iteration drafts a tree of candidates below the last token, runs the target once over the whole
tree, and keeps the path that the target accepts, plus one token of the target's own. The text is
exact: greedy text is what the target writes, and sampled text has the target's distribution.
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

# Beside dynatree_lab, run its command line, with all methods and options, instead of the small one
# below. run_program does not return. It is called before `import torch`, because it sets how torch
# allocates memory. The program may be started through a link, which `resolve` follows
if __name__ == "__main__" and (Path(__file__).resolve().parent / "dynatree_lab").exists():
    from dynatree_lab.cli.start import run_program

    run_program("dynatree_lab.cli.main")

import argparse
import operator
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy
import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import Tensor

from draft_tree import Autoregressive, Candidates, DynaTree, Rule, Tree, grow
from gpt_neox import GPTNeoX, Model
from sampling import Sampler
from verify import Acceptance, NonFiniteLogits, accept_greedy, cut, tree_inputs

TINY = Path(__file__).resolve().parent / "models" / "tiny"  # the embedded pair
METHODS = {"ar": Autoregressive, "dynatree": DynaTree}  # of the command line below


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

    def draft(self, tokens: list[int], parents: list[int] | None, k: int) -> Candidates:
        """Run n nodes of a tree and return k candidates below each, as draft_tree.Draft says."""
        raise NotImplementedError(f"{type(self).__name__} has no draft")

    def commit(self, tree: Tree, path: list[int], tokens: list[int]) -> None:
        """Record what was accepted of a tree. In the first call, after the prefill, the tree is
        only the last token of the prompt. tokens: the target's token after each row of the path;
        the last one is the next root."""


class ModelDrafter(Drafter):
    """A draft model and its KV cache, which also holds the tree while it grows.

    `uncached` has the tokens that the draft has not run yet, the root last: before the first tree
    the prompt, before later ones the accepted rows that were not run. The first pass of a tree runs
    them. From then on the cache's newest rows are the root and the nodes in the order in which they
    are run, which is that of Tree.draft_slots. `commit` makes all of them scratch again and keeps
    the accepted ones.
    """

    def __init__(self, model: Model):
        self.model = model

    def start(self, prompt: list[int], capacity: int, vocab_size: int) -> None:
        self.cache = self.model.new_cache(capacity)
        self.vocab_size = vocab_size
        self.uncached = list(prompt)

    def draft(self, tokens: list[int], parents: list[int] | None, k: int) -> Candidates:
        # In the first call `tokens` is the root, which is the last of `uncached`
        logits = self.run_uncached() if parents is None else self.run_level(tokens, parents)
        return self.choose(logits[:, : self.vocab_size], k)

    def run_uncached(self) -> Tensor:
        """Run all uncached tokens and return the logits [1, V] after the last one, the root."""
        # The draft runs token 0 in place of a token that its vocabulary lacks. Its candidates are
        # then worse, but the target still decides
        ids = [token if token < self.model.config.vocab_size else 0 for token in self.uncached]
        self.uncached = []
        logits = self.model.prefill(ids, self.cache)
        self.root_slot = self.cache.length - 1  # in the cache; the older slots are committed
        self.depth = 0  # of the latest level
        # [rows of the latest level, rows run in this tree]: which rows the level attends to
        self.mask = numpy.ones((1, 1), dtype=bool)
        return logits

    def run_level(self, tokens: list[int], parents: list[int]) -> Tensor:
        """Run n nodes, one level below the latest one. Return the logits [n, V] after them. A node
        attends to all that its parent attends to, and to itself."""
        n = len(tokens)
        self.depth += 1
        positions = torch.full((n,), self.root_slot + self.depth)
        # The parents' rows of the mask, and a column for each new node
        self.mask = numpy.concatenate([self.mask[parents], numpy.eye(n, dtype=bool)], axis=1)
        mask = torch.from_numpy(self.mask)
        logits = self.model.forward(torch.tensor(tokens), positions, self.cache, mask)
        self.cache.length += n  # the next level comes after it; `commit` rewinds
        return logits

    def choose(self, logits: Tensor, k: int) -> Candidates:
        """Return the k likeliest tokens after each row of logits [n, V], and the entropy."""
        logprobs = torch.log_softmax(logits, dim=-1)
        entropy = torch.special.entr(logprobs.exp()).sum(dim=-1)  # - p log p; 0 where p is 0
        found = logprobs.topk(min(k, logits.shape[1]))
        parts = found.indices, found.values, entropy
        return Candidates(*(part.cpu().numpy() for part in parts))

    def commit(self, tree: Tree, path: list[int], tokens: list[int]) -> None:
        # Rows that were not run (-1) come last in a path, because nothing is run below them
        slots = [slot for row in path if (slot := tree.draft_slots[row]) != -1]
        if slots:
            self.cache.rewind(self.root_slot)
            self.cache.commit(slots)
            tokens = tokens[len(slots) - 1 :]  # tokens[i] is the token of path[i + 1]
        self.uncached += tokens


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
        eos_ids: tokens that end the text; target.config.eos_ids are those of the checkpoint.
        accept: accept_greedy, or a new Sampler for sampled text.

    The first next() raises ValueError if an argument is invalid. Raises NonFiniteLogits if the
    target overflows.
    """
    vocab_size, n_left = target.config.vocab_size, max_new_tokens
    prompt = checked_prompt(vocab_size, prompt, max_new_tokens)
    eos_ids = checked_ids("eos_ids", eos_ids)
    require_new(rule)
    rule.is_used = True
    require_drafter(drafter, rule)
    drafter = drafter or Drafter()  # never asked to draft, because the rule has max_depth 0
    capacity = len(prompt) + max_new_tokens + rule.max_rows
    cache = target.new_cache(capacity)
    drafter.start(prompt, capacity, vocab_size)
    # prefill commits the whole prompt. The last token then serves as a tree of one row, so that
    # `accept` chooses the first new token as it chooses all others
    tree = Tree.from_root(prompt[-1])
    path, tokens = accept(tree, target.prefill(prompt, cache))
    drafter.commit(tree, path, tokens)
    new = cut(tokens, eos_ids, n_left)
    n_left, last = n_left - len(new), new[-1]  # read here, because a caller may change a Step
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
        new = cut(tokens, eos_ids, n_left)  # after a cut the loop ends, so the caches need none
        n_left, last = n_left - len(new), new[-1]
        # 5 commit: both caches keep the accepted rows and discard the others
        cache.commit(path)
        drafter.commit(tree, path, tokens)
        # 6 adapt: the rule learns from what was accepted
        rule.adapt(tree, path)
        yield Step(new, tree, path)


def checked_prompt(vocab_size: int, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """Return the prompt as a list. Raises ValueError if it or max_new_tokens is invalid."""
    ids = checked_ids("prompt", prompt)
    if not ids or not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ValueError(f"prompt must have at least one id, and all from 0 to {vocab_size - 1}")
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens!r}, it must be an int from 1")
    return ids


def checked_ids(name: str, ids: Iterable[int]) -> list[int]:
    """Return ids as a list. Raises ValueError, with the argument's name, if they are no ids."""
    try:
        return [operator.index(token) for token in ids]
    except TypeError as error:
        raise ValueError(f"{name} is {ids!r:.80}, it must be a sequence of token ids") from error


def require_new(rule: Rule) -> None:
    """Raise ValueError unless a rule is one that has served no other text."""
    if not isinstance(rule, Rule) or rule.is_used:
        raise ValueError(f"rule is {rule!r:.80}, it must be a Rule that served no other text")


def require_drafter(drafter: Drafter | None, rule: Rule) -> None:
    """Raise ValueError for what `generate` cannot use as a drafter."""
    may_be_none = rule.max_depth == 0
    if not isinstance(drafter, Drafter) and not (drafter is None and may_be_none):
        raise ValueError(f"drafter is {drafter!r:.80}, this rule needs a Drafter")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    description = "Tree speculative decoding of GPT-NeoX models"
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="(default 128)")
    parser.add_argument("--method", choices=METHODS, default="dynatree", help="(default dynatree)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="(default 1)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument("--target", default=TINY / "target", help="folder of a checkpoint")
    parser.add_argument("--draft", default=TINY / "draft", help="folder of a checkpoint")
    parser.add_argument("--device", default="cpu", help="(default cpu)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    return parser.parse_args(arguments)


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Return the tokenizer of a checkpoint's folder. Raises OSError, and ValueError naming the
    file."""
    file = Path(folder) / "tokenizer.json"
    text = file.read_text("utf-8")
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library's errors have no type of their own
        raise ValueError(f"{file} is not a tokenizer: {error}") from error
    tokenizer.no_truncation()  # training code may have left either in the file
    tokenizer.no_padding()
    return tokenizer


def encode_prompt(prompt: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a text that begins a sequence, with the tokens that the post_processor of
    tokenizer.json adds. Raises ValueError for a text without tokens of its own."""
    encoding = tokenizer.encode(prompt)
    if all(encoding.special_tokens_mask):  # 1 for each added token
        raise ValueError("the prompt is empty: it has no tokens")
    return encoding.ids


def ends_bytes(token: int, tokenizer: Tokenizer) -> bool:
    """Whether a token ends a run of byte tokens, such as <0xF0>, which is decoded as one. It then
    is no byte, and not one of the tokens that decoding skips."""
    name = tokenizer.id_to_token(token) or ""
    return not name.startswith("<0x") and tokenizer.decode([token]) != ""


def final_text(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return the text of ids without its end that later ids may change: a run of bytes and an
    incomplete character, which is decoded as U+FFFD."""
    n = len(ids)
    while n and not ends_bytes(ids[n - 1], tokenizer):
        n -= 1
    return tokenizer.decode(ids[:n]).rstrip("\ufffd")


def write(steps: Iterator[Step], tokenizer: Tokenizer, eos_ids: Sequence[int]) -> Iterator[Step]:
    """Print a text, without EOS, while it is generated, and yield its steps."""
    ids, n_shown = [], 0
    for step in steps:
        ids += [token for token in step.tokens if token not in eos_ids]
        text = final_text(ids, tokenizer)
        print(text[n_shown:], end="", flush=True)
        n_shown = len(text)
        yield step
    print(tokenizer.decode(ids)[n_shown:])


def run(args: argparse.Namespace) -> None:
    """Generate and print a text, and its speed after the first token."""
    rule = METHODS[args.method]().make_rule()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {args.device}: torch finds no CUDA device")
    dtype = getattr(torch, args.dtype)
    target = GPTNeoX.from_pretrained(args.target, args.device, dtype)
    drafter = None
    if rule.max_depth > 0:
        drafter = ModelDrafter(GPTNeoX.from_pretrained(args.draft, args.device, dtype))
    tokenizer = load_tokenizer(args.target)
    prompt, eos_ids = encode_prompt(args.prompt, tokenizer), target.config.eos_ids
    is_sampled = args.temperature != 0
    accept = Sampler(args.temperature, args.top_p, args.seed) if is_sampled else accept_greedy
    options = {"eos_ids": eos_ids, "accept": accept}
    steps = generate(target, drafter, prompt, rule, args.max_new_tokens, **options)
    print(summary(write(steps, tokenizer, eos_ids)), file=sys.stderr)


def summary(steps: Iterator[Step]) -> str:
    """Return the speed of a generation after its first token, and its tokens per iteration, which
    include those that EOS or the limit cuts."""
    n_new = len(next(steps).tokens)  # the prefill is no iteration
    began, n_iterations, n_tokens = time.perf_counter(), 0, 0
    for step in steps:
        n_new += len(step.tokens)
        n_iterations += 1
        n_tokens += len(step.path)  # one token after each row of the path
    if not n_iterations:
        return "1 token"
    rate = (n_new - 1) / (time.perf_counter() - began)
    return f"{n_new} tokens, {rate:.1f} tokens/s, {n_tokens / n_iterations:.2f} tokens/iter"


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
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

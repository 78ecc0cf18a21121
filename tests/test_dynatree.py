"""The loop: commit lengths, both caches, EOS and limit, non-finite logits, metrics."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from conftest import Remembering, assert_close, random_config, random_model, random_tensors, run
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import gpt_neox
from cli.metrics import Metrics, measure, repetition, token_ids
from draft_tree import DynaTree, Tree
from dynatree import Step, generate
from engine import memory
from engine.caches import CachePool
from engine.memory import OutOfMemory
from engine.passes import Use
from engine.sampling import Sampler, Sampling
from engine.scores import Scores, scores_of
from engine.stopwatch import Stopwatch
from gpt_neox import GPTNeoX, KVCache
from methods import METHODS
from methods.static import Alone, Chain, Fixed, StaticRule
from verify import NonFiniteLogits, cut

PROMPT = [3, 1, 4, 1, 5]


class Stub(GPTNeoX):
    """A model that knows nothing but positions: after position i comes token `follows(i)`."""

    def __init__(self, follows: Callable[[int], int], vocab_size: int = 50):
        super().__init__(random_config(vocab_size=vocab_size, n_layers=1))
        self.follows = follows
        self.n_heads = self.config.n_heads
        self.pool = CachePool(self.logits, 1, self.device, self.config, is_plain=True)

    def run(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | None, start: int
    ) -> Tensor:
        return torch.tensor([[float(self.follows(i))] for i in positions.tolist()])

    def score(self, x: Tensor, cache: KVCache) -> Scores:
        logits = torch.zeros(len(x), self.config.vocab_size).scatter_(1, x.long(), 20.0)
        return scores_of(logits, cache.use.ranking)


def counting(position: int) -> int:
    """The text of every target that is a stub."""
    return position % 40


def one_ahead(position: int) -> int:
    """A draft that is never right."""
    return (position + 1) % 40


def wrong_after_nine(position: int) -> int:
    """A draft that is wrong after positions 9, 19, ..., and else right."""
    if position % 10 < 9:
        return counting(position)
    return 41


def commit_lengths(draft: Stub, rule: Chain | Fixed, limit: int) -> list[int]:
    """How many tokens each iteration commits; the text must be the target's."""
    steps = list(generate(Stub(counting), draft, PROMPT, rule, limit))
    first = len(PROMPT) - 1  # the position that the first new token follows
    assert token_ids(steps) == [counting(first + i) for i in range(limit)]
    return [len(step.tokens) for step in steps[1:]]


def test_always_accepted_commits_depth_plus_one() -> None:
    """A draft that is always right: K accepted and the bonus, cut only by the limit."""
    draft = Stub(counting)
    assert commit_lengths(draft, Chain(K=4), 1 + 5 * 3) == [5, 5, 5]
    assert commit_lengths(draft, Fixed(D=3, B=2, tau=0.0), 1 + 4 * 3 + 2) == [4, 4, 4, 2]


def test_never_accepted_commits_the_bonus_alone() -> None:
    draft = Stub(one_ahead)
    assert commit_lengths(draft, Chain(K=4), 8) == [1] * 7


def test_sometimes_accepted_stops_at_the_first_wrong_guess() -> None:
    """An iteration ends with the token the draft got wrong."""
    draft = Stub(wrong_after_nine)
    # The first token comes from position 4, so the root stands at 5 and guesses come from 5 on.
    # From 5: right after 5, 6, 7 (K = 3), bonus; root at 9: wrong at once; 10, 11, 12, bonus; ...
    assert commit_lengths(draft, Chain(K=3), 1 + 15) == [4, 1, 4, 4, 2]


def test_a_budget_of_one_row_is_ar() -> None:
    """Every budget counts verify rows, root included."""
    draft = Stub(counting)
    steps = list(generate(Stub(counting), draft, PROMPT, Fixed(N_max=1), 6))
    assert [len(step.tree) for step in steps[1:]] == [1] * 5


def record_caches(monkeypatch: pytest.MonkeyPatch) -> list[KVCache]:
    """Filled from now on with every cache that a model makes; a target's comes before a draft's."""
    made: list[KVCache] = []
    real = GPTNeoX.new_cache

    def new_cache(model: GPTNeoX, capacity: int, use: Use | None = None) -> KVCache:
        cache = real(model, capacity, use)
        made.append(cache)
        return cache

    monkeypatch.setattr(GPTNeoX, "new_cache", new_cache)
    return made


def noisy_pair(seed: int = 5) -> tuple[GPTNeoX, GPTNeoX]:
    """A draft near enough to be accepted often, and rejected often."""
    config = random_config()
    tensors = random_tensors(config, seed)
    noise = random_tensors(config, seed + 1)
    near = {name: t + 0.06 * noise[name] for name, t in tensors.items()}
    return GPTNeoX.from_tensors(config, tensors), GPTNeoX.from_tensors(config, near)


def assert_same_slots(cache: KVCache, expected: KVCache) -> None:
    """Every slot that is committed in `cache`."""
    n = cache.length
    assert_close(cache.kv[..., :n, :], expected.kv[..., :n, :])


def assert_equals_fresh_prefill(model: GPTNeoX, cache: KVCache, ids: list[int]) -> None:
    """What is committed is what a prefill of the same ids writes."""
    fresh = model.new_cache(64)
    if cache.length:
        model.prefill(ids[: cache.length], fresh)
    assert_same_slots(cache, fresh)


@pytest.mark.parametrize("commit", ["keep", "rebuild"])
@pytest.mark.parametrize("settings", [Chain(K=4), Fixed(D=4, B=3, tau=0.0), DynaTree(tau=0.001)])
def test_both_caches_equal_a_fresh_prefill_after_every_commit(
    monkeypatch: pytest.MonkeyPatch, settings: Chain | Fixed | DynaTree, commit: str
) -> None:
    """Slots [0, length) hold exactly the committed tokens: all but the root in the target's cache,
    never more than that in the draft's (mask, positions, rows kept and catch-up are all in it)."""
    target, draft = noisy_pair()
    caches = record_caches(monkeypatch)
    ids = list(PROMPT)
    has_moved = False
    for step in generate(target, draft, PROMPT, settings, 30, commit=commit):
        ids += step.tokens
        path = step.path
        if path != list(range(len(path))):
            has_moved = True
        target_cache = caches[0]
        draft_cache = caches[1]
        is_cut = len(ids) == len(PROMPT) + 30  # the last step may have committed more than it gave
        if step.tree and not is_cut:
            assert target_cache.length == len(ids) - 1
            root_slot = len(ids) - len(step.tokens) - 1
            n_run = sum(step.tree.draft_slots[row] >= 0 for row in path)
            assert draft_cache.length == root_slot + n_run
            assert draft_cache.length <= target_cache.length
        assert_equals_fresh_prefill(target, target_cache, ids)
        assert_equals_fresh_prefill(draft, draft_cache, ids)
    assert isinstance(settings, Chain) or has_moved


def test_keep_and_rebuild_leave_the_same_steps_and_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = noisy_pair()
    caches = record_caches(monkeypatch)
    runs = []
    for commit in ("keep", "rebuild"):
        steps = generate(target, draft, PROMPT, Fixed(D=4, B=3, tau=0.0), 30, commit=commit)
        runs.append([(step.tokens, step.path) for step in steps])
    assert runs[0] == runs[1]
    kept = caches[0]
    rebuilt = caches[2]  # after the draft's of the first run
    assert kept.length == rebuilt.length
    assert_same_slots(kept, rebuilt)


def test_a_draft_that_is_the_target_is_always_accepted_in_full() -> None:
    """A wrong position, mask or slot in any draft level would cost acceptance here."""
    target = random_model(7)
    steps = list(generate(target, target, PROMPT, Chain(K=6), 1 + 7 * 5))
    assert [len(step.path) - 1 for step in steps[1:]] == [6] * 5


def test_a_sibling_does_not_change_what_the_draft_thinks() -> None:
    """The paper's code lets siblings share one mutable cache; here a node's children depend on
    its own path alone, so a wide tree contains the chain the draft would write by itself."""
    model = random_model(7)
    steps = list(generate(model, model, PROMPT, Fixed(D=4, B=3, tau=0.0, N_max=128), 6))
    assert len(steps) == 2, "prefill's and one iteration's"
    assert len(steps[1].path) - 1 == 4


def test_history_starts_fresh_in_each_generation() -> None:
    """The paper's code leaks history from prompt to prompt, so results depend on their order."""
    target, draft = noisy_pair()
    settings = Remembering(DynaTree(W=2, tau=0.001, rho_stop=0.002))

    def drafted() -> list[list[int]]:
        trees = []
        for step in generate(target, draft, PROMPT, settings, 40):
            if step.tree:
                trees.append(step.tree.tokens)
        return trees

    first = drafted()
    assert drafted() == first
    assert settings.rules[0].now != settings.settings, "this pair was meant to move the thresholds"
    assert settings.rules[0] is not settings.rules[1]


@pytest.mark.parametrize(
    ("tokens", "eos_ids", "room", "expected"),
    [
        ([1, 2, 3], [], 5, [1, 2, 3]),
        ([1, 2, 3], [], 2, [1, 2]),
        ([1, 2, 3], [2], 5, [1, 2]),
        ([1, 2, 2, 3], [2, 1], 5, [1]),
        ([1, 2, 3], [3], 2, [1, 2]),
        ([9], [9], 1, [9]),
    ],
)
def test_cut(tokens: list[int], eos_ids: list[int], room: int, expected: list[int]) -> None:
    """Never a token past EOS, never more than asked; EOS itself stays."""
    assert cut(tokens, eos_ids, room) == expected


def test_eos_as_the_first_token_ends_the_text() -> None:
    target = Stub(counting)
    steps = list(generate(target, target, PROMPT, Chain(K=4), 9, eos_ids=[4]))
    assert len(steps) == 1
    assert steps[0].tokens == [4] and steps[0].tree is None


@pytest.mark.parametrize("is_shaped", [False, True], ids=["tight", "fixed"])
@pytest.mark.parametrize("commit", ["keep", "rebuild"])
def test_inspect_sees_the_logits_of_each_token(
    commit: str, is_shaped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the prompt's last token too, of none after an EOS, and in no one's time."""
    target = random_model(1)
    target.pool.is_shaped = is_shaped  # then a later pass overwrites what an earlier one said
    settings = Fixed(D=3, B=2, tau=0.0)
    whole = token_ids(generate(target, target, PROMPT, settings, 12))
    eos = whole[6]  # the second of a step
    shown = []
    clock = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + 3600 * len(shown))  # an hour each
    options = {"eos_ids": [eos], "commit": commit, "inspect": shown.append}
    steps = list(generate(target, target, PROMPT, settings, 12, **options))
    assert [len(logits) for logits in shown] == [len(step.tokens) for step in steps] == [1, 4, 2]
    ids = token_ids(steps)
    assert_close(torch.cat(shown), run(target, PROMPT + ids)[len(PROMPT) - 1 : -1])
    assert all(step.draft_ms + step.verify_ms + step.other_ms < 3600e3 for step in steps)


def test_a_limit_of_one_runs_no_iteration() -> None:
    target = Stub(counting)
    assert token_ids(generate(target, None, PROMPT, Alone(), 1)) == [4]


BAD_CALLS = [
    ([], Alone(), 5, "keep"),
    ([1], Alone(), 0, "keep"),
    ([1], Alone(), 5, "never"),
    ([1], Chain(K=2), 5, "keep"),  # without a draft
]


@pytest.mark.parametrize(("prompt", "settings", "limit", "commit"), BAD_CALLS)
def test_bad_calls(prompt: list[int], settings: Alone | Chain, limit: int, commit: str) -> None:
    with pytest.raises(ValueError):
        next(generate(random_model(0), None, prompt, settings, limit, commit=commit))


@pytest.mark.parametrize("id", [-1, 96, 2**40])
@pytest.mark.parametrize("place", range(3))
def test_a_prompt_id_that_the_target_does_not_know_is_named(id: int, place: int) -> None:
    """Below 0 or past the vocabulary, wherever it stands; the first and the last id are known."""
    target = random_model(0)
    prompt = [0, 95, 3]
    assert len(token_ids(generate(target, None, prompt, Alone(), 2))) == 2
    prompt[place] = id
    with pytest.raises(ValueError, match=f"has id {id}, but the target knows 0 to 95"):
        next(generate(target, None, prompt, Alone(), 2))


def test_two_caches_must_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fits alone; taken lazily, both together would only fail when they are filled."""
    target = random_model(7)
    needed = target.pool.bytes(len(PROMPT) + 50 + 5)
    monkeypatch.setattr(memory, "free_host_memory", lambda: needed + needed // 2)
    assert len(token_ids(generate(target, None, PROMPT, Alone(), 50))) == 50
    with pytest.raises(OutOfMemory, match="caches of 60 and 60 tokens"):
        next(generate(target, target, PROMPT, Chain(K=4), 50))


def test_a_cache_is_given_back_if_the_drafts_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was captured over it is never destroyed, so it must be lent again."""
    target = random_model(7)
    draft = random_model(8)
    target.pool.is_shaped = True

    def no_room(*_: int) -> None:
        raise OutOfMemory("none")

    monkeypatch.setattr(draft.pool, "lend", no_room)
    with pytest.raises(OutOfMemory):
        next(generate(target, draft, PROMPT, Chain(K=4), 50))
    assert len(target.pool.idle) == 1


def broken_at(model_seed: int, token: int) -> GPTNeoX:
    tensors = random_tensors(random_config(), model_seed)
    tensors["gpt_neox.embed_in.weight"][token] = float("nan")
    return GPTNeoX.from_tensors(random_config(), tensors)


def test_tokens_before_a_non_finite_row_are_kept() -> None:
    """An accepted path may run into the overflow: what came before it was right, and is emitted."""
    target = random_model(7)
    text = token_ids(generate(target, None, PROMPT, Alone(), 20))
    at = next(i for i in range(3, 20) if text[i] not in text[:i] + PROMPT)
    for settings in (Alone(), Chain(K=19), Fixed(tau=0.0)):
        got: list[int] = []
        with pytest.raises(NonFiniteLogits, match="bfloat16"):
            for step in generate(broken_at(7, text[at]), target, PROMPT, settings, 20):
                got += step.tokens
        assert got == text[: at + 1]


def test_an_overflow_in_the_prompt_is_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last token's logits are computed in prefill, but it has read all the others."""
    monkeypatch.setattr(gpt_neox, "PREFILL_CHUNK", 2)
    for prompt in ([9, 1, 2, 3, 4], [1, 2, 3, 9, 4], [1, 2, 3, 4, 9]):
        with pytest.raises(NonFiniteLogits):
            next(generate(broken_at(7, 9), None, prompt, Alone(), 5))


def test_a_rejected_non_finite_node_does_not_poison_its_siblings() -> None:
    """A drafted token that overflows in the target is a wrong guess, not the end of the text."""
    target = random_model(7)
    text = token_ids(generate(target, None, PROMPT, Alone(), 20))
    fatal = next(i for i in range(96) if i not in text + PROMPT)
    tensors = random_tensors(random_config(), 7)
    eager = tensors["embed_out.weight"].clone()
    eager[fatal] = 0.9 * eager[text[1]]  # the draft proposes the fatal token beside a right one
    draft = GPTNeoX.from_tensors(random_config(), tensors | {"embed_out.weight": eager})
    steps = list(generate(broken_at(7, fatal), draft, PROMPT, Fixed(B=3, tau=0.0), 20))
    assert token_ids(steps) == text
    assert any(fatal in step.tree.tokens for step in steps[1:])


def test_a_non_finite_draft_costs_acceptance_not_the_text() -> None:
    target = random_model(7)
    text = token_ids(generate(target, None, PROMPT, Alone(), 20))
    for settings in (Chain(K=3), Fixed(tau=0.0), DynaTree()):
        steps = list(generate(target, broken_at(7, text[4]), PROMPT, settings, 20))
        assert token_ids(steps) == text


def tree_of(n: int) -> Tree:
    """A chain of n rows."""
    rows = list(range(n))
    return Tree(rows, [row - 1 for row in rows], rows, [0.0] * n, rows, [False] * n)


def iteration(
    tokens: list[int], n_accepted: int, n_drafted: int, draft_ms: float, verify_ms: float
) -> Step:
    """A step over a chain, with one millisecond of everything else."""
    return Step(
        tokens,
        tree=tree_of(n_drafted + 1),
        path=list(range(n_accepted + 1)),
        draft_ms=draft_ms,
        verify_ms=verify_ms,
        other_ms=1.0,
        draft_rows=[2] + [1] * (n_drafted - 1),
    )


def test_metrics_of_a_trace_worked_out_by_hand() -> None:
    """Prefill's token, then 3 of 4 drafted accepted, then 0 of 1, then 2 of 4 but cut to one."""
    steps = [
        Step([7], verify_ms=20.0),
        iteration([1, 2, 3, 4], n_accepted=3, n_drafted=4, draft_ms=2.0, verify_ms=5.0),
        iteration([1], n_accepted=0, n_drafted=1, draft_ms=1.0, verify_ms=4.0),
        iteration([2], n_accepted=2, n_drafted=4, draft_ms=3.0, verify_ms=6.0),
    ]
    expected = Metrics(
        new_tokens=7,
        throughput=6 / 0.024,
        end_to_end=7 / 0.044,
        ttft_ms=20.0,
        tpot_ms=4.0,
        iterations=3,
        tokens_per_iter=(4 + 1 + 3) / 3,
        path_length=5 / 3,
        draft_nodes=9 / 3,
        acceptance=5 / 9,
        draft_ms=2.0,
        verify_ms=5.0,
        other_ms=1.0,
        draft_passes=9 / 3,
        repetition=0.0,
    )
    assert vars(measure(steps)) == pytest.approx(vars(expected))


def test_repetition_counts_four_grams() -> None:
    """abcdabcd has five 4-grams, four of them distinct."""
    steps = [Step([i], tree_of(1), verify_ms=1.0) for i in (1, 2, 3, 4, 1, 2, 3, 4)]
    assert measure(steps).repetition == pytest.approx(1 / 5)


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest result of any operation has."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func: Callable, types: object, args=(), kwargs=None) -> object:
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple) else (results,):
            if isinstance(result, Tensor):
                self.size = max(self.size, result.numel())
        return results


@pytest.mark.parametrize("n_ids", [1, 2, 7, 2**31 - 1])
def test_repetition_takes_no_more_memory_than_the_ids(n_ids: int) -> None:
    """Of 96,000 tokens over a window it took 33 MB at the end, all else 1 MB."""
    rng = random.Random(n_ids)
    ids = [rng.randrange(n_ids) for _ in range(200)]
    grams = {tuple(ids[i : i + 4]) for i in range(197)}
    with Largest() as largest:
        assert repetition(ids) == 1 - len(grams) / 197
    assert largest.size == 200


def test_a_single_token_has_no_rates() -> None:
    metrics = measure([Step([7], verify_ms=20.0)])
    assert metrics.throughput == 0.0
    assert metrics.iterations == 0
    assert metrics.tokens_per_iter == 0.0
    assert metrics.end_to_end == pytest.approx(50.0)


def test_the_loop_leaves_no_shared_state() -> None:
    """Two generations may be interleaved step by step."""
    target, draft = noisy_pair()
    alone = token_ids(generate(target, draft, PROMPT, Fixed(), 20))
    run = generate(target, draft, PROMPT, Fixed(), 20)
    other_run = generate(target, draft, PROMPT, Fixed(), 20)
    ids: list[int] = []
    other_ids: list[int] = []
    for step, other_step in zip(run, other_run, strict=True):
        ids += step.tokens
        other_ids += other_step.tokens
    assert ids == alone and other_ids == alone


def test_a_rule_is_told_the_prompt_and_a_step_what_the_target_chose() -> None:
    """The target's choice after each row, and the rows of each of the draft's passes."""
    target = random_model(0)
    draft = random_model(1)
    prompts = []

    class Listening(StaticRule):
        def start(self, prompt: list[int]) -> None:
            prompts.append(prompt)

    class Wide:
        def rule(self) -> Listening:
            return Listening([2, 2], n_rows=7, is_drawing=False, deepest="widths")

    first, *steps = generate(target, draft, [3, 1, 4], Wide(), 20)
    assert prompts == [[3, 1, 4]]
    assert first.predictions == [] and first.draft_rows == []
    assert steps[0].draft_rows == [4, 2]  # the prompt and the root, then two nodes
    for step in steps:
        after_path = [step.predictions[row] for row in step.path]
        assert after_path[: len(step.tokens)] == step.tokens
        assert len(step.predictions) == len(step.tree)
        assert len(step.draft_rows) == step.tree.depth


@pytest.mark.parametrize("sampling", [None, Sampling(1.0)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", METHODS)
def test_a_step_is_plain_lists(method: str, sampling: Sampling | None) -> None:
    """Of every step: the first, which has no tree, ar's and a tree's; and as many rows on the path
    as were committed, but for what the limit cuts."""
    target, draft = noisy_pair()
    first, *steps = generate(target, draft, PROMPT, METHODS[method](), 20, sampling=sampling)
    assert (first.path, first.predictions, first.draft_rows, first.n_drafted) == ([], [], [], 0)
    for step in steps:
        assert type(step.path) is type(step.predictions) is type(step.draft_rows) is list
        assert all(type(row) is int for row in step.path + step.predictions + step.draft_rows)
        assert step.path[0] == 0 and step.n_drafted == len(step.tree) - 1
        accepted = [step.tree.tokens[row] for row in step.path[1:]]
        assert step.tokens == (accepted + [step.bonus])[: len(step.tokens)]
    assert all(len(step.path) == len(step.tokens) for step in steps[:-1])


def test_time_is_told_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is nobody's is in none of them, nor in all that has passed; a part may come again."""
    now = [5.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    watch = Stopwatch()
    for _ in range(2):
        for part, seconds in ((watch.draft, 1), (watch.verify, 2), (watch.nobodys, 4)):
            now[0] += 8
            with part:
                now[0] += seconds
        assert watch.ms() == 27e3
        assert watch.times() == {"draft_ms": 1e3, "verify_ms": 2e3, "other_ms": 24e3}
        watch.restart()
        assert set(watch.times().values()) == {0.0}
    for _ in range(3):
        with watch.draft:
            now[0] += 1
    assert watch.times() == {"draft_ms": 3e3, "verify_ms": 0.0, "other_ms": 0.0}


@pytest.mark.parametrize("limit", [1, 12])
def test_a_rule_may_bring_its_own_acceptance(limit: int) -> None:
    """Of sampled text alone, told the settings; prefill's token is chosen by it, too."""
    target, draft = noisy_pair()
    calls = []

    @dataclass(frozen=True)
    class Cautious(Chain):
        def rule(self) -> StaticRule:
            rule = super().rule()
            rule.acceptance = accept_one
            return rule

    def accept_one(
        tree: Tree, logits: Tensor, sampler: Sampler, settings: Cautious
    ) -> tuple[list[int], list[int]]:
        calls.append((len(tree), logits.shape, settings))
        return [0], [7]

    settings = Cautious(K=3)
    steps = list(generate(target, draft, PROMPT, settings, limit, sampling=Sampling(1.0)))
    assert token_ids(steps) == [7] * limit and len(steps) == limit
    assert {kind for _, _, kind in calls} == {settings} and len(calls) == limit
    assert all(shape == (n, 96) for n, shape, _ in calls)
    plain = token_ids(generate(target, draft, PROMPT, Chain(K=3), limit))
    assert token_ids(generate(target, draft, PROMPT, settings, limit)) == plain
    assert len(calls) == limit, "greedily it is not asked"

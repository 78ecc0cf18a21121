"""Steps of training: rows to learn from, a loss, AdamW, and a state from which to go on exactly.

The loss is part next token and part Kullback-Leibler from the target to the draft, on rows of the
text and on rows that begin with the text and that the target has written on, greedily or sampled
(Zhou et al. 2024, DistillSpec). Without a target it is next token on the text.

    training = Training(plan, model, text, teacher)
    while training.progress() < 1:
        loss = training.advance()

What is random in a step is drawn from the seed and the step's number, so the step can be made
again, after a run that was ended within it, and is the same. Shapes: B rows, V vocabulary.
"""

import io
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from cli.errors import UsageError
from cli.interrupts import interrupts
from cli.models import has_bfloat16, lacks_instructions, processor_flags
from engine.checkpoint import first_line
from engine.files import locked, write_whole
from tools.trainable import Trainable

BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.1  # of matrices
WARM_UP = 0.03  # of the budget
LONGEST_GRADIENT = 1.0  # by its norm; a longer one is cut to it
PROMPT = 8  # one part in so many of a row that the target writes on
TEMPERATURES = (0.3, 1.0)  # of its sampled rows, evenly spread
N_WRITTEN = {"cpu": 32, "cuda": 256}  # rows that it writes at once, if their cache is as small as
CACHE_BYTES = 2**30
N_KEPT = 8  # such writings, of which the oldest makes room
N_USES = 4  # of a written row, on average
STATE = "state.pt"
MAX_LOGITS = {"cpu": 2**22, "cuda": 2**28}  # at once: what a processor's cache and a GPU like


@dataclass(frozen=True)
class Plan:
    """How to train; the same plan, text and weights give the same weights on one machine."""

    steps: int | None  # the budget, this
    minutes: float | None  # or this
    batch: int  # rows of a step, B
    context: int  # tokens of a row that something follows
    rate: float  # the learning rate at its highest
    greedy: float  # share of rows that the target writes greedily
    sampled: float  # and by sampling
    ce: float  # weight of the next token in the loss; the target's distribution has the rest
    seed: int

    @property
    def written(self) -> float:
        return self.greedy + self.sampled


def training_dtype(device: torch.device) -> torch.dtype:
    """What products are computed in: bfloat16 where there are instructions for it."""
    is_fast = has_bfloat16(device)
    if device.type == "cpu":
        flags = processor_flags()
        is_fast = bool(flags) and not lacks_instructions(torch.bfloat16, flags)
    return torch.bfloat16 if is_fast else torch.float32


class Training:
    """A model as it learns; at any step, `state` is all of it."""

    def __init__(self, plan: Plan, model: Trainable, text: Tensor, teacher: Trainable | None):
        """text: ids [n] int32."""
        self.plan, self.model, self.text, self.teacher = plan, model, text, teacher
        self.device = model.head.device
        self.dtype = training_dtype(self.device)
        self.n_ids = model.config.vocab_size  # V: padded vocabularies of one tokenizer may differ
        if teacher:
            self.n_ids = min(self.n_ids, teacher.config.vocab_size)
        matrices = [weight for weight in model.parameters() if weight.ndim > 1]
        vectors = [weight for weight in model.parameters() if weight.ndim == 1]
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}]
        groups.append({"params": vectors, "weight_decay": 0.0})
        self.optimizer = torch.optim.AdamW(groups, betas=BETAS, fused=True)
        self.written = torch.zeros(0, plan.context + 1, dtype=torch.int32)  # by the target, lately
        self.step = 0
        self.seconds = 0.0  # of all steps

    def state(self) -> dict:
        return {
            "step": self.step,
            "seconds": self.seconds,
            "written": self.written,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def restore(self, state: dict) -> None:
        """Go on from what `state` told."""
        self.step = state["step"]
        self.seconds = state["seconds"]
        self.written = state["written"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def progress(self) -> float:
        """The share of the budget that is spent."""
        if self.plan.steps:
            return self.step / self.plan.steps
        return self.seconds / (60 * self.plan.minutes)

    def speed(self) -> float:
        """Tokens learned from per second."""
        return self.step * self.plan.batch * self.plan.context / self.seconds

    def rate(self) -> float:
        """The learning rate: warm-up, then half a wave of the cosine, down to 0."""
        done = self.progress()
        if self.plan.steps:
            done += 0.5 / self.plan.steps  # in the middle of a step, or the first would be lost
        if done < WARM_UP:
            return self.plan.rate * done / WARM_UP
        return self.plan.rate * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP))) / 2

    def advance(self) -> float:
        """One step. Returns its loss in nats per token; raises UsageError if that is none."""
        start = time.monotonic()
        rows = self.draw_rows()
        n_at_once = MAX_LOGITS[self.device.type] // (self.plan.context * self.n_ids)
        total = 0.0
        self.optimizer.zero_grad()
        for part in rows.split(max(n_at_once, 1)):
            loss = self.loss(part) * (len(part) / len(rows))
            loss.backward()
            total += loss.item()
        if not math.isfinite(total):
            raise UsageError(f"the loss of step {self.step} is {total}: --rate is too high")
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), LONGEST_GRADIENT)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        with interrupts(raised=False):  # all of it or nothing: the state may be saved after it
            self.optimizer.step()
            self.step += 1
            self.seconds += time.monotonic() - start
        return total

    def loss(self, rows: Tensor) -> Tensor:
        """In nats per token, of rows [b, context + 1]."""
        rows = rows.to(self.device).long()
        logprobs = self.logprobs(self.model, rows)
        loss = F.nll_loss(logprobs, rows[:, 1:].flatten())
        if not self.teacher:
            return loss
        with torch.no_grad():
            wanted = self.logprobs(self.teacher, rows)
        divergence = F.kl_div(logprobs, wanted, reduction="batchmean", log_target=True)
        return self.plan.ce * loss + (1 - self.plan.ce) * divergence

    def logprobs(self, model: Trainable, rows: Tensor) -> Tensor:
        """Of what follows each token but a row's last, [b * context, V]."""
        with self.fast():
            logits = model(rows[:, :-1])[..., : self.n_ids]
        return logits.float().log_softmax(-1).flatten(0, 1)

    def fast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def draw_rows(self) -> Tensor:
        """What the coming step learns from, [B, context + 1], of the text and of the target's."""
        plan = self.plan
        chance = self.chance(0)
        rows = self.draw_text(plan.batch, plan.context + 1, chance)
        if plan.written:
            self.let_target_write()
            is_written = torch.rand(plan.batch, generator=chance) < plan.written
            chosen = torch.randint(len(self.written), (plan.batch,), generator=chance)
            rows[is_written] = self.written[chosen[is_written]]
        return rows

    def draw_text(self, n_rows: int, length: int, chance: torch.Generator) -> Tensor:
        """Rows that begin anywhere in the text, [n_rows, length]."""
        starts = torch.randint(len(self.text) - length + 1, (n_rows, 1), generator=chance)
        return self.text[starts + torch.arange(length)]

    def let_target_write(self) -> None:
        """Every so many steps: new rows, in the place of the oldest."""
        plan = self.plan
        row_bytes = self.teacher.new_past(1, 1).nbytes * plan.context
        n_rows = min(max(CACHE_BYTES // row_bytes, 1), N_WRITTEN[self.device.type])
        n_steps = max(round(n_rows * N_USES / (plan.written * plan.batch)), 1)
        if self.step % n_steps:
            return
        n_prompt = max(plan.context // PROMPT, 1)
        prompts = self.draw_text(n_rows, n_prompt, self.chance(1)).to(self.device).long()
        temperatures = torch.zeros(n_rows, device=self.device)
        n_greedy = round(n_rows * plan.greedy / plan.written)
        temperatures[n_greedy:] = torch.linspace(*TEMPERATURES, n_rows - n_greedy)
        n_new = plan.context + 1 - n_prompt
        chance = self.chance(1, self.device)
        with self.fast():
            new = self.teacher.write(prompts, n_new, temperatures, chance, self.n_ids)
        first = self.step // n_steps % N_KEPT * n_rows  # the same if this step is made again
        parts = [self.written[:first], new.int().cpu(), self.written[first + n_rows :]]
        self.written = torch.cat(parts)

    def chance(self, purpose: int, device: str | torch.device = "cpu") -> torch.Generator:
        """What the coming step draws from."""
        seed = self.plan.seed * 10**9 + 2 * self.step + purpose
        return torch.Generator(device).manual_seed(seed)


@contextmanager
def checkpoint_of(folder: Path) -> Iterator[Path]:
    """The file of a run's checkpoint, in a hidden folder beside the one to come; no other run has
    it meanwhile. Raises UsageError."""
    hidden = folder.with_name(f".{folder.name}.training")
    with ExitStack() as stack:
        try:
            hidden.mkdir(parents=True, exist_ok=True)
            stack.callback(remove_empty, hidden)
            stack.enter_context(locked(hidden / STATE))
        except BlockingIOError as error:
            raise UsageError(f"another run is at work on {folder}") from error
        except OSError as error:
            raise UsageError(f"{hidden} cannot be written to: {error.strerror}") from error
        yield hidden / STATE


def remove_empty(folder: Path) -> None:
    """If there is nothing in it."""
    with suppress(OSError):
        folder.rmdir()


def read_state(file: Path, identity: dict) -> dict | None:
    """The checkpoint to go on from, if there is one. Raises UsageError if a run of another
    identity left it."""
    if not file.exists():
        return None
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        found = state["identity"]
    except Exception as error:  # the library raises nothing narrower
        why = first_line(error)
        raise UsageError(f"{file} is no checkpoint ({why}): delete it to begin anew") from error
    differing = [name for name, value in identity.items() if found.get(name) != value]
    if differing:
        what = f"{file.parent} is of a run that differs in {', '.join(differing)}"
        raise UsageError(f"{what}: give what it was given, or delete it")
    return state


def write_state(file: Path, state: dict) -> None:
    """Whole, or what was there stays. Raises UsageError."""
    content = io.BytesIO()
    torch.save(state, content)
    try:
        write_whole(file, content.getvalue())
    except OSError as error:
        why = f"{file} cannot be written: {error.strerror}"
        raise UsageError(f"{why}; what was there stays, to go on from") from error

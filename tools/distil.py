"""A draft for your target: a small GPT-NeoX that learns to guess what the target writes.

    python tools/distil.py --target FOLDER --text a.txt --layers 2 --hidden 128 --out my-draft
    python tools/distil.py --target FOLDER --text *.txt --init EleutherAI/pythia-70m --out my-draft
    python tools/distil.py --text *.txt --layers 6 --hidden 320 --out my-target
    python dynatree.py --target FOLDER --draft my-draft --prompt "The ship sailed at dawn"

What a draft is accepted for is saying what the target says, where the target has come to. So the
loss is part next token and part Kullback-Leibler from the target to the draft, on rows of the text
and on rows that begin with the text and that the target has written on, greedily or sampled
(Zhou et al. 2024, DistillSpec). Without a target it is next token on the text.

However a run ends, the same command goes on from its last checkpoint. What is random in a step is
drawn from the seed and the step's number, so a step can be made again and is the same: with --steps
the weights will be those of a run that was never ended.

Here is the learning, of the plain model of gpt_neox.py; batch.py reads and writes many rows with
it, job.py has what may be asked for, corpus.py the text, resume.py the checkpoint, outcome.py the
figures and the folder. Shapes: B rows, V ids.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs as a file, from anywhere

if __name__ == "__main__":  # before torch, whose import takes a second
    from cli.start import guard_imports

    guard_imports()

import math
import shlex
import time
from argparse import Namespace
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from cli.errors import UsageError, run_command_line, say
from cli.interrupts import heed_termination, interrupts
from gpt_neox import GPTNeoX
from tools.batch import read_texts, write_texts
from tools.job import Job, Plan, build_parser, prepare, training_dtype
from tools.outcome import measure_held_out, write_outcome
from tools.resume import checkpoint_of, read_state, write_state

BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.1  # of matrices
WARM_UP = 0.03  # of the budget
LONGEST_GRADIENT = 1.0  # by its norm; a longer one is cut to it
MAX_LOGITS = {"cpu": 2**22, "cuda": 2**28}  # at once: what a processor's cache and a GPU like
PROMPT = 8  # one part in so many of a row that the target writes on
TEMPERATURES = (0.3, 1.0)  # of its sampled rows, evenly spread
N_WRITTEN = {"cpu": 32, "cuda": 256}  # rows that it writes at once, if their cache is as small as
CACHE_BYTES = 2**30
N_KEPT = 8  # such writings, of which the oldest makes room
N_USES = 4  # of a written row, on average
SAVE_S = 120.0  # seconds between two checkpoints
BAR = "{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"


class Training:
    """A model as it learns; at any step, `state` is all of it."""

    def __init__(self, plan: Plan, model: GPTNeoX, text: Tensor, teacher: GPTNeoX | None):
        """model: with float32 weights and gradients. text: ids [n] int32."""
        self.plan, self.model, self.text, self.teacher = plan, model, text, teacher
        self.device = model.device
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

    def logprobs(self, model: GPTNeoX, rows: Tensor) -> Tensor:
        """Of what follows each token but a row's last, [b * context, V]."""
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            logits = read_texts(model, rows[:, :-1])[..., : self.n_ids]
        return logits.float().log_softmax(-1).flatten(0, 1)

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
        row_bytes = self.teacher.pool.token_bytes * plan.context
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
        new = write_texts(self.teacher, prompts, n_new, temperatures, chance, self.n_ids)
        first = self.step // n_steps % N_KEPT * n_rows  # the same if this step is made again
        parts = [self.written[:first], new.int().cpu(), self.written[first + n_rows :]]
        self.written = torch.cat(parts)

    def chance(self, purpose: int, device: str | torch.device = "cpu") -> torch.Generator:
        """What the coming step draws from."""
        seed = self.plan.seed * 10**9 + 2 * self.step + purpose
        return torch.Generator(device).manual_seed(seed)

    def rate(self) -> float:
        """The learning rate: warm-up, then half a wave of the cosine, down to 0."""
        done = self.progress()
        if self.plan.steps:
            done += 0.5 / self.plan.steps  # in the middle of a step, or the first would be lost
        if done < WARM_UP:
            return self.plan.rate * done / WARM_UP
        return self.plan.rate * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP))) / 2

    def progress(self) -> float:
        """The share of the budget that is spent."""
        if self.plan.steps:
            return self.step / self.plan.steps
        return self.seconds / (60 * self.plan.minutes)

    def speed(self) -> float:
        """Tokens learned from per second."""
        return self.step * self.plan.batch * self.plan.context / self.seconds

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


def train(training: Training, save: Callable[[], None]) -> None:
    """Spend the budget, saving now and then and at the end."""
    saved_at = time.monotonic()
    recent = None  # loss, the mean of the last ten steps or so
    progress = {"total": 1.0, "initial": training.progress(), "bar_format": BAR}
    with tqdm(**progress, disable=None, leave=False) as bar:
        while training.progress() < 1:
            loss = training.advance()
            recent = loss if recent is None else 0.9 * recent + 0.1 * loss
            line = f"step {training.step}, loss {recent:.3f}, {training.speed():,.0f} tokens/s"
            bar.set_postfix_str(line, refresh=False)
            bar.update(min(training.progress(), 1.0) - bar.n)
            if time.monotonic() - saved_at >= SAVE_S:
                save()
                saved_at = time.monotonic()
                if bar.disable:  # no terminal
                    say(line)
    save()


def distil(job: Job, file: Path) -> None:
    """Train from the checkpoint, or the beginning, to the end; then measure and write."""
    state = read_state(file, job.identity())
    model = job.new_model()
    before = state["before"] if state else measure_held_out(job, model)
    training = Training(job.plan, model, job.corpus.train, job.load_teacher())
    if state:
        training.restore(state["training"])
        say(f"going on from step {training.step}")

    def save() -> None:
        found = {"identity": job.identity(), "before": before, "training": training.state()}
        write_state(file, found)

    try:
        train(training, save)
        training.teacher = None  # its memory is wanted
        after = measure_held_out(job, model)
    except KeyboardInterrupt:
        save()
        say(f"interrupted after step {training.step}; the same command goes on from there")
        raise
    taken = f"{training.step:,} steps in {training.seconds / 60:.1f} minutes"
    with interrupts(raised=False):  # at its end there is the folder, or still the checkpoint
        write_outcome(job, model, taken, before, after)
        file.unlink()
    for name, value in after.items():
        say(f"{name}: {before[name]:.3f} before, {value:.3f} after")


def execute(args: Namespace) -> int:
    heed_termination()
    job = prepare(args)
    with checkpoint_of(job.out) as file:
        distil(job, file)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    if arguments is None:
        arguments = sys.argv[1:]
    parser = build_parser(__doc__.splitlines()[0])
    parser.set_defaults(command=shlex.join(["python", parser.prog, *arguments]))
    return run_command_line(execute, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())

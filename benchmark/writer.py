"""One text of a table after the other: whichever run, on whichever prompt, as seeded as it must be.

writer = Writer(pair, {"builtin": [[3, 1, 4]]}, options)
steps = writer.generate(Text(run, prompt=0, repeat=0))
"""

import time
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from benchmark.options import Prompts
from benchmark.peers import PEERS, Peers
from benchmark.results import Options, Run
from benchmark.rows import request_of, settings_of
from cli.errors import say
from cli.main import WARM_UP_STEPS
from cli.models import Pair, overflow_note
from dynatree import Step
from sampling import GREEDY, Sampling


class Text(NamedTuple):
    """One text to write: a run on one of its dataset's prompts, in one of the rounds over all."""

    run: Run
    prompt: int
    repeat: int

    def key(self) -> dict[str, str | int]:
        """Which text it is, as a record says it."""
        return {"run": self.run.label, "prompt": self.prompt, "repeat": self.repeat}


class Writer:
    """What a table's texts are written with."""

    def __init__(self, pair: Pair, prompts: Prompts, options: Options):
        self.pair = pair
        self.prompts = prompts
        self.options = options
        self.peers: Peers | None = None
        self.has_overflowed = False  # the draft, and it was said

    def warm_up(self, runs: Sequence[Run]) -> dict[str, float]:
        """Write the first steps of every run, once all that they need is loaded. By label the
        seconds that took, with loading."""
        start = time.perf_counter()
        if any(run.method in PEERS for run in runs):
            self.peers = Peers(self.pair)
        load_peers_s = time.perf_counter() - start
        setup_s = {}
        for run in runs:
            start = time.perf_counter()
            self.generate(Text(run, 0, 0), n_steps=WARM_UP_STEPS)
            seconds = time.perf_counter() - start
            if run.method in PEERS:
                seconds += load_peers_s
            else:
                seconds += self.pair.load_s["target"]
                if settings_of(run).rule().max_depth > 0:
                    seconds += self.pair.load_s["draft"]
            setup_s[run.label] = seconds
        return setup_s

    def generate(self, text: Text, n_steps: int | None = None) -> list[Step]:
        """One text, or its first n_steps (of peers: tokens)."""
        run = text.run
        prompt = self.prompt_ids(text)
        if run.method in PEERS:
            n_tokens = min(n_steps or run.new_tokens, run.new_tokens)
            return self.peers.decode(run.method, prompt, n_tokens)
        request = request_of(run, self.pair, prompt, self.sampling(text))
        steps = list(islice(request.decode(), n_steps))
        if not self.has_overflowed and any(s.tree and s.tree.has_overflowed for s in steps):
            self.has_overflowed = True
            say(overflow_note(self.pair.draft))
        return steps

    def prompt_ids(self, text: Text) -> list[int]:
        return self.prompts[text.run.dataset][text.prompt][: text.run.prompt_tokens]

    def sampling(self, text: Text) -> Sampling:
        """Another seed for every prompt and round, the same for every method."""
        run = text.run
        if not run.temperature and not run.draft_temperature:
            return GREEDY
        n_prompts = len(self.prompts[run.dataset])
        seed = (self.options.seed or 0) + text.repeat * n_prompts + text.prompt
        top_p = self.options.top_p if run.temperature and self.options.top_p else 1.0
        return Sampling(run.temperature, top_p, seed, run.draft_temperature, run.is_drawn)

"""transformers on the same weights, for comparison rows: greedy, and its two ways to speculate.

The only file that may import transformers, and only when its rows are asked for.

    peers = Peers(pair)
    steps = peers.decode("hf-assisted", prompt_ids, max_new_tokens=128)
"""

import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from cli.errors import UsageError
from cli.models import Pair
from dynatree import Step
from engine.checkpoint import first_line
from engine.memory import is_refusal

PEERS = {
    "hf-ar": "transformers generate, greedy",
    "hf-assisted": "its assisted generation",
    "hf-lookup": "its prompt lookup",
}
N_COPIED = 10  # tokens of a lookup, as many as our own copies


def has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None


def require_transformers() -> None:
    """Raise UsageError if transformers is not installed."""
    if not has_transformers():
        raise UsageError(
            f"{', '.join(PEERS)} need transformers: pip install transformers, or leave them out"
        )


def check_vocabularies(methods: Sequence[str], pair: Pair) -> None:
    """Raise UsageError if transformers would refuse to let this draft speculate for the target."""
    sizes = [model.config.vocab_size for model in pair.models]
    if "hf-assisted" in methods and len(set(sizes)) > 1:
        raise UsageError(
            f"hf-assisted needs models of one vocabulary size, not {sizes[0]} and {sizes[1]}; "
            "leave it out of --methods, and --peers, which adds it"
        )


class Clock:
    """A streamer for generate(): notes when which ids came out."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.is_prompt = True  # generate puts the prompt first
        self.last = time.perf_counter()

    def put(self, ids: Tensor) -> None:
        """Called with ids on the CPU, so the device has finished them."""
        if self.is_prompt:
            self.is_prompt = False
            return
        now = time.perf_counter()
        tokens = ids.flatten().tolist()
        path = list(range(len(tokens)))  # its last token is the target's own, as a bonus token is
        self.steps.append(Step(tokens, path=path, verify_ms=(now - self.last) * 1e3))
        self.last = now

    def end(self) -> None:
        """Part of the streamer's interface."""


class Peers:
    """Both models as transformers loads them, in the pair's dtypes and on its device."""

    def __init__(self, pair: Pair):
        from transformers import AutoModelForCausalLM, GenerationConfig, logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()

        self.device = pair.target.device
        start = time.perf_counter()

        def load(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
            try:
                model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype)
            except Exception as error:  # it raises nothing narrower, and reads more than we do
                if is_refusal(error):
                    raise
                why = f"transformers cannot load {folder}: {first_line(error)}"
                raise UsageError(f"{why}; leave {', '.join(PEERS)} out") from error
            # Not the folder's, which may sample, penalise or stop. Benchmarks ignore EOS; with no
            # padding named it warns, and nothing is padded
            model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
            return model.to(self.device).eval()

        self.target = load(pair.target_folder, pair.target.dtype)
        self.draft = load(pair.draft_folder, pair.draft.dtype)
        self.load_s = time.perf_counter() - start

    @torch.inference_mode()
    def decode(
        self, name: str, prompt: list[int], max_new_tokens: int, n_steps: int | None = None
    ) -> list[Step]:
        """Greedy Steps without trees; a speculative step's path is the ids it committed. n_steps:
        so many tokens at most."""
        clock = Clock()
        n_tokens = max_new_tokens if n_steps is None else min(n_steps, max_new_tokens)
        options = {"max_new_tokens": n_tokens, "do_sample": False, "streamer": clock}
        if name == "hf-assisted":
            options["assistant_model"] = self.draft
        if name == "hf-lookup":
            options["prompt_lookup_num_tokens"] = N_COPIED
        self.target.generate(torch.tensor([prompt], device=self.device), **options)
        return clock.steps

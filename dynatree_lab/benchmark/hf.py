"""transformers on the same weights, for comparison rows: greedy, assisted and prompt lookup.

This is the only file that imports transformers, and only if a table has such rows.

    transformers = HuggingFace(pair)
    steps = transformers.decode("hf-assisted", prompt_ids, max_new_tokens=128)
"""

import time
from pathlib import Path

import torch
from torch import Tensor

from draft_tree import Tree
from dynatree_lab.errors import UsageError
from dynatree_lab.generation.step import Step
from dynatree_lab.methods.eagle import head_of
from dynatree_lab.pair import Pair

HF_METHODS = ("hf-ar", "hf-assisted", "hf-lookup")  # generate(), with a draft, with prompt lookup
N_LOOKUP_TOKENS = 10  # drafted by prompt lookup, as many as by method lookup
UNREPORTED_METRICS = ("acceptance_rate", "drafted_per_iter", "draft_passes")
UNREPORTED_METRICS += ("draft_ms", "verify_ms", "other_ms")


class StepRecorder:
    """A streamer for transformers' generate() that records new ids and their times as Steps."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.is_prompt = True  # generate() puts the prompt first
        self.last = time.perf_counter()

    def put(self, ids: Tensor) -> None:
        """Record new ids. They are on the CPU, so the device has finished its work on them."""
        if self.is_prompt:
            self.is_prompt = False
            return
        now = time.perf_counter()
        tokens = ids.flatten().tolist()
        path = list(range(len(tokens)))  # the last token is the bonus token
        tree, ms = Tree.from_root(tokens[0]), (now - self.last) * 1e3  # its trees are not known
        self.steps.append(Step(tokens, tree, path, verify_ms=ms))
        self.last = now

    def end(self) -> None:
        """Do nothing; a streamer must have this method."""


class HuggingFace:
    """Both models of a pair, loaded by transformers with the pair's dtypes and device."""

    def __init__(self, pair: Pair):
        try:
            from transformers import AutoModelForCausalLM, GenerationConfig, logging
        except ImportError as error:
            raise UsageError(f"{error}; use pip install transformers, or no hf- rows") from error
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        # The checkpoint's own config may sample, penalise or stop. pad_token_id prevents a warning
        config = GenerationConfig(eos_token_id=None, pad_token_id=0)
        self.device = pair.target.device
        start = time.perf_counter()

        def load(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
            model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype)
            model.generation_config = config
            return model.to(self.device).eval()

        self.target = load(pair.target_folder, pair.target.dtype)
        sizes = {model.config.vocab_size for model in pair.models}
        is_assistant = len(sizes) == 1 and not head_of(pair.draft)
        self.draft = load(pair.draft_folder, pair.draft.dtype) if is_assistant else None
        self.load_s = time.perf_counter() - start

    @torch.inference_mode()
    def decode(
        self, name: str, prompt: list[int], max_new_tokens: int, n_steps: int | None = None
    ) -> list[Step]:
        """Return the greedy Steps of a text, which have no trees.

        n_steps: maximum number of tokens, if only the first steps are needed.
        """
        recorder = StepRecorder()
        n_tokens = max_new_tokens if n_steps is None else min(n_steps, max_new_tokens)
        options = {"max_new_tokens": n_tokens, "do_sample": False, "streamer": recorder}
        if name == "hf-assisted":
            if self.draft is None:
                why = "needs a draft model with as many ids as the target"
                raise UsageError(f"{name} {why}; remove it from --methods and do not use --hf")
            options["assistant_model"] = self.draft
        if name == "hf-lookup":
            options["prompt_lookup_num_tokens"] = N_LOOKUP_TOKENS
        self.target.generate(torch.tensor([prompt], device=self.device), **options)
        return recorder.steps

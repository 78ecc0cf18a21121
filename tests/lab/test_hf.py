"""Tests of the rows that transformers generates, with a stand-in for transformers."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fast import random_model

from dynatree_lab.benchmark.hf import HF_METHODS, HuggingFace, StepRecorder
from dynatree_lab.errors import UsageError
from dynatree_lab.pair import Pair

PAIR = Pair(random_model(0), random_model(1), None, Path("T"), Path("D"), {})


class Model:
    """A stand-in for a model of transformers. It notes the options of each call."""

    calls: list[dict] = []

    def __init__(self, folder: str):
        self.folder = folder

    def to(self, *_: torch.device) -> "Model":
        return self

    eval = to

    def generate(self, ids: torch.Tensor, streamer: StepRecorder, **options: object) -> None:
        self.calls.append({"target": self.folder} | options)
        for each in (ids, torch.tensor([5]), torch.tensor([6, 7])):
            streamer.put(each)


@pytest.fixture(autouse=True)
def transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    def ignore(*_: object, **options: object) -> None: ...

    def load(folder: str, dtype: torch.dtype) -> Model:
        return Model(folder)

    found = SimpleNamespace(
        AutoModelForCausalLM=SimpleNamespace(from_pretrained=load),
        GenerationConfig=ignore,
        logging=SimpleNamespace(set_verbosity_error=ignore, disable_progress_bar=ignore),
    )
    monkeypatch.setitem(sys.modules, "transformers", found)
    monkeypatch.setattr(Model, "calls", [])


def test_each_row_has_its_own_options() -> None:
    """Check the options that the model receives, and the steps. All rows are greedy."""
    transformers = HuggingFace(PAIR)
    for name in HF_METHODS:
        steps = transformers.decode(name, [3, 1], 4)
        assert [step.tokens for step in steps] == [[5], [6, 7]], "without the prompt"
        assert all(step.verify_ms > 0 for step in steps)
    found = []
    for options in Model.calls:
        assert not options.pop("do_sample") and options.pop("max_new_tokens") == 4
        assert options.pop("target") == "T"
        found.append({name: getattr(v, "folder", v) for name, v in options.items()})
    assert found == [{}, {"assistant_model": "D"}, {"prompt_lookup_num_tokens": 10}]


def test_assisted_generation_needs_a_draft_of_the_targets_ids() -> None:
    """Check the error. Without an assistant transformers would write the text of hf-ar."""
    other = HuggingFace(replace(PAIR, draft=random_model(1, vocab_size=97)))
    other.decode("hf-ar", [3, 1], 4)
    with pytest.raises(UsageError, match="hf-assisted needs a draft model with as many ids"):
        other.decode("hf-assisted", [3, 1], 4)


def test_transformers_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match="use pip install transformers, or no hf- rows"):
        HuggingFace(PAIR)

"""Tests of the rows that transformers generates: their options, and the check of vocabularies."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import random_model

from benchmark.hf import HF_METHODS, HuggingFace, check_vocabularies
from cli.errors import UsageError
from cli.models import Pair


def test_each_row_has_its_own_options() -> None:
    """Check the options that the model receives. All rows are greedy."""
    calls = []

    def note(prompt: torch.Tensor, **options: object) -> None:
        calls.append(options)

    transformers = SimpleNamespace(
        target=SimpleNamespace(generate=note), draft="draft", device="cpu"
    )
    for name in HF_METHODS:
        HuggingFace.decode(transformers, name, [3, 1], 4)
    found = []
    for options in calls:
        assert not options.pop("do_sample")
        assert options.pop("max_new_tokens") == 4
        del options["streamer"]
        found.append(options)
    assert found == [{}, {"assistant_model": "draft"}, {"prompt_lookup_num_tokens": 10}]


def test_models_of_several_vocabularies() -> None:
    """Check the error. Pythia-12B with 70M once ended in a traceback, after other rows had run."""
    pair = Pair(random_model(0), random_model(1), None, Path(), None, {})
    check_vocabularies(list(HF_METHODS), pair)
    pair = replace(pair, draft=random_model(1, vocab_size=97))
    check_vocabularies(["ar", "hf-ar", "hf-lookup"], pair)
    with pytest.raises(UsageError, match="one vocabulary size, not 96 and 97; remove it"):
        check_vocabularies(list(HF_METHODS), pair)

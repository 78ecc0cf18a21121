"""Claim: each of transformers' rows asks it for its own way, for models that it can take."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import random_model

from benchmark.hf import HF_METHODS, HuggingFace, check_vocabularies
from cli.errors import UsageError
from cli.models import Pair


def test_each_row_asks_for_its_own_way() -> None:
    """Of a model that only notes what it was asked for; all of them greedily."""
    asked = []

    def note(prompt: torch.Tensor, **options: object) -> None:
        asked.append(options)

    transformers = SimpleNamespace(
        target=SimpleNamespace(generate=note), draft="draft", device="cpu"
    )
    for name in HF_METHODS:
        HuggingFace.decode(transformers, name, [3, 1], 4)
    ways = []
    for options in asked:
        assert not options.pop("do_sample")
        assert options.pop("max_new_tokens") == 4
        del options["streamer"]
        ways.append(options)
    assert ways == [{}, {"assistant_model": "draft"}, {"prompt_lookup_num_tokens": 10}]


def test_models_of_several_vocabularies() -> None:
    """Pythia-12B with 70M ended in a traceback of transformers, after other rows were measured."""
    pair = Pair(random_model(0), random_model(1), None, Path(), None, {})
    check_vocabularies(list(HF_METHODS), pair)
    pair = replace(pair, draft=random_model(1, vocab_size=97))
    check_vocabularies(["ar", "hf-ar", "hf-lookup"], pair)
    with pytest.raises(UsageError, match="one vocabulary size, not 96 and 97; leave it out"):
        check_vocabularies(list(HF_METHODS), pair)

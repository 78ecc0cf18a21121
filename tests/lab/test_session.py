"""Tests of a text that is written by several calls: with which ids it goes on after every end, and
that it is the text of fresh runs. test_kept.py tests the caches, with every method."""

from dataclasses import replace

import pytest
from fast import count_rows
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

import dynatree_lab as lab
from dynatree_lab.engine.memory import OutOfMemory
from dynatree_lab.generation.kept import KeptCache
from dynatree_lab.metrics import token_ids
from dynatree_lab.pair import Pair
from dynatree_lab.result import Session


@pytest.fixture(scope="module")
def pair() -> Pair:
    return lab.load_pair()


def write_fresh(pair: Pair, ids: list[int], words: str, n: int, eos_ids: list[int]) -> list[int]:
    config = lab.GenerationConfig.parse(*words.split())
    return token_ids(lab.generate(pair.target, pair.draft, ids, config, n, eos_ids=eos_ids))


def test_a_streamed_session_is_a_written_one(pair: Pair) -> None:
    """Check pieces, finish reasons and ids of two texts, and the ids of a stream that is left. Its
    first pass has one row, because the cache was kept."""
    one, other = Session(pair), Session(pair)
    for text, stop in (("The ship sailed at dawn", ()), (" The captain said:", "e")):
        stream, pieces = one.stream(text, "dynatree", 24, stop=stop), []
        try:
            while True:
                pieces.append(next(stream))
        except StopIteration as ended:
            reason = ended.value
        result = other.write(text, "dynatree", 24, stop=stop)
        assert ("".join(pieces), reason) == (result.text, result.finish_reason)
        assert one.ids == other.ids
    n_ids, rows = len(one.ids), count_rows(pair.target)
    next(one.stream("", "dynatree", 24))
    assert rows == [1]
    assert one.ids[n_ids:] == other.write("", "dynatree", 24).ids[: len(one.ids) - n_ids]
    assert len(one.ids) > n_ids


@pytest.mark.parametrize("words", ["ar", "dynatree", "fixed D=4 B=3 tau=0", "auto"])
def test_a_session_goes_on_after_every_end(words: str, pair: Pair) -> None:
    """Check the ids after the limit, an EOS id in the middle of the text, and a stop text. No tree
    decides with which id a session goes on."""
    first = lab.write_text(pair, "The ship sailed at dawn", "ar", max_new_tokens=24)
    session, reasons = Session(pair), []
    for text, others in [
        ("The ship sailed at dawn", {"max_new_tokens": 9}),
        ("", {"eos_ids": [first.ids[14]]}),
        ("", {"stop": first.text.split()[-2], "max_new_tokens": 24}),
        (" The captain said:", {"max_new_tokens": 9}),
    ]:
        before = session.ids + pair.tokenizer.encode(text, add_special_tokens=False).ids
        result = session.write(text, words, **others)
        eos_ids = others.get("eos_ids", pair.target.config.eos_ids)
        expected = write_fresh(pair, before, words, others.get("max_new_tokens", 128), eos_ids)
        assert result.ids == expected[: len(result.ids)] and len(result.ids)
        assert session.ids == before + result.ids[: len(session.ids) - len(before)]
        reasons.append(result.finish_reason)
        if result.finish_reason == "stop":
            own, stop = session.ids[len(before) :], others["stop"]
            decode = pair.tokenizer.decode
            assert stop in decode(own) and stop not in decode(own[:-1])
    assert reasons == ["length", "eos", "stop", "length"]


def test_special_tokens_are_added_once(pair: Pair) -> None:
    """Check a tokenizer that begins each text with a token of its own."""
    tokenizer = Tokenizer.from_str(pair.tokenizer.to_str())
    first = tokenizer.id_to_token(7)
    tokenizer.post_processor = TemplateProcessing(f"{first} $A", special_tokens=[(first, 7)])
    session, ids = lab.Session(replace(pair, tokenizer=tokenizer)), []
    for text in ("The ship sailed at dawn", " The captain said:"):
        ids += [7] * (not ids) + pair.tokenizer.encode(text).ids
        ids += session.write(text, "ar", max_new_tokens=3).ids
    assert session.ids == ids


def test_ids_may_be_replaced(pair: Pair) -> None:
    """Take back an answer, and count the rows of the pass over what is left: one pending id."""
    session = lab.Session(pair)
    first = session.write("The ship sailed at dawn", max_new_tokens=9)
    rows = count_rows(pair.target)
    session.ids = session.ids[: -len(first.ids)]
    second = session.write("", "dyspec N=8", max_new_tokens=9)
    assert second.ids == first.ids and rows[0] == 1
    with pytest.raises(ValueError, match="the prompt is empty"):
        lab.Session(pair).write("")
    with pytest.raises(ValueError, match="method is 'typo'"):
        session.write("", "typo")
    assert session.write("", max_new_tokens=9).ids


def test_a_text_stays_if_its_cache_cannot_be_copied(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(kept: KeptCache, *arguments: object) -> None:
        raise OutOfMemory("a copy of the cache")

    session = lab.Session(pair)
    monkeypatch.setattr(KeptCache, "save", fail)
    first = session.write("The ship sailed at dawn", max_new_tokens=6)
    monkeypatch.undo()
    assert session.ids[-6:] == first.ids
    rest = session.write("", "dynatree", max_new_tokens=6).ids
    assert rest == write_fresh(pair, session.ids[:-6], "dynatree", 6, [])


def test_a_length_beyond_training_is_a_warning(pair: Pair) -> None:
    """Check one warning per text, at the caller's line, as the command line prints it."""
    trained = pair.target.config.max_position_embeddings
    session, n_short = lab.Session(pair), trained - 30
    session.ids = [5] * n_short
    session.write("", max_new_tokens=9)  # no warning, which would be an error
    prompt = pair.tokenizer.decode([5] * n_short)
    n_prompt = len(pair.tokenizer.encode(prompt).ids)
    calls = [
        (lambda: session.write("", max_new_tokens=40), n_short + 9 + 40),
        (lambda: lab.write_text(pair, prompt, "ar", max_new_tokens=40), n_prompt + 40),
        (lambda: next(lab.stream_text(pair, prompt, "ar", max_new_tokens=40)), n_prompt + 40),
    ]
    for call, n_tokens in calls:
        with pytest.warns(UserWarning) as found:
            call()
        expected = f"{n_tokens} tokens in all; the target was trained for {trained}"
        assert [str(each.message) for each in found] == [expected]
        assert found[0].filename == __file__
    lab.write_text(pair, prompt, "ar window=64", max_new_tokens=40)


def test_a_session_over_a_streamed_target(pair: Pair) -> None:
    sessions = lab.Session(lab.load_pair(target_memory="30MB")), lab.Session(pair)
    rows = count_rows(sessions[0].pair.target)
    for text in ("The ship sailed at dawn", " The captain said:"):
        rows.clear()
        found = [session.write(text, max_new_tokens=9).ids for session in sessions]
        assert found[0] == found[1]
    assert rows[0] < 8

"""Tests of the command line: its output, and what it keeps if something ends it early."""

import json
import math
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from small import TINY, Captured
from tokenizers import Tokenizer

import dynatree_lab.cli.compare
import dynatree_lab.cli.main
from draft_tree import Tree
from dynatree_lab import request
from dynatree_lab.cli.compare import Comparison
from dynatree_lab.cli.main import main
from dynatree_lab.drawing import draw_tree
from dynatree_lab.engine.memory import OutOfMemory
from dynatree_lab.errors import UsageError
from dynatree_lab.generation.config import METHOD_OPTIONS, GenerationConfig
from dynatree_lab.generation.generate import Step, generate
from dynatree_lab.methods import METHODS
from dynatree_lab.methods.rules import MixedTree
from dynatree_lab.methods.sampler import MAX_SEED, Sampling
from dynatree_lab.metrics import Metrics, token_ids
from dynatree_lab.pair import Pair, load_pair
from dynatree_lab.request import Request
from dynatree_lab.result import stream_text
from gpt_neox import NonFiniteLogits

PROMPT = "The ship sailed at dawn"
TARGET = str(TINY / "target")
DRAFT = str(TINY / "draft")
DRAFT_TWICE = ["--target", DRAFT, "--draft", DRAFT]  # quick, for tests that do not look at the text
AR = ["--max-new-tokens", "20", "--method", "ar"]


def run_json(capsys: Captured, options: list[str], status: int = 0) -> dict:
    """Run the command on PROMPT and return its JSON. Fails unless it exits with this status."""
    found = main(["--prompt", PROMPT, "--json"] + options)
    captured = capsys.readouterr()
    assert found == status, captured.err
    return json.loads(captured.out)


def test_text_is_streamed_and_summed_up(capsys: Captured) -> None:
    assert main(["--prompt", PROMPT, "--max-new-tokens", "12"]) == 0
    captured = capsys.readouterr()
    announced, summary, by_depth = captured.err.splitlines()
    assert "models/tiny/target" in announced and "cpu, float32" in announced
    assert summary.startswith("12 tokens, ") and len(summary) <= 80
    found = run_json(capsys, ["--max-new-tokens", "12"])
    assert captured.out == found["text"] + "\n"
    depths = found["metrics"]["depths"]
    pairs = zip(depths["accepted"], depths["nodes"], strict=True)
    assert by_depth == "accepted/nodes by depth: " + " ".join(f"{a}/{n}" for a, n in pairs)


def test_json_has_everything(capsys: Captured) -> None:
    report = run_json(capsys, ["--max-new-tokens", "9", "--method", "graft"])
    tokenizer = Tokenizer.from_file(f"{TARGET}/tokenizer.json")
    assert len(report["token_ids"]) == report["metrics"]["new_tokens"] == 9
    assert report["text"] == tokenizer.decode(report["token_ids"])
    assert report["settings"]["method"] == "graft" and report["settings"]["dtype"] == "float32"
    assert report["versions"]["torch"] == torch.__version__
    assert set(report["metrics"]) == set(Metrics.__dataclass_fields__)


def test_options_reach_the_method(capsys: Captured) -> None:
    """Check that options are reported and have an effect. The text is always ar's."""
    expected = run_json(capsys, AR)["token_ids"]
    chain = run_json(capsys, AR[:2] + ["--method", "linear", "--set", "K=3"])
    assert chain["settings"]["K"] == 3 and 2 < chain["metrics"]["drafted_per_iter"] <= 3
    off = run_json(capsys, AR[:2] + ["--set", "history=off", "--set", "tau = 0.2"])
    assert off["settings"]["history"] is False and off["settings"]["tau"] == 0.2
    assert chain["token_ids"] == off["token_ids"] == expected


def test_no_setting_of_a_method_is_reported_as_another(capsys: Captured) -> None:
    """Check that no names collide. The stop texts once overwrote the setting `stop`."""
    found = run_json(capsys, ["--max-new-tokens", "2", "--set", "costs=learned", "--stop", "x"])
    assert found["settings"]["costs"] == "learned" and found["settings"]["stop_texts"] == ["x"]
    names = found["settings"].keys() - asdict(METHODS["dynatree"]()).keys() - {*METHOD_OPTIONS}
    for method in METHODS.values():
        assert not names & asdict(method()).keys()


NOTES = {  # options, and the note before the text if there is one
    "no instructions": (["--dtype", "bfloat16"], "no bfloat16 instructions"),
    "float32": (["--dtype", "float32"], ""),
    "no draft": (["--method", "ar", "--draft", "./none"], "note: --method ar ignores --draft"),
    "window": (["--window", "64", "--max-new-tokens", "3000"], "differs from full attention"),
    "too long": (["--max-new-tokens", "1021"], "the target was trained for 1024"),
}


@pytest.mark.parametrize("name", NOTES)
def test_notes(
    name: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, expected = NOTES[name]
    (tmp_path / "cpuinfo").write_text("flags\t\t: sse avx512f\n")
    monkeypatch.setattr("dynatree_lab.pair.CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(
        Request, "decode", lambda *_: iter([Step([7], Tree.from_root(0), [0], verify_ms=1.0)])
    )
    assert main(["--prompt", PROMPT] + options) == 0
    notes = re.findall("^(?:note|warning): .*", capsys.readouterr().err, re.MULTILINE)
    assert len(notes) == bool(expected) and expected in "".join(notes)


def test_sampled_text(capsys: Captured) -> None:
    """Check that the seed decides the text. --compare compares only its speed with ar's."""
    hot = ["--temperature", "1", "--top-p", "0.9", "--max-new-tokens", "12"]
    first, again = (run_json(capsys, hot + DRAFT_TWICE + ["--seed", "3"]) for _ in range(2))
    other = run_json(capsys, hot + DRAFT_TWICE + ["--compare"])
    assert first["token_ids"] == again["token_ids"] != other["token_ids"]
    sampling = {"temperature": 1.0, "top_p": 0.9, "seed": 3, "draft_temperature": None}
    sampling |= {"top_k": 0, "min_p": 0.0}
    assert first["settings"]["sampling"] == sampling | {"draws_greedy": False}
    assert other["compare"]["exact"] is None and other["compare"]["speedup"] > 0


def test_greedy_text_by_a_draft_at_a_temperature(capsys: Captured) -> None:
    """Check that it is compared with ar's text, and that no acceptance is reported."""
    options = ["--method", "dyspec", "--draft-temperature", "0.6", "--compare"]
    found = run_json(capsys, options + ["--max-new-tokens", "12"])
    assert found["compare"]["exact"] and found["settings"]["acceptance"] is None


def test_the_acceptance_of_a_sampled_text_is_chosen(capsys: Captured) -> None:
    """Check the report as well. --compare runs ar, which drafts nothing to accept."""
    hot = ["--method", "linear", "--temperature", "1", "--max-new-tokens", "24"]
    token = run_json(capsys, hot + ["--accept", "token", "--compare"])
    chosen = run_json(capsys, hot)
    assert token["token_ids"] != chosen["token_ids"]
    assert token["settings"]["acceptance"] == "token" and token["compare"]["speedup"] > 0
    assert chosen["settings"]["acceptance"] == "traversal"
    assert run_json(capsys, ["--max-new-tokens", "2"])["settings"]["acceptance"] is None


def test_a_text_ends_before_a_stop_text(capsys: Captured) -> None:
    """Check that the stop text that is complete first ends the text. A beginning of a stop text is
    written if the rest does not follow."""
    whole = run_json(capsys, ["--max-new-tokens", "40"])
    text = whole["text"]
    first, later = text[9:15], text[12:20]
    options = ["--max-new-tokens", "40", "--stop", later, "--stop", first]
    stopped = run_json(capsys, options + ["--stop", text[8:20] + "x", "--compare"])
    n = len(stopped["token_ids"])
    assert stopped["text"] == text[:9] and stopped["settings"]["stop_texts"][0] == later
    assert n < 40 and stopped["token_ids"] == whole["token_ids"][:n] and stopped["compare"]["exact"]
    unseen = run_json(capsys, ["--max-new-tokens", "40", "--stop", text[-3:] + "x"])
    assert unseen["text"] == text
    assert "".join(stream_text(load_pair(TARGET, DRAFT), PROMPT, stop=first)) == text[:9]


def test_a_text_ends_at_a_stop_text_that_is_a_special_token(
    capsys: Captured, tmp_path: Path
) -> None:
    """Check a stop text that decoding leaves out, like Dolly's "### End". ar ends there as well."""
    free = run_json(capsys, ["--max-new-tokens", "20", *DRAFT_TWICE])["token_ids"]
    shutil.copytree(DRAFT, tmp_path, dirs_exist_ok=True)
    tokenizer = Tokenizer.from_file(f"{DRAFT}/tokenizer.json")
    special = tokenizer.id_to_token(free[6])
    tokenizer.add_special_tokens([special])
    tokenizer.save(f"{tmp_path}/tokenizer.json")
    pair = ["--target", str(tmp_path), "--draft", DRAFT]
    found = run_json(capsys, [*pair, "--max-new-tokens", "20", "--stop", special, "--compare"])
    assert found["token_ids"] == free[: free.index(free[6]) + 1] and found["compare"]["exact"]
    assert found["text"] == tokenizer.decode(found["token_ids"][:-1])
    assert found["finish_reason"] == "stop" and special not in found["text"]


def test_a_text_says_why_it_ended() -> None:
    """Check the finish reason. In Python it is the value that the generator returns."""
    pair = load_pair(TARGET, DRAFT)
    found = []

    def write(**options: object) -> Iterator[str]:
        found.append((yield from stream_text(pair, PROMPT, max_new_tokens=20, **options)))

    text = "".join(write())
    ids = pair.tokenizer.encode(text).ids
    assert "".join(write(eos_ids=(i for i in ids[4:5]))) == pair.tokenizer.decode(ids[:4])
    assert "".join(write(stop=(stop for stop in [text[9:15]]))) == text[:9]
    assert found == ["length", "eos", "stop"]


def test_prompt_from_file_and_standard_input(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(f"{PROMPT}\n", encoding="utf-8")  # as editors and echo write it
    expected = run_json(capsys, AR)["text"] + "\n"
    with file.open() as standard_input:
        monkeypatch.setattr(sys, "stdin", standard_input)
        for name in (str(file), "-"):
            assert main(["--prompt-file", name] + AR) == 0
            assert capsys.readouterr().out == expected


def test_eos_ends_the_text_and_is_not_printed(capsys: Captured, tmp_path: Path) -> None:
    free = run_json(capsys, ["--max-new-tokens", "20", *DRAFT_TWICE])
    eos = free["token_ids"][6]
    shutil.copytree(DRAFT, tmp_path, dirs_exist_ok=True)
    config = json.dumps({"eos_token_id": [eos, 4095]})
    (tmp_path / "generation_config.json").write_text(config)
    pair = ["--max-new-tokens", "20", "--target", str(tmp_path), "--draft", DRAFT]
    ended = run_json(capsys, pair)
    at = free["token_ids"].index(eos)
    assert ended["token_ids"] == free["token_ids"][: at + 1]
    assert ended["finish_reason"] == "eos"
    assert ended["settings"]["eos_ids"] == [eos, 4095]  # without 0, which config.json has
    tokenizer = Tokenizer.from_file(f"{TARGET}/tokenizer.json")
    assert ended["text"] == tokenizer.decode(free["token_ids"][:at])
    assert run_json(capsys, pair + ["--ignore-eos"])["token_ids"] == free["token_ids"]
    pieces = stream_text(load_pair(str(tmp_path), DRAFT), PROMPT, max_new_tokens=20)
    assert "".join(pieces) == ended["text"]


# --compare


def corrupt_id(monkeypatch: pytest.MonkeyPatch, at: int | None) -> None:
    """Change an id of the text before the run is compared with ar."""

    def compare(request: Request, steps: list[Step]) -> Comparison:
        if at is not None:
            ids = token_ids(steps)
            ids[at] += 1
            steps = [replace(steps[0], tokens=ids), *(replace(s, tokens=[]) for s in steps[1:])]
        return dynatree_lab.cli.compare.compare(request, steps)

    monkeypatch.setattr(dynatree_lab.cli.main, "compare", compare)


STRICT, HALF, HOT = ["--strict"], ["--dtype", "bfloat16"], ["--temperature", "0.8"]
VERDICTS = {  # options, token with a changed id, status, message
    "equal": ([], None, 0, "the ids are equal"),
    "an id": ([], 4, 1, r"the ids differ from token 4 on \(gap .* not a tie\)"),
    "sampled": (["--method", "recycle", *HOT], None, 0, "the ids are equal"),
    "sampled id": (["--method", "recycle", *HOT], 4, 1, r"from token 4 on \(gap .* not a tie\)"),
    "half": (HALF, 4, 0, "with --strict the ids are ar's"),
    "strict": (STRICT + HALF, None, 0, "strict ar: .* the ids are equal"),
    "strict id": (STRICT + HALF, 4, 1, "the ids differ from token 4 on$"),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_compare(name: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    options, at, status, message = VERDICTS[name]
    corrupt_id(monkeypatch, at)
    arguments = ["--prompt", PROMPT, "--compare", "--max-new-tokens", "12"] + DRAFT_TWICE + options
    assert main(arguments + ["--json"]) == status
    captured = capsys.readouterr()
    assert re.search(message, captured.err.splitlines()[-1])
    found = json.loads(captured.out)["compare"]
    assert found["first_difference"] == at
    assert found["exact"] is (at is None) and found["is_strict"] is ("--strict" in options)


def test_drawn_candidates_write_other_ids_than_ar(capsys: Captured) -> None:
    words = ["--prompt", PROMPT, "--compare", "--max-new-tokens", "6", *HOT]
    assert main(words + DRAFT_TWICE) == 0
    assert capsys.readouterr().err.endswith("; the ids are drawn, so they differ by chance\n")


def test_a_single_token_is_compared_without_a_speed(capsys: Captured) -> None:
    """Check that no speed is printed: the first token is the prefill's, so none was measured."""
    found = run_json(capsys, ["--compare", "--max-new-tokens", "1"] + DRAFT_TWICE)["compare"]
    assert found["speedup"] is None and found["ar_throughput"] is None and found["exact"]
    assert main(["--prompt", PROMPT, "--compare", "--max-new-tokens", "1"] + DRAFT_TWICE) == 0
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == "ar: no speed of a single token; the ids are equal"


def test_no_room_for_the_gap_does_not_lose_the_run(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(pair: Pair) -> None:
        raise OutOfMemory("none")

    corrupt_id(monkeypatch, 4)
    monkeypatch.setattr(Pair, "float32_target", property(no_room))
    assert main(["--prompt", PROMPT, "--compare", "--max-new-tokens", "9"] + DRAFT_TWICE) == 1
    assert "differ from token 4 on (not enough memory" in capsys.readouterr().err


# --prompts


OTHER = "It was a cold morning, and the"


def write_prompts(folder: Path, prompts: list[str]) -> str:
    """Write a file of prompts and return its name."""
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    return str(file)


def test_a_line_per_prompt_is_that_of_a_run_of_its_own(capsys: Captured, tmp_path: Path) -> None:
    """Check sampled text, whose seed is seed + i, after a prompt that cannot be encoded as well."""
    prompts = [PROMPT, "half an emoji: \ud83d", OTHER]
    hot = ["--json", "--max-new-tokens", "12", *DRAFT_TWICE, "--temperature", "1"]
    assert main([*hot, "--seed", "5", "--prompts", write_prompts(tmp_path, prompts)]) == 2
    captured = capsys.readouterr()
    (error,) = re.findall("^error: .*", captured.err, re.MULTILINE)
    assert error.startswith("error: prompt 2 of 3: ")
    lines = [json.loads(line) for line in captured.out.splitlines()]
    failed = lines.pop(1)
    assert failed["prompt"] == prompts[1] and failed["settings"] == {"prompt_number": 2}
    assert error.endswith(failed["error"]) and "text" not in failed
    for found, i in zip(lines, (0, 2), strict=True):
        assert main([*hot, "--seed", str(5 + i), "--prompt", prompts[i]]) == 0
        alone = json.loads(capsys.readouterr().out)
        for name in ("token_ids", "text", "finish_reason"):
            assert found[name] == alone[name]
        assert found["settings"] == alone["settings"] | {"prompt_number": i + 1}


def test_objects_of_prompts_can_be_joined_with_the_file(capsys: Captured, tmp_path: Path) -> None:
    """Check that object i has the keys of line i, and that no key of the line replaces its own."""
    lines = [
        {"question_id": 81, "turns": [PROMPT, "a"], "text": "mine"},
        {"prompt": OTHER, "x": []},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    assert main(["--prompts", str(file), "--json", *AR, *DRAFT_TWICE]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["prompt"] for each in found] == [PROMPT, OTHER]
    assert found[0]["question_id"] == 81 and found[0]["turns"] == [PROMPT, "a"]
    assert found[1]["x"] == [] and "question_id" not in found[1]
    assert found[0]["text"] != "mine" and "prompt" not in run_json(capsys, [*AR, *DRAFT_TWICE])


def test_texts_of_prompts_follow_one_another(capsys: Captured, tmp_path: Path) -> None:
    """Check plain text with a prompt in each line, and that each text is compared with ar's."""
    text = run_json(capsys, AR)["text"]
    file = tmp_path / "prompts.txt"
    file.write_text(f"{PROMPT}\n{PROMPT}\n")
    assert main(["--prompts", str(file), "--compare", *AR]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{text}\n{text}\n"
    assert f"note: {file} has 2 prompts, one per line\n" in captured.err
    heard = re.findall("^(prompt . of 2|ar: .* the ids are equal)$", captured.err, re.MULTILINE)
    assert [line[:8] for line in heard[::2]] == ["prompt 1", "prompt 2"] and len(heard) == 4


CUT_SHORT = [(OutOfMemory("x"), 2, [False, True, False]), (KeyboardInterrupt(), 130, [False, True])]


@pytest.mark.parametrize(("error", "status", "are_interrupted"), CUT_SHORT)
def test_an_error_keeps_the_lines_of_all_prompts(
    error: BaseException,
    status: int,
    are_interrupted: list[bool],
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Check a lack of memory, which ends only its own text, and Ctrl-C, which ends the program."""
    real = request.generate

    def generate_or_fail(*args: object, **options: object) -> Iterator[Step]:
        steps = real(*args, **options)
        yield next(steps)
        if len(args[2]) == 1:  # the prompt
            raise error
        yield from steps

    monkeypatch.setattr(request, "generate", generate_or_fail)
    file = write_prompts(tmp_path, [PROMPT, "a", OTHER])
    assert main(["--prompts", file, "--json", "--max-new-tokens", "5", *DRAFT_TWICE]) == status
    captured = capsys.readouterr()
    lines = [json.loads(line) for line in captured.out.splitlines()]
    assert [line["interrupted"] for line in lines] == are_interrupted
    expected = "x" if status == 2 else None  # Ctrl-C is no error
    assert [line.get("error") for line in lines] == [None, expected, None][: len(lines)]
    assert captured.err.count("error: ") == captured.err.count("error: prompt 2 of 3: x;")


def test_a_seed_that_is_too_large_ends_only_its_prompt(capsys: Captured, tmp_path: Path) -> None:
    file = write_prompts(tmp_path, [PROMPT, OTHER])
    options = ["--temperature", "1", "--seed", str(MAX_SEED), "--max-new-tokens", "5", "--json"]
    assert main(["--prompts", file, *options, *DRAFT_TWICE]) == 2
    captured = capsys.readouterr()
    first, second = map(json.loads, captured.out.splitlines())
    assert first["settings"]["prompt_number"] == 1 and "error" not in first
    assert second["prompt"] == OTHER and second["error"].startswith("--seed is ")
    assert f"error: prompt 2 of 2: --seed is {MAX_SEED + 1}, it must be" in captured.err


# Errors and interrupts during a text


ENDS = [  # an error, the exit status (None: it is raised), whether --json is given
    (KeyboardInterrupt, 130, True),
    (NonFiniteLogits, 2, False),
    (KeyError, None, True),
]


@pytest.mark.parametrize(("kind", "status", "is_json"), ENDS)
def test_an_error_keeps_the_text_so_far(
    kind: type[BaseException],
    status: int | None,
    is_json: bool,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = run_json(capsys, ["--max-new-tokens", "40"] + DRAFT_TWICE)
    real = request.generate

    def fail_early(*args: object, **options: object) -> Iterator[Step]:
        steps = real(*args, **options)
        for _ in range(5):
            yield next(steps)
        raise kind("x")

    monkeypatch.setattr(request, "generate", fail_early)
    arguments = ["--prompt", PROMPT, "--max-new-tokens", "40"] + DRAFT_TWICE + ["--json"] * is_json
    if status is None:
        with pytest.raises(kind):
            main(arguments)
    else:
        assert main(arguments) == status
    captured = capsys.readouterr()
    assert " tokens/s, " in captured.err.splitlines()[1]
    assert captured.err.count("error: ") == (kind is NonFiniteLogits)
    if not is_json:
        assert len(captured.out) > 9 and captured.out.endswith("\n")
        assert whole["text"].startswith(captured.out[:-1])
        return
    report = json.loads(captured.out)
    assert report["interrupted"] and report["metrics"]["iterations"] == 4
    n = len(report["token_ids"])
    assert 5 <= n < 40 and report["token_ids"] == whole["token_ids"][:n]
    assert len(report["text"]) > 9 and whole["text"].startswith(report["text"])


def test_ctrl_c_while_comparing_keeps_the_json(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(dynatree_lab.cli.main, "compare", interrupt)
    report = run_json(capsys, ["--compare", "--max-new-tokens", "5"], status=130)
    assert report["interrupted"] and len(report["token_ids"]) == 5


def test_text_for_python(capsys: Captured) -> None:
    """Compare stream_text with the command line."""
    pair = load_pair(TARGET, DRAFT)
    hot = ["--max-new-tokens", "12", "--method", "linear", "--temperature", "0.8"]
    config = GenerationConfig(METHODS["linear"](), sampling=Sampling(0.8))
    pieces = list(stream_text(pair, PROMPT, config, 12))
    assert len(pieces) > 3 and "".join(pieces) == run_json(capsys, hot)["text"]
    assert "".join(stream_text(pair, PROMPT, "linear", 12, temperature=0.8)) == "".join(pieces)


def test_arguments_from_python_are_checked() -> None:
    """Check words as those of the command line. Ids may be numpy's or torch's."""
    pair = load_pair(TARGET, DRAFT, dtype="float32")
    assert load_pair(DRAFT, None, dtype="bfloat16").target.dtype == torch.bfloat16
    for refused in ({"device": "mps"}, {"dtype": "int8"}, {"draft_dtype": torch.int8}):
        with pytest.raises(UsageError, match="it must be"):
            load_pair(TARGET, DRAFT, **refused)
    ids = pair.tokenizer.encode(PROMPT).ids
    config = GenerationConfig.parse("lookup")

    def decode(prompt: object, **options: object) -> list[int]:
        return token_ids(generate(pair.target, pair.draft, prompt, config, 9, **options))

    text = decode(ids)
    assert text == decode(numpy.array(ids)) == decode(torch.tensor(ids))
    eos_ids = (token for token in [-1, text[3]])
    assert decode(ids, eos_ids=eos_ids) == text[: text.index(text[3]) + 1]
    with pytest.raises(ValueError, match="token ids"):
        decode("text")
    with pytest.raises(ValueError, match="GenerationConfig.parse"):
        next(generate(pair.target, None, ids, "ar", 9))


WRONG = [  # arguments, the error
    ({"prompt": []}, "prompt must have at least one id, and all from 0 to 4095"),
    ({"prompt": [0, 4096]}, "all from 0 to 4095"),
    ({"prompt": [0.5]}, "prompt is [0.5], it must be a sequence of token ids"),
    ({"max_new_tokens": 0}, "max_new_tokens is 0, it must be at least 1"),
    ({"max_new_tokens": 1.5}, "max_new_tokens is 1.5, it must be of type int"),
    ({"eos_ids": 0}, "eos_ids is 0, it must be a sequence of token ids"),
    ({"config": GenerationConfig.parse("linear")}, "this method drafts, so it needs a draft or"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_arguments_of_the_engine_are_checked(changes: dict[str, object], message: str) -> None:
    given = {"prompt": [5], "config": GenerationConfig.parse("ar"), "max_new_tokens": 9} | changes
    with pytest.raises(ValueError, match=re.escape(message)):
        next(generate(load_pair(DRAFT, None).target, None, **given))


# Drawn trees


def make_example(tokenizer: Tokenizer) -> MixedTree:
    words = [" the", " cat", " dog", " sat", " ran", " ran"]
    return MixedTree(
        tokens=[tokenizer.encode(word).ids[0] for word in words],
        parents=[-1, 0, 0, 1, 1, 2],
        depths=[0, 1, 1, 2, 2, 2],
        path_logprobs=[math.log(p) for p in (1.0, 0.6, 0.3, 0.3, 0.18, 0.24)],
        draft_slots=[0, 1, 2, -1, -1, -1],
        are_retrieved=[False, False, True, False, True, False],
    )


def test_a_drawn_tree() -> None:
    """Check one line per token, whatever characters it has, and the colours of accepted nodes."""
    tokenizer = Tokenizer.from_file(f"{TARGET}/tokenizer.json")
    bonus = tokenizer.encode("\n").ids[0]
    step = SimpleNamespace(tree=make_example(tokenizer), path=[0, 1, 4], bonus=bonus)
    plain = draw_tree(step, tokenizer).splitlines()
    assert plain == [
        "' the' 1.00 *",
        "|-- ' cat' 0.60 *",
        "|   |-- ' sat' 0.30",
        "|   `-- ' ran' 0.18 * +",
        "`-- ' dog' 0.30 +",
        "    `-- ' ran' 0.24",
        r"bonus: '\n'",
    ]
    colored = draw_tree(step, tokenizer, is_colored=True).splitlines()
    for line, same in zip(colored[:-1], plain, strict=False):
        assert ("\033[1;32m" in line) == ("*" in same)
        assert ("\033[2m" in line) == ("*" not in same)


def test_the_marks_of_drawn_trees_are_explained_once(capsys: Captured) -> None:
    """Check the legend. Each tree once had "0 retrieved, marked +" and no line that explained * and
    the numbers."""
    text = ["--prompt", "the sea, the sea, the", "--max-new-tokens", "12", "--show-tree"]
    for method, is_retrieving in (("dynatree", False), ("lookup", True)):
        assert main([*text, "--method", method]) == 0
        output = capsys.readouterr().err
        assert output.count("* accepted, + retrieved") == 1
        assert (" retrieved)" in output) == is_retrieving

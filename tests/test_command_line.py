"""The command line: what it prints, and what it keeps when something ends it early."""

import json
import random
import re
import shutil
import sys
import weakref
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy
import pytest
import torch
from conftest import ROOT, TINY, Captured, error_line
from tokenizers import Tokenizer
from tqdm import tqdm

import cli.compare
import cli.main
from cli import models
from cli.compare import Comparison, Digests
from cli.errors import UsageError
from cli.main import main
from cli.metrics import Metrics, Tally, token_ids
from cli.models import Pair, Request, load_pair, stream_text
from cli.tokens import StopTexts
from engine.generate import Step, generate
from engine.generation_config import GenerationConfig
from engine.memory import OutOfMemory
from methods import METHODS
from methods.acceptances import DEFAULTS
from methods.sampler import Sampling
from verify import NonFiniteLogits

PROMPT = "The ship sailed at dawn"
TARGET = str(TINY / "target")
DRAFT = str(TINY / "draft")
TWINS = ["--target", DRAFT, "--draft", DRAFT]  # quick, where the text is of no matter
AR = ["--max-new-tokens", "20", "--method", "ar"]


def run_json(capsys: Captured, options: list[str], status: int = 0) -> dict:
    """The JSON of a run over PROMPT, which ends with this status."""
    found = main(["--prompt", PROMPT, "--json"] + options)
    captured = capsys.readouterr()
    assert found == status, captured.err
    return json.loads(captured.out)


def test_text_is_streamed_and_summed_up(capsys: Captured) -> None:
    assert main(["--prompt", PROMPT, "--max-new-tokens", "12"]) == 0
    captured = capsys.readouterr()
    announced, summary = captured.err.splitlines()
    assert "models/tiny/target" in announced and "cpu, float32" in announced
    assert summary.startswith("12 tokens, ") and len(summary) <= 80
    assert captured.out == run_json(capsys, ["--max-new-tokens", "12"])["text"] + "\n"


def test_json_has_everything(capsys: Captured) -> None:
    report = run_json(capsys, ["--max-new-tokens", "9", "--method", "graft"])
    tokenizer = Tokenizer.from_file(f"{TARGET}/tokenizer.json")
    assert len(report["token_ids"]) == report["metrics"]["new_tokens"] == 9
    assert report["text"] == tokenizer.decode(report["token_ids"])
    assert report["settings"]["method"] == "graft" and report["settings"]["dtype"] == "float32"
    assert report["versions"]["torch"] == torch.__version__
    assert set(report["metrics"]) == set(Metrics.__dataclass_fields__)


def test_what_is_asked_for_reaches_the_method(capsys: Captured) -> None:
    """And is reported; a chain of 3 drafts 3 tokens per iteration. The text is always ar's."""
    expected = run_json(capsys, AR)["token_ids"]
    chain = run_json(capsys, AR[:2] + ["--method", "linear", "--set", "K=3"])
    assert chain["settings"]["K"] == 3 and 2 < chain["metrics"]["drafted_per_iter"] <= 3
    off = run_json(capsys, AR[:2] + ["--set", "history=off", "--set", "tau = 0.2"])
    assert off["settings"]["history"] is False and off["settings"]["tau"] == 0.2
    assert chain["token_ids"] == off["token_ids"] == expected


def test_no_setting_of_a_method_is_reported_as_another(capsys: Captured) -> None:
    """The stop texts once stood in the place of the setting `stop`."""
    found = run_json(capsys, ["--max-new-tokens", "2", "--set", "costs=learned", "--stop", "x"])
    assert found["settings"]["costs"] == "learned" and found["settings"]["stop_texts"] == ["x"]
    names = found["settings"].keys() - asdict(METHODS["dynatree"]()).keys()
    for method in METHODS.values():
        assert not names & asdict(method()).keys()


NOTES = {  # options -> what is said of them before the text, if anything
    "no instructions": (["--dtype", "bfloat16"], "no bfloat16 instructions"),
    "float32": (["--dtype", "float32"], ""),
    "no draft": (["--method", "ar", "--draft", "./none"], "note: --method ar needs no draft"),
    "window": (["--window", "64"], "not the text of full attention"),
    "too long": (["--max-new-tokens", "1021"], "and the target was trained for 1024"),
}


@pytest.mark.parametrize("name", NOTES)
def test_notes(
    name: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, told = NOTES[name]
    (tmp_path / "cpuinfo").write_text("flags\t\t: sse avx512f\n")
    monkeypatch.setattr(models, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(Request, "decode", lambda *_: iter([Step([7], verify_ms=1.0)]))
    assert main(["--prompt", PROMPT] + options) == 0
    notes = re.findall("^(?:note|warning): .*", capsys.readouterr().err, re.MULTILINE)
    assert len(notes) == bool(told) and told in "".join(notes)


def test_sampled_text(capsys: Captured) -> None:
    """The seed decides; a sampled text is not held against ar's."""
    hot = ["--temperature", "1", "--top-p", "0.9", "--max-new-tokens", "12"]
    first, again = (run_json(capsys, hot + TWINS + ["--seed", "3"]) for _ in range(2))
    other = run_json(capsys, hot + TWINS + ["--compare"])
    assert first["token_ids"] == again["token_ids"] != other["token_ids"]
    sampling = {"temperature": 1.0, "top_p": 0.9, "seed": 3, "draft_temperature": None}
    assert first["settings"]["sampling"] == sampling | {"draws_greedy": False}
    assert other["compare"]["exact"] is None and other["compare"]["speedup"] > 0


def test_greedy_text_by_a_draft_at_a_temperature(capsys: Captured) -> None:
    """Is held against ar's, and has no acceptance to choose."""
    options = ["--method", "dyspec", "--draft-temperature", "0.6", "--compare"]
    found = run_json(capsys, options + ["--max-new-tokens", "12"])
    assert found["compare"]["exact"] and found["settings"]["acceptance"] is None


def test_what_accepts_a_sampled_text_is_chosen(capsys: Captured) -> None:
    """And said; ar, which it is compared with, has no chain to accept."""
    hot = ["--method", "linear", "--temperature", "1", "--max-new-tokens", "24"]
    token = run_json(capsys, hot + ["--accept", "token", "--compare"])
    block = run_json(capsys, hot)
    assert token["token_ids"] != block["token_ids"]
    assert token["settings"]["acceptance"] == "token" and token["compare"]["speedup"] > 0
    assert block["settings"]["acceptance"] == DEFAULTS["drawn chain"] == "block"
    assert run_json(capsys, ["--max-new-tokens", "2"])["settings"]["acceptance"] is None


def test_streaming_past_the_trained_positions(capsys: Captured) -> None:
    """No warning; ar over the same window writes the same."""
    options = ["--max-new-tokens", "20", "--json"]
    long = ["--prompt", "in the beginning " * 700, "--window", "600", "--method", "ar"]
    short = ["--prompt", "in the beginning " * 60, "--window", "64", "--compare"]
    assert main(long + options) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["settings"]["prompt_tokens"] > 2048 and "warning" not in captured.err
    assert report["settings"]["window"] == {"size": 600, "sinks": 4}
    assert main(short + options) == 0
    assert json.loads(capsys.readouterr().out)["compare"]["exact"]


def test_a_text_ends_before_a_stop_text(capsys: Captured) -> None:
    """Of several before the one that is complete first; what only begins like one is written."""
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
    """As "### End" of Dolly, which the decoded text leaves out; ar ends there as well."""
    free = run_json(capsys, ["--max-new-tokens", "20"])["token_ids"]
    for folder in (TARGET, DRAFT):
        shutil.copytree(folder, tmp_path / Path(folder).name)
    for folder in tmp_path.iterdir():
        tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
        special = tokenizer.id_to_token(free[6])
        tokenizer.add_special_tokens([special])
        tokenizer.save(f"{folder}/tokenizer.json")
    pair = ["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft")]
    options = [*pair, "--max-new-tokens", "20", "--stop"]
    found = run_json(capsys, [*options, special, "--compare"])
    assert found["token_ids"] == free[: free.index(free[6]) + 1] and found["compare"]["exact"]
    assert found["text"] == tokenizer.decode(found["token_ids"][:-1])
    assert found["finish_reason"] == "stop" and special not in found["text"]
    line = error_line(capsys, main, ["--prompt", PROMPT, *options, f"\n{special}"])
    assert line.endswith(f"use {special!r} alone")


def test_a_text_says_why_it_ended(capsys: Captured) -> None:
    """To Python as the value of its generator."""
    pair = load_pair(TARGET, DRAFT)
    found = []

    def write(**how: object) -> Iterator[str]:
        found.append((yield from stream_text(pair, PROMPT, max_new_tokens=20, **how)))

    text = "".join(write())
    ids = pair.tokenizer.encode(text).ids
    assert "".join(write(eos_ids=(i for i in ids[4:5]))) == pair.tokenizer.decode(ids[:4])
    assert "".join(write(stop=(stop for stop in [text[9:15]]))) == text[:9]
    assert found == ["length", "eos", "stop"]
    assert run_json(capsys, ["--max-new-tokens", "20"])["finish_reason"] == "length"


@pytest.mark.parametrize("stop", [None, 3, b"", b"ab", "", ["a", ""], ["a", 3], [None]])
def test_a_stop_text_is_a_text(stop: object) -> None:
    with pytest.raises(ValueError, match="a stop text is .*, it must be a string"):
        stream_text(load_pair(DRAFT, None), PROMPT, "ar", stop=stop)


STOPS = ["ab", "bcd", "a", "cab", "ccc"]


@pytest.mark.parametrize("stops", [STOPS[:2], STOPS[1:], STOPS[3:], []])
def test_a_stop_text_is_found_however_the_text_comes(stops: list[str]) -> None:
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choices("abcd", k=12))
        expected = text
        for end in range(len(text), 0, -1):  # at last the shortest text that ends in one
            lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
            if lengths:
                expected = text[: end - max(lengths)]
        found, rest, reader = "", text, StopTexts(stops)
        while rest and not reader.has_ended:
            n = rng.randint(1, 5)
            found += reader.push(rest[:n])
            rest = rest[n:]
        assert found + reader.held == expected


def test_prompt_from_file_and_standard_input(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(f"{PROMPT}\n", encoding="utf-8")  # as an editor or echo leaves it
    expected = run_json(capsys, AR)["text"] + "\n"
    with file.open() as standard_input:
        monkeypatch.setattr(sys, "stdin", standard_input)
        for name in (str(file), "-"):
            assert main(["--prompt-file", name] + AR) == 0
            assert capsys.readouterr().out == expected


def test_the_plain_model_writes_the_same(capsys: Captured) -> None:
    """In as many iterations; --compare holds it against plain ar."""
    report = run_json(capsys, ["--max-new-tokens", "40"])
    plain = run_json(capsys, ["--max-new-tokens", "40", "--plain", "--compare"])
    assert plain["token_ids"] == report["token_ids"] and plain["compare"]["exact"]
    assert plain["metrics"]["iterations"] == report["metrics"]["iterations"]


def test_eos_ends_the_text_and_is_not_printed(capsys: Captured, tmp_path: Path) -> None:
    free = run_json(capsys, ["--max-new-tokens", "20"])
    eos = free["token_ids"][6]
    shutil.copytree(TARGET, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["eos_token_id"] = [eos, 4095]
    (tmp_path / "config.json").write_text(json.dumps(config))
    pair = ["--max-new-tokens", "20", "--target", str(tmp_path), "--draft", DRAFT]
    ended = run_json(capsys, pair)
    at = free["token_ids"].index(eos)
    assert ended["token_ids"] == free["token_ids"][: at + 1]
    assert ended["finish_reason"] == "eos"
    assert ended["settings"]["eos_ids"] == [eos, 4095, 0]  # 0: of generation_config.json
    tokenizer = Tokenizer.from_file(f"{TARGET}/tokenizer.json")
    assert ended["text"] == tokenizer.decode(free["token_ids"][:at])
    assert run_json(capsys, pair + ["--ignore-eos"])["token_ids"] == free["token_ids"]
    pieces = stream_text(load_pair(str(tmp_path), DRAFT), PROMPT, max_new_tokens=20)
    assert "".join(pieces) == ended["text"]


# --compare


def change(
    monkeypatch: pytest.MonkeyPatch, ids_at: int | None = None, logits_at: int | None = None
) -> None:
    """Let what was written have another id, and the logits of a token another bit."""

    def compare(request: Request, written: Tally, digests: Digests | None) -> Comparison:
        if ids_at is not None:
            written.ids[ids_at] += 1
        if logits_at is not None:
            digests.found[logits_at] = b"another"
        return cli.compare.compare(request, written, digests)

    monkeypatch.setattr(cli.main, "compare", compare)


STRICT, HALF = ["--strict"], ["--dtype", "bfloat16"]
VERDICTS = {  # options, the token whose id and whose logits are wrong, status -> what is said
    "equal": ([], None, None, 0, "the ids are equal"),
    "an id": ([], 4, None, 1, r"the ids differ from token 4 on \(top-2 gap .* not a tie\)"),
    "half": (HALF, 4, None, 0, "with --strict the ids are ar's"),
    "strict": (STRICT, None, None, 0, "the ids and logits are equal, bit for bit"),
    "strict half": (STRICT + HALF, None, None, 0, "the ids and logits are equal, bit for bit"),
    "a bit": (STRICT, None, 3, 1, "the ids are equal, the logits differ from token 3 on"),
    "both": (STRICT, 4, 2, 1, "ids differ from token 4 on, the logits differ from token 2 on"),
    "strict id": (STRICT + HALF, 4, None, 1, "differ from token 4 on, the logits are equal"),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_compare(name: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    options, ids_at, logits_at, status, told = VERDICTS[name]
    change(monkeypatch, ids_at, logits_at)
    arguments = ["--prompt", PROMPT, "--compare", "--max-new-tokens", "12"] + TWINS + options
    assert main(arguments + ["--json"]) == status
    captured = capsys.readouterr()
    assert re.search(told, captured.err.splitlines()[-1])
    found = json.loads(captured.out)["compare"]
    assert (found["first_difference"], found["logits_difference"]) == (ids_at, logits_at)
    assert found["exact"] is (ids_at is None) and found["is_strict"] is ("--strict" in options)


def test_one_bit_of_a_logit_is_another_digest() -> None:
    digests, logits = Digests(), torch.zeros(1, 9)
    digests(logits)
    logits[0, 7] = logits[0, 7].nextafter(torch.tensor(torch.inf))
    digests(logits)
    assert digests.found[0] != digests.found[1]


def test_no_room_for_the_gap_does_not_lose_the_run(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(pair: Pair) -> None:
        raise OutOfMemory("none")

    change(monkeypatch, ids_at=4)
    monkeypatch.setattr(Pair, "float32_target", property(no_room))
    assert main(["--prompt", PROMPT, "--compare", "--max-new-tokens", "9"] + TWINS) == 1
    assert "differ from token 4 on (no room" in capsys.readouterr().err


# What ends a text early


ENDS = {KeyboardInterrupt: 130, NonFiniteLogits: 2, KeyError: None}  # the last one is raised


@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize("is_json", [True, False])
def test_what_ends_a_text_leaves_what_there_is(
    kind: type[BaseException], is_json: bool, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_json(capsys, ["--max-new-tokens", "40"] + TWINS)
    real = models.generate

    def ended(*args: object, **options: object) -> Iterator[Step]:
        steps = real(*args, **options)
        for _ in range(5):
            yield next(steps)
        raise kind("x")

    monkeypatch.setattr(models, "generate", ended)
    arguments = ["--prompt", PROMPT, "--max-new-tokens", "40"] + TWINS + ["--json"] * is_json
    if ENDS[kind] is None:
        with pytest.raises(kind):
            main(arguments)
    else:
        assert main(arguments) == ENDS[kind]
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

    monkeypatch.setattr(cli.main, "compare", interrupt)
    report = run_json(capsys, ["--compare", "--max-new-tokens", "5"], status=130)
    assert report["interrupted"] and len(report["token_ids"]) == 5


def test_no_step_is_kept(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a window memory is to stay as it is; every step, with its lists, was kept."""
    made: list[weakref.ref] = []

    class Seen(Step):
        """A step has no room for a weak reference."""

    def steps(*arguments: object, **options: object) -> Iterator[Step]:
        for token in range(100, 150):
            step = Seen([token], verify_ms=1.0)
            made.append(weakref.ref(step))
            yield step
        assert sum(one() is not None for one in made) == 1, "the last"

    monkeypatch.setattr(models, "generate", steps)
    assert len(run_json(capsys, ["--compare"])["token_ids"]) == 50


def test_a_terminal_is_not_told_what_to_do(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "a\x1b[2J\x9bb\r\n\tc\xa0é\n"
    for is_terminal, expected in ((True, "a\\x1b[2J\\x9bb\\r\n\tc\xa0é\n"), (False, text)):
        monkeypatch.setattr(sys.stdout, "isatty", lambda answer=is_terminal: answer)
        cli.main.put(text)
        assert capsys.readouterr().out == expected


def test_text_for_python(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """stream_text is what the command line prints: as in the README, and with other options."""
    monkeypatch.chdir(ROOT)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    exec(re.search("^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)[1], {})
    text = capsys.readouterr().out
    assert text == run_json(capsys, ["--max-new-tokens", "64"])["text"]
    pair = load_pair(TARGET, DRAFT)
    hot = ["--max-new-tokens", "12", "--method", "linear", "--temperature", "0.8"]
    way = GenerationConfig(METHODS["linear"](), sampling=Sampling(0.8))
    pieces = list(stream_text(pair, PROMPT, way, 12))
    assert len(pieces) > 3 and "".join(pieces) == run_json(capsys, hot)["text"]
    assert "".join(stream_text(pair, PROMPT, "linear", 12, temperature=0.8)) == "".join(pieces)


def test_what_python_asks_for_is_checked() -> None:
    """Words as the command line's; ids of numpy and torch are ids."""
    pair = load_pair(TARGET, DRAFT, dtype="float32")
    assert load_pair(DRAFT, None, dtype="bfloat16").target.dtype == torch.bfloat16
    for refused in ({"device": "mps"}, {"dtype": "int8"}, {"draft_dtype": torch.int8}):
        with pytest.raises(UsageError, match="there are"):
            load_pair(TARGET, DRAFT, **refused)
    ids = pair.tokenizer.encode(PROMPT).ids
    texts = []
    for prompt in (ids, numpy.array(ids), torch.tensor(ids)):
        texts.append(
            token_ids(
                generate(pair.target, pair.draft, prompt, GenerationConfig.parse("lookup"), 9)
            )
        )
    assert texts[0] == texts[1] == texts[2]
    models, way = (pair.target, pair.draft), GenerationConfig.parse("lookup")
    steps = generate(*models, ids, way, 9, eos_ids=(i for i in [-1, texts[0][3]]))
    assert token_ids(steps) == texts[0][: texts[0].index(texts[0][3]) + 1]
    for prompt, way, told in (
        ("text", GenerationConfig.parse("ar"), "token ids"),
        (ids, "ar", "GenerationConfig.parse"),
    ):
        with pytest.raises(ValueError, match=told):
            next(generate(pair.target, pair.draft, prompt, way, 9))


def test_a_long_prompt_shows_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """On a terminal, until it has been read; a short one does not, nor one that a plain model
    reads, which does not tell."""
    told = []
    monkeypatch.setattr(tqdm, "update", lambda bar, n: told.append((bar.total, n)))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("cli.main.LONG_PROMPT", 700)
    long = "ship sail " * 400
    assert main(["--prompt", long, "--max-new-tokens", "2", "--plain"]) == 0
    assert "prompt:" not in capsys.readouterr().err
    for words in ("a b c", long):
        assert main(["--prompt", words, "--max-new-tokens", "2"]) == 0
    n_tokens = told[0][0]
    assert n_tokens > 700 and len(told) > 1
    assert sum(n for _, n in told) == n_tokens
    assert "prompt:" in capsys.readouterr().err

"""Tests of hub names with the real client and a local hub: requests, messages and the cache."""

import hashlib
import json
import signal
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from urllib.parse import quote

import huggingface_hub.hf_api  # before any test, because its logger keeps the stderr of that time
import pytest
import torch
from huggingface_hub import constants
from pytest import MonkeyPatch
from small import ROOT, TINY, Captured, error_line

from dynatree_lab.benchmark import prompts
from dynatree_lab.cli.main import main
from dynatree_lab.engine.checkpoint import CheckpointError, find_checkpoint
from dynatree_lab.engine.model import FastGPTNeoX
from dynatree_lab.errors import UsageError
from dynatree_lab.pair import load_pair

SINGLE, SHARDED = "pythia", "gelu_fast_20b"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = [f"model-0000{i}-of-00008.safetensors" for i in range(1, 9)]
Files = dict[str, bytes]


class Hub(ThreadingHTTPServer):
    """A server with the part of the hub's protocol that the client uses. Records all requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.pages: dict[str, bytes] = {}  # by path
        self.status = 200  # of every page
        self.is_interrupting = False  # the weights are not sent to their end; Ctrl-C comes instead
        self.requests: list[str] = []
        self.endpoint = f"http://127.0.0.1:{self.server_port}"

    def add(self, name: str, files: Files, *revisions: str, kind: str = "models") -> str:
        """Serve these files as main and under the revisions. Returns the commit."""
        commit = hashlib.sha1(repr((name, files)).encode()).hexdigest()
        about = json.dumps({"id": name, "sha": commit}).encode()
        self.pages[f"/api/{kind}/{name}"] = about
        for revision in revisions:
            self.pages[f"/api/{kind}/{name}/revision/{quote(revision, safe='')}"] = about
        folder = name if kind == "models" else f"{kind}/{name}"
        for file, content in files.items():
            self.pages[f"/{folder}/resolve/{commit}/{file}"] = content
        return commit

    def pop_fetched(self) -> list[str]:
        """Return the files that were downloaded since the last call, in order."""
        gets = [line for line in self.requests if line.startswith("GET") and "/resolve/" in line]
        self.requests.clear()
        return [line.rpartition("/")[2] for line in gets]

    def handle_error(self, *request: object) -> None:
        """Print the error, unless the client has left, as after Ctrl-C."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(*request)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Print nothing, because the tests read stderr as a user would."""

    def do_GET(self) -> None:
        hub: Hub = self.server
        hub.requests.append(f"{self.command} {self.path}")
        body = hub.pages.get(self.path, b"")
        n_missing = 9 if hub.is_interrupting and self.path.endswith(WEIGHTS) else 0
        self.send_response(hub.status if body else 404)
        self.send_header("Content-Length", str(len(body) + n_missing))
        self.send_header("ETag", hashlib.sha256(body).hexdigest())
        self.send_header("X-Repo-Commit", self.path.split("/")[-2])
        if not body:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
            if n_missing:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    do_HEAD = do_GET


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: MonkeyPatch) -> Iterator[Hub]:
    """Start an empty hub, and set the client as HF_ENDPOINT and HF_HOME would at its import."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Hub() as hub:
        threading.Thread(target=hub.serve_forever, args=(0.01,), daemon=True).start()
        url = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.endpoint + url)
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        huggingface_hub.close_session()
        yield hub
        huggingface_hub.close_session()
        hub.shutdown()


def golden_files(name: str) -> Files:
    """Return the files of a golden checkpoint and, as in published repositories, unused ones."""
    files = {file.name: file.read_bytes() for file in (ROOT / "tests" / "golden" / name).iterdir()}
    del files["golden.safetensors"]
    return files | {"README.md": b"words", "pytorch_model.bin": b"pickle", "tokenizer.json": b"{}"}


LAYOUTS = {  # files -> the files fetched before the download is announced, and those fetched after
    "single": (golden_files(SINGLE), [], [WEIGHTS]),
    "sharded": (golden_files(SHARDED), [INDEX], SHARDS),
    "both": (golden_files(SHARDED) | golden_files(SINGLE), [], [WEIGHTS]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_repository_is_announced_and_fetched_once(hub: Hub, layout: str) -> None:
    """Check that only files that are loaded are fetched, because old repositories hold the weights
    in several formats. Dolly has EOS ids in generation_config.json, which most repositories lack.
    """
    files, index, weights = LAYOUTS[layout]
    generation = {"generation_config.json": b'{"eos_token_id": 50277}'}
    hub.add("org/name", files | (generation if layout == "single" else {}))
    said = []
    folder = find_checkpoint("org/name", lambda line: said.append((line, hub.pop_fetched()))).folder
    n_bytes = sum(len(files[file]) for file in weights)
    line = f"fetching org/name: {n_bytes / 1e6:.1f} MB into {constants.HF_HUB_CACHE}"
    more = list(generation) if layout == "single" else []
    assert said == [(line, ["config.json", *more, "tokenizer.json", *index])]
    assert hub.pop_fetched() == weights
    assert (50277 in FastGPTNeoX.from_pretrained("org/name").config.eos_ids) == bool(more)
    hub.pop_fetched()
    assert find_checkpoint("org/name", pytest.fail).folder == folder and hub.pop_fetched() == []


def test_a_head_is_fetched_without_a_tokenizer(hub: Hub) -> None:
    files = {name: (TINY / "eagle" / name).read_bytes() for name in ("config.json", WEIGHTS)}
    hub.add("org/head", files)
    assert find_checkpoint("org/head").is_head
    assert hub.pop_fetched() == ["config.json", WEIGHTS]


def test_revisions(hub: Hub) -> None:
    """Check a branch, a tag with a slash and a commit; main is the default."""
    step_commit = hub.add("org/name", golden_files("sequential_residual"), "step1", "tags/v1")
    main_commit = hub.add("org/name", golden_files(SINGLE))
    assert find_checkpoint("org/name").folder.name == main_commit
    for revision in ("step1", "tags/v1", step_commit):
        assert find_checkpoint(f"org/name@{revision}").folder.name == step_commit
    assert hub.pop_fetched().count(WEIGHTS) == 2
    with pytest.raises(CheckpointError, match="404"):
        find_checkpoint("org/name@step2")


LLAMA = {"config.json": b'{"model_type": "llama"}', WEIGHTS: b"weights"}
PICKLED = golden_files(SINGLE)
del PICKLED[WEIGHTS]
REFUSED = [  # a repository's files, the hub's status -> the reason in the error
    (PICKLED, 200, "404.*model.safetensors.index.json"),
    (LLAMA, 200, "llama"),
    (golden_files(SINGLE), 403, "403"),
]


@pytest.mark.parametrize(("files", "status", "cause"), REFUSED)
def test_a_repository_is_refused_before_its_weights(
    hub: Hub, files: Files, status: int, cause: str
) -> None:
    hub.add("org/name", files)
    hub.status = status
    with pytest.raises(CheckpointError, match=cause):
        find_checkpoint("org/name", pytest.fail)
    assert not {WEIGHTS, "pytorch_model.bin"} & set(hub.pop_fetched())


def test_without_a_network_a_complete_cache_is_used(
    hub: Hub, monkeypatch: MonkeyPatch, capsys: Captured
) -> None:
    """Check also that an incomplete cache is refused, in a line that names the embedded pair."""
    hub.add("org/name", golden_files(SHARDED), "step1")
    folders = {name: find_checkpoint(name).folder for name in ("org/name", "org/name@step1")}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name, folder in folders.items():
        assert find_checkpoint(name, pytest.fail).folder == folder
    (folder / SHARDS[4]).unlink()
    for name in ("org/name", "org/new"):
        line = error_line(capsys, main, ["--prompt", "a", "--method", "ar", "--target", name])
        assert f"{name}' is not a folder, and cannot be fetched" in line
        assert line.endswith("; without a network use the embedded pair: --pair embedded")


def test_a_misspelt_draft_is_refused_before_the_target_is_fetched(hub: Hub) -> None:
    """Check the order, because a target may be gigabytes."""
    hub.add("org/target", golden_files(SINGLE))
    with pytest.raises(CheckpointError, match="'org/drat'.*404"):
        load_pair("org/target", "org/drat", torch.device("cpu"), torch.float32)
    assert WEIGHTS not in hub.pop_fetched()


def test_ctrl_c_ends_a_download_at_once(
    hub: Hub, monkeypatch: MonkeyPatch, capsys: Captured
) -> None:
    """Interrupt this thread while it waits for the end of the weights."""
    hub.add("org/name", golden_files(SINGLE))
    monkeypatch.setattr(hub, "is_interrupting", True)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    assert main(["--prompt", "a", "--method", "ar", "--target", "org/name"]) == 130
    signal.signal(signal.SIGINT, before)
    err = capsys.readouterr().err
    assert "fetching org/name: 0.4 MB" in err and "%|" not in err
    assert hub.pop_fetched()[-1] == WEIGHTS


def test_wikitext(hub: Hub) -> None:
    """Check that the archive is fetched once, and that an error names the other datasets."""
    text, archive = "word " * 50, BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr(prompts.WIKITEXT_FILE, text)
        file.writestr(prompts.SCRIPT_FILE, text.upper())
    where = prompts.WIKITEXT_REPOSITORY
    hub.add(where, {prompts.WIKITEXT_ZIP: archive.getvalue()}, kind="datasets")
    hub.status = 503
    with pytest.raises(UsageError, match="^wikitext2 .*503.*--dataset builtin or --prompts FILE"):
        prompts.load_prompts("wikitext2", None)
    hub.status = 200
    for name, expected in (("wikitext2", text), ("wikitext2-script", text.upper())):
        assert prompts.load_prompts(name, None) == [expected.strip()]
    assert hub.pop_fetched() == [prompts.WIKITEXT_ZIP]

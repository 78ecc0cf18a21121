"""Hub names, with the hub's own client and a hub on the loopback: what is asked for, said, kept."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from urllib.parse import unquote

import huggingface_hub
import pytest
import torch
from conftest import ROOT
from huggingface_hub import constants
from pytest import CaptureFixture, MonkeyPatch

from benchmark import prompts
from benchmark.prompts import (
    SCRIPT_FILE,
    WIKITEXT_FILE,
    WIKITEXT_REPOSITORY,
    WIKITEXT_ZIP,
    load_prompts,
)
from cli.errors import UsageError
from cli.main import main
from cli.models import load_pair
from engine.checkpoint import CheckpointError
from engine.hub import HubUnreachable, find_checkpoint
from engine.model import FastGPTNeoX

GOLDEN = Path(__file__).parent / "golden"
SINGLE, SHARDED = "pythia", "gelu_fast_20b"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = [f"model-0000{i}-of-00008.safetensors" for i in range(1, 9)]
Files = dict[str, bytes]


class Hub(ThreadingHTTPServer):
    """As much of the protocol as the client asks for; every request is written down."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.commits: dict[tuple[str, str], str] = {}  # of each repository's revisions
        self.files: dict[str, Files] = {}  # of each commit
        self.status = 200  # another is all that is answered
        self.is_foreign = False  # a server of something else answers
        self.is_stalling = False  # weights break off, and the connection stays open
        self.has_stalled = threading.Event()
        self.asked: list[str] = []
        self.endpoint = f"http://127.0.0.1:{self.server_port}"

    def add(self, name: str, files: Files, *revisions: str) -> str:
        """Serve these files under the revisions, main if none is named. Returns the commit."""
        commit = hashlib.sha1(repr((name, files)).encode()).hexdigest()
        self.files[commit] = files
        for revision in (commit, *(revisions or ("main",))):
            self.commits[name, revision] = commit
        return commit

    def fetched(self) -> list[str]:
        """The files whose content was asked for since the last call, in order."""
        gets = [line for line in self.asked if line.startswith("GET") and "/resolve/" in line]
        self.asked.clear()
        return [line.rpartition("/")[2] for line in gets]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Nothing on stderr: there the tests read what a user would."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub: Hub = self.server
        hub.asked.append(f"{self.command} {self.path}")
        name, _, rest = self.path.replace("/revision/", "/resolve/").partition("/resolve/")
        revision, _, file = rest.partition("/")
        name = re.sub("^/(api/)?(models/)?", "", name)
        commit = hub.commits.get((name, unquote(revision) or "main"))
        if commit is None:
            return self.answer(404, {"X-Error-Code": "RepoNotFound"})
        if hub.status != 200:
            return self.answer(hub.status, {})
        if hub.is_foreign and not file:
            return self.answer(200, {}, b"[1]")
        if not file:
            return self.answer(200, {}, json.dumps({"id": name, "sha": commit}).encode())
        if file not in hub.files[commit]:
            return self.answer(404, {"X-Repo-Commit": commit, "X-Error-Code": "EntryNotFound"})
        body = hub.files[commit][file]
        etag = hashlib.sha256(body).hexdigest()
        self.answer(200, {"X-Repo-Commit": commit, "ETag": f'"{etag}"'}, body)

    def answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET" and self.server.is_stalling and self.path.endswith(WEIGHTS):
            self.wfile.write(body[:100])
            self.server.has_stalled.set()
            threading.Event().wait()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: MonkeyPatch) -> Iterator[Hub]:
    """An empty hub, and the client set as HF_ENDPOINT and HF_HOME would have set it at import."""
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


def golden(name: str, lacking: str = "") -> Files:
    """A golden checkpoint as a published repository has it, with files that nothing reads."""
    files = {file.name: file.read_bytes() for file in (GOLDEN / name).iterdir()}
    for file in ("golden.safetensors", lacking):
        files.pop(file, None)
    return files | {"README.md": b"words", "pytorch_model.bin": b"pickle", "tokenizer.json": b"{}"}


def refusal(name: str) -> str:
    """The one line with which a name is refused."""
    with pytest.raises(CheckpointError) as caught:
        find_checkpoint(name, pytest.fail)
    line = str(caught.value)
    assert "\n" not in line
    return line


LAYOUTS = {
    "single": (golden(SINGLE), [WEIGHTS]),
    "sharded": (golden(SHARDED), [INDEX, *SHARDS]),
    "both": (golden(SHARDED) | golden(SINGLE), [WEIGHTS]),
}


@pytest.mark.parametrize(("files", "weights"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_repository_is_announced_and_fetched_once(
    hub: Hub, files: Files, weights: list[str]
) -> None:
    """Old repositories hold the same weights twice or more; only what is loaded is asked for."""
    hub.add("org/name", files)
    said = []

    def announce(line: str) -> None:
        said.append(line)
        assert not [line for line in hub.asked if line[:3] == "GET" and "model-" in line]

    folder = find_checkpoint("org/name", announce)
    assert hub.fetched() == ["config.json", "tokenizer.json", *weights]
    FastGPTNeoX.from_pretrained(folder)
    n_bytes = sum(len(files[file]) for file in weights if file != INDEX)
    assert said == [f"fetching org/name: {n_bytes / 1e6:.1f} MB into {constants.HF_HUB_CACHE}"]
    assert find_checkpoint("org/name", pytest.fail) == folder and hub.fetched() == []


def test_revisions(hub: Hub) -> None:
    """A branch, a tag with a slash, a commit: each its own files, main where none is named."""
    main_commit = hub.add("org/name", golden(SINGLE))
    step_commit = hub.add("org/name", golden("sequential_residual"), "step1", "tags/v1")
    assert find_checkpoint("org/name").name == main_commit
    for revision in ("step1", "tags/v1", step_commit):
        assert find_checkpoint(f"org/name@{revision}").name == step_commit
    assert hub.fetched().count(WEIGHTS) == 2
    assert "404" in refusal("org/name@step2")


NEOX = {"config.json": golden(SINGLE)["config.json"], "tokenizer.json": b"{}"}
FOREIGN = {"config.json": b'{"model_type": "llama"}', WEIGHTS: b""}
REFUSED = {  # a repository's files, what the hub answers -> the reason
    "only bin": (NEOX | {"pytorch_model.bin": b""}, 200, "holds no safetensors; .bin"),
    "no config": ({WEIGHTS: b""}, 200, "config.json"),
    "foreign": (FOREIGN, 200, "llama"),
    "shard missing": (golden(SHARDED, lacking=SHARDS[4]), 200, SHARDS[4]),
    "pickle": (NEOX | {INDEX: b'{"weight_map": {"a": "x.bin"}}'}, 200, "x.bin"),
    "outside": (NEOX | {INDEX: b'{"weight_map": {"a": "../x.safetensors"}}'}, 200, "in its folder"),
    "gated": (golden(SINGLE), 403, "403"),
    "broken": (golden(SINGLE), 500, "500"),
}


@pytest.mark.parametrize(("files", "status", "cause"), REFUSED.values(), ids=REFUSED)
def test_a_repository_is_refused_before_its_weights(
    hub: Hub, files: Files, status: int, cause: str
) -> None:
    hub.add("org/name", files)
    hub.status = status
    assert cause in refusal("org/name")
    assert not {"safetensors", "bin"} & {file.rpartition(".")[2] for file in hub.fetched()}


def test_an_answer_of_no_hub(hub: Hub) -> None:
    """A list where an object belongs was a TypeError, of status 70."""
    hub.add("org/name", golden(SINGLE))
    hub.is_foreign = True
    assert "'org/name' is not a folder, and cannot be fetched: " in refusal("org/name")


def test_without_a_network_the_cache_serves_and_a_part_does_not(
    hub: Hub, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    """HubUnreachable offers the embedded pair. A password in HF_ENDPOINT was in its line."""
    hub.add("org/name", golden(SHARDED), "main", "step1")
    hub.add("org/part", golden(SINGLE))
    folders = {name: find_checkpoint(name) for name in ("org/name", "org/name@step1", "org/part")}
    (folders.pop("org/part") / WEIGHTS).unlink()
    hub.status = 500
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    secret = hub.endpoint.replace("//", "//user:password@")
    monkeypatch.setattr(constants, "ENDPOINT", secret)
    for name, folder in folders.items():
        assert find_checkpoint(name, pytest.fail) == folder
    for name in ("org/part", "org/new"):
        with pytest.raises(HubUnreachable):
            find_checkpoint(name)
        assert "password" not in refusal(name)
    assert main(["--prompt", "a", "--method", "ar", "--target", "org/new", "--device", "cpu"]) == 2
    assert "--target models/tiny/target" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "name", ["./nope", "/nope", "~/nope", "conftest.py", "", "@main", "broken"]
)
def test_a_path_that_is_no_folder_is_never_a_hub_name(
    hub: Hub, name: str, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("conftest.py").touch()
    Path("broken").symlink_to("nothing")
    assert "is not a folder" in refusal(name)
    assert hub.asked == []


@pytest.mark.parametrize("revision", ["../../../evil", "a/../../../../evil", "/evil"])
def test_a_revision_stays_within_the_cache(hub: Hub, tmp_path: Path, revision: str) -> None:
    """The client makes a file's name of it, and a hub may know any revision."""
    hub.add("org/name", golden(SINGLE), revision)
    assert "no hub name" in refusal(f"org/name@{revision}")
    assert hub.asked == [] and not list(tmp_path.rglob("evil"))


def test_a_damaged_file_in_the_cache_says_what_to_delete(hub: Hub) -> None:
    """The cache's folder holds links: without the file behind it, it is fetched again."""
    hub.add("org/name", golden(SINGLE))
    folder = find_checkpoint("org/name")
    os.truncate(folder / WEIGHTS, 300)
    with pytest.raises(CheckpointError, match=WEIGHTS) as caught:
        FastGPTNeoX.from_pretrained("org/name")
    to_delete = str(caught.value).partition("; delete ")[2].partition(" and the next run")[0]
    Path(to_delete).unlink()
    FastGPTNeoX.from_pretrained("org/name")


def test_a_misspelt_draft_is_told_before_the_target_is_fetched(hub: Hub) -> None:
    """A target may be gigabytes."""
    hub.add("org/target", golden(SINGLE))
    with pytest.raises(CheckpointError, match="'org/drat'.*404"):
        load_pair("org/target", "org/drat", torch.device("cpu"), torch.float32)
    assert WEIGHTS not in hub.fetched()


def test_ctrl_c_ends_a_download_at_once(hub: Hub, tmp_path: Path) -> None:
    """Of the program as a user starts it, who has only the environment to set."""
    hub.add("org/name", golden(SINGLE))
    hub.is_stalling = True
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.endpoint}
    command = [sys.executable, "dynatree.py", "--prompt", "a", "--device", "cpu"]
    command += ["--method", "ar", "--target", "org/name"]
    heeding = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # ignored in the background
    pipes = {"stderr": subprocess.PIPE, "preexec_fn": heeding}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as run:
        assert hub.has_stalled.wait(120)
        run.send_signal(signal.SIGINT)
        lines = run.communicate(timeout=600)[1].decode()
    assert run.returncode == 130 and "Traceback" not in lines
    assert "fetching org/name: 0.4 MB" in lines and "%|" not in lines


def archive_of(text: str, **settings: int) -> bytes:
    """WikiText-2's archive with another text in it, and in capitals as the validation split's."""
    archive = BytesIO()
    with zipfile.ZipFile(archive, "w", **settings) as file:
        file.writestr(WIKITEXT_FILE, text)
        file.writestr(SCRIPT_FILE, text.upper())
    return archive.getvalue()


def test_wikitext(hub: Hub, monkeypatch: MonkeyPatch) -> None:
    """Fetched once; a mistake is one line that names the other datasets."""
    hub.add(f"datasets/{WIKITEXT_REPOSITORY}", {WIKITEXT_ZIP: archive_of("word " * 50)})
    hub.status = 503
    with pytest.raises(UsageError, match="^wikitext2 .*503.*--dataset builtin or --prompts FILE"):
        load_prompts("wikitext2", None)
    hub.status = 200
    for _ in range(2):
        assert load_prompts("wikitext2", None) == [("word " * 50).strip()]
    assert load_prompts("wikitext2-script", None) == [("WORD " * 50).strip()]
    assert hub.fetched() == [WIKITEXT_ZIP]


LARGE = archive_of("word " * 2000, compression=zipfile.ZIP_DEFLATED)  # 10,000 bytes
NO_ARCHIVES = {  # of WikiText-2 -> what is said
    "no zip": (b"not a zip", "not a zip"),
    "bomb": (LARGE, "has more than 1,000 bytes"),
    "bomb of another kind": (
        archive_of("\0" * 10**6, compression=zipfile.ZIP_BZIP2),
        "not deflated",
    ),
    "large": (archive_of("word " * 500), "too large for what it is"),
}


@pytest.mark.parametrize(("archive", "said"), NO_ARCHIVES.values(), ids=NO_ARCHIVES)
def test_an_archive_that_is_not_wikitexts(
    archive: bytes, said: str, hub: Hub, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "WIKITEXT_BYTES", 1000)
    hub.add(f"datasets/{WIKITEXT_REPOSITORY}", {WIKITEXT_ZIP: archive})
    with pytest.raises(UsageError, match=f"not the WikiText-2 archive.*{said}.*--prompts FILE"):
        load_prompts("wikitext2", None)

"""Hub names, with the hub's own client and a hub on the loopback: what is asked for, said, kept.

Most tests run in this process, the client's settings pointed at the server; the last ones start
the program as a user does, who has only the environment to set.
"""

import errno
import os
import signal
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from types import ModuleType, SimpleNamespace

import huggingface_hub
import pytest
import torch
from conftest import TINY
from hub_server import Files, Hub
from huggingface_hub import constants
from pytest import CaptureFixture, LogCaptureFixture, MonkeyPatch

from benchmark import prompts
from benchmark.prompts import WIKITEXT_FILE, WIKITEXT_REPOSITORY, WIKITEXT_ZIP, load_prompts
from cli.errors import UsageError
from cli.main import main
from cli.models import load_pair
from engine.checkpoint import CheckpointError, load_tensors, read_config
from engine.hub import HubUnreachable, find_checkpoint
from gpt_neox import GPTNeoX

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"
SINGLE, SHARDED = "pythia", "gelu_fast_20b"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = [f"model-0000{i}-of-00008.safetensors" for i in range(1, 9)]
NEVER_READ = {"README.md": b"words", "pytorch_model.bin": b"pickle", "flax_model.msgpack": b""}


def golden(name: str, lacking: str = "") -> Files:
    """A golden checkpoint as a published repository has it, with files that nothing reads."""
    files = {file.name: file.read_bytes() for file in (GOLDEN / name).iterdir()}
    for file in ("golden.safetensors", lacking):
        files.pop(file, None)
    return files | NEVER_READ | {"tokenizer.json": b"{}"}


@pytest.fixture
def waits(monkeypatch: MonkeyPatch) -> list[float]:
    """The seconds that the client would have waited, which here take no time."""
    seconds: list[float] = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    return seconds


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: MonkeyPatch, waits: list[float]) -> Iterator[Hub]:
    """An empty hub, and the client set as HF_ENDPOINT and HF_HOME would have set it at import."""
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Hub() as hub:
        url = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.endpoint + url)
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        huggingface_hub.close_session()
        yield hub
        huggingface_hub.close_session()


def refusal(name: str, kind: type[CheckpointError] = CheckpointError) -> str:
    """The one line with which a name is refused."""
    with pytest.raises(CheckpointError) as caught:
        find_checkpoint(name)
    line = str(caught.value)
    assert type(caught.value) is kind and name.partition("@")[0] in line and "\n" not in line
    return line


LAYOUTS = {"single": (SINGLE, [WEIGHTS]), "sharded": (SHARDED, [INDEX, *SHARDS])}


@pytest.mark.parametrize(("name", "weights"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_repository_is_announced_and_fetched_once(
    hub: Hub, name: str, weights: list[str]
) -> None:
    """Old repositories hold the same weights twice or more; only what is loaded is asked for."""
    files = golden(name)
    hub.add("org/name", files)
    said = []

    def announce(line: str) -> None:
        said.append(line)
        assert not any(file.endswith(".safetensors") for file in hub.asked)

    folder = find_checkpoint("org/name", announce)
    assert hub.fetched() == ["config.json", "tokenizer.json", *weights]
    for file in weights:
        assert (folder / file).read_bytes() == files[file]
    GPTNeoX.from_pretrained(folder)
    n_bytes = sum(len(files[file]) for file in weights if file != INDEX)
    assert said == [f"fetching org/name: {n_bytes / 1e6:.1f} MB into {constants.HF_HUB_CACHE}"]
    assert find_checkpoint("org/name", pytest.fail) == folder
    assert hub.asked == ["GET /api/models/org/name", "HEAD /org/name/resolve/main/config.json"]


def test_a_repository_with_both_layouts_gives_the_single_file(hub: Hub) -> None:
    hub.add("org/name", golden(SHARDED) | golden(SINGLE))
    folder = find_checkpoint("org/name")
    assert hub.fetched() == ["config.json", "tokenizer.json", INDEX, WEIGHTS]
    GPTNeoX.from_pretrained(folder)


def test_revisions(hub: Hub) -> None:
    """A branch, a tag with a slash, a commit: each its own files, main where none is named."""
    main_commit = hub.add("org/name", golden(SINGLE))
    step = golden("sequential_residual")
    step_commit = hub.add("org/name", step, "step1", "tags/v1")
    assert find_checkpoint("org/name").name == main_commit
    for revision in ("step1", "tags/v1", step_commit):
        folder = find_checkpoint(f"org/name@{revision}")
        assert folder.name == step_commit
        assert (folder / WEIGHTS).read_bytes() == step[WEIGHTS]
    assert hub.fetched().count(WEIGHTS) == 2
    assert refusal("org/name@step2") == "hub repository 'org/name' has no revision 'step2'"


PICKLED = {INDEX: b'{"weight_map": {"a": "pytorch_model.bin"}}'}
UNFIT = {  # a repository's files -> why it is refused
    "only bin": ({"config.json": b"{}", "pytorch_model.bin": b""}, "only .bin weights"),
    "no weights": ({"config.json": b"{}"}, "no safetensors"),
    "no config": ({WEIGHTS: b""}, "no config.json"),
    "foreign": ({"config.json": b'{"model_type": "llama"}', WEIGHTS: b""}, "llama"),
    "shard missing": (golden(SHARDED, lacking=SHARDS[4]), f"lists {SHARDS[4]}, which is not there"),
    "pickled shards": (golden(SINGLE, lacking=WEIGHTS) | PICKLED, "bin, which is not safetensors"),
}


@pytest.mark.parametrize(("files", "cause"), UNFIT.values(), ids=UNFIT)
def test_an_unfit_repository_is_refused_before_its_weights(
    hub: Hub, files: Files, cause: str
) -> None:
    hub.add("org/name", files)
    with pytest.raises(CheckpointError, match=cause):
        find_checkpoint("org/name", pytest.fail)
    assert not {"safetensors", "bin"} & {file.rpartition(".")[2] for file in hub.fetched()}


GATED = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Not in the list"}
HUB_SAYS = {  # status, headers -> what the line says of it, and to do
    "unknown": (404, {"X-Error-Code": "RepoNotFound"}, ["404", "check the name", "HF_TOKEN"]),
    "private": (401, {"X-Error-Message": "Invalid username."}, ["401", "Invalid username", "HF_T"]),
    "gated": (403, GATED, ["403", "Not in the list", "HF_TOKEN"]),
    "forbidden": (403, {}, ["403", "HF_TOKEN"]),
    "throttled": (429, {"Retry-After": "5"}, ["429", "wait some minutes", "HF_TOKEN"]),
    "broken": (500, {}, ["500", "try again later"]),
    "down": (503, {}, ["503", "try again later"]),
}
PLACES = ["/api/models/org/name", "/config.json", "/" + WEIGHTS]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("status", "headers", "said"), HUB_SAYS.values(), ids=HUB_SAYS)
def test_what_the_hub_refuses_is_one_line(
    hub: Hub,
    waits: list[float],
    caplog: LogCaptureFixture,
    place: str,
    status: int,
    headers: dict[str, str],
    said: list[str],
) -> None:
    """Whichever request it refuses. The client waits before it gives up, and says so each time."""
    hub.add("org/name", golden(SINGLE))
    hub.refusals[place] = (status, headers)
    line = refusal("org/name")
    for words in [*said, hub.endpoint]:
        assert words in line
    n_told = caplog.text.count("Retrying in") + caplog.text.count("Rate limited. Waiting")
    assert n_told == len(waits) and sum(waits) <= 30


def test_the_token_opens_a_private_repository(hub: Hub, monkeypatch: MonkeyPatch) -> None:
    hub.add("org/name", golden(SINGLE))
    hub.token = "hf_secret"
    assert "HF_TOKEN" in refusal("org/name")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "HF_TOKEN" in refusal("org/name")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    GPTNeoX.from_pretrained("org/name")


def test_a_download_that_breaks_off_is_resumed(hub: Hub, monkeypatch: MonkeyPatch) -> None:
    """From the last whole chunk on: the client's are of 10 MB, more than these files have."""
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 50_000)
    files = golden(SINGLE)
    hub.add("org/name", files)
    hub.cuts = [100_000, 0, 250_000]
    folder = find_checkpoint("org/name")
    assert hub.ranges == ["bytes=100000-", "bytes=100000-", "bytes=350000-"]
    assert (folder / WEIGHTS).read_bytes() == files[WEIGHTS]


def test_the_next_run_fetches_what_is_not_complete(hub: Hub) -> None:
    """The third shard never gets beyond its first bytes; nothing is kept of it."""
    files = golden(SHARDED)
    hub.add("org/name", files)
    hub.refusals[SHARDS[2]] = (500, {})
    refusal("org/name")
    hub.refusals.clear()
    hub.fetched()
    hub.cuts = [100] + [0] * 9
    assert "peer closed connection" in refusal("org/name", HubUnreachable)
    assert set(hub.fetched()) == {SHARDS[2]}
    hub.cuts.clear()
    said: list[str] = []
    folder = find_checkpoint("org/name", said.append)
    assert hub.fetched() == SHARDS[2:]
    assert f"{sum(len(files[file]) for file in SHARDS[2:]) / 1e6:.1f} MB" in said[0]
    GPTNeoX.from_pretrained(folder)


def test_a_file_of_the_wrong_size_is_not_kept(hub: Hub) -> None:
    files = golden(SINGLE)
    hub.add("org/name", files)
    hub.surplus = 7
    n_bytes = len(files[WEIGHTS])
    assert f"size {n_bytes + 7} but has size {n_bytes}" in refusal("org/name")
    hub.surplus = 0
    GPTNeoX.from_pretrained("org/name")


@pytest.mark.parametrize("file", [WEIGHTS, "config.json"])
def test_a_damaged_file_in_the_cache_says_what_to_delete(hub: Hub, file: str) -> None:
    """The cache's folder holds links: without the file behind it, it is fetched again."""
    hub.add("org/name", golden(SINGLE))
    folder = find_checkpoint("org/name")
    os.truncate(folder / file, 300)
    with pytest.raises(CheckpointError, match=file) as caught:
        load_tensors(folder, read_config(folder), "cpu", None)
    to_delete = str(caught.value).partition("; delete ")[2].partition(" and the next run")[0]
    Path(to_delete).unlink()
    GPTNeoX.from_pretrained("org/name")


def go_offline(hub: Hub, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def lose_network(hub: Hub, monkeypatch: MonkeyPatch) -> None:
    hub.stop()
    huggingface_hub.close_session()


def fall_silent(hub: Hub, monkeypatch: MonkeyPatch) -> None:
    """As behind a firewall that drops what it does not like."""
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.05)
    hub.is_silent = True


def break_hub(hub: Hub, monkeypatch: MonkeyPatch) -> None:
    hub.refusals[""] = (500, {})


def enter_hotel(hub: Hub, monkeypatch: MonkeyPatch) -> None:
    hub.page = b"<html>Accept our terms</html>"


def need_other_proxy(hub: Hub, monkeypatch: MonkeyPatch) -> None:
    """A kind that the client knows only if more is installed."""
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    huggingface_hub.close_session()


Trouble = Callable[[Hub, MonkeyPatch], None]
TROUBLES = {  # what stands between us and the hub, what is said of it, is it no network
    "offline": (go_offline, "HF_HUB_OFFLINE", True),
    "no network": (lose_network, "Connection refused", True),
    "silence": (fall_silent, "timed out", True),
    "broken hub": (break_hub, "500", False),
    "hotel": (enter_hotel, "Expecting value", False),
    "proxy": (need_other_proxy, "SOCKS", False),
}
every_trouble = pytest.mark.parametrize(
    ("trouble", "said", "is_unreachable"), TROUBLES.values(), ids=TROUBLES
)


@every_trouble
def test_without_the_hub_the_cache_serves(
    hub: Hub, monkeypatch: MonkeyPatch, trouble: Trouble, said: str, is_unreachable: bool
) -> None:
    """The repository's files that are never fetched may not be held against the cache. Offline is
    what the user asked for; of any other trouble a note says what was done."""
    hub.add("org/name", golden(SHARDED), "main", "step1")
    folder = find_checkpoint("org/name")
    find_checkpoint("org/name@step1")
    trouble(hub, monkeypatch)
    for name in ("org/name", "org/name@step1", f"org/name@{folder.name}"):
        notes: list[str] = []
        assert find_checkpoint(name, notes.append) == folder
        if trouble is go_offline:
            assert notes == []
        else:
            assert len(notes) == 1 and notes[0].startswith(f"note: using the cached {name}: it ")
            assert said in notes[0]
    GPTNeoX.from_pretrained(folder)


@every_trouble
@pytest.mark.parametrize("breaks_at", ["", INDEX, SHARDS[3]], ids=["nothing", "config", "shards"])
def test_without_the_hub_a_part_does_not_serve(
    hub: Hub,
    monkeypatch: MonkeyPatch,
    breaks_at: str,
    trouble: Trouble,
    said: str,
    is_unreachable: bool,
) -> None:
    """HubUnreachable alone may offer the embedded pair; a misspelt name must not look like it."""
    hub.add("org/name", golden(SHARDED))
    hub.refusals[breaks_at] = (404, {})
    refusal("org/name")
    hub.refusals.clear()
    trouble(hub, monkeypatch)
    line = refusal("org/name", HubUnreachable if is_unreachable else CheckpointError)
    assert "neither a folder nor complete in the hub client's cache" in line and said in line


ODD_ANSWERS = {  # of a hub that was asked for a repository's files
    "list": b"[]",
    "number": b"3",
    "no name": b'{"sha": "a", "siblings": []}',
    "siblings no list": b'{"id": "org/name", "siblings": 5}',
    "a file without a name": b'{"id": "org/name", "siblings": [{"size": 5}]}',
    "a file of no size": b'{"id": "org/name", "siblings": [{"rfilename": "a", "size": "x"}]}',
    "a file below 0": b'{"id": "org/name", "siblings": [{"rfilename": "a", "size": -5}]}',
    "a number for a name": b'{"id": "org/name", "siblings": [{"rfilename": 5}]}',
    "deep": b"[" * 10**5,
    "not UTF-8": b"\xff\xfe{}",
    "no time": b'{"id": "org/name", "lastModified": "noon"}',
}


@pytest.mark.parametrize("answer", ODD_ANSWERS.values(), ids=ODD_ANSWERS)
def test_an_answer_that_is_no_hubs_is_one_line(hub: Hub, answer: bytes) -> None:
    """The client takes the answer's shape for granted and ended in a TypeError or a KeyError."""
    hub.page = answer
    line = refusal("org/name")
    assert f"cannot be fetched from {hub.endpoint}" in line and "HF_ENDPOINT" in line


ODD_SETTINGS = {  # a variable, its value -> what is said
    "proxy": ("ALL_PROXY", "foo://x", "foo://x"),
    "proxy port": ("ALL_PROXY", "http://x:port", "port"),
    "token": ("HF_TOKEN", "hf_tök", "HF_TOKEN"),
}


@pytest.mark.parametrize(("variable", "value", "said"), ODD_SETTINGS.values(), ids=ODD_SETTINGS)
def test_a_setting_that_the_client_cannot_use_is_one_line(
    hub: Hub, monkeypatch: MonkeyPatch, variable: str, value: str, said: str
) -> None:
    monkeypatch.setenv(variable, value)
    huggingface_hub.close_session()
    assert said in refusal("org/name")


def take_client() -> dict[str, ModuleType]:
    """What is imported of the hub's client, which then is not."""
    taken = {}
    for name in list(sys.modules):
        if name.partition(".")[0] == "huggingface_hub":
            taken[name] = sys.modules.pop(name)
    return taken


@pytest.fixture
def unimported_client() -> Iterator[None]:
    """The hub's client as a new process has it; this one's own comes back."""
    before = take_client()
    yield
    take_client()
    sys.modules.update(before)


@pytest.mark.parametrize("endpoint", ["http://[bad", "http://x:port", "nothing", "ftp://x"])
def test_a_malformed_endpoint_is_one_line(
    endpoint: str,
    unimported_client: None,
    tmp_path: Path,
    monkeypatch: MonkeyPatch,
    capsys: CaptureFixture[str],
) -> None:
    """The client reads it when it is imported."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    assert main(["--prompt", "a", "--target", "org/target", "--draft", "org/draft"]) == 2
    printed = capsys.readouterr()
    line = printed.err.splitlines()[-1]
    assert printed.out == "" and "Traceback" not in printed.err
    assert "HF_ENDPOINT" in line or endpoint in line


def test_a_shard_outside_the_repository_is_not_asked_for(hub: Hub) -> None:
    files = golden(SINGLE, lacking=WEIGHTS)
    files[INDEX] = b'{"weight_map": {"a": "../../x.safetensors"}}'
    hub.add("org/name", files | {"../../x.safetensors": b"x"})
    with pytest.raises(CheckpointError, match="outside its folder"):
        find_checkpoint("org/name", pytest.fail)
    assert hub.fetched() == ["config.json", "tokenizer.json", INDEX]


def test_no_network_offers_the_embedded_pair(
    hub: Hub, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    lose_network(hub, monkeypatch)
    arguments = ["--prompt", "a", "--method", "ar", "--target", "org/name", "--device", "cpu"]
    assert main(arguments) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: 'org/name'") and "--target models/tiny/target" in line


@pytest.mark.parametrize(
    "path", ["./nope", "/nope/x", "~/nope", "conftest.py", "conftest.py/x", "", "/" + "a" * 300]
)
def test_a_path_that_is_no_folder_is_never_a_hub_name(
    hub: Hub, path: str, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    assert "is not a folder" in refusal(path)
    assert hub.asked == []


def test_a_link_that_leads_nowhere_is_never_a_hub_name(
    hub: Hub, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken").symlink_to("nothing")
    Path("circular").symlink_to("circular")
    assert "is a link to nothing, which is not there" in refusal("broken")
    assert "is a link that leads back to itself" in refusal("circular")
    assert hub.asked == []


def test_no_room_is_said_before_the_download(hub: Hub, monkeypatch: MonkeyPatch) -> None:
    hub.add("org/name", golden(SINGLE))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=300_000))
    line = refusal("org/name")
    assert "needs 0.4 MB" in line and "has room for 0.3 MB; set HF_HOME" in line
    assert WEIGHTS not in hub.fetched()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOTDIR])
def test_a_disk_that_fills_up_is_one_line(hub: Hub, monkeypatch: MonkeyPatch, code: int) -> None:
    """As is a cache that can be no folder: it was HF_TOKEN and the proxies that one should check"""

    def write(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    hub.add("org/name", golden(SINGLE))
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.file_download.http_get", write)
        assert f"({os.strerror(code)}); set HF_HOME" in refusal("org/name")
    GPTNeoX.from_pretrained("org/name")


def test_a_client_that_is_not_installed_is_one_line(monkeypatch: MonkeyPatch) -> None:
    for module in ("huggingface_hub", "huggingface_hub.hf_api"):
        monkeypatch.setitem(sys.modules, module, None)
    line = refusal("org/name")
    assert "not installed" in line and line.endswith(": pip install -r requirements.txt")
    with pytest.raises(UsageError, match="not installed.*; use --dataset builtin or --prompts"):
        load_prompts("wikitext2", None)


def archive_of(text: str, **settings: int) -> bytes:
    """WikiText-2's archive with another text in it."""
    archive = BytesIO()
    with zipfile.ZipFile(archive, "w", **settings) as file:
        file.writestr(WIKITEXT_FILE, text)
    return archive.getvalue()


def test_wikitext(hub: Hub, monkeypatch: MonkeyPatch) -> None:
    """The benchmark's dataset is fetched once; every mistake is one line that names the others,
    told at once: the client tries a download for half a minute and prints each time."""
    files = {WIKITEXT_ZIP: archive_of("word " * 50)}
    hub.add(f"datasets/{WIKITEXT_REPOSITORY}", files)
    hub.refusals[WIKITEXT_ZIP] = (503, {})
    with pytest.raises(UsageError, match="^wikitext2 .*503.*--dataset builtin or --prompts FILE"):
        load_prompts("wikitext2", None)
    assert len(hub.asked) == 1
    hub.refusals.clear()
    assert load_prompts("wikitext2", None) == [("word " * 50).strip()]
    go_offline(hub, monkeypatch)
    assert load_prompts("wikitext2", None) == [("word " * 50).strip()]


def with_size(archive: bytes, n: int, told: int) -> bytes:
    """An archive that tells of another size of its text than n."""
    return archive.replace(struct.pack("<L", n), struct.pack("<L", told))


DEFLATED = {"compression": zipfile.ZIP_DEFLATED}
LARGE = archive_of("word " * 2000, **DEFLATED)  # 10,000 bytes, of which 1,000 are allowed
NO_ARCHIVES = {  # of WikiText-2 -> what is said
    "no zip": (b"not a zip", "not a zip"),
    "cut short": (archive_of("word " * 50)[40:], ""),
    "no text": (archive_of("word").replace(b"wiki.test.raw", b"wiki.best.raw"), "no item named"),
    "bomb": (LARGE, "has more than 1,000 bytes"),
    "bomb of zeros": (archive_of("\0" * 10**6, compression=zipfile.ZIP_BZIP2), "not deflated"),
    "bomb that tells of less": (with_size(LARGE, 10_000, 900), "Bad CRC-32"),
    "large": (archive_of("word " * 500), "too large for what it is"),
}


@pytest.mark.parametrize(("archive", "said"), NO_ARCHIVES.values(), ids=NO_ARCHIVES)
def test_an_archive_that_is_not_wikitexts(
    archive: bytes, said: str, hub: Hub, monkeypatch: MonkeyPatch
) -> None:
    """It was unpacked whatever its size, and a part of an archive ended in a ValueError."""
    sizes = []
    read = zipfile.ZipExtFile.read

    def count(member: zipfile.ZipExtFile, n: int = -1) -> bytes:
        sizes.append(n)
        return read(member, n)

    monkeypatch.setattr(prompts, "WIKITEXT_BYTES", 1000)
    monkeypatch.setattr(zipfile.ZipExtFile, "read", count)
    hub.add(f"datasets/{WIKITEXT_REPOSITORY}", {WIKITEXT_ZIP: archive})
    with pytest.raises(UsageError, match=f"not the WikiText-2 archive.*{said}.*--prompts FILE"):
        load_prompts("wikitext2", None)
    assert set(sizes) <= {1001}, "no more than tells that it is too much"


def test_a_misspelt_draft_is_told_before_the_target_is_fetched(hub: Hub) -> None:
    """A target may be gigabytes."""
    hub.add("org/target", golden(SINGLE))
    with pytest.raises(CheckpointError, match="'org/drat'.*check the name"):
        load_pair("org/target", "org/drat", torch.device("cpu"), torch.float32)
    assert hub.fetched() == []


RUN = ["--prompt", "The ship", "--max-new-tokens", "4", "--device", "cpu", "--threads", "1"]
RUN += ["--target", "org/target", "--draft", "org/draft@step1"]


def start(hub: Hub, home: Path, **changes: str) -> subprocess.Popen[str]:
    """The program, as a user starts it."""
    environment = {name: value for name, value in os.environ.items() if name[:3] != "HF_"}
    environment |= {"HF_HOME": str(home), "HF_ENDPOINT": hub.endpoint, "NO_PROXY": "127.0.0.1"}
    return subprocess.Popen(
        [sys.executable, "dynatree.py", *RUN],
        cwd=ROOT,
        env=environment | changes,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def add_tiny_pair(hub: Hub) -> None:
    for name, revision in {"target": "main", "draft": "step1"}.items():
        files = {file.name: file.read_bytes() for file in (TINY / name).iterdir()}
        hub.add(f"org/{name}", files, revision)


def test_a_first_run_and_one_without_a_network(
    unimported_client: None, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    """The environment is all that is set; where stderr is no terminal, lines and no bars."""
    with Hub() as hub:
        add_tiny_pair(hub)
        hub.token = "hf_secret"
        first = start(hub, tmp_path, HF_TOKEN="hf_secret")
        text, lines = first.communicate(timeout=60)
        assert first.returncode == 0, lines
        assert f"fetching org/target: 20.0 MB into {tmp_path / 'hub'}\n" in lines
        assert f"fetching org/draft@step1: 2.9 MB into {tmp_path / 'hub'}\n" in lines
        assert "%|" not in lines and len(lines.splitlines()) == 4
        hub.asked.clear()
        offline = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "1"}
        for variable, value in offline.items():
            monkeypatch.setenv(variable, value)
        assert main(RUN) == 0
        printed = capsys.readouterr()
        assert printed.out == text and "fetching" not in printed.err
        assert hub.asked == []


def test_an_interrupted_download_is_one_line(tmp_path: Path) -> None:
    with Hub() as hub:
        add_tiny_pair(hub)
        hub.is_stalling = True
        hub.cuts = [1_000_000]
        run = start(hub, tmp_path)
        assert hub.has_stalled.wait(60)
        run.send_signal(signal.SIGINT)
        text, lines = run.communicate(timeout=60)
        assert run.returncode == 130 and text == ""
        assert lines.splitlines()[-1].startswith(
            "interrupted: the cache keeps what is complete of org/draft"
        )
        assert "Traceback" not in lines

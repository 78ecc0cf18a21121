"""A checkpoint's folder: a local one, or a hub repository's in the hub client's own cache.

How a file is fetched, resumed, shown and found without a network is the client's: HF_HOME,
HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE mean what they mean everywhere. Only safetensors and json
are asked for, one file after the other: then Ctrl-C ends a download at once, which the threads of
the client's snapshot_download finish first.

    folder = find_checkpoint("EleutherAI/pythia-70m@step3000", print)
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from engine.checkpoint import (
    GENERATION,
    INDEX,
    SINGLE,
    CheckpointError,
    describe_weights,
    read_config,
    shard_names,
    weight_files,
)

NO_ANSWER = (TypeError, LookupError, AttributeError, ImportError)


class HubUnreachable(CheckpointError):
    """A hub name, but no network, and not all of it in the hub client's cache."""


def find_checkpoint(
    name_or_path: str | Path, announce: Callable[[str], None] = lambda line: None
) -> Path:
    """The folder of a checkpoint: itself, or a download of hub repository NAME or NAME@REVISION.

    `announce` is told what will be fetched before it is. Raises CheckpointError, HubUnreachable
    among them.
    """
    text = str(name_or_path)
    if text and os.path.isdir(text):
        require_weights(Path(text))
        return Path(text)
    if os.path.isfile(text):
        raise CheckpointError(f"{text!r} is a file, not a folder{describe_weights([text])}")
    name, _, revision = text.partition("@")
    is_path = not name or name.startswith((".", "/", "~")) or os.path.lexists(text)
    if is_path:
        raise CheckpointError(f"{text!r} is not a folder, and no hub name")
    with hub_client(f"{text!r} is not a folder, and"):
        return fetch(name, revision or None, announce)


def require_weights(folder: Path) -> None:
    """Raise CheckpointError for a folder that holds no safetensors, naming what it is."""
    if (folder / "snapshots").is_dir():  # models--ORG--NAME
        name = folder.resolve().name.removeprefix("models--").replace("--", "/")
        raise CheckpointError(f"{folder} is where the hub's client keeps {name}; name {name}")
    weight_files(folder)


def fetch(name: str, revision: str | None, announce: Callable[[str], None]) -> Path:
    """The cache's folder of a repository at a revision, once all that a run reads is in it."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    commit = HfApi().resolve_revision(name, revision=revision)
    folder = Path(hf_hub_download(name, "config.json", revision=commit)).parent
    with suppress(EntryNotFoundError):  # most repositories have none
        hf_hub_download(name, GENERATION, revision=commit)
    read_config(folder)  # refuses a foreign model before its weights are fetched
    hf_hub_download(name, "tokenizer.json", revision=commit)
    weights = []
    for file in weight_names(name, commit, folder):
        weights.append(hf_hub_download(name, file, revision=commit, dry_run=True))
    n_bytes = sum(file.file_size for file in weights if file.will_download)
    if n_bytes:
        announce(f"fetching {name}: {n_bytes / 1e6:,.1f} MB into {folder.parents[2]}")
    for file in weights:
        hf_hub_download(name, file.filename, revision=commit)
    return folder


def weight_names(name: str, commit: str, folder: Path) -> list[str]:
    """A repository's model.safetensors, or the shards of its index, which is fetched to its folder.

    Raises CheckpointError if it has neither.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    if not (folder / INDEX).exists():
        try:
            hf_hub_download(name, SINGLE, revision=commit, dry_run=True)
            return [SINGLE]
        except RemoteEntryNotFoundError:
            pass
        try:
            hf_hub_download(name, INDEX, revision=commit)
        except RemoteEntryNotFoundError as error:
            raise CheckpointError(f"{name} holds neither {SINGLE} nor {INDEX}") from error
    return shard_names(folder / INDEX)


@contextmanager
def hub_client(what: str) -> Iterator[None]:
    """Raise CheckpointError, one line in the client's words, if it cannot fetch `what`.

    Only hub names need the client: its import takes half a second.
    """
    try:
        from httpx2 import HTTPError, InvalidURL
        from huggingface_hub.errors import LocalEntryNotFoundError, RevisionResolutionError
    except ImportError as error:
        line = f"{what} cannot be fetched: {error}; pip install -r requirements.txt"
        raise CheckpointError(line) from error
    unreachable = (LocalEntryNotFoundError, RevisionResolutionError)
    try:
        import huggingface_hub.hf_api  # noqa: F401  # by its full name: else a failure is printed

        yield
    except CheckpointError:
        raise
    # A variable that it reads, a kind of proxy, an answer of no hub, of whatever type
    except (*unreachable, HTTPError, InvalidURL, OSError, ValueError, *NO_ANSWER) as error:
        said = re.sub(r"//[^/@\s]*@", "//", " ".join(str(error).split()))  # no proxy's password
        kind = HubUnreachable if isinstance(error, unreachable) else CheckpointError
        raise kind(f"{what} cannot be fetched: {said or type(error).__name__}") from error

"""A checkpoint's folder: a local one, or a hub repository's in the hub client's own cache.

Only safetensors and json are asked for, one file after the other: each shows the client's progress
bar on a terminal, and Ctrl-C ends it at once. A download that breaks off is resumed as long as this
run lasts; the next run fetches only the files that are not complete. HF_HOME, HF_TOKEN,
HF_ENDPOINT and HF_HUB_OFFLINE are the client's and mean what they mean everywhere.

    folder = find_checkpoint("EleutherAI/pythia-70m@step3000", print)
"""

import errno
import importlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from engine.checkpoint import (
    INDEX,
    SINGLE,
    CheckpointError,
    first_line,
    read_config,
    require_safetensors,
    shard_names,
    weight_files,
)
from engine.foreign import ForeignFile, Number, Optional, Word, checked, unreadable

SMALL_FILES = ("config.json", "tokenizer.json", INDEX)
CHECK_ACCESS = "check the name; what is private or gated needs an HF_TOKEN that may read it"
CHECK_SETTINGS = "check HF_TOKEN, HF_ENDPOINT and the proxies that are set"
LATER = "try again later"
WHAT_TO_DO = {401: CHECK_ACCESS, 403: CHECK_ACCESS, 404: CHECK_ACCESS}  # by HTTP status
WHAT_TO_DO |= {429: "wait some minutes, or set HF_TOKEN, with which the hub allows more"}
LISTED = {"rfilename": Word(), "size": Optional(Number(int, 0, 2**63), 0)}  # of each file
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
DISK_ERRORS += (errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG)  # what is set is no folder


class HubUnreachable(CheckpointError):
    """A hub name, but no network, and not all of it in the hub client's cache."""


def find_checkpoint(
    name_or_path: str | Path, announce: Callable[[str], None] = lambda line: None
) -> Path:
    """The folder of a checkpoint: itself, or a download of hub repository NAME or NAME@REVISION.

    `announce` is told what will be fetched before it is. Where the hub does not answer or refuses,
    a complete copy in the cache serves. Raises CheckpointError, HubUnreachable among them.
    """
    path, text = Path(name_or_path), str(name_or_path)
    if text and os.path.isdir(path):
        return path
    line = f"{text[:500]!r} is not a folder"
    try:
        os.stat(path)
    except (OSError, ValueError) as error:
        is_absent = isinstance(error, FileNotFoundError) and not path.is_symlink()
        if is_absent and not text.startswith((".", "/", "~")):
            return _find_repository(text, announce)
        line += f": {unreadable(path, error)}"
    raise CheckpointError(line)


def _find_repository(text: str, announce: Callable[[str], None]) -> Path:
    require_client(f"{text!r}, which is not a folder,")
    from huggingface_hub import errors

    name, revision = _split(text)
    try:
        return _fetch(text, announce)
    except errors.HFValidationError as error:
        raise CheckpointError(f"{text!r} is neither a folder nor a hub name") from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"hub repository {name!r} has no revision {revision!r}") from error
    except client_errors() as error:
        folder = _find_cached(text)
        if folder is None:
            where = f"{text!r} is neither a folder nor complete in the hub client's cache, and"
            raise hub_error(where, error) from error
        if not isinstance(error, errors.OfflineModeIsEnabled):
            announce(f"note: using the cached {text}: {hub_error('it', error)}")
        return folder
    except KeyboardInterrupt:
        kept = f"the cache keeps what is complete of {text}"
        announce(f"interrupted: {kept}, and the next run fetches the rest")
        raise


def require_client(what: str) -> None:
    """Import the hub's client, which only hub names need: it takes half a second.

    Raises CheckpointError, naming what it is for, if it is not there or a variable that it reads
    has a value that it cannot use.
    """
    try:
        importlib.import_module("huggingface_hub.hf_api")  # and all that it needs
    except ImportError as error:
        why = f"{what} is fetched by the hub's client, which is not installed ({first_line(error)})"
        raise CheckpointError(f"{why}: pip install -r requirements.txt") from error
    except ValueError as error:
        why = f"{what} is fetched by the hub's client, which does not start ({first_line(error)})"
        raise CheckpointError(f"{why}; check HF_ENDPOINT and all HF_ variables") from error


def _split(text: str) -> tuple[str, str | None]:
    """NAME@REVISION, or NAME alone and None."""
    name, _, revision = text.partition("@")
    return name, revision or None


def _fetch(text: str, announce: Callable[[str], None]) -> Path:
    """The cache's folder of a repository at a revision, once all that a run reads is in it."""
    from huggingface_hub import hf_hub_download

    name, revision = _split(text)
    sizes = _list_files(name, revision)
    require_safetensors(sizes, text)
    if "config.json" not in sizes:
        raise CheckpointError(f"{text} holds no config.json")
    # By its revision's name, so that the cache knows the name offline; the rest by the commit
    folder = Path(hf_hub_download(name, "config.json", revision=revision)).parent
    read_config(folder)  # refuses a foreign model before its weights are fetched
    for file in SMALL_FILES:
        if file in sizes:
            hf_hub_download(name, file, revision=folder.name)
    weights = [SINGLE] if SINGLE in sizes else shard_names(folder)
    missing = [file for file in weights if not (folder / file).exists()]
    for file in missing:
        if file not in sizes:
            raise CheckpointError(f"{text}: {INDEX} lists {file}, which is not there")
    if missing:
        _announce_size(text, sum(sizes[file] for file in missing), announce)
    for file in missing:
        hf_hub_download(name, file, revision=folder.name)
    return folder


def _list_files(name: str, revision: str | None) -> dict[str, int]:
    """The sizes of a repository's files. Raises what the client does, ValueError among it."""
    from huggingface_hub import HfApi, constants

    timeout = constants.HF_HUB_ETAG_TIMEOUT  # seconds; without one a dead network takes minutes
    sizes = {}
    try:
        info = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=timeout)
        for file in info.siblings or []:
            listed = checked(vars(file), LISTED, "a file in the answer")
            sizes[listed["rfilename"]] = listed["size"]
    except (AttributeError, LookupError, RecursionError, TypeError, ForeignFile) as error:
        # The client takes for granted that a hub has answered
        raise ValueError(f"no answer of a hub: {first_line(error)}") from error
    return sizes


def _announce_size(text: str, n_bytes: int, announce: Callable[[str], None]) -> None:
    """Say how much will be fetched. Raises CheckpointError if there is no room for it."""
    from huggingface_hub import constants

    cache = constants.HF_HUB_CACHE
    size = f"{n_bytes / 1e6:,.1f} MB"
    free = shutil.disk_usage(cache).free
    if n_bytes > free:
        room = f"{cache} has room for {free / 1e6:,.1f} MB"
        raise CheckpointError(f"{text} needs {size}, but {room}; set HF_HOME to another folder")
    announce(f"fetching {text}: {size} into {cache}")


def _find_cached(text: str) -> Path | None:
    """The cache's folder of a repository, without a network; None unless it has all weights."""
    from huggingface_hub import try_to_load_from_cache

    name, revision = _split(text)
    config = try_to_load_from_cache(name, "config.json", revision=revision)
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    try:
        weight_files(folder)
    except CheckpointError:  # an earlier download was interrupted
        return None
    return folder


def client_errors() -> tuple[type[Exception], ...]:
    """What the hub client raises if it cannot fetch: a refusal, no network, no room, and more."""
    from huggingface_hub import errors

    http = importlib.import_module(errors.HTTPError.__module__)  # by its version one or another
    # A ValueError: the answer is no hub's. An ImportError: a kind of proxy that needs a package
    return (errors.HTTPError, http.InvalidURL, OSError, ValueError, ImportError)


def hub_error(what: str, error: Exception) -> CheckpointError:
    """One line for what the hub client raised: what failed, what was said, what to do."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__:
        error = error.__cause__  # which the client hides behind advice
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        stored = f"{what} cannot be stored in {constants.HF_HUB_CACHE}"
        return CheckpointError(f"{stored} ({error.strerror}); set HF_HOME to another folder")
    fetched = f"{what} cannot be fetched from {constants.ENDPOINT}"
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        said = " ".join((error.server_message or first_line(error)).split())
        to_do = WHAT_TO_DO.get(status, LATER)
        return CheckpointError(f"{fetched} ({status}: {said}); {to_do}")
    if isinstance(error, (errors.HTTPError, errors.OfflineModeIsEnabled)):
        return HubUnreachable(f"{fetched} ({first_line(error)})")
    return CheckpointError(f"{fetched} ({first_line(error)}); {CHECK_SETTINGS}, or {LATER}")

"""A hub on the loopback: as much of the protocol as huggingface_hub asks for, and its failures.

with Hub() as hub:
    hub.add("org/name", {"config.json": b"{}"})
    ...  # with HF_ENDPOINT=hub.endpoint
"""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]
SILENCE = 2.0  # seconds, more than any test lets the client wait


class Hub:
    """Repositories, and what is to go wrong with them; every request is written down."""

    def __init__(self) -> None:
        self.commits: dict[tuple[str, str], str] = {}  # repository and revision -> commit
        self.files: dict[str, Files] = {}  # of each commit
        self.token = ""  # if there is one, nothing is told without it
        self.refusals: dict[str, tuple[int, dict[str, str]]] = {}  # a path's end -> status, headers
        self.is_silent = False  # nothing is answered, and the connection ends after SILENCE
        self.page = b""  # if there is one, the answer to everything, as a hotel's network has it
        self.cuts: list[int] = []  # the next safetensors break off after so many bytes
        self.is_stalling = False  # and then the connection stays open, and silent
        self.has_stalled = threading.Event()
        self.surplus = 0  # bytes by which headers make safetensors longer than they are
        self.asked: list[str] = []  # as "GET /api/models/org/name"
        self.ranges: list[str] = []  # of requests for a part of a file
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.hub = self
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> "Hub":
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def add(self, name: str, files: Files, *revisions: str) -> str:
        """Serve these files under the revisions, main if none is named. Returns the commit."""
        commit = hashlib.sha1(repr((name, files)).encode()).hexdigest()
        self.files[commit] = files
        for revision in (commit, *(revisions or ("main",))):
            self.commits[name, revision] = commit
        return commit

    def fetched(self) -> list[str]:
        """The names of the files whose content was asked for since the last call, in order."""
        gets = [line for line in self.asked if line.startswith("GET") and "/resolve/" in line]
        self.asked.clear()
        return [line.rpartition("/")[2] for line in gets]


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Nothing on stderr: there the tests read what a user would."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub: Hub = self.server.hub
        path = urlsplit(self.path).path
        if not (path.startswith("/api/models/") or "/resolve/" in path):
            return self.answer(404, {})  # the client's own affairs
        hub.asked.append(f"{self.command} {path}")
        if hub.is_silent:
            threading.Event().wait(SILENCE)
            self.close_connection = True
            return
        for end, (status, headers) in hub.refusals.items():
            if path.endswith(end):
                return self.answer(status, headers)
        if hub.token and self.headers["Authorization"] != f"Bearer {hub.token}":
            return self.answer(401, {"X-Error-Message": "Invalid username or password."})
        if hub.page:
            return self.answer(200, {"Content-Type": "text/html"}, hub.page)
        if path.startswith("/api/models/"):
            name, _, revision = path.removeprefix("/api/models/").partition("/revision/")
            self.list_files(hub, name, unquote(revision) or "main")
        else:
            name, _, rest = path.removeprefix("/").partition("/resolve/")
            revision, _, file = rest.partition("/")
            self.send_file(hub, name, unquote(revision), unquote(file))

    def list_files(self, hub: Hub, name: str, revision: str) -> None:
        if not self.is_known(hub, name, revision):
            return
        commit = hub.commits[name, revision]
        siblings = [{"rfilename": f, "size": len(body)} for f, body in hub.files[commit].items()]
        body = json.dumps({"id": name, "sha": commit, "siblings": siblings}).encode()
        self.answer(200, {"Content-Type": "application/json"}, body)

    def send_file(self, hub: Hub, name: str, revision: str, file: str) -> None:
        """A file, or the part of it that is asked for."""
        if not self.is_known(hub, name, revision):
            return
        commit = hub.commits[name, revision]
        headers = {"X-Repo-Commit": commit}
        if file not in hub.files[commit]:
            return self.answer(404, headers | {"X-Error-Code": "EntryNotFound"})
        body = hub.files[commit][file]
        headers["ETag"] = f'"{hashlib.sha256(body).hexdigest()}"'
        is_weights = file.endswith(".safetensors")
        headers["X-Linked-Size"] = str(len(body) + hub.surplus * is_weights)
        status, start = 200, 0
        if wanted := self.headers["Range"]:
            hub.ranges.append(wanted)
            status, start = 206, int(wanted.removeprefix("bytes=").removesuffix("-"))
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        n_sent = len(body) - start
        if self.command == "GET" and is_weights and hub.cuts:
            n_sent = hub.cuts.pop(0)
        self.answer(status, headers, body[start:], n_sent)
        if hub.is_stalling and n_sent < len(body) - start:
            hub.has_stalled.set()
            threading.Event().wait()

    def is_known(self, hub: Hub, name: str, revision: str) -> bool:
        """False, having said which of the two is unknown, unless both are known."""
        if (name, revision) in hub.commits:
            return True
        codes = {known: "RevisionNotFound" for known, _ in hub.commits}
        self.answer(404, {"X-Error-Code": codes.get(name, "RepoNotFound")})
        return False

    def answer(
        self, status: int, headers: dict[str, str], body: bytes = b"", n_sent: int | None = None
    ) -> None:
        """Send the body, or its first n_sent bytes and then the end of the connection."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:n_sent])
            if n_sent is not None and n_sent < len(body):
                self.close_connection = True

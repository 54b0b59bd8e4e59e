"""A model hub on 127.0.0.1 for `huggingface_hub`, with repositories in memory, and with faults."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

_API = re.compile(r"/api/models/(?P<name>[^/]+/[^/]+)(?:/(?P<what>revision|tree)/(?P<revision>[^/]+))?")
_FILE = re.compile(r"/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


@dataclass(slots=True)
class Repository:
    """The files of a repository at one commit, and its faults."""

    files: Mapping[str, bytes]
    revisions: tuple[str, ...] = ("main",)
    gated: bool = False
    token: str | None = None
    """The token that reads a private or gated repository."""
    claimed_sizes: Mapping[str, int] = field(default_factory=dict)
    """File -> wrong size in bytes that the hub reports."""
    cuts: dict[str, list[int]] = field(default_factory=dict)
    """File -> for each connection in order, the number of bytes after which the connection breaks."""
    stalled: str | None = None
    """Name of a file of which the hub sends only the first half; the connection then stays open until the hub stops."""

    @property
    def commit(self) -> str:
        """The commit: a hash of the contents of the repository's files."""
        text = json.dumps({name: hashlib.sha1(content).hexdigest() for name, content in self.files.items()})
        return hashlib.sha1(text.encode()).hexdigest()

    def size(self, file: str) -> int:
        return self.claimed_sizes.get(file, len(self.files[file]))


@dataclass(slots=True)
class Hub:
    """Repositories by OWNER/NAME, and the HTTP requests so far as (method, path, range)."""

    url: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    failure: int | None = None
    """The status of every response; None: the hub works."""
    ended: Event = field(default_factory=Event)

    def downloads(self) -> list[str]:
        """The names of the requested files, in order."""
        found = (_FILE.fullmatch(unquote(path)) for method, path, _ in self.requests if method == "GET")
        return [one["file"] for one in found if one is not None]

    def ranges(self) -> list[str]:
        """The requested ranges."""
        return [value for _, _, value in self.requests if value is not None]


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub that listens until the context ends."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # a client that has left

    with Server(("127.0.0.1", 0), _Handler) as server:
        hub = server.hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")  # type: ignore[attr-defined]
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield hub
        hub.ended.set()
        server.shutdown()
        thread.join()


@contextmanager
def only_hub(monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[Hub]:
    """A hub that huggingface_hub uses in this process and in its children, with an empty cache in `home`."""
    constants = pytest.importorskip("huggingface_hub.constants")
    with serving() as hub:
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in (("ENDPOINT", hub.url), ("HUGGINGFACE_CO_URL_TEMPLATE", template)):
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(home))
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        yield hub


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        path = urlsplit(self.path).path
        hub.requests.append((self.command, path, self.headers.get("Range")))
        found = _API.fullmatch(path) or _FILE.fullmatch(path)
        if hub.failure is not None:
            self._refuse(hub.failure, None)
        elif found is None:
            self._refuse(404, None)
        else:
            self._answer(found, hub.repositories.get(found["name"]))

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, found: re.Match[str], repository: Repository | None) -> None:
        is_file = "file" in found.groupdict()
        token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        if repository is None:
            return self._refuse(401 if token is None else 404, "RepoNotFound")
        if repository.token not in (None, token):
            if not repository.gated:
                return self._refuse(404, "RepoNotFound")
            if is_file:  # the list of files is public
                return self._refuse(401 if token is None else 403, "GatedRepo")
        revision = unquote(found["revision"] or "main")
        if revision not in (*repository.revisions, repository.commit):
            return self._refuse(404, "RevisionNotFound")
        if is_file:
            return self._send_file(repository, unquote(found["file"]))
        if found["what"] == "tree":
            listing: Any = [
                {"type": "file", "path": name, "size": repository.size(name), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in repository.files.items()
            ]
        else:
            siblings = [{"rfilename": name, "size": repository.size(name)} for name in repository.files]
            listing = {"id": found["name"], "sha": repository.commit, "siblings": siblings}
        self._send(200, json.dumps(listing).encode(), {"Content-Type": "application/json"})

    def _send_file(self, repository: Repository, file: str) -> None:
        if file not in repository.files:
            return self._refuse(404, "EntryNotFound")
        content, size = repository.files[file], repository.size(file)
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": repository.commit,
            "X-Linked-Size": str(size),
        }
        start, status = 0, 200
        if (asked := self.headers.get("Range")) is not None:
            start, status = int(asked.removeprefix("bytes=").partition("-")[0]), 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        body = content[start:]
        cuts = repository.cuts.get(file)
        if self.command == "GET" and cuts:
            self._send_head(status, len(body), headers)
            self.wfile.write(body[: cuts.pop(0)])
            self.close_connection = True
        elif self.command == "GET" and file == repository.stalled:
            self._send_head(status, len(body), headers)
            self.wfile.write(body[: len(body) // 2])
            self.server.hub.ended.wait()  # type: ignore[attr-defined]
            self.close_connection = True
        else:
            self._send(status, body, headers)

    def _refuse(self, status: int, code: str | None) -> None:
        self._send(status, b"{}", {} if code is None else {"X-Error-Code": code})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self._send_head(status, len(body), headers)
        if self.command == "GET":
            self.wfile.write(body)

    def _send_head(self, status: int, length: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()

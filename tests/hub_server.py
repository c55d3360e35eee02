"""A small local server that speaks the part of the hub's API that downloading a model uses.

    HEAD and GET /{owner}/{name}/resolve/{revision}/{file}   ETag, X-Repo-Commit; ranges; X-Error-Code on errors
    GET /cdn/{sha256}                                        where large files are redirected to, as on the hub

Every request is logged, and downloads can be cut short on purpose.
"""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

RESOLVE = re.compile(r"/([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repository:
    """Files of each commit. `status` 401 or 403 closes it: private (or absent) and gated look like that on the hub."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    status: int = 200


@dataclass
class Hub:
    repositories: dict[str, Repository] = field(default_factory=dict)
    log: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, Range
    tokens: list[str] = field(default_factory=list)
    cut_after: dict[str, list[int]] = field(default_factory=dict)  # file -> bytes at which its next answers end
    push_after: dict[str, tuple[Repository, str]] = field(
        default_factory=dict
    )  # file -> main moves there once it is sent
    broken: bool = False  # every answer is HTTP 503
    url: str = ""
    cdn: str = ""  # the same server under another name: the library treats it as another host

    def paths(self, method: str = "GET") -> list[str]:
        return [path for m, path, _ in self.log if (m == method and "/resolve/" in path) or path.startswith("/cdn/")]


@contextmanager
def serve() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def log_message(self, *args: object) -> None:
            pass

        def answer(self) -> None:
            hub.log.append((self.command, self.path, self.headers.get("Range")))
            if "Authorization" in self.headers:
                hub.tokens.append(self.headers["Authorization"])
            if hub.broken:
                return self.send(503, {}, b"")
            if self.path.startswith("/cdn/"):
                return self.send_large(self.path.removeprefix("/cdn/"))
            found = RESOLVE.fullmatch(self.path)
            if found is None:
                return self.send(404, {}, b"")
            name, revision, file = found.groups()
            repository = hub.repositories.get(name)
            if repository is None:  # the hub does not tell an absent repository from a private one
                return self.send(401, {"X-Error-Code": "RepoNotFound"}, b"")
            if repository.status != 200:
                code = {401: "RepoNotFound", 403: "GatedRepo"}[repository.status]
                return self.send(repository.status, {"X-Error-Code": code}, b"")
            commit = repository.refs.get(revision, revision)
            if commit not in repository.commits:
                return self.send(404, {"X-Error-Code": "RevisionNotFound"}, b"")
            content = repository.commits[commit].get(file)
            if content is None:
                return self.send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b"")
            digest = hashlib.sha256(content).hexdigest()
            if not file.endswith(".safetensors"):
                return self.send(200, {"ETag": f'"{digest}"', "X-Repo-Commit": commit}, content, file)
            headers = {"Location": f"{hub.cdn}/cdn/{digest}", "X-Repo-Commit": commit}
            headers |= {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(content))}
            self.send(302, headers, b"")

        def send_large(self, digest: str) -> None:
            for repository in hub.repositories.values():
                for files in repository.commits.values():
                    for file, content in files.items():
                        if hashlib.sha256(content).hexdigest() == digest:
                            return self.send(200, {"ETag": f'"{digest}"'}, content, file)
            self.send(404, {}, b"")

        def send(self, status: int, headers: dict[str, str], content: bytes, file: str = "") -> None:
            asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
            if status == 200 and asked:
                start = int(asked[1])
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
                status, content = 206, content[start:]
            self.send_response(status)
            for name, value in ({"Accept-Ranges": "bytes", "Content-Length": str(len(content))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                cuts = hub.cut_after.get(file)
                end = cuts.pop(0) if cuts else len(content)
                self.wfile.write(content[:end])
                if file in hub.push_after:
                    repository, commit = hub.push_after.pop(file)
                    repository.refs["main"] = commit
                if end < len(content):
                    self.wfile.flush()
                    self.connection.close()
                    self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *args: None  # type: ignore[method-assign]  # a closed connection is on purpose here
    hub.url = f"http://127.0.0.1:{server.server_port}"
    hub.cdn = f"http://localhost:{server.server_port}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

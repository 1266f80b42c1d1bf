"""A server that speaks the Hub's protocol, as huggingface_hub calls it: real HTTP, files and revisions, and faults.

Repositories are files below a directory: a commit is a JSON file that names its parent and its tree, a branch is a file
with a commit's id, and content lies by its SHA-256. Uploads are those of LFS: it has no Xet.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_test"
_LFS = re.compile(r".*\.(safetensors|arrow|bin)")  # As in the .gitattributes of a new repository.
_PAGE = 7  # Entries of a listing; the Hub has 1,000.
# Takes "METHOD /path"; returns "500", "cut", "lost" (done, and not answered) or None.
Fault = Callable[[str], "str | None"]
Tree = dict[str, dict[str, Any]]


class Hub:
    """The repositories of one server; `fault` is asked before each request, `requests` has all of them."""

    def __init__(self, root: Path):
        self.root = root
        self.url = ""
        self.requests: list[str] = []
        self.sent_bytes = 0  # In bodies of uploads.
        self.fault: Fault = lambda request: None
        self.lock = threading.Lock()
        (root / "content").mkdir(parents=True)

    def environment(self, home: Path) -> dict[str, str]:
        """Return the variables of a client of this server."""
        mine = {"HF_ENDPOINT": self.url, "HF_TOKEN": TOKEN, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
        return {**os.environ, **mine, "HF_HUB_DISABLE_TELEMETRY": "1"}

    def commits(self, repo: str, branch: str = "main") -> list[str]:
        """Return the ids of a branch's commits, newest first; [] if there is no repository."""
        found, at = [], self.head(repo, branch)
        while at:
            found.append(at)
            at = self._commit(repo, at)["parent"]
        return found

    def tree(self, repo: str, revision: str = "main") -> Tree:
        """Return the files of a revision: size, oid, and whether they are LFS's; {} if there is no repository."""
        at = self.head(repo, revision) or revision
        return dict(self._commit(repo, at)["tree"]) if (self.root / repo / at).is_file() else {}

    def read(self, repo: str, name: str, revision: str = "main") -> bytes:
        sha256: str = self.tree(repo, revision)[name]["sha256"]
        return (self.root / "content" / sha256).read_bytes()

    def head(self, repo: str, branch: str) -> str | None:
        place = self.root / repo / "refs" / branch
        return place.read_text() if place.is_file() else None

    def add(self, repo: str, parent: str | None, tree: Tree, branch: str = "main") -> str:
        """Write a commit and move its branch to it."""
        text = json.dumps({"parent": parent, "tree": tree}, sort_keys=True)
        oid = hashlib.sha1(text.encode()).hexdigest()
        (self.root / repo / "refs").mkdir(parents=True, exist_ok=True)
        (self.root / repo / oid).write_text(text)
        (self.root / repo / "refs" / branch).write_text(oid)
        return oid

    def write(self, repo: str, name: str, data: bytes, branch: str = "main") -> None:
        """Commit one file, as a user does on the site."""
        self.add(repo, self.head(repo, branch), {**self.tree(repo, branch), name: self.keep(data, lfs=False)}, branch)

    def keep(self, data: bytes, *, lfs: bool) -> dict[str, Any]:
        sha256 = hashlib.sha256(data).hexdigest()
        (self.root / "content" / sha256).write_bytes(data)
        oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        return {"size": len(data), "sha256": sha256, "oid": oid, "lfs": lfs}

    def _commit(self, repo: str, oid: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.root / repo / oid).read_text())
        return found


class RefusedError(Exception):
    """An answer that is an error: status and the Hub's code."""


class _Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: ClassVar[Hub]

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the base class names it)
        pass

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = f"{self.command} {unquote(urlsplit(self.path).path)}"
        self.hub.requests.append(request)
        fault = self.hub.fault(request)
        if fault == "500":
            return self._answer({"error": "a fault"}, status=500)
        if fault != "cut":
            try:
                with self.hub.lock:
                    answer = self._done(request, body)
            except RefusedError as error:
                answer = ({"error": str(error)}, {"X-Error-Code": error.args[1]}, error.args[0])
            if fault != "lost":
                return self._answer(*answer)
        self.close_connection = True
        self.connection.close()
        return None

    do_GET = do_POST = do_PUT = do_HEAD = _serve  # noqa: N815 (the names that the base class calls)

    def _answer(self, body: Any, headers: dict[str, str] | None = None, status: int = 200) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _done(self, request: str, body: bytes) -> tuple[Any, dict[str, str], int]:
        """Do what a request asks; return the answer's body, headers and status."""
        writes = self.command in ("POST", "PUT") and "/content/" not in request
        if writes and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise RefusedError(401, "Unauthorized")
        for pattern, answer in _ROUTES:
            if match := re.fullmatch(pattern, request):
                done = answer(self, body, *match.groups())
                return done if isinstance(done, tuple) else (done, {}, 200)
        raise RefusedError(404, "NoRoute")

    def _tree(self, repo: str, revision: str = "main") -> tuple[str, Tree]:
        if self.hub.head(repo, "main") is None:
            raise RefusedError(404, "RepoNotFound")
        at = self.hub.head(repo, revision) or revision
        if not (self.hub.root / repo / at).is_file():
            raise RefusedError(404, "RevisionNotFound")
        return at, self.hub.tree(repo, at)

    def create(self, body: bytes) -> Any:
        asked = json.loads(body)
        repo = f"{asked['organization']}/{asked['name']}"
        url = {"url": f"{self.hub.url}/{repo}"}
        if self.hub.head(repo, "main"):
            return {**url, "error": "exists"}, {}, 409
        attributes = b"*.safetensors filter=lfs\n*.arrow filter=lfs\n*.bin filter=lfs\n"
        self.hub.add(repo, None, {".gitattributes": self.hub.keep(attributes, lfs=False)})
        (self.hub.root / repo / "visibility").write_text(str(asked.get("visibility")))
        return url

    def branch(self, body: bytes, repo: str, branch: str) -> Any:
        at, tree = self._tree(repo)
        if self.hub.head(repo, branch):
            return {"error": "exists"}, {}, 409
        return {"oid": self.hub.add(repo, at, tree, branch)}

    def validate(self, body: bytes) -> Any:
        good = json.loads(body)["content"].startswith("---\n")
        return {"errors": [] if good else [{"message": "no metadata"}], "warnings": []}, {}, 200 if good else 400

    def info(self, body: bytes, repo: str, revision: str | None = None) -> Any:
        at, tree = self._tree(repo, revision or "main")
        return {"id": repo, "sha": at, "siblings": [{"rfilename": name} for name in tree]}

    def listing(self, body: bytes, repo: str, revision: str) -> Any:
        _, tree = self._tree(repo, revision)
        begin = int(parse_qs(urlsplit(self.path).query).get("cursor", ["0"])[0])
        page = []
        for name, file in [*tree.items()][begin : begin + _PAGE]:
            lfs = {"lfs": {"oid": file["sha256"], "size": file["size"], "pointerSize": 130}} if file["lfs"] else {}
            page.append({"type": "file", "path": name, "size": file["size"], "oid": file["oid"], **lfs})
        more = begin + _PAGE
        next_page = f'<{self.hub.url}{urlsplit(self.path).path}?recursive=true&cursor={more}>; rel="next"'
        return page, {"Link": next_page} if more < len(tree) else {}, 200

    def preupload(self, body: bytes, repo: str, revision: str) -> Any:
        _, tree = self._tree(repo, revision)
        answer = []
        for file in json.loads(body)["files"]:
            lfs, had = _LFS.fullmatch(file["path"]), tree.get(file["path"])
            oid = had and (had["sha256"] if had["lfs"] else had["oid"])
            mode = "lfs" if lfs else "regular"
            answer.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return {"files": answer}

    def batch(self, body: bytes, repo: str) -> Any:
        answer = []
        for one in json.loads(body)["objects"]:
            urls = {name: {"href": f"{self.hub.url}/{name}/content/{one['oid']}"} for name in ("upload", "verify")}
            there = (self.hub.root / "content" / one["oid"]).exists()
            answer.append({**one, **({} if there else {"actions": urls})})
        return {"transfer": "basic", "objects": answer}

    def upload(self, body: bytes, oid: str) -> Any:
        if hashlib.sha256(body).hexdigest() != oid:
            raise RefusedError(400, "WrongContent")
        self.hub.sent_bytes += len(body)
        self.hub.keep(body, lfs=True)
        return {}

    def verify(self, body: bytes, oid: str) -> Any:
        return {} if (self.hub.root / "content" / oid).exists() else ({"error": "missing"}, {}, 404)

    def commit(self, body: bytes, repo: str, branch: str) -> Any:
        at, tree = self._tree(repo, branch)
        header, *lines = [json.loads(line) for line in body.splitlines()]
        if header["value"].get("parentCommit", at) != at:
            raise RefusedError(412, "PreconditionFailed")
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                tree[value["path"]] = self.hub.keep(base64.b64decode(value["content"]), lfs=False)
            elif line["key"] == "lfsFile":
                tree[value["path"]] = self.hub.keep((self.hub.root / "content" / value["oid"]).read_bytes(), lfs=True)
            else:
                del tree[value["path"]]
        oid = self.hub.add(repo, at, tree, branch)
        return {"commitUrl": f"{self.hub.url}/{repo}/commit/{oid}", "commitOid": oid, "pullRequestUrl": None}

    def resolve(self, body: bytes, repo: str, revision: str, name: str) -> Any:
        at, tree = self._tree(repo, revision)
        if name not in tree:
            raise RefusedError(404, "EntryNotFound")
        data, file = (self.hub.root / "content" / tree[name]["sha256"]).read_bytes(), tree[name]
        headers = {"ETag": f'"{file["sha256"] if file["lfs"] else file["oid"]}"', "X-Repo-Commit": at}
        if ranged := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            begin, end = int(ranged[1]), int(ranged[2] or len(data) - 1) + 1
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
            return data[begin:end], headers, 206
        return data, headers, 200


_REPO = r"([\w.-]+/[\w.-]+)"
_ROUTES: list[tuple[str, Callable[..., Any]]] = [
    (r"POST /api/repos/create", _Requests.create),
    (r"POST /api/validate-yaml", _Requests.validate),
    (rf"POST /api/models/{_REPO}/branch/(.+)", _Requests.branch),
    (rf"GET /api/models/{_REPO}(?:/revision/(.+))?", _Requests.info),
    (rf"GET /api/models/{_REPO}/tree/([^/]+)", _Requests.listing),
    (rf"POST /api/models/{_REPO}/preupload/(.+)", _Requests.preupload),
    (rf"POST /{_REPO}\.git/info/lfs/objects/batch", _Requests.batch),
    (r"PUT /upload/content/(\w+)", _Requests.upload),
    (r"POST /verify/content/(\w+)", _Requests.verify),
    (rf"POST /api/models/{_REPO}/commit/(.+)", _Requests.commit),
    (rf"(?:GET|HEAD) /{_REPO}/resolve/([^/]+)/(.+)", _Requests.resolve),
]


@contextmanager
def serving(root: Path) -> Iterator[Hub]:
    """Serve the repositories below a new directory until the block ends."""
    hub = Hub(root)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Requests", (_Requests,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

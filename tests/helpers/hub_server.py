"""A small Hub on loopback: what huggingface_hub needs to create a repository, commit to it and download from it.

Files live in memory. A commit is applied at once, as on the real Hub; uploads before it change nothing that can be read.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]


class Repository:
    """Branches and their commits."""

    def __init__(self, private: bool) -> None:
        self.private = private
        self.commits: dict[str, Files] = {}
        self.branches: dict[str, str] = {}
        self.titles: list[str] = []
        self.put("main", {}, "initial commit")

    def put(self, branch: str, files: Files, title: str) -> str:
        sha = hashlib.sha1(f"{branch} {len(self.titles)}".encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        self.titles.append(title)
        return sha

    def find(self, revision: str) -> str | None:
        return self.branches.get(revision) or (revision if revision in self.commits else None)


class Hub:
    """The server: `with Hub() as hub: ... hub.url`. Kills a process at a given request, if told to."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.blobs: dict[str, bytes] = {}
        self.log: list[tuple[str, str, str | None]] = []
        self.victim: int | None = None
        self.kill_at = 0

    def __enter__(self) -> Hub:
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def files(self, repo_id: str, revision: str = "main") -> Files:
        repository = self.repositories[repo_id]
        return repository.commits[repository.branches[revision]]

    def environment(self, home: str) -> dict[str, str]:
        """What a client's process needs to talk to this Hub and to no other."""
        names = {"HF_ENDPOINT": self.url, "HF_TOKEN": "hf_test", "HF_HOME": home, "HF_HUB_OFFLINE": "0"}
        return {**names, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *arguments: object) -> None:
        pass

    def body(self) -> bytes:
        if length := self.headers.get("Content-Length"):
            return self.rfile.read(int(length))
        data = b""
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline().split(b";")[0], 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        return data

    def send(self, status: int, content: object = None, *, raw: bytes | None = None, **headers: str) -> None:
        data = raw if raw is not None else b"" if content is None else json.dumps(content).encode()
        headers.setdefault("Content-Type", "application/octet-stream" if raw is not None else "application/json")
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def handle_request(self) -> None:
        path, body = unquote(urlsplit(self.path).path), self.body()
        self.hub.log.append((self.command, path, self.headers.get("Authorization")))
        if self.hub.victim is not None and len(self.hub.log) == self.hub.kill_at:
            os.kill(self.hub.victim, signal.SIGKILL)
            self.close_connection = True
            return
        for pattern, name in _ROUTES:
            if found := re.fullmatch(pattern, path):
                getattr(self, name)(*found.groups(), body)
                return
        self.send(404, {"error": f"no such address {path}"})

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def whoami(self, body: bytes) -> None:
        self.send(200, {"name": "tester", "type": "user", "orgs": [], "auth": {"accessToken": {"role": "write"}}})

    def validate(self, body: bytes) -> None:
        self.send(200, {"errors": [], "warnings": []})

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        repo_id = f"{asked.get('organization') or 'tester'}/{asked['name']}"
        answer = {"url": f"{self.hub.url}/{repo_id}", "id": repo_id, "name": repo_id}
        if repo_id in self.hub.repositories:
            self.send(409, {"error": "You already created this model repo", **answer})
            return
        self.hub.repositories[repo_id] = Repository(
            bool(asked.get("private")) or asked.get("visibility") == "private"  # huggingface_hub 1.x and 2.x
        )
        self.send(200, answer)

    def branch(self, repo_id: str, branch: str, body: bytes) -> None:
        repository = self.hub.repositories[repo_id]
        if branch in repository.branches:
            self.send(409, {"error": f"Reference already exists: {branch}"})
            return
        repository.branches[branch] = repository.branches["main"]
        self.send(200, {})

    def preupload(self, repo_id: str, body: bytes) -> None:
        def mode(path: str) -> str:
            return "lfs" if path.endswith(".safetensors") else "regular"

        paths = [file["path"] for file in json.loads(body)["files"]]
        files = [{"path": path, "uploadMode": mode(path), "shouldIgnore": False, "oid": None} for path in paths]
        self.send(200, {"files": files})

    def batch(self, repo_id: str, body: bytes) -> None:
        objects = [
            {**blob, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{blob['oid']}"}}}
            for blob in json.loads(body)["objects"]
        ]
        kind = "application/vnd.git-lfs+json"
        self.send(200, {"transfer": "basic", "objects": objects}, Content_Type=kind)

    def upload(self, oid: str, body: bytes) -> None:
        self.hub.blobs[oid] = body
        self.send(200)

    def commit(self, repo_id: str, branch: str, body: bytes) -> None:
        repository, title = self.hub.repositories[repo_id], ""
        files = dict(repository.commits[repository.branches[branch]])
        for line in body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "header":
                title = value["summary"]
            elif operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
        sha = repository.put(branch, files, title)
        self.send(200, {"commitUrl": f"{self.hub.url}/{repo_id}/commit/{sha}", "commitOid": sha, "success": True})

    def tree(self, repo_id: str, revision: str, body: bytes) -> None:
        repository = self.hub.repositories[repo_id]
        files = repository.commits[repository.find(revision) or ""]
        rows = [
            {"type": "file", "path": k, "size": len(v), "oid": hashlib.sha1(v).hexdigest()} for k, v in files.items()
        ]
        self.send(200, rows)

    def info(self, repo_id: str, revision: str | None, body: bytes) -> None:
        repository = self.hub.repositories[repo_id]
        sha = repository.find(revision or "main") or ""
        names = [{"rfilename": name} for name in repository.commits[sha]]
        state = {
            "private": repository.private,
            "gated": False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
        }
        self.send(200, {"_id": "1", "id": repo_id, "modelId": repo_id, "sha": sha, "siblings": names, **state})

    def resolve(self, repo_id: str, revision: str, path: str, body: bytes) -> None:
        repository = self.hub.repositories[repo_id]
        sha = repository.find(revision) or ""
        content = repository.commits[sha].get(path)
        if content is None:
            self.send(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound", X_Repo_Commit=sha)
            return
        self.send(200, raw=content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', X_Repo_Commit=sha)


_ROUTES = (
    (r"/api/whoami-v2", "whoami"),
    (r"/api/validate-yaml", "validate"),
    (r"/api/repos/create", "create"),
    (r"/api/models/([^/]+/[^/]+)/branch/(.+)", "branch"),
    (r"/api/models/([^/]+/[^/]+)/preupload/.+", "preupload"),
    (r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", "batch"),
    (r"/lfs/(\w+)", "upload"),
    (r"/api/models/([^/]+/[^/]+)/commit/(.+)", "commit"),
    (r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", "tree"),
    (r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", "info"),
    (r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", "resolve"),
)

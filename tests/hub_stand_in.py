"""As much of a Hugging Face hub as its client needs in order to upload a folder, and to download one: on loopback, in this process, kept
in memory. The name of a data set in `repositories` begins with `datasets/`."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

COMMIT = "ab" * 20


class Hub:
    """`repositories`: name -> file -> content, as committed. `refuse`: an HTTP status that every commit gets instead."""

    def __init__(self, refuse: int = 0) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.made: list[dict[str, Any]] = []
        self.refuse = refuse
        self._large: dict[str, bytes] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                hub._answer(self)

            do_PUT = do_POST

            def do_GET(self) -> None:
                hub._give(self)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        status, answer = 200, {}
        path = request.path
        assert "hf_test" in (request.headers.get("Authorization") or "hf_test")
        if path == "/api/repos/create":
            asked = json.loads(body)
            self.made.append(asked)
            name = f"{asked['organization']}/{asked['name']}"
            self.repositories.setdefault(name, {})
            answer = {"url": f"{self.url}/{name}", "name": name, "id": "1"}
        elif "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
            answer = {
                "files": [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in modes.items()]
            }
        elif path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {**one, "actions": {"upload": {"href": f"{self.url}/large/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            answer = {"transfer": "basic", "objects": objects}
        elif path.startswith("/large/"):
            self._large[path.removeprefix("/large/")] = body
        elif "/commit/" in path:
            status = self.refuse or 200
            answer = {"error": "the repository is full"} if self.refuse else self._commit(path, body)
        else:
            status = 404
        data = json.dumps(answer).encode()
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def _give(self, request: BaseHTTPRequestHandler) -> None:
        """What a download asks: which files a repository has, and each file."""
        path, data, status = request.path.partition("?")[0], b"", 404
        name, _, rest = path.removeprefix("/").partition("/resolve/")
        if path.startswith("/api/"):
            asked = path.removeprefix("/api/").removeprefix("models/")
            name, tree, _ = asked.partition("/tree/")
            name = name.partition("/revision/")[0]
            if tree and name in self.repositories:
                files = self.repositories[name].items()
                listed = [
                    {
                        "type": "file",
                        "path": file,
                        "size": len(content),
                        "oid": hashlib.sha1(content).hexdigest(),
                    }
                    for file, content in files
                ]
                data, status = json.dumps(listed).encode(), 200
            elif name in self.repositories:
                names = [{"rfilename": file} for file in self.repositories[name]]
                about = {
                    "id": name.removeprefix("datasets/"),
                    "sha": COMMIT,
                    "siblings": names,
                    "private": False,
                }
                data, status = json.dumps({**about, "tags": [], "downloads": 0, "likes": 0}).encode(), 200
        elif rest:
            file = rest.partition("/")[2]
            if file in self.repositories.get(name, {}):
                data, status = self.repositories[name][file], 200
        request.send_response(status)
        request.send_header("X-Repo-Commit", COMMIT)
        request.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(data)

    def _commit(self, path: str, body: bytes) -> dict[str, object]:
        name = path.removeprefix("/api/models/").partition("/commit/")[0]
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                self.repositories[name][value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                self.repositories[name][value["path"]] = self._large[value["oid"]]
        return {"success": True, "commitOid": "0" * 40, "commitUrl": f"{self.url}/{name}/commit/{'0' * 40}"}

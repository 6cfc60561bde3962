"""A stand-in of the hub's API on this machine: what a client of huggingface_hub asks when it fetches a repository."""

import hashlib
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "a" * 40


class Hub:
    """Serves ``repos[name][file] -> bytes`` in the hub's way, and remembers which files were asked for, and of whom."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.fetched: list[str] = []
        self.repos_fetched: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self, with_body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, with_body=False)

            def log_message(self, *args) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self.thread.start()

    def answer(self, request: BaseHTTPRequestHandler, with_body: bool) -> None:
        parts = request.path.partition("?")[0].strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        repo, rest = "/".join(parts[2:4] if is_api else parts[:2]), parts[4 if is_api else 2 :]
        files = self.repos.get(repo)
        headers = {"X-Repo-Commit": COMMIT}
        if files is None or (len(rest) > 1 and rest[1] not in ("main", "v2", COMMIT)):
            headers["X-Error-Code"] = "RepoNotFound" if files is None else "RevisionNotFound"
            status, body = 404, b"{}"
        elif is_api and rest[:1] == ["tree"]:
            status, body = 200, json.dumps([
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]).encode()  # fmt: skip
        elif is_api:
            siblings = [{"rfilename": name} for name in files]
            status, body = 200, json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode()
        elif "/".join(rest[2:]) in files:
            name = "/".join(rest[2:])
            status, body = 200, files[name]
            headers["ETag"] = f'"{hashlib.sha1(body).hexdigest()}"'
            if with_body:
                self.fetched.append(name)
                self.repos_fetched.append(repo)
        else:
            headers["X-Error-Code"] = "EntryNotFound"
            status, body = 404, b""
        request.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            request.send_header(key, value)
        request.end_headers()
        if with_body:
            request.wfile.write(body)

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


def environment(hub_url: str, home: Path) -> dict[str, str]:
    """For a process that knows only this hub."""
    return {
        **os.environ, "HF_ENDPOINT": hub_url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
    }  # fmt: skip

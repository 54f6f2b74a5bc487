"""What is exported goes to the Hugging Face hub, here one on loopback."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.conftest import Command
from weft.checkpoint.hub import push
from weft.errors import WeftError

pytest.importorskip("huggingface_hub")


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as an upload of small files needs; the owner 'nobody' may not write."""

    files: ClassVar[dict[str, bytes]] = {}
    made: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        home = f"http://127.0.0.1:{self.server.server_address[1]}"
        if self.headers.get("Authorization") != "Bearer hf_mine":
            self._send(401, {"error": "Invalid token"})
        elif self.path == "/api/repos/create":
            self.made.append(json.loads(body))
            self._send(200, {"url": f"{home}/me/tiny"})
        elif "/nobody/" in self.path:
            self._send(403, {"error": "no"})
        elif "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            found = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                for f in asked
            ]
            self._send(200, {"files": found})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(
                        line["value"]["content"]
                    )
            self._send(
                200,
                {
                    "commitUrl": f"{home}/me/tiny/commit/0",
                    "commitOid": "0" * 40,
                    "hookOutput": "",
                },
            )
        else:
            self._send(200, {})

    def do_GET(self) -> None:
        self._send(200, {"id": "me/tiny", "sha": "0" * 40, "siblings": []})

    def _send(self, code: int, tree: dict[str, Any]) -> None:
        body = json.dumps(tree).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *given: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    # An earlier test may have imported the package, which reads the variable then.
    monkeypatch.setattr(
        "huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}"
    )
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    Hub.files.clear()
    Hub.made.clear()
    yield Hub
    server.shutdown()


def test_a_folder_and_a_file_arrive_as_they_are(hub: type[Hub], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    assert push(folder, "me/tiny").endswith("/me/tiny")
    assert hub.files == {"config.json": b"{}", "model.safetensors": b"weights"}
    assert _is_private(hub.made[0])
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    push(tmp_path / "tiny.gguf", "me/tiny", public=True)
    assert hub.files["tiny.gguf"] == b"GGUF" and not _is_private(hub.made[1])


def _is_private(asked: dict[str, Any]) -> bool:
    """By the word of newer versions of huggingface_hub, or of older ones."""
    return bool(asked.get("visibility") == "private" or asked.get("private"))


def test_what_the_hub_refuses_is_one_line(
    hub: type[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        WeftError,
        match=r"is written, but nobody/tiny .* was not: your token may not write there",
    ):
        push(tmp_path, "nobody/tiny")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(WeftError, match="the token is not valid"):
        push(tmp_path, "me/tiny")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(WeftError) as refused:
        push(tmp_path, "me/tiny")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("words", "said"), [
    ("--push tiny", "--push 'tiny' is not of the form owner/name"),
    ("--public", "--public is for the repository of --push"),
    ("--push me/tiny", "--push needs a token of the Hugging Face hub"),
])  # fmt: skip
def test_what_cannot_be_pushed_is_said_before_anything_is_read(
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: str,
    said: str,
) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    code, _, err = command(
        "export", "--from", "no-such-run", "--out", tmp_path / "new", *words.split()
    )
    assert code == 2 and said in err and err.count("\n") == 1

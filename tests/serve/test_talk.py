"""A conversation in a terminal or a pipe."""

from __future__ import annotations

import io
import json
import signal
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from tests.conftest import Command
from weft.errors import WeftError
from weft.serve import talk as talking
from weft.serve.talk import Messages, server_speaker, talk


class Typed(io.StringIO):
    """Lines that somebody types in a terminal."""

    def isatty(self) -> bool:
        return True


def echo(messages: Messages) -> Iterator[str]:
    """Says how many messages there are, and the last."""
    yield f"{len(messages)}: "
    yield messages[-1]["content"]


def run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    lines: io.StringIO,
    **given: Any,
) -> tuple[str, str]:
    monkeypatch.setattr(sys, "stdin", lines)
    talk(given.pop("speaker", echo), **given)
    return capsys.readouterr()


def test_a_pipe_has_a_message_per_line_and_nothing_but_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = io.StringIO(
        "hello\n\n  again \n/reset\nthird\n/system be kind\nfourth\n//five\n/nonsense\n/quit\nnever\n"
    )
    out, err = run(monkeypatch, capsys, lines)
    assert out == "1: hello\n3: again\n1: third\n2: fourth\n4: /five\n"
    assert "be kind" in err and "/nonsense is no command" in err and "never" not in out
    # a byte that is no UTF-8
    assert run(monkeypatch, capsys, io.StringIO("a\udcff\n"))[0] == "1: a?\n"


def test_ctrl_c_stops_an_answer_whose_beginning_stays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[Messages] = []

    def endless(messages: Messages) -> Iterator[str]:
        heard.append(list(messages))
        for number in range(1000):
            if number == 3:
                signal.raise_signal(signal.SIGINT)
            yield f"{number} "

    before = signal.getsignal(signal.SIGINT)
    out, err = run(
        monkeypatch, capsys, Typed("count\nmore\n"), speaker=endless, system="be brief"
    )
    assert "weft: stopped" in err and out.count("0 1 2 3 \n") == 2
    assert heard[1] == [
        {"role": "system", "content": "be brief"}, {"role": "user", "content": "count"},
        {"role": "assistant", "content": "0 1 2 3 "}, {"role": "user", "content": "more"},
    ]  # fmt: skip
    assert signal.getsignal(signal.SIGINT) is before


def test_a_mistake_costs_a_line_in_a_terminal_and_ends_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(messages: Messages) -> Iterator[str]:
        if "long" in messages[-1]["content"]:
            raise WeftError("the model has no room for that")
        yield from echo(messages)

    out, err = run(monkeypatch, capsys, Typed("long\nshort\n"), speaker=refuses)
    assert "weft: the model has no room for that" in err and "1: short" in out
    with pytest.raises(WeftError, match="no room"):
        run(monkeypatch, capsys, io.StringIO("long\n"), speaker=refuses)


class Answers(BaseHTTPRequestHandler):
    """A server that streams the number of messages in two pieces, and refuses the word 'bad'."""

    seen: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(body | {"key": self.headers.get("Authorization")})
        if body["messages"][-1]["content"] == "bad":
            self._send(400, {"error": {"message": "that is\nbad"}})
            return
        self.send_response(200)
        self.end_headers()
        for piece in ("you said ", str(len(body["messages"])), None):
            delta = {"content": piece} if piece else {}
            self.wfile.write(
                f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n".encode()
            )
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, code: int, tree: dict[str, Any]) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(tree).encode())

    def log_message(self, *given: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_a_server_is_talked_to(
    monkeypatch: pytest.MonkeyPatch, command: Command, url: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    code, out, err = command("chat", url, "--temperature", 0)
    assert (code, out, err) == (0, "you said 1\nyou said 3\n", "")
    assert (
        Answers.seen[-1]["key"] == "Bearer secret"
        and Answers.seen[-1]["temperature"] == 0
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("bad\n"))
    code, out, err = command("chat", f"{url}/v1/")
    assert (code, err) == (1, f"weft: error: {url}/v1/ refuses (400): that is bad\n")


def test_a_server_that_is_not_there_is_one_line(command: Command) -> None:
    code, _, err = command("chat", "http://127.0.0.1:9")
    assert (
        code == 1
        and err.startswith("weft: error: http://127.0.0.1:9 cannot be reached: ")
        and err.count("\n") == 1
    )
    with pytest.raises(WeftError):
        server_speaker("http://127.0.0.1:9", "", {})
    assert talking.HELP

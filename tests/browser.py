"""Pages in a browser without a network and without a window."""

from __future__ import annotations

import base64
import html
import json
import re
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    None,
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--virtual-time-budget=6000", "--window-size=1400,900",
    "--hide-scrollbars", "--allow-file-access-from-files",
)  # fmt: skip
#: Writes down what it measures in the frame, once its scripts have run. A window is never as narrow as a phone.
FRAME = """<iframe src="PAGE" style="width: WIDTHpx; height: 900px; border: 0"></iframe><pre></pre>
<script>onload = () => setTimeout(() => {
  const d = document.querySelector("iframe").contentDocument;
  document.querySelector("pre").textContent = JSON.stringify({ VALUES });
}, 500)</script>"""


def dumped_dom(page: Path, profile: Path) -> str:
    """What a page has become once its scripts have run."""
    command = [
        str(CHROMIUM),
        *FLAGS,
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={profile}",
    ]
    done = subprocess.run(
        [*command, "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "<html" in done.stdout, done.stderr[-2000:]
    return done.stdout


def measured(page: Path, width: int, wanted: dict[str, str]) -> dict[str, Any]:
    """What the JavaScript expressions of ``wanted`` yield on a screen of ``width``, where ``d`` is the document."""
    values = ", ".join(f"{json.dumps(name)}: {code}" for name, code in wanted.items())
    with tempfile.TemporaryDirectory() as folder:
        frame = Path(folder) / "frame.html"
        text = FRAME.replace("PAGE", page.absolute().as_uri()).replace(
            "WIDTH", str(width)
        )
        frame.write_text(text.replace("VALUES", values))
        found = re.search(
            r"<pre>(.*?)</pre>", dumped_dom(frame, Path(folder) / "profile"), re.DOTALL
        )
    assert found and found[1], "the page was not measured"
    return json.loads(html.unescape(found[1]))


@contextmanager
def opened(address: str, profile: Path) -> Iterator[Page]:
    """A page of this machine's in a browser that can be talked to."""
    command = [
        str(CHROMIUM),
        *FLAGS,
        "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
    ]
    # a server's time is real
    command = [flag for flag in command if not flag.startswith("--virtual-time")]
    process = subprocess.Popen(
        [*command, "--remote-debugging-port=0", f"--user-data-dir={profile}", address],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        lines = (
            re.search(r"DevTools listening on ws://([^/]+)/", line)
            for line in process.stderr
        )
        port = next(found[1] for found in lines if found)
        for _ in range(300):
            with urllib.request.urlopen(
                f"http://{port}/json/list", timeout=30
            ) as answer:
                pages = [
                    one
                    for one in json.load(answer)
                    if one["type"] == "page" and one["url"].startswith(address)
                ]
            if pages:
                break
            time.sleep(0.1)
        with connect(pages[0]["webSocketDebuggerUrl"], max_size=None) as socket:
            yield Page(socket)
    finally:
        process.kill()
        process.wait()


class Page:
    def __init__(self, socket: Any) -> None:
        self.socket, self.number = socket, 0

    def call(self, method: str, **parameters: Any) -> Any:
        self.number += 1
        self.socket.send(
            json.dumps({"id": self.number, "method": method, "params": parameters})
        )
        while (answer := json.loads(self.socket.recv(60))).get("id") != self.number:
            pass  # what happened meanwhile
        return answer["result"]

    def value(self, expression: str) -> Any:
        """What a JavaScript expression yields."""
        found = self.call(
            "Runtime.evaluate",
            expression=expression,
            awaitPromise=True,
            returnByValue=True,
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression: str) -> Any:
        """The value of an expression, once it is true."""
        for _ in range(600):
            if found := self.value(expression):
                return found
            time.sleep(0.05)
        raise AssertionError(
            f"{expression} did not become true: {self.value('document.body.innerText')}"
        )

    def picture(self, file: Path) -> None:
        """Write what is to be seen."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

"""Pages in a browser without a network and without a window."""

from __future__ import annotations

import atexit
import base64
import functools
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
    "--disable-component-update", "--disable-sync", "--window-size=1400,900",
    "--hide-scrollbars", "--allow-file-access-from-files",
)  # fmt: skip
#: Writes down what it measures in the frame, once its scripts have run. A window is never as narrow as a phone.
FRAME = """<iframe src="PAGE" style="width: WIDTHpx; height: 900px; border: 0"></iframe><pre></pre>
<script>onload = () => setTimeout(() => {
  const d = document.querySelector("iframe").contentDocument;
  let values;
  try { values = { VALUES }; } catch (error) { values = { error: String(error) }; }
  document.querySelector("pre").textContent = JSON.stringify(values);
}, 500)</script>"""

WRITTEN = "document.querySelector('pre').textContent !== ''"


def dumped_dom(page: Path, ready: str = "true") -> str:
    """What a page has become once its scripts have run, for six seconds of a clock that does not wait.

    A loaded machine loads slowly, in a time that is real: the clock starts with the page, ``ready`` may come later."""
    with urllib.request.urlopen(
        urllib.request.Request(f"http://{_shared()}/json/new?about:blank", method="PUT")
    ) as answer:
        tab = json.load(answer)
    with connect(tab["webSocketDebuggerUrl"], max_size=None) as socket:
        shown = Page(socket)
        shown.call("Page.enable")
        clock = {"policy": "pauseIfNetworkFetchesPending", "budget": 6000}
        shown.call("Page.navigate", url=page.as_uri())
        # the blank page that a tab begins with has loaded, too
        here = json.dumps(page.as_uri())
        shown.wait(f"location.href === {here} && document.readyState === 'complete'")
        shown.call("Emulation.setVirtualTimePolicy", **clock)
        shown.event("Emulation.virtualTimeBudgetExpired")
        shown.call("Emulation.setVirtualTimePolicy", policy="advance")
        shown.wait(ready)
        text: str = shown.value("document.documentElement.outerHTML")
        shown.call("Page.close")
    return text


@functools.cache
def _shared() -> str:
    """Where one talks to the browser that shows all pages of this process, one after another.

    It has no network but this machine.
    """
    profile = tempfile.TemporaryDirectory(
        prefix="weft-browser-", ignore_cleanup_errors=True
    )
    words = ["--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1", "about:blank"]
    process, port = _started(Path(profile.name), words)

    def end() -> None:
        process.kill()
        process.wait()
        profile.cleanup()

    atexit.register(end)
    return port


def _started(profile: Path, words: list[str]) -> tuple[subprocess.Popen[bytes], str]:
    """A browser that can be talked to, and where."""
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        [*command, "--remote-debugging-port=0", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    note = profile / "DevToolsActivePort"
    for _ in range(1200):
        if note.is_file() and len(lines := note.read_text().splitlines()) > 1:
            return process, f"127.0.0.1:{lines[0]}"
        time.sleep(0.05)
    process.kill()
    raise AssertionError("the browser did not start")


def measured(page: Path, width: int, wanted: dict[str, str]) -> dict[str, Any]:
    """What the JavaScript expressions of ``wanted`` yield on a screen of ``width``, where ``d`` is the document."""
    values = ", ".join(f"{json.dumps(name)}: {code}" for name, code in wanted.items())
    with tempfile.TemporaryDirectory() as folder:
        frame = Path(folder) / "frame.html"
        text = FRAME.replace("PAGE", page.absolute().as_uri()).replace(
            "WIDTH", str(width)
        )
        frame.write_text(text.replace("VALUES", values))
        found = re.search(r"<pre>(.*?)</pre>", dumped_dom(frame, WRITTEN), re.DOTALL)
    assert found and found[1], "the page was not measured"
    values: dict[str, Any] = json.loads(html.unescape(found[1]))
    assert values.keys() == wanted.keys(), values
    return values


@contextmanager
def opened(address: str) -> Iterator[Page]:
    """A page of this machine's in a browser that can be talked to, which knows nothing of other pages."""
    with urllib.request.urlopen(f"http://{_shared()}/json/version") as answer:
        whole = json.load(answer)["webSocketDebuggerUrl"]
    with connect(whole, max_size=None) as socket:
        browser = Page(socket)
        own = browser.call("Target.createBrowserContext")["browserContextId"]
        target = browser.call(
            "Target.createTarget",
            url=address,
            browserContextId=own,
            width=1400,
            height=900,
        )["targetId"]
        tab = f"ws://{_shared()}/devtools/page/{target}"
        try:
            with connect(tab, max_size=None) as talk:
                yield Page(talk)
        finally:
            browser.call("Target.disposeBrowserContext", browserContextId=own)


class Page:
    def __init__(self, socket: Any) -> None:
        self.socket, self.number = socket, 0
        self.events: list[str] = []

    def call(self, method: str, **parameters: Any) -> Any:
        self.number += 1
        self.socket.send(
            json.dumps({"id": self.number, "method": method, "params": parameters})
        )
        while (answer := json.loads(self.socket.recv(60))).get("id") != self.number:
            self.events.append(answer.get("method", ""))
        assert "result" in answer, answer
        return answer["result"]

    def event(self, name: str) -> None:
        """Wait until this has happened."""
        while name not in self.events:
            self.events.append(json.loads(self.socket.recv(60)).get("method", ""))

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

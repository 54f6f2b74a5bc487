"""Pages in a browser without a network and without a window."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
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
    command = [str(CHROMIUM), *FLAGS, "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}"]
    done = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=100, check=False
    )
    assert "<html" in done.stdout, done.stderr[-2000:]
    return done.stdout


def measured(page: Path, width: int, wanted: dict[str, str]) -> dict[str, Any]:
    """What the JavaScript expressions of ``wanted`` yield on a screen of ``width``, where ``d`` is the document."""
    values = ", ".join(f"{json.dumps(name)}: {code}" for name, code in wanted.items())
    with tempfile.TemporaryDirectory() as folder:
        frame = Path(folder) / "frame.html"
        text = FRAME.replace("PAGE", page.absolute().as_uri()).replace("WIDTH", str(width))
        frame.write_text(text.replace("VALUES", values))
        found = re.search(r"<pre>(.*?)</pre>", dumped_dom(frame, Path(folder) / "profile"), re.DOTALL)
    assert found and found[1], "the page was not measured"
    return json.loads(html.unescape(found[1]))

"""Pictures of what a benchmark found."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path


def photograph(svg: str, path: Path, chromium: str, size: str) -> None:
    """The SVG as a PNG of ``size`` ("width,height"), by a headless browser; without one, the SVG itself beside it."""
    if not Path(chromium).exists():
        path.with_suffix(".svg").write_text(svg)
        print(f"no {chromium}: written as {path.with_suffix('.svg')}")
        return
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(f'<meta charset="utf-8"><body style="margin:0">{svg}')
        quiet = ["quic", "background-networking", "component-update", "sync"]
        subprocess.run(
            [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
             *(f"--disable-{what}" for what in quiet), f"--user-data-dir={folder}/browser", f"--window-size={size}",
             f"--screenshot={path.resolve()}", page.as_uri()],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip
    print(f"picture: {path}")

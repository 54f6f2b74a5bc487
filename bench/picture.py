"""Pictures of what a benchmark found."""

from __future__ import annotations

import subprocess
import tempfile
from html import escape
from pathlib import Path

#: Colours and type of the pictures, those of drawn schedules.
INK, SOFT, LINE, LANE, PAGE = "#16191f", "#667085", "#e4e7ec", "#f4f5f8", "#ffffff"
FONT = "Inter, system-ui, 'Helvetica Neue', Arial, sans-serif"


def text(x: float, y: float, what: str, size: float, more: str = "") -> str:
    """A line of text of an SVG."""
    return f'<text x="{x:.6g}" y="{y:.6g}" font-size="{size:.3g}" {more}>{escape(what)}</text>'


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

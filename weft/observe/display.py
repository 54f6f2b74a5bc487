"""Progress of a run for a person: a live panel on a terminal, aligned lines everywhere else."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType
from typing import Self

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

#: Value of a train record -> (label, width, how to write it). The order is that of the display.
CELLS = {
    "loss": ("loss", 7, lambda v: f"{v:.4f}"),
    "grad_norm": ("grad", 6, lambda v: f"{v:.3g}"),
    "lr": ("lr", 7, lambda v: f"{v:.1e}"),
    "tokens_per_s": ("tok/s", 6, lambda v: compact(v)),
    "mfu": ("MFU", 5, lambda v: f"{v:.1%}"),
    "memory_gib": ("memory", 8, lambda v: f"{v:.2f} GiB"),
    "validation": ("validation", 7, lambda v: f"{v:.4f}"),
}


class Display:
    """Context manager that shows progress up to ``total_steps``; silent with ``enabled=False`` (other ranks).

    Off a terminal (CI, Slurm logs) it prints one line every ``interval`` seconds, and at the end.
    """

    def __init__(self, total_steps: int, title: str, enabled: bool = True, interval: float = 5.0) -> None:
        self._total, self._title, self._enabled, self._interval = total_steps, title, enabled, interval
        self._console = Console(highlight=False)
        self._live: Live | None = None
        self._step, self._news, self._shown_at = 0, False, float("-inf")
        self._values: dict[str, float] = {}
        self._ticks: deque[tuple[float, int]] = deque(maxlen=50)

    def __enter__(self) -> Self:
        if self._enabled:
            self._console.print(Text(self._title, "bold"), soft_wrap=True)
            if self._console.is_terminal:
                self._live = Live(get_renderable=self._panel, console=self._console, refresh_per_second=4)
                self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live:
            self._live.stop()
        elif self._enabled and self._news:
            self._line()

    def update(self, step: int, **values: float | None) -> None:
        """``step`` steps are done; values are keyed as in :data:`CELLS` and stay until they are replaced."""
        self._step = step
        self._values |= {name: v for name, v in values.items() if v is not None and name in CELLS}
        if not self._ticks or step > self._ticks[-1][1]:
            self._ticks.append((time.monotonic(), step))
        self._news = True
        if self._enabled and not self._live and time.monotonic() - self._shown_at >= self._interval:
            self._line()

    def note(self, text: str) -> None:
        """Say something once, above the panel or between the lines."""
        if self._enabled:
            self._console.print(Text.assemble(("· ", "dim"), text), soft_wrap=True)

    def _eta(self) -> str:
        """Time left at the pace of the last fifty updates, so that compilation and pauses are soon forgotten."""
        if not self._ticks or self._step >= self._total:
            return ""
        (begin, first), (now, last) = self._ticks[0], self._ticks[-1]
        if last == first:
            return "eta --:--"
        left = (now - begin) / (last - first) * (self._total - self._step)
        return f"eta {clock(left - (time.monotonic() - now))}"

    def _line(self) -> None:
        self._news, self._shown_at = False, time.monotonic()
        cells = [f"{label} {value:>{width}}" for label, width, value in self._cells()]
        count = f"step {self._step:>{len(str(self._total))}}/{self._total}"
        self._console.print("  ".join([count, *cells, self._eta()]).rstrip(), markup=False, soft_wrap=True)

    def _panel(self) -> Group:
        bar = Table.grid(Column(ratio=1), Column(no_wrap=True), Column(no_wrap=True), padding=(0, 2, 0, 0), expand=True)
        progress = ProgressBar(self._total, self._step, complete_style="cyan", finished_style="green")
        bar.add_row(progress, f"{self._step}/{self._total}", Text(self._eta(), "dim"))
        cells = [Text.assemble((f"{label} ", "dim"), f"{value:<{width}}") for label, width, value in self._cells()]
        return Group(bar, Columns(cells, padding=(0, 2)))

    def _cells(self) -> list[tuple[str, int, str]]:
        return [(label, width, show(self._values[n])) for n, (label, width, show) in CELLS.items() if n in self._values]


def compact(number: float) -> str:
    """A count in at most six characters: 950, 12.3k, 4.56M."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def clock(seconds: float) -> str:
    """A duration as m:ss, h:mm:ss or d days h:mm."""
    whole = max(0, round(seconds))
    minutes, hours, days = whole // 60 % 60, whole // 3600 % 24, whole // 86400
    if days:
        return f"{days}d {hours}:{minutes:02}"
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"

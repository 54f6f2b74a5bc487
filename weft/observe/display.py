"""Progress of a run for a person: a live panel on a terminal, aligned lines everywhere else."""

import time
from typing import Self

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

#: Value of a train record -> (label, width, how to write it). The order is that of the display.
CELLS = {
    "return": ("return", 7, lambda v: f"{v:.2f}"),
    "loss": ("loss", 7, lambda v: f"{v:.4f}"),
    "reward": ("reward", 6, lambda v: f"{v:.3f}"),
    "grad_norm": ("grad", 6, lambda v: f"{v:.3g}"),
    "lr": ("lr", 7, lambda v: f"{v:.1e}"),
    "tokens_per_s": ("tok/s", 6, lambda v: compact(v)),
    "transitions_per_s": ("transitions/s", 6, lambda v: compact(v)),
    "mfu": ("MFU", 5, lambda v: f"{v:.1%}"),
    "memory_now_gib": ("memory", 8, lambda v: f"{v:.2f} GiB"),
    "memory_gib": ("peak", 8, lambda v: f"{v:.2f} GiB"),
    "validation": ("validation", 7, lambda v: f"{v:.4f}"),
}


#: Steps from which on a run counts as one without a known end.
ENDLESS = 10**9
#: Seconds after which a step counts as one that takes long, so that its passes are shown.
SLOW_S = 10.0


class Display:
    """Context manager that shows the progress of a run up to ``total_steps``, in a panel below ``title`` on a terminal.

    Off a terminal (CI, Slurm logs) it prints one line every ``interval`` seconds, and one at the end. If a step takes
    longer than ``slow`` seconds, the number of its finished passes is shown as well; off a terminal the pauses between
    these lines grow. With ``enabled=False``, which is used on ranks other than the first, nothing is shown.
    """

    def __init__(
        self,
        total_steps: int,
        title: str,
        enabled: bool = True,
        interval: float = 5.0,
        slow: float = SLOW_S,
    ) -> None:
        self._title, self._enabled, self._interval, self._slow = (
            title,
            enabled,
            interval,
            slow,
        )
        self._console = Console(highlight=False, quiet=not enabled)
        # Never started: it counts, estimates the time left and draws the bar. Fifteen minutes allow for slow steps.
        columns = (
            BarColumn(None),
            MofNCompleteColumn(),
            TextColumn("[dim]{task.fields[eta]}"),
        )
        self._progress = Progress(*columns, speed_estimate_period=900, expand=True)
        total = total_steps if total_steps < ENDLESS else None
        self._of = str(total or "?")
        self._progress.add_task("", total=total, eta="")
        (self._task,) = self._progress.tasks
        self._live: Live | None = None
        self._news, self._shown_at = False, float("-inf")
        self._values: dict[str, float] = {}
        self.restart_clock()

    def __enter__(self) -> Self:
        self._console.print(Text(self._title, "bold"), soft_wrap=True)
        if self._enabled and self._console.is_terminal:
            self._live = Live(
                get_renderable=self._panel, console=self._console, refresh_per_second=4
            )
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.stop()
        elif self._news:
            self._line()

    def update(self, step: int, **values: float | None) -> None:
        """Show that ``step`` steps are done.

        ``values``: what to show, by the keys of :data:`CELLS`; each value stays until it is replaced.
        """
        self._values |= {
            name: v for name, v in values.items() if v is not None and name in CELLS
        }
        self._progress.update(self._task.id, completed=step)
        left, self._news = self._task.time_remaining, True
        self.restart_clock()
        self._task.fields["eta"] = f"eta {clock(left)}" if left else ""
        if not self._live and time.monotonic() - self._shown_at >= self._interval:
            self._line()

    def restart_clock(self) -> None:
        """Restart the clock that measures the time of the present step, so that time before this call does not
        count.
        """
        self._pass, self._stepped_at, self._patience = "", time.monotonic(), self._slow

    def passes(self, done: int, of: int) -> None:
        """Show that ``done`` of the ``of`` passes of the present step are done, if the step has taken long."""
        spent = time.monotonic() - self._stepped_at
        if done == of or spent < self._patience:
            return
        self._pass = f"{done} of {of}"
        if not self._live:
            self._patience = 2 * spent
            step = f"step {self._task.completed + 1:>{len(self._of)}}/{self._of}"
            self._console.print(
                f"{step}  pass {self._pass} after {clock(spent)}",
                markup=False,
                soft_wrap=True,
            )

    def note(self, text: str) -> None:
        """Print the message ``text``: in a terminal above the progress panel, otherwise as a line of its own."""
        self._console.print(Text.assemble(("· ", "dim"), text), soft_wrap=True)

    def _line(self) -> None:
        self._news, self._shown_at = False, time.monotonic()
        count = f"step {self._task.completed:>{len(self._of)}}/{self._of}"
        cells = [f"{label} {value:>{width}}" for label, width, value in self._cells()]
        line = "  ".join([count, *cells, self._task.fields["eta"]]).rstrip()
        self._console.print(line, markup=False, soft_wrap=True)
        self._values.pop("validation", None)  # said once, on the first line after it

    def _panel(self) -> Group:
        shown, spent = self._cells(), time.monotonic() - self._stepped_at
        if spent >= self._slow:
            shown += [
                ("this step", 5, clock(spent)),
                *([("pass", len(self._pass), self._pass)] if self._pass else []),
            ]
        cells = [
            Text.assemble((f"{label} ", "dim"), f"{value:<{width}}")
            for label, width, value in shown
        ]
        return Group(self._progress, Columns(cells, padding=(0, 2)))

    def _cells(self) -> list[tuple[str, int, str]]:
        return [
            (label, width, show(self._values[n]))
            for n, (label, width, show) in CELLS.items()
            if n in self._values
        ]


def compact(number: float) -> str:
    """Return ``number``, a count, as text of at most six characters: 950, 12.3k, 4.56M."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 0.9995 * size:  # which three digits round up to it
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def clock(seconds: float) -> str:
    """Return a duration of ``seconds`` as text: m:ss, h:mm:ss, or d days h:mm."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"

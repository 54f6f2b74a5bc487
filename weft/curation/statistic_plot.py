"""Histograms of statistics as drawings for a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from weft.curation.step_counts import bin_value

#: Bars of a histogram, and the drawing's width and height in its own units.
BARS, WIDTH, HEIGHT = 44, 440, 120
#: Share of the documents that the axis covers; the rest counts in the outermost bars.
_COVERED = 0.99
#: From this ratio of its ends on, an axis is logarithmic.
_LOGARITHMIC = 50.0


class Bar(NamedTuple):
    """A bar of a histogram, in the units of its SVG drawing: a part for the documents that are kept, and on top of it a
    part for those that are dropped.
    """

    x: float
    width: float
    kept_y: float
    kept_height: float
    dropped_y: float
    dropped_height: float
    about: str


class Mark(NamedTuple):
    """A value on the axis of a histogram: its position ``x`` in the units of the SVG drawing, and the ``text`` below
    it.
    """

    x: float
    text: str


class StatisticPlot(NamedTuple):
    """A histogram of a statistic, ready to be drawn.

    ``name``: name of the statistic; ``logarithmic``: whether its axis is logarithmic. ``thresholds``: limits of the
    step, drawn as lines. ``ticks``: values below the axis.
    """

    name: str
    bars: list[Bar]
    thresholds: list[Mark]
    ticks: list[Mark]
    logarithmic: bool


def plot_statistic(
    name: str, bins: Mapping[str, Sequence[int]], thresholds: Mapping[str, float]
) -> StatisticPlot | None:
    """Return the histogram of a statistic, or None if it has one value only.

    ``bins``: number of kept and of dropped documents by bin (:mod:`weft.curation.step_counts`). ``thresholds``: limits
    by name of the setting.
    """
    values = sorted((bin_value(int(number)), *bins[number]) for number in bins)
    if len(values) < 2:
        return None
    low, high = _ends(values, list(thresholds.values()))
    smallest = min((v for v, *_ in values if v > 0), default=0.0)
    logarithmic = low >= 0 and high / max(low, smallest, 1e-9) > _LOGARITHMIC
    if logarithmic:
        low = max(low, smallest)

    def place(value: float) -> float:
        if logarithmic:
            ratio = math.log(max(value, low) / low) / math.log(high / low)
        else:
            ratio = (value - low) / (high - low)
        return min(1.0, max(0.0, ratio))

    kept, dropped = [0.0] * BARS, [0.0] * BARS
    for value, number_kept, number_dropped in values:
        # a bin is as wide as the numbers are exact, and its documents are spread over that
        first = min(BARS - 1, int(place(value * 0.99) * BARS))
        last = min(BARS - 1, int(place(value * 1.01) * BARS))
        first, last = min(first, last), max(first, last)
        for bar in range(first, last + 1):
            kept[bar] += number_kept / (last + 1 - first)
            dropped[bar] += number_dropped / (last + 1 - first)
    return StatisticPlot(
        name,
        _bars(kept, dropped, low, high, logarithmic),
        [
            Mark(place(v) * WIDTH, f"{label} = {rounded_number(v)}")
            for label, v in thresholds.items()
            if low <= v <= high
        ],
        _ticks(low, high, logarithmic),
        logarithmic,
    )  # fmt: skip


def _ends(
    values: Sequence[tuple[float, ...]], thresholds: Sequence[float]
) -> tuple[float, float]:
    """Return the ends of the axis: nearly all documents are between, and each threshold that is near."""
    total = sum(kept + dropped for _, kept, dropped in values)
    seen, low, high = 0.0, values[0][0], values[-1][0]
    for value, kept, dropped in values:
        seen += kept + dropped
        if seen <= total * (1 - _COVERED) / 2:
            low = value
        if seen >= total * (1 + _COVERED) / 2:
            high = value
            break
    for limit in thresholds:
        if low / 4 <= limit < low or low - (high - low) <= limit < low:
            low = limit
        if high < limit <= 2 * high:
            high = limit
    return (low, high) if high > low else (low, low + (abs(low) or 1.0))


def _bars(
    kept: Sequence[float],
    dropped: Sequence[float],
    low: float,
    high: float,
    logarithmic: bool,
) -> list[Bar]:
    most = max(k + d for k, d in zip(kept, dropped, strict=True)) or 1.0
    width = WIDTH / BARS
    bars = []
    for number, (k, d) in enumerate(zip(kept, dropped, strict=True)):
        if not k + d:
            continue
        tall, top = k / most * HEIGHT, d / most * HEIGHT
        begin, end = (
            _value_at(share / BARS, low, high, logarithmic)
            for share in (number, number + 1)
        )
        about = f"{rounded_number(begin)} to {rounded_number(end)}: {k:,.0f} kept, {d:,.0f} dropped"
        bars.append(
            Bar(number * width, width - 1, HEIGHT - tall, tall, HEIGHT - tall - top, top, about)
        )  # fmt: skip
    return bars


def _value_at(share: float, low: float, high: float, logarithmic: bool) -> float:
    if logarithmic:
        return low * (high / low) ** share
    return low + (high - low) * share


def _ticks(low: float, high: float, logarithmic: bool) -> list[Mark]:
    shares = (0.0, 0.25, 0.5, 0.75, 1.0)
    return [
        Mark(share * WIDTH, rounded_number(_value_at(share, low, high, logarithmic), 2))
        for share in shares
    ]


def rounded_number(value: float, digits: int = 3) -> str:
    """Return a number as text with ``digits`` significant digits, such as 0.125, 12, 3.4k or 1.2M."""
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scaled = value / (1e3 if unit == "k" else limit)
            return f"{scaled:.{max(digits, len(str(int(abs(scaled)))))}g}{unit}"
    if size >= 10**digits - 0.5:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"

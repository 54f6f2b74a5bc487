"""Which constants of the planner earn their place: each is left out in turn, and the error on unseen sources compared.

    python bench/planner/ablate.py ROWS.csv [--only NAME ... [--together]] [--sample N]

Leave one source out: all that is fitted is fitted to the rows of the other sources, each source counting alike; then
the rows of the source that was left out are predicted. A figure is the mean absolute error of a source's step times in
percent; the table shows median and mean over the sources of five rows or more, as changes from the model as it is, and
the mean again when all sources of the same people are left out together. A constant is left out in two ways: it is not
fitted any more ("preset"), or it has the value that it would have if nobody had looked ("neutral").
"""

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from evaluate import composed, error, regrets
from numpy.typing import NDArray
from rows import read_rows
from script import run

from weft.planner import cost, engine_constants, fit, machine

#: What a time constant of :class:`weft.planner.engine_constants.EngineConstants` is if nobody has looked: everything at
#: full rate, nothing hidden, nothing extra.
NEUTRAL: dict[str, float] = {
    "matmul": 1.0, "attention": 0.5, "elementwise": 8.0, "inner": 2.0, "kernels": 0.0, "exposed_dp": 1.0,
    "exposed_cp": 1.0, "network": 1.0, "buckets": 0.0, "step": 0.0, "jitter": 0.0, "moe": 0.0,
    "dispatch": 0.0, "rough": 0.0,
}  # fmt: skip
#: The same for constants of :mod:`weft.planner.cost`.
HIDDEN: dict[str, float] = {"CASTS": 0.0, "SHARP": 64.0}


@dataclass(frozen=True)
class Score:
    """Errors by source in percent; their mean with everything of the same people left out (``strangers``); and the
    regret of the first choice, by source and job. ``composed``: sources whose times are sums of pieces."""

    errors: dict[str, float]
    strangers: float
    regrets: dict[str, list[float]]
    composed: set[str]

    @property
    def regret(self) -> float:
        found = sum(self.regrets.values(), list[float]())
        return float(np.mean(found)) if found else float("nan")

    @property
    def median(self) -> float:
        return float(np.median(list(self.errors.values())))

    @property
    def mean(self) -> float:
        return float(np.mean(list(self.errors.values())))


@contextmanager
def without(name: str) -> Iterator[None]:
    """The planner without what ``name`` says: ``matmul preset``, ``matmul neutral``, ``SHARP``, ``clock``,
    ``megatron.step`` (a class's own value instead of everybody's)."""
    with ExitStack() as stack:
        if name.endswith(" preset"):
            stack.enter_context(
                mock.patch.object(
                    fit, "KNOBS", without_knob(name.removesuffix(" preset"))
                )
            )
        elif name.endswith(" neutral"):
            field = name.removesuffix(" neutral")
            stack.enter_context(mock.patch.object(fit, "KNOBS", without_knob(field)))
            stack.enter_context(mock.patch.dict(engine_constants.ENGINES))
            for key, own in list(engine_constants.ENGINES.items()):
                engine_constants.ENGINES[key] = replace(own, **{field: NEUTRAL[field]})
        elif name in HIDDEN:
            stack.enter_context(mock.patch.object(cost, name, HIDDEN[name]))
        elif name in ("clock", "low"):
            stack.enter_context(mock.patch.dict(machine.DEVICES))
            common = getattr(machine.Device, name)
            for key, device in list(machine.DEVICES.items()):
                machine.DEVICES[key] = replace(device, **{name: common})
        elif "." in name:
            kind, field = name.split(".")
            stack.enter_context(mock.patch.dict(engine_constants.ENGINES))
            engine_constants.ENGINES[kind] = replace(
                engine_constants.ENGINES[kind],
                **{field: getattr(engine_constants.EngineConstants, field)},
            )
        elif name != "nothing":
            raise ValueError(f"nothing is called {name!r}")
        yield


def without_knob(field: str) -> tuple[fit.Knob, ...]:
    return tuple(knob for knob in fit.KNOBS if knob.field != field)


def names() -> list[str]:
    """Everything that can be left out."""
    found = [f"{knob.field} preset" for knob in fit.KNOBS] + [
        f"{field} neutral"
        for field in NEUTRAL
        if hasattr(engine_constants.EngineConstants, field)
    ]
    found += [*HIDDEN, "clock", "low"]
    for kind, own in engine_constants.ENGINES.items():
        for field in NEUTRAL:
            if getattr(own, field) != getattr(
                engine_constants.EngineConstants, field
            ) and kind not in ("weft", "xla"):
                found.append(f"{kind}.{field}")
    return found


def leave_one_out(path: Path, sample: int, steps: int = 6) -> Score:
    """Fit to all sources but one, predict that one; for every source of five rows or more."""
    rows = [row for row in read_rows(path)[0] if row.seconds]
    by_source: dict[str, list[Any]] = {}
    for row in rows:
        by_source.setdefault(row.source, []).append(row)
    chosen = []
    for members in by_source.values():  # spread over the file, which goes by shapes
        chosen += members[:: max(1, -(-len(members) // sample))]
    sources = [name for name, members in by_source.items() if len(members) >= 5]
    owner = np.array([row.source for row in chosen])
    count = {name: int((owner == name).sum()) for name in by_source}
    even = np.array([min(1.0, 12 / count[row.source]) for row in chosen])
    people = np.array([name.split()[0] for name in owner])
    folds = [owner != name for name in sources]
    folds += [people != name for name in dict.fromkeys(people)]
    theta = fit.fit(
        chosen, np.array([even * fold for fold in folds]), fit.KNOBS, steps=steps
    )
    errors, found = {}, dict[str, list[float]]()
    for name, fitted in zip(sources, theta[: len(sources)], strict=True):
        members = by_source[name]
        predicted = fit.predict(members, fitted, fit.KNOBS)
        errors[name] = error(predicted, seconds(members))
        found[name] = [first for first, _ in regrets(members, predicted)]
    apart = [
        error(fit.predict(by_source[name], fitted, fit.KNOBS), seconds(by_source[name]))
        for who, fitted in zip(
            dict.fromkeys(people), theta[len(sources) :], strict=True
        )
        for name in sources
        if name.split()[0] == who
    ]
    return Score(
        errors,
        float(np.mean(apart)),
        found,
        {name for name in sources if composed(by_source[name])},
    )


def seconds(rows: list[Any]) -> NDArray[np.float64]:
    return np.array([row.seconds for row in rows], dtype=float)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Leave every constant out in turn; errors on sources left out."
    )
    parser.add_argument("rows", type=Path, metavar="ROWS.csv")
    parser.add_argument("--only", nargs="+", default=None, metavar="NAME")
    parser.add_argument(
        "--together", action="store_true", help="leave out all of --only at once"
    )
    parser.add_argument(
        "--sample",
        type=int,
        default=40,
        help="rows of a source that are fitted to, at most",
    )
    parser.add_argument("--steps", type=int, default=6, help="steps of the fit")
    options = parser.parse_args()
    base = leave_one_out(options.rows, options.sample, options.steps)
    print(f"as it is: median {base.median:.2f} %, mean {base.mean:.2f} %, strangers {base.strangers:.2f} %, "
          f"regret {base.regret:.2f} %")  # fmt: skip
    for name, wrong in base.errors.items():
        jobs = base.regrets[name]
        told = f"  regret {np.mean(jobs):5.2f} over {len(jobs)} jobs" if jobs else ""
        print(
            f"    {name[:60]:60} {wrong:6.1f}{told}{', composed' if name in base.composed else ''}"
        )
    print(
        "left out                      median    mean strangers  regret (changes in points; below zero: better without)"
    )
    chosen = options.only if options.only is not None else names()
    for group in [chosen] if options.together else [[name] for name in chosen]:
        with ExitStack() as stack:
            for name in group:
                stack.enter_context(without(name))
            score = leave_one_out(options.rows, options.sample, options.steps)
        changes = [
            getattr(score, key) - getattr(base, key)
            for key in ("median", "mean", "strangers", "regret")
        ]
        print(
            f"{', '.join(group):28}",
            *(f"{change:+8.2f}" for change in changes),
            flush=True,
        )


if __name__ == "__main__":
    run(main)

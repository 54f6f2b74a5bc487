"""A campaign of faults: start a run, inject faults, end it, and compare it with an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median

import psutil
from hosts import Host, hosts
from injector import DisturbedRun, Fault, Hit, Injector

from weft.errors import UsageError, WeftError
from weft.observe.run_metrics import Record, read_metrics
from weft.recipe import Recipe, load_recipe

#: The largest difference of losses from those of the undisturbed run, over the largest loss, that rounding explains.
TOLERANCE = {"float64": 1e-10, "float32": 1e-3}
#: The layout of the undisturbed run, and its settings in the place of those that only several ranks can have. None of
#: them changes what is computed.
ONE_RANK = "dp=1,secondary=0"
OF_ONE_RANK = (
    "resilience.survive=false",
    "optimizer.post_validation=false",
    "optimizer.pairs=false",
)
#: Seconds that a run may take to its first step, from one step or fault to the next step, and to end when told to (less
#: than launchers wait before they kill it, so that its stacks can be dumped).
STARTS, HANGS, ENDS = 180.0, 60.0, 45.0
#: Seconds that processes get to write their stacks.
DUMPS = 5.0
#: Seconds after the return of a cable within which all ranks find out who was cut off.
SETTLED = 10.0
#: Seconds between two looks.
LOOK = 0.02
#: The parts of the time that a new view took, as its record names them.
STAGES = ("part_s", "agree_s", "rebuild_s", "recover_s")
#: Lines of a run's output that are shown if it does not start or ends.
SHOWN = 12

Say = Callable[[str], None]
Add = Callable[[int, Random], None]
Processes = list["subprocess.Popen[bytes]"]


def train_words(
    recipe: Path, layout: str | None, overrides: Sequence[str], out: Path
) -> list[str]:
    """The command line of a run that goes on until it is told to stop, and records every step."""
    values = ["train.steps=1000000", *overrides, "observe.every=1"]
    words = [sys.executable, "-m", "weft", "train", str(recipe), "--out", str(out)]
    return [
        *words,
        *(["--layout", layout] if layout else []),
        *(w for value in values for w in ("--set", value)),
    ]


def start_here(words: Sequence[str], log: Path) -> Processes:
    """One launcher, with all ranks on this machine."""
    with log.open("ab") as file:
        return [
            subprocess.Popen(
                words,
                stdout=file,
                stderr=file,
                env=os.environ | {"PYTHONFAULTHANDLER": "1"},
            )
        ]


def start_on(
    hosts: Sequence[Host], words: Sequence[str], ranks: int, log: Path
) -> Processes:
    """``ranks`` processes on hosts, the first ones on the first host, started as by Slurm: without Weft's launcher."""
    where = [len(hosts) * rank // ranks for rank in range(ranks)]
    started = []
    for rank, host in enumerate(where):
        variables = {
            "RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": where[:rank].count(host),
            "LOCAL_WORLD_SIZE": where.count(host), "MASTER_ADDR": hosts[0].address, "MASTER_PORT": 29500,
            "PYTHONFAULTHANDLER": 1,
        }  # fmt: skip
        told = [
            "env",
            *(f"{name}={value}" for name, value in variables.items()),
            *words,
        ]
        with log.open("ab") as file:
            started.append(
                subprocess.Popen(hosts[host].command(told), stdout=file, stderr=file)
            )
    return started


@dataclass(frozen=True)
class Campaign:
    """A run, and the ``faults`` that it gets within ``seconds``. ``hosts``: simulated hosts that it runs on, if any.

    ``reference``: the folder of an undisturbed run; without it, one is made, of one rank. ``tolerance``: how far losses
    may be from those, over the largest loss.
    """

    recipe: Path
    layout: str | None
    overrides: Sequence[str]
    ranks: int
    faults: Sequence[Fault]
    seconds: float
    out: Path
    hosts: int = 0
    reference: Path | None = None
    tolerance: float = TOLERANCE["float64"]


@dataclass(frozen=True)
class CampaignResult:
    """A row for every fault that has happened, the median of every column of seconds, and what is wrong, in words."""

    rows: list[Record]
    medians: dict[str, float]
    wrong: list[str]


def carry_out(campaign: Campaign, say: Say) -> CampaignResult:
    """Start a run in ``campaign.out``/run, inject the faults, judge it, and write chaos.json beside it."""
    folder, log = campaign.out / "run", campaign.out / "output.txt"
    campaign.out.mkdir(parents=True)
    words = train_words(campaign.recipe, campaign.layout, campaign.overrides, folder)
    with ExitStack() as stack:  # also SIGTERM leaves nothing running
        stack.callback(
            signal.signal,
            signal.SIGTERM,
            signal.signal(signal.SIGTERM, signal.default_int_handler),
        )
        made = stack.enter_context(hosts(campaign.hosts)) if campaign.hosts else ()
        run = DisturbedRun(
            folder,
            start_on(made, words, campaign.ranks, log)
            if made
            else start_here(words, log),
        )
        more = [sys.executable, "-m", "weft", "ranks", "add", str(folder), "--ranks"]

        def add(count: int, draw: Random) -> None:
            told = [*more, str(count)]
            run.added += start_here(
                draw.choice(made).command(told) if made else told, log
            )

        injector = disturb(run, campaign, made, say, log, add)
        reference = campaign.reference or campaign.out / "reference"
        if campaign.reference is None:
            say(f"the run was at step {run.step}; now one that nobody disturbs")
            alone = train_words(
                campaign.recipe,
                ONE_RANK,
                [*campaign.overrides, *OF_ONE_RANK],
                reference,
            )
            run_undisturbed(alone, reference, run.step, log)
    found = CampaignResult(
        rows := rows_of(run, injector.hits),
        medians(rows),
        wrong(run, injector, reference, campaign.tolerance),
    )
    (campaign.out / "chaos.json").write_text(json.dumps(asdict(found), indent=1) + "\n")
    return found


def check_comparable(recipe: Path, overrides: Sequence[str], given: Recipe) -> None:
    """Raise :class:`UsageError` if one undisturbed rank does not compute what the ranks of the recipe ``given`` do.

    That would otherwise show only when the disturbed run has ended.
    """
    layout = given.layout
    unlike = {
        "layout.island": layout.island > 1, "layout.skip": layout.skip > 0, "layout.lsh": layout.lsh > 0,
        "resilience.aggregate": given.resilience.aggregate != "mean",
    }  # fmt: skip
    if names := [name for name, is_set in unlike.items() if is_set]:
        raise UsageError(
            f"chaos compares a run with one rank that nobody disturbs, which computes something else than ranks "
            f"with {' and '.join(names)}; leave that out (--layout, --set)"
        )
    load_recipe(recipe, [*overrides, *OF_ONE_RANK], ONE_RANK)


def disturb(
    run: DisturbedRun,
    campaign: Campaign,
    made: Sequence[Host],
    say: Say,
    log: Path,
    add: Add | None = None,
) -> Injector:
    """Inject the faults into a run that has been started, tell it to stop, and wait for its end.

    ``add`` starts new ranks in place of lost ones. Raises :class:`WeftError` if the run does not start, hangs, or does
    not end; its processes are killed then, too.
    """
    try:
        _wait(run, STARTS, lambda: run.step > 0, "has not taken a step", log)
        injector, last = (
            Injector(run, campaign.faults, made, add, say),
            time.monotonic(),
        )
        until = last + campaign.seconds
        while time.monotonic() < until and not run.ended:
            injector.work()
            if run.look():
                last = time.monotonic()
            if time.monotonic() - max(last, injector.last) > HANGS:
                raise WeftError(
                    f"the run hangs: no step for {HANGS:.0f} s after step {run.step} ({log})"
                )
            time.sleep(LOOK)
        injector.restore()
        for process in (*run.processes, *run.added):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        _wait(run, ENDS, lambda: run.ended, "has not ended", log)
        run.look()
        return injector
    except WeftError:
        left = _processes(run)
        for process in left:  # their stacks go to the log (PYTHONFAULTHANDLER)
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGABRT)
        psutil.wait_procs(left, DUMPS)
        raise
    finally:
        _end(run)


def _wait(
    run: DisturbedRun, seconds: float, done: Callable[[], bool], problem: str, log: Path
) -> None:
    until = time.monotonic() + seconds
    while not done():
        run.look()
        if run.ended and not done():
            raise WeftError(
                f"the run has ended by itself; its output ends with:\n{tail(log)}"
            )
        if time.monotonic() > until:
            raise WeftError(
                f"the run {problem} in {seconds:.0f} s; its output ends with:\n{tail(log)}"
            )
        time.sleep(LOOK)


def tail(log: Path) -> str:
    """The last lines of a file."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-SHOWN:])


def _end(run: DisturbedRun) -> None:
    """Kill all processes of a run that are left."""
    for process in _processes(run):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    for one in (*run.processes, *run.added):
        one.wait()


def _processes(run: DisturbedRun) -> list[psutil.Process]:
    """All processes of a run, children first."""
    left = [
        psutil.Process(p.pid) for p in (*run.processes, *run.added) if p.poll() is None
    ]
    return [child for p in left for child in p.children(recursive=True)] + left


def run_undisturbed(words: Sequence[str], folder: Path, steps: int, log: Path) -> None:
    """A run of ``words`` into ``folder`` that is told to stop when it has taken ``steps`` steps."""
    run = DisturbedRun(folder, start_here(words, log))
    try:
        _wait(run, STARTS, lambda: run.step > 0, "has not taken a step", log)
        while run.step < steps and not run.ended:
            run.look()
            time.sleep(LOOK)
        run.processes[0].send_signal(signal.SIGTERM)
        _wait(run, ENDS, lambda: run.ended, "has not ended", log)
    finally:
        _end(run)


def wrong(
    run: DisturbedRun, injector: Injector, reference: Path, tolerance: float
) -> list[str]:
    """What is wrong with a disturbed run, in words; nothing if its records are those of the undisturbed one."""
    found = []
    trained = [r for r in run.records if r["kind"] == "train"]
    times = Counter(r["step"] for r in trained)
    if more := sorted(step for step, count in times.items() if count > 1):
        found.append(f"recorded twice: steps {_some(more)}")
    if missing := sorted(set(range(1, max(times, default=0) + 1)) - times.keys()):
        found.append(f"not recorded: steps {_some(missing)}")
    there = {r["step"]: r for r in read_metrics(reference).get("train", [])}
    if beyond := sorted(times.keys() - there.keys()):
        found.append(
            f"{reference} has no step {_some(beyond)}: it is too short to compare with"
        )
    here = {r["step"]: r for r in trained if r["step"] in there}
    most = max((abs(there[step]["loss"] or 0) for step in here), default=1.0)
    off = [
        step
        for step, r in here.items()
        if not abs(_loss(r) - _loss(there[step])) <= tolerance * most
    ]
    if off:
        far = max(abs(_loss(here[step]) - _loss(there[step])) / most for step in off)
        found.append(
            f"{len(off)} losses differ by more than {tolerance:.0e}, from step {off[0]} on; at most {far:.1e}"
        )
    if uneven := [
        step for step, r in here.items() if r["tokens"] != there[step]["tokens"]
    ]:
        found.append(
            f"other tokens were counted, from step {uneven[0]} on: samples were lost or taken twice"
        )
    return found + _ended_badly(run, injector)


def _loss(record: Record) -> float:
    return float("nan") if record["loss"] is None else float(record["loss"])


def _some(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps[:5])) + (
        f" and {len(steps) - 5} more" if len(steps) > 5 else ""
    )


def _ended_badly(run: DisturbedRun, injector: Injector) -> list[str]:
    """Processes that failed, and members that were left out, although no fault had hit them; and faults that are left.

    A launcher fails with the last of its ranks, so one of which faults have ended all ranks has been hit.

    While a cable is out, members on either side of it may be left out: half of them go on, if the first is among them.
    """
    cut = [
        (h.time, h.time + (h.fault.lasts or 0) + SETTLED)
        for h in injector.hits
        if h.fault.kind == "link"
    ]
    numbers = {number for hit in injector.hits for number in hit.numbers}
    pids = {int(m["pid"]) for hit in injector.hits for m in hit.who}
    found = []
    for process in run.processes:
        failed = (
            process.returncode not in (0, 128 + signal.SIGTERM)
            and process.pid not in pids
        )
        if failed and not injector.has_ended_all_of(process.pid):
            found.append(
                f"process {process.pid} ended with exit code {process.returncode}, and no fault had hit it"
            )
    for view in (r for r in run.records if r["kind"] == "view"):
        if any(begin <= view["time"] <= end for begin, end in cut):
            continue
        for one in view["lost"]:
            if one["number"] not in numbers:
                found.append(
                    f"step {view['step']}: rank {one['rank']} {one['why']}, and no fault had hit it"
                )
    if injector.left:
        found.append(
            f"{injector.left} faults did not happen: too few ranks were left, or the run ended before"
        )
    return found


def rows_of(run: DisturbedRun, hits: Sequence[Hit]) -> list[Record]:
    """A row for every fault: the view that was agreed on without the ranks that it hit, and the first step after it.

    ``stall_s``: seconds from the fault to that step, of which ``detect_s`` passed until it was noticed; ``again``:
    finished steps that were repeated.
    """
    begun = next(r["time"] for r in run.records if r["kind"] == "train")
    found = []
    for i, hit in enumerate(hits):
        row: Record = {
            "fault": hit.fault.kind, "at_s": round(hit.time - begun, 2), "lasts_s": hit.fault.lasts,
            "hit": sorted(int(m["rank"]) for m in hit.who), "living": hit.living,
        }  # fmt: skip
        where = _without(hit, hits[i + 1 :], run.records)
        if where is not None:
            view, after = run.records[where], run.records[where + 1 :]
            row |= {
                "epoch": view["epoch"],
                "survivors": view["ranks"],
                "layout": view["layout"],
            }
            row |= {name: round(view.get(name, 0.0), 3) for name in STAGES}
            row["detect_s"] = round(
                max(0.0, view["time"] - sum(row[name] for name in STAGES) - hit.time), 3
            )
            row["again"] = max(0, hit.step - view["step"])
            if first := next((r["time"] for r in after if r["kind"] == "train"), None):
                row |= {
                    "recompute_s": round(first - view["time"], 3),
                    "stall_s": round(first - hit.time, 3),
                }
        found.append(row)
    return found


def _without(hit: Hit, later: Sequence[Hit], records: Sequence[Record]) -> int | None:
    """The index of the record of the view that lost the last rank hit by this fault, and by no later one."""
    found = None
    for where, view in enumerate(records):
        if view["kind"] == "view" and view["time"] > hit.time - 0.001:
            again = {
                number
                for other in later
                if other.time < view["time"]
                for number in other.numbers
            }
            if {one["number"] for one in view["lost"]} & (hit.numbers - again):
                found = where
    return found


def medians(rows: Sequence[Record]) -> dict[str, float]:
    """The median of each column of seconds."""
    names = ("detect_s", *STAGES, "recompute_s", "stall_s")
    columns = {name: [row[name] for row in rows if name in row] for name in names}
    return {name: median(values) for name, values in columns.items() if values}

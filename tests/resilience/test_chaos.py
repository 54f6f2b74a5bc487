"""Faults on purpose: they come when and to whom the seed says, and what a run makes of them is judged rightly.

The injector is tested on processes that do nothing and a file that says what a run would (``fake_run.py``).
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import campaign
import chaos
import psutil
import pytest
from campaign import STAGES, Campaign, disturb, rows_of, start_here, wrong
from hosts import unavailable
from injector import KINDS, LASTS, DisturbedRun, Fault, Hit, Injector, schedule

from tests.cases import write_corpus
from tests.conftest import Command
from tests.measured import until_true
from weft.cli.app import app
from weft.errors import WeftError
from weft.recipe import load_recipe


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command is one of weft's here, as it is in ``python bench/chaos.py``."""
    monkeypatch.setattr(app, "registered_commands", [*app.registered_commands])
    chaos.register()


FAKE = str(Path(__file__).with_name("fake_run.py"))


def make_campaign(out: Path, seconds: float, **counts: int) -> Campaign:
    return Campaign(
        Path("a recipe"), None, [], 8, schedule(counts, 0.8 * seconds, 3), seconds, out
    )


def disturbed(
    tmp_path: Path, seconds: float, fault: str = "", ranks: int = 8, **counts: int
) -> tuple[DisturbedRun, Injector]:
    log = tmp_path / "log"
    run = DisturbedRun(
        tmp_path / "run",
        start_here(
            [sys.executable, FAKE, str(tmp_path / "run"), str(ranks), fault], log
        ),
    )
    return run, disturb(
        run, make_campaign(tmp_path, seconds, **counts), (), lambda text: None, log
    )


def reference(tmp_path: Path, steps: int) -> Path:
    (tmp_path / "quiet").mkdir()
    records = [
        {"kind": "train", "step": n, "loss": 1 / n, "tokens": 8 * n}
        for n in range(1, steps + 1)
    ]
    (tmp_path / "quiet/metrics.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in records)
    )
    return tmp_path / "quiet"


def test_the_same_seed_means_the_same_faults() -> None:
    counts = {"kill": 20, "freeze": 6, "link": 5, "leader": 2}
    faults = schedule(counts, 60, 7)
    assert faults == schedule(counts, 60, 7) != schedule(counts, 60, 8)
    assert Counter(fault.kind for fault in faults) == counts
    assert (
        [f.at for f in faults] == sorted(f.at for f in faults)
        and faults[0].at >= 0
        and faults[-1].at <= 60
    )
    # every other one is for ever
    assert sum(f.lasts is None for f in faults if f.kind == "freeze") == 3
    assert all(
        LASTS[f.kind][0] <= f.lasts <= LASTS[f.kind][1]
        for f in faults
        if f.lasts is not None
    )
    assert all(f.lasts is not None for f in faults if f.kind == "link")


@pytest.mark.slow
def test_what_becomes_of_every_fault_is_told(tmp_path: Path) -> None:
    folders = (tmp_path / str(turn) for turn in range(4))

    def disturbances() -> tuple[list[str], dict[str, dict[str, Any]]]:
        (folder := next(folders)).mkdir()
        run, injector = disturbed(
            folder, 2.0, kill=1, leader=1, two=1, slow=1, freeze=1
        )
        assert not psutil.wait_procs(injector.processes.values(), 60)[1]
        rows = {row["fault"]: row for row in rows_of(run, injector.hits)}
        return wrong(run, injector, reference(folder, run.step), 1e-10), rows

    def as_expected(found: tuple[list[str], dict[str, dict[str, Any]]]) -> bool:
        """A busy machine takes a stop of 0.08 s for a longer one, or sees the losses of two faults as one."""
        problems, rows = found
        lost = [row for kind, row in rows.items() if kind != "slow"]
        apart = all(
            row["living"] - len(row["hit"]) <= row.get("survivors", 0) for row in lost
        )
        return not problems and "epoch" not in rows["slow"] and apart

    _, rows = until_true(disturbances, as_expected)
    assert sorted(rows) == ["freeze", "kill", "leader", "slow", "two"]
    assert rows["leader"]["hit"] == [0] and len(rows["two"]["hit"]) == 2
    for kind in ("kill", "leader", "two", "freeze"):
        row = rows[kind]
        assert row["survivors"] < 8
        assert row["layout"] == f"dp={row['survivors']}"
        assert [row[name] for name in STAGES] == [0.001, 0.002, 0.003, 0.004]
        assert row["stall_s"] == pytest.approx(
            row["detect_s"] + 0.01 + row["recompute_s"], abs=0.012
        )
        assert row["recompute_s"] > 0 and row["again"] == 0
    assert rows["freeze"]["detect_s"] > 0.2


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("twice", "recorded twice: steps"),
        ("skips", "not recorded: steps"),
        ("loss", "losses differ by more than 1e-10, from step"),
        ("accuses", "rank 0 is gone, and no fault had hit it"),
    ],
)
def test_what_a_run_does_wrong_is_found(
    tmp_path: Path, fault: str, problem: str
) -> None:
    run, injector = disturbed(tmp_path, 0.8, fault, kill=1)
    found = wrong(run, injector, reference(tmp_path, run.step), 1e-10)
    assert len(found) == 1 and problem in found[0]


def test_whoever_a_cable_cut_off_was_hit_by_it() -> None:
    """The ranks at its other end, too: those of the host that was cut off went on, as the first member was there."""
    hit = Hit(Fault("link", 0.0, 0, 2.0), 100.0, [{"number": 0, "pid": 1}], 2, 3)
    injector = cast(Injector, SimpleNamespace(hits=[hit], left=0))
    for time, count in ((103.0, 0), (150.0, 1)):
        view = {
            "kind": "view",
            "time": time,
            "step": 3,
            "lost": [{"number": 1, "rank": 1, "why": "is silent"}],
        }
        run = cast(DisturbedRun, SimpleNamespace(processes=[], records=[view]))
        assert len(campaign._ended_badly(run, injector)) == count


def test_a_launcher_was_hit_if_all_of_its_ranks_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It fails with the last of them, although others that were added later go on."""
    monkeypatch.setattr("injector.LEAST", 0)
    ranks = [
        psutil.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(120)"])
        for _ in range(2)
    ]
    members = [
        {"number": n, "rank": n, "pid": process.pid} for n, process in enumerate(ranks)
    ]
    launcher = SimpleNamespace(pid=os.getpid(), returncode=1)
    run = SimpleNamespace(
        processes=[launcher],
        records=[],
        step=3,
        members=lambda: members,
        look=lambda: True,
    )
    try:
        for count in (1, 2):
            injector = Injector(
                cast(DisturbedRun, run), [Fault("kill", 0.0, 0)] * count
            )
            injector.work()
            found = campaign._ended_badly(cast(DisturbedRun, run), injector)
            assert len(injector.hits) == count and bool(found) is (count == 1), found
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def test_other_tokens_and_a_short_reference_are_found(tmp_path: Path) -> None:
    run, injector = disturbed(tmp_path, 0.5)
    for record in run.records[-3:]:
        record["tokens"] += 8
    (tokens,) = wrong(run, injector, reference(tmp_path, run.step), 1e-10)
    assert f"other tokens were counted, from step {run.step - 2} on" in tokens
    path = tmp_path / "quiet/metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-3]))
    assert wrong(run, injector, path.parent, 1e-10) == [
        f"{path.parent} has no step {run.step - 2}, {run.step - 1}, {run.step}: it is too short to compare with"
    ]


@pytest.mark.slow
def test_faults_that_would_leave_too_few_ranks_are_reported(tmp_path: Path) -> None:
    run, injector = disturbed(tmp_path, 1.5, ranks=4, kill=4)
    assert len(injector.hits) == 2
    assert wrong(run, injector, reference(tmp_path, run.step), 1e-10) == [
        "2 faults did not happen: too few ranks were left, or the run ended before"
    ]


@pytest.mark.soak
@pytest.mark.slow
def test_a_run_that_hangs_is_ended_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign, "HANGS", 0.7)
    with pytest.raises(
        WeftError, match=r"the run hangs: no step for 1 s after step \d+"
    ):
        disturbed(tmp_path, 20, "hangs", kill=1)
    assert not [
        p
        for p in psutil.process_iter(["cmdline"])
        if str(tmp_path) in " ".join(p.info["cmdline"] or ())
    ]


def test_a_run_that_does_not_start_shows_its_output(tmp_path: Path) -> None:
    log = tmp_path / "log"
    run = DisturbedRun(
        tmp_path / "run",
        start_here([sys.executable, "-c", "print('what is wrong'); exit(2)"], log),
    )
    with pytest.raises(
        WeftError, match=r"has ended by itself; its output ends with:\nwhat is wrong"
    ):
        disturb(run, make_campaign(tmp_path, 1, kill=1), (), lambda text: None, log)


def test_words_that_make_no_sense_are_refused(command: Command, tmp_path: Path) -> None:
    assert set(KINDS) >= {*LASTS, "kill"}
    code, _, err = command("chaos", "quickstart", "--link", "1")
    assert (
        code == 2
        and "--link and --host are for hosts, which have cables; add --hosts 3" in err
    )
    code, _, err = command("chaos", "quickstart", "--layout", "dp=1", "--kill", "1")
    assert code == 2 and "a run of one rank has nobody to go on without it" in err


@pytest.mark.parametrize("name", ["islands", "skippipe", "robust"])
def test_a_run_that_one_rank_does_not_compute_is_refused_before_it_starts(
    command: Command, name: str
) -> None:
    code, _, err = command("chaos", name, "--kill", "1", "--minutes", "0.05")
    assert code == 2 and "which computes something else than ranks with" in err


@pytest.mark.parametrize("name", ["zero-bubble", "secondary", "experts", "coded"])
def test_one_rank_can_be_compared_with(name: str) -> None:
    """Settings for several ranks, which change nothing of what is computed, are left out for it."""
    path = Path(__file__).parents[2] / f"recipes/{name}.toml"
    campaign.check_comparable(path, [], load_recipe(path))


def came_through(
    weft: Command, tmp_path: Path, minutes: float, counts: dict[str, int], *words: str
) -> None:
    """Disturb a small run: losses, tokens and steps are those of a run that nobody has disturbed."""
    recipe = Path(__file__).parents[2] / "recipes/quickstart.toml"
    small = [
        "model.layers=2",
        "model.embed=32",
        "data.seq_len=32",
        "train.dtype=float64",
        "validation.every=0",
    ]
    small += ["observe.split_every=0", "checkpoint.every=200", "optimizer.lr=1e-3"]
    small += [
        "data.tokenizer=bytes",
        f"data.sources=[{{kind='jsonl',path='{write_corpus(tmp_path)}'}}]",
    ]
    told = [
        "chaos",
        recipe,
        "--minutes",
        minutes,
        "--seed",
        1,
        "--json",
        "--out",
        tmp_path / "chaos",
        *words,
    ]
    told += [word for setting in small for word in ("--set", setting)]
    code, out, err = weft(
        *told,
        *(word for kind, count in counts.items() for word in (f"--{kind}", count)),
    )
    assert code == 0, out + err
    found = json.loads(out)
    assert found["wrong"] == [] and len(found["rows"]) == sum(counts.values())


#: Between hosts nobody sees that a silent process only waits for a core.
ON_HOSTS = ("--hosts", "3", "--set", "resilience.detect=5")


@pytest.mark.soak
def test_a_run_comes_through_faults(command: Command, tmp_path: Path) -> None:
    came_through(
        command, tmp_path, 0.1, {"leader": 1, "freeze": 1}, "--layout", "dp=2,shard=2"
    )


@pytest.mark.soak
def test_a_run_comes_through_a_minute_of_faults(
    command: Command, tmp_path: Path
) -> None:
    """On three hosts where there can be network namespaces, else on this machine, which has no cables to pull."""
    # No more than six ranks can bear, as new ones come late on a machine that has much to do.
    counts = {"leader": 1, "freeze": 1} | ({} if unavailable() else {"link": 1})
    came_through(
        command,
        tmp_path,
        1.0,
        counts,
        "--layout",
        "dp=3,shard=2",
        *(() if unavailable() else ON_HOSTS),
    )


@pytest.mark.soak
@pytest.mark.skipif(bool(why := unavailable()), reason=why)
def test_eight_ranks_on_three_hosts_come_through_everything(
    command: Command, tmp_path: Path
) -> None:
    counts = {"kill": 20, "leader": 5, "two": 5, "freeze": 10, "link": 8, "slow": 5}
    came_through(command, tmp_path, 20.0, counts, "--layout", "dp=4,shard=2", *ON_HOSTS)

"""The harness of bench/checkpoint_faults.py finds what DCP is known for, so that finding nothing in Weft counts."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from checkpoint_faults import (
    DCP,
    DCP_2,
    WEFT,
    Bench,
    Ended,
    Side,
    Tally,
    folder_of,
    judge,
    save,
    table,
    totals,
)
from watched_disk import Fault, Journal, Watch, put

pytestmark = pytest.mark.filterwarnings("ignore")


def harmless(tally: Tally) -> bool:
    return not (tally.wrong or tally.lost or tally.hung or tally.claimed)


@pytest.fixture
def bench(quick_disk: Path) -> Bench:
    return Bench(quick_disk, most=16)


@pytest.mark.slow
def test_flipped_bits(bench: Bench) -> None:
    for side in (WEFT, DCP):
        bench.damage("flip", side, "data", "flip")
    ours, dcp = bench.tallies
    assert dcp.wrong > 8
    assert harmless(ours) and ours.refused == ours.named > 8


@pytest.mark.soak
def test_errors_in_a_thread_that_writes(bench: Bench) -> None:
    """DCP with two threads says that it has saved; what it saved lacks tensors."""
    for side in (WEFT, DCP_2):
        bench.at_every_call("io", side, "io")
    ours, dcp = bench.tallies
    assert dcp.claimed > 0 and dcp.wrong == 0
    assert harmless(ours)


@pytest.mark.soak
def test_a_rank_dies_while_a_folder_is_saved_again(bench: Bench) -> None:
    # DCP's mistakes are at few of its calls
    for side, kind, most in ((WEFT, "other", 16), (DCP, "kill", 40)):
        bench.most = most
        bench.at_every_call("again", side, kind, world=2, again=True)
    ours, dcp = bench.tallies
    assert dcp.wrong > 0 and dcp.lost > 0
    assert harmless(ours) and ours.before == ours.runs


@pytest.mark.soak
@pytest.mark.parametrize("side", [WEFT, DCP], ids=lambda side: side.name)
def test_a_new_folder_that_is_cut_off_does_no_harm(bench: Bench, side: Side) -> None:
    bench.at_every_call("kill", side, "kill")
    (tally,) = bench.tallies
    assert harmless(tally) and tally.before > 0


@pytest.mark.slow
def test_a_save_without_a_fault_is_counted_as_one(bench: Bench) -> None:
    for side in (WEFT, DCP):
        root = bench.fresh(side)
        ended = save(side, folder_of(root, 2), 2, world=1)
        tally = bench.tally("none", side)
        assert judge(tally, side, root, ended, "none") == "new"
        (root / "step-000002" / (".metadata" if side is DCP else "weft.json")).unlink()
        assert judge(tally, side, root, Ended([]), "none") == "before"
        assert (
            judge(tally, side, root, ended, "none") == "before" and tally.claimed == 1
        )
    assert "|    3 |" in table(bench.tallies) and totals(bench.tallies)[1].new == 1


def test_every_call_is_seen_and_can_fail(tmp_path: Path) -> None:
    def work() -> None:
        (tmp_path / "folder").mkdir()
        with open(tmp_path / "folder" / "a", "wb") as file:
            file.write(b"x" * 100_000)
            file.write(b"y")
            file.flush()
            os.fsync(file.fileno())
        os.rename(tmp_path / "folder" / "a", tmp_path / "b")
        (tmp_path / "b").unlink()

    seen = Fault("io", 0)
    with Watch(tmp_path, seen).watching():
        work()
    assert seen.calls == 7  # mkdir, open, 2 writes, fsync, rename, unlink
    (tmp_path / "folder").rmdir()
    for kind, at in (("io", 1), ("full", 3), ("tight", 1)):
        with Watch(tmp_path, Fault(kind, at)).watching(), pytest.raises(OSError):
            work()
        (tmp_path / "folder" / "a").unlink(missing_ok=True)
        if (tmp_path / "folder").exists():
            (tmp_path / "folder").rmdir()


@pytest.mark.parametrize("ordered", [True, False])
def test_what_was_synced_survives_a_power_failure(
    tmp_path: Path, ordered: bool
) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    (root / "old").write_bytes(b"old")
    journal = Journal(root)

    def sync(path: Path) -> None:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)

    with Watch(root, journal).watching():
        (root / "folder").mkdir()
        sync(root)
        with open(root / "folder" / "a", "wb") as file:
            file.write(b"abcdef")
            file.flush()
            os.fsync(file.fileno())
            file.write(b"ghi")
        sync(root / "folder")
        os.rename(root / "folder" / "a", root / "b")
        (root / "old").write_bytes(b"new")
    seen = set()
    for seed in range(200):
        found = journal.after_failure(len(journal.log), ordered, random.Random(seed))
        names = {Path(p).name for p in found}
        assert (
            "folder" in names
            and {"a", "b"} & names
            and found[str(root / "old")] in (b"old", b"new", b"", b"n", b"ne")
        )
        content = next(v for p, v in found.items() if Path(p).name in ("a", "b"))
        assert (
            content is not None and content.startswith(b"abcdef") and len(content) <= 9
        )
        seen.add((tuple(sorted(names)), content))
    assert len(seen) > 4
    for path in sorted(root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    put(found)
    assert {
        str(p): p.read_bytes() if p.is_file() else None for p in root.rglob("*")
    } == found

"""One run at a time uses a run's folder and its checkpoints' places; what the dead have left hinders nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.cases import write_corpus
from tests.checkpoint.test_resume import go, tree
from weft.checkpoint import lease as module
from weft.checkpoint.address import open_storage
from weft.checkpoint.lease import Lease, PlaceInUse
from weft.checkpoint.storage import LocalStorage, StorageError
from weft.errors import WeftError
from weft.observe.run_metrics import read_metrics
from weft.recipe import Recipe
from weft.train.runs import open_run

#: Files that want the S3 server: it starts for them once, and stops after them.
TOGETHER = "s3"
HOLD = """
import sys, time
from pathlib import Path
from weft.checkpoint.lease import Lease
from weft.checkpoint.storage import LocalStorage
with Lease() as lease:
    lease.take([LocalStorage(Path(sys.argv[1]))])
    print("held", flush=True)
    time.sleep(600)
"""


@contextmanager
def holder(place: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that uses ``place``."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(place)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_living_hold_a_place_and_the_dead_do_not(tmp_path: Path) -> None:
    place = LocalStorage(tmp_path / "run")
    with holder(place.root) as process:
        for stopped in (False, True):
            os.kill(process.pid, signal.SIGSTOP if stopped else signal.SIGCONT)
            with (
                Lease() as mine,
                pytest.raises(
                    PlaceInUse, match=rf"in use by process {process.pid} on "
                ),
            ):
                mine.take([LocalStorage(tmp_path / "other"), place])
            assert not (tmp_path / "other").exists(), "all places or none"
        os.kill(process.pid, signal.SIGKILL)
        # a zombie is dead as well
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with Lease() as mine:
            mine.take([place])
            assert len(place.list("lease/")) == 1
    assert not list(place.root.iterdir())


@pytest.mark.slow
def test_a_holder_elsewhere_is_known_by_its_renewals(tmp_path: Path) -> None:
    place, mine = LocalStorage(tmp_path / "run"), Lease(beat=0.05, patience=2)
    with (
        mock.patch.object(module, "machine_id", return_value="elsewhere"),
        Lease(beat=0.05, patience=1000) as far,
    ):
        far.take([place])
        with mock.patch.object(module, "machine_id", return_value="here"):
            with pytest.raises(PlaceInUse, match="in use by"):
                mine.take([place])
            with far._renewing:  # it stands still
                mine.take([place])
            for _ in range(1200):
                if far.lost:
                    break
                threading.Event().wait(0.05)
            with pytest.raises(
                WeftError,
                match=r"taken over by another run \(process \d+ on .*this one has to end",
            ):
                far.check()
            mine.check()
            assert len(module._leases(place)) == 1, (
                "holders: an object being renewed stands there twice for a moment"
            )
            mine.close()


def test_a_lease_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    """Somebody clears the folder while the run goes on, or its disk fills up for a while."""
    place = LocalStorage(tmp_path)
    with Lease(beat=1000) as mine:
        mine.take([place])
        LocalStorage(tmp_path / "lease").clear()
        mine._renew_all()
        with mock.patch.object(
            LocalStorage,
            "create",
            side_effect=StorageError("cannot create: No space left"),
        ):
            mine._renew_all()
        mine._renew_all()
        assert not mine.lost and len(place.list("lease/")) == 1


def test_runs_that_start_at_once_get_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    leases, found = [Lease() for _ in range(6)], []
    threads = [
        threading.Thread(
            target=lambda held=held: found.append(
                open_run(Recipe(name="x"), None, None, held, 0)
            )
        )
        for held in leases
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(run.folder.name for run in found) == [
        "x",
        "x-2",
        "x-3",
        "x-4",
        "x-5",
        "x-6",
    ]
    for held in leases:
        held.close()
    assert not list(tmp_path.glob("runs/*"))


def test_a_folder_that_another_run_makes_meanwhile_stays(tmp_path: Path) -> None:
    folder, make = tmp_path / "runs" / "x", Path.mkdir

    def late(path: Path, *given: Any, **more: Any) -> None:
        if path == folder:
            make(path)  # the other's
        make(path, *given, **more)

    with mock.patch.object(Path, "mkdir", late), pytest.raises(FileExistsError):
        Lease().take([LocalStorage(folder)], new=True)
    assert folder.is_dir()


@pytest.mark.slow
def test_a_run_is_refused_beside_a_living_one(pool: Any, tmp_path: Path) -> None:
    """Neither its folder nor a place of its checkpoints is for two, and the refused one leaves nothing."""
    corpus = write_corpus(tmp_path)
    values = tree(corpus, {"shard": 2}, train__steps=2)
    values["checkpoint"] = {"to": str(tmp_path / "far")}
    pool.run(2, go, values, str(tmp_path / "run"))
    records = read_metrics(tmp_path / "run")
    for place in ("run", "far"):
        with holder(tmp_path / place) as process, pytest.raises(WeftError) as refused:
            pool.run(2, go, values, str(tmp_path / "run"), "auto")
        assert f"{tmp_path / place} is in use by process {process.pid}" in str(
            refused.value
        )
    assert read_metrics(tmp_path / "run") == records
    values["train"]["steps"] = 3
    assert pool.run(2, go, values, str(tmp_path / "run"), "auto") == [(3, 15)] * 2
    assert (
        not (tmp_path / "run/lease").exists() and not (tmp_path / "far/lease").exists()
    )


def test_places_on_an_object_store(bucket: str) -> None:
    place = open_storage(bucket)
    with Lease(beat=0.2) as first:
        first.take([place])
        (before,) = place.list("lease/")
        with (
            Lease(beat=0.2, patience=5) as second,
            pytest.raises(PlaceInUse, match=f"{bucket} is in use by process"),
        ):
            second.take([place])
        for _ in range(1200):
            if before not in place.list("lease/"):
                break
            threading.Event().wait(0.05)
        assert before not in place.list("lease/") and not first.lost, "it is renewed"
    assert not place.list("lease/")

"""Where a run keeps its checkpoints: several places, each with its own cadence; which of them a resume takes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections import namedtuple
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch

from tests.cases import write_corpus
from tests.checkpoint.test_resume import go, series, state_of, tree
from tests.cli.test_commands import TINY
from tests.conftest import Command
from tests.started import Started
from weft.checkpoint.convert import convert
from weft.checkpoint.levels import (
    LevelStore,
    Thinning,
    check_hosts,
    check_levels,
    levels_of,
)
from weft.checkpoint.storage import LocalStorage, StorageError
from weft.checkpoint.store import (
    PLACES,
    candidates,
    checkpoint_places,
    committed_checkpoints,
    load_newest,
    verify,
)
from weft.checkpoint.weights import open_pretrained
from weft.errors import UsageError, WeftError
from weft.observe.run_metrics import read_metrics
from weft.recipe import Checkpoint, build_recipe
from weft.train.setup import prepare

TWO = {"shard": 2}


def leveled(
    corpus: str, layout: dict[str, Any], *levels: dict[str, Any], **change: Any
) -> dict[str, Any]:
    values = tree(corpus, layout, **change)
    values["checkpoint"] = {"levels": list(levels)} | (
        {"on_error": "stop"} if change.get("stop") else {}
    )
    return values


def names(place: Any) -> list[str]:
    return [p.name for p in committed_checkpoints(place)]


def memory_of(run: Path) -> Path:
    settings = Checkpoint.model_validate({"levels": [{"to": "memory", "every": 1}, {}]})
    return Path(str(levels_of(settings, run)[0].place))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize(("section", "said"), [
    ({"levels": [{"every": 1}], "every": 3}, "give every level its own"),
    ({"levels": [{"every": 1}, {"every": 3}]}, "two levels have the same 'to'"),
    ({"to": "memory"}, "does not outlast the run"),
    ({"levels": [{"every": 1}, {"to": "memory", "every": 3}]}, "does not outlast the run"),
    ({"levels": [{"to": "memory"}, {}]}, "need 'every'"),
    ({"to": "gs://bucket/x"}, "no storage that Weft knows"),
    ({"to": "s3://KEYID:SECRETWORD@bucket/x"}, "credentials go into AWS_"),
    ({"levels": [{"to": "s3://KEYID:SECRETWORD@bucket/x"}]}, "credentials go into AWS_"),
    ({"levels": [{"too": "x"}]}, "did you mean 'to'?"),
])  # fmt: skip
def test_mistakes_cost_one_line_without_credentials(
    section: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        build_recipe({"checkpoint": section})
    text = str(caught.value)
    assert (
        said in text
        and text.startswith("recipe: ")
        and "\n" not in text
        and "SECRETWORD" not in text
    )


@pytest.mark.soak
def test_each_level_has_its_own_cadence(pool: Any, corpus: str, tmp_path: Path) -> None:
    run, far = tmp_path / "run", tmp_path / "far"
    levels = (
        {"to": "memory", "every": 1},
        {"every": 2, "keep": 9},
        {"to": str(far), "every": 5, "keep": 1},
    )
    pool.run(2, go, leveled(corpus, TWO, *levels), str(run))
    assert names(run / "checkpoints") == ["step-000002", "step-000004", "step-000006"]
    assert names(far) == ["step-000006"], "the final checkpoint, and one stays"
    assert not memory_of(run).exists()
    saved = [
        e["message"]
        for e in read_metrics(run)["event"]
        if e["message"].startswith("checkpoint ")
    ]
    assert [m.rpartition("-")[2] for m in saved if str(memory_of(run)) in m] == [
        f"00000{n}" for n in range(1, 7)
    ]
    assert [m.rpartition("-")[2] for m in saved if str(far) in m] == [
        "000005",
        "000006",
    ]
    assert [str(p) for p in candidates(run)][:2] == [
        str(run / "checkpoints/step-000006"),
        str(far / "step-000006"),
    ]
    assert checkpoint_places(run)[2:] == [
        LocalStorage(memory_of(run)),
        LocalStorage(far),
    ]


def test_resume_takes_the_newest_of_all_levels_that_verifies(
    pool: Any, corpus: str, tmp_path: Path
) -> None:
    run, far = tmp_path / "run", tmp_path / "far"
    levels = {"every": 2, "keep": 9}, {"to": str(far), "every": 3, "keep": 9}
    pool.run(2, go, leveled(corpus, TWO, *levels), str(run))
    expected = series(run)
    shutil.rmtree(run / "checkpoints/step-000006")
    damaged = next((far / "step-000006/data").iterdir())
    damaged.write_bytes(damaged.read_bytes()[:-1])
    heard: list[str] = []
    found, _ = load_newest([run], verify, heard.append)
    assert (
        str(found) == str(run / "checkpoints/step-000004")
        and "step-000006 is damaged" in heard[0]
    )
    pool.run(1, go, leveled(corpus, {}, *levels), str(run), "auto")
    said = [e["message"] for e in read_metrics(run)["event"]]
    assert any("resumed from" in m and "step-000004" in m for m in said) and any(
        "trying the one before" in m for m in said
    )
    assert series(run) == pytest.approx(expected, rel=1e-10)
    assert names(far) == ["step-000003", "step-000006", "step-000006-2"]


def test_a_new_run_does_not_mix_with_another(
    pool: Any, corpus: str, tmp_path: Path
) -> None:
    far = str(tmp_path / "far")
    values = leveled(corpus, {}, {"to": far})
    pool.run(1, go, values, str(tmp_path / "a"))
    with pytest.raises(
        UsageError, match=f"{far} already holds checkpoints; .* --resume {far}"
    ):
        pool.run(1, go, values, str(tmp_path / "b"))
    assert not (tmp_path / "b").exists()
    values["train"]["steps"] = 8
    assert pool.run(1, go, values, str(tmp_path / "b"), "auto") == [(8, 40)], (
        "on a machine without the run's folder"
    )
    assert names(far) == ["step-000006", "step-000008"]


def test_too_little_memory_is_said_before_training(tmp_path: Path) -> None:
    levels = levels_of(
        Checkpoint.model_validate(
            {"levels": [{"to": "memory", "every": 1, "keep": 3}, {}]}
        ),
        tmp_path,
    )
    usage = namedtuple("usage", "free")(3 << 30)
    with mock.patch.object(shutil, "disk_usage", return_value=usage):
        with pytest.raises(
            WeftError,
            match=r"3 checkpoints and the next one in memory need 4 GiB of /dev/shm, where 3",
        ):
            check_levels(levels, 1 << 30, fresh=False)
        check_levels(levels, 3 << 28, fresh=False)
    assert not memory_of(tmp_path).exists()


def seen(shared: str) -> list[str]:
    """Two ranks that believe to be on two hosts: a folder that both see, one that each has for itself, and memory."""
    import torch.distributed as dist

    said = []
    for place in (Path(shared) / "all", Path(shared) / f"of-{dist.get_rank()}"):
        try:
            with mock.patch("weft.checkpoint.levels.VISIBLE_S", 0.5):
                check_hosts([LevelStore(LocalStorage(place), 1, 1)], 2, 1)
            said.append("")
        except WeftError as error:
            said.append(str(error))
    try:
        check_hosts(
            [LevelStore(LocalStorage(Path(shared)), 1, 1, in_memory=True)], 2, 1
        )
    except UsageError as error:
        said.append(str(error))
    return said


def test_several_hosts_need_a_place_that_all_see(pool: Any, tmp_path: Path) -> None:
    for fine, alone, memory in pool.run(2, seen, str(tmp_path)):
        assert (
            not fine
            and "not the same folder on all hosts" in alone
            and "is of one host" in memory
        )
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def said_by_a_mixed_pair(shared: str) -> str:
    """One of two ranks was started with another that is lost by now, and takes its host for that of all."""
    import torch.distributed as dist

    with pytest.raises(UsageError) as raised:
        check_hosts(
            [LevelStore(LocalStorage(Path(shared)), 1, 1, in_memory=True)],
            2,
            2 - dist.get_rank(),
        )
    return str(raised.value)


def test_ranks_agree_on_whether_there_are_several_hosts(
    pool: Any, tmp_path: Path
) -> None:
    """Else one of them would go on to another collective than the rest, and all would wait for ever."""
    assert all(
        "is of one host" in said
        for said in pool.run(2, said_by_a_mixed_pair, str(tmp_path))
    )


class Stubborn(LocalStorage):
    """Gives nothing back."""

    def clear(self) -> None:
        raise StorageError(f"cannot delete {self.root}: Permission denied")


class Away(LocalStorage):
    """Is not there."""

    def folders(self) -> list[str]:
        raise StorageError(f"cannot list {self.root}: the endpoint refuses connections")


def test_failing_to_delete_is_told_and_harms_nothing(
    pool: Any, corpus: str, tmp_path: Path
) -> None:
    pool.run(1, go, leveled(corpus, {}, {"every": 1, "keep": 9}), str(tmp_path / "run"))
    thinning = Thinning()
    thinning.start(LevelStore(Stubborn(tmp_path / "run/checkpoints"), 1, 2))
    thinning.close()
    (said,) = thinning.problems()
    assert (
        said.startswith("old checkpoints were not deleted: cannot delete ")
        and not thinning.problems()
    )
    assert names(tmp_path / "run/checkpoints")[-2:] == ["step-000005", "step-000006"]


def test_a_place_that_cannot_be_read_is_told(
    pool: Any, corpus: str, tmp_path: Path
) -> None:
    pool.run(1, go, leveled(corpus, {}, {}), str(tmp_path / "run"))
    heard: list[str] = []
    found = candidates(Away(tmp_path / "s3"), tmp_path / "run", warn=heard.append)
    assert [p.name for p in found] == [
        "step-000006"
    ] and "refuses connections; looking elsewhere" in heard[0]
    with pytest.raises(StorageError, match="refuses connections"):
        candidates(Away(tmp_path / "s3"), tmp_path / "run")
    with pytest.raises(StorageError, match="refuses connections"):
        candidates(Away(tmp_path / "s3"), warn=heard.append)


def test_from_a_converted_checkpoint_only_weights_are_taken(
    pool: Any, corpus: str, tmp_path: Path
) -> None:
    pool.run(1, go, leveled(corpus, {}, {}), str(tmp_path / "run"))
    convert(tmp_path / "run", tmp_path / "converted", optimizer=False)
    values = leveled(corpus, TWO, {})
    with pytest.raises(
        WeftError,
        match=r"has no position in the data; .*--set model\.from=.*converted$",
    ):
        pool.run(2, go, values, str(tmp_path / "b"), str(tmp_path / "converted"))
    values["model"] |= {"from": str(tmp_path / "converted"), "layers": 7}
    with pytest.raises(
        UsageError,
        match=r"model\.layers = 7, but .* is of a model with 2.*; leave out model\.layers$",
    ):
        prepare(build_recipe(values))
    # the shape is that of the weights
    values["model"] = {"from": str(tmp_path / "converted")}
    values["train"]["steps"] = 1
    values["optimizer"]["lr"] = 1e-12
    pool.run(2, go, values, str(tmp_path / "b"))
    before = state_of(tmp_path / "run/checkpoints/step-000006", leveled(corpus, {}, {}))
    after = state_of(tmp_path / "b/checkpoints/step-000001", leveled(corpus, {}, {}))
    assert all(
        torch.allclose(after[n], before[n], atol=1e-10, rtol=0)
        for n in before
        if n.startswith("model.")
    )
    name = "blocks.0.attention.q_norm.scale"
    with pytest.raises(
        WeftError, match=rf"of another model:\n  missing   model\.{name} \[9, 9\]"
    ):
        open_pretrained(tmp_path / "converted").values(
            name, mock.Mock(shape=(9, 9)), ((0, 9), (0, 9))
        )


@pytest.mark.slow
def test_a_killed_run_goes_on_from_memory(
    corpus: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    levels = '[[checkpoint.levels]]\nto = "memory"\nevery = 1\n[[checkpoint.levels]]\nevery = 100\n'
    text = TINY.format(corpus=corpus, cache=tmp_path / "cache").replace(
        "[generate]", f"{levels}[generate]"
    )
    (tmp_path / "tiny.toml").write_text(text)
    words = ["train", "tiny.toml", "--layout", "shard=2", "--out", "run"]
    memory = memory_of(tmp_path / "run")
    process = Started(
        *words,
        "--set",
        "train.steps=5000",
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 300
        while not LocalStorage(memory).holds("step-000005/weft.json"):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        family = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        # ranks are not of its process group; they end with it
        assert not psutil.wait_procs(family, 60)[1]
        reached = max(int(name[5:11]) for name in names(memory))
        assert memory.stat().st_mode & 0o777 == 0o700 and not names(
            tmp_path / "run/checkpoints"
        )
        assert (tmp_path / "run" / PLACES).is_file()
        more = [
            "--out",
            "run",
            "--resume",
            "auto",
            "--set",
            f"train.steps={reached + 2}",
        ]
        code, out, err = command("train", "tiny.toml", *more)
        assert code == 0, err
        assert f"resumed from {memory}/step-{reached:06d}" in out
        assert (
            names(tmp_path / "run/checkpoints") == [f"step-{reached + 2:06d}"]
            and not memory.exists()
        )
    finally:
        shutil.rmtree(memory, ignore_errors=True)

"""Checkpoints written from the state's own memory: the same files as by way of a copy, and failures named alike."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.cases import recipe, write_corpus
from weft.checkpoint import run_checkpoints
from weft.checkpoint.in_place_writer import InPlaceWriter
from weft.checkpoint.load import StoredCheckpoint
from weft.checkpoint.save import Saver
from weft.checkpoint.staging import WriterProcess
from weft.checkpoint.storage import LocalStorage
from weft.errors import WeftError
from weft.layout.dims import Tensor
from weft.layout.mesh import Mesh
from weft.layout.parts import NAMES, Part
from weft.train.setup import prepare
from weft.train.training import train_job

VALUES = {
    "w": torch.arange(35.0).view(7, 5).t(),  # not contiguous
    "half": torch.arange(6).to(torch.bfloat16),
    "count": torch.tensor(3),
    "none": torch.empty(0, 4),
}


def parts(
    values: dict[str, torch.Tensor], replica: int = 0, replicas: int = 1
) -> dict[str, Part]:
    return {
        name: Part(
            v,
            tuple((0, n) for n in v.shape),
            Tensor(tuple(v.shape), NAMES[v.dtype]),
            replica,
            replicas,
        )
        for name, v in values.items()
    }


def save(folder: Path, in_place: bool) -> Saver:
    saver = Saver(print, in_place=in_place)
    saver.save(LocalStorage(folder), 1, parts(VALUES), {"a": 1}, {"f": b"x"})
    saver.finish()
    saver.close()
    return saver


def test_files_are_those_of_a_copy(tmp_path: Path) -> None:
    savers = [save(tmp_path / f"{in_place}", in_place) for in_place in (False, True)]
    assert isinstance(savers[1].reports[0].report.seconds["write"], float)
    first, second = (
        [file.read_bytes() for file in (tmp_path / name / "data").iterdir()]
        for name in ("False", "True")
    )
    assert first == second
    back = {name: torch.zeros(v.shape, dtype=v.dtype) for name, v in VALUES.items()}
    StoredCheckpoint(LocalStorage(tmp_path / "True")).load(parts(back))
    assert all(torch.equal(back[name], v) for name, v in VALUES.items())


def test_a_second_save_has_the_newer_values(tmp_path: Path) -> None:
    saver = Saver(print, in_place=True)
    values = {"w": torch.zeros(3)}
    for step in (1, 2):
        values["w"] += 1
        saver.save(
            LocalStorage(tmp_path / f"{step}"), step, parts(values), {}, {}, lazy=True
        )
        saver.wait_for_copy()
    values["w"].zero_()
    saver.finish()
    saver.close()
    for step in (1, 2):
        back = {"w": torch.zeros(3)}
        StoredCheckpoint(LocalStorage(tmp_path / f"{step}")).load(parts(back))
        assert back["w"].tolist() == [step] * 3
    assert [(s.step, s.report.committed) for s in saver.reports] == [
        (1, False), (1, True), (2, False), (2, True),
    ]  # fmt: skip


class SameName(LocalStorage):
    """A folder whose address is the same on all ranks, as they would otherwise not be about to save the same."""

    def __str__(self) -> str:
        return "here"


def one_cannot_write(folder: str) -> tuple[str, float]:
    rank = dist.get_rank()
    saver = Saver(print, in_place=True, timeout=60)
    if rank == 1:
        folder = f"{folder}/file/below"
    begun = time.monotonic()
    try:
        storage = SameName(Path(folder))
        values = {"w": torch.arange(4096.0)}
        saver.save(storage, 1, parts(values, rank, 2), {}, {})
        saver.finish()
    except WeftError as error:
        return str(error), time.monotonic() - begun
    finally:
        saver.close()
    return "", 0.0


@pytest.mark.slow(2)
def test_a_rank_that_cannot_write_is_named_at_once(pool: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    said = pool.run(2, one_cannot_write, str(tmp_path))
    assert said[0][0] == said[1][0] and "step 1 was not saved" in said[0][0]
    assert "another rank" not in said[0][0] and max(s for _, s in said) < 30
    assert not (tmp_path / "checkpoint.json").exists()


def test_runs_that_save_at_the_end_alone_have_no_copy(tmp_path: Path) -> None:
    kinds = []

    class Watched(Saver):
        def close(self, at_once: bool = False) -> None:
            kinds.append(type(self._writer))
            super().close(at_once)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_checkpoints, "Saver", Watched)
        for every in (0, 1):
            settings = recipe(
                write_corpus(tmp_path), checkpoint__every=every, train__steps=1
            )
            train_job(prepare(settings), Mesh.single(), tmp_path / f"{every}")
    assert kinds == [InPlaceWriter, WriterProcess]
    first, second = (
        StoredCheckpoint(LocalStorage(place))
        for place in sorted(tmp_path.glob("*/checkpoints/step-*"))
    )
    assert [b.digest for b in first.all_blocks()] == [
        b.digest for b in second.all_blocks()
    ]

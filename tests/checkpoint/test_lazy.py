"""A copy that goes on beside training holds what the state was when the save began."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.cases import recipe, write_corpus
from weft.checkpoint.load import StoredCheckpoint
from weft.checkpoint.save import Saver
from weft.checkpoint.storage import LocalStorage
from weft.layout.dims import Tensor
from weft.layout.mesh import Mesh
from weft.layout.parts import Part
from weft.recipe import Recipe
from weft.train import training
from weft.train.build_step import build_step
from weft.train.setup import prepare
from weft.train.step import Step, StepContext
from weft.train.step_values import StepResult
from weft.train.training import train_job

SLOW = 0.3  # seconds before a copy begins
copy = Saver._copy


@torch.no_grad()
def copied(places: list[torch.Tensor], values: list[torch.Tensor]) -> float:
    for place, value in zip(places, values, strict=True):
        place.copy_(value)
    return 0.0


def slow_copy(
    self: Saver, places: list[torch.Tensor], values: list[torch.Tensor]
) -> Callable[[], float]:
    def work() -> float:
        time.sleep(SLOW)
        return copied(places, values)

    return self._thread.submit(work).result


def states(folder: Path, corpus: str) -> dict[str, dict[str, torch.Tensor]]:
    """Train five steps on this process, save after every second; what each checkpoint holds."""
    settings = recipe(corpus, checkpoint__every=2, checkpoint__keep=9, train__steps=5)
    train_job(prepare(settings), Mesh.single(), folder)
    found = {}
    for place in sorted((folder / "checkpoints").iterdir()):
        checkpoint = StoredCheckpoint(LocalStorage(place))
        values = {
            n: torch.zeros(t.shape, dtype=torch.float64)
            for n, t in checkpoint.tensors.items()
        }
        checkpoint.load(
            {
                n: Part(v, tuple((0, k) for k in v.shape), checkpoint.tensors[n])
                for n, v in values.items()
            }
        )
        found[place.name] = values
    return found


def copy_after_update(updated: threading.Event) -> Callable[..., Callable[[], float]]:
    """A copy that begins when the next update is done, however slow the machine is; after the last there is none."""
    saves = iter(range(1, 4))

    def late(
        self: Saver, places: list[torch.Tensor], values: list[torch.Tensor]
    ) -> Callable[[], float]:
        updated.clear()
        if next(saves) == 3:
            updated.set()

        def work() -> float:
            updated.wait(60)
            return copied(places, values)

        return self._thread.submit(work).result

    return late


def without_waiting(updated: threading.Event) -> Callable[..., Step]:
    """A step that changes the state whatever is being copied."""

    def build(context: StepContext, settings: Recipe) -> Step:
        step = build_step(replace(context, before_update=lambda: None), settings)
        plain = step.take

        def take(*args: Any) -> list[StepResult]:
            result = plain(*args)
            updated.set()
            return result

        step.take = take  # type: ignore[method-assign]
        return step

    return build


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.slow
def test_training_waits_for_the_copy_before_it_changes_the_state(
    tmp_path: Path,
) -> None:
    corpus = write_corpus(tmp_path)
    expected = states(tmp_path / "eager", corpus)
    assert list(expected) == ["step-000002", "step-000004", "step-000005"]
    with mock.patch.object(Saver, "_copy", slow_copy):
        found = states(tmp_path / "slow", corpus)
        assert all(same(found[step], expected[step]) for step in expected)
    # Were nobody to wait before the update, the copies would hold later states: this test can fail.
    updated = threading.Event()
    with (
        mock.patch.object(Saver, "_copy", copy_after_update(updated)),
        mock.patch.object(training, "build_step", without_waiting(updated)),
    ):
        found = states(tmp_path / "impatient", corpus)
    assert not same(found["step-000002"], expected["step-000002"])


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def test_training_does_not_copy_what_rests_on_the_host_beside_a_gpu() -> None:
    """Such as moments: a stream copies the weights, and the thread for copies the moments."""
    values = [torch.arange(3.0).as_subclass(OnGpu), torch.arange(4.0)]
    places, saver = [torch.zeros(3), torch.zeros(4)], Saver(print)
    by_training: list[tuple[int, bool]] = []

    def seen(into: list[torch.Tensor], values: list[torch.Tensor], **_: Any) -> None:
        training = threading.current_thread() is threading.main_thread()
        by_training.extend((len(value), training) for value in values)
        copied(into, values)

    fake = {name: mock.MagicMock() for name in ("Stream", "Event", "stream", "current_stream")}  # fmt: skip
    with (
        mock.patch.multiple(torch.cuda, **fake),
        mock.patch.object(torch, "_foreach_copy_", seen),
    ):
        saver._copy(places, values)()
    saver.close()
    assert sorted(by_training) == [(3, True), (4, False)]
    assert [place.tolist() for place in places] == [[0, 1, 2], [0, 1, 2, 3]]


@pytest.mark.parametrize("lazy", [False, True])
def test_what_changes_after_the_copy_is_not_saved(tmp_path: Path, lazy: bool) -> None:
    values = torch.arange(12.0).view(3, 4)
    saver, returned = Saver(print), threading.Event()

    def late(
        self: Saver, places: list[torch.Tensor], values: list[torch.Tensor]
    ) -> Callable[[], float]:
        """A copy that begins when ``save`` has returned; were that to wait for the copy, it would never end."""
        return self._thread.submit(
            lambda: copied(places, values) if returned.wait(30) else -1.0
        ).result

    with mock.patch.object(Saver, "_copy", late if lazy else copy):
        local = Part(values, ((0, 3), (0, 4)), Tensor((3, 4), "F32"))
        saver.save(LocalStorage(tmp_path), 1, {"w": local}, {}, {}, lazy=lazy)
        returned.set()
        saver.wait_for_copy()
    values.zero_()
    saver.finish()
    report = saver.reports[0].report
    saver.close()
    assert report.seconds["copy"] >= 0, "save waited for the copy"
    assert {"stage", "copy", "wait", "cut", "hash", "write"} <= report.seconds.keys()
    back = torch.zeros(3, 4)
    StoredCheckpoint(LocalStorage(tmp_path)).load(
        {"w": Part(back, ((0, 3), (0, 4)), Tensor((3, 4), "F32"))}
    )
    assert torch.equal(back, torch.arange(12.0).view(3, 4))

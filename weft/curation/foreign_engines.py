"""Engines of other projects that do the tasks of a data run: datatrove's executor, and Ray."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weft.curation.shard_tasks import TaskSetting, Words
from weft.curation.task_workers import (
    Engine,
    OnDone,
    replied_result,
    reply_to,
    setting_from,
    setting_words,
)
from weft.errors import WeftError


@contextmanager
def datatrove_engine(setting: TaskSetting, workers: int) -> Iterator[Engine]:
    """Yield an engine that does each stage as a run of datatrove's ``LocalPipelineExecutor``.

    ``workers``: number of its processes. Raises :class:`WeftError` if datatrove is not installed.
    """
    try:
        from datatrove.executor import LocalPipelineExecutor

        from weft.curation.datatrove_block import WeftTasks
    except ImportError as error:
        raise _missing("datatrove", error) from None

    def do(tasks: Sequence[Words], done: OnDone) -> None:
        with tempfile.TemporaryDirectory(dir=setting.work, prefix="datatrove-") as name:
            folder = Path(name)
            (folder / "setting.json").write_text(json.dumps(setting_words(setting)))
            (folder / "tasks.json").write_text(json.dumps(tasks))
            LocalPipelineExecutor(
                [WeftTasks(name)],
                tasks=len(tasks),
                workers=max(1, min(workers, len(tasks))),
                logging_dir=str(folder / "logs"),
                skip_completed=False,
            ).run()
            for rank in range(len(tasks)):
                done(
                    rank,
                    replied_result(json.loads((folder / f"{rank}.json").read_text())),
                )

    yield do


@contextmanager
def ray_engine(setting: TaskSetting, workers: int) -> Iterator[Engine]:
    """Yield an engine that does tasks as Ray tasks, in a running cluster if there is one, else on this host.

    All nodes must see the folder of the run. ``workers``: number of processes on this host. Raises :class:`WeftError`
    if Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise _missing("ray", error) from None
    here = not ray.is_initialized()
    if here:
        try:
            ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
        except ConnectionError:
            ray.init(
                num_cpus=max(1, workers), include_dashboard=False, log_to_driver=False, logging_level="ERROR"
            )  # fmt: skip
    words = json.dumps(setting_words(setting))
    remote: Any = ray.remote(_task_of_ray)

    def do(tasks: Sequence[Words], done: OnDone) -> None:
        running = {
            remote.remote(words, json.dumps(task)): index
            for index, task in enumerate(tasks)
        }
        while running:
            (ready, *_), _ = ray.wait(list(running))
            done(running.pop(ready), replied_result(json.loads(ray.get(ready))))

    try:
        yield do
    finally:
        if here:
            ray.shutdown()


def _task_of_ray(setting: str, task: str) -> str:
    return json.dumps(
        reply_to(lambda: setting_from(json.loads(setting)), json.loads(task))
    )


def _missing(name: str, error: ImportError) -> WeftError:
    how = "pip install 'weft[curation]'" if name == "datatrove" else f"pip install {name}"  # fmt: skip
    return WeftError(
        f"--engine {name} needs {name}, which cannot be imported ({error}); {how}, or leave it out"
    )

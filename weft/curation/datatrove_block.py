"""Blocks for datatrove's executors: the tasks of a data run, and steps of Weft's in a pipeline of datatrove's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from weft.curation.data_operators import Filter, Joint, Mapper
from weft.curation.data_pipeline import DataPipeline
from weft.curation.documents import Documents
from weft.curation.operator_code import build_operator
from weft.curation.shard_tasks import Words
from weft.curation.step_counts import reason_kind
from weft.errors import UsageError


def to_documents(batch: Sequence[Document]) -> Documents:
    """Return documents of the library datatrove as Weft's documents. Their metadata become columns."""
    names = dict.fromkeys(name for doc in batch for name in doc.metadata)
    columns = {name: [doc.metadata.get(name) for doc in batch] for name in names}
    return Documents([doc.id for doc in batch], [doc.text for doc in batch], columns)


def from_documents(documents: Documents) -> list[Document]:
    """Return Weft's documents as documents of the library datatrove. Columns become metadata; values that are None are
    left out.
    """
    return [
        Document(
            text=text,
            id=name,
            metadata={
                column: values[row]
                for column, values in documents.columns.items()
                if values[row] is not None
            },
        )
        for row, (name, text) in enumerate(
            zip(documents.ids, documents.texts, strict=True)
        )
    ]


class WeftSteps(PipelineStep):
    """Step of a datatrove pipeline that applies mappers and filters of Weft's.

    ``steps``: the tables ``[[steps]]`` of a pipeline's file. ``plugins``: modules that register operators. ``batch``:
    documents that an operator is given at a time. Raises :class:`UsageError` for an operator that must see all
    documents, which a stream cannot give it.
    """

    name = "Weft"
    type = "FILTER"

    def __init__(
        self,
        steps: Sequence[Mapping[str, Any]],
        plugins: Sequence[str] = (),
        batch: int = 1000,
    ) -> None:
        super().__init__()
        self.steps, self.plugins, self.batch = list(steps), list(plugins), batch
        self._operators()  # what is wrong is said where the pipeline is written

    def _operators(self) -> list[Mapper | Filter]:
        from weft.curation.read_pipeline import build_pipeline

        tree = {"sources": [{}], "steps": self.steps, "plugins": self.plugins}
        pipeline: DataPipeline = build_pipeline(tree, "WeftSteps")
        operators = []
        for number, step in enumerate(pipeline.seeded_steps()):
            operator = build_operator(number, step)
            if isinstance(operator, Joint):
                raise UsageError(
                    f"steps[{number}] ({step.operator}) must see all documents, which a datatrove pipeline has not; "
                    "run it by 'weft data run'"
                )
            operators.append(operator)
        return operators

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        operators = self._operators()
        stream = iter(data)
        while batch := list(islice(stream, self.batch)):
            self.stat_update("total", value=len(batch))
            documents = to_documents(batch)
            for operator in operators:
                if not len(documents):
                    break
                documents = self._applied(operator, documents)
            self.stat_update("forwarded", value=len(documents))
            yield from from_documents(documents)

    def _applied(self, operator: Mapper | Filter, documents: Documents) -> Documents:
        if isinstance(operator, Mapper):
            return operator.map(documents)
        documents = documents.with_columns(operator.statistics(documents))
        reasons = operator.reasons(documents.columns)
        for reason in filter(None, reasons):
            self.stat_update(f"dropped_{reason_kind(reason)}")
        return documents.select([i for i, reason in enumerate(reasons) if not reason])


class WeftTasks(PipelineStep):
    """Step of a datatrove pipeline that does one task of a data run in each of datatrove's ranks.

    ``folder``: its ``setting.json`` and ``tasks.json`` hold the settings and the list of tasks. The reply of each rank
    is written to a file in it.
    """

    name = "Weft data run"
    type = "TASKS"

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        from weft.curation.task_workers import reply_to, setting_from

        folder = Path(self.folder)
        setting = json.loads((folder / "setting.json").read_text())
        task: Words = json.loads((folder / "tasks.json").read_text())[rank]
        reply = reply_to(lambda: setting_from(setting), task)
        (folder / f"{rank}.json").write_text(json.dumps(reply))
        yield from ()

"""Datatrove: a filter, a formatter or another step of datatrove's, as an operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

from pydantic import Field

from weft.curation.data_pipeline import DataStep
from weft.curation.documents import Documents
from weft.errors import UsageError, WeftError
from weft.registry import register
from weft.section import Section


class DatatroveSettings(Section):
    """Settings of a step of the library datatrove: its class and arguments."""

    block: str = Field(
        description="Class of the step, such as 'datatrove.pipeline.filters.GopherQualityFilter'."
    )
    arguments: dict[str, Any] = Field(
        {},
        description="Arguments of the class by name, such as { min_doc_words = 20 }.",
    )
    changes: bool = Field(
        False,
        description=(
            "Whether a filter also changes the texts that it keeps, as C4QualityFilter does. The report then does not "
            "count the reasons for which it drops documents."
        ),
    )


@register(
    "operator",
    "datatrove",
    settings=DatatroveSettings,
    title="Filters, formatters and other steps of datatrove",
    proof="tests/curation/test_datatrove.py",
)
def datatrove_step(step: DataStep) -> DatatroveFilter | DatatroveMapper:
    """Return the operator that runs a step of the library datatrove: a filter, or a mapper for any other step that
    works on single documents. ``step``: the table ``[[steps]]`` of the data pipeline, with class and arguments of the
    step.
    """
    settings = step.own(DatatroveSettings)
    block = _built(settings)
    from datatrove.pipeline.filters.base_filter import BaseFilter
    from datatrove.pipeline.readers.base import BaseReader

    if isinstance(block, BaseReader):
        raise UsageError(
            f"{settings.block} reads; name what it reads as [[sources]], in a pipeline of Weft's steps are on documents"
        )
    if isinstance(block, BaseFilter) and not settings.changes:
        return DatatroveFilter(block, settings)
    return DatatroveMapper(block, settings)


def _built(settings: DatatroveSettings) -> Any:
    if find_spec("datatrove") is None:
        raise WeftError(
            "operator 'datatrove' needs datatrove; pip install 'weft[curation]'"
        )
    module, _, name = settings.block.rpartition(".")
    try:
        return getattr(import_module(module), name)(**settings.arguments)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UsageError(f"block = {settings.block!r}: {error}") from None


def _fingerprint() -> str:
    from importlib.metadata import version

    return f"datatrove {version('datatrove')}"


class DatatroveFilter:
    """Drops the documents that a filter of the library datatrove drops, and gives its reasons. Metadata that the filter
    adds to documents become columns.
    """

    late: ClassVar = ()

    def __init__(self, block: Any, settings: DatatroveSettings) -> None:
        self.block, self.settings = block, settings
        self.column = f"{settings.block.rpartition('.')[2]}_reason"

    def fingerprint(self) -> str:
        return _fingerprint()

    def statistics(self, documents: Documents) -> dict[str, list[Any]]:
        from datatrove.pipeline.filters.base_filter import get_filter_result

        from weft.curation.datatrove_block import from_documents

        batch = from_documents(documents)
        results = [get_filter_result(r) for r in self.block.filter_batch(batch)]
        added: dict[str, list[Any]] = {}
        for row, doc in enumerate(batch):
            if doc.text != documents.texts[row]:
                raise UsageError(
                    f"block = {self.settings.block!r} changes texts; set changes = true in this step"
                )
            for name, value in doc.metadata.items():
                if name not in documents.columns:
                    added.setdefault(name, [None] * len(batch))[row] = value
        reasons = [
            "" if kept else (reason or "dropped by the filter")
            for kept, reason in results
        ]
        return added | {self.column: reasons}

    def reasons(self, columns: Mapping[str, Sequence[Any]]) -> list[str]:
        return list(columns[self.column])


class DatatroveMapper:
    """Changes documents, each by itself, by a step of the library datatrove."""

    def __init__(self, block: Any, settings: DatatroveSettings) -> None:
        self.block, self.settings = block, settings

    def fingerprint(self) -> str:
        return _fingerprint()

    def map(self, documents: Documents) -> Documents:
        from weft.curation.datatrove_block import from_documents, to_documents

        batch = from_documents(documents)
        return to_documents([new for doc in batch for new in self.block.run([doc])])

"""Applies the steps of a pipeline to one shard: mappers and filters, and the two passes of joint operators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weft.curation.data_operators import Decision, Filter, Joint, Mapper, Operator
from weft.curation.document_files import table_bytes
from weft.curation.documents import Documents
from weft.curation.kept_results import (
    FailedDocument,
    check_columns,
    isolate,
    kept_statistics,
    kept_summary,
    plain_values,
)
from weft.curation.operator_code import StepDigests
from weft.curation.shard_state import ShardDocuments, document_keys, write_base
from weft.curation.step_counts import LISTED, StepCounts, count_step
from weft.curation.work_folder import content_digest, words_digest
from weft.errors import WeftError


@dataclass(frozen=True)
class RunningStep:
    """A step of a data pipeline with its operator, built in the process of a task, and its digests. ``name``: name for
    error lines, such as "steps[2] (words)".
    """

    name: str
    operator: Operator
    digests: StepDigests


@dataclass(frozen=True)
class AppliedStep:
    """Result of applying a step to a shard: the shard afterwards, and counts of what the step did.

    ``digest``: digest of the step's output. ``computed``: number of documents for which the operator was called.
    """

    shard: ShardDocuments
    counts: StepCounts
    digest: str
    computed: int


def apply_step(work: Path, step: RunningStep, shard: ShardDocuments) -> AppliedStep:
    """Apply the mapper or filter of ``step`` to a shard; return the shard afterwards, with counts. ``work``: the folder
    of intermediate files.
    """
    operator = step.operator
    if not len(shard.documents):
        empty = shard.with_statistics({}, step.digests.early)
        return AppliedStep(empty, StepCounts(), content_digest(b""), 0)
    if isinstance(operator, Filter):
        return _filtered(work, step, operator, shard)
    assert isinstance(operator, Mapper)
    return _mapped(work, step, operator, shard)


def _filtered(
    work: Path, step: RunningStep, operator: Filter, shard: ShardDocuments
) -> AppliedStep:
    file = _results_file(work, "statistics", step, shard)
    with blame_step(step.name):
        statistics = kept_statistics(
            file, shard.documents, shard.keys, operator.statistics
        )
    able = shard.select(statistics.indices)
    able = able.with_statistics(statistics.columns, step.digests.early)
    columns: Mapping[str, Sequence[Any]] = able.documents.columns
    with blame_step(step.name):
        reasons = _checked_reasons(operator.reasons(columns), len(able.documents)) if able.keys else []  # fmt: skip
    return _dropped(shard, able, statistics.columns, reasons, statistics.failures, statistics.computed)  # fmt: skip


def _dropped(
    before: ShardDocuments,
    able: ShardDocuments,
    columns: dict[str, list[Any]],
    reasons: list[str],
    failures: Sequence[FailedDocument],
    computed: int,
) -> AppliedStep:
    """Return the result of a step that drops documents. ``able``: the documents that had no error."""
    counts = count_step(able.documents, able.keys, reasons, columns)
    _add_failures(counts, before.documents, failures)
    table = {"reason": reasons} | {name: columns[name] for name in sorted(columns)}
    digest = content_digest(table_bytes(table, able.keys))
    kept = [i for i, reason in enumerate(reasons) if not reason]
    return AppliedStep(able.select(kept), counts, digest, computed)


def _add_failures(
    counts: StepCounts, documents: Documents, failures: Sequence[FailedDocument]
) -> None:
    counts.entered += len(failures)
    counts.failed = len(failures)
    pairs = sorted((documents.ids[f.place], f.error) for f in failures)
    counts.failures = pairs[:LISTED]


def _mapped(
    work: Path, step: RunningStep, operator: Mapper, shard: ShardDocuments
) -> AppliedStep:
    with blame_step(step.name):
        results, failures = isolate(shard.documents, operator.map)
        mapped = join_documents([documents for _, documents in results])
    if twice := _first_twice(mapped.ids):
        raise WeftError(
            f"{step.name}: two documents are called {twice!r}; ids must be unique"
        )
    failed = {failure.place for failure in failures}
    able = shard.select([i for i in range(len(shard.keys)) if i not in failed])
    gone = _left_out(able.documents.ids, mapped.ids)
    counts = count_step(able.documents, able.keys, gone, {})
    counts.left = len(mapped)
    _add_failures(counts, shard.documents, failures)
    if hasattr(operator, "missing"):
        lacking = sorted(tuple(each) for each in operator.missing())
        counts.missing, counts.lacking = len(lacking), lacking[:LISTED]
    state = write_base(work, mapped)
    keys = document_keys(mapped)
    after = ShardDocuments(
        mapped, keys, list(range(len(mapped))), (), state.texts, state.context
    )
    return AppliedStep(after, counts, state.texts, len(shard.documents))


def join_documents(parts: Sequence[Documents]) -> Documents:
    """Return the documents of all ``parts``. A column that a part does not have is None for the part's documents."""
    if len(parts) == 1:
        return _checked(parts[0])
    names = dict.fromkeys(name for part in parts for name in part.columns)
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for part in parts:
        _checked(part)
        for name, values in columns.items():
            values += part.columns.get(name, [None] * len(part))
    return Documents(
        [name for part in parts for name in part.ids],
        [text for part in parts for text in part.texts],
        columns,
    )


def _checked(documents: Documents) -> Documents:
    lengths = {len(documents.texts), *(len(v) for v in documents.columns.values())}
    if lengths - {len(documents.ids)}:
        raise WeftError(
            f"it returned columns of {sorted(lengths)} values for {len(documents.ids)} documents"
        )
    columns = {name: plain_values(v) for name, v in documents.columns.items()}
    return Documents(list(documents.ids), list(documents.texts), columns)


def _left_out(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Return the reason for each document before a mapper that no document after it comes from.

    A new document comes from one whose id it begins with: "a.txt#2-b" from "a.txt#2", but "a.txt#21" does not.
    """
    known, kept = set(before), set(after)
    for name in kept - known:
        ends = (i for i in range(1, len(name)) if not name[i].isalnum())
        kept.update(name[:end] for end in ends)
    return ["" if name in kept else "left out by the mapper" for name in before]


def _first_twice(names: Sequence[str]) -> str:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return ""


def _results_file(
    work: Path, kind: str, step: RunningStep, shard: ShardDocuments
) -> Path:
    """Return the file of an operator's results for the documents of one file, given the steps before."""
    name = words_digest(shard.texts, shard.context, step.digests.early)
    return work / kind / f"{name}.results"


class ShardSummary(NamedTuple):
    """Summary of a shard for a joint operator, with the shard itself.

    ``shard``: the documents on which the operator raised no error. ``arrays``: the summary, by name. ``counts``: counts
    of the documents with errors. ``computed``: number of documents for which the operator was called.
    """

    shard: ShardDocuments
    arrays: dict[str, np.ndarray]
    counts: StepCounts
    computed: int


def summarize_shard(
    work: Path, step: RunningStep, shard: ShardDocuments
) -> ShardSummary:
    """Compute the summary of a shard for the joint operator of ``step``. ``work``: the folder of intermediate files."""
    operator = step.operator
    assert isinstance(operator, Joint)
    if not shard.keys:
        return ShardSummary(shard, {}, StepCounts(), 0)
    file = _results_file(work, "summaries", step, shard)
    with blame_step(step.name):
        summary = kept_summary(file, shard.documents, shard.keys, operator.summarize)
    counts = StepCounts()
    _add_failures(counts, shard.documents, summary.failures)
    return ShardSummary(
        shard.select(summary.indices), summary.arrays, counts, summary.computed
    )


def apply_decision(
    step: RunningStep, shard: ShardDocuments, decision: Decision
) -> AppliedStep:
    """Apply to a shard the ``decision`` of the joint operator of ``step``: drop documents, and add columns to the
    others. Return the shard afterwards, with counts.
    """
    columns = decision.columns
    able = shard.with_decided(columns, step.digests.early)
    return _dropped(shard, able, columns, decision.reasons, (), 0)


def checked_decisions(
    decisions: Sequence[Decision], sizes: Sequence[int]
) -> list[Decision]:
    """Convert decisions to plain Python values. Raises :class:`WeftError` if a decision has not one entry for each
    document.

    ``sizes``: number of documents of each shard.
    """
    if len(decisions) != len(sizes):
        raise WeftError(
            f"it returned {len(decisions)} decisions for {len(sizes)} shards"
        )
    checked = []
    for decision, size in zip(decisions, sizes, strict=True):
        columns = {name: plain_values(v) for name, v in decision.columns.items()}
        check_columns(columns, size)
        checked.append(Decision(columns, _checked_reasons(decision.reasons, size)))
    return checked


def _checked_reasons(reasons: Sequence[str], documents: int) -> list[str]:
    values = plain_values(reasons)
    if len(values) != documents or not all(isinstance(v, str) for v in values):
        raise WeftError(f"it must return a text for each of {documents} documents")
    return values


@contextmanager
def blame_step(name: str) -> Iterator[None]:
    """Convert errors inside the context to a :class:`WeftError` whose line begins with the step's ``name``."""
    try:
        yield
    except WeftError as error:
        raise type(error)(f"{name}: {error}") from error
    except Exception as error:
        line = (str(error).splitlines() or [""])[0]
        raise WeftError(f"{name}: {type(error).__name__}: {line}") from error


def operator_notes(step: RunningStep) -> list[str]:
    """Return the lines that the operator's method ``notes`` has for the user, if it has one."""
    if not hasattr(step.operator, "notes"):
        return []
    with blame_step(step.name):
        return [str(line) for line in step.operator.notes()]

"""What a step did to documents: counts by reason, samples, histograms of statistics; parts add up to the whole."""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from weft.curation.documents import Documents

#: Samples for each reason, characters of a sample, and documents with errors that are listed.
SAMPLES, EXCERPT, LISTED = 3, 600, 20
#: Reasons that are told apart at most; the rarest beyond are counted together.
REASONS = 50
#: The end of a reason that names another document, such as " of stdlib:ast.py".
_OF_ID = re.compile(r" (of|as|in|with) \S+:.*", re.DOTALL)
#: Width of a histogram's bins: neighbouring bins are this factor apart.
_FACTOR = math.log(1.02)


@dataclass(frozen=True)
class DroppedSample:
    """A document that a step has dropped, as an example for the report: its id, the reason, and its text.

    ``key``: a hash by which examples are chosen, so that the choice does not depend on shards.
    """

    key: str
    id: str
    reason: str
    text: str


@dataclass
class StepCounts:
    """Counts of a step over some documents.

    Attributes:
        ``entered``, ``left``: number of documents before and after the step.
        ``sources``: number of documents that the step dropped, by label of the source.
        ``reasons``: number of dropped documents by reason.
        ``samples``: a few dropped documents by reason.
        ``histograms``: for each statistic and each bin of its values, the number of kept and of dropped documents.
        ``failed``: number of documents on which the operator raised an error; they are not among the dropped.
        ``failures``: pairs of id and error for the first of the failed documents.
        ``missing``: number of documents that a mapper could not make from others, and left out.
        ``lacking``: pairs for the first of the missing documents: id of the document it was to be made from, and
            reason.
    """

    entered: int = 0
    left: int = 0
    sources: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    samples: dict[str, list[DroppedSample]] = field(default_factory=dict)
    histograms: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    failed: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)
    missing: int = 0
    lacking: list[tuple[str, str]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the counts as values that JSON can hold; the inverse is :meth:`from_json`."""
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> StepCounts:
        """Build counts from ``values``, the JSON values that :meth:`as_json` returned."""
        samples = {
            reason: [DroppedSample(**sample) for sample in drawn]
            for reason, drawn in values["samples"].items()
        }
        failures = [(name, error) for name, error in values["failures"]]
        lacking = [(name, reason) for name, reason in values.get("lacking", ())]
        own = {"samples": samples, "failures": failures, "lacking": lacking}
        return StepCounts(**{**values, **own})


def label_of(name: str) -> str:
    """Return the label of the source in ``name``, which is the id of a document."""
    return name.partition(":")[0]


def reason_kind(reason: str) -> str:
    """Return the general part of ``reason``, why a step dropped a document, without details of this document: without
    the text after ": ", and without an id.
    """
    return _OF_ID.sub("", reason.partition(": ")[0])


def count_step(
    documents: Documents,
    keys: Sequence[bytes],
    reasons: Sequence[str],
    statistics: Mapping[str, Sequence[Any]],
) -> StepCounts:
    """Return the counts of what a step did to ``documents``, which had no error.

    ``keys``: 16-byte digest of each document. ``reasons``: why each is dropped, "" if it is kept. ``statistics``: the
    columns that the step has added.
    """
    counts = StepCounts(len(documents), sum(not reason for reason in reasons))
    dropped = [i for i, reason in enumerate(reasons) if reason]
    counts.sources = dict(Counter(label_of(documents.ids[i]) for i in dropped))
    kinds = {i: reason_kind(reasons[i]) for i in dropped}
    counts.reasons = dict(Counter(kinds.values()))
    by_reason: dict[str, list[int]] = {}
    for i in dropped:
        by_reason.setdefault(kinds[i], []).append(i)
    for reason, indices in by_reason.items():
        counts.samples[reason] = [
            DroppedSample(
                keys[i].hex(),
                documents.ids[i],
                reasons[i],
                documents.texts[i][:EXCERPT],
            )
            for i in heapq.nsmallest(SAMPLES, indices, key=lambda i: keys[i])
        ]
    for name, values in statistics.items():
        histogram = _histogram(values, reasons)
        if histogram:
            counts.histograms[name] = histogram
    return _with_few_reasons(counts)


def _histogram(values: Sequence[Any], reasons: Sequence[str]) -> dict[str, list[int]]:
    bins: dict[str, list[int]] = {}
    for value, reason in zip(values, reasons, strict=True):
        if isinstance(value, int | float) and math.isfinite(value):
            bins.setdefault(str(_bin_of(float(value))), [0, 0])[bool(reason)] += 1
    return bins


def _bin_of(value: float) -> int:
    """Return the number of a value's bin: 0 for zero, and below zero for what is negative."""
    size = abs(value)
    if size < 1e-6:
        return 0
    number = 1 + round(math.log(size / 1e-6) / _FACTOR)
    return number if value > 0 else -number


def bin_value(number: int) -> float:
    """Return the value in the middle of bin ``number`` of a histogram. Bins are logarithmic; bin 0 is the value 0."""
    if number == 0:
        return 0.0
    return math.copysign(1e-6 * math.exp((abs(number) - 1) * _FACTOR), number)


def _with_few_reasons(counts: StepCounts) -> StepCounts:
    order = sorted(counts.reasons, key=lambda r: (-counts.reasons[r], r))
    if len(order) > REASONS:
        rest = order[REASONS:]
        counts.reasons["other reasons"] = sum(counts.reasons.pop(r) for r in rest)
        for reason in rest:
            counts.samples.pop(reason, None)
    return counts


def add_counts(parts: Sequence[StepCounts]) -> StepCounts:
    """Return the sum of the counts of a step over shards. ``parts``: the counts of each shard. Only a few of the
    dropped and failed documents are kept as examples.
    """
    total = StepCounts()
    for part in parts:
        total.entered += part.entered
        total.left += part.left
        total.failed += part.failed
        total.failures += part.failures
        total.missing += part.missing
        total.lacking += part.lacking
        for name in ("sources", "reasons"):
            sums = Counter(getattr(total, name))
            sums.update(getattr(part, name))
            setattr(total, name, dict(sorted(sums.items())))
        for reason, drawn in part.samples.items():
            every = [*total.samples.get(reason, []), *drawn]
            total.samples[reason] = sorted(every, key=lambda s: s.key)[:SAMPLES]
        for name, bins in part.histograms.items():
            merged = total.histograms.setdefault(name, {})
            for number, (kept, dropped) in bins.items():
                before = merged.get(number, [0, 0])
                merged[number] = [before[0] + kept, before[1] + dropped]
    total.failures = sorted(total.failures)[:LISTED]
    total.lacking = sorted(total.lacking)[:LISTED]
    return _with_few_reasons(total)

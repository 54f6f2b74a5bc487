"""The tasks of a data run: what one process does at a time, from plain data to plain data."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from weft.curation.data_operators import Decision, Joint
from weft.curation.data_pipeline import DataPipeline
from weft.curation.document_files import columns_of, read_table, table_bytes
from weft.curation.kept_results import array_bytes, read_arrays
from weft.curation.operator_code import build_operator, step_digests
from weft.curation.shard_state import ShardState, load_shard, save_shard, write_base
from weft.curation.shard_steps import (
    RunningStep,
    apply_decision,
    apply_step,
    blame_step,
    checked_decisions,
    operator_notes,
    summarize_shard,
)
from weft.curation.source_units import SourceUnit, read_unit
from weft.curation.step_counts import StepCounts, label_of
from weft.curation.work_folder import (
    content_digest,
    read_intact,
    read_json_file,
    words_digest,
    write_atomically,
    write_json_file,
)
from weft.curation.written_documents import (
    column_types,
    write_shard_documents,
    write_shard_tokens,
)
from weft.data.source_report import SourceReport

#: Version of the tasks: another one makes everything anew.
FORMAT = 2

#: A task and its result: values that JSON can hold.
Words = dict[str, Any]


@dataclass(frozen=True)
class TaskSetting:
    """Settings that all tasks of a data run share: the pipeline, and the folder of intermediate files (``work``)."""

    pipeline: DataPipeline
    work: Path

    @cached_property
    def steps(self) -> list[RunningStep]:
        """The steps of the pipeline in order, each with its operator built. They are built once in each process."""
        running = []
        for number, step in enumerate(self.pipeline.seeded_steps()):
            operator = build_operator(number, step)
            name = step_name(number, step.operator)
            running.append(RunningStep(name, operator, step_digests(step, operator)))
        return running


def step_name(number: int, operator: str) -> str:
    """Return the name of a step in error lines, such as "steps[2] (words)".

    ``number``: the step's index in the pipeline. ``operator``: name of its operator.
    """
    return f"steps[{number}] ({operator})"


def task_file(work: Path, task: Words) -> Path:
    """Return the path of the file with the result of ``task``, given by the JSON values that describe it. ``work``: the
    folder of intermediate files.
    """
    # a shard's number is not what the shard is
    own = {key: value for key, value in task.items() if key != "shard"}
    return work / "tasks" / f"{words_digest(FORMAT, own)}.json"


def done_before(work: Path, task: Words) -> Words | None:
    """Return the result of a task, as JSON values, if an earlier run has done it; otherwise None. ``task``: JSON values
    that describe the task.

    A task counts as done if all files that it has written exist. ``work``: the folder of intermediate files.
    """
    record = read_json_file(task_file(work, task))
    if not isinstance(record, dict):
        return None
    result: Words = record["result"]
    return result if all((work / name).is_file() for name in record["files"]) else None


def run_task(setting: TaskSetting, task: Words) -> Words:
    """Do a task of a data run, record its result in a file, and return the result, as JSON values. ``setting``:
    settings that all tasks share. ``task``: JSON values that describe the task.
    """
    work = {"read": _read, "steps": _steps, "decide": _decide, "write": _write, "tokens": _tokens}  # fmt: skip
    result = work[task["kind"]](setting, task)
    stops = any(
        counts["failed"] and setting.pipeline.steps[int(number)].on_error == "stop"
        for number, counts in result.get("counts", {}).items()
    )
    if not stops:
        record = {"result": result, "files": result["files"]}
        write_json_file(task_file(setting.work, task), record)
    return result


def _state_files(state: ShardState) -> list[str]:
    rows = [f"rows/{state.rows}.arrow"] if state.rows else []
    return [f"texts/{state.texts}.arrow", *rows]


def _read(setting: TaskSetting, task: Words) -> Words:
    """Read a unit of a source; each part of it becomes a shard."""
    unit = SourceUnit.from_json(task["unit"])
    source = setting.pipeline.sources[unit.source]
    report = SourceReport()
    states, documents, characters = [], 0, 0
    for part in read_unit(unit, source, task["most"], report):
        states.append(write_base(setting.work, part))
        documents += len(part)
        characters += sum(map(len, part.texts))
    return {
        "states": [state.as_json() for state in states],
        "documents": documents,
        "characters": characters,
        "skipped": report.skipped,
        "first": report.first,
        "empty": report.empty,
        "files": [name for state in states for name in _state_files(state)],
    }


def _steps(setting: TaskSetting, task: Words) -> Words:
    """Apply a decision if there is any, then consecutive mappers and filters, and summarize for a joint operator."""
    shard = load_shard(setting.work, ShardState(**task["state"]))
    counts: dict[str, StepCounts] = {}
    digests: dict[str, str] = {}
    computed: dict[str, int] = {}
    if task["decided"] is not None:
        number = task["decided"]["step"]
        decision = _read_decision(setting.work, task["decided"]["digest"])
        result = apply_decision(setting.steps[number], shard, decision)
        shard = result.shard
        counts[str(number)], digests[str(number)] = result.counts, result.digest
    for number in task["steps"]:
        result = apply_step(setting.work, setting.steps[number], shard)
        shard = result.shard
        counts[str(number)], digests[str(number)] = result.counts, result.digest
        computed[str(number)] = result.computed
    files, summary_digest = [], ""
    if task["summarize"] is not None:
        number = task["summarize"]
        summary = summarize_shard(setting.work, setting.steps[number], shard)
        shard = summary.shard
        if summary.counts.failed:
            counts[str(number)] = summary.counts
        computed[str(number)] = summary.computed
        ids = np.frombuffer(json.dumps(shard.documents.ids).encode(), np.uint8)
        data = array_bytes(summary.arrays | {"_ids": ids})
        summary_digest = content_digest(data)
        write_atomically(_summary_file(setting.work, summary_digest), data)
        files.append(f"summed/{summary_digest}.arrays")
    state = save_shard(setting.work, shard)
    return {
        "state": state.as_json(),
        "counts": {number: c.as_json() for number, c in counts.items()},
        "digests": digests,
        "computed": computed,
        "summary": summary_digest,
        "types": {n: [*t] for n, t in column_types(shard.documents).items()},
        "files": [*files, *_state_files(state)],
    }


def _summary_file(work: Path, digest: str) -> Path:
    return work / "summed" / f"{digest}.arrays"


def _decide(setting: TaskSetting, task: Words) -> Words:
    """Let a joint operator decide about the documents of all shards, and keep what it says to the user of that."""
    step = setting.steps[task["step"]]
    assert isinstance(step.operator, Joint)
    ids: list[list[str]] = []
    summaries: list[Mapping[str, np.ndarray]] = []
    for digest in task["summaries"]:
        arrays = read_arrays(read_intact(_summary_file(setting.work, digest), digest))
        ids.append(json.loads(arrays.pop("_ids").tobytes()))
        summaries.append(arrays)
    held = [number for number, names in enumerate(ids) if names]
    decisions = [Decision({}, []) for _ in ids]
    with blame_step(step.name):
        if held:
            decided = step.operator.decide(
                [ids[number] for number in held], [summaries[number] for number in held]
            )
            checked = checked_decisions(decided, [len(ids[number]) for number in held])
            for number, decision in zip(held, checked, strict=True):
                decisions[number] = decision
    notes = operator_notes(step) if held else []
    digests = [_write_decision(setting.work, decision) for decision in decisions]
    files = [f"decisions/{digest}.arrow" for digest in digests]
    return {"decisions": digests, "notes": notes, "files": files}


def _write_decision(work: Path, decision: Decision) -> str:
    columns = {f"column:{name}": values for name, values in decision.columns.items()}
    keys = [bytes(16)] * len(decision.reasons)
    data = table_bytes({"reason": decision.reasons} | columns, keys)
    digest = content_digest(data)
    write_atomically(work / "decisions" / f"{digest}.arrow", data)
    return digest


def _read_decision(work: Path, digest: str) -> Decision:
    data = read_intact(work / "decisions" / f"{digest}.arrow", digest)
    columns = columns_of(read_table(data))
    columns.pop("_key")
    reasons = columns.pop("reason")
    own = {name.removeprefix("column:"): values for name, values in columns.items()}
    return Decision(own, reasons)


def _write(setting: TaskSetting, task: Words) -> Words:
    """Write the documents of a shard in the format of the output."""
    shard = load_shard(setting.work, ShardState(**task["state"]))
    file = write_shard_documents(
        setting.work, shard.documents, task["format"], task["schema"]
    )
    documents = Counter(map(label_of, shard.documents.ids))
    characters: Counter[str] = Counter()
    for name, text in zip(shard.documents.ids, shard.documents.texts, strict=True):
        characters[label_of(name)] += len(text)
    return {
        "file": file.name,
        "digest": file.digest,
        "documents": dict(documents),
        "characters": dict(characters),
        "files": [file.name],
    }


def _tokens(setting: TaskSetting, task: Words) -> Words:
    """Write the token ids of a shard."""
    shard = load_shard(setting.work, ShardState(**task["state"]))
    counts, file = write_shard_tokens(
        setting.work, shard.documents, Path(task["tokenizer"])
    )
    return {"file": file.name, "digest": file.digest, "tokens": counts, "files": [file.name]}  # fmt: skip

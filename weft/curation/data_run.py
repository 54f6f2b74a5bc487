"""Runs a pipeline of data: stages of tasks over shards, each done once, and what they add up to."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from weft.curation.curation_page import curation_page
from weft.curation.data_operators import Joint
from weft.curation.data_pipeline import DataPipeline
from weft.curation.document_files import arrow
from weft.curation.run_output import (
    RunParts,
    ShardOutput,
    SourceCounts,
    StepOutcome,
    publish,
    run_notes,
)
from weft.curation.shard_steps import operator_notes
from weft.curation.shard_tasks import TaskSetting, Words, done_before, task_file
from weft.curation.source_units import (
    SourceUnit,
    shard_bytes,
    source_labels,
    source_units,
)
from weft.curation.step_counts import StepCounts, add_counts
from weft.curation.task_workers import Engine, local_engine
from weft.curation.work_folder import (
    WORK,
    sole_writer,
    write_atomically,
    write_json_file,
)
from weft.curation.written_documents import common_schema
from weft.data.corpora import source_fingerprint, unread_files
from weft.errors import UsageError, WeftError, nearest
from weft.recipe.masked import masked_values

#: What does the tasks of a run.
ENGINES = ("local", "datatrove", "ray")

#: Called with the name of a stage, the number of its tasks that are done, and of all its tasks.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class DataResult:
    """Result of a data run.

    Attributes:
        ``out``: the folder that it has written.
        ``steps``: outcome of each step.
        ``sources``: numbers of documents read, dropped and left, of each source.
        ``notes``: lines for the user, about what was left out and why.
        ``problem``: why the output cannot be used, as a line, or "".
        ``seconds``: duration of the run.
        ``tasks``, ``reused``: number of tasks, and number of tasks whose results an earlier run had computed.
    """

    out: Path
    steps: tuple[StepOutcome, ...]
    sources: tuple[SourceCounts, ...]
    notes: tuple[str, ...]
    problem: str
    seconds: float
    tasks: int
    reused: int

    @property
    def documents(self) -> int:
        """Number of documents that are left at the end, over all sources."""
        return sum(source.documents for source in self.sources)


def run_pipeline(
    pipeline: DataPipeline,
    out: str | Path,
    workers: int | None = None,
    engine: str = "local",
    progress: Progress | None = None,
) -> DataResult:
    """Run a pipeline as ``weft data run`` does, and return what it has done.

    ``out``: folder for documents, tokens, ``manifest.json``, ``card.json`` and ``report.html``. An interrupted run goes
    on where it was interrupted. Results of an earlier run into the same folder are reused as far as nothing has
    changed. ``workers``: number of processes, by default one for each core; 0: this process alone. ``engine``: "local",
    "datatrove" or "ray". Raises :class:`WeftError`, which names the file, step or document that failed.
    """
    if engine not in ENGINES:
        raise UsageError(f"--engine {engine!r} is not possible; {nearest(engine, ENGINES)}")  # fmt: skip
    arrow()  # before anything that takes time
    began = time.monotonic()
    out = Path(out).absolute()
    if workers is None:
        workers = len(os.sched_getaffinity(0))
    with sole_writer(out):
        setting = TaskSetting(pipeline, out / WORK)
        run = _Run(setting, progress or (lambda *_: None))
        with _opened(engine, setting, workers) as do:
            parts = run.parts(do)
            problem = _problem(parts)
            manifest = publish(out, setting, parts, run.perform, do)
            page = curation_page(pipeline, parts, problem)
            write_atomically(out / "report.html", page.encode())
            # whoever finds it finds all the rest
            write_json_file(out / "manifest.json", manifest)
        run.forget_others()
    return DataResult(
        out,
        tuple(parts.steps),
        tuple(parts.sources),
        tuple(run_notes(parts)),
        problem,
        time.monotonic() - began,
        run.tasks,
        run.reused,
    )


@contextmanager
def _opened(engine: str, setting: TaskSetting, workers: int) -> Iterator[Engine]:
    from weft.curation.foreign_engines import datatrove_engine, ray_engine

    engines = {"local": local_engine, "datatrove": datatrove_engine, "ray": ray_engine}
    with engines[engine](setting, workers) as do:
        yield do


class StepSegment(NamedTuple):
    """Consecutive mappers and filters that one task applies to a shard, and the joint operator that follows; None: no
    joint operator follows.

    A joint operator needs all documents at once, so a segment ends with it.
    """

    steps: list[int]
    joint: int | None


def step_segments(joints: Sequence[bool]) -> list[StepSegment]:
    """Divide the steps of a pipeline into segments, each of which ends with a joint operator.

    ``joints``: for each step, whether its operator is a joint one.
    """
    segments = [StepSegment([], None)]
    for number, joint in enumerate(joints):
        if joint:
            segments[-1] = StepSegment(segments[-1].steps, number)
            segments.append(StepSegment([], None))
        else:
            segments[-1].steps.append(number)
    return segments


@dataclass
class _Run:
    """A run in progress. ``files``: the intermediate files that it needs, relative to the folder of these."""

    setting: TaskSetting
    progress: Progress
    tasks: int = 0
    reused: int = 0
    files: set[str] = field(default_factory=set)

    def perform(self, do: Engine, stage: str, tasks: Sequence[Words]) -> list[Words]:
        """Do those of ``tasks`` that were not done before; return the results of all."""
        work = self.setting.work
        results: list[Words | None] = [done_before(work, task) for task in tasks]
        missing = [i for i, result in enumerate(results) if result is None]
        done = len(tasks) - len(missing)
        self.tasks += len(tasks)
        self.reused += done
        self.progress(stage, done, len(tasks))

        def finish(index: int, result: Words) -> None:
            nonlocal done
            results[missing[index]] = result
            done += 1
            self.progress(stage, done, len(tasks))

        if missing:
            do([tasks[i] for i in missing], finish)
        finished = [result for result in results if result is not None]
        assert len(finished) == len(tasks)
        for task, result in zip(tasks, finished, strict=True):
            self.files.add(task_file(work, task).relative_to(work).as_posix())
            self.files.update(result["files"])
        return finished

    def parts(self, do: Engine) -> RunParts:
        """Read the sources and apply the steps."""
        pipeline, steps = self.setting.pipeline, self.setting.steps
        units, reads = self._read(do)
        shards: list[ShardOutput] = []
        for unit, result in zip(units, reads, strict=True):
            for number, state in enumerate(result["states"]):
                names = [file.name for file in unit.files]
                shards.append(ShardOutput(unit.label, names, number, state))
        counts: list[list[StepCounts]] = [[] for _ in steps]
        computed = [0] * len(steps)
        decided: list[Words | None] = [None] * len(shards)
        notes: dict[int, list[str]] = {}
        types: list[dict[str, Any]] = []
        segments = step_segments([isinstance(s.operator, Joint) for s in steps])
        for segment in segments:
            tasks = [
                self._segment_task(number, shard.state, decided[number], segment)
                for number, shard in enumerate(shards)
            ]
            results = self.perform(do, self._segment_name(segment, decided), tasks)
            for shard, result in zip(shards, results, strict=True):
                shard.state = result["state"]
                shard.steps |= result["digests"]
                for step, values in result["counts"].items():
                    counts[int(step)].append(StepCounts.from_json(values))
                for step, number in result["computed"].items():
                    computed[int(step)] += number
            types = [result["types"] for result in results]
            self._check_failures(counts)
            if segment.joint is not None:
                result = self._decide(do, segment.joint, results)
                notes[segment.joint] = result["notes"]
                decided = [
                    {"step": segment.joint, "digest": digest}
                    for digest in result["decisions"]
                ]
        totals = [add_counts(of_step) for of_step in counts]
        for number, (step, total) in enumerate(zip(steps, totals, strict=True)):
            if total.entered and number not in notes:
                notes[number] = operator_notes(step)
        outcomes = [
            StepOutcome(
                number, step.operator, total, computed[number], notes.get(number, [])
            )
            for number, (step, total) in enumerate(
                zip(pipeline.steps, totals, strict=True)
            )
        ]
        return RunParts(
            shards,
            self._sources(units, reads, outcomes),
            outcomes,
            [step.digests.whole for step in steps],
            common_schema(types),
            reads,
            self._unread(),
        )

    def _read(self, do: Engine) -> tuple[list[SourceUnit], list[Words]]:
        sources = self.setting.pipeline.sources
        most = shard_bytes(sources, self.setting.pipeline.shards)
        units = source_units(sources, most)
        tasks: list[Words] = []
        for unit in units:
            source = sources[unit.source]
            task = {
                "kind": "read",
                "shard": len(tasks),
                "unit": unit.as_json(),
                "source": masked_values(source.model_dump(mode="json")),
                "most": most,
                "seen": "" if unit.files else source_fingerprint(source),
            }
            tasks.append(task)
        return units, self.perform(do, "read", tasks)

    def _sources(
        self,
        units: Sequence[SourceUnit],
        reads: Sequence[Words],
        outcomes: Sequence[StepOutcome],
    ) -> list[SourceCounts]:
        counts = []
        for number, label in enumerate(source_labels(self.setting.pipeline.sources)):
            source = self.setting.pipeline.sources[number]
            own = [r for u, r in zip(units, reads, strict=True) if u.source == number]
            read = sum(result["documents"] for result in own)
            if not read:
                left_out = sum(result["empty"] + result["skipped"] for result in own)
                why = f"; {left_out:,} records without a text" if left_out else ""
                raise WeftError(
                    f"sources[{number}] ({label}) holds no document{why}; check where it comes from, or take it out"
                )
            dropped = {
                str(outcome.number): outcome.counts.sources[label]
                for outcome in outcomes
                if label in outcome.counts.sources
            }
            place = source.shown if source.path else None
            counts.append(SourceCounts(label, source.kind, place, read, dropped))
        return counts

    def _unread(self) -> list[str]:
        """Return a line for each source that leaves files of its folder unread."""
        sources = self.setting.pipeline.sources
        return [
            f"source {label}: {line}"
            for label, source in zip(source_labels(sources), sources, strict=True)
            for line in unread_files(source)
        ]

    def _code(self, numbers: Sequence[int | None]) -> list[list[str]]:
        """Return what the results of these steps depend on."""
        return [
            [*self.setting.steps[n].digests, self.setting.pipeline.steps[n].on_error]
            for n in numbers
            if n is not None
        ]

    def _segment_task(
        self, shard: int, state: Words, decided: Words | None, segment: StepSegment
    ) -> Words:
        joint = [decided["step"]] if decided else []
        return {
            "kind": "steps",
            "shard": shard,
            "state": state,
            "decided": decided,
            "steps": segment.steps,
            "summarize": segment.joint,
            "code": self._code([*joint, *segment.steps, segment.joint]),
        }

    def _segment_name(
        self, segment: StepSegment, decided: Sequence[Words | None]
    ) -> str:
        steps = self.setting.pipeline.steps
        before = [decided[0]["step"]] if decided and decided[0] else []
        numbers = [*before, *segment.steps, *([segment.joint] if segment.joint is not None else [])]  # fmt: skip
        names = dict.fromkeys(steps[number].operator for number in numbers)
        return ", ".join(names) or "collect"

    def _decide(self, do: Engine, step: int, results: Sequence[Words]) -> Words:
        """Let the joint operator of a step decide, or take its decision of an earlier run with what it said then."""
        task = {
            "kind": "decide",
            "step": step,
            "summaries": [result["summary"] for result in results],
            "code": self._code([step]),
        }
        name = f"{self.setting.pipeline.steps[step].operator} over all"
        (result,) = self.perform(do, name, [task])
        return {"notes": []} | result  # a version without notes may have decided

    def _check_failures(self, counts: Sequence[Sequence[StepCounts]]) -> None:
        """Raise :class:`WeftError`, naming documents, if operators have failed whose steps do not skip these."""
        for number, parts in enumerate(counts):
            step = self.setting.pipeline.steps[number]
            total = add_counts(parts)
            if not total.failed or step.on_error == "skip":
                continue
            listed = "; ".join(f"{name}: {error}" for name, error in total.failures[:3])
            more = total.failed - min(3, len(total.failures))
            rest = f"; and {more:,} more" if more else ""
            plural = "s" if total.failed > 1 else ""
            raise WeftError(
                f"{self.setting.steps[number].name}: the operator raised an error on {total.failed:,} document"
                f"{plural}: {listed}{rest}; mend the operator or the documents, or set on_error = 'skip' in this step"
            )

    def forget_others(self) -> None:
        """Delete intermediate files of former runs, but for statistics and summaries, which may be of use again."""
        work = self.setting.work
        for folder in ("tasks", "texts", "rows", "decisions", "summed", "written", "encoded"):  # fmt: skip
            for file in (work / folder).glob("*"):
                if file.relative_to(work).as_posix() not in self.files:
                    file.unlink(missing_ok=True)


def _problem(parts: RunParts) -> str:
    """Return why nothing is left, "" if documents are left."""
    if any(shard.state["documents"] for shard in parts.shards):
        return ""
    last = next(s for s in parts.steps if s.counts.entered and not s.counts.left)
    reasons = ", ".join(f"{why} ({n:,})" for why, n in list(last.counts.reasons.items())[:3])  # fmt: skip
    return f"no document is left: steps[{last.number}] ({last.operator}) dropped the last ones: {reasons}"

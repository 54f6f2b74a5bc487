"""What a data run leaves in its folder: documents, tokens, the manifest, the card and the page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from weft.curation.shard_tasks import TaskSetting, Words
from weft.curation.step_counts import StepCounts
from weft.curation.task_workers import Engine
from weft.curation.work_folder import (
    cannot_write,
    read_json_file,
    words_digest,
    write_atomically,
    write_json_file,
)
from weft.curation.written_documents import Schema, WrittenFile, shard_tokens
from weft.recipe.masked import masked_values

if TYPE_CHECKING:
    import numpy as np

    from weft.data.tokenizer import Tokenizer

#: Operators whose dropped documents are duplicates, and those whose are of evaluation sets.
DUPLICATES = ("exact", "paragraphs", "minhash", "semantic")
CONTAMINATION = ("decontaminate",)


@dataclass
class ShardOutput:
    """A shard of a data run: what it was read from, and where its documents are now.

    Attributes:
        ``source``: label of its source.
        ``files``: names of the files that it was read from.
        ``part``: index of the shard among those from the same files.
        ``state``: where its documents are, the JSON values of a :class:`weft.curation.shard_state.ShardState`.
        ``steps``: digest of the output of each step, by the step's number.
        ``input``: digest of the documents as they were read.
    """

    source: str
    files: list[str]
    part: int
    state: Words
    steps: dict[str, str] = field(default_factory=dict)
    input: str = ""

    def __post_init__(self) -> None:
        self.input = self.state["texts"]


@dataclass
class SourceCounts:
    """Counts of a source: documents read, dropped and left.

    Attributes:
        ``label``, ``kind``, ``path``: label of the source in ids, and its settings ``kind`` and ``path``.
        ``read``: number of documents read.
        ``dropped``: number of documents dropped, by the number of the step.
        ``documents``, ``characters``, ``tokens``: numbers that are left; ``tokens`` is None without a tokenizer.
    """

    label: str
    kind: str
    path: str | None
    read: int
    dropped: dict[str, int]
    documents: int = 0
    characters: int = 0
    tokens: int | None = None


@dataclass(frozen=True)
class StepOutcome:
    """Outcome of a step: its counts over all shards, and its notes.

    ``number``, ``operator``: the step. ``computed``: number of documents for which the operator was called, in this run
    or in the earlier run that did the task. ``notes``: lines of the operator for the user.
    """

    number: int
    operator: str
    counts: StepCounts
    computed: int
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class RunParts:
    """Collected results of a data run's stages, from which its output is written.

    ``shards``, ``sources``, ``steps``: what is known of each. ``digests``: digest of each step. ``schema``: types of
    the documents' columns. ``reads``: results of the tasks that read sources. ``unread``: lines that name files of
    sources that are not read.
    """

    shards: list[ShardOutput]
    sources: list[SourceCounts]
    steps: list[StepOutcome]
    digests: list[str]
    schema: Schema
    reads: list[Words]
    unread: list[str]


#: Does the tasks of a stage: engine, name of the stage, tasks.
Perform = Callable[[Engine, str, Sequence[Words]], list[Words]]


@dataclass(frozen=True)
class PublishedTokens:
    """The token files that a data run has written.

    ``tokenizer``: the tokenizer's name in the pipeline. ``meta``: content of their ``meta.json``.
    """

    tokenizer: str
    meta: Words


def publish(
    out: Path, setting: TaskSetting, parts: RunParts, perform: Perform, do: Engine
) -> Words:
    """Write documents, tokens and the card of a data run to the folder ``out``, and return the manifest.

    Documents and tokens that are in the folder already are not written again. The counts of ``parts.sources`` are
    completed. ``setting``: settings that all tasks share. ``perform``: does the tasks of a stage by the engine ``do``.
    """
    output = setting.pipeline.output
    tasks = [
        {
            "kind": "write",
            "shard": number,
            "state": shard.state,
            "format": output.format,
            "schema": parts.schema.types,
        }
        for number, shard in enumerate(parts.shards)
        if shard.state["documents"]
    ]
    written = perform(do, "write", tasks)
    by_label = {source.label: source for source in parts.sources}
    for result in written:
        for label, number in result["documents"].items():
            by_label[label].documents += number
            by_label[label].characters += result["characters"][label]
    names = [f"{number:05d}.{output.format}" for number in range(len(written))]
    links = {n: r["file"] for n, r in zip(names, written, strict=True)}
    _in_folder(
        out, "documents", words_digest(links), lambda folder: _link(out, links, folder)
    )
    tokens = None
    if output.tokenizer and written:
        tokens = _publish_tokens(out, setting, parts, perform, do)
    manifest = run_manifest(setting, parts, names, written, tokens)
    write_json_file(out / "card.json", run_card(setting, parts, tokens, manifest))
    return manifest


def _in_folder(out: Path, name: str, key: str, fill: Callable[[Path], None]) -> None:
    """Let ``fill`` write the folder ``name`` of ``out`` anew, unless it is there and ``key`` is that of its content.

    A reader sees the former folder or the new one. Raises :class:`WeftError` if the folder cannot be written.
    """
    work, target = out / ".work", out / name
    record = work / f"published-{name}.json"
    seen = read_json_file(record)
    if seen and seen["key"] == key and seen["files"] == _names_in(target):
        return
    (out / "manifest.json").unlink(missing_ok=True)
    # whoever is killed from here on leaves no record of a content that is no more
    record.unlink(missing_ok=True)
    draft, former = work / "new" / name, work / "former" / name
    try:
        for folder in (draft, former):
            shutil.rmtree(folder, ignore_errors=True)
        draft.mkdir(parents=True)
        fill(draft)
        former.parent.mkdir(exist_ok=True)
        if target.exists():
            target.rename(former)
        draft.rename(target)
    except OSError as error:
        raise cannot_write(target, error) from None
    shutil.rmtree(former, ignore_errors=True)
    write_json_file(record, {"key": key, "files": _names_in(target)})


def _names_in(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.glob("*"))


def _link(out: Path, links: dict[str, str], folder: Path) -> None:
    for name, file in links.items():
        try:
            os.link(out / ".work" / file, folder / name)
        except OSError:  # a file system without links
            shutil.copyfile(out / ".work" / file, folder / name)


def _publish_tokens(
    out: Path, setting: TaskSetting, parts: RunParts, perform: Perform, do: Engine
) -> PublishedTokens:
    from weft.data.tokenizer import load_tokenizer
    from weft.recipe import Source

    output = setting.pipeline.output
    own = Source(
        kind="parquet" if output.format == "parquet" else "jsonl",
        path=str(out / "documents"),
    )
    tokenizer = load_tokenizer(output.tokenizer, [own], setting.work / "tokenizers")
    folder = setting.work / "tokenizers" / f"used-{tokenizer.fingerprint}"
    for name, content in tokenizer.files().items():
        if not (folder / name).exists():
            write_atomically(folder / name, content)
    tasks = [
        {
            "kind": "tokens",
            "shard": number,
            "state": shard.state,
            "tokenizer": str(folder),
        }
        for number, shard in enumerate(parts.shards)
        if shard.state["documents"]
    ]
    results = perform(do, "tokenise", tasks)
    by_label = {source.label: source for source in parts.sources}
    for source in parts.sources:
        source.tokens = 0
    for result in results:
        for label, number in result["tokens"].items():
            by_label[label].tokens = (by_label[label].tokens or 0) + number
    files = [WrittenFile(result["file"], result["digest"]) for result in results]
    key = words_digest(tokenizer.fingerprint, [file.digest for file in files])
    _in_folder(
        out,
        "tokens",
        key,
        lambda new: _fill_tokens(setting.work, files, tokenizer, new),
    )
    return PublishedTokens(
        output.tokenizer, read_json_file(out / "tokens" / "meta.json")
    )


def _fill_tokens(
    work: Path, files: Sequence[WrittenFile], tokenizer: Tokenizer, folder: Path
) -> None:
    from weft.data.tokens import write_documents

    def documents() -> Iterator[np.ndarray]:
        for file in files:
            yield from shard_tokens(work, file)

    tokenizer.save(folder)
    write_documents(
        folder,
        documents(),
        tokenizer.vocab,
        tokenizer.closing,
        "the pipeline's output",
        opening=tokenizer.opening,
    )


def run_manifest(
    setting: TaskSetting,
    parts: RunParts,
    names: Sequence[str],
    written: Sequence[Words],
    tokens: PublishedTokens | None,
) -> Words:
    """Return the manifest of a data run as JSON values: digests of each shard's input, of each step's output, and of
    files.

    Equal sources, pipelines and operators give equal manifests, however often a run was interrupted. ``names``,
    ``written``: name and result of each file of documents that was written. ``tokens``: None without token files.
    """
    files = iter(zip(names, written, strict=True))
    shards = []
    for shard in parts.shards:
        entry: Words = {
            "source": shard.source,
            "files": shard.files,
            "part": shard.part,
            "input": shard.input,
            "steps": shard.steps,
            "documents": shard.state["documents"],
            "output": None,
        }
        if shard.state["documents"]:
            name, result = next(files)
            entry["output"] = {"file": name, "digest": result["digest"]}
        shards.append(entry)
    pipeline = masked_values(setting.pipeline.model_dump(mode="json", by_alias=True))
    steps = [
        {"operator": outcome.operator, "digest": digest}
        for outcome, digest in zip(parts.steps, parts.digests, strict=True)
    ]
    return {
        "weft": "data run",
        "pipeline": pipeline,
        "steps": steps,
        "schema": parts.schema.types,
        "shards": shards,
        "tokens": tokens and tokens.meta,
    }


def run_card(
    setting: TaskSetting,
    parts: RunParts,
    tokens: PublishedTokens | None,
    manifest: Words,
) -> Words:
    """Return the card of a data run as JSON values: counts of documents read, dropped and left, by source and by step.

    ``tokens``: None without token files. ``manifest``: the card contains its digest.
    """
    output = setting.pipeline.output
    names = {str(s.number): s.operator for s in parts.steps}

    def dropped_by(source: SourceCounts, operators: Sequence[str]) -> int:
        return sum(n for step, n in source.dropped.items() if names[step] in operators)

    return {
        "weft": "data run",
        "name": setting.pipeline.name,
        "manifest": words_digest(manifest),
        "kind": "parquet" if output.format == "parquet" else "jsonl",
        "field": "text",
        "documents": sum(source.documents for source in parts.sources),
        "characters": sum(source.characters for source in parts.sources),
        "tokens": tokens and tokens.meta["count"],
        "tokenizer": tokens.tokenizer if tokens else "",
        "sources": [
            {
                "name": source.label,
                "kind": source.kind,
                "path": source.path,
                "read": source.read,
                "documents": source.documents,
                "characters": source.characters,
                "tokens": source.tokens,
                "dropped": {
                    f"steps[{step}] ({names[step]})": number
                    for step, number in source.dropped.items()
                },
                "duplicates": dropped_by(source, DUPLICATES),
                "contaminated": dropped_by(source, CONTAMINATION),
            }
            for source in parts.sources
        ],
        "steps": [
            {
                "operator": outcome.operator,
                "entered": outcome.counts.entered,
                "left": outcome.counts.left,
                "failed": outcome.counts.failed,
                "missing": outcome.counts.missing,
                "reasons": outcome.counts.reasons,
                "notes": list(outcome.notes),
            }
            for outcome in parts.steps
        ],
    }


def run_notes(parts: RunParts) -> list[str]:
    """Return lines for the user about a data run: skipped records, columns of changing type, documents with errors."""
    notes = list(parts.schema.notes)
    notes += parts.unread
    skipped = sum(result["skipped"] for result in parts.reads)
    if skipped:
        first = next(result["first"] for result in parts.reads if result["first"])
        notes.append(
            f"{skipped:,} records left out, as the source's on_error = 'skip'; the first: {first}"
        )
    empty = sum(result["empty"] for result in parts.reads)
    if empty:
        notes.append(f"{empty:,} records without a text left out")
    for outcome in parts.steps:
        if outcome.counts.failed:
            name, error = outcome.counts.failures[0]
            notes.append(
                f"steps[{outcome.number}] ({outcome.operator}): {outcome.counts.failed:,} documents left out, as "
                f"the step's on_error = 'skip'; the first: {name}: {error}"
            )
        if outcome.counts.missing:
            name, reason = outcome.counts.lacking[0]
            notes.append(
                f"steps[{outcome.number}] ({outcome.operator}): {outcome.counts.missing:,} documents could not be "
                f"made; the first: from {name}: {reason}"
            )
        step = f"steps[{outcome.number}] ({outcome.operator})"
        notes += [f"{step}: {line}" for line in outcome.notes]
    return notes

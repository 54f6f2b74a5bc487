"""Divide data into a file for each client: ``weft data split``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weft.errors import UsageError, WeftError
from weft.federated.client_partition import Partition, PartitionKind, draw_partition
from weft.federated.labelled_samples import read_labelled
from weft.paths import home_path
from weft.writable import check_writable

#: The file beside the clients' files that says whose each sample is.
PARTITION_FILE = "partition.json"
#: What names the group of a text: the folder that it is in, below the one that was given.
FOLDER = "folder"


class ClientShare(NamedTuple):
    """A client's share of the data: its file, the number of its samples, and the number of samples of each class, by
    the class's name.
    """

    file: Path
    samples: int
    classes: dict[str, int]

    @property
    def class_text(self) -> str:
        """The classes with their numbers of samples, as words; "-" without classes."""
        counts = [f"{name}: {count}" for name, count in self.classes.items() if name]
        return ", ".join(counts) or "-"


class SplitRecords(NamedTuple):
    """Records to divide among clients. ``labels``, ``groups``: name of the class and of the group of each record; None:
    records have no classes or groups.
    """

    records: list[dict[str, Any]]
    labels: list[str] | None
    groups: list[str] | None


def split_data(
    path: str, out: Path, clients: int, kind: PartitionKind, *, label: str = "label", group: str = FOLDER,
    alpha: float = 0.5, classes: int = 2, seed: int = 0,
) -> list[ClientShare]:  # fmt: skip
    """Divide the samples at ``path`` among ``clients`` clients, and write a file for each into the folder ``out``.

    Returns the share of each client.

    Arguments:
        ``path``: labelled arrays, as "sklearn:NAME" or an .npz file, from which clients get .npz files. Or records, as
            a .jsonl file, or a folder of texts; clients then get .jsonl files.
        ``kind``: how samples are divided, as in ``federated.partition``.
        ``label``, ``group``: fields of a record that name its class and its group. The group "folder" of a text is the
            folder that it is in.
        ``alpha``, ``classes``: see :func:`weft.federated.client_partition.draw_partition`.

    Raises :class:`UsageError` or :class:`WeftError` if the data cannot be read or divided.
    """
    check_writable(out, "--out", folder=True)
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"--out {out} is not empty; name another folder")
    options = {"alpha": alpha, "classes": classes, "seed": seed}
    if path.startswith("sklearn:") or path.endswith(".npz"):
        return _split_arrays(path, out, clients, kind, options)
    given = _records(path, label, group)
    needs = {"dirichlet": given.labels, "classes": given.labels, "natural": given.groups}  # fmt: skip
    if needs.get(kind, ()) is None:
        field = group if kind == "natural" else label
        raise UsageError(
            f"--by {kind} needs the field {field!r} in every record of {path}; name another with "
            f"{'--group' if kind == 'natural' else '--label'}"
        )
    labels = given.labels or [""] * len(given.records)
    partition = draw_partition(kind, clients, labels, given.groups, **options)  # type: ignore[arg-type]
    out.mkdir(parents=True, exist_ok=True)
    shares = []
    for number, rows in enumerate(partition.rows):
        file = out / f"client-{number}.jsonl"
        lines = (json.dumps(given.records[row], ensure_ascii=False) for row in rows)
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        shares.append(ClientShare(file, len(rows), _counts(labels, rows)))
    _write_partition(out, path, partition)
    return shares


def _split_arrays(
    path: str, out: Path, clients: int, kind: PartitionKind, options: dict[str, Any]
) -> list[ClientShare]:
    samples = read_labelled(path)
    partition = draw_partition(kind, clients, samples.labels, samples.groups, **options)
    out.mkdir(parents=True, exist_ok=True)
    shares = []
    for number, rows in enumerate(partition.rows):
        file = out / f"client-{number}.npz"
        groups = {} if samples.groups is None else {"groups": samples.groups[rows]}
        np.savez(file, features=samples.features[rows], labels=samples.labels[rows], **groups)  # fmt: skip
        shares.append(ClientShare(file, len(rows), _counts([*map(str, samples.labels)], rows)))  # fmt: skip
    _write_partition(out, path, partition)
    return shares


def _write_partition(out: Path, path: str, partition: Partition) -> None:
    values = {"source": path, **partition.to_json()}
    (out / PARTITION_FILE).write_text(json.dumps(values))


def _counts(labels: Sequence[str], rows: np.ndarray) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in rows:
        counts[labels[row]] = counts.get(labels[row], 0) + 1
    return dict(sorted(counts.items()))


def _records(path: str, label: str, group: str) -> SplitRecords:
    """Return the records at ``path``, with classes and groups where every record has them."""
    place = home_path(path)
    if place.is_dir():
        records = [*_texts(place)]
        if not records:
            raise WeftError(f"{path} holds no text; give another folder")
    elif place.is_file():
        records = [*_lines(place)]
        if not records:
            raise WeftError(f"{path} holds no record; give another file")
    else:
        raise UsageError(
            f"{path} does not exist; give a .jsonl file, a folder of texts, an .npz file, or 'sklearn:digits'"
        )
    return SplitRecords(records, _field(records, label), _field(records, group))


def _field(records: Sequence[dict[str, Any]], name: str) -> list[str] | None:
    """Return a field of all records as text; None if one of them lacks it."""
    if not all(name in record for record in records):
        return None
    return [str(record[name]) for record in records]


def _texts(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield every text below a folder, with its path and the folder below ``folder`` that it is in."""
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue  # an image, an archive: no text
        parts = file.relative_to(folder).parts
        yield {"text": text, "path": "/".join(parts), FOLDER: parts[0] if len(parts) > 1 else "."}  # fmt: skip


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise WeftError(f"{file}:{number} is not JSON: {error}") from None
            if not isinstance(record, dict):
                raise WeftError(f"{file}:{number} is {type(record).__name__}, and a record is an object")  # fmt: skip
            yield record

"""Results of an operator for documents, kept by the documents' keys: what was computed once is not computed again."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weft.curation.data_operators import OperatorFailed
from weft.curation.document_files import columns_of, read_table, table_bytes
from weft.curation.documents import Documents
from weft.curation.work_folder import content_digest, write_atomically
from weft.errors import UsageError, WeftError

#: Bytes of the digest at the beginning of a file of results.
_HEAD = 32
#: Ending of the name of an array of offsets.
OFFSETS = "_offsets"


class FailedDocument(NamedTuple):
    """A document on which an operator has raised an error. ``place``: index of the document among the documents with
    which the operator was called.
    """

    place: int
    error: str


def isolate(
    documents: Documents, work: Callable[[Documents], Any]
) -> tuple[list[tuple[list[int], Any]], list[FailedDocument]]:
    """Call ``work`` with all documents, and find out which of them fail if it raises.

    A set of documents on which ``work`` raises is halved and tried again, until single documents are left. Returns
    pairs ``(indices, result)`` of the calls that succeeded, in order, and the failures. Raises :class:`OperatorFailed`
    if ``work`` raises it, because then no document is at fault.
    """
    results: list[tuple[list[int], Any]] = []
    failures: list[FailedDocument] = []
    waiting = [list(range(len(documents)))]
    while waiting:
        indices = waiting.pop()
        part = (
            documents if len(indices) == len(documents) else documents.select(indices)
        )
        try:
            results.append((indices, work(part)))
        except (OperatorFailed, UsageError):  # no document's fault
            raise
        except ImportError as error:
            raise OperatorFailed(str(error)) from error
        except Exception as error:
            if len(indices) > 1:
                middle = len(indices) // 2
                waiting += [indices[middle:], indices[:middle]]
            else:
                line = (str(error).splitlines() or [""])[0]
                kind = (
                    "" if isinstance(error, WeftError) else f"{type(error).__name__}: "
                )
                failures.append(FailedDocument(indices[0], f"{kind}{line}"))
    return results, failures


def _load(path: Path) -> bytes | None:
    """Return the content of a file of results; None if there is none, or a damaged one, which is computed anew."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    content = data[_HEAD:]
    return content if data[:_HEAD] == content_digest(content).encode() else None


def _save(path: Path, content: bytes) -> None:
    write_atomically(path, content_digest(content).encode() + content)


def plain_values(values: Any) -> list[Any]:
    """Return the values of a column as Python's own types, in place of NumPy's."""
    if isinstance(values, np.ndarray):
        return list(values.tolist())
    return [_plain(value) for value in values]


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


class KeptStatistics(NamedTuple):
    """Statistics of documents. Some of them come from a file of earlier results.

    Attributes:
        ``columns``: values of each statistic by its name, one for each document of ``indices``.
        ``indices``: indices of the documents that have statistics, among the documents that were asked about.
        ``failures``: documents on which the operator has raised an error.
        ``computed``: number of documents whose statistics were computed now and not read from the file.
    """

    columns: dict[str, list[Any]]
    indices: list[int]
    failures: list[FailedDocument]
    computed: int


def kept_statistics(
    file: Path,
    documents: Documents,
    keys: Sequence[bytes],
    compute: Callable[[Documents], dict[str, list[Any]]],
) -> KeptStatistics:
    """Return statistics of ``documents``, from ``file`` where it has them. Missing ones are computed and added to the
    file.

    ``keys``: key of each document in the file. ``compute``: function that returns the statistics of documents as
    columns by name.
    """
    data = _load(file)
    columns = columns_of(read_table(data)) if data else {}
    held: list[bytes] = columns.pop("_key", [])
    before = len(held)
    results, failures = _missing_results(documents, keys, held, compute)
    for new, values in results:
        check_columns(values, len(new))
        for name in dict.fromkeys((*columns, *values)):
            column = columns.setdefault(name, [None] * len(held))
            column += (
                plain_values(values[name]) if name in values else [None] * len(new)
            )
        held += new
    if results:
        _save(file, table_bytes(columns, held))
    indices, rows = _rows_of(keys, held, failures)
    taken = {name: [values[row] for row in rows] for name, values in columns.items()}
    return KeptStatistics(taken, indices, failures, len(held) - before)


def _missing_results(
    documents: Documents,
    keys: Sequence[bytes],
    held: Sequence[bytes],
    compute: Callable[[Documents], Any],
) -> tuple[list[tuple[list[bytes], Any]], list[FailedDocument]]:
    """Compute results of the documents whose ``keys`` are not among those ``held``.

    Returns the results with the keys that each is about, and the failures.
    """
    known = set(held)
    missing = [i for i, key in enumerate(keys) if key not in known]
    if not missing:
        return [], []
    results, failures = isolate(documents.select(missing), compute)
    return (
        [([keys[missing[i]] for i in indices], values) for indices, values in results],
        [FailedDocument(missing[f.place], f.error) for f in failures],
    )


def _rows_of(
    keys: Sequence[bytes], held: Sequence[bytes], failures: Sequence[FailedDocument]
) -> tuple[list[int], list[int]]:
    """Return the indices of the documents that have not failed, and the rows of their results among those ``held``."""
    row_of = {key: row for row, key in enumerate(held)}
    failed = {failure.place for failure in failures}
    indices = [i for i in range(len(keys)) if i not in failed]
    return indices, [row_of[keys[i]] for i in indices]


def check_columns(values: Mapping[str, Sequence[Any]], documents: int) -> None:
    """Raise :class:`WeftError` if a column has not as many values as there are ``documents``."""
    for name, column in values.items():
        if len(column) != documents:
            raise WeftError(
                f"it returned {len(column)} values of {name!r} for {documents} documents"
            )


class KeptSummary(NamedTuple):
    """Arrays in which an operator summarises documents. Some of their rows come from a file of earlier results.

    Attributes:
        ``arrays``: arrays by name, with a row for each document of ``indices``. If an array ``NAME`` has rows of
            variable length, the array ``NAME_offsets`` gives the start of each row and the end of the last one.
        ``indices``: indices of the documents that have rows, among the documents that were asked about.
        ``failures``: documents on which the operator has raised an error.
        ``computed``: number of documents whose rows were computed now and not read from the file.
    """

    arrays: dict[str, np.ndarray]
    indices: list[int]
    failures: list[FailedDocument]
    computed: int


def kept_summary(
    file: Path,
    documents: Documents,
    keys: Sequence[bytes],
    compute: Callable[[Documents], dict[str, np.ndarray]],
) -> KeptSummary:
    """Return the summary of ``documents``. Rows that ``file`` does not have are computed and added to the file.

    ``keys``: for each document 16 bytes, under which the file has the document's rows. ``compute``: returns the arrays
    of documents by name, as :class:`KeptSummary` holds them.
    """
    data = _load(file)
    arrays = read_arrays(data) if data else {}
    held = [row.tobytes() for row in arrays.pop("_key", np.empty((0, 16), np.uint8))]
    before = len(held)
    results, failures = _missing_results(documents, keys, held, compute)
    for new, values in results:
        values = {name: np.asarray(array) for name, array in values.items()}
        _check_arrays(values, len(new))
        arrays = joined_arrays(arrays, values) if arrays else values
        held += new
    if results:
        stacked = np.frombuffer(b"".join(held), np.uint8).reshape(-1, 16)
        _save(file, array_bytes(arrays | {"_key": stacked}))
    indices, rows = _rows_of(keys, held, failures)
    taken = take_rows(arrays, np.array(rows, np.int64))
    return KeptSummary(taken, indices, failures, len(held) - before)


def _check_arrays(values: Mapping[str, np.ndarray], documents: int) -> None:
    for name, array in values.items():
        if f"{name}{OFFSETS}" in values:
            continue
        wanted = documents + 1 if name.endswith(OFFSETS) else documents
        if len(array) != wanted:
            raise WeftError(
                f"its array {name!r} has {len(array)} rows, and {wanted} are due for {documents} documents"
            )


def joined_arrays(
    first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Append the rows of the summary ``second`` to those of ``first``, and return the joined arrays by name. A summary
    is the arrays of a :class:`KeptSummary`.
    """
    joined = {}
    for name, array in first.items():
        other = second[name]
        if name.endswith(OFFSETS):
            joined[name] = np.concatenate([array, other[1:] + array[-1]])
        else:
            joined[name] = np.concatenate([array, other])
    return joined


def take_rows(
    arrays: Mapping[str, np.ndarray], rows: np.ndarray
) -> dict[str, np.ndarray]:
    """Return only the given ``rows`` of ``arrays``, which are the arrays of a :class:`KeptSummary`."""
    taken = {}
    for name, array in arrays.items():
        if name.endswith(OFFSETS):
            lengths = np.diff(array)[rows]
            taken[name] = np.concatenate([[0], np.cumsum(lengths)]).astype(array.dtype)
        elif (offsets := arrays.get(f"{name}{OFFSETS}")) is not None:
            pieces = [array[offsets[row] : offsets[row + 1]] for row in rows]
            taken[name] = np.concatenate([array[:0], *pieces])
        else:
            taken[name] = array[rows]
    return taken


def array_bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return arrays by name as the bytes of a NumPy file. Equal arrays give equal bytes.

    Raises :class:`WeftError` for an array of Python objects.
    """
    buffer = io.BytesIO()
    names = sorted(arrays)
    for name in names:
        if arrays[name].dtype.hasobject:
            raise WeftError(
                f"its array {name!r} holds objects; numbers or bytes are due"
            )
    np.lib.format.write_array(buffer, np.array(names))
    for name in names:
        np.lib.format.write_array(buffer, arrays[name])
    return buffer.getvalue()


def read_arrays(content: bytes) -> dict[str, np.ndarray]:
    """Return the arrays by name in ``content``, which :func:`array_bytes` returned."""
    buffer = io.BytesIO(content)
    names = np.lib.format.read_array(buffer).tolist()
    return {name: np.lib.format.read_array(buffer) for name in names}

"""Read samples of WebDataset's tar files: successive members with the same name up to the first dot are a sample."""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from weft.data.json_text import parse_record
from weft.data.reading import open_file
from weft.errors import WeftError

#: Endings of members with text. What is JSON joins the record under the names of its object.
_TEXTS = ("txt", "text", "md", "cls", "caption", "transcript")
#: Size of a block of a tar file, of which two that are empty end it.
_BLOCK = 512


class _Counted:
    """Stream that counts its bytes, and remembers the last blocks."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream, self.count, self.tail = stream, 0, b""

    def read(self, size: int) -> bytes:
        data = self.stream.read(size)
        self.count += len(data)
        self.tail = (self.tail + data)[-2 * _BLOCK :]
        return data


def read_samples_of_tar(
    file: Path, wrong: Callable[[WeftError], None] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield ``(number, record)`` of the samples in a tar file, which may be compressed, with numbers from 1.

    A sample consists of the members with the same name and different endings. Its record has the name as "__key__". The
    text of a member such as ``a.txt`` is stored under its ending, and the first text also as "text". The fields of an
    object in ``a.json`` are added. Other members are None under their endings.

    For a sample with invalid text or JSON, ``wrong`` is called with the error; without ``wrong`` it is raised. Raises
    :class:`WeftError` if the file is damaged or ends too early.
    """
    with open_file(file) as raw:
        stream = _Counted(raw)
        opener = "r|gz" if file.suffix.lower() == ".tgz" else "r|"
        number, key, members = 0, "", dict[str, bytes | None]()
        try:
            with tarfile.open(fileobj=stream, mode=opener) as archive:  # type: ignore[call-overload]
                for member in archive:
                    if not member.isfile():
                        continue
                    name, ending = _name_of(member.name)
                    if members and name != key:
                        number += 1
                        yield from _record(file, number, key, members, wrong)
                        members = {}
                    key = name
                    content = archive.extractfile(member) if _is_read(ending) else None
                    members[ending] = content.read() if content else None
        except (tarfile.TarError, EOFError) as error:
            raise WeftError(
                f"{file} is a damaged tar file, after {number:,} samples ({error}); copy it again"
            ) from None
        while stream.read(2**20):  # what stands behind the end
            pass
        if opener == "r|" and (
            stream.count % _BLOCK or stream.tail[-_BLOCK:] != bytes(_BLOCK)
        ):
            raise WeftError(
                f"{file} ends too early, after {number:,} samples: a tar file ends with empty blocks; copy it again"
            )
        if members:
            yield from _record(file, number + 1, key, members, wrong)


def _name_of(member: str) -> tuple[str, str]:
    """Split the name of a member before the first dot behind its last slash."""
    folder, _, name = member.rpartition("/")
    stem, _, ending = name.partition(".")
    return f"{folder}/{stem}" if folder else stem, ending.lower()


def _is_read(ending: str) -> bool:
    last = ending.removesuffix(".gz").rpartition(".")[2]
    return last in (*_TEXTS, "json")


def _record(
    file: Path,
    number: int,
    key: str,
    members: dict[str, bytes | None],
    wrong: Callable[[WeftError], None] | None,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the record of a sample, unless it is wrong."""
    texts: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    for ending, content in members.items():
        last = ending.removesuffix(".gz").rpartition(".")[2]
        if content is None:
            texts[ending] = None
            continue
        try:
            data = gzip.decompress(content) if ending.endswith(".gz") else content
            value = parse_record(data) if last == "json" else data.decode()
        except (ValueError, OSError, EOFError) as error:
            problem = WeftError(f"{file}:{number}: member {key}.{ending}: {error}")
            if wrong is None:
                raise problem from None
            wrong(problem)
            return
        if isinstance(value, dict):
            fields |= value
        else:
            texts[ending.removesuffix(".gz")] = value
    text = next((value for value in texts.values() if isinstance(value, str)), None)
    named = {"text": text} if text is not None else {}
    yield number, named | texts | fields | {"__key__": key}

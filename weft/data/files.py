"""Files of a source: select them, tell their formats, and read their records."""

from __future__ import annotations

import glob
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.data.reading import JSON_LINES, FilePart, format_of
from weft.errors import UsageError, WeftError
from weft.paths import home_path

if TYPE_CHECKING:
    from weft.recipe import Source

#: Folders below the standard library that are not its own code.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
#: Formats of which a folder is read in all that it has, and those of which it is read in the first that it has.
_ARCHIVES = (".tar", ".tgz")
_RECORDS = (*JSON_LINES, ".json", ".csv", ".tsv", ".parquet", ".arrow", *_ARCHIVES)
_FORMATS = {
    "jsonl": (*JSON_LINES, ".json", ".csv", ".tsv", *_ARCHIVES), "parquet": (".parquet",),
    "chat": _RECORDS, "preference": _RECORDS, "feedback": _RECORDS,
    "tokens": (".bin",), "stdlib": (".py",),
}  # fmt: skip
#: What data sets are saved with beside their records.
_ABOUT = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
#: Names of the splits of data sets, as words in the names of files: train-00000-of-00002.parquet, test_sft.jsonl.
_WORD = r"(?<![a-z0-9])(?:{})(?![a-z])"
_TRAIN = re.compile(_WORD.format("train|training"))
_HELD_OUT = re.compile(
    _WORD.format("test|testing|dev|eval|evaluation|val|valid|validation")
)
#: Formats that hold records, and never plain text; and those that hold neither.
TABLES = (*JSON_LINES, ".csv", ".tsv", ".parquet", ".arrow", *_ARCHIVES)
_BINARY = (
    ".bin", ".bmp", ".db", ".docx", ".gguf", ".gif", ".ico", ".jpeg", ".jpg", ".mp3", ".mp4", ".npy", ".npz", ".o",
    ".pdf", ".pickle", ".pkl", ".png", ".pt", ".pth", ".pyc", ".safetensors", ".so", ".sqlite", ".wav",
    ".webp", ".whl", ".zip", *_ARCHIVES,
)  # fmt: skip


class Selection(NamedTuple):
    """Files of a source.

    ``read``: the files that are read, sorted. ``left``: files in the source's folder that are not read.
    """

    read: list[Path]
    left: list[Path]


def source_files(source: Source) -> list[Path]:
    """Return the files of ``source`` that are read, sorted. Its ``path`` is a file, a folder or a glob."""
    return select_files(source).read


def select_files(source: Source) -> Selection:
    """Find the files of ``source`` that are read, and those that are not.

    Raises :class:`WeftError` if no file matches.
    """
    if "://" in (source.path or ""):
        return _remote(source)
    stdlib = source.path is None
    path = home_path(sysconfig.get_paths()["stdlib"] if stdlib else source.path or "")
    formats = (".py",) if stdlib else _FORMATS.get(source.kind, ())
    if path.is_dir():
        every = _walk(path, stdlib)
        fitting = _fitting(every, formats, source, path)
        left = [] if stdlib else [file for file in every if file not in set(fitting)]
        picked = Selection(fitting, left)
    else:
        names = [path] if path.is_file() else glob.glob(str(path), recursive=True)
        picked = Selection(sorted(filter(Path.is_file, map(Path, names))), [])
    if not picked.read and not path.exists() and not glob.has_magic(str(path)):
        raise WeftError(
            f"data source {path}: there is no such file or folder; set 'path' to a file, a folder or a glob"
        )
    if not picked.read:
        wanted = " or ".join(formats) or source.kind
        lacking = f"no .py file at data source {path}, nor one of records"
        if source.form != "docstrings":
            lacking = f"no {wanted} file at data source {path}"
        raise WeftError(f"{lacking}; set 'path' to a file, a folder or a glob")
    return picked


def _remote(source: Source) -> Selection:
    """Return the files of a remote source, which are downloaded when they are read."""
    from weft.data.remote_files import list_remote

    if source.kind in ("tokens", "huggingface"):
        raise UsageError(
            f"a source of kind {source.kind!r} is a folder of this machine; kinds 'text', 'jsonl', 'parquet' and those "
            "of conversations can be read from elsewhere"
        )
    listing = list_remote(source.path or "")
    every = [file for file in listing.files if not file.name.startswith(".")]
    if listing.whole:
        return Selection(every, [])
    formats = _FORMATS.get(source.kind, ())
    fitting = _fitting(every, formats, source, listing.folder)
    if not fitting:
        raise WeftError(
            f"no {' or '.join(formats) or source.kind} file at data source {source.shown}; set 'path' to a file, a "
            "folder or a pattern"
        )
    return Selection(fitting, [file for file in every if file not in set(fitting)])


def _fitting(
    every: list[Path], formats: tuple[str, ...], source: Source, folder: Path
) -> list[Path]:
    """Return the files of a folder that are read."""
    if source.form == "docstrings" and any(file.suffix == ".py" for file in every):
        formats = (".py",)
    if not formats or (
        source.kind == "stdlib" and not any(file.suffix == ".py" for file in every)
    ):
        return [file for file in every if format_of(file) not in _BINARY]
    fitting = [
        file for file in every if format_of(file) in formats and file.name not in _ABOUT
    ]
    if source.kind == "jsonl" and any(
        format_of(file) in JSON_LINES for file in fitting
    ):
        fitting = [file for file in fitting if format_of(file) in JSON_LINES]
    if any(format_of(file) not in _ARCHIVES for file in fitting):
        fitting = [file for file in fitting if format_of(file) not in _ARCHIVES]
    if ".py" not in formats:  # of code, of which there are no splits
        fitting = _to_train_on(fitting, folder)
    return fitting


def _to_train_on(fitting: list[Path], folder: Path) -> list[Path]:
    """Without the files that are called after another split of a data set, where others are called after ``train``."""
    names = [str(file.relative_to(folder)).lower() for file in fitting]
    if not any(_TRAIN.search(name) for name in names):
        return fitting
    return [
        file
        for file, name in zip(fitting, names, strict=True)
        if _TRAIN.search(name) or not _HELD_OUT.search(name)
    ]


def _walk(path: Path, stdlib: bool) -> list[Path]:
    """Return all files below a folder that are not hidden, sorted; of saved data sets those that hold their rows."""
    paths = []
    for folder, below, names in os.walk(path):
        below[:] = [
            name
            for name in below
            if not name.startswith(".") and not (stdlib and name in _NOT_STDLIB)
        ]
        if "dataset_dict.json" in names:
            if "train" not in below:
                raise WeftError(
                    f"{folder} has no split 'train'; set 'path' to one of its folders: {', '.join(sorted(below))}"
                )
            below[:] = ["train"]
        kept = [name for name in names if not name.startswith(".")]
        if {"state.json", "dataset_info.json"} <= set(names):
            kept = [*_parts(Path(folder), names), *sorted(_ABOUT & set(names))]
        paths += [Path(folder, name) for name in kept]
    return sorted(file for file in paths if file.is_file())


def _parts(folder: Path, names: list[str]) -> list[str]:
    """Return the files with the rows of a saved data set, all of which must be among ``names``."""
    try:
        parts = [
            part["filename"]
            for part in json.loads((folder / "state.json").read_text())["_data_files"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise WeftError(
            f"{folder / 'state.json'} of a saved data set is damaged ({error}); save it again"
        ) from None
    if gone := sorted(set(parts) - set(names)):
        raise WeftError(
            f"{folder} is a saved data set without its {gone[0]}; copy all of the folder"
        )
    return parts


def read_records(
    file: Path,
    wrong: Callable[[WeftError], None] | None = None,
    part: FilePart | None = None,
) -> Iterator[tuple[int, Any]]:
    """Yield pairs of line number and record of a file of JSON Lines, JSON, CSV, Parquet, Arrow, tar or Python code.

    Records of Python code are prompts and completions about its docstrings. In a file without lines, records are
    numbered instead, from 1. For a line that is no record, ``wrong`` is called with the error; without ``wrong`` the
    error is raised. ``part``: the bytes of JSON Lines that are read; None: all of the file.
    """
    form = format_of(file)
    if form == ".py":
        from weft.data.docstrings import docstrings

        yield from docstrings(file)
    elif form in (".parquet", ".arrow"):
        from weft.data.arrow import read_rows

        yield from read_rows(file)
    elif form in _ARCHIVES:
        from weft.data.tar_samples import read_samples_of_tar

        yield from read_samples_of_tar(file, wrong)
    else:
        from weft.data.text_records import read_text_records

        yield from read_text_records(file, wrong, part)

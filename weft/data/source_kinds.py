"""Tell files of plain text from files of records, and name the kind of source that reads the latter."""

from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

from weft.data.files import TABLES, Selection, format_of, read_records, select_files
from weft.data.reading import open_file
from weft.errors import UsageError, WeftError
from weft.paths import home_path
from weft.recipe import Source


def documents_of(source: Source) -> Selection:
    """Return the files of a source of documents. A source of plain text skips files of records in its folder.

    Raises :class:`UsageError`, which names the right kind, if a source of plain text has only records.
    """
    chosen = select_files(source)
    if source.kind not in ("text", "stdlib") or source.path is None:
        return chosen
    path = home_path(source.path)
    if saved := next(
        (
            f
            for f in chosen.read
            if f.name in ("state.json", "dataset_dict.json", "dataset_info.json")
        ),
        None,
    ):
        rows = next((file for file in chosen.read if format_of(file) == ".arrow"), None)
        if rows is not None:
            kind = right_kind(rows).replace("'jsonl'", "'huggingface'")
            raise UsageError(
                f"{saved.parent} is a data set that save_to_disk has written, not plain text; set {kind}"
            )
    tables = [file for file in chosen.read if format_of(file) in TABLES]
    texts = [file for file in chosen.read if format_of(file) not in (*TABLES, ".json")]
    if not texts and (
        held := next((file for file in chosen.read if _holds_records(file)), None)
    ):
        raise UsageError(
            f"{held} holds records, not plain text; set {right_kind(held)} (a copy called .txt is read as it is)"
        )
    if not path.is_dir() and "://" not in source.path:
        if tables:
            raise UsageError(
                f"{tables[0]} holds records, not plain text; set {right_kind(tables[0])}, or a path without it"
            )
        return chosen
    return Selection(
        [file for file in chosen.read if file not in set(tables)],
        sorted({*chosen.left, *tables}),
    )


def check_kind(source: Source) -> None:
    """Raise :class:`UsageError` if the source's kind cannot read its file of records.

    The error names the right kind.
    """
    readable = {"parquet": ".parquet", "huggingface": "", "tokens": ".bin"}.get(
        source.kind
    )
    file = home_path(source.path or "")
    if (
        readable is None
        or not file.is_file()
        or format_of(file) not in (*TABLES, ".json")
    ):
        return
    if format_of(file) != readable:
        raise UsageError(
            f"{file} holds records, which kind = {source.kind!r} does not read; set {right_kind(file)}"
        )


def right_kind(file: Path) -> str:
    """Return the settings with which ``file``, a file of records, can be read, as a text such as ``data.kind =
    'chat'``.

    They are guessed from the first record. If texts are in a column that is not called ``text``, the result also sets
    ``data.field``.
    """
    from weft.data.chat.forms import read_record
    from weft.data.chat.pairs import read_pair

    form = format_of(file)
    try:
        first = next((record for _, record in islice(read_records(file), 1)), None)
    except (WeftError, OSError, ValueError, ImportError):
        first = None
    for kind, read in (("preference", read_pair), ("chat", read_record)):
        try:
            read(first)
        except (WeftError, RecursionError):
            continue
        return f"data.kind = '{kind}'"
    kind = "parquet" if form == ".parquet" else "jsonl"
    texts = (
        {key: value for key, value in first.items() if isinstance(value, str)}
        if isinstance(first, dict)
        else {}
    )
    if not texts or "text" in texts:
        return f"data.kind = '{kind}'"
    near = get_close_matches("text", texts, n=1, cutoff=0.5) or [
        max(texts, key=lambda name: len(texts[name]))
    ]
    return f"data.kind = '{kind}' and data.field = '{near[0]}'"


def _holds_records(file: Path) -> bool:
    """Return whether a file holds records: by its name, or for JSON if it begins with objects."""
    if format_of(file) != ".json":
        return format_of(file) in TABLES
    try:
        with open_file(file) as stream:
            head = stream.read(2**16).decode(errors="replace").strip()
    except (OSError, EOFError):
        return False
    if head.startswith("["):
        return head[1:].lstrip().startswith("{")
    # few files are asked for it
    from weft.data.json_text import parse_json

    first, _, rest = head.partition("\n")
    try:
        value: Any = parse_json(first)
    except ValueError:
        return False
    return isinstance(value, dict) and rest.lstrip().startswith("{")

"""Source of validation documents that are in a file of their own."""

from pathlib import Path

from weft.data.files import format_of, source_files
from weft.errors import UsageError
from weft.paths import home_path, real_path
from weft.recipe import SOURCES, Data, Source

#: How a file for validation is read where the source has none of its own.
KIND_OF_FORMAT = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".csv": "jsonl",
    ".parquet": "parquet",
    ".py": "stdlib",
}


def validation_source(data: Data) -> Source | None:
    """Return the source of validation documents; None if validation is a share of the training data.

    The files of validation are read with the settings of the first training source. Raises :class:`UsageError` if the
    recipe also trains on one of these files.
    """
    if not isinstance(data.validation, str):
        return None
    first = data.sources[0]
    kind = (
        KIND_OF_FORMAT.get(format_of(Path(data.validation)), "text")
        if first.kind == "stdlib"
        else first.kind
    )
    form = "auto" if first.form == "docstrings" else first.form
    apart = first.model_copy(
        update={"kind": kind, "path": data.validation, "form": form, "weight": 1.0}
    )
    own = _files_of(apart)
    for source in data.sources:
        if both := own & _files_of(source):
            raise UsageError(
                f"data.validation = {data.validation!r} is trained on as well ({min(both)} is of data.sources), so its "
                "loss would say nothing of unseen text; move it elsewhere, or give a share"
            )
    return apart


def _files_of(source: Source) -> set[Path]:
    """Return the files that a source reads, where that can be known."""
    if source.kind not in SOURCES or source.path is None:
        return set()
    path = home_path(source.path)
    paths = [path] if source.kind in ("huggingface", "tokens") else source_files(source)
    return {real_path(file) for file in paths}

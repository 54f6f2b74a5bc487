"""Tokenize pieces of a source, one line of JSON on the standard input each: ``python -m weft.data.tokenize_worker``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.data.line_worker import answer_lines
from weft.data.source_piece import SourcePiece
from weft.data.tokenize_pieces import write_piece
from weft.data.tokenizer import load_tokenizer
from weft.errors import WeftError, why_unwritten
from weft.plugins import load_plugins
from weft.recipe import Source


def begin_tokenizing(task: dict[str, Any]) -> Callable[[Any], None]:
    """Return a function that tokenizes the piece which the JSON values of a line describe.

    ``task``: the folder, the source, plugins, and the ids that begin every document.
    """
    load_plugins(task["plugins"])
    folder, source = Path(task["folder"]), Source.model_validate(task["source"])
    tokenizer = load_tokenizer(str(folder / "tokenizer"))

    def tokenize(line: Any) -> None:
        try:
            piece = SourcePiece.parsed(line)
            write_piece(folder, piece, source, tokenizer, task["opening"])
        except OSError as error:
            why = why_unwritten(error, "set data.cache to another folder")
            raise WeftError(f"cannot write {folder}: {why}") from None

    return tokenize


if __name__ == "__main__":
    answer_lines(begin_tokenizing)

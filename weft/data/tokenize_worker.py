"""Tokenize pieces of a source, one line of JSON on the standard input each: ``python -m weft.data.tokenize_worker``."""

import json
import os
import sys
from pathlib import Path

from weft.data.source_piece import SourcePiece
from weft.data.tokenize_pieces import write_piece
from weft.data.tokenizer import load_tokenizer
from weft.errors import UsageError, WeftError
from weft.plugins import load_plugins
from weft.recipe import Source


def tokenize_lines(task: str) -> None:
    """Run a worker process: tokenize each piece that a line of standard input describes, and answer it with a line.

    The answer is ``null``, or the error. ``task``: JSON of the folder, the source, plugins, and the ids that begin
    every document. The worker ends when its input ends, at the latest after one more piece, so it does not outlive its
    parent.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    given = json.loads(task)
    load_plugins(given["plugins"])
    folder, source = Path(given["folder"]), Source.model_validate(given["source"])
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    for line in sys.stdin:
        answer = None
        try:
            piece = SourcePiece.parsed(json.loads(line))
            write_piece(folder, piece, source, tokenizer, given["opening"])
        except WeftError as error:
            answer = {"error": str(error), "usage": isinstance(error, UsageError)}
        except OSError as error:
            cause = error.strerror or error
            answer = {"error": f"cannot write {folder}: {cause}", "usage": False}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    tokenize_lines(sys.argv[1])

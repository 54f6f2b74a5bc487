"""Text of a document with the place that it comes from."""

from pathlib import Path
from typing import NamedTuple


class PlacedText(NamedTuple):
    """Text of a document, and the place where it was read.

    ``file``: the file. ``number``: the line of the record, or the record's number from 1 in files without lines; 0 if
    the document is the whole file.
    """

    file: Path
    number: int
    text: str

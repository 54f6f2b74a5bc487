"""Forward passes that read pieces of many texts at once, from pages in which their layers remember what came before.

The pages (:mod:`weft.models.paged`) stand in for the layers' attention for the time of one pass. Their blocks are those
that the scheduler's tables list (:mod:`weft.generate.pool`).
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch

from weft.generate.adapters import Shelf
from weft.models.invariant import TILE, invariant
from weft.models.paged import attending, layer_pages, slots
from weft.models.spans import Batch, Span, Tile
from weft.models.transformer import Transformer
from weft.models.views import Views

T = torch.Tensor


class Part(NamedTuple):
    """What is read of a text ``ids``: all from ``past`` on; logits behind its last ``rows`` tokens are wanted.

    The text begins at position ``offset``, behind ``context``.
    """

    ids: Sequence[int]
    past: int
    table: Sequence[int]
    rows: int = 1
    offset: int = 0
    context: Sequence[Tile] = ()
    adapter: tuple[str, Sequence[int]] | None = None  # its name, and the blocks that it is in


class Row(NamedTuple):
    """Pieces of texts behind one another, which one forward pass reads without padding."""

    ids: list[int]
    positions: list[int]
    spans: list[Span]
    wanted: list[int]  # the places whose logits are wanted


def pack(parts: Iterable[Part]) -> Row:
    """The new tokens of all ``parts``."""
    row = Row([], [], [], [])
    for text, past, table, rows, offset, context, _ in parts:
        first = len(row.ids)
        row.ids.extend(text[past:])
        row.positions.extend(range(offset + past, offset + len(text)))
        row.spans.append(Span(first, len(row.ids), past, table, context))
        row.wanted.extend(range(len(row.ids) - rows, len(row.ids)))
    return row


#: Adapters by name, and the blocks into which they are put.
Loads = Sequence[tuple[str, Sequence[int]]]


class PagedReader:
    """Reads pieces of many texts in one forward pass of ``model``, ``depth`` of which may be under way at once."""

    depth = 1
    shelf: Shelf | None = None

    def __init__(self, model: Transformer, size: int = 16, alike: bool = False) -> None:
        """``alike``: every token is computed alike whatever is read beside it (:mod:`weft.models.invariant`)."""
        self.model, self.size, self.pages, self.alike = model, size, layer_pages(model, size), alike

    def start(
        self, parts: Sequence[Part], copies: Sequence[tuple[int, int]] = (), loads: Loads = ()
    ) -> Callable[[], T]:
        """Begin to :meth:`read`; what is returned waits for the logits."""
        found = self.read(parts, copies, loads)
        return lambda: found

    def close(self) -> None:
        """Nobody else has to know that it ends."""

    def read(self, parts: Sequence[Part], copies: Sequence[tuple[int, int]] = (), loads: Loads = ()) -> T:
        """Logits ``[rows of all parts, vocab]``.

        ``copies``: blocks to copy into others before anything else; ``loads``: adapters to put into blocks then.
        """
        if self.model.shape.kind:  # a plugin's model cannot remember: it reads all again
            parts = [part._replace(past=0) for part in parts]
        row, device = pack(parts), self.model.mesh.device
        filled = [0] * (-len(row.ids) % TILE if self.alike else 0)
        numbers = torch.tensor([row.ids + filled, row.positions + filled], device=device)
        places = torch.tensor(slots(row.spans, self.size), device=device)
        batches = dict[int, list[Batch | Span | Views]]()
        for pages in self.pages:
            pages.copy(copies)
            pages.spans, pages.slots = row.spans, places
            pages.batches = batches
        for name, table in loads:
            assert self.shelf is not None
            self.shelf.load(name, table)
        documents = torch.tensor([0, *(span.last for span in row.spans)], dtype=torch.int32)
        adapted = [(span, *p.adapter) for span, p in zip(row.spans, parts, strict=True) if p.adapter]
        shelf = self.shelf.adapting(adapted) if self.shelf and adapted else nullcontext()
        with attending(self.model, self.pages), shelf, invariant(self.alike):
            only = torch.tensor(row.wanted, dtype=torch.int64, device=device)
            return self.model(numbers[:1], numbers[1:2], documents, only=only)[0]

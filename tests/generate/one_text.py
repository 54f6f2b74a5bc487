"""One text by itself: read piece by piece, without scheduler and engine, or written by an engine of its own."""

from collections.abc import Collection, Iterator, Sequence

import torch

from weft.generate.engine import Engine
from weft.generate.packed_row import TextSlice
from weft.generate.reader import PagedReader
from weft.generate.sampling import Sampling
from weft.models.transformer import Transformer


class OneText:
    """Reads one text piece by piece; its blocks follow each other."""

    def __init__(self, model: Transformer, size: int = 16) -> None:
        self.reader, self.ids = PagedReader(model, size), list[int]()

    def read(self, ids: Sequence[int]) -> torch.Tensor:
        """The prompt, later new tokens: logits ``[vocab]`` of the last one."""
        past, self.ids = len(self.ids), [*self.ids, *ids]
        return self.reader.read(
            [TextSlice(ids, past, range(-(-len(self.ids) // self.reader.size)))]
        )[0]


def generate(
    model: Transformer,
    prompt_ids: list[int],
    max_new: int,
    stops: Collection[int],
    how: Sampling,
) -> Iterator[int]:
    """Yield up to ``max_new`` ids that continue ``prompt_ids``, as they come; ends at one of ``stops``, not yielded."""
    engine = Engine(model)
    yield from engine.stream(engine.submit(prompt_ids, max_new, how, stops)[0])

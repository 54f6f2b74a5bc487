"""A text that is read piece by piece, without scheduler and engine."""

from collections.abc import Sequence

import torch

from weft.generate.cache import PagedReader, Part
from weft.models.transformer import Transformer


class OneText:
    """Reads one text piece by piece; its blocks follow each other."""

    def __init__(self, model: Transformer, size: int = 16) -> None:
        self.reader, self.ids = PagedReader(model, size), list[int]()

    def read(self, ids: Sequence[int]) -> torch.Tensor:
        """The prompt, later new tokens: logits ``[vocab]`` of the last one."""
        past, self.ids = len(self.ids), [*self.ids, *ids]
        return self.reader.read([Part(self.ids, past, range(-(-len(self.ids) // self.reader.size)))])[0]

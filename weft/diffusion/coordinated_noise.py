"""Noise of the blocks of a long video that belong together: permutations of one template (DualParal)."""

from collections.abc import Sequence

import torch


class CoordinatedNoise:
    """Noise for a long video that is sampled in blocks of frames (DualParal).

    The first block's noise is a template of ``first`` frames. A later block sees the last ``context`` frames of the
    block before it. Its own noise consists of the template's other frames in random order, so that a block together
    with its context has every frame of the template once. The noise of a block depends only on seed, sample and block.

    Args:
        ``seed``: seed of all samples.
        ``samples``: numbers of the samples.
        ``first``: number of frames of the first block.
        ``frames``: number of frames of a later block, ``first - context``.
        ``context``: number of frames of the previous block that a block sees.
        ``shape``: tokens of a frame, and values of a token.
    """

    def __init__(
        self,
        seed: int,
        samples: Sequence[int],
        first: int,
        frames: int,
        context: int,
        shape: tuple[int, int],
    ) -> None:
        self.seed, self.context, self.frames = seed, context, frames
        self.samples = samples
        self.templates = torch.stack(
            [self._template(sample, first, shape) for sample in samples]
        )
        #: which frames of the template a block has, by sample, for the blocks so far
        self.orders = [[list(range(first))] for _ in samples]

    def _template(
        self, sample: int, first: int, shape: tuple[int, int]
    ) -> torch.Tensor:
        generator = torch.Generator().manual_seed(block_seed(self.seed, sample, 0))
        return torch.randn(first, *shape, generator=generator, dtype=torch.float64)

    def block(self, index: int) -> torch.Tensor:
        """Return the noise of block ``index``, ``[samples, frames, tokens of a frame, values]``."""
        return torch.stack(
            [
                template[self._order(at, index)]
                for at, template in enumerate(self.templates)
            ]
        )

    def _order(self, at: int, index: int) -> list[int]:
        orders = self.orders[at]
        while len(orders) <= index:
            before = orders[-1]
            kept = before[len(before) - self.context :]
            rest = sorted(set(range(len(orders[0]))) - set(kept))
            seed = block_seed(self.seed, self.samples[at], len(orders))
            generator = torch.Generator().manual_seed(seed)
            turn = torch.randperm(len(rest), generator=generator).tolist()
            orders.append([rest[at] for at in turn][: self.frames])
        return orders[index]


def block_seed(seed: int, sample: int, block: int) -> int:
    """Return the seed of the noise of one block of frames, which is the same on every rank. ``seed``: seed of all
    samples. ``sample``, ``block``: numbers of the sample and of its block.
    """
    from hashlib import blake2b

    said = f"{seed} {sample} {block}".encode()
    return int.from_bytes(blake2b(said, digest_size=7).digest(), "little")

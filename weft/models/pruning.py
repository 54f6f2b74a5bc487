"""Unstructured pruning: which elements of a model's weights become zero, block by block of the model.

A way of pruning is a technique of kind ``pruner`` (:class:`Pruner`). The weights are those of attention and dense
feed-forwards; embedding, norms and output layer stay whole, as in the papers.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import ClassVar, Protocol

import torch

from weft.errors import UsageError
from weft.models.fused import project
from weft.models.ladder import Stream
from weft.models.projections import Projections
from weft.models.rope import angles
from weft.models.transformer import Transformer
from weft.recipe import ModelShape

T = torch.Tensor

#: Tokens of a text that are read together.
WINDOW = 512

#: For each group of weights with the same input: the sum of the squares of each element of the input over all tokens.
Squares = dict[tuple[str, ...], T]


class Pruner(Protocol):
    """Interface of ways of pruning, which decide which elements of a weight are kept. ``reads_texts`` (class
    attribute): whether the decision needs the inputs that the weights get while the model reads texts.
    """

    reads_texts: ClassVar[bool]

    def kept(self, weight: T, norms: T | None, share: float) -> T:
        """Return a mask of the elements of ``weight`` ``[out, in]`` that are kept, bool of the same shape. ``norms``:
        for each input element of the weight, the norm of its values over the tokens of texts, ``[in]``; None without
        texts. ``share``: fraction of the elements that is not kept.
        """
        ...


def keep_largest(scores: T, share: float) -> T:
    """Return a mask, bool of the shape of ``scores``, of the elements that are kept: in each row all but the fraction
    ``share`` with the lowest scores. Of equal scores the first ones are dropped first, so that the number of zeros is
    exact.
    """
    dropped = round(share * scores.shape[1])
    if not dropped:
        return torch.ones_like(scores, dtype=torch.bool)
    limit = scores.kthvalue(dropped, dim=1, keepdim=True).values
    equal = scores == limit
    room = dropped - (scores < limit).sum(1, keepdim=True)
    return (scores > limit) | (equal & (equal.cumsum(1) > room))


def check_prunable(shape: ModelShape, name: str) -> None:
    """Raise :class:`UsageError` if the weights of a model of ``shape``, called ``name``, cannot be pruned."""
    if shape.kind or shape.mixtures or shape.kv_rank:
        raise UsageError(
            f"{name} is no dense model with plain attention, for which pruning is; leave it as it is"
        )
    if shape.small_ffn:
        raise UsageError(
            f"{name} has small feed-forwards, which texts do not reach and no file of pruned weights holds; leave it "
            "as it is"
        )
    if shape.adapter is not None:
        raise UsageError(
            f"{name} has an adapter; merge it first, with weft export --merge, and prune the result"
        )


@torch.inference_mode()
def prune_weights(
    model: Transformer, pruner: Pruner, share: float, ids: Sequence[int] = ()
) -> list[str]:
    """Set the fraction ``share`` of the elements of each weight of ``model`` to zero, in place. Return the names of the
    weights. ``pruner`` chooses the elements. ``ids``: tokens of a text, for a pruner that reads texts. They go through
    the model in pieces of :data:`WINDOW` tokens, block by block. Each block is pruned with inputs that the blocks
    before it compute after their own pruning, as in Wanda.
    """
    pieces = torch.tensor(ids, dtype=torch.int64).split(WINDOW) if ids else ()
    texts: list[Stream] = [model.embedding(piece[None]) for piece in pieces]
    names = []
    for i, block in model.blocks.items():
        run = partial(_run_block, model, int(i))
        modules = [m for m in block.modules() if isinstance(m, Projections)]
        with ExitStack() as recording:
            squares = [recording.enter_context(_recording(m)) for m in modules]
            for piece, x in zip(pieces, texts, strict=True):
                run(len(piece), x)
        for module, of_module in zip(modules, squares, strict=True):
            for group in module.TOGETHER:
                norms = of_module[group].sqrt() if texts else None
                for name in group:
                    weight = getattr(module, name)
                    weight.mul_(pruner.kept(weight, norms, share))
                    names.append(module.inside(name))
        texts = [run(len(p), x) for p, x in zip(pieces, texts, strict=True)]
    return names


def _run_block(model: Transformer, i: int, tokens: int, x: Stream) -> Stream:
    """Run the block ``i`` on a text of so many tokens, ``[1, tokens, embed]``."""
    rope = angles(torch.arange(tokens)[None], model.freq, model.embedding.table.dtype)
    return model.run_block(i, x, rope, torch.tensor([0, tokens], dtype=torch.int32))


@contextmanager
def _recording(module: Projections) -> Iterator[Squares]:
    """Return a context in which the squares of what enters the projections of ``module`` are added up."""
    squares: Squares = {}

    def recorded(x: T, names: tuple[str, ...]) -> tuple[T, ...]:
        own = x.float().square().flatten(0, -2).sum(0)
        squares[names] = squares[names] + own if names in squares else own
        return project(x, *(getattr(module, name) for name in names))

    for names in module.TOGETHER:
        module.products[names] = partial(recorded, names=names)
    try:
        yield squares
    finally:
        for names in module.TOGETHER:
            del module.products[names]

"""Checks of the parts of a model that a recipe lets learn by name: adapters' targets and tokens, and what is frozen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from weft.errors import UsageError, nearest
from weft.shapes.foreign_names import projection_name
from weft.shapes.parameters import is_target, learns, parameters, projections

if TYPE_CHECKING:
    from weft.checkpoint.weights import Pretrained
    from weft.recipe import Adapter, ModelShape, Train


def check_names(shape: ModelShape, train: Train) -> None:
    """Raise :class:`UsageError` for a name pattern in the settings that matches no parameter of the model; the error
    names it.

    The patterns are those of ``adapter.targets``, ``adapter.rank_pattern``, ``adapter.alpha_pattern`` and
    ``train.freeze``. An error is also raised if ``train.freeze`` leaves no parameter to train. ``shape``: the model
    with its adapter; ``train``: the recipe's section ``[train]``.
    """
    adapter = shape.adapter
    for pattern in adapter.targets if adapter else ():
        if not any(is_target(pattern, path) for path in projections(shape)):
            known = _projection_names(projections(shape))
            raise UsageError(
                f"adapter.targets: {pattern!r} matches no weight of this model; {nearest(pattern, known)}, or a path "
                "such as blocks.0.attention.*"
            )
    if adapter:
        _check_patterns(
            adapter,
            [
                p
                for p in projections(shape)
                if any(is_target(t, p) for t in adapter.targets)
            ],
        )
    if not train.freeze:
        return
    names = [p.name for p in parameters(shape)]
    for pattern in train.freeze:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UsageError(
                f"train.freeze: {pattern!r} matches no parameter; {nearest(pattern, names)}"
            )
    if not any(learns(name, shape, train.freeze) for name in names):
        raise UsageError("train.freeze leaves nothing to learn; leave out a pattern")


def _projection_names(paths: Iterable[str]) -> list[str]:
    """What Weft and what Hugging Face call the weights ``paths``, each name once."""
    inside = sorted({".".join(path.split(".")[-2:]) for path in paths})
    return [
        name
        for path in inside
        for name in (path.rpartition(".")[2], projection_name(path))
    ]


def _check_patterns(adapter: Adapter, adapted: Sequence[str]) -> None:
    """Refuse ranks and alphas for weights that are not among those ``adapted``."""
    names = _projection_names(adapted)
    for setting in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(adapter, setting):
            if not any(is_target(pattern, path) for path in adapted):
                raise UsageError(
                    f"adapter.{setting}: {pattern!r} matches no weight that has an adapter; {nearest(pattern, names)}"
                )


def adapter_with_tokens(
    adapter: Adapter, shape: ModelShape, pretrained: Pretrained | None
) -> Adapter:
    """Return ``adapter`` with ``adapter.tokens`` as ids: the tokens whose embedding rows the adapter trains.

    ``adapter.tokens = "new"`` stands for all ids by which the vocabulary grows beyond that of ``pretrained``.
    ``shape``: the model with its vocabulary; ``pretrained``: the model that the run starts from, None if there is none.
    Raises :class:`UsageError` for ids that the model does not have, and for "new" without new tokens.
    """
    if shape.tied and "lm_head" in adapter.whole:
        raise UsageError(
            "adapter.whole: this model's output layer is its embedding (model.tied); name 'embed_tokens', which is both"
        )
    if adapter.tokens == "new":
        old = pretrained.shape.vocab if pretrained else 0
        if pretrained is None or shape.vocab <= old:
            said = f"model.from has {old} tokens, and model.vocab asks for no more"
            raise UsageError(
                "adapter.tokens = 'new' is for a vocabulary that grows: "
                f"{said if pretrained else 'there is no model.from'}; set model.vocab to the new size, or name the ids"
            )
        return adapter.model_copy(update={"tokens": tuple(range(old, shape.vocab))})
    if shape.vocab and adapter.tokens and adapter.tokens[-1] >= shape.vocab:
        raise UsageError(
            f"adapter.tokens: {adapter.tokens[-1]} is not the id of one of {shape.vocab} tokens; name others, or raise "
            "model.vocab"
        )
    return adapter

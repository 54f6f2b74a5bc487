"""The section ``[sync]``: how islands agree."""

from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from weft.errors import UsageError
from weft.recipe.compressor_word import compressor_word
from weft.recipe.section import Section

#: Learning rate and momentum of the outer update, as published, by ``sync.update``.
OUTER = {
    "nesterov": (0.7, 0.9), "streaming": (0.7, 0.9), "eager": (0.7, 0.9), "co2": (1.0, 0.2), "noloco": (0.7, 0.5),
}  # fmt: skip


class Sync(Section):
    """How islands (``layout.island``) agree: docs/islands.md.

    Islands synchronise after ``every`` steps, with all others or with some (``partner``): ring neighbours, random
    pairs, or those that a ``graph`` of pairs such as [[0, 1], [1, 2]] links; partners are for ``update = "average"``,
    and ``"noloco"`` always uses pairs. ``update`` says how (:mod:`weft.sync.methods`): the ``average`` of all
    parameters; ``nesterov`` momentum on the mean difference (DiLoCo); the same for fragments in turn, whose result is
    applied ``delay`` steps later, mixed with a share ``mix`` of the local parameters (``streaming``); with the others'
    differences of the last round (``eager``, ``co2``); or in pairs (``noloco``). Where all average in every step they
    exchange gradients, and compute exactly what one island would.

    ``compress``: the compressor of what is sent: ``int8`` to ``int4``, ``topk:0.01``, ``randk:0.1``, ``powersgd:4``,
    ``sign`` or ``cocktail`` (:mod:`weft.sync.compress`); ``compress_back`` is that of what comes back, if it differs.
    The error of a message is added to the next one. With ``allocate`` each tensor has a rank, share or number of
    bits of its own, chosen anew every that many rounds for the smallest total size with no more error than one setting
    for all (L-GreCo).

    Sums go around a ring of the islands: in the order measured to be fastest, or as numbered.

    ``lr`` and ``momentum`` of the outer update default to those of its paper. For ``co2``: late differences are divided
    by ``penalty``, and no element of the momentum is above ``clip``.
    """

    every: PositiveInt = 1
    partner: Literal["all", "ring", "pairs", "graph"] = "all"
    graph: tuple[tuple[int, int], ...] = ()
    update: Literal["average", "nesterov", "streaming", "eager", "co2", "noloco"] = (
        "average"
    )
    fragments: PositiveInt = 1
    delay: int = Field(0, ge=0)
    mix: float = Field(0.5, ge=0, le=1)
    lr: PositiveFloat = 1.0
    momentum: float = Field(0.0, ge=0, lt=1)
    penalty: PositiveFloat = 1.0
    clip: PositiveFloat = 1.0
    compress: str = "none"
    compress_back: str = ""
    allocate: int = Field(0, ge=0)
    order: Literal["measured", "numbered"] = "measured"

    @model_validator(mode="after")
    def _compressors(self) -> Self:
        for field, word in (
            ("compress", self.compress),
            ("compress_back", self.compress_back),
        ):
            try:
                compressor_word(word or "none")
            except UsageError as error:
                raise ValueError(f"{field}: {error}") from None
        return self

    @model_validator(mode="before")
    @classmethod
    def _as_published(cls, tree: Any) -> Any:
        if isinstance(tree, dict) and tree.get("update") == "diloco":
            raise ValueError(
                "update = 'diloco': DiLoCo is update = 'nesterov', or 'streaming' with fragments"
            )
        if isinstance(tree, dict) and tree.get("update") in OUTER:
            tree = (
                dict(zip(("lr", "momentum"), OUTER[tree["update"]], strict=True)) | tree
            )
        return tree

    @property
    def of_gradients(self) -> bool:
        """Whether gradients are exchanged, before every update, so that islands compute what one would."""
        return (self.every, self.update, self.partner, self.compress) == (
            1,
            "average",
            "all",
            "none",
        )

    @property
    def in_ring(self) -> bool:
        """Whether sums of all islands go around a ring."""
        return (
            self.partner == "all"
            and self.update != "noloco"
            and self.compress.split(":")[0] in ("none", "powersgd")
        )

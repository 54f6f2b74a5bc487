"""The section ``[sync]``: how islands agree."""

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from weft.errors import UsageError
from weft.recipe.compressor_word import compressor_word
from weft.recipe.host_section import HostSection
from weft.registry import find


class Sync(HostSection):
    """How islands (``layout.island``) agree: docs/islands.md.

    Islands synchronise after ``every`` steps, with all others or with some (``partner``): ring neighbours, random
    pairs, or those that a ``graph`` of pairs such as [[0, 1], [1, 2]] links. ``update`` says how, by the name of a
    method; ``weft techniques`` lists them, and each brings settings of its own: the ``average`` of all parameters, with
    any partners; ``nesterov`` momentum on the mean difference (DiLoCo); the same for ``fragments`` in turn, whose
    result is applied ``delay`` steps later and mixed (``streaming``); with the others' differences of the last round
    (``eager``, ``co2``); or in pairs (``noloco``). Where all average in every step they exchange gradients, and compute
    exactly what one island would.

    ``compress``: the compressor of what is sent: ``int8`` to ``int4``, ``topk:0.01``, ``randk:0.1``, ``powersgd:4``,
    ``sign`` or ``cocktail`` (:mod:`weft.sync.compress`); ``compress_back`` is that of what comes back, if it differs.
    The error of a message is added to the next one. With ``allocate`` each tensor has a rank, share or number of
    bits of its own, chosen anew every that many rounds for the smallest total size with no more error than one setting
    for all (L-GreCo).

    Sums go around a ring of the islands: in the order measured to be fastest, or as numbered.
    """

    hosts: ClassVar = {"update": "sync"}

    every: PositiveInt = 1
    partner: Literal["all", "ring", "pairs", "graph"] = "all"
    graph: tuple[tuple[int, int], ...] = ()
    update: str = "average"
    fragments: PositiveInt = 1
    delay: int = Field(0, ge=0)
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
        return tree

    @property
    def method(self) -> Any:
        """The method of ``update``: a :class:`weft.sync.sync_method.SyncMethod`."""
        return find("sync", self.update).made(self)

    @property
    def partnership(self) -> str:
        """Who exchanges with whom: as ``partner`` says, or in pairs where the method is for pairs alone."""
        return "pairs" if self.method.in_pairs else self.partner

    @property
    def of_gradients(self) -> bool:
        """Whether gradients are exchanged, before every update, so that islands compute what one would."""
        exact = self.method.is_mean and self.compress == "none"
        return self.every == 1 and self.partner == "all" and exact

    @property
    def in_ring(self) -> bool:
        """Whether sums of all islands go around a ring."""
        return self.partnership == "all" and self.compress.split(":")[0] in (
            "none",
            "powersgd",
        )

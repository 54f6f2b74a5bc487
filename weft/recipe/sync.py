"""The section ``[sync]``: how islands agree."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from weft.errors import UsageError
from weft.recipe.compressor_word import NONE, compressor_of, technique_of
from weft.recipe.host_section import HostSection
from weft.registry import Registered, find


class Sync(HostSection):
    """Section on how islands, groups of ranks that train on their own, exchange what they have learned.

    ``layout.island`` is their number (docs/explanations/islands.md). ``weft techniques`` lists the methods, each of
    which brings settings of its own. Islands that all average after every step exchange gradients instead of
    parameters, and compute exactly what one island would. The error of a compressed message is added to the next
    message.
    """

    hosts: ClassVar = {"update": "sync"}
    asks: ClassVar = {"routes": "routed-stages"}

    every: PositiveInt = Field(
        1, description="Number of steps that islands take between two synchronisations."
    )
    partner: Literal["all", "ring", "pairs", "graph"] = Field(
        "all",
        description=(
            "Islands with which an island exchanges. 'all': all others; 'ring': its two neighbours in a ring; "
            "'pairs': a random one in each round; 'graph': those to which 'graph' links it. 'ring' and 'graph' need "
            "update = 'average', 'dadao' or 'a2cid2'."
        ),
    )
    graph: tuple[tuple[int, int], ...] = Field(
        (),
        description=(
            "For partner = 'graph': pairs of islands that exchange with each other, by their numbers from 0, such "
            "as [[0, 1], [1, 2]]. Leave it empty otherwise."
        ),
    )
    update: str = Field(
        "average",
        description=(
            "How islands combine their parameters after each round of 'every' steps. 'average': their mean; "
            "'nesterov': momentum on their mean change (DiLoCo); 'streaming': the same for one fragment of the "
            "model after another; 'eager': the same with the other islands' changes of the round before; 'co2': "
            "momentum on all changes of the round before; 'noloco': momentum on the mean change of two random "
            "islands; 'dadao', 'a2cid2': without rounds, pairs of islands at random times."
        ),
    )
    routes: Literal["own", "random"] = Field(
        "own",
        description=(
            "Which islands compute the pipeline stages of a microbatch. 'own': the island that it belongs to; "
            "'random': at each stage a random island (NoLoCo)."
        ),
    )
    fragments: PositiveInt = Field(
        1,
        description=(
            "For update = 'streaming': number of fragments, parts of the model that are synchronised one after the "
            "other. More fragments make each exchange smaller. 1: the whole model at once."
        ),
    )
    delay: int = Field(
        0,
        ge=0,
        description=(
            "For update = 'streaming': number of steps between the sending of a fragment and the use of the "
            "islands' mean of it. Training goes on in the meantime. 0: training waits for the mean."
        ),
    )
    compress: str = Field(
        "none",
        description=(
            "Compression of what islands send. 'none'; 'int8' to 'int4': numbers of so many bits; 'topk:0.01': only "
            "this share of the elements, the largest; 'randk:0.1': only this share of the elements, at random; "
            "'powersgd:4': each matrix as a product of two thin ones of this rank; 'sign': signs, and a mean size "
            "for each block; 'cocktail': some of the elements, in four bits."
        ),
    )
    compress_back: str = Field(
        "",
        description=(
            "Compression of the means that islands get back: one of the values of 'compress'. Empty: the value of "
            "'compress'."
        ),
    )
    allocate: int = Field(
        0,
        ge=0,
        description=(
            "Number of synchronisations between two choices of how strongly each tensor is compressed "
            "(L-GreCo). Tensors whose compression does little harm are compressed more. 0: the same strength "
            "for all tensors."
        ),
    )
    order: Literal["measured", "numbered"] = Field(
        "measured",
        description=(
            "Order of the islands in a ring. 'measured': the fastest order according to measured links; 'numbered': "
            "by the islands' numbers."
        ),
    )

    at_end: Literal["mean", "own"] = Field(
        "mean",
        description=(
            "Parameters with which a complete run ends: the mean over all islands ('mean'), or those that each "
            "island has ('own')."
        ),
    )

    @model_validator(mode="after")
    def _compressors(self) -> Self:
        for field in ("compress", "compress_back"):
            try:
                compressor_of(getattr(self, field) or NONE)
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
        """The synchronisation method that ``update`` names, a :class:`weft.sync.sync_method.SyncMethod`."""
        return find("sync", self.update).implementation(self)

    @property
    def compressors(self) -> tuple[Any, Any]:
        """Compressors of the messages that an island sends, and of those that it receives.

        Each is None if these messages are not compressed.
        """
        back = self.compress_back or self.compress
        return compressor_of(self.compress), compressor_of(back)

    def named(self) -> Iterator[Registered]:
        words = dict.fromkeys((self.compress, self.compress_back))
        yield from super().named()
        yield from filter(None, map(technique_of, words))

    @property
    def partnership(self) -> str:
        """Which islands average with each other: ``pairs`` if the method needs pairs, else the value of ``partner``."""
        return "pairs" if self.method.in_pairs else self.partner

    @property
    def of_gradients(self) -> bool:
        """Whether islands average uncompressed gradients before every update, and so compute what one island would."""
        exact = self.method.is_mean and self.compress == "none"
        return self.every == 1 and self.partner == "all" and exact

    @property
    def in_ring(self) -> bool:
        """Whether islands sum their messages by a ring all-reduce."""
        compressor = self.compressors[0]
        return self.partnership == "all" and (not compressor or compressor.in_rings)

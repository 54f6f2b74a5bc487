"""The section ``[saddle]``: a saddle point, looked for by devices that exchange compressed differences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from weft.errors import UsageError
from weft.recipe.compressor_word import NONE, compressor_of, technique_of
from weft.recipe.host_section import HostSection
from weft.registry import Registered, find


class Saddle(HostSection):
    """Section on saddle points: values of the parameters at which some of them minimise an objective, and the others
    maximise it.

    The objective is the mean of the objectives of several devices. A device computes gradients of its own objective,
    and sends them to a server, the first rank. The ranks of a run share the devices equally, so that the result does
    not depend on the number of ranks.
    """

    hosts: ClassVar[Mapping[str, str]] = {
        "problem": "saddle-problem",
        "method": "saddle-method",
    }

    problem: str = Field(
        "bilinear",
        description=(
            "The objective that some parameters minimise and others maximise, whose saddle point is sought. "
            "'bilinear': a game of two vectors, a bilinear function with quadratic terms; 'gan': a generator and a "
            "critic of images of digits."
        ),
    )
    method: str = Field(
        "masha1",
        description=(
            "How devices find the saddle point together. 'extragradient': they send whole gradients; 'naive': they "
            "send compressed gradients; 'masha1' and 'masha2': they send compressed differences of gradients, which "
            "vanish near the saddle point ('masha1' with random, unbiased compression, 'masha2' with any)."
        ),
    )
    devices: PositiveInt = Field(
        4,
        description=(
            "Number of devices, over all ranks together. A device is a participant with its own part of the "
            "objective and its own data. A rank may compute several."
        ),
    )
    rounds: PositiveInt = Field(
        1_000,
        description="Number of updates of the parameters, after which the run ends.",
    )
    lr: PositiveFloat = Field(
        0.1,
        description="Step size of an update. Methods that take two steps in an update use it for both.",
    )
    compress: str = Field(
        NONE,
        description=(
            "Compression of what devices send to the server: one of the values of sync.compress, such as 'topk:0.1'."
        ),
    )
    compress_back: str = Field(
        "",
        description=(
            "Compression of the mean that the server sends back to devices: one of the values of sync.compress. "
            "Empty: the value of 'compress'."
        ),
    )
    evaluate: NonNegativeInt = Field(
        0,
        description=(
            "Number of updates between two measurements of how good the result is. What is measured depends on "
            "'problem'. 0: only one at the end."
        ),
    )

    @model_validator(mode="after")
    def _together(self) -> Self:
        for field in ("compress", "compress_back"):
            try:
                compressor_of(getattr(self, field) or NONE)
            except UsageError as error:
                raise ValueError(f"{field}: {error}") from None
        find("saddle-method", self.method).implementation.check(self)
        return self

    def named(self) -> Iterator[Registered]:
        words = dict.fromkeys((self.compress, self.compress_back))
        yield from super().named()
        yield from filter(None, map(technique_of, words))

    @property
    def compressors(self) -> tuple[Any, Any]:
        """Compressors of the messages that devices send to the server, and of the answers that they get; each is None
        if nothing is compressed.
        """
        return compressor_of(self.compress), compressor_of(
            self.compress_back or self.compress
        )

"""The section ``[stream]``: training on simulations while they run."""

from __future__ import annotations

from typing import Any

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from weft.registry import check_name
from weft.section import Section


class SampleStream(Section):
    """Section on a stream of samples: simulators send them while the model learns (docs/how-to/streams.md)."""

    producers: tuple[str, ...] = Field(
        (),
        description=(
            "Command lines of simulators, each of which the run starts as a process on the first rank's host, and "
            "starts again if it dies. 'python' is the interpreter of the run."
        ),
    )
    listen: str = Field(
        "",
        pattern=r"^$|^[^/\s]+:\d{1,5}$",
        description=(
            "Address HOST:PORT of the first rank at which simulators of other hosts join. They need the run's "
            "WEFT_SECRET. If not set: only those that the run starts."
        ),
    )
    others: NonNegativeInt = Field(
        0,
        description=(
            "Number of simulators that join at 'listen'; the stream ends when they and those of 'producers' have "
            "ended. 0: any number, and without 'producers' the stream ends with train.steps alone."
        ),
    )
    buffer: str = Field(
        "reservoir",
        description=(
            "How samples are drawn. 'reservoir': at random and repeatedly, each at least once; 'fifo': once, in their "
            "order; 'firo': once, in random order."
        ),
    )
    capacity: PositiveInt = Field(
        1024, description="Largest number of samples in the buffer."
    )
    watermark: NonNegativeInt = Field(
        0,
        description=(
            "Number of samples that the buffer must exceed before any is drawn. 'fifo' and 'firo' keep "
            "this number in the buffer until the stream ends."
        ),
    )
    held_out: tuple[str, ...] = Field(
        (),
        description=(
            "Command lines of simulators whose samples are for validation. They run to their end before training "
            "begins, and again when the run is resumed."
        ),
    )
    restarts: NonNegativeInt = Field(
        3,
        description=(
            "How often in a row a simulator is started again after it has died without sending a new sample. If it "
            "dies so once more, the run ends with an error."
        ),
    )
    patience: PositiveFloat = Field(
        600.0,
        description="Seconds without any new sample after which the run ends with an error.",
    )

    @field_validator("buffer")
    @classmethod
    def _is_known(cls, value: Any) -> Any:
        """Refuse a buffer that nothing has registered."""
        check_name("buffer", value)
        return value

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port at which simulators of other hosts join; None if they do not."""
        host, _, port = self.listen.rpartition(":")
        return (host.strip("[]"), int(port)) if self.listen else None

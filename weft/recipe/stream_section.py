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
            "Command lines of simulators, whose samples the model learns from. The run starts each as a process on "
            "the first rank's host, and starts it again if it dies. The word 'python' stands for the Python of the "
            "run."
        ),
    )
    listen: str = Field(
        "",
        pattern=r"^$|^[^/\s]+:\d{1,5}$",
        description=(
            "Address HOST:PORT at which the first rank waits for simulators on other hosts. These need the same "
            "WEFT_SECRET in their environment as the run. Empty: only the simulators of 'producers'."
        ),
    )
    others: NonNegativeInt = Field(
        0,
        description=(
            "Number of simulators that will join at 'listen'. When they and those of 'producers' have ended, the "
            "stream of samples ends, and with it the run. 0: any number; without 'producers' the run then ends at "
            "train.steps alone."
        ),
    )
    buffer: str = Field(
        "reservoir",
        description=(
            "How the buffer gives samples to training. 'reservoir': at random, each at least once and perhaps "
            "several times; 'fifo': each once, in the order in which they came; 'firo': each once, in random order."
        ),
    )
    capacity: PositiveInt = Field(
        1024,
        description=(
            "Largest number of samples in the buffer between simulators and training. A simulator waits if there is "
            "no room for its next sample."
        ),
    )
    watermark: NonNegativeInt = Field(
        0,
        description=(
            "Number of samples in the buffer above which training may draw samples from it. 'fifo' and 'firo' never "
            "leave fewer than this number in the buffer before the stream ends."
        ),
    )
    held_out: tuple[str, ...] = Field(
        (),
        description=(
            "Command lines of simulators whose samples are used for validation only. They run to their end before "
            "training begins, and again if the run is resumed. Empty: no validation."
        ),
    )
    restarts: NonNegativeInt = Field(
        3,
        description=(
            "Number of times in a row that a simulator is started again after it has died without sending a new "
            "sample. If it dies once more, the run ends with an error."
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

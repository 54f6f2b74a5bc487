"""The section ``[checkpoint]``: where checkpoints go, and how often."""

from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from weft.errors import UsageError
from weft.recipe.storage_address import storage_address
from weft.section import Section

#: The value of ``checkpoint.levels.to`` that means a folder in this host's memory.
MEMORY = "memory"


class Level(Section):
    """One place for checkpoints with a cadence of its own."""

    to: str = Field(
        "",
        description="A folder, s3://bucket/prefix, or 'memory' (this host's /dev/shm); left "
        "out: the run folder's 'checkpoints'.",
    )
    every: int = Field(
        0, ge=0, description="Steps between checkpoints; 0 saves only at the end."
    )
    keep: PositiveInt = Field(2, description="Checkpoints that are kept.")


class Checkpoint(Level):
    """Where checkpoints go, and what other programs get at the end."""

    export: Literal["", "model", "adapter"] = Field(
        "",
        description="What the run's folder gets at the end: the model as Hugging Face's "
        "transformers reads it, with an adapter merged into it, or the adapter "
        "as PEFT does.",
    )
    on_error: Literal["warn", "stop"] = Field(
        "warn",
        description="When a save in the background fails, the run goes on with a warning, "
        "or stops at the next save.",
    )
    levels: tuple[Level, ...] = Field(
        (),
        description="Places, fastest first, instead of to, every and keep; the last gets "
        "the final checkpoint.",
    )

    @property
    def all_levels(self) -> tuple[Level, ...]:
        return self.levels or (Level(to=self.to, every=self.every, keep=self.keep),)

    @model_validator(mode="after")
    def _places(self) -> Self:
        if self.levels and (self.to, self.every, self.keep) != ("", 0, 2):
            raise ValueError(
                "give every level its own to, every and keep, or leave checkpoint.levels out"
            )
        found = [level.to for level in self.all_levels]
        for to in found:
            try:
                storage_address(to)
            except UsageError as error:
                raise ValueError(str(error)) from None
        if len({to.rstrip("/") for to in found}) < len(found):
            raise ValueError("two levels have the same 'to'")
        if found[-1] == MEMORY:
            raise ValueError(
                f"{MEMORY!r} does not outlast the run; add a level after it that does"
            )
        if any(not level.every for level in self.levels[:-1]):
            raise ValueError(
                "all levels but the last, which gets the final checkpoint, need 'every'"
            )
        return self

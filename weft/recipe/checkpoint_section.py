"""The section ``[checkpoint]``: where checkpoints go, and how often."""

from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from weft.errors import UsageError
from weft.recipe.storage_address import storage_address
from weft.section import Section

#: The value of ``checkpoint.levels.to`` that means a folder in this host's memory.
MEMORY = "memory"


class Level(Section):
    """A place where checkpoints are saved, a folder or an object store, with an interval of its own."""

    to: str = Field(
        "",
        description=(
            "Where checkpoints are saved: a folder, s3://bucket/prefix (object storage) or 'memory' (the memory of "
            "this machine). Empty: the folder 'checkpoints' within that of the run."
        ),
    )
    every: int = Field(
        0,
        ge=0,
        description="Number of steps between two checkpoints. 0: only at the end of the run.",
    )
    keep: PositiveInt = Field(
        2,
        description="Number of newest checkpoints that are kept. Older ones are deleted.",
    )


class Checkpoint(Level):
    """Section on checkpoints: their places and intervals, and the export at the end."""

    export: Literal["", "model", "adapter"] = Field(
        "",
        description=(
            "What is written at the end of the run for other programs: the whole model for transformers, with any "
            "adapter merged into it ('model'), or the adapter alone for PEFT ('adapter'). Empty: nothing."
        ),
    )
    on_error: Literal["warn", "stop"] = Field(
        "warn",
        description=(
            "What happens if saving a checkpoint in the background fails. 'warn': the run goes on with a warning; "
            "'stop': it ends at the next save."
        ),
    )
    levels: tuple[Level, ...] = Field(
        (),
        description=(
            "Several places for checkpoints, each with its own 'to', 'every' and 'keep' in place of those of this "
            "section; the fastest place first. The last one gets the checkpoint at the end of the run. Empty: only "
            "the place 'to'."
        ),
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
        places = [level.to for level in self.all_levels]
        for to in places:
            try:
                storage_address(to)
            except UsageError as error:
                raise ValueError(str(error)) from None
        if len({to.rstrip("/") for to in places}) < len(places):
            raise ValueError("two levels have the same 'to'")
        if places[-1] == MEMORY:
            raise ValueError(
                f"{MEMORY!r} does not outlast the run; add a level after it that does"
            )
        if any(not level.every for level in self.levels[:-1]):
            raise ValueError(
                "all levels but the last, which gets the final checkpoint, need 'every'"
            )
        return self

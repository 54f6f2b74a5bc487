"""The section ``[observe]``: what is recorded, and who gets it."""

from importlib.util import find_spec

from pydantic import Field, PositiveInt

from weft.section import Section

#: Weft's own trackers; plugins bring others.
TRACKERS = ("tensorboard", "wandb", "mlflow")


class Observe(Section):
    """What is recorded, and who gets it."""

    every: PositiveInt = Field(1, description="Steps between records.")
    trackers: tuple[str, ...] = Field(
        default_factory=lambda: ("tensorboard",) * bool(find_spec("tensorboard")),
        description="Who gets the records: tensorboard, wandb, mlflow, or a plugin's; by "
        "default tensorboard, if it is installed.",
    )
    split_every: int = Field(
        25,
        ge=0,
        description="Steps between profiled steps for the time split; 0 turns it off.",
    )
    trace: int = Field(
        0, ge=0, description="Number of steps to write as a Chrome/Perfetto trace."
    )

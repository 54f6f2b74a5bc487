"""The section ``[observe]``: what is recorded, and who gets it."""

from importlib.util import find_spec

from pydantic import Field, PositiveInt

from weft.section import Section

#: Weft's own trackers; plugins bring others.
TRACKERS = ("tensorboard", "wandb", "mlflow")


class Observe(Section):
    """``trackers``: who gets the records: ``tensorboard``, ``wandb``, ``mlflow``, or a plugin's.

    By default TensorBoard does if its package is installed.
    """

    every: PositiveInt = 1
    trackers: tuple[str, ...] = Field(
        default_factory=lambda: ("tensorboard",) * bool(find_spec("tensorboard"))
    )
    split_every: int = Field(
        25,
        ge=0,
        description="steps between profiled steps for the time split; 0 turns it off",
    )
    trace: int = Field(
        0, ge=0, description="number of steps to write as a Chrome/Perfetto trace"
    )

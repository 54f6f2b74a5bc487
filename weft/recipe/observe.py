"""The section ``[observe]``: records of a run, and the trackers that receive them."""

from importlib.util import find_spec

from pydantic import Field, PositiveInt

from weft.section import Section


class Observe(Section):
    """Section on what a run records, how often, and which trackers receive it."""

    every: PositiveInt = Field(
        1, description="Number of steps between two records of metrics."
    )
    trackers: tuple[str, ...] = Field(
        default_factory=lambda: ("tensorboard",) * bool(find_spec("tensorboard")),
        description=(
            "Programs that metrics are sent to: any of 'tensorboard', 'wandb' and 'mlflow', or a plugin's name. If "
            "not set: 'tensorboard', if it is installed."
        ),
    )
    split_every: int = Field(
        25,
        ge=0,
        description=(
            "Profile every n-th step, where n is this number, to show which shares of its time are computing, "
            "communication and waiting. 0: no step."
        ),
    )
    trace: int = Field(
        0,
        ge=0,
        description=(
            "Number of steps that are recorded as a trace, from the second step on. https://ui.perfetto.dev shows "
            "such traces. 0: no trace."
        ),
    )

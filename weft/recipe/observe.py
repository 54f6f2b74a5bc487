"""The section ``[observe]``: records of a run, and the trackers that receive them."""

from importlib.util import find_spec

from pydantic import Field, PositiveInt

from weft.section import Section


class Observe(Section):
    """Section on what a run records, how often, and which trackers receive it."""

    every: PositiveInt = Field(1, description="Steps between two records of metrics.")
    trackers: tuple[str, ...] = Field(
        default_factory=lambda: ("tensorboard",) * bool(find_spec("tensorboard")),
        description=(
            "Where metrics are sent: any of tensorboard, wandb, mlflow and plugins' trackers. If not set: "
            "tensorboard, if it is installed."
        ),
    )
    split_every: int = Field(
        25,
        ge=0,
        description=(
            "Profile every n-th step, to show how much time goes to computing, communication "
            "and waiting; 0: no step."
        ),
    )
    trace: int = Field(
        0,
        ge=0,
        description=(
            "Number of steps, from the second on, to record as a trace, which ui.perfetto.dev"
            " can show; 0: no trace."
        ),
    )

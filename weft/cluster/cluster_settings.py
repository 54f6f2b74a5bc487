"""The file of ``weft serve --cluster``: which engines answer, and by what rules."""

from pathlib import Path

from pydantic import Field, NonNegativeInt, PositiveFloat

from weft.recipe.toml import read_toml
from weft.section import Section, validated


class ClusterLimits(Section):
    """Limits of a cluster of engines."""

    patience: PositiveFloat = Field(
        60.0,
        description="Seconds that an answer waits for another engine when it has lost its own.",
    )


class ClusterSettings(Section):
    """Section ``[cluster]``: engines that answer the requests of one server."""

    engines: NonNegativeInt = Field(
        0, description="Engines that the server starts on its own host, and ends."
    )
    listen: str = Field(
        "127.0.0.1:0",
        description="The address at which engines join (weft engine --join HOST:PORT); port 0: any free port.",
    )
    policy: str = Field(
        "load",
        description=(
            "Which engine a request goes to. load: the one with most free memory per request; cached-prefix: the one "
            "that has most of its prompt; session: always the same for a user or conversation; balanced: a fast "
            "one with little to do."
        ),
    )
    limits: ClusterLimits = Field(ClusterLimits(), description="Limits.")


class ClusterFile(Section):
    """The file that describes a cluster of engines, whose only section is ``[cluster]``."""

    cluster: ClusterSettings


def read_cluster(path: Path) -> ClusterSettings:
    """Read a cluster's file. Raises :class:`UsageError` with one line for a wrong key or value."""
    return validated(ClusterFile, read_toml(path), str(path)).cluster

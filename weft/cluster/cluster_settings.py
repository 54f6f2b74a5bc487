"""The file of ``weft serve --cluster``: which engines answer, and by what rules."""

from pathlib import Path

from pydantic import Field, NonNegativeInt, PositiveFloat, model_validator

from weft.errors import UsageError
from weft.recipe.toml import read_toml
from weft.section import Section, validated


class ClusterLimits(Section):
    """Limits of the router of a cluster of engines: how long answers wait for an engine, how much of a cache stays free
    for urgent answers, and whether answers move between engines.
    """

    patience: PositiveFloat = Field(
        60.0,
        description="Seconds for which an answer waits for another engine after it has lost its own.",
    )
    headroom: float = Field(
        0.1,
        ge=0,
        le=1,
        description=(
            "Share of an engine's cache that is kept free while the engine has urgent answers (priority below "
            "0)."
        ),
    )
    balance: bool = Field(
        True,
        description="Move answers, with their cache, from engines with little free memory to others.",
    )


class ClusterRoles(Section):
    """How many of the engines that the server starts have a special role: engines that only compute prompts, engines
    that only continue answers that have begun, and engines that only keep cache blocks. All other engines compute
    prompts and write answers.
    """

    prefill: NonNegativeInt = Field(
        0,
        description="Number of engines that only compute prompts; answers move to others after their first token.",
    )
    decode: NonNegativeInt = Field(
        0,
        description="Number of engines that only go on with answers that other engines have begun.",
    )
    cache: NonNegativeInt = Field(
        0,
        description=(
            "Number of engines that compute nothing and keep cache blocks of all others in their memory and files, "
            "for later texts that begin alike."
        ),
    )
    ttft: PositiveFloat | None = Field(
        None,
        description=(
            "Limit of the time to first token, in seconds, that the service is to keep. With 'tpot', the "
            "server changes the engines' roles as the load changes."
        ),
    )
    tpot: PositiveFloat | None = Field(
        None,
        description=(
            "Limit of the mean time per further token of an answer, in seconds, that the service is to keep. "
            "It needs 'ttft'."
        ),
    )

    @model_validator(mode="after")
    def _have_both_limits(self) -> "ClusterRoles":
        if (self.ttft is None) != (self.tpot is None):
            raise ValueError("ttft and tpot go together; give both or neither")
        return self


class ClusterSettings(Section):
    """Section ``[cluster]``: engines that answer the requests of one server."""

    engines: NonNegativeInt = Field(
        0,
        description="Number of engines that the server starts on its own host, and ends.",
    )
    listen: str = Field(
        "127.0.0.1:0",
        description="The address at which engines join (weft engine --join HOST:PORT); port 0: any free port.",
    )
    policy: str = Field(
        "load",
        description=(
            "How the server chooses the engine of a request. 'load': the engine with most free memory per "
            "request; 'cached-prefix': the one that holds the longest part of the prompt in its cache; "
            "'session': always the same for a user or conversation; 'balanced': a fast one with little to do."
        ),
    )
    roles: ClusterRoles = Field(
        ClusterRoles(),
        description="How many of the engines that the server starts have a special role.",
    )
    limits: ClusterLimits = Field(
        ClusterLimits(),
        description=(
            "How long an answer waits for another engine, how much of the cache stays free, and whether answers move "
            "between engines."
        ),
    )

    def parts(self) -> list[str]:
        """Return a list with the role of each engine that the server starts: "prefill", "decode", "cache", or "" for an
        engine that computes prompts and writes.

        Raises :class:`UsageError` if ``roles`` names more engines than ``engines``, or leaves none that computes.
        """
        roles = self.roles
        counts = {
            "prefill": roles.prefill,
            "decode": roles.decode,
            "cache": roles.cache,
        }
        named = [role for role, count in counts.items() for _ in range(count)]
        if 0 < roles.cache == self.engines:
            raise UsageError(
                f"roles.cache takes all engines (cluster.engines = {self.engines}), and none computes; give more"
            )
        if len(named) > self.engines:
            raise UsageError(
                f"cluster.roles has {len(named)} engines, and cluster.engines = {self.engines}; give as many engines"
            )
        return named + [""] * (self.engines - len(named))


class ClusterFile(Section):
    """The file that describes a cluster of engines; its only section is ``[cluster]``."""

    cluster: ClusterSettings


def read_cluster(path: Path) -> ClusterSettings:
    """Return the section ``[cluster]`` of the file at ``path``. Raises :class:`UsageError` with one line for a wrong
    key or value.
    """
    return validated(ClusterFile, read_toml(path), str(path)).cluster

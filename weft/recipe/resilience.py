"""The section ``[resilience]``: what happens when ranks die, stall, crawl or lie."""

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from weft.section import Section

#: How many replicas a rule of ``resilience.aggregate`` needs: (for each faulty one, and so many more).
REPLICAS_NEEDED = {
    "flag": (2, 1), "krum": (2, 3), "multi-krum": (2, 3), "bulyan": (4, 3), "geometric-median": (2, 1),
    "trimmed-mean": (2, 1),
}  # fmt: skip


class Resilience(Section):
    """What a run of several ranks does when one of them dies, stalls, crawls or lies (docs/resilience.md).

    Aggregation: ``flag`` (Almasi et al. 2024), ``krum`` and ``multi-krum`` (Blanchard et al. 2017), ``bulyan`` (El
    Mhamdi et al. 2018), ``geometric-median`` (Pillutla et al. 2019), ``trimmed-mean`` (Yin et al. 2018). Codes:
    ``gradient`` (Tandon et al. 2017), ``sr-sgc`` and ``m-sgc`` (Krishnan et al. 2023), see :mod:`weft.sync.coded`.
    """

    survive: bool = Field(
        True,
        description="The others finish the step, or with islands the round; otherwise the "
        "run ends and continues from its last checkpoint.",
    )
    snapshot_every: int = Field(
        1,
        ge=0,
        description="Steps between copies of a rank's state into another rank's memory; 0: "
        "none, and a loss goes back to the last checkpoint.",
    )
    detect: float = Field(
        1.5, gt=0, description="Seconds after which a silent rank counts as lost."
    )
    min_ranks: PositiveInt = Field(
        1, description="With fewer ranks left the run saves and ends."
    )
    actions: Literal["say", "rebalance", "leave-out"] = Field(
        "say",
        description="What happens to a slow rank: it is named, gets less to do, or is left "
        "out.",
    )
    aggregate: Literal[
        "mean",
        "flag",
        "krum",
        "multi-krum",
        "bulyan",
        "geometric-median",
        "trimmed-mean",
    ] = Field(
        "mean",
        description="How the gradients of replicas (layout.dp) are combined; every rule but "
        "the mean tolerates faulty ones.",
    )
    faulty: int = Field(0, ge=0, description="Replicas that may send anything.")
    code: Literal["", "gradient", "sr-sgc", "m-sgc"] = Field(
        "",
        description="Replicas compute some of each other's samples, so that the sum is "
        "known before the slowest are done.",
    )
    stragglers: int = Field(
        0, ge=0, description="Late replicas that a code does without."
    )
    jobs: PositiveInt = Field(
        1,
        description="Parts that sequential codes cut a step into, which need less "
        "redundancy.",
    )
    burst: PositiveInt = Field(
        1,
        description="Sequential codes: jobs of a window in which a straggler is late.",
    )
    window: int = Field(
        2,
        ge=2,
        description="Sequential codes: jobs in which at most so many replicas are late.",
    )
    patience: PositiveFloat = Field(
        1.0,
        description="A rank is late after 1 + this many times as long as the first.",
    )
    encrypt: Literal["auto", "always", "never"] = Field(
        "auto",
        description=(
            "What of ranks' connections of Weft's own is encrypted (docs/security.md): auto, what leaves the machine "
            "and its private network; always; or never. It takes the package cryptography (weft[secure])."
        ),
    )

    @property
    def replicas_needed(self) -> int:
        each, more = REPLICAS_NEEDED.get(self.aggregate, (0, 1))
        return each * self.faulty + more

    @property
    def combines(self) -> bool:
        """Whether the gradients of replicas are combined in another way than by a plain sum."""
        return self.aggregate != "mean" or bool(self.code)

"""The section ``[resilience]``: what happens when ranks die, stall, crawl or lie."""

from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from weft.recipe.host_section import HostSection
from weft.registry import find


class Resilience(HostSection):
    """Section for runs of several ranks, one of which may die, stall, slow down or send wrong gradients.

    See docs/explanations/resilience.md. ``weft techniques`` lists aggregation rules and gradient codes, each of which
    brings settings of its own. :mod:`weft.sync.coded` explains gradient codes.
    """

    hosts: ClassVar = {"aggregate": "aggregator", "code": "code"}
    asks: ClassVar = {"aggregate": "aggregation", "code": "gradient-code"}

    survive: bool = Field(
        True,
        description=(
            "Whether the remaining ranks go on when a rank is lost. If false, the run ends and can be resumed from "
            "its last checkpoint."
        ),
    )
    snapshot_every: int = Field(
        1,
        ge=0,
        description=(
            "Number of steps between two copies of each rank's state into another rank's memory. When a rank is "
            "lost, the others continue from these copies. 0: no copies; they continue from the last checkpoint."
        ),
    )
    detect: float = Field(
        1.5,
        gt=0,
        description="Seconds without a sign of life after which a rank counts as lost.",
    )
    min_ranks: PositiveInt = Field(
        1,
        description=(
            "Smallest number of ranks with which the run goes on after losses. With fewer, it saves a checkpoint "
            "and ends."
        ),
    )
    actions: Literal["say", "rebalance", "leave-out", "ladder"] = Field(
        "say",
        description=(
            "What happens to a rank that is slower than the others. 'say': it is only reported; 'rebalance': it "
            "gets less work; 'leave-out': the others go on without it; 'ladder': it gets less work, and is left out "
            "if that does not help. With 'rebalance' and 'ladder', the order of ranks in a ring is changed, too, so "
            "that slow links are not used."
        ),
    )
    aggregate: str = Field(
        "mean",
        description=(
            "How the gradients of data-parallel ranks (layout.dp) are combined. All rules but 'mean' tolerate ranks "
            "that send wrong gradients. 'trimmed-mean': the mean of each element without its extremes; 'krum': the "
            "one gradient that is nearest to the others; 'multi-krum': the mean of several near ones; 'bulyan': a "
            "trimmed mean of several near ones; 'geometric-median': the point with the smallest sum of distances to "
            "all; 'flag': the mean within the directions that most gradients share."
        ),
    )
    faulty: int = Field(
        0,
        ge=0,
        description="For 'aggregate' other than 'mean': number of ranks that may send wrong gradients without harm.",
    )
    code: str = Field(
        "",
        description=(
            "Gradient code: several ranks compute the same samples, so that a step need not wait for the "
            "slowest ranks. 'gradient': each sample is computed by stragglers + 1 ranks; 'sr-sgc' and 'm-sgc': "
            "less work is repeated, since a late result may arrive in a later part of the step. Empty: no code."
        ),
    )
    stragglers: int = Field(
        0,
        ge=0,
        description="For 'code': number of slow ranks that a step need not wait for.",
    )
    jobs: PositiveInt = Field(
        1,
        description=(
            "For 'code': number of parts (jobs) into which a step is cut. With more jobs, 'sr-sgc' and 'm-sgc' "
            "repeat less work."
        ),
    )
    patience: PositiveFloat = Field(
        1.0,
        description=(
            "For 'code': how long to wait for other ranks after the first one has sent its result, as a multiple of "
            "the time that the first one took. Ranks that send later count as late."
        ),
    )
    encrypt: Literal["auto", "always", "never"] = Field(
        "auto",
        description=(
            "Which of Weft's own connections between ranks are encrypted: those that leave the private network "
            "('auto'), all ('always') or none ('never'). Encryption needs weft[secure] (docs/how-to/security.md)."
        ),
    )

    @property
    def replicas_needed(self) -> int:
        """The fewest data parallel ranks with which the aggregation rule tolerates ``faulty`` ranks."""
        if self.aggregate == "mean":
            return 1
        rule: Any = find("aggregator", self.aggregate).implementation
        return int(rule.each * self.faulty + rule.more)

    @property
    def combines(self) -> bool:
        """Whether an aggregation rule or a gradient code replaces the plain sum of data parallel ranks' gradients."""
        return self.aggregate != "mean" or bool(self.code)

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
            "Go on with the remaining ranks when one is lost. If false, the run ends, and can"
            " be resumed from its last checkpoint."
        ),
    )
    snapshot_every: int = Field(
        1,
        ge=0,
        description=(
            "Number of steps after which each rank's state is copied into another rank's memory. After the loss of a "
            "rank the others continue from these copies. 0: no copies; the others continue from the last checkpoint."
        ),
    )
    detect: float = Field(
        1.5,
        gt=0,
        description="Seconds without a sign of life after which a rank counts as lost.",
    )
    min_ranks: PositiveInt = Field(
        1, description="Save and end the run when fewer ranks than this are left."
    )
    actions: Literal["say", "rebalance", "leave-out", "ladder"] = Field(
        "say",
        description=(
            "What happens to a slow rank. 'say': it is only reported; 'rebalance': it gets less work; "
            "'leave-out': the others go on without it; 'ladder': it gets less work, and is left out if that "
            "does not help. With 'rebalance' and 'ladder', ranks in a ring are also reordered so that no two "
            "neighbours use a slow link."
        ),
    )
    aggregate: str = Field(
        "mean",
        description=(
            "How gradients of data parallel ranks (layout.dp) are combined. All rules except 'mean' tolerate ranks "
            "that send wrong values: 'trimmed-mean' drops the extremes of each element, 'krum' takes the gradient "
            "nearest to the others; 'multi-krum' takes the mean of the several nearest gradients; 'bulyan' takes a "
            "trimmed mean of such gradients; 'geometric-median' takes the point with the least sum of distances to "
            "all gradients; 'flag' takes the mean in the directions that most gradients share."
        ),
    )
    faulty: int = Field(
        0,
        ge=0,
        description=(
            "Number of ranks that may send wrong gradients without harm, if 'aggregate' is "
            "not 'mean'."
        ),
    )
    code: str = Field(
        "",
        description=(
            "Gradient code: several ranks compute the same samples, so that a step need not "
            "wait for the slowest. 'gradient': stragglers + 1 ranks compute each sample; "
            "'sr-sgc' and 'm-sgc' repeat less work, as late results may come in a later part "
            "of the step; empty: none."
        ),
    )
    stragglers: int = Field(
        0,
        ge=0,
        description="Number of late ranks that the gradient code does not wait for.",
    )
    jobs: PositiveInt = Field(
        1,
        description=(
            "Number of parts (jobs) into which a gradient code cuts a step. With more parts "
            "'sr-sgc' and 'm-sgc' need less repeated work."
        ),
    )
    patience: PositiveFloat = Field(
        1.0,
        description=(
            "How long a gradient code waits for further ranks after the first has answered, "
            "as a multiple of the time that the first one took. Ranks that answer later count"
            " as late."
        ),
    )
    encrypt: Literal["auto", "always", "never"] = Field(
        "auto",
        description=(
            "Encrypt Weft's own connections between ranks (docs/how-to/security.md): 'auto' only those "
            "that leave the private network, 'always' or 'never'. It needs weft[secure]."
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

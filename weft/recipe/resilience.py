"""The section ``[resilience]``: what happens when ranks die, stall, crawl or lie."""

from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from weft.recipe.host_section import HostSection
from weft.registry import find


class Resilience(HostSection):
    """What a run of several ranks does when one of them dies, stalls, crawls or lies (docs/explanations/resilience.md).

    ``weft techniques`` lists rules of aggregation and codes; each brings settings of its own. What codes do says
    :mod:`weft.sync.coded`.
    """

    hosts: ClassVar = {"aggregate": "aggregator", "code": "code"}

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
    aggregate: str = Field(
        "mean",
        description="How the gradients of replicas (layout.dp) are combined; every rule but "
        "the mean tolerates faulty ones.",
    )
    faulty: int = Field(0, ge=0, description="Replicas that may send anything.")
    code: str = Field(
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
    patience: PositiveFloat = Field(
        1.0,
        description="A rank is late after 1 + this many times as long as the first.",
    )
    encrypt: Literal["auto", "always", "never"] = Field(
        "auto",
        description=(
            "What of ranks' connections of Weft's own is encrypted (docs/how-to/security.md): auto, what leaves the "
            "machine and its private network; always; or never. It takes the package cryptography (weft[secure])."
        ),
    )

    @property
    def replicas_needed(self) -> int:
        """The fewest replicas with so many faulty ones of which a recipe's rule can make a gradient."""
        if self.aggregate == "mean":
            return 1
        rule: Any = find("aggregator", self.aggregate).made
        return int(rule.each * self.faulty + rule.more)

    @property
    def combines(self) -> bool:
        """Whether the gradients of replicas are combined in another way than by a plain sum."""
        return self.aggregate != "mean" or bool(self.code)

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
    """What a run of several ranks does when one of them dies, stalls or crawls (docs/resilience.md).

    ``survive``: the others finish the step, or with islands the round; otherwise the run ends and continues from its
    last checkpoint, as do islands that synchronise in every step. Every ``snapshot_every`` steps each rank copies its
    state into another rank's memory; with 0 there are no copies, and a loss goes back to the last checkpoint.
    ``detect``: seconds after which a silent rank counts as lost. With fewer than ``min_ranks`` left the run saves and
    ends. ``actions`` on a slow rank: ``say`` names it, ``rebalance`` gives it less to do, ``leave-out`` removes it.

    ``aggregate``: how the gradients of replicas (``layout.dp``) are combined. Every rule but the mean tolerates
    ``faulty`` replicas that send anything: ``flag`` (Almasi et al. 2024), ``krum`` or ``multi-krum`` (Blanchard et al.
    2017), ``bulyan`` (El Mhamdi et al. 2018), ``geometric-median`` (Pillutla et al. 2019) or ``trimmed-mean`` (Yin et
    al. 2018).

    ``code``: replicas compute some of each other's samples, so that the sum of all gradients is known before up to
    ``stragglers`` late replicas are done (:mod:`weft.sync.coded`): by ``gradient`` coding (Tandon et al. 2017), or,
    with a step cut into ``jobs``, by one of the sequential codes (Krishnan et al. 2023), which need less redundancy:
    ``sr-sgc`` or ``m-sgc``, made for that many stragglers in any ``window`` jobs, each late for at most ``burst`` of
    them. A rank is late after 1 + ``patience`` times as long as the first.
    """

    survive: bool = True
    snapshot_every: int = Field(1, ge=0)
    detect: float = Field(1.5, gt=0)
    min_ranks: PositiveInt = 1
    actions: Literal["say", "rebalance", "leave-out"] = "say"
    aggregate: Literal[
        "mean",
        "flag",
        "krum",
        "multi-krum",
        "bulyan",
        "geometric-median",
        "trimmed-mean",
    ] = "mean"
    faulty: int = Field(0, ge=0)
    code: Literal["", "gradient", "sr-sgc", "m-sgc"] = ""
    stragglers: int = Field(0, ge=0)
    jobs: PositiveInt = 1
    burst: PositiveInt = 1
    window: int = Field(2, ge=2)
    patience: PositiveFloat = 1.0
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

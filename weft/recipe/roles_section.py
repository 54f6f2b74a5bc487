"""The section ``[roles]``: which ranks write answers in reinforcement learning, and how."""

from pydantic import Field, NonNegativeInt

from weft.layout.layout import Layout
from weft.section import Section


class RolloutRole(Section):
    """Section on the processes that write answers in reinforcement learning: their number, layout and place."""

    layout: Layout = Field(
        Layout(),
        description=(
            "Layout of the model while it writes answers, on the same ranks as training. If not set: every rank "
            "writes with a whole model of its own."
        ),
    )
    ranks: NonNegativeInt = Field(
        0,
        description=(
            "Number of processes that write answers while the ranks train. 0: the ranks train and write "
            "in turn, or engines of other hosts write (listen)."
        ),
    )
    listen: str = Field(
        "",
        pattern=r"^$|^[^/\s]+:\d{1,5}$",
        description=(
            "Address HOST:PORT of the first rank at which engines of other hosts join by the command 'weft engine "
            "--checkpoint policy: --join HOST:PORT', in which the word 'policy:' (with the colon) stands for the "
            "weights that the run trains. They need the run's WEFT_SECRET."
        ),
    )
    threads: NonNegativeInt = Field(
        0,
        description="Threads of each process that writes answers; 0: an equal share of the cores.",
    )
    delta: bool = Field(
        False,
        description=(
            "Whether processes that write answers get only the changed elements of new weights, where "
            "that takes fewer bytes. The weights are the same to the last bit; the ranks that train keep "
            "one more copy."
        ),
    )
    invariant: bool = Field(
        False,
        description=(
            "Whether generation and training compute the same log-probabilities to the last bit, which makes both "
            "slower. It needs a dense model on one CPU for each rank, and the ranks of training must write the "
            "answers themselves."
        ),
    )

    @property
    def elsewhere(self) -> bool:
        """Whether processes other than the training ranks write the answers."""
        return bool(self.ranks or self.listen)

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port at which engines of other hosts join; None if they do not."""
        host, _, port = self.listen.rpartition(":")
        return (host.strip("[]"), int(port)) if self.listen else None


class Roles(Section):
    """Section on the roles of reinforcement learning: which ranks do what, and how."""

    rollout: RolloutRole = Field(
        RolloutRole(), description="The ranks that write answers."
    )

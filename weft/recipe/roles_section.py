"""The section ``[roles]``: which ranks write answers in reinforcement learning, and how."""

from pydantic import Field, NonNegativeInt

from weft.layout.layout import Layout
from weft.section import Section


class RolloutRole(Section):
    """Section on the processes that write answers in reinforcement learning: their number, layout and place."""

    layout: Layout = Field(
        Layout(),
        description=(
            "Layout of the model while it writes answers on the ranks that train: a table with settings of "
            "[layout], such as { tp = 2 }. If not set: every rank holds a whole model and writes answers by itself."
        ),
    )
    ranks: NonNegativeInt = Field(
        0,
        description=(
            "Number of additional processes that only write answers, while the ranks train. 0: the ranks train and "
            "write in turn, unless engines of other hosts write (see 'listen')."
        ),
    )
    listen: str = Field(
        "",
        pattern=r"^$|^[^/\s]+:\d{1,5}$",
        description=(
            "Address HOST:PORT at which the first rank waits for engines, processes on other hosts that write "
            "answers. One is started there by 'weft engine --checkpoint policy: --join HOST:PORT', where "
            "'policy:' stands for the weights in training. It needs the same WEFT_SECRET in its environment as "
            "the run. Empty: no other hosts."
        ),
    )
    threads: NonNegativeInt = Field(
        0,
        description=(
            "Number of CPU threads of each process that only writes answers. 0: an equal share of the cores."
        ),
    )
    delta: bool = Field(
        False,
        description=(
            "Whether processes that write answers are sent only the elements of the weights that have changed, "
            "where these are fewer bytes. The weights arrive exactly, but the ranks that train keep one more copy "
            "of them."
        ),
    )
    invariant: bool = Field(
        False,
        description=(
            "Whether generation computes exactly the same log-probabilities as training, to the last bit. This "
            "makes both slower. It needs a model without experts that is whole on every rank, on CPUs, and "
            "answers that are written by the ranks that train."
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
        RolloutRole(),
        description="The processes that write answers, and how they divide the model.",
    )

"""What a run keeps of a critic that is trained in other processes: its tensors, as checkpoints save and load them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from weft.layout.parts import Part
    from weft.parallel.state import Held, State


class CopiedState:
    """State of a critic that is in other processes. The first rank has a copy of it, as of one device; others nothing.

    ``whole``: the copy; None on other ranks.

    Attributes:
        ``fetch``: function that writes the critic's present tensors into the copy; collective over the run's ranks.
            Before there are processes it does nothing, because the critic is as the copy is.
        ``learning``: none of its parameters learns here.
    """

    learning: tuple[Held, ...] = ()

    def __init__(self, whole: State | None) -> None:
        self.whole = whole
        self.fetch: Callable[[], None] = lambda: None

    def settle(self) -> None:
        """Bring the copy up to date, because a checkpoint is saved. Collective."""
        self.fetch()

    def parts(self) -> dict[str, Part]:
        """Return the tensors of the copy by name, as :meth:`weft.parallel.state.State.parts` does."""
        return {} if self.whole is None else self.whole.parts()


class CriticCopy(NamedTuple):
    """The copy of a critic beside the policy's state (:attr:`weft.parallel.state.State.beside`)."""

    state: CopiedState

"""Tiers of a run that keeps all tensors on its device: nothing is moved and nothing waits."""

from collections.abc import Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch


class OnDevice:
    """Tiers (places of memory in which tensors rest) of a run that keeps all tensors on the device.

    The subclass :class:`weft.memory.resting.Tiers` moves tensors to the host's memory or a file while they are not in
    use. ``places``: where each kind of tensor rests; ``room``: bytes of weights that may stay in memory between uses.
    """

    places: Mapping[str, str] = {}
    room = 0

    def __init__(self) -> None:
        self.groups: dict[Hashable, dict[str, Any]] = {}

    @property
    def staging(self) -> Path | None:
        """Folder for the copy of the state that a save makes, or None if the copy is made in main memory."""
        return None

    @property
    def note(self) -> str:
        """Warning about the file for offloaded tensors, such as missing direct I/O; "" if there is none."""
        return ""

    @property
    def pooled(self) -> int:
        """Bytes of the buffers through which offloaded tensors pass on their way to the device."""
        return 0

    def rest(self, owner: Hashable, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """Declare where tensors rest while they are not in use; here, on the device.

        ``owner``: unit of the state (parameters updated together) to which ``tensors`` belong; ``kind``: "weights",
        "gradients" or "moments".
        """

    def fetch(self, owner: Hashable, *kinds: str) -> None:
        """Begin to read the tensors of some kinds of one unit from where they rest, because they will soon be used.

        ``owner``: the unit (parameters that are updated together); ``kinds``: of "weights", "gradients" and "moments".
        """

    def size(self, owner: Hashable, kind: str) -> int:
        """Return the bytes that tensors of one ``kind`` of the unit ``owner`` take in a file.

        The result is 0 if they are not in a file.
        """
        return 0

    def keep(self, owner: Hashable, kind: str) -> None:
        """Keep the tensors of one ``kind`` of the unit ``owner`` in memory between their next two uses.

        A use is a context of :meth:`at_hand`.
        """

    def at_hand(
        self,
        owner: Hashable,
        kind: str,
        changes: bool = False,
        read: bool = True,
        apart: bool = False,
    ) -> AbstractContextManager[None]:
        """Return a context in which the tensors of one ``kind`` of the unit ``owner`` can be used.

        For the other arguments see :meth:`weft.memory.resting.Tiers.at_hand`; here they have no effect.
        """
        return nullcontext()

    def updating(
        self, owner: Hashable, behind: int = 1
    ) -> AbstractContextManager[None]:
        """Return a context in which the tensors of the unit ``owner`` may change. ``behind`` has no effect here."""
        return nullcontext()

    def trying(self, owner: Hashable) -> AbstractContextManager[None]:
        """Return a context in which the tensors of the unit ``owner`` may change on trial.

        :meth:`undo` takes the changes back.
        """
        return nullcontext()

    @property
    def activation_file(self) -> Any:
        """File in which saved activations rest, or None if they do not rest in a file."""
        return None

    def stand(self) -> None:
        """Make all changes that were made in :meth:`trying` permanent."""

    def undo(self) -> None:
        """Take back all changes that were made in :meth:`trying` since the last :meth:`stand`."""

    def settle(self) -> None:
        """Wait until all transfers of tensors have ended."""

    def check(self) -> None:
        """Compare all tensors in the file with the checksums of what was written."""

    def restart(self) -> None:
        """Begin a new round of updates, so that the unit that is updated next is the first of a step."""

    def forget_sums(self) -> None:
        """Drop the checksums of all tensors in the file."""

"""Tiers of a run that keeps all tensors on its device: nothing is moved and nothing waits."""

from collections.abc import Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch


class OnDevice:
    """Tiers that keep all tensors on the device. The subclass :class:`weft.memory.resting.Tiers` moves them."""

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
        """Warning about the tier's file, such as missing direct I/O, or "" if there is none."""
        return ""

    @property
    def pooled(self) -> int:
        """Bytes of the buffers through which tensors pass between the tier and their use."""
        return 0

    def rest(self, owner: Hashable, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """Let ``tensors`` rest in the place of their ``kind`` ("weights", "gradients", "moments"); here, on the device.

        ``owner``: the unit of the state to which the tensors belong.
        """

    def fetch(self, owner: Hashable, *kinds: str) -> None:
        """Begin to read those tensors of ``owner`` that are of these ``kinds``, because they will soon be used."""

    def size(self, owner: Hashable, kind: str) -> int:
        """Return the bytes that the owner's tensors of one kind take in the file, 0 if they are not in a file."""
        return 0

    def keep(self, owner: Hashable, kind: str) -> None:
        """Keep the owner's tensors of one kind in memory between their next two uses (:meth:`at_hand`)."""

    def at_hand(
        self,
        owner: Hashable,
        kind: str,
        changes: bool = False,
        read: bool = True,
        apart: bool = False,
    ) -> AbstractContextManager[None]:
        """Return a context in which the owner's tensors of one kind can be used.

        For the other arguments see :meth:`weft.memory.resting.Tiers.at_hand`; here they have no effect.
        """
        return nullcontext()

    def updating(
        self, owner: Hashable, behind: int = 1
    ) -> AbstractContextManager[None]:
        """Return a context in which the owner's tensors may change. ``behind`` has no effect here."""
        return nullcontext()

    def trying(self, owner: Hashable) -> AbstractContextManager[None]:
        """Return a context in which the owner's tensors may change on trial: :meth:`undo` takes the changes back."""
        return nullcontext()

    @property
    def activation_file(self) -> Any:
        """File in which saved activations rest, or None if they rest elsewhere."""
        return None

    def stand(self) -> None:
        """Keep all changes that were made in :meth:`trying` for good."""

    def undo(self) -> None:
        """Take back all changes that were made in :meth:`trying` since the last :meth:`stand`."""

    def settle(self) -> None:
        """Wait for all transfers to end."""

    def check(self) -> None:
        """Compare the tensors in the file with the checksums of what was written."""

    def restart(self) -> None:
        """Begin a new round of updates: the owner that is updated next is the first of a step."""

    def forget_sums(self) -> None:
        """Drop the checksums of all tensors in the file."""

"""Tiers of a run that keeps all tensors on its device: nothing is moved and nothing waits."""

from collections.abc import Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch


class OnDevice:
    """Tiers (places of memory in which tensors rest) of a run that keeps all tensors on the device.

    Its methods move nothing and wait for nothing. The subclass :class:`weft.memory.resting.Tiers` moves tensors to the
    host's memory or a file while they are not in use. ``places`` (attribute): where each kind of tensor ("weights",
    "gradients" or "moments") rests, by kind; ``room`` (attribute): bytes of weights that may stay in memory between
    uses.
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

    def summary(self) -> str:
        """Return a line about how tensors that rest elsewhere were used; "" if there is nothing to say."""
        return ""

    @property
    def pooled(self) -> int:
        """Bytes of the buffers through which offloaded tensors pass on their way to the device."""
        return 0

    def rest(
        self,
        owner: Hashable,
        kind: str,
        tensors: Iterable[torch.Tensor],
        piece: int = 0,
    ) -> None:
        """Declare where tensors rest while they are not in use; here, on the device.

        ``owner``: unit of the state (parameters updated together) to which ``tensors`` belong; ``kind``: "weights",
        "gradients" or "moments"; ``piece`` has no effect here.
        """

    def fetch(self, owner: Hashable, *kinds: str) -> None:
        """Announce that the tensors of some kinds of one unit will soon be used. In this class nothing is read.

        ``owner``: the unit (parameters that are updated together); ``kinds``: some of "weights", "gradients" and
            "moments".
        """

    def size(self, owner: Hashable, kind: str) -> int:
        """Return the bytes that some tensors take in a file: here 0, as all tensors are on the device.

        ``owner``: the unit (parameters that are updated together) whose tensors count; ``kind``: "weights", "gradients"
        or "moments".
        """
        return 0

    def keep(self, owner: Hashable, kind: str) -> None:
        """Do nothing, because all tensors are always on the device.

        In :class:`weft.memory.resting.Tiers` this keeps some tensors in memory between their next two uses.

        ``owner``: the unit (parameters that are updated together) whose tensors are kept; ``kind``: "weights",
        "gradients" or "moments". A use is a context of :meth:`at_hand`.
        """

    def at_hand(
        self,
        owner: Hashable,
        kind: str,
        changes: bool = False,
        read: bool = True,
        apart: bool = False,
    ) -> AbstractContextManager[None]:
        """Return a context in which some tensors can be used. In this class the context does nothing, because all
        tensors are on the device.

        ``owner``: the unit (parameters that are updated together) whose tensors are used; ``kind``: "weights",
        "gradients" or "moments". ``changes``, ``read`` and ``apart`` have no effect here.
        """
        return nullcontext()

    def updating(
        self, owner: Hashable, behind: int = 1
    ) -> AbstractContextManager[None]:
        """Return a context in which the tensors of the unit ``owner`` may change.

        ``owner``: parameters that are updated together; ``behind`` has no effect here.
        """
        return nullcontext()

    def trying(self, owner: Hashable) -> AbstractContextManager[None]:
        """Return a context in which the tensors of the unit ``owner`` may change on trial.

        ``owner``: parameters that are updated together. Unlike in :class:`weft.memory.resting.Tiers`, :meth:`undo`
        cannot take the changes back here.
        """
        return nullcontext()

    @property
    def activation_file(self) -> Any:
        """File in which saved activations rest, or None if they do not rest in a file."""
        return None

    def stand(self) -> None:
        """Do nothing. In :class:`weft.memory.resting.Tiers` this makes the changes made in :meth:`trying` permanent."""

    def undo(self) -> None:
        """Do nothing. In :class:`weft.memory.resting.Tiers` this takes back the changes made in :meth:`trying`."""

    def settle(self) -> None:
        """Do nothing, as there are no transfers. In :class:`weft.memory.resting.Tiers` this waits until all transfers
        have ended.
        """

    def check(self) -> None:
        """Do nothing, as there is no file. In :class:`weft.memory.resting.Tiers` this compares the file with its
        checksums.
        """

    def restart(self) -> None:
        """Do nothing. In :class:`weft.memory.resting.Tiers` this declares that a step begins."""

    def forget_sums(self) -> None:
        """Do nothing, as there is no file. In :class:`weft.memory.resting.Tiers` this drops the checksums of the file's
        tensors.
        """

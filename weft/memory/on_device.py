"""Tiers of a run that keeps all tensors on its device: nothing is moved and nothing waits."""

from collections.abc import Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch


class OnDevice:
    """Tiers that keep all tensors on the device; :class:`weft.memory.resting.Tiers` moves them."""

    places: Mapping[str, str] = {}
    room = 0

    def __init__(self) -> None:
        self.groups: dict[Hashable, dict[str, Any]] = {}

    @property
    def staging(self) -> Path | None:
        """Folder for copies of the state, if the state does not fit in memory."""
        return None

    @property
    def note(self) -> str:
        """Note about the file, if it is not as expected."""
        return ""

    @property
    def pooled(self) -> int:
        """Bytes of the buffers through which tensors pass."""
        return 0

    def rest(self, owner: Hashable, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """Let tensors rest in the place of their kind; here, on the device."""

    def fetch(self, owner: Hashable, *kinds: str) -> None:
        """Begin to read tensors that will soon be used."""

    def size(self, owner: Hashable, kind: str) -> int:
        """Return the bytes that the owner's tensors of one kind take in the file."""
        return 0

    def keep(self, owner: Hashable, kind: str) -> None:
        """Keep the tensors of the next use for the use after it."""

    def at_hand(
        self,
        owner: Hashable,
        kind: str,
        changes: bool = False,
        read: bool = True,
        apart: bool = False,
    ) -> AbstractContextManager[None]:
        """Return a context in which the owner's tensors of one kind can be used."""
        return nullcontext()

    def updating(
        self, owner: Hashable, behind: int = 1
    ) -> AbstractContextManager[None]:
        """Return a context in which the owner's tensors may change."""
        return nullcontext()

    def trying(self, owner: Hashable) -> AbstractContextManager[None]:
        """Return a context in which the owner's tensors may change until :meth:`undo`."""
        return nullcontext()

    @property
    def activation_file(self) -> Any:
        """The file in which saved activations rest; None if they rest elsewhere."""
        return None

    def stand(self) -> None:
        """Keep all tried changes for good."""

    def undo(self) -> None:
        """Take back all tried changes since :meth:`stand`."""

    def settle(self) -> None:
        """Wait for all transfers."""

    def check(self) -> None:
        """Compare the file with its checksums."""

    def restart(self) -> None:
        """Begin a new round of updates."""

    def forget_sums(self) -> None:
        """Drop all checksums."""

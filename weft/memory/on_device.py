"""Tiers of a run that keeps all tensors on its device: nothing is moved and nothing waits."""

from collections.abc import Container, Hashable, Iterable, Mapping
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
        pass

    def fetch(self, owner: Hashable, *kinds: str) -> None:
        pass

    def size(self, owner: Hashable, kind: str) -> int:
        return 0

    def keep(self, owner: Hashable, kind: str) -> None:
        pass

    def at_hand(
        self,
        owner: Hashable,
        kind: str,
        changes: bool = False,
        read: bool = True,
        apart: bool = False,
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def updating(
        self, owner: Hashable, fixed: Container[str] = ("gradients",), behind: int = 1
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def trying(
        self, owner: Hashable, fixed: Container[str] = ("gradients",)
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def file_of(self, kind: str) -> Any:
        """Return the file in which tensors of this kind rest; None if they rest elsewhere."""

    def stand(self) -> None:
        pass

    def undo(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def check(self) -> None:
        pass

    def restart(self) -> None:
        pass

    def forget_sums(self) -> None:
        pass

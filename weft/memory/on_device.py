"""Where tensors rest that stay where they are used: nothing is moved, and nothing waited for."""

from collections.abc import Container, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch


class OnDevice:
    """Tiers of a run that keeps all on its device; :class:`weft.memory.resting.Tiers` derives those that move."""

    places: Mapping[str, str] = {}
    room = 0

    def __init__(self) -> None:
        self.groups: dict[Hashable, dict[str, Any]] = {}

    @property
    def staging(self) -> Path | None:
        """Where copies of the state belong: not in memory if the state does not fit there."""
        return None

    @property
    def note(self) -> str:
        """What there is to say of the file, if it is not what one expects."""
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
        """The file where tensors of this kind rest; None if they do not rest in one."""

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

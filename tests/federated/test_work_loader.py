"""A client keeps what its last work has changed before the next work begins with it."""

from __future__ import annotations

from typing import Any

import torch

from weft.federated.client_work import WorkOrder
from weft.federated.work_loader import WorkLoader


class LateWord:
    """A source whose word on the last answer comes together with the next work."""

    def __init__(self) -> None:
        self.taken: bool | None = None

    def next_order(self, limit: float) -> WorkOrder:
        self.taken = True
        return WorkOrder("t", 1, 1, {}, {}, 1.0, True)

    def settled(self, limit: float) -> bool | None:
        return self.taken


def test_the_control_variate_is_kept_before_the_next_work_begins() -> None:
    nothing: Any = None
    loader = WorkLoader(
        LateWord(), nothing, nothing, nothing, nothing, {}, 1, 1, 1, float, nothing, bool
    )  # type: ignore[arg-type]  # fmt: skip
    loader.asked, loader.next_control = True, {"w": torch.ones(1)}
    order, _ = loader._look()
    assert order is not None and float(loader.control["w"]) == 1.0

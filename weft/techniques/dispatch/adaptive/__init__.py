"""The way that sends least, per layer and pass, moving tokens or experts (after Tutel, Hwang et al. 2023)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.parallel.experts.way import DispatchWay
from weft.registry import register

if TYPE_CHECKING:
    from weft.models.experts import Dispatcher
    from weft.parallel.experts.ranks import ExpertRanks


@register(
    "dispatch",
    "adaptive",
    title="Adaptive dispatch by bytes",
    paper="Hwang et al. 2023 (Tutel)",
    recipe="experts.toml --layout dp=2,ep=2,dispatch=adaptive",
    proof="tests/parallel/test_experts.py",
)
class LeastBytes(DispatchWay):
    """Counts what each option sends, and takes the least."""

    copies = True

    def make(self, ranks: ExpertRanks) -> Dispatcher:
        from weft.techniques.dispatch.adaptive.options import Adaptive

        return Adaptive(ranks)

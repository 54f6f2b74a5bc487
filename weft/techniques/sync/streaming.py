"""Streaming DiLoCo: fragments of the parameters in turn, whose results are mixed in later (Douillard et al. 2025)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from weft.registry import register
from weft.sync.outer import OuterMomentum, OuterSettings

if TYPE_CHECKING:
    import torch

    from weft.recipe import Sync
    from weft.sync.simulated_round import Round
    from weft.sync.sync_method import Slots


class StreamingSettings(OuterSettings):
    """Settings of streaming synchronisation that a recipe gives: how synchronised and own parameters are mixed, and
    learning rate and momentum of the outer update.
    """

    mix: float = Field(
        0.5,
        ge=0,
        le=1,
        description=(
            "Share of its own parameters that an island keeps when a synchronised fragment arrives: new = mix x own "
            "+ (1 - mix) x synchronised. 0: it takes over the synchronised ones."
        ),
    )


@register(
    "sync",
    "streaming",
    settings=StreamingSettings,
    draws={"momentum": (0.0, 0.3, 0.9), "mix": (0.0, 0.25, 0.5)},
    title="Streaming DiLoCo: fragments in turn, answers later, mixed",
    paper="Douillard et al. 2025",
    recipe=(
        "islands.toml --set sync.compress=none --set sync.update=streaming --set "
        "sync.fragments=3 --set sync.delay=2"
    ),
    proof="tests/sync/test_islands.py",
    figure=(
        "equal to a simulation to 1e-10; every parameter in one fragment, one round "
        "each; in 8 bits between two sites at 100 Mbit/s plain data parallelism's "
        "loss 8.8x as fast, 0.7 and 0.9 % above it at equal tokens "
        "(`bench/islands.py`)"
    ),
)
class Streaming(OuterMomentum):
    """Synchronises one fragment of the parameters at a time, by Nesterov's momentum, while training goes on (Douillard
    et al. 2025).

    A fragment is a subset of the parameters. The result of an outer update arrives ``sync.delay`` steps after the
    exchange began. It is then mixed with the parameters that the island has trained in the meantime.
    """

    in_fragments = True

    def __init__(self, settings: Sync) -> None:
        super().__init__(settings)
        self.mix = settings.own(StreamingSettings).mix

    def applied(
        self, theta: torch.Tensor, slots: Slots, answer: torch.Tensor, islands: int
    ) -> torch.Tensor:
        import torch

        anchor = super().applied(theta, slots, answer, islands)
        return torch.lerp(anchor, theta, self.mix)

    def simulate(self, at: Round) -> None:
        from weft.sync.simulated_round import step_anchor

        if at.is_due:
            at.past.append((at.step + self.settings.delay, at.mean(at.differences())))
        if at.past and at.past[0][0] == at.step:
            _, mean = at.past.pop(0)
            for island in at.ones.values():
                step_anchor(island, mean, self.lr, self.momentum)
                island.now.copy_(
                    self.mix * island.now + (1 - self.mix) * island.kept["anchor"]
                )

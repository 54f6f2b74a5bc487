"""Clients whose losses are scalar quadratics: ``curvature/2 (x - optimum)^2``, trained by gradient descent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weft.federated.client_cohort import LocalResult
from weft.federated.policy import AssignedWork, ClientStep, Differences
from weft.federated.virtual_clock import VirtualClock, WorkTime
from weft.recipe.federated_section import Federated
from weft.registry import find


class QuadraticCohort:
    """Clients "c0", "c1", ... with one parameter ``x`` each.

    ``optima`` and ``sizes``: the optimum and the number of samples of each client.
    """

    def __init__(
        self, optima: Sequence[float], sizes: Sequence[int] = (), rate: float = 0.1
    ) -> None:
        self.optima = {f"c{i}": optimum for i, optimum in enumerate(optima)}
        self.sizes = dict(zip(self.optima, sizes or [1] * len(optima), strict=True))
        self.rate = rate
        self.controls: dict[str, torch.Tensor] = {}
        self.pending: dict[str, torch.Tensor] = {}

    def names(self) -> list[str]:
        return [*self.optima]

    def samples(self, client: str) -> int:
        return self.sizes[client]

    def gradient(self, client: str, x: torch.Tensor) -> torch.Tensor:
        return x - self.optima[client]

    def train(
        self, work: Sequence[AssignedWork], version: int, parameters: Differences,
        sent: Mapping[str, Differences], step: ClientStep,
    ) -> list[LocalResult]:  # fmt: skip
        return [self.client_result(client, steps, parameters["x"], sent, step) for client, steps in work]  # fmt: skip

    def client_result(
        self, client: str, steps: int, start: torch.Tensor, sent: Mapping[str, Differences], step: ClientStep,
    ) -> LocalResult:  # fmt: skip
        zero = torch.zeros_like(start)
        direction = sent.get("direction", {}).get("x", zero)
        control = sent.get("control", {}).get("x", zero)
        own = self.controls.get(client, zero)
        x, total = start.clone(), zero.clone()
        for _ in range(steps):
            gradient = self.gradient(client, x)
            total += gradient
            if step.control:
                gradient = gradient - own + control
            if step.beta != 1:
                gradient = step.beta * gradient + (1 - step.beta) * direction
            x -= self.rate * gradient
        extra: dict[str, Differences] = {}
        if step.control:
            self.pending[client] = total / steps
            extra["control"] = {"x": total / steps - own}
        return LocalResult(
            {"x": x - start}, steps, self.sizes[client], steps * self.rate, float("nan"), extra,
        )  # fmt: skip

    def settle(self, client: str, accepted: bool) -> None:
        control = self.pending.pop(client, None)
        if accepted and control is not None:
            self.controls[client] = control

    def state_dict(self) -> dict[str, Any]:
        return {"controls": dict(self.controls)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.controls = dict(state["controls"])


class StepSeconds:
    """Seconds of each local step, by client; ``lost``: pairs of client and version whose work is lost."""

    def __init__(
        self, seconds: Sequence[float], lost: Sequence[tuple[str, int]] = ()
    ) -> None:
        self.seconds = {f"c{i}": value for i, value in enumerate(seconds)}
        self.lost = [*lost]

    def work_time(self, client: str, version: int, steps: int) -> WorkTime:
        time = self.seconds[client] * steps
        if (client, version) in self.lost:
            self.lost.remove((client, version))
            return WorkTime(time / 2, lost=True, away=0.25)
        return WorkTime(time)


def clock(
    cohort: QuadraticCohort,
    seconds: Sequence[float],
    lost: Sequence[tuple[str, int]] = (),
    **settings: Any,
) -> VirtualClock:
    """A virtual clock over quadratics, from x = 0. ``settings``: those of ``[federated]``, ``policy`` among them."""
    section = Federated(**{"clients": len(cohort.optima), **settings})
    policy = find("federation-policy", section.policy).implementation(section)
    start = {"x": torch.zeros((), dtype=torch.float64)}
    return VirtualClock(policy, start, cohort, StepSeconds(seconds, lost))

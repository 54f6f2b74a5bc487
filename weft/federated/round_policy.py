"""Rounds: the server gives work to some clients, waits for all of them, and applies their mean."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weft.federated.policy import (
    AssignedWork,
    ClientUpdate,
    FederationPolicy,
    ModelChange,
    update_state,
)

if TYPE_CHECKING:
    from weft.recipe.federated_section import Federated


class RoundPolicy(FederationPolicy):
    """Base class of policies that work in rounds.

    In each round ``federated.per_round`` clients, drawn at random, do the same number of local steps. When all have
    answered, the server's model moves by ``federated.rate`` times the mean of their differences, weighted by their
    shares. The round does not wait for a client that leaves. After ``federated.patience`` seconds the round ends with
    the answers so far and drops later ones; without any answer it waits on while clients are present.
    """

    def __init__(self, settings: Federated) -> None:
        super().__init__(settings)
        self.rounds = 0
        self.waiting: set[str] = set()
        self.answers: list[ClientUpdate] = []
        self._deadline = 0.0
        self._left_at: float | None = None

    def starts(self, now: float) -> Sequence[AssignedWork]:
        if self.waiting or self.answers:
            return ()
        idle = self.idle()
        if not idle:
            return ()
        chosen = set(idle)
        if 0 < self.settings.per_round < len(idle):
            draw = random.Random(f"{self.settings.seed} {self.rounds}")
            chosen = set(draw.sample(idle, self.settings.per_round))
        self.rounds += 1
        self.waiting = chosen
        self._deadline = now + self.settings.patience
        return [AssignedWork(client, self.settings.steps) for client in idle if client in chosen]  # fmt: skip

    def received(
        self, update: ClientUpdate, staleness: int, now: float
    ) -> ModelChange | None:
        if update.client not in self.waiting:
            return None
        self.waiting.remove(update.client)
        self.answers.append(update)
        return None if self.waiting else self._end_round()

    def left(self, client: str, now: float) -> None:
        self.waiting.discard(client)
        if not self.waiting and self.answers:
            self._left_at = now

    def next_time(self) -> float | None:
        if self._left_at is not None:
            return self._left_at
        return self._deadline if self.waiting else None

    def time_up(self, now: float) -> ModelChange | None:
        if self._left_at is None and not (self.waiting and now >= self._deadline):
            return None
        for client in self.waiting:
            self.members[client].given_up = True
        self.waiting.clear()
        return self._end_round() if self.answers else None

    def _end_round(self) -> ModelChange:
        answers = self.answers
        self.answers = []
        self._left_at = None
        names = [update.client for update in answers]
        total = self.total_share(names)
        weights = [
            self.settings.rate * (self.sample_share(name) / total) for name in names
        ]
        return self.round_change(self.change(answers, weights), answers)

    def round_change(
        self, change: ModelChange, answers: Sequence[ClientUpdate]
    ) -> ModelChange:
        """Return the change of the model at the end of a round; a subclass may modify it.

        ``change``: the weighted mean of the differences. ``answers``: the updates of the round.
        """
        return change

    def own_state(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "waiting": sorted(self.waiting),
            "answers": [update_state(update) for update in self.answers],
            "deadline": self._deadline,
            "left_at": self._left_at,
        }

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        self.rounds = state["rounds"]
        self.waiting = set(state["waiting"])
        self.answers = [ClientUpdate(**answer) for answer in state["answers"]]
        self._deadline = state["deadline"]
        self._left_at = state["left_at"]

"""How long simulated clients work, and which of their works are lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.data.order import hash_keys
from weft.federated.virtual_clock import WorkTime

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.recipe.federated_section import Federated


class SimulatedSpeeds:
    """Simulated durations of clients' work by ``federated.speeds``, with random deviations (``jitter``) and losses
    (``drops``).

    A duration depends only on the seed, the client, and how often this client has worked. A resumed run thus continues
    as it would have without a break.
    """

    def __init__(self, settings: Federated, clients: Sequence[str]) -> None:
        self._settings = settings
        self._numbers = {client: number for number, client in enumerate(clients)}
        self._works: dict[str, int] = {}

    def work_time(self, client: str, version: int, steps: int) -> WorkTime:
        """Return the simulated time that ``client`` takes for ``steps`` local steps, and whether it is lost.
        ``version`` has no effect.
        """
        settings, number = self._settings, self._numbers[client]
        work = self._works[client] = self._works.get(client, 0) + 1
        speed = settings.speeds[number % len(settings.speeds)]
        draws = [float(hash_keys(settings.seed, number, work, kind)[0]) / 2.0**64 for kind in range(2)]  # fmt: skip
        seconds = speed * steps * (1 + settings.jitter * (2 * draws[0] - 1))
        if draws[1] < settings.drops:
            # lost in the midst of the work
            return WorkTime(seconds * draws[1] / settings.drops, True, settings.away)
        return WorkTime(seconds)

    def state_dict(self) -> dict[str, int]:
        """Return how often each client has worked, by its name, for a checkpoint."""
        return dict(self._works)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore how often each client has worked, from the ``state`` that :meth:`state_dict` returned."""
        self._works = dict(state)

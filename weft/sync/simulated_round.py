"""A round of islands as one process sees it: the input of the references of sync methods.

Nothing here is shared with what islands do: parameters come one by one, with those of all islands at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from weft.recipe import Sync
    from weft.sync.gossip_dynamics import LinkExchange

T = torch.Tensor


class One(NamedTuple):
    """A parameter on one simulated island.

    ``now``: its present value. ``kept``: its slots, tensors that the sync method keeps from round to round, by name.
    """

    now: T
    kept: dict[str, T]


class Round(NamedTuple):
    """An exchange of one parameter among simulated islands, which a sync method's reference computes.

    Attributes:
        ``ones``: the parameter on every island, by the island's number.
        ``step``: the number of training steps since ``offset``; a round ends where it is a multiple of ``sync.every``.
        ``offset``: the training step from which rounds of this parameter are counted; fragments have different ones.
        ``how``: the recipe's section ``[sync]``.
        ``past``: a list in which a method keeps values that it needs in later rounds.
        ``near``: function that returns the islands with which an island exchanges, itself included.
        ``betas``: decays of the two moments of the islands' optimizer.
    """

    ones: dict[int, One]
    step: int
    offset: int
    how: Sync
    past: list[Any]
    near: Callable[[int], Collection[int]]
    betas: tuple[float, float] = (0.0, 0.0)

    @property
    def is_due(self) -> bool:
        return self.step % self.how.every == 0 and self.step + self.offset > 0

    def differences(self) -> dict[int, T]:
        return {
            i: replica.kept["anchor"] - replica.now for i, replica in self.ones.items()
        }

    def mean(self, values: Mapping[int, T]) -> T:
        """Return the mean of ``values``, one tensor by island, over the islands with which the first island exchanges.

        The first island itself is one of them.
        """
        return torch.stack([values[i] for i in sorted(self.near(min(self.ones)))]).mean(
            0
        )


def step_anchor(replica: One, gradient: T, lr: float, momentum: float) -> None:
    """Update the anchor of ``replica`` along ``gradient`` by PyTorch's SGD, in place.

    The anchor is the parameter as all islands had it at the beginning of the round. ``lr``: learning rate;
    ``momentum``: the factor of Nesterov's momentum, 0 for none. The momentum itself is the tensor ``outer`` of
    ``replica``, and is updated too.
    """
    optimizer = torch.optim.SGD(
        [replica.kept["anchor"].clone()], lr, momentum, nesterov=momentum > 0
    )
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = gradient
    optimizer.state[parameter]["momentum_buffer"] = replica.kept["outer"].clone()
    optimizer.step()
    replica.kept["anchor"].copy_(parameter)
    # Without momentum PyTorch keeps no buffer, and ours has the last gradient, which nobody reads.
    replica.kept["outer"].copy_(
        optimizer.state[parameter]["momentum_buffer"] if momentum else gradient
    )


def average_heard_squares(at: Round, events: Iterable[LinkExchange]) -> None:
    """Let AdamW's second moments of all simulated islands average squares of gradients of several islands.

    ``at``: a parameter on all islands, after a step. ``events``: the exchanges since; who exchanges knows the other's
    gradient of this step, and takes the square of the mean of all that it knows, in place of its own.
    """
    slow, fast = at.betas
    before = at.past[-1] if at.past else {}
    after = {i: replica.kept["exp_avg"].clone() for i, replica in at.ones.items()}
    at.past[:] = [after]
    gradients = {
        i: (m - slow * before[i] if before else m) / (1 - slow)
        for i, m in after.items()
    }
    known = {i: {i} for i in at.ones}
    for event in events:
        for i, other in (event.islands, event.islands[::-1]):
            known[i].add(other)
    for i, replica in at.ones.items():
        squares = replica.kept["exp_avg_sq"]
        # without its own square, and with that of the mean
        squares.sub_((1 - fast) * gradients[i] ** 2)
        mean = torch.stack([gradients[j] for j in sorted(known[i])]).mean(0)
        squares.add_((1 - fast) * mean**2)
        replica.kept["average_before"].copy_(after[i])

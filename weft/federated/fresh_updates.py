"""Stale updates made fresh: the server finds data that would give a stale update, and trains on them anew.

With unlimited staleness (Wang & Gao 2025) the server looks for dummy samples and soft labels with which the local
steps from the old model give the update that it has received. The same local steps from the present model then
estimate what the client would send now. Finding such data is an attack on the client's privacy by construction:
clipped or noisy updates defeat it, and so does a large model. It is for small classifiers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.func import functional_call

if TYPE_CHECKING:
    from torch import nn

    from weft.federated.policy import ClientUpdate, Differences

T = torch.Tensor
#: Iterations that look for dummy samples, their learning rate, and the number of dummy samples.
ITERATIONS, INVERSION_RATE, DUMMIES = 200, 0.1, 32
#: Once the stale update itself is closer to the true one than this multiple of the estimate, estimates end.
GIVES_UP = 0.9


class DummyData(NamedTuple):
    """Synthetic samples in place of a client's own samples.

    ``inputs``: ``[dummies, values]``. ``logits``: logits of their soft labels, ``[dummies, classes]``.
    """

    inputs: T
    logits: T


def local_steps(
    net: nn.Module, start: Mapping[str, T], data: DummyData, steps: int, rate: float
) -> dict[str, T]:
    """Return the parameters after ``steps`` steps of plain gradient descent on all of ``data`` at once.

    ``start``: the parameters before, by name. ``rate``: the learning rate. The result is differentiable with respect
    to ``data``.
    """
    parameters = dict(start)
    labels = data.logits.softmax(1)
    for _ in range(steps):
        inner = {
            name: tensor if tensor.requires_grad else tensor.detach().requires_grad_()
            for name, tensor in parameters.items()
        }
        logits = functional_call(net, inner, (data.inputs,))
        loss = F.cross_entropy(logits, labels)
        gradients = torch.autograd.grad(
            loss, list(inner.values()), create_graph=torch.is_grad_enabled()
        )
        parameters = {
            name: tensor - rate * gradient
            for (name, tensor), gradient in zip(inner.items(), gradients, strict=True)
        }
    return parameters


def invert_update(
    net: nn.Module, start: Mapping[str, T], difference: Differences, steps: int, rate: float, low: float, high: float,
    iterations: int = ITERATIONS, dummies: int = DUMMIES, seed: int = 0,
) -> DummyData:  # fmt: skip
    """Find synthetic samples on which ``steps`` local steps from ``start`` give nearly ``difference``.

    This is gradient inversion: Adam minimises the L1 distance to ``difference``.

    Arguments:
        ``net``: the model, a function of its parameters.
        ``start``: the parameters before the steps, by name.
        ``rate``: learning rate of the steps.
        ``low``, ``high``: limits of the samples' values.
        ``iterations``: number of steps of Adam.
        ``dummies``: number of synthetic samples.
        ``seed``: seed of their initial values.
    """
    draw = torch.Generator().manual_seed(seed)
    first = next(iter(start.values()))
    with torch.no_grad():
        probe = functional_call(
            net, dict(start), (torch.zeros(1, _values(net), dtype=first.dtype),)
        )
    inputs = (
        torch.rand(dummies, _values(net), generator=draw).to(first) * (high - low) + low
    )
    logits = torch.randn(dummies, probe.shape[1], generator=draw).to(first)
    inputs.requires_grad_()
    logits.requires_grad_()
    optimizer = torch.optim.Adam([inputs, logits], INVERSION_RATE)
    size = sum(float(tensor.abs().sum()) for tensor in difference.values()) or 1.0
    for _ in range(iterations):
        optimizer.zero_grad()
        end = local_steps(net, start, DummyData(inputs, logits), steps, rate)
        distance = sum(
            ((end[name] - start[name] - tensor).abs().sum() for name, tensor in difference.items()),
            start=torch.zeros((), dtype=first.dtype),
        ) / size  # fmt: skip
        distance.backward()
        optimizer.step()
        with torch.no_grad():
            inputs.clamp_(low, high)
    return DummyData(inputs.detach(), logits.detach())


def _values(net: nn.Module) -> int:
    """Return the number of values of a sample that a classifier reads."""
    given = getattr(net, "values", None) or getattr(net, "in_features", None)
    assert given is not None, "a classifier says how many values it reads"
    return int(given)


@dataclass(frozen=True)
class EstimatedUpdate:
    """A stale update, and an estimate of the update that the client would have sent for the model of ``version``."""

    version: int
    stale: Differences
    estimate: Differences


class FreshUpdates:
    """Replaces stale updates by estimates of the updates that their clients would send now.

    When a client's true update for the same version arrives later, its last estimate is compared with that. If the
    stale update was closer to the true one than the estimate, the client gets no more estimates.

    Attributes:
        ``errors``: by client, pairs of L1 distances to the true update: of the stale update and of the estimate.
        ``given_up``: clients whose updates are no longer replaced.
    """

    def __init__(
        self, net: nn.Module, after: int, rate: float, low: float, high: float, iterations: int = ITERATIONS,
    ) -> None:  # fmt: skip
        """``net``: the classifier; ``after``: least staleness; ``rate``: learning rate of local steps."""
        self._net, self._after, self._rate = net, after, rate
        self._low, self._high, self._iterations = low, high, iterations
        self._models: dict[int, dict[str, T]] = {}
        self._estimated: dict[str, EstimatedUpdate] = {}
        self.errors: dict[str, list[tuple[float, float]]] = {}
        self.given_up: set[str] = set()

    def keep_model(self, version: int, parameters: Mapping[str, T]) -> None:
        """Store the model ``parameters`` of ``version``, from which clients start."""
        self._models.setdefault(
            version, {name: t.detach() for name, t in parameters.items()}
        )

    def forget_models(self, needed: set[int]) -> None:
        """Delete the stored models of all versions but ``needed``."""
        self._models = {
            version: model
            for version, model in self._models.items()
            if version in needed
        }

    def refreshed(
        self, update: ClientUpdate, staleness: int, parameters: Mapping[str, T]
    ) -> ClientUpdate:
        """Return an estimate of ``update`` for the model ``parameters``, or ``update`` itself if it is fresh enough.

        ``staleness``: number of changes of the model since the one with which the client began.
        """
        self._judge(update)
        if staleness < max(1, self._after) or update.client in self.given_up:
            return update
        old = self._models[update.version]
        data = invert_update(
            self._net, old, update.difference, update.steps, self._rate, self._low, self._high, self._iterations,
            seed=update.version,
        )  # fmt: skip
        with torch.enable_grad():
            end = local_steps(self._net, parameters, data, update.steps, self._rate)
        estimate = {
            name: (end[name] - tensor).detach() for name, tensor in parameters.items()
        }
        self._estimated[update.client] = EstimatedUpdate(
            update.version + staleness, update.difference, estimate
        )
        return replace(update, difference=estimate)

    def _judge(self, update: ClientUpdate) -> None:
        """Compare a client's last estimate with the true update, if this is it."""
        last = self._estimated.get(update.client)
        # the client began anew at, or after, the change that the estimate was part of
        if last is None or update.version < last.version:
            return
        del self._estimated[update.client]
        stale, estimate = (
            sum(
                float((values[name] - tensor).abs().sum())
                for name, tensor in update.difference.items()
            )
            for values in (last.stale, last.estimate)
        )
        self.errors.setdefault(update.client, []).append((stale, estimate))
        if stale < GIVES_UP * estimate:
            self.given_up.add(update.client)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a restarted run needs, as tensors and plain values."""
        return {
            "models": [
                [version, dict(model)] for version, model in self._models.items()
            ],
            "estimated": {
                client: [each.version, dict(each.stale), dict(each.estimate)]
                for client, each in self._estimated.items()
            },
            "errors": {
                client: [list(pair) for pair in pairs]
                for client, pairs in self.errors.items()
            },
            "given_up": sorted(self.given_up),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""
        self._models = {version: dict(model) for version, model in state["models"]}
        self._estimated = {
            client: EstimatedUpdate(*values)
            for client, values in state["estimated"].items()
        }
        self.errors = {
            client: [(pair[0], pair[1]) for pair in pairs]
            for client, pairs in state["errors"].items()
        }
        self.given_up = set(state["given_up"])

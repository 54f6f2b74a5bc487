"""Stale updates made fresh: the server finds data that would give a stale update, and trains on them anew.

With unlimited staleness (Wang & Gao 2025) the server looks for dummy samples and soft labels with which the local
steps from the old model give the update that it has received. The same local steps from the present model then
estimate what the client would send now. Finding such data is an attack on the client's privacy by construction:
clipped or noisy updates defeat it, and so does a large model. It is for small classifiers.

One update does not always tell what its client's data are: a client that began with a model that knew its data well
has moved it by nearly nothing, and so do samples of any kind with the model's own predictions for labels. A client's
data stay the same, so the samples that are looked for must give several of its updates, those that are largest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.func import functional_call

if TYPE_CHECKING:
    from torch import nn

    from weft.federated.policy import ClientUpdate, Differences

T = torch.Tensor
#: Iterations that look for dummy samples, their first learning rate, and the number of dummy samples.
ITERATIONS, INVERSION_RATE, DUMMIES = 200, 1.0, 32
#: Shares of the iterations after which the learning rate is a tenth of what it was. A high one at first is what makes
#: labels certain: with uncertain ones an estimate goes on where the true update has ended.
LOWERED = (3 / 8, 5 / 8, 7 / 8)
#: Updates of a client that its dummy samples must give.
REMEMBERED = 3
#: Once the sum of the stale updates' errors is less than this multiple of that of the estimates', estimates end.
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


class KnownUpdate(NamedTuple):
    """An update of a client: ``start``, the parameters with which its ``steps`` local steps began, and the
    ``difference`` that they made.
    """

    start: Mapping[str, T]
    difference: Differences
    steps: int

    @property
    def size(self) -> float:
        """L1 norm of the difference: the sum of the magnitudes of all elements."""
        return _distance(self.difference, {})


def invert_updates(
    net: nn.Module, updates: Sequence[KnownUpdate], rate: float, low: float, high: float,
    iterations: int = ITERATIONS, dummies: int = DUMMIES, seed: int = 0,
) -> DummyData:  # fmt: skip
    """Return synthetic samples on which local steps give nearly the differences of all ``updates`` of one client.

    This is gradient inversion: Adam minimises the sum of the L1 distances to the differences.

    Arguments:
        ``net``: the model, a function of its parameters.
        ``rate``: learning rate of the local steps.
        ``low``, ``high``: limits of the samples' values.
        ``iterations``: number of steps of Adam.
        ``dummies``: number of synthetic samples.
        ``seed``: seed of their initial values.
    """
    draw = torch.Generator().manual_seed(seed)
    first = next(iter(updates[0].start.values()))
    with torch.no_grad():
        zeros = torch.zeros(1, _values(net), dtype=first.dtype)
        probe = functional_call(net, dict(updates[0].start), (zeros,))
    inputs = (
        torch.rand(dummies, _values(net), generator=draw).to(first) * (high - low) + low
    )
    logits = torch.randn(dummies, probe.shape[1], generator=draw).to(first)
    inputs.requires_grad_()
    logits.requires_grad_()
    optimizer = torch.optim.Adam([inputs, logits], INVERSION_RATE)
    milestones = [round(share * iterations) for share in LOWERED]
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, 0.1)
    size = sum(update.size for update in updates) or 1.0
    for _ in range(iterations):
        optimizer.zero_grad()
        for update in updates:
            end = local_steps(
                net, update.start, DummyData(inputs, logits), update.steps, rate
            )
            distance = sum(
                ((end[name] - update.start[name] - tensor).abs().sum() for name, tensor in update.difference.items()),
                start=torch.zeros((), dtype=first.dtype),
            ) / size  # fmt: skip
            distance.backward()
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            inputs.clamp_(low, high)
    return DummyData(inputs.detach(), logits.detach())


def _distance(some: Differences, others: Differences) -> float:
    """Return the L1 distance of two differences; a tensor that ``others`` lacks is zero there."""
    return sum(
        float((tensor - others[name] if name in others else tensor).abs().sum())
        for name, tensor in some.items()
    )


def _values(net: nn.Module) -> int:
    """Return the number of values of a sample that a classifier reads."""
    given = getattr(net, "values", None) or getattr(net, "in_features", None)
    assert given is not None, "a classifier says how many values it reads"
    return int(given)


@dataclass(frozen=True)
class EstimatedUpdate:
    """Record of a stale update that was replaced by an estimate. ``version``: version of the model for which it was
    estimated. ``stale``: the stale update. ``data``: the synthetic samples from which the estimate was computed.
    """

    version: int
    stale: Differences
    data: DummyData


class FreshUpdates:
    """Replaces stale updates by estimates of the updates that their clients would send now.

    The estimates are checked when the client's next update comes. Two vectors are compared with this update. One is the
    client's last stale update. The other is the estimate that its synthetic samples give for the model from which the
    new update began. If the stale updates are closer, summed over all comparisons of a client, its updates are no
    longer replaced.

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
        self._known: dict[str, list[KnownUpdate]] = {}
        self._estimated: dict[str, EstimatedUpdate] = {}
        self.errors: dict[str, list[tuple[float, float]]] = {}
        self.given_up: set[str] = set()

    def keep_model(self, version: int, parameters: Mapping[str, T]) -> None:
        """Store the model ``parameters`` of ``version``, from which clients start."""
        self._models.setdefault(
            version, {name: t.detach() for name, t in parameters.items()}
        )

    def forget_models(self, needed: set[int]) -> None:
        """Delete the stored models of all versions that are not in ``needed``."""
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
        # begun before this run made updates fresh
        if update.version not in self._models:
            return update
        latest = KnownUpdate(self._models[update.version], update.difference, update.steps)  # fmt: skip
        known = sorted(
            [*self._known.get(update.client, []), latest],
            key=lambda each: each.size,
            reverse=True,
        )[:REMEMBERED]
        self._known[update.client] = known
        data = invert_updates(
            self._net, known, self._rate, self._low, self._high, self._iterations, seed=update.version
        )  # fmt: skip
        self._estimated[update.client] = EstimatedUpdate(
            update.version + staleness, update.difference, data
        )
        estimate = self._estimate(parameters, data, update.steps)
        return replace(update, difference=estimate)

    def _estimate(
        self, parameters: Mapping[str, T], data: DummyData, steps: int
    ) -> dict[str, T]:
        """Return what ``steps`` local steps on ``data`` add to ``parameters``."""
        with torch.enable_grad():
            end = local_steps(self._net, parameters, data, steps, self._rate)
        return {
            name: (end[name] - tensor).detach() for name, tensor in parameters.items()
        }

    def _judge(self, update: ClientUpdate) -> None:
        """Compare a client's last estimate with its true update, which began after that."""
        last = self._estimated.get(update.client)
        if last is None or update.version < last.version:
            return
        del self._estimated[update.client]
        began = self._models[update.version]
        estimate = self._estimate(began, last.data, update.steps)
        errors = (
            _distance(update.difference, last.stale),
            _distance(update.difference, estimate),
        )
        pairs = self.errors.setdefault(update.client, [])
        pairs.append(errors)
        # over all of them: a single one may be of a model that left the client nothing to do
        stale, estimates = (sum(side) for side in zip(*pairs, strict=True))
        if stale < GIVES_UP * estimates:
            self.given_up.add(update.client)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a restarted run needs, as tensors and plain values."""
        return {
            "models": [
                [version, dict(model)] for version, model in self._models.items()
            ],
            "estimated": {
                client: [each.version, dict(each.stale), list(each.data)]
                for client, each in self._estimated.items()
            },
            "known": {
                client: [
                    [dict(each.start), dict(each.difference), each.steps]
                    for each in updates
                ]
                for client, updates in self._known.items()
            },
            "errors": {
                client: [list(pair) for pair in pairs]
                for client, pairs in self.errors.items()
            },
            "given_up": sorted(self.given_up),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned.

        The state of a run that did not make updates fresh, or of an earlier form, is left out: all is learned anew.
        """
        if "known" not in state:
            return
        self._models = {version: dict(model) for version, model in state["models"]}
        self._estimated = {
            client: EstimatedUpdate(version, stale, DummyData(*data))
            for client, (version, stale, data) in state["estimated"].items()
        }
        self._known = {
            client: [KnownUpdate(*values) for values in updates]
            for client, updates in state["known"].items()
        }
        self.errors = {
            client: [(pair[0], pair[1]) for pair in pairs]
            for client, pairs in state["errors"].items()
        }
        self.given_up = set(state["given_up"])

"""Simulated clients that train a small classifier: one tensor program for all clients that begin together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from weft.data.order import hash_keys
from weft.federated.client_cohort import LocalResult

if TYPE_CHECKING:
    from weft.federated.client_partition import Partition
    from weft.federated.labelled_samples import LabelledSamples
    from weft.federated.policy import AssignedWork, ClientStep, Differences

T = torch.Tensor
#: Gradients by name and losses, of several clients.
GradientsAndLosses = tuple[dict[str, T], T]
#: Largest number of clients that are computed one after another, and of those that are computed together.
FEW, TOGETHER = 32, 512


class ClassifierScore(NamedTuple):
    """Quality of a model on labelled samples: its mean loss in nats, and its accuracy, the share of samples that it
    gets right.
    """

    loss: float
    accuracy: float


class ClassifierCohort:
    """Clients with labelled samples that train a module by plain gradient descent.

    A step draws ``batch`` of a client's samples, with repetition, by a hash of seed, version of the model, client and
    step. The loss is the cross entropy.

    Attributes:
        ``net``: module from ``[rows, values]`` to logits ``[rows, classes]``; a function of its parameters alone.
        ``controls``: the control variate of each client that has one.
    """

    def __init__(
        self,
        net: nn.Module,
        samples: LabelledSamples,
        partition: Partition,
        batch: int,
        rate: float,
        seed: int,
    ) -> None:
        dtype = next(net.parameters()).dtype
        self.net = net
        self.features = torch.from_numpy(samples.features).to(dtype)
        self.labels = torch.from_numpy(samples.labels)
        width = len(str(len(partition.rows) - 1))
        self.rows = {
            f"client-{number:0{width}d}": rows
            for number, rows in enumerate(partition.rows)
        }
        self.numbers = {client: number for number, client in enumerate(self.rows)}
        self.batch, self.rate, self.seed = batch, rate, seed
        self.controls: dict[str, dict[str, T]] = {}
        self._pending: dict[str, dict[str, T]] = {}
        self._gradients: Callable[..., GradientsAndLosses] = self._by_client
        if len(self.rows) > FEW:
            self._gradients = self._at_once()

    def names(self) -> list[str]:
        return [*self.rows]

    def samples(self, client: str) -> int:
        return len(self.rows[client])

    def _loss(self, parameters: Mapping[str, T], x: T, y: T) -> T:
        # mean over the batch of a client, x [batch, values], y [batch]
        return F.cross_entropy(functional_call(self.net, dict(parameters), (x,)), y)

    def _by_client(self, parameters: Mapping[str, T], x: T, y: T) -> GradientsAndLosses:
        """Return gradients ``[clients, *shape]`` and losses ``[clients]``, one client after another.

        ``parameters``: ``[clients, *shape]`` by name; ``x``: ``[clients, batch, values]``; ``y``: ``[clients, batch]``.
        """
        gradients = {name: torch.empty_like(tensor) for name, tensor in parameters.items()}  # fmt: skip
        losses = []
        for client in range(len(x)):
            own = {name: tensor[client].detach().requires_grad_() for name, tensor in parameters.items()}  # fmt: skip
            loss = self._loss(own, x[client], y[client])
            of_loss = torch.autograd.grad(loss, list(own.values()))
            for name, gradient in zip(own, of_loss, strict=True):
                gradients[name][client] = gradient
            losses.append(loss.detach())
        return gradients, torch.stack(losses)

    def _at_once(self) -> Callable[..., GradientsAndLosses]:
        """Return a function that computes what :meth:`_by_client` does for all clients in one program.

        Its first call takes seconds, which only many clients are worth.
        """
        from torch.func import grad_and_value, vmap

        at_once: Callable[..., GradientsAndLosses] = vmap(grad_and_value(self._loss))
        return at_once

    def train(
        self,
        work: Sequence[AssignedWork],
        version: int,
        parameters: Differences,
        sent: Mapping[str, Differences],
        step: ClientStep,
    ) -> list[LocalResult]:
        results: list[LocalResult] = []
        queue = iter(work)
        while part := [*islice(queue, TOGETHER)]:
            results += self._train_together(part, version, parameters, sent, step)
        return results

    def _train_together(
        self,
        work: Sequence[AssignedWork],
        version: int,
        parameters: Differences,
        sent: Mapping[str, Differences],
        step: ClientStep,
    ) -> list[LocalResult]:
        clients = [client for client, _ in work]
        steps = work[0].steps
        drawn = torch.from_numpy(
            self._draw(clients, version, steps)
        )  # [clients, steps, batch]
        # of every client a copy: [clients, *shape]
        start = {
            name: tensor.expand(len(clients), *tensor.shape)
            for name, tensor in parameters.items()
        }
        now = {name: tensor.clone() for name, tensor in start.items()}
        correction = self._correction(clients, sent, step)
        direction = sent.get("direction", {})
        total = (
            {name: torch.zeros_like(tensor) for name, tensor in now.items()}
            if step.control
            else {}
        )
        losses = torch.zeros(len(clients), dtype=torch.float64)
        for number in range(steps):
            rows = drawn[:, number]
            gradients, loss = self._gradients(
                now, self.features[rows], self.labels[rows]
            )
            losses += loss.double()
            for name, gradient in gradients.items():
                if step.control:
                    total[name] += gradient
                    gradient = gradient + correction[name]
                if step.beta != 1.0:
                    gradient = gradient * step.beta
                    if direction:
                        gradient = gradient + (1 - step.beta) * direction[name]
                now[name].sub_(gradient, alpha=self.rate)
        moved = {name: tensor - start[name] for name, tensor in now.items()}
        results = []
        for place, client in enumerate(clients):
            extra: dict[str, Differences] = {}
            if step.control:
                control = {
                    name: tensor[place] / steps for name, tensor in total.items()
                }
                before = self.controls.get(client)
                extra["control"] = {
                    name: tensor - before[name] if before else tensor.clone()
                    for name, tensor in control.items()
                }
                self._pending[client] = control
            difference = {name: tensor[place].clone() for name, tensor in moved.items()}
            results.append(
                LocalResult(
                    difference, steps, self.samples(client), steps * self.rate, float(losses[place]) / steps, extra
                )
            )  # fmt: skip
        return results

    def _draw(self, clients: Sequence[str], version: int, steps: int) -> np.ndarray:
        """Return the numbers of the samples that clients learn from, ``[clients, steps, batch]``."""
        numbers = np.array([self.numbers[client] for client in clients])[:, None, None]
        keys = np.arange(steps)[None, :, None], np.arange(self.batch)[None, None, :]
        bits = hash_keys(self.seed, version, numbers, *keys)
        sizes = np.array([self.samples(client) for client in clients], np.uint64)[:, None, None]  # fmt: skip
        places = (bits % sizes).astype(np.int64)
        return np.stack([self.rows[client][places[i]] for i, client in enumerate(clients)])  # fmt: skip

    def _correction(
        self, clients: Sequence[str], sent: Mapping[str, Differences], step: ClientStep
    ) -> dict[str, T]:
        """Return ``c - c_i`` for each client, ``[clients, *shape]`` by name."""
        if not step.control:
            return {}
        correction = {}
        for name, parameter in self.net.named_parameters():
            zero = torch.zeros_like(parameter)
            own = [self.controls[c][name] if c in self.controls else zero for c in clients]  # fmt: skip
            correction[name] = sent.get("control", {}).get(name, zero) - torch.stack(own)  # fmt: skip
        return {name: tensor.detach() for name, tensor in correction.items()}

    def settle(self, client: str, accepted: bool) -> None:
        control = self._pending.pop(client, None)
        if accepted and control is not None:
            self.controls[client] = control

    def state_dict(self) -> dict[str, Any]:
        return {"controls": dict(self.controls), "pending": dict(self._pending)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.controls = dict(state["controls"])
        self._pending = dict(state["pending"])

    @torch.no_grad()
    def score(
        self, parameters: Differences, rows: np.ndarray | None = None
    ) -> ClassifierScore:
        """Return the quality of the model ``parameters`` on samples. ``rows``: numbers of the samples; None: the
        samples of all clients together.
        """
        chosen = torch.from_numpy(np.concatenate([*self.rows.values()]) if rows is None else rows)  # fmt: skip
        logits = functional_call(self.net, dict(parameters), (self.features[chosen],))
        labels = self.labels[chosen]
        loss = F.cross_entropy(logits.double(), labels)
        return ClassifierScore(float(loss), float((logits.argmax(1) == labels).double().mean()))  # fmt: skip

"""Gradient coding: a step's gradient is decoded from the sums of the fastest ranks (:mod:`weft.sync.coded`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from weft.data.batch import Batch
from weft.data.order import sample_hashes
from weft.errors import UsageError
from weft.net.groups import limit
from weft.recipe import Resilience
from weft.sync.arrivals import Link, Sum, connect_ranks
from weft.sync.coded import CodedTask, code_of
from weft.train.step import (
    PhaseFiller,
    StepContext,
    accumulate,
    clear_gradients,
    split_like,
    step_result,
)
from weft.train.step_values import Agreed, StepInput

if TYPE_CHECKING:
    from weft.train.phases import AgreePhase

T = torch.Tensor

#: A decoded weight of labels below this is a rounding error of 0.
ROUNDING = 1e-7


class Coding(PhaseFiller):
    """Ends a step as soon as the step's gradient can be decoded from the sums of gradients that have arrived.

    A step is divided into jobs (``resilience.jobs``), and a job into parts, of which most are computed by several
    ranks. A rank's batches in a step are those of all parts that the rank may have to compute, job after job. The
    gradient of the step is the sum over its jobs, and the update waits until the last job is decoded. No other wait for
    all ranks is needed, because loss, tokens and requests to stop are sent with the gradients.
    """

    def __init__(self, context: StepContext, resilience: Resilience) -> None:
        self.context = context
        if context.model.loads is not None:
            raise UsageError(
                "resilience.code computes samples several times, and routers of experts would count them so"
            )
        code = code_of(resilience, context.mesh.size("dp"))
        assert code is not None
        waits = limit()
        self.code, self.rank = code, context.mesh.rank("dp")
        seconds = waits.total_seconds() if waits else 600.0
        self.link: Link = connect_ranks(
            code,
            context.mesh.group("dp"),
            seconds,
            resilience.patience,
            resilience.encrypt,
        )

    def gradients(self, given: StepInput, agree: AgreePhase) -> T:
        """Return 0 without computing anything. The arguments are not used. The gradients are computed in :meth:`agree`,
        because the results that arrive decide which ones are needed.
        """
        return torch.zeros(())

    def agree(self, given: StepInput, shares: T) -> Agreed:
        """Compute parts and send weighted sums of their gradients, until the step's gradient can be decoded.

        Returns the decoded gradients and a function that returns the step's result. ``given``: batches and learning
        rate of the step. ``shares`` is not used.
        """
        model, state = self.context.model, self.context.state
        parts = self.code.parts_of(self.rank)
        places = [(job, part) for job in range(self.code.jobs) for part in parts]
        passes = len(given.batches) // len(places)
        of = {
            place: given.batches[i * passes : (i + 1) * passes]
            for i, place in enumerate(places)
        }

        def compute(task: CodedTask, over: Callable[[], bool]) -> Sum | None:
            numbers = torch.zeros(6, dtype=torch.float64)
            for part, coefficient in zip(task.parts, task.coefficients, strict=True):
                for batch in of[task.job, part]:
                    if over():
                        clear_gradients(model, state)
                        return None
                    numbers += self._pass(batch, coefficient)
            vector = (
                torch.cat([grad.flatten() for grad in state.gradients().values()])
                .cpu()
                .numpy()
            )
            clear_gradients(model, state)
            return Sum(vector, numbers.numpy())

        last = self.link.take_step(self.code, compute, given.stop)
        self.context.before_update()
        assert last.total is not None
        loss, weight, *counts = last.total.numbers.tolist()
        weight = weight if abs(weight) > ROUNDING else 1.0
        vector = (
            torch.from_numpy(last.total.vector).to(self.context.mesh.device) / weight
        )
        grads = split_like(vector, {h.name: h.local for h in state.learning})
        tokens, samples, low, high = map(round, counts)
        sums = [
            loss / weight,
            vector.double().square().sum().item(),
            last.flag,
            tokens,
            samples,
            low + (high << 16),
        ]
        return Agreed(
            grads, partial(step_result, torch.tensor(sums, dtype=torch.float64))
        )

    def _pass(self, batch: Batch, coefficient: float) -> T:
        """Forward and backward of a batch, which add ``coefficient`` times its gradient to the parameters' gradients.

        Returns the batch's numbers, likewise times ``coefficient``: float64 ``[6]``, loss, weight of labels, tokens,
        samples, and the sums of the lower and the upper half of their marks.
        """
        context = self.context
        divisor = torch.tensor(
            1 / coefficient, dtype=torch.float64, device=context.mesh.device
        )
        loss = accumulate(
            context.model,
            context.state,
            [batch],
            context.mesh,
            context.routes,
            weight=divisor,
        )
        # in halves: their sums are whole numbers, and must be told from each other
        marked = sample_hashes(batch.samples)
        counts = [
            batch.label_weight, batch.real_tokens, len(batch.samples), (marked & 0xFFFF).sum(), (marked >> 16).sum()
        ]  # fmt: skip
        return torch.tensor(
            [loss.item(), *(coefficient * float(number) for number in counts)],
            dtype=torch.float64,
        )

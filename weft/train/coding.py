"""Gradient coding: a step's gradient is decoded from the sums of the ranks that are first (:mod:`weft.sync.coded`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from weft.data.batch import Batch
from weft.data.order import marks
from weft.errors import UsageError
from weft.net.groups import limit
from weft.recipe import Resilience
from weft.sync.arrivals import Link, Sum, connect_ranks
from weft.sync.coded import CodedTask, code_of
from weft.train.step import Stepper, accumulate, clear_gradients, split_like

T = torch.Tensor

#: A decoded weight of labels below this is a rounding error of 0.
ROUNDING = 1e-7


@dataclass
class Coding(Stepper):
    """A stepper that ends a step as soon as enough ranks have answered for its gradient to be decoded.

    A step consists of jobs, and a job of parts, each computed by several ranks. ``batches`` of a step are those of all
    parts that this rank may have to compute, job after job. Nothing in a step waits for all ranks: loss, tokens and
    wishes to stop come with the gradients. The step's gradient is the sum over its jobs, which are all computed with
    the same parameters; the update waits for the last one.
    """

    resilience: Resilience = field(default_factory=Resilience)

    def __post_init__(self) -> None:
        if self.model.loads is not None:
            raise UsageError(
                "resilience.code computes samples several times, and routers of experts would count them so"
            )
        code = code_of(self.resilience, self.mesh.size("dp"))
        assert code is not None
        waits = limit()
        self.code, self.rank = code, self.mesh.rank("dp")
        seconds = waits.total_seconds() if waits else 600.0
        self.link: Link = connect_ranks(
            code,
            self.mesh.group("dp"),
            seconds,
            self.resilience.patience,
            self.resilience.encrypt,
        )

    def gradients(self, batches: Sequence[Batch], stop: bool) -> tuple[dict[str, T], T]:
        parts = self.code.parts_of(self.rank)
        places = [(job, part) for job in range(self.code.jobs) for part in parts]
        passes = len(batches) // len(places)
        of = {
            place: batches[i * passes : (i + 1) * passes]
            for i, place in enumerate(places)
        }

        def compute(task: CodedTask, over: Callable[[], bool]) -> Sum | None:
            numbers = torch.zeros(6, dtype=torch.float64)
            for part, coefficient in zip(task.parts, task.coefficients, strict=True):
                for batch in of[task.job, part]:
                    if over():
                        clear_gradients(self.model, self.state)
                        return None
                    numbers += self._pass(batch, coefficient)
            vector = (
                torch.cat([grad.flatten() for grad in self.state.gradients().values()])
                .cpu()
                .numpy()
            )
            clear_gradients(self.model, self.state)
            return Sum(vector, numbers.numpy())

        last = self.link.take_step(self.code, compute, stop)
        self.before_update()
        assert last.total is not None
        loss, weight, *counts = last.total.numbers.tolist()
        weight = weight if abs(weight) > ROUNDING else 1.0
        vector = torch.from_numpy(last.total.vector).to(self.mesh.device) / weight
        grads = split_like(vector, {h.name: h.local for h in self.state.learning})
        tokens, samples, low, high = map(round, counts)
        sums = [
            loss / weight,
            vector.double().square().sum().item(),
            last.flag,
            tokens,
            samples,
            low + (high << 16),
        ]
        return grads, torch.tensor(sums, dtype=torch.float64)

    def _pass(self, batch: Batch, coefficient: float) -> T:
        """Forward and backward of a batch, which add ``coefficient`` times its gradient to the parameters' gradients.

        Returns the batch's numbers, likewise times ``coefficient``: float64 ``[6]``, loss, weight of labels, tokens,
        samples, and the sums of the lower and the upper half of their marks.
        """
        divisor = torch.tensor(
            1 / coefficient, dtype=torch.float64, device=self.mesh.device
        )
        loss = accumulate(
            self.model, self.state, [batch], self.mesh, self.routes, weight=divisor
        )
        # in halves: their sums are whole numbers, and must be told from each other
        marked = marks(batch.samples)
        found = [
            batch.label_weight, batch.real_tokens, len(batch.samples), (marked & 0xFFFF).sum(), (marked >> 16).sum()
        ]  # fmt: skip
        return torch.tensor(
            [loss.item(), *(coefficient * float(number) for number in found)],
            dtype=torch.float64,
        )

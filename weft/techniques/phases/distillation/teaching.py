"""Gradients of a loss that compares a model with its teachers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from weft.models.plugin_loss import TokenLoss
from weft.train.ensemble import (
    Average,
    TokenOutputs,
    joint_log_probabilities,
    token_outputs,
)
from weft.train.step import PhaseFiller, accumulate

if TYPE_CHECKING:
    from weft.data.batch import Batch
    from weft.models.hooks import Hooks
    from weft.models.transformer import Transformer
    from weft.recipe import Loss
    from weft.train.phases import AgreePhase
    from weft.train.step import StepContext
    from weft.train.step_values import StepInput

T = torch.Tensor


@dataclass
class SoftTargets:
    """Loss of the next tokens of one pass, with the joint probabilities of teachers as targets. Every call takes the
    logits of some tokens. Calls come in the order of the labels, and the teachers' outputs have one row for each label.

    Attributes:
        ``outputs``: output of each teacher for the labelled tokens of the pass.
        ``share``: weight of the teachers in the loss; the rest is the cross entropy with the labels.
        ``average``: value of ``loss.teacher_average``, which names the quantity that is averaged over the teachers,
            such as their probabilities.
        ``position``: number of tokens whose loss has been computed.
    """

    outputs: Sequence[TokenOutputs]
    share: float
    average: Average
    position: int = 0

    def __call__(self, logits: T, labels: T) -> T:
        rows = slice(self.position, self.position + len(labels))
        self.position = rows.stop
        target = joint_log_probabilities(self.outputs, rows, self.average).exp()
        own = logits.log_softmax(-1)
        soft = -(target.to(own.dtype) * own).sum(-1)
        hard = -own.gather(1, labels[:, None])[:, 0]
        return self.share * soft + (1 - self.share) * hard


class Teaching(PhaseFiller):
    """Computes gradients with teachers: in each pass the teachers run first, and their probabilities are targets of the
    model's loss. ``context``: the model, state and mesh of the run. ``teachers``: the teachers, whole on this rank's
    device. ``loss``: the section ``[loss]``.
    """

    def __init__(
        self, context: StepContext, teachers: Sequence[Transformer], loss: Loss
    ) -> None:
        self.context, self.teachers, self.loss = context, teachers, loss

    def gradients(self, given: StepInput, agree: AgreePhase) -> T:
        of = self.context
        weight = agree.label_weight(given.batches)
        return accumulate(
            of.model, of.state, given.batches, of.mesh, of.routes, weight=weight, beyond=agree.beyond,
            hooks=self.taught,
        )  # fmt: skip

    def taught(self, batch: Batch) -> Hooks:
        """Run the teachers on ``batch``; return hooks for the model's pass over it, whose loss uses the teachers'
        outputs as targets.
        """
        outputs = [token_outputs(teacher, batch) for teacher in self.teachers]
        targets = SoftTargets(
            outputs, self.loss.teacher_share, self.loss.teacher_average
        )
        model = self.context.model
        return replace(model.hooks, criterion=TokenLoss(targets, model.shape.vocab))


def open_teachers(names: Sequence[str], context: StepContext) -> list[Transformer]:
    """Open the models ``names`` on this rank's device, without gradients, and return them in this order. ``context``:
    model, state and mesh of the run. Ranks do not wait for each other here.
    """
    from weft.checkpoint.weights import open_pretrained
    from weft.layout.mesh import Mesh
    from weft.parallel.build import parallelize
    from weft.recipe import Train

    mesh, teachers = Mesh.single(str(context.mesh.device)), []
    for name in names:
        teacher = open_pretrained(name)
        assert teacher.values is not None  # check_teachers has refused others
        model, _ = parallelize(
            teacher.shape, mesh, Train(), teacher.values, summed=False
        )
        teachers.append(model.requires_grad_(False).eval())
    return teachers

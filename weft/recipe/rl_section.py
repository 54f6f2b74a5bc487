"""The section ``[rl]``: training by rewards for what the model writes itself."""

from typing import ClassVar

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from weft.recipe.host_section import HostSection
from weft.recipe.policy_loss_section import PolicyLoss, policy_loss
from weft.section import Section


class SupervisedStart(Section):
    """Section on the supervised steps before reinforcement learning, on the tasks' own answers."""

    steps: NonNegativeInt = Field(
        0,
        description=(
            "Number of steps at the beginning of the run that learn the tasks' own right answers by cross-entropy, "
            "so that some answers are right when rewards begin. 0: none."
        ),
    )
    lr: PositiveFloat = Field(
        1e-3,
        description="Largest learning rate of the supervised steps; it falls to a tenth until their end.",
    )


class Reinforcement(HostSection):
    """Section on reinforcement learning (docs/how-to/reinforcement-learning.md).

    The model writes answers to the questions of ``[[tasks]]``, which give the answers a reward. A policy loss makes
    the better ones more likely.
    """

    hosts: ClassVar = {"method": "policy-loss"}

    method: str = Field(
        "grpo",
        description=(
            "Method whose loss is minimised, such as 'grpo', 'dapo' or 'ppo' (docs/explanations/policy-losses.md). "
            "Settings in [rl.loss] replace parts of it."
        ),
    )
    group: PositiveInt = Field(
        8,
        description="Number of answers to each question, whose rewards are compared with each other.",
    )
    batch: NonNegativeInt = Field(
        0,
        description=(
            "Number of questions in a rollout phase, whose answers are all written by the same weights. "
            "0: as many as one update uses, train.batch / rl.group."
        ),
    )
    epochs: PositiveInt = Field(
        1,
        description="Number of passes over the answers of a rollout phase in training.",
    )
    tokens: PositiveInt = Field(
        64, description="Largest number of tokens in an answer."
    )
    temperature: PositiveFloat = Field(
        1.0, description="Randomness of the answers: logits are divided by it."
    )
    staleness: NonNegativeInt = Field(
        0,
        description=(
            "Largest number of rollout phases by which the weights that wrote an answer may be older than the "
            "weights that learn from it. 0: every phase waits for the newest weights."
        ),
    )
    redraw: NonNegativeInt = Field(
        0,
        description=(
            "Largest number of times that a question is replaced by another one because all its answers got the same "
            "reward, so that nothing can be learned from them (dynamic sampling of DAPO). 0: never."
        ),
    )
    keep: NonNegativeInt = Field(
        0,
        description=(
            "Number of latest rollout phases whose answers are kept in the run's folder "
            "(answers/*.jsonl), as conversations with rewards that data.kind = 'chat' reads. 0: none."
        ),
    )
    most_unscored: float = Field(
        0.2,
        ge=0,
        le=1,
        description=(
            "Largest share of a phase's answers that may have no reward, because the task failed on them. The run ends "
            "if there are more."
        ),
    )
    start: SupervisedStart = Field(
        SupervisedStart(), description="Supervised steps before the first rewards."
    )
    loss: PolicyLoss = Field(
        PolicyLoss(), description="Settings that replace parts of the method's loss."
    )

    @property
    def policy_loss(self) -> PolicyLoss:
        """All settings of the loss: those of the method, with the parts that ``[rl.loss]`` replaces."""
        changes = {
            name: getattr(self.loss, name) for name in self.loss.model_fields_set
        }
        loss = policy_loss(self.method, changes)
        return (
            loss
            if loss.constant
            else loss.model_copy(update={"constant": float(self.tokens)})
        )

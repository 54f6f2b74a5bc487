"""The section ``[rl]``: training by rewards for what the model writes itself."""

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from weft.recipe.host_section import HostSection
from weft.recipe.policy_loss_section import PolicyLoss, policy_loss
from weft.registry import Registered, find
from weft.section import Section


class SupervisedStart(Section):
    """Section on the supervised steps before reinforcement learning, on the tasks' own answers."""

    steps: NonNegativeInt = Field(
        0,
        description=(
            "Number of steps at the beginning of the run in which the model learns the tasks' own right answers by "
            "cross-entropy, so that some of its answers are right when rewards begin. 0: none."
        ),
    )
    lr: PositiveFloat = Field(
        1e-3,
        description=(
            "Largest learning rate in the supervised steps. It rises to this number and then falls to a tenth of "
            "it."
        ),
    )


class Reinforcement(HostSection):
    """Section on reinforcement learning (docs/how-to/reinforcement-learning.md).

    The model writes answers to the questions of ``[[tasks]]``, which give the answers a reward. A policy loss makes
    the better ones more likely.
    """

    hosts: ClassVar = {"method": "policy-loss"}

    def named(self) -> Iterator[Registered]:
        """Yield the techniques that this section names: the policy loss, and the answers that the model writes."""
        yield from super().named()
        yield find("samples", "rl")

    method: str = Field(
        "grpo",
        description=(
            "Method of reinforcement learning, which decides the loss and how advantages are computed, such as "
            "'grpo', 'dapo' or 'ppo' (docs/explanations/policy-losses.md describes each). Settings in [rl.loss] "
            "replace parts of it."
        ),
    )
    group: PositiveInt = Field(
        8,
        description=(
            "Number of answers that the model writes to each question. Their rewards are compared with each other."
        ),
    )
    batch: NonNegativeInt = Field(
        0,
        description=(
            "Number of questions in a rollout phase. All answers of a phase are written by the same weights, and "
            "several updates may learn from them. 0: as many as one update uses, train.batch / rl.group."
        ),
    )
    epochs: PositiveInt = Field(
        1,
        description=(
            "Number of times that the model is trained on the answers of a rollout phase, before it writes new "
            "ones."
        ),
    )
    tokens: PositiveInt = Field(
        64,
        description="Largest number of tokens in an answer. Longer answers are cut there.",
    )
    temperature: PositiveFloat = Field(
        1.0,
        description=(
            "Randomness of the answers: logits are divided by this number before a token is drawn. Below 1, answers "
            "vary less."
        ),
    )
    staleness: NonNegativeInt = Field(
        0,
        description=(
            "Largest number of rollout phases by which the weights that write answers may lag behind the "
            "weights in training. More than 0 lets writing and training overlap. 0: each phase waits for the "
            "newest weights."
        ),
    )
    redraw: NonNegativeInt = Field(
        0,
        description=(
            "Largest number of times that a question is replaced by another one because all its answers got the "
            "same reward, from which nothing can be learned (dynamic sampling of DAPO). 0: it is not replaced."
        ),
    )
    keep: NonNegativeInt = Field(
        0,
        description=(
            "Number of latest rollout phases whose answers and rewards are kept as files in the run's folder "
            "(answers/*.jsonl). data.kind = 'chat' can read these. 0: none are kept."
        ),
    )
    share_prompts: bool = Field(
        True,
        description=(
            "Whether a prompt that several answers of a pass follow is computed once instead of with each of them. "
            "Loss and gradients are the same up to roundings. It is computed with each answer in any case by models "
            "of plugins and of other kinds, by models with experts, windows or linear attention, under layouts with "
            "cp, pp, ep or overlap, with train.compile, with roles.rollout.invariant, and with a critic that has its "
            "own layers on the ranks that train."
        ),
    )
    known_products: bool = Field(
        True,
        description=(
            "Whether an update takes the products of weights and activations from the passes that wrote its answers, "
            "instead of computing them again for the forward pass: a third of the products of learning. Loss and "
            "gradients are the same up to roundings. Models of less than 64 MiB multiply again in any case, and so do "
            "runs on several devices or GPUs, with answers from other processes, with several updates or passes per "
            "rollout phase, with staleness, adapters, train.compile, recomputation or roles.rollout.invariant, and "
            "models other than dense ones with plain attention. With packed float32 or bfloat16 weights, so do runs "
            "that no kernel for few rows serves: those that write more than 64 answers at a time (32 without AVX-512)."
        ),
    )
    most_unscored: float = Field(
        0.2,
        ge=0,
        le=1,
        description=(
            "Largest share of a rollout phase's answers that may be without a reward because computing it failed. "
            "If there are more, also in an evaluation, the run ends with an error."
        ),
    )
    start: SupervisedStart = Field(
        SupervisedStart(),
        description="Training on right answers at the beginning of the run, before rewards are used.",
    )
    loss: PolicyLoss = Field(
        PolicyLoss(),
        description=(
            "Settings that replace parts of the loss of rl.method. A setting that is left out has the value that "
            "the method gives it, which may differ from the default shown here."
        ),
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

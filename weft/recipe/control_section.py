"""The section ``[control]``: a small policy learns to act in environments, in place of a language model on texts."""

from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from weft.section import Section


class RewardTerm(Section):
    """Soft penalty for one component of the observation that is far from zero."""

    index: int = Field(
        0, ge=0, description="Component of the observation, counted from 0."
    )
    limit: PositiveFloat = Field(
        1.0,
        description="Absolute value of the component from which on the full 'penalty' applies.",
    )
    free: float = Field(
        0.0,
        ge=0,
        description=(
            "Absolute value of the component up to which there is no penalty; between 'free' and 'limit' the penalty "
            "grows linearly."
        ),
    )
    penalty: float = Field(
        0.5,
        ge=0,
        le=1,
        description=(
            "Size of the full penalty: with control.reward = 'product' the share of the "
            "reward that is lost, with 'sum' what is subtracted from the reward."
        ),
    )
    ends: bool = Field(
        False,
        description="End the episode, without a reward, as soon as the component's absolute value is above 'limit'.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.free >= self.limit:
            raise ValueError(
                f"free = {self.free:g} is not below limit = {self.limit:g}; lower free"
            )
        return self


class Control(Section):
    """Section on control: environments with Gymnasium's interface, and how a policy learns to act in them."""

    environment: str = Field(
        "CartPole-v1",
        description=(
            "Environment: an id that Gymnasium knows, or 'module:name' of a class or function "
            "of your own that returns one."
        ),
    )
    settings: dict[str, Any] = Field(
        {}, description="Keyword arguments for the environment."
    )
    time_limit: int = Field(
        0,
        ge=0,
        description="Steps after which an episode is truncated; 0: the environment's own limit.",
    )
    reward: Literal["own", "product", "sum"] = Field(
        "own",
        description=(
            "Reward to learn from: the environment's 'own'; its progress multiplied by soft "
            "penalties ('product', as in CaRL); or its progress minus the penalties ('sum')."
        ),
    )
    progress: int | None = Field(
        None,
        ge=0,
        description=(
            "For reward = 'product' and 'sum': index of the component of the observation that measures progress, by "
            "its growth beyond its best value in the episode. If not set: the environment's own reward."
        ),
    )
    terms: tuple[RewardTerm, ...] = Field(
        (), description="Soft penalties of reward = 'product' and 'sum'."
    )
    method: Literal["ppo", "dqn", "sac"] = Field(
        "ppo",
        description=(
            "How the policy learns: from its own newest steps ('ppo'), or from stored "
            "transitions, for choices ('dqn') or continuous actions ('sac')."
        ),
    )
    policy: Literal["auto", "categorical", "gaussian", "beta"] = Field(
        "auto",
        description=(
            "Distribution of actions with method = 'ppo'; 'auto': categorical for choices, "
            "beta for bounded actions, else gaussian."
        ),
    )
    hidden: tuple[PositiveInt, ...] = Field(
        (64, 64), description="Widths of the hidden layers of each network."
    )
    transitions: PositiveInt = Field(
        100_000,
        description="Steps of environments in the whole run, over all ranks together.",
    )
    environments: PositiveInt = Field(
        8,
        description=(
            "Environments that run side by side, over all ranks together. With 'dqn' and "
            "'sac' each is an asynchronous worker."
        ),
    )
    processes: int = Field(
        0,
        ge=0,
        description=(
            "Processes of each rank that hold its environments, with method = 'ppo'; 0: one "
            "for each core, or fewer if there are fewer environments."
        ),
    )
    step_seconds: PositiveFloat = Field(
        60.0,
        description=(
            "Seconds after which an environment that does not answer counts as hanging, and is "
            "started anew."
        ),
    )
    horizon: PositiveInt = Field(
        128,
        description="Steps of each environment between two updates of the policy, with method = 'ppo'.",
    )
    epochs: PositiveInt = Field(
        4,
        description="Number of passes of method = 'ppo' over the collected steps, before new steps are collected.",
    )
    minibatch: PositiveInt = Field(
        256, description="Transitions in each update, over all ranks together."
    )
    lr: PositiveFloat = Field(3e-4, description="Learning rate of Adam.")
    decay: bool = Field(
        False, description="Lower the learning rate linearly to 0 over the run."
    )
    gamma: float = Field(
        0.99, ge=0, le=1, description="Discount of a reward one step later."
    )
    trace: float = Field(
        0.95,
        ge=0,
        le=1,
        description=(
            "Lambda of generalised advantage estimation, the decay per step, with method = 'ppo'."
        ),
    )
    clip: PositiveFloat = Field(
        0.2,
        description="Clip range of 'ppo': how far an action's probability ratio may move from 1.",
    )
    entropy: float = Field(
        0.0, ge=0, description="Weight of the policy's entropy in the loss of 'ppo'."
    )
    value: float = Field(
        0.5, ge=0, description="Weight of the critic's loss in the loss of 'ppo'."
    )
    max_norm: PositiveFloat = Field(
        0.5,
        description="Norm to which gradients are clipped, with method = 'ppo' and 'dqn'.",
    )
    cutoff: float = Field(
        1.0,
        gt=0,
        le=1,
        description=(
            "Share of ranks that must have all their steps before the others stop collecting "
            "and learn from what they have; 1: every rank waits for every other."
        ),
    )
    replay: PositiveInt = Field(
        100_000, description="Transitions that are kept to learn from ('dqn', 'sac')."
    )
    warmup: PositiveInt = Field(
        1_000,
        description="Transitions by random actions before learning begins ('dqn', 'sac').",
    )
    ratio: float = Field(
        0.0,
        ge=0,
        description=(
            "Number of updates per transition ('dqn', 'sac'); workers or learner wait to keep it. 0: "
            "neither waits, and the resulting ratio is recorded."
        ),
    )
    lockstep: bool = Field(
        False,
        description=(
            "Let workers and learner ('dqn', 'sac') take turns: after one step of every environment, the "
            "learner makes one update per environment."
        ),
    )
    average: float = Field(
        0.005,
        gt=0,
        le=1,
        description="Share of the new weights in each update of the target networks ('dqn', 'sac').",
    )
    explore: float = Field(
        0.05,
        ge=0,
        le=1,
        description=(
            "Share of random actions with 'dqn' after the first tenth of the run, in which the share "
            "falls from 1."
        ),
    )
    every: PositiveInt = Field(
        1_000,
        description=(
            "Number of transitions in a step of the run ('dqn', 'sac'); metrics and checkpoints come at "
            "the end of steps."
        ),
    )
    episodes: PositiveInt = Field(
        100, description="Number of episodes in an evaluation of the policy."
    )
    evaluate: int = Field(
        0, ge=0, description="Steps of the run between evaluations; 0: only at the end."
    )

    @property
    def off_policy(self) -> bool:
        """Whether the method learns from stored transitions of older policies."""
        return self.method in ("dqn", "sac")

    @property
    def steps(self) -> int:
        """Number of steps of the run: a step collects transitions and learns from them."""
        size = self.every if self.off_policy else self.environments * self.horizon
        return -(-self.transitions // size)

    @model_validator(mode="after")
    def _together(self) -> Self:
        # whoever trains a language model need not read these rules
        from weft.recipe.control_rules import check_control

        check_control(self)
        return self

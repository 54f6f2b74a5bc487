"""The section ``[control]``: a small policy learns to act in environments, in place of a language model on texts."""

from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from weft.section import Section


class RewardTerm(Section):
    """Soft penalty on one component of the observation, which grows with the component's distance from zero."""

    index: int = Field(
        0,
        ge=0,
        description="Index, from 0, of the element of the observation that is penalised.",
    )
    limit: PositiveFloat = Field(
        1.0,
        description=(
            "Absolute value of the penalised element (see 'index') from which on the full 'penalty' applies."
        ),
    )
    free: float = Field(
        0.0,
        ge=0,
        description=(
            "Absolute value of the penalised element (see 'index') up to which there is no penalty. From there "
            "to 'limit' the penalty grows in a straight line."
        ),
    )
    penalty: float = Field(
        0.5,
        ge=0,
        le=1,
        description=(
            "Penalty if the absolute value of the penalised element (see 'index') is 'limit' or more; between 'free' "
            "and 'limit' a proportional part of it. With control.reward = 'product': the share of the reward that "
            "is lost (1: all of it); with 'sum': the number that is subtracted from the reward."
        ),
    )
    ends: bool = Field(
        False,
        description=(
            "Whether the episode ends without a reward as soon as the absolute value of the penalised element "
            "(see 'index') is above 'limit'."
        ),
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
            "Environment in which the policy learns to act: an id that Gymnasium knows, or 'module:name' of your "
            "own class or function that returns one."
        ),
    )
    settings: dict[str, Any] = Field(
        {},
        description=(
            "Keyword arguments with which the environment is created, such as { g = 9.8 } for 'Pendulum-v1'."
        ),
    )
    time_limit: int = Field(
        0,
        ge=0,
        description="Number of steps after which an episode is cut off. 0: the environment's own limit.",
    )
    reward: Literal["own", "product", "sum"] = Field(
        "own",
        description=(
            "Reward from which the policy learns. 'own': the environment's; 'product': progress (see 'progress') "
            "multiplied by soft penalties for the observations in 'terms', as in CaRL; 'sum': progress minus these "
            "penalties."
        ),
    )
    progress: int | None = Field(
        None,
        ge=0,
        description=(
            "For reward = 'product' and 'sum': index, from 0, of the element of the observation that measures "
            "progress. The progress of a step is its growth beyond its largest value in the episode so far. If not "
            "set: the environment's own reward is the progress."
        ),
    )
    terms: tuple[RewardTerm, ...] = Field(
        (),
        description=(
            "For reward = 'product' and 'sum': soft penalties, each for an element of the observation that is far "
            "from zero. Empty: no penalties."
        ),
    )
    method: Literal["ppo", "dqn", "sac"] = Field(
        "ppo",
        description=(
            "Learning method. 'ppo': learns from the newest steps of the policy alone; 'dqn': learns from stored "
            "steps, for environments with a few actions to choose from; 'sac': learns from stored steps, for "
            "actions that are continuous numbers."
        ),
    )
    policy: Literal["auto", "categorical", "gaussian", "beta"] = Field(
        "auto",
        description=(
            "For method = 'ppo': distribution from which actions are drawn. 'categorical': for a few actions to "
            "choose from; 'beta': for continuous actions within bounds; 'gaussian': for continuous actions without "
            "bounds. 'auto': the one that suits the environment."
        ),
    )
    hidden: tuple[PositiveInt, ...] = Field(
        (64, 64),
        description="Widths of the hidden layers of each network (policy and critic), one number for each layer.",
    )
    transitions: PositiveInt = Field(
        100_000,
        description=(
            "Number of environment steps in the whole run, over all ranks together. The run ends after them."
        ),
    )
    environments: PositiveInt = Field(
        8,
        description=(
            "Number of environments that run side by side, over all ranks together. With 'dqn' and 'sac' each is a "
            "process that does not wait for the others."
        ),
    )
    processes: int = Field(
        0,
        ge=0,
        description=(
            "For method = 'ppo': number of processes of each rank that compute its environments. 0: one for each "
            "CPU core, but no more than environments."
        ),
    )
    step_seconds: PositiveFloat = Field(
        60.0,
        description=(
            "Seconds after which an environment that does not answer is taken to hang, and is started again."
        ),
    )
    horizon: PositiveInt = Field(
        128,
        description=(
            "For method = 'ppo': number of steps that each environment takes between two updates of the policy."
        ),
    )
    epochs: PositiveInt = Field(
        4,
        description=(
            "For method = 'ppo': number of passes over the collected steps in an update, before new steps are "
            "collected."
        ),
    )
    minibatch: PositiveInt = Field(
        256,
        description="Number of environment steps from which each gradient is computed, over all ranks together.",
    )
    lr: PositiveFloat = Field(
        3e-4, description="Learning rate of Adam, which updates all networks."
    )
    decay: bool = Field(
        False,
        description=(
            "Whether the learning rate falls in a straight line to 0 over the run. If false, it stays the same."
        ),
    )
    gamma: float = Field(
        0.99,
        ge=0,
        le=1,
        description=(
            "Discount factor: a reward is multiplied by this number for each step that it comes later. 1: later "
            "rewards count in full."
        ),
    )
    trace: float = Field(
        0.95,
        ge=0,
        le=1,
        description=(
            "For method = 'ppo': decay per step (lambda) in generalised advantage estimation. 1: rewards up to the "
            "end of the episode count; 0: only the critic's prediction one step ahead counts."
        ),
    )
    clip: PositiveFloat = Field(
        0.2,
        description=(
            "For method = 'ppo': how far the ratio of an action's new to old probability may move from 1 before the "
            "loss no longer rewards it."
        ),
    )
    entropy: float = Field(
        0.0,
        ge=0,
        description=(
            "For method = 'ppo': weight of an entropy bonus in the loss, which keeps actions diverse. 0: no bonus."
        ),
    )
    value: float = Field(
        0.5,
        ge=0,
        description="For method = 'ppo': weight of the critic's loss beside that of the policy.",
    )
    max_norm: PositiveFloat = Field(
        0.5,
        description=(
            "For method = 'ppo' and 'dqn': largest norm of the gradient, taken as one vector. A larger gradient "
            "is scaled down to it."
        ),
    )
    cutoff: float = Field(
        1.0,
        gt=0,
        le=1,
        description=(
            "For method = 'ppo' on several ranks: share of the ranks that must have collected all their steps "
            "before the others stop collecting and learn from the steps that they have. 1: every rank collects all "
            "its steps."
        ),
    )
    replay: PositiveInt = Field(
        100_000,
        description=(
            "For method = 'dqn' and 'sac': number of latest environment steps that are stored to learn from."
        ),
    )
    warmup: PositiveInt = Field(
        1_000,
        description=(
            "For method = 'dqn' and 'sac': number of environment steps with random actions before learning begins."
        ),
    )
    ratio: float = Field(
        0.0,
        ge=0,
        description=(
            "For method = 'dqn' and 'sac': number of updates for each environment step. To keep this ratio, "
            "environments wait for the learner or the learner for environments. 0: nobody waits, and the ratio that "
            "results is recorded."
        ),
    )
    lockstep: bool = Field(
        False,
        description=(
            "For method = 'dqn' and 'sac': whether environments and learner take turns, so that a run can be "
            "repeated exactly: one step of every environment, then as many updates as there are environments. If "
            "false, they work at the same time."
        ),
    )
    average: float = Field(
        0.005,
        gt=0,
        le=1,
        description=(
            "For method = 'dqn' and 'sac': share of the newest weights that is mixed into the target networks in "
            "each update. 1: target networks are copies of the newest ones."
        ),
    )
    explore: float = Field(
        0.05,
        ge=0,
        le=1,
        description=(
            "For method = 'dqn': share of actions that are random. It falls from 1 to this number in the first "
            "tenth of the run."
        ),
    )
    every: PositiveInt = Field(
        1_000,
        description=(
            "For method = 'dqn' and 'sac': number of environment steps that count as one step of the run. Metrics, "
            "checkpoints and evaluations come at the end of such steps."
        ),
    )
    episodes: PositiveInt = Field(
        100,
        description="Number of episodes in which an evaluation measures the policy.",
    )
    evaluate: int = Field(
        0,
        ge=0,
        description=(
            "Number of steps of the run between two evaluations of the policy. 0: only one at the end of the run."
        ),
    )

    @property
    def off_policy(self) -> bool:
        """Whether the method learns from stored transitions of older policies."""
        return self.method in ("dqn", "sac")

    @property
    def steps(self) -> int:
        """Number of steps of the run. In a step the policy collects transitions and learns from them."""
        size = self.every if self.off_policy else self.environments * self.horizon
        return -(-self.transitions // size)

    @model_validator(mode="after")
    def _together(self) -> Self:
        # whoever trains a language model need not read these rules
        from weft.recipe.control_rules import check_control

        check_control(self)
        return self

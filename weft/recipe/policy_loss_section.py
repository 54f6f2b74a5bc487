"""The section ``[rl.loss]``: what a policy is trained by, part by part; a method's name gives values to all parts."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from weft.errors import UsageError
from weft.registry import find
from weft.section import Section


class SamplerCorrection(Section):
    """Settings that correct for tokens whose probability differs between the sampler and the trainer.

    The weight of a token is its probability under the trainer, before the update, divided by that under the sampler.
    """

    weight: Literal["none", "token", "sequence"] = Field(
        "none",
        description=(
            "Which probabilities, in training and in generation, are compared to give the weight of a token's loss. "
            "'token': those of the token; 'sequence': the products over all tokens of its answer; 'none': no "
            "correction, all weights are 1."
        ),
    )
    low: NonNegativeFloat | None = Field(
        None,
        description=(
            "Smallest allowed weight of a token's loss; 'action' says what happens to smaller weights. If not set: "
            "no limit."
        ),
    )
    high: PositiveFloat | None = Field(
        None,
        description=(
            "Largest allowed weight of a token's loss; 'action' says what happens to larger weights. If not set: no "
            "limit."
        ),
    )
    action: Literal["clip", "zero"] = Field(
        "clip",
        description=(
            "What happens to a weight beyond 'low' or 'high'. 'clip': it becomes the limit; 'zero': it becomes 0, "
            "so that nothing is learned from the token or answer."
        ),
    )

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        """Refuse limits that nothing is compared with, or that no weight is between."""
        if self.limits and self.weight == "none":
            raise ValueError("low and high limit a weight; set weight = 'token'")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low = {self.low:g} is above high = {self.high:g}")
        return self

    @property
    def limits(self) -> bool:
        """Whether ``low`` or ``high`` is set, so that the weights of tokens are limited."""
        return self.low is not None or self.high is not None


class PolicyLoss(Section):
    """The loss of a policy in reinforcement learning (docs/explanations/policy-losses.md).

    ``rl.method`` gives values to all settings; settings in ``[rl.loss]`` replace single ones.
    """

    normaliser: Literal["tokens", "constant", "sequence"] = Field(
        "tokens",
        description=(
            "What the sum of the tokens' losses in a step is divided by. 'tokens': the number of all written "
            "tokens; 'constant': the number of answers times the setting 'constant'; 'sequence': first each token's "
            "loss by the length of its answer, then the sum by the number of answers."
        ),
    )
    constant: PositiveFloat | None = Field(
        None,
        description=(
            "For normaliser = 'constant': the sum of the tokens' losses is divided by this number times the number "
            "of answers. If not set: rl.tokens."
        ),
    )
    ratio: Literal["token", "sequence", "product"] = Field(
        "token",
        description=(
            "Which ratio multiplies the advantage: the probability under the weights now, divided by that under the "
            "weights that wrote the answer. 'token': the ratio of each token; 'sequence': the geometric mean over "
            "the tokens of an answer (GSPO); 'product': the product over the tokens of an answer (RLOO)."
        ),
    )
    form: Literal["clip", "cispo", "sapo", "vespo"] = Field(
        "clip",
        description=(
            "How the loss depends on the ratio of new to old probability, to limit an update. 'clip': PPO's "
            "minimum of clipped and unclipped terms; 'cispo': the clipped ratio is a weight without a gradient; "
            "'sapo': a sigmoid of the ratio instead of a limit; 'vespo': a weight without a gradient, which is "
            "small where the product of an answer's ratios is far from 1."
        ),
    )
    clip_low: NonNegativeFloat = Field(
        0.2,
        description=(
            "For form = 'clip' and 'cispo': the ratio of new to old probability is clipped to at least 1 - "
            "clip_low. 1: no lower limit."
        ),
    )
    clip_high: NonNegativeFloat = Field(
        0.2,
        description=(
            "For form = 'clip' and 'cispo': the ratio of new to old probability is clipped to at most 1 + "
            "clip_high."
        ),
    )
    dual_clip: PositiveFloat | None = Field(
        None,
        description=(
            "For form = 'clip': a further limit on the ratio of new to old probability for tokens with a negative "
            "advantage, such as 4 (dual-clip PPO). Choose it above 1 + clip_high. If not set: no such limit."
        ),
    )
    sapo_positive: PositiveFloat = Field(
        1.0,
        description=(
            "For form = 'sapo': steepness of the sigmoid for tokens with a positive advantage. A steeper sigmoid "
            "limits changes of a token's probability more."
        ),
    )
    sapo_negative: PositiveFloat = Field(
        1.05,
        description=(
            "For form = 'sapo': steepness of the sigmoid for tokens with a negative advantage. A steeper sigmoid "
            "limits changes of a token's probability more."
        ),
    )
    vespo_positive: tuple[PositiveFloat, PositiveFloat] = Field(
        (2.0, 3.0),
        description=(
            "For form = 'vespo': two numbers k and c of the weight W^k x exp(c x (1 - W)) of an answer whose "
            "advantage is at least 0. W is the product of its tokens' ratios of new to old probability."
        ),
    )
    vespo_negative: tuple[PositiveFloat, PositiveFloat] = Field(
        (3.0, 2.0),
        description=(
            "For form = 'vespo': two numbers k and c of the weight W^k x exp(c x (1 - W)) of an answer with a "
            "negative advantage. W is the product of its tokens' ratios of new to old probability."
        ),
    )
    off_policy: PositiveFloat | None = Field(
        None,
        description=(
            "Largest tolerated drop of an answer's mean log-probability per token, from the weights that wrote it "
            "to the model now. An answer with a negative advantage and a larger drop is left out of the loss "
            "(DeepSeek-V3.2). If not set: none is left out."
        ),
    )
    kl: Literal["none", "k1", "k2", "k3"] = Field(
        "none",
        description=(
            "Penalty for moving away from the reference model: how the divergence of a token is estimated. With d = "
            "log-probability under the model minus that under the reference model: d ('k1'), d * d / 2 ('k2') or "
            "exp(-d) - 1 + d ('k3'). 'none': no penalty, and no reference model is needed."
        ),
    )
    kl_weight: NonNegativeFloat = Field(
        0.0,
        description="Weight of the divergence from the reference model (see 'kl'). 0: no penalty.",
    )
    kl_ratio: bool = Field(
        False,
        description=(
            "Whether the divergence from the reference model (see 'kl') is multiplied by the ratio of new to "
            "old probability, as in DeepSeek-V3.2."
        ),
    )
    kl_in: Literal["loss", "reward"] = Field(
        "loss",
        description=(
            "Where the divergence from the reference model is used. 'loss': it is added to the loss; 'reward': it "
            "is subtracted from the rewards before advantages are computed."
        ),
    )
    advantage: Literal["group", "batch", "none", "leave-one-out", "returns", "gae"] = (
        Field(
            "group",
            description=(
                "How much better an answer was than expected (its advantage). Reward minus the mean reward of the "
                "answers to the same question, divided by their standard deviation ('group'), by that of all "
                "answers in the step ('batch') or by nothing ('none'); reward minus the mean of the other answers "
                "to the question ('leave-one-out'); sum of the discounted rewards from each token on ('returns'); "
                "generalised advantage estimation with a critic ('gae')."
            ),
        )
    )
    whiten: bool = Field(
        False,
        description=(
            "Whether advantages are shifted and scaled to mean 0 and standard deviation 1 over the whole step."
        ),
    )
    discount: float = Field(
        1.0,
        gt=0,
        le=1,
        description=(
            "For advantage = 'returns' and 'gae': factor (gamma) by which a reward is multiplied for each token "
            "that it comes later. 1: no discount."
        ),
    )
    trace: float = Field(
        0.95,
        ge=0,
        le=1,
        description=(
            "For advantage = 'gae': factor per token (lambda) by which the critic's prediction errors at later "
            "tokens count less in the advantage of a token. 1: all count in full; 0: only the error at the token "
            "itself counts."
        ),
    )
    rewards: Literal["sum_then_normalize", "normalize_then_sum"] = Field(
        "sum_then_normalize",
        description=(
            "How several rewards of an answer become one advantage. 'sum_then_normalize': rewards are summed, and "
            "advantages are computed from the sums; 'normalize_then_sum': each reward is standardised among the "
            "answers to a question, then they are summed, and the sums are standardised over the step."
        ),
    )
    entropy: float = Field(
        0.0,
        description=(
            "Weight of an entropy bonus: the entropy of the tokens' distributions times this number is subtracted "
            "from the loss, so that answers stay diverse. 0: no bonus."
        ),
    )
    value_weight: NonNegativeFloat = Field(
        0.1,
        description="For advantage = 'gae': weight of the critic's loss beside that of the policy.",
    )
    value_clip: PositiveFloat | None = Field(
        0.2,
        description=(
            "For advantage = 'gae': how far the critic's prediction at a token may move from its value when the "
            "answer was written, before the critic's loss no longer rewards the move (PPO's clipping of values)."
        ),
    )
    correction: SamplerCorrection = Field(
        SamplerCorrection(),
        description=(
            "Correction for the fact that the program that generates answers computes slightly other probabilities "
            "than training does. Losses are weighted by the probability in training divided by that in generation."
        ),
    )

    @property
    def needs_reference(self) -> bool:
        """Whether the loss needs log-probabilities under a reference model, because ``kl`` and ``kl_weight`` are
        set.
        """
        return self.kl != "none" and self.kl_weight > 0

    @property
    def needs_values(self) -> bool:
        """Whether the loss needs a critic's values, because ``advantage`` is "gae"."""
        return self.advantage == "gae"


def policy_loss(method: str, changes: Mapping[str, Any] = {}) -> PolicyLoss:
    """Return the settings of the policy loss for ``method``, a value of ``rl.method``.

    ``changes``: settings that replace those of the method, as ``[rl.loss]`` has them. Raises :class:`UsageError` for an
    unknown method or setting.
    """
    values: dict[str, Any] = find("policy-loss", method).implementation()
    loss = PolicyLoss(**values | dict(changes))
    if loss.kl == "none" and changes.get("kl_weight"):
        raise UsageError(
            f"rl.loss.kl_weight = {changes['kl_weight']:g} weighs a divergence, and rl.method = {method!r} has none; "
            "set rl.loss.kl = 'k3'"
        )
    return loss

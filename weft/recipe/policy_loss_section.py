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
            "What is compared: 'token': the probabilities of each token; 'sequence': the "
            "products of the probabilities of all tokens of an answer; 'none': nothing, every"
            " token has weight 1."
        ),
    )
    low: NonNegativeFloat | None = Field(
        None, description="Smallest weight of a token. If not set: no limit."
    )
    high: PositiveFloat | None = Field(
        None, description="Largest weight of a token. If not set: no limit."
    )
    action: Literal["clip", "zero"] = Field(
        "clip",
        description=(
            "What happens to a weight outside low and high: 'clip': it becomes the limit; "
            "'zero': it becomes 0, so that nothing is learned of the token or answer."
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
        """Whether ``low`` or ``high`` limits the weights of tokens."""
        return self.low is not None or self.high is not None


class PolicyLoss(Section):
    """The loss of a policy in reinforcement learning (docs/explanations/policy-losses.md).

    ``rl.method`` gives values to all settings; settings in ``[rl.loss]`` replace single ones.
    """

    normaliser: Literal["tokens", "constant", "sequence"] = Field(
        "tokens",
        description=(
            "What the sum of the tokens' losses is divided by: 'tokens': number of all "
            "written tokens of the step; 'constant': number of answers times `constant`; "
            "'sequence': each token's loss is divided by the length of its answer, and the "
            "sum by the number of answers."
        ),
    )
    constant: PositiveFloat | None = Field(
        None,
        description=(
            "With normaliser = 'constant': number of tokens for each answer by which the loss is divided. If not "
            "set: rl.tokens, the largest number of tokens in an answer."
        ),
    )
    ratio: Literal["token", "sequence", "product"] = Field(
        "token",
        description=(
            "Ratio of new to old probability by which an advantage is multiplied: 'token': of"
            " each token; 'sequence': geometric mean of the ratios of an answer's tokens "
            "(GSPO); 'product': product of the ratios of an answer's tokens (RLOO)."
        ),
    )
    form: Literal["clip", "cispo", "sapo", "vespo"] = Field(
        "clip",
        description=(
            "How the ratio limits the update: 'clip': PPO's minimum of clipped and unclipped;"
            " 'cispo': the clipped ratio is a weight without a gradient; 'sapo': a sigmoid in"
            " place of a limit; 'vespo': a weight without a gradient that falls where the product"
            " of an answer's ratios is far from 1."
        ),
    )
    clip_low: NonNegativeFloat = Field(
        0.2, description="The ratio is limited to at least 1 - clip_low; 1: no limit."
    )
    clip_high: NonNegativeFloat = Field(
        0.2, description="The ratio is limited to at most 1 + clip_high."
    )
    dual_clip: PositiveFloat | None = Field(
        None,
        description=(
            "Largest ratio that counts where the advantage is negative, such as 4; it must be above the clipped "
            "range. If not set: no limit."
        ),
    )
    sapo_positive: PositiveFloat = Field(
        1.0, description="Steepness of form = 'sapo' where the advantage is positive."
    )
    sapo_negative: PositiveFloat = Field(
        1.05, description="Steepness of form = 'sapo' where the advantage is negative."
    )
    vespo_positive: tuple[PositiveFloat, PositiveFloat] = Field(
        (2.0, 3.0),
        description=(
            "Two numbers k and c for form = 'vespo' where the advantage is not negative: an answer with importance "
            "ratio W is weighted by W^k x exp(c x (1 - W))."
        ),
    )
    vespo_negative: tuple[PositiveFloat, PositiveFloat] = Field(
        (3.0, 2.0),
        description=(
            "Two numbers k and c for form = 'vespo' where the advantage is negative: an answer with importance ratio W "
            "is weighted by W^k x exp(c x (1 - W))."
        ),
    )
    off_policy: PositiveFloat | None = Field(
        None,
        description=(
            "Limit on how far the sampler and the model may differ on an answer with a negative advantage. The "
            "answer does not count in the loss if its mean log-probability per token under the sampler exceeds the "
            "mean under the model by more than this number. If not set: all answers count."
        ),
    )
    kl: Literal["none", "k1", "k2", "k3"] = Field(
        "none",
        description=(
            "Estimate of the divergence from the reference model. With d = log-probability "
            "under the model minus that under the reference model it is d ('k1'), d * d / 2 "
            "('k2') or exp(-d) - 1 + d ('k3'); 'none': no reference model is needed."
        ),
    )
    kl_weight: NonNegativeFloat = Field(
        0.0, description="Weight of the divergence from the reference model."
    )
    kl_ratio: bool = Field(
        False,
        description="Whether the divergence in the loss is multiplied by the ratio, as DeepSeek-V3.2 does.",
    )
    kl_in: Literal["loss", "reward"] = Field(
        "loss",
        description=(
            "Where the divergence counts. 'loss': it is added to the loss; 'reward': it is subtracted from the "
            "rewards before advantages are computed."
        ),
    )
    advantage: Literal["group", "batch", "none", "leave-one-out", "returns", "gae"] = (
        Field(
            "group",
            description=(
                "Advantage of an answer: reward minus the mean of its group, divided by the "
                "standard deviation of the group ('group') or of all rewards of the step "
                "('batch') or by nothing ('none'); reward minus the mean of the others of its "
                "group ('leave-one-out'); sum of the discounted rewards from a token on "
                "('returns'); generalised advantage estimation with a critic ('gae')."
            ),
        )
    )
    whiten: bool = Field(
        False,
        description="Whether advantages get mean 0 and standard deviation 1 over all answers of the step.",
    )
    discount: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Discount per token of 'returns' and 'gae' (gamma).",
    )
    trace: float = Field(
        0.95, ge=0, le=1, description="Decay of 'gae' per token (lambda)."
    )
    rewards: Literal["sum_then_normalize", "normalize_then_sum"] = Field(
        "sum_then_normalize",
        description=(
            "How several rewards of an answer give its advantage. 'sum_then_normalize': they are summed before "
            "advantages are computed; 'normalize_then_sum': each is first standardised within its group, and the "
            "sums are standardised over the step."
        ),
    )
    entropy: float = Field(
        0.0,
        description="Weight of the tokens' entropy, which is subtracted from the loss so that answers stay diverse.",
    )
    value_weight: NonNegativeFloat = Field(
        0.1, description="Weight of the critic's loss in 'gae'."
    )
    value_clip: PositiveFloat | None = Field(
        0.2,
        description="Clip range of the critic: how far a value may move from its value at sampling.",
    )
    correction: SamplerCorrection = Field(
        SamplerCorrection(),
        description="Correction for tokens whose probability differs between the sampler and the trainer.",
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
    """Build the settings of the policy loss that ``rl.method`` names.

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

"""Policy losses: of every token of sampled answers, from its log-probability and what is known of the answer.

A loss is a sum over tokens. The tokens of an answer may be spread over ranks that share a row, and what depends on all
tokens of an answer is summed over these ranks. So the loss does not depend on microbatches, ranks, packing or layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from weft.data.batch import IGNORE, Batch
from weft.data.batch_rollout import RolloutTokens
from weft.layout.boundary import BY_DATA, I, V, declare, share_of_sum, step_sum, untyped
from weft.layout.mesh import Mesh
from weft.models.token_objective import TokenObjective, Weighed
from weft.recipe import PolicyLoss

T = torch.Tensor

#: Sums over the tokens of a step, by name.
SUMS = (
    "tokens", "entropy", "kl", "ratio", "clipped_low", "clipped_high", "corrected", "correction", "mismatch",
    "value", "value_loss", "value_clipped",
)  # fmt: skip
#: Largest logarithm of a ratio that is computed.
MOST = 60.0
#: How many of these belong to a critic, the last ones.
OF_CRITIC = 3
#: Maxima over the tokens of a step, by name.
MAXIMA = ("ratio", "mismatch")


@dataclass
class PolicyFigures:
    """Sums and maxima over the tokens of a step, which training reports to the user. ``sums``: float64 ``[len(SUMS)]``;
    ``maxima``: float64 ``[len(MAXIMA)]``. Each rank adds those of its own passes. ``seconds``: time of the steps of a
    critic with layers of its own on this rank.
    """

    sums: T = field(default_factory=lambda: torch.zeros(len(SUMS), dtype=torch.float64))
    maxima: T = field(
        default_factory=lambda: torch.zeros(len(MAXIMA), dtype=torch.float64)
    )
    seconds: float = 0.0

    def add(self, sums: T, maxima: T) -> None:
        """Add the figures of a policy in one pass, for the step's means and maxima. ``sums``: sums over the pass's
        tokens in the order of :data:`SUMS`, without its last entries, which belong to a critic. ``maxima``: maxima over
        these tokens in the order of :data:`MAXIMA`.
        """
        self.sums = self.sums.to(sums.device)
        self.sums[:-OF_CRITIC] += sums
        self.maxima = torch.maximum(self.maxima.to(maxima.device), maxima)

    def add_values(self, sums: T) -> None:
        """Add the figures of a critic in one pass, for the step's means. ``sums``: sums over the pass's tokens for the
        last entries of :data:`SUMS`, which belong to a critic, in their order.
        """
        self.sums = self.sums.to(sums.device)
        self.sums[-OF_CRITIC:] += sums

    def take_values(self, other: PolicyFigures) -> None:
        """Move the figures of a critic from ``other`` to these, for a critic that computes apart from the policy."""
        self.add_values(other.sums[-OF_CRITIC:])
        other.sums = torch.zeros_like(other.sums)
        self.seconds, other.seconds = self.seconds + other.seconds, 0.0

    def take_value_sums(self, mesh: Mesh) -> T:
        """Return the sums of a critic's figures over all ranks since the last call, for the last entries of
        :data:`SUMS`. All ranks must call it.
        """
        own = self.sums[-OF_CRITIC:].to(mesh.device)
        self.sums = torch.zeros_like(self.sums)
        return step_sum(share_of_sum(own, mesh, **BY_DATA | {"pp": V}), mesh)

    def take(self, mesh: Mesh) -> dict[str, float]:
        """Return the figures of all ranks since the last call, as means and shares per token, by name. All ranks must
        call it.

        ``policy.tokens``: number of tokens. ``policy.entropy``: mean entropy. ``policy.kl``: mean divergence from the
        reference model. ``policy.ratio``: mean ratio. ``policy.clipped_low`` and ``policy.clipped_high``: shares of
        tokens whose ratio was limited. ``policy.corrected``: share of tokens that the correction of the sampler
        touched. ``policy.correction``: mean weight of that correction. ``policy.mismatch``: mean absolute difference of
        log-probabilities between trainer and sampler. ``policy.value``, ``policy.value_loss`` and
        ``policy.value_clipped``: a critic's mean prediction, its mean loss, and the share of values that moved further
        than allowed. ``policy.ratio_max`` and ``policy.mismatch_max``: maxima.
        """
        sums, maxima = self.sums.to(mesh.device), self.maxima.to(mesh.device)
        sums = step_sum(share_of_sum(sums, mesh, **BY_DATA | {"pp": V}), mesh)
        if mesh.layout.world > 1:
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group=mesh.step_group)
        self.sums, self.maxima = torch.zeros_like(sums), torch.zeros_like(maxima)
        totals = dict(zip(SUMS, sums.tolist(), strict=True))
        tokens = totals.pop("tokens")
        means = {
            f"policy.{name}": total / max(1.0, tokens) for name, total in totals.items()
        }
        most = {
            f"policy.{name}_max": value
            for name, value in zip(MAXIMA, maxima.tolist(), strict=True)
        }
        return {"policy.tokens": tokens, **means, **most}


def clipped_value_losses(values: T, old: T, returns: T, most: float | None) -> T:
    """Return half the squared error of a critic at each token, ``[tokens]`` (Schulman et al. 2017, PPO). ``values``:
    the critic's predictions; ``old``: its predictions when the answers were sampled; ``returns``: the values that
    the critic should have predicted; all ``[tokens]``. ``most``: how far a value may move from ``old`` before its
    loss no longer falls; None: any distance.
    """
    errors = (values - returns).square()
    if most is not None:
        limited = torch.maximum(torch.minimum(values, old + most), old - most)
        errors = torch.maximum(errors, (limited - returns).square())
    return errors / 2


class TokenLosses(NamedTuple):
    """Losses of tokens, and figures about them. ``losses``: ``[tokens]``. ``sums``, ``maxima``: the pass's
    contributions to :class:`PolicyFigures`.
    """

    losses: T
    sums: T
    maxima: T


class AnswerTokens(NamedTuple):
    """Tokens of sampled answers on this rank. ``learned``: which tokens have a label, bool ``[tokens]``. ``segment``:
    index of each token's answer among all documents of the batch, ``[tokens]``. ``documents``: number of these
    documents, with one more for padding. ``numbers``: numbers about each token that the loss reads, such as advantages,
    ``[tokens]`` each. ``mesh``: the layout over ranks; the ranks along ``cp`` share the tokens of an answer.
    """

    learned: T
    segment: T
    documents: int
    numbers: RolloutTokens
    mesh: Mesh

    def totals(self, x: T) -> T:
        """Sum ``x``, ``[tokens]``, over the learned tokens of each token's answer, on all ranks. Returns ``[tokens]``.

        The result can be differentiated.
        """
        sums = x.new_zeros(self.documents)
        sums = sums.index_add(0, self.segment, torch.where(self.learned, x, 0))
        if self.mesh.size("cp") > 1:
            sums = _SumOverRanks.apply(sums, self.mesh.group("cp"))
        return sums[self.segment]

    def means(self, x: T) -> T:
        """Return the mean of ``x`` over the learned tokens of each token's answer, ``[tokens]``. The result can be
        differentiated.
        """
        counts = self.totals(torch.ones_like(x)).clamp(min=1)
        return self.totals(x) / counts


class _SumOverRanks(torch.autograd.Function):
    """Sum of a tensor over the ranks of a group, each of which has a loss of its own that depends on the sum."""

    @staticmethod
    def forward(ctx: Any, x: T, group: dist.ProcessGroup) -> T:
        ctx.group, total = group, x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: T) -> tuple[T, None]:
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def answer_tokens(batch: Batch, mesh: Mesh) -> AnswerTokens:
    """Return the labels, answers and other numbers of the tokens of ``batch`` that this rank of ``mesh`` holds, as
    policy losses need them.
    """
    assert batch.rollout is not None and batch.documents is not None
    documents = batch.cu_seqlens.shape[-1]
    return AnswerTokens(
        batch.labels.flatten() != IGNORE,
        batch.documents.flatten() % documents,
        documents,
        batch.rollout.each(lambda x: x.flatten()),
        mesh,
    )


@dataclass
class PolicyObjective(TokenObjective):
    """Policy loss with the settings ``settings``, and figures of the passes since they were last taken.

    ``temperature``: number by which logits are divided before the softmax, as in sampling.
    """

    settings: PolicyLoss
    temperature: float = 1.0
    figures: PolicyFigures = field(default_factory=PolicyFigures)

    @property
    def has_entropy(self) -> bool:
        return self.settings.entropy != 0

    @property
    def has_values(self) -> bool:
        return self.settings.needs_values

    def weigh(self, nll: T, entropy: T, batch: Batch, mesh: Mesh) -> Weighed:
        """Return this rank's share of the policy loss of ``batch`` and its derivatives, and add the pass to the
        figures. ``nll``: negative log-probabilities of the labels of this rank's tokens, ``[tokens]``; ``entropy``:
        entropies of the tokens' distributions, ``[tokens]``.
        """
        with untyped():
            tokens = answer_tokens(batch, mesh)
            scale, entropy = tokens.numbers.scale, entropy.double()
            with torch.enable_grad():
                logp = (-nll.detach().double()).requires_grad_()
                each = self.token_losses(logp, entropy, tokens)
                loss = (torch.where(tokens.learned, each.losses, 0) * scale).sum()
                (slopes,) = torch.autograd.grad(loss, logp)
            self.figures.add(each.sums, each.maxima)
            loss, slopes = loss.detach(), -slopes
            entropies = None
            if self.settings.entropy:
                entropies = -self.settings.entropy * scale
                summed = torch.where(tokens.learned, entropy, 0) * entropies
                loss = loss + summed.sum()
        return Weighed(
            declare(loss, mesh, **BY_DATA | {"tp": I}),
            declare(slopes, mesh, **BY_DATA),
            None if entropies is None else declare(entropies, mesh, **BY_DATA),
        )

    def weigh_values(self, values: T, batch: Batch, mesh: Mesh) -> Weighed:
        """Return this rank's share of the critic's loss on ``batch`` and its derivative by each value, and add the pass
        to the figures. ``values``: the critic's prediction at each token of this rank, ``[tokens]``.
        """
        with untyped():
            tokens, settings = answer_tokens(batch, mesh), self.settings
            numbers = tokens.numbers
            with torch.enable_grad():
                values = values.detach().double().requires_grad_()
                losses = clipped_value_losses(
                    values, numbers.values, numbers.returns, settings.value_clip
                )
                losses = torch.where(tokens.learned, losses, 0)
                loss = settings.value_weight * (losses * numbers.scale).sum()
                (slopes,) = torch.autograd.grad(loss, values)
            moved = (values - numbers.values).abs()
            cut = moved > (settings.value_clip or torch.inf)
            kept = [
                torch.where(tokens.learned, x.detach().double(), 0).sum()
                for x in (values, losses, cut)
            ]
            self.figures.add_values(torch.stack(kept))
            loss = loss.detach()
        return Weighed(
            declare(loss, mesh, **BY_DATA | {"tp": I}), declare(slopes, mesh, **BY_DATA)
        )

    def token_losses(self, logp: T, entropy: T, tokens: AnswerTokens) -> TokenLosses:
        """Return the losses of all tokens of this rank, as a function of ``logp`` that can be differentiated.

        ``logp``: log-probabilities of the labels, float64 ``[tokens]``; ``entropy``: entropies of the tokens'
        distributions, float64 ``[tokens]``. The loss of a token without a label has no meaning.
        """
        settings, numbers = self.settings, tokens.numbers
        advantage = numbers.advantage
        old = torch.where(numbers.old.isnan(), logp.detach(), numbers.old)
        ratio = ratios(logp - old, tokens, settings.ratio)
        low, high = 1 - settings.clip_low, 1 + settings.clip_high
        limited = ratio.clamp(low, high)
        weight, touched = self.corrections(old, tokens)
        if settings.form == "cispo":
            losses = -limited.detach() * advantage * logp
        elif settings.form == "sapo":
            steepness = torch.where(
                advantage > 0, settings.sapo_positive, settings.sapo_negative
            )
            soft = torch.sigmoid(steepness * (ratio - 1)) * 4 / steepness
            losses = -soft * advantage
        elif settings.form == "vespo":
            kernel = self.sequence_kernel(logp.detach() - old, weight, tokens)
            losses = -kernel * advantage * logp
        else:
            losses = -torch.minimum(ratio * advantage, limited * advantage)
            if settings.dual_clip is not None:
                least = ratio.clamp(max=settings.dual_clip)
                losses = -torch.minimum(least * advantage, limited * advantage)
        if settings.off_policy is not None:
            losses = losses * on_policy(logp, old, tokens, settings.off_policy)
        if settings.form != "vespo":  # whose kernel has the weight in it
            losses = losses * weight
        kl = torch.zeros_like(logp)
        if settings.needs_reference:
            kl = divergence(logp, numbers.reference, settings.kl)
            kl = kl * ratio if settings.kl_ratio else kl
            if settings.kl_in == "loss":
                losses = losses + settings.kl_weight * kl
        mismatch = torch.where(
            numbers.sampler.isnan(), 0, (old - numbers.sampler).abs()
        )
        clipped_low = (ratio < low) & (advantage < 0)
        clipped_high = (ratio > high) & (advantage > 0)
        columns = (
            torch.ones_like(logp), entropy, kl, ratio, clipped_low, clipped_high, touched, weight, mismatch,
        )  # fmt: skip
        kept = [torch.where(tokens.learned, x.detach().double(), 0) for x in columns]
        sums = torch.stack([x.sum() for x in kept])
        maxima = torch.stack([ratio, mismatch]).detach()
        maxima = torch.where(tokens.learned, maxima, 0)
        most = maxima.amax(1) if len(logp) else maxima.sum(1)
        return TokenLosses(losses, sums, most)

    def sequence_kernel(self, gap: T, weight: T, tokens: AnswerTokens) -> T:
        """Return the weight of each token's answer, ``[tokens]`` (Shen et al. 2026, 2602.10693, VESPO).

        With ``W`` the product of the answer's probability ratios, the weight is ``W^k exp(l - l W)``, which is 1 for
        ``W = 1``. ``k`` and ``l`` are ``vespo_positive`` or ``vespo_negative``, by the sign of the advantage.
        Logarithms are clamped as in TRL. ``gap``: new minus old log-probability, ``[tokens]``. ``weight``: weights that
        correct for the sampler's probabilities, ``[tokens]``; ``W`` is multiplied by them.
        """
        least, most = math.log(1e-8), 20.0
        log_w = tokens.totals(gap.clamp(-most, most))
        correction = weight.log().clamp(least, most)
        if self.settings.correction.weight == "token":
            correction = tokens.totals(correction)
        if self.settings.correction.weight != "none":
            log_w = log_w + correction
        log_w = log_w.clamp(least, most)
        positive = tokens.numbers.advantage >= 0
        (power, decay), (other_power, other_decay) = (
            self.settings.vespo_positive,
            self.settings.vespo_negative,
        )
        k = torch.where(positive, power, other_power)
        decays = torch.where(positive, decay, other_decay)
        return (decays + k * log_w - decays * log_w.exp()).exp()

    def corrections(self, old: T, tokens: AnswerTokens) -> tuple[T, T]:
        """Return two tensors ``[tokens]``: weights that correct for the difference between the sampler's and the
        trainer's probabilities, and whether a weight was outside its limits. Without a correction all weights are 1.

        ``old``: log-probabilities under the trainer before the update, ``[tokens]``.
        """
        settings = self.settings.correction
        gap = torch.nan_to_num(old - tokens.numbers.sampler, nan=0.0)
        if settings.weight == "none":
            return torch.ones_like(old), torch.zeros_like(old)
        if settings.weight == "sequence":
            gap = tokens.totals(gap)
        weight = finite_exp(gap)
        limited = (
            weight.clamp(settings.low, settings.high) if settings.limits else weight
        )
        outside = limited != weight
        if settings.action == "zero":
            limited = torch.where(outside, 0, limited)
        return limited, outside


def finite_exp(x: T) -> T:
    """Return ``exp(x)``, at most ``exp(MOST)``, so that neither it nor its gradient overflows in float32."""
    return x.clamp(max=MOST).exp()


def ratios(gap: T, tokens: AnswerTokens, kind: str) -> T:
    """Return the ratio of new to old probability at each token, ``[tokens]``.

    ``gap``: new minus old log-probability, ``[tokens]``. ``kind``: "token", "sequence" (the geometric mean over the
    answer's tokens; Zheng et al. 2025, GSPO) or "product" (over the answer's tokens).
    """
    if kind == "sequence":
        return finite_exp(tokens.means(gap))
    if kind == "product":
        return finite_exp(tokens.totals(gap))
    return finite_exp(gap)


def divergence(logp: T, reference: T, kind: str) -> T:
    """Return an estimate of the divergence of the policy from the reference model at each token, ``[tokens]``.

    ``logp`` and ``reference``: log-probabilities of the sampled tokens. ``kind``: "k1", "k2" or "k3" (Schulman 2020,
    "Approximating KL divergence").
    """
    gap = logp - reference
    if kind == "k1":
        return gap
    if kind == "k2":
        return gap.square() / 2
    return finite_exp(-gap) - 1 + gap


def on_policy(logp: T, old: T, tokens: AnswerTokens, most: float) -> T:
    """Return 1 for each token whose answer counts, 0 for others, ``[tokens]`` (DeepSeek-V3.2's sequence mask).

    An answer does not count if its advantage is negative and its mean log-probability per token under the sampler
    exceeds that under the model by more than ``most``. ``logp`` and ``old``: log-probabilities of the tokens under the
    model and under the policy before the update; ``old`` is used where the sampler's are unknown.
    """
    sampler = tokens.numbers.sampler
    sampler = torch.where(sampler.isnan(), old, sampler)
    drift = tokens.means((sampler - logp).detach())
    return ((tokens.numbers.advantage >= 0) | (drift <= most)).to(logp.dtype)
